"""Checkpoints of sharded models: resumed by more nodes, by other strategies, overwritten.

That the same nodes resume to the bit is in `tests/golden`, and after a SIGTERM in `test_sharded_errors.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ShardedStrategy, Strategy
from lightning_lowbw.presets import DGC, SPARSE_LOCO, LocalSGD
from lightning_lowbw.strategies.checkpoint import PART
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import Noted, refusal, saving
from tests.strategies.sharded_models import ByStep, Plain, distance, shard_digest, train_shards, whole
from tests.tiny import sgd

STEPS = 8
METHODS = {
    "dgc": DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=50),
    "sparse_loco": LocalSGD(k_steps=2, begin_step=0, compression={**SPARSE_LOCO, "min_numel": 50, "density": 0.1}),
}


def strategy_of(name: str, **kwargs: Any) -> ShardedStrategy:
    return ShardedStrategy(METHODS[name], **{"topology": 2, **kwargs})


# Other nodes --------------------------------------------------------------------------------------------------------

Kept = tuple[dict[str, Tensor], dict[str, Tensor]]  # weights, and residuals


def residuals_of(worker: Any) -> dict[str, Tensor]:
    return {name: residual.clone() for name, residual in worker.compressed.residuals.items()}


def save(folder: str) -> dict[str, Kept]:
    """Train; return the weights that were saved by each method, and what this rank's shards keep back."""
    kept = {}
    for name, whole_file in SAVED_BY.items():
        model, strategy = ByStep(sgd), strategy_of(name, save_distributed_checkpoint=not whole_file)
        train_shards(strategy, model, STEPS, callbacks=[saving(f"{folder}/{name}.ckpt", (STEPS,))])
        kept[name] = whole(model), residuals_of(strategy.workers[0])
    return kept


def go_on(strategy: Any, path: str, model: type[Plain] = ByStep) -> Kept:
    """Return what a rank begins with."""
    look = Noted(lambda module: (whole(module), residuals_of(module.trainer.strategy.workers[0])), "on_train_start")
    options = {"resume": path, "callbacks": [look], "max_steps": STEPS + 1}
    train_shards(strategy, model(sgd), 2 * STEPS, shares=(4, 0), **options)
    return look.values[0]  # type: ignore[no-any-return]


SAVED_BY = {"dgc": True, "sparse_loco": False}  # with two nodes of two; whether into one file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Kept]]]:
    """Return the folder of the checkpoints, and what each rank had, by method."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save, 4, str(folder))


@on_ranks(6, timeout_s=120.0)
def test_another_number_of_nodes_begins_with_the_mean_and_another_size_is_refused(saved: Any) -> None:
    """Three nodes of two ranks, and two nodes of three."""
    folder, before = saved
    for name in SAVED_BY:
        of_model, taken = go_on(strategy_of(name), f"{folder}/{name}.ckpt")
        assert distance(of_model, before[0][name][0]) == 0.0
        one, other = (before[node + dist.get_rank() % 2][name][1] for node in (0, 2))
        assert taken.keys() == one.keys()
        for tensor, residual in taken.items():
            assert torch.equal(residual, (one[tensor] + other[tensor]) / 2)
    message = refusal(strategy_of("dgc", topology=3), f"{folder}/dgc.ckpt", fit=go_on)
    assert "was written by nodes of 2 ranks, and these have 3" in message


@on_ranks(2)
def test_a_whole_file_is_for_any_strategy(saved: Any) -> None:
    folder, before = saved
    weights, _ = go_on(Strategy(METHODS["dgc"]), f"{folder}/dgc.ckpt", Plain)
    assert distance(weights, before[0]["dgc"][0]) == 0.0


# Overwriting --------------------------------------------------------------------------------------------------------


def fit(path: str, saves: tuple[int, ...], *, is_folder: bool = True, resume: str | None = None) -> tuple[str, int]:
    """Train, saving to one path; return the weights, and the step that it began with."""
    model, begun = ByStep(sgd), Noted(lambda module: module.trainer.global_step, "on_train_start")
    strategy = strategy_of("dgc", save_distributed_checkpoint=is_folder)
    train_shards(strategy, model, STEPS, resume=resume, callbacks=[begun, saving(path, saves)])
    return shard_digest(model), begun.values[0]


@on_ranks(4, timeout_s=90)
def test_a_checkpoint_is_overwritten_and_other_folders_are_not(tmp_path: Path) -> None:
    """A file by folders; and not a folder of the user's."""
    path, mine = tmp_path / "last.ckpt", tmp_path / "last.ckpt.mine"
    mine.mkdir(exist_ok=True)
    (mine / "mine.txt").write_text("mine")
    expected, _ = fit(str(path), (1,), is_folder=False)
    fit(str(path), (3, 5))
    assert "is a folder, and no checkpoint" in refusal(str(mine), (1,), fit=fit)
    assert fit("", (), resume=str(path)) == (expected, 5)
    dist.barrier()
    assert path.is_dir()
    assert os.listdir(mine) == ["mine.txt"]
    names = os.listdir(f"{path}.ranks")
    assert len(names) == 4
    assert PART not in names
