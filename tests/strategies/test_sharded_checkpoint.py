"""Checkpoints of sharded models: resumed by more nodes, by other strategies, overwritten.

That the same nodes resume to the bit is in `tests/golden`, and after a SIGTERM in `test_sharded_errors.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ShardedStrategy, Strategy
from lightning_lowbw.compress.top_k import SPARSE_LOCO
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.presets import DGC, LocalSGD
from lightning_lowbw.strategies.checkpoint import BEFORE, PART
from tests.ranks import run_ranks
from tests.strategies.sharded_models import ByStep, Plain, distance, shard_digest, train, whole
from tests.sync.problem import each, message_of
from tests.tiny import Watcher, sgd

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


def save(name: str, path: str, whole_file: bool) -> Kept:
    """Train; return the weights that were saved, and what this rank's shards keep back."""
    model = ByStep(sgd)
    strategy = strategy_of(name, save_distributed_checkpoint=not whole_file)
    train(strategy, model, STEPS, 4, dist.get_rank(), callbacks=[Watcher(path, (STEPS,))])
    return whole(model), residuals_of(strategy.workers[0])


class Look(pl.Callback):
    """Keep what a rank begins with."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.kept = whole(module), residuals_of(trainer.strategy.workers[0])  # type: ignore[attr-defined]


def go_on(name: str, path: str, topology: int) -> Kept:
    look = Look()
    options = {"ckpt_path": path, "callbacks": [look], "max_steps": STEPS + 1}
    train(strategy_of(name, topology=topology), ByStep(sgd), 2 * STEPS, 4, 0, **options)
    return look.kept


def as_ddp(path: str) -> dict[str, Tensor]:
    look = Look()
    options = {"ckpt_path": path, "callbacks": [look], "max_steps": STEPS + 1}
    train(Strategy(METHODS["dgc"]), Plain(sgd), 2 * STEPS, 4, 0, **options)
    return look.kept[0]


SAVED_BY = {"dgc": True, "sparse_loco": False}  # with two nodes of two; whether into one file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Kept]]]:
    """Return the folder of the checkpoints, and what each rank had, by method."""
    folder = tmp_path_factory.mktemp("saved")
    cases = [(name, f"{folder}/{name}-{{}}.ckpt", whole_file) for name, whole_file in SAVED_BY.items()]
    return folder, dict(zip(SAVED_BY, zip(*run_ranks(each, 4, save, cases), strict=True), strict=True))  # type: ignore[arg-type]


def go_on_elsewhere(folder: str) -> tuple[dict[str, Kept], str | None]:
    """Go on with three nodes of two; return what each method begins with, and why two nodes of three do not."""
    kept = {name: go_on(name, f"{folder}/{name}-{STEPS}.ckpt", 2) for name in SAVED_BY}
    return kept, message_of(lambda: go_on("dgc", f"{folder}/dgc-{STEPS}.ckpt", 3), ConfigurationError)


def test_another_number_of_nodes_begins_with_the_mean_and_another_size_is_refused(saved: Any) -> None:
    folder, before = saved
    for rank, (found, message) in enumerate(run_ranks(go_on_elsewhere, 6, str(folder), timeout_s=120.0)):
        assert "was written by nodes of 2 ranks, and these have 3" in str(message)
        for name, (of_model, taken) in found.items():
            assert distance(of_model, before[name][0][0]) == 0.0
            one, other = before[name][rank % 2][1], before[name][2 + rank % 2][1]
            assert taken.keys() == one.keys()
            for tensor, residual in taken.items():
                assert torch.equal(residual, (one[tensor] + other[tensor]) / 2)


def test_a_whole_file_is_for_any_strategy(saved: Any) -> None:
    folder, before = saved
    for weights in run_ranks(as_ddp, 2, f"{folder}/dgc-{STEPS}.ckpt"):
        assert distance(weights, before["dgc"][0][0]) == 0.0


# Overwriting --------------------------------------------------------------------------------------------------------


class Saves(pl.Callback):
    """Save to one path after some steps; note the step that the training begins with."""

    def __init__(self, path: str, steps: tuple[int, ...]) -> None:
        self.path, self.steps = path, steps

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.begin = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.path)


def fit(path: str, saves: tuple[int, ...], *, is_folder: bool = True, resume: str | None = None) -> tuple[str, int]:
    """Train; return the weights, and the step that it began with."""
    model, callback = ByStep(sgd), Saves(path, saves)
    strategy = strategy_of("dgc", save_distributed_checkpoint=is_folder)
    train(strategy, model, STEPS, 4, dist.get_rank(), ckpt_path=resume, callbacks=[callback])
    return shard_digest(model), callback.begin


def overwrite(path: str) -> tuple[tuple[str, int], str, str]:
    """Overwrite a file by folders; resume; try to overwrite a folder of the user's."""
    expected, _ = fit(path, (1,), is_folder=False)
    fit(path, (3, 5))
    with pytest.raises(ConfigurationError) as caught:
        fit(f"{path}.mine", (1,))
    return fit("", (), resume=path), expected, str(caught.value)


def test_a_checkpoint_is_overwritten_and_other_folders_are_not(tmp_path: Path) -> None:
    path, mine = tmp_path / "last.ckpt", tmp_path / "last.ckpt.mine"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    for resumed, expected, refusal in run_ranks(overwrite, 4, str(path), timeout_s=90):
        assert resumed == (expected, 5)
        assert "is a folder, and no checkpoint" in refusal
    assert path.is_dir()
    assert os.listdir(mine) == ["mine.txt"]
    names = os.listdir(f"{path}.ranks")
    assert len(names) == 4
    assert not {PART, BEFORE}.intersection(names)
