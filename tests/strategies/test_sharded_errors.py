"""What `ShardedStrategy` refuses on all ranks, what happens when something ends, and the resume of its checkpoints.

That the same nodes resume to the bit is in `tests/golden`.
"""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_lowbw as lowbw
from lightning_lowbw.presets import SPARSE_LOCO
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import At, Noted, refusal, saving
from tests.strategies.sharded_models import ByStep, Configured, Plain, distance, shard_digest, train_shards, whole
from tests.tiny import sgd

DENSE = lowbw.Hierarchical()

Sharded = lowbw.ShardedStrategy


class WholeWorld(Configured):
    """Shards over all nodes."""

    def configure_model(self) -> None:
        self.make()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (self.net, self.head, self.frozen):
            fully_shard(layer, mesh=mesh)


class HalfSharded(Configured):
    """Forgets its head."""

    def configure_model(self) -> None:
        self.make()
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


SWA = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
FITS: list[tuple[type[Plain], Any, list[pl.Callback], str]] = [
    (Configured, [[0, 1, 2], [3]], [], "Start the same number of ranks on each node"),
    (WholeWorld, 2, [], "is sharded over ranks [0, 1, 2, 3], and this node has "),
    (HalfSharded, 2, [], "'head.weight' is sharded over ranks [], and this node has "),
    (Configured, 2, [SWA], "StochasticWeightAveraging: it averages copies of"),
]


@on_ranks(4)
def test_what_a_fit_refuses_on_all_ranks() -> None:
    for cls, topology, callbacks, words in FITS:
        strategy = Sharded(DENSE, topology=topology)
        assert words in refusal(strategy, cls(), 2, fit=train_shards, callbacks=callbacks)


class Large(Configured):
    """Gradients of one shard that are finite, and make its residual too large."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        super().__init__(functools.partial(sgd, lr=0.0 if len(steps) > 1 else 0.05))  # else the weights overflow
        self.steps = steps

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step in self.steps:
            self.net[2].weight.grad.to_local().fill_(3e38)


SPARSE = lowbw.DGC(sparsity=[0.99], min_numel=1, rampup_begin_step=0)
HALF = lowbw.LocalSGD(k_steps=2, begin_step=0, compression="float16")
ON_NODE = "on node 0 (ranks [0, 1])"
KEPT = "what was kept of earlier"
# The method; in which of four steps the gradient is large; after which the weights are saved; words of the error.
OVERFLOWS: dict[str, tuple[lowbw.Method, tuple[int, ...], int, str]] = {
    "at the end": (SPARSE, (2, 3), 9, f"Step 4: {KEPT} gradients {ON_NODE} has become too large"),
    "when saved, of weights": (HALF, (1,), 2, f"Step 2: {KEPT} changes of the weights {ON_NODE} has become too large"),
}


@pytest.mark.fault
@on_ranks(4, timeout_s=90.0)
def test_an_overflow_in_a_shard_is_told_by_all_ranks(tmp_path: Path) -> None:
    """Also by ranks with another shard."""
    for name, (method, large, save_at, words) in OVERFLOWS.items():
        options = {"error": lowbw.NonFiniteGradientError, "callbacks": [saving(f"{tmp_path}/{name}", (save_at,))]}
        assert words in refusal(method, Large(large), 4, fit=train_shards, **options), name
    assert not list(tmp_path.iterdir())


# Ends ---------------------------------------------------------------------------------------------------------------

STEPS, KILLED_AFTER = 8, 3
CHANGES = {**SPARSE_LOCO, "min_numel": 50, "density": 0.1}
METHODS = {
    "dgc": lowbw.DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=50),
    "hidden": lowbw.LocalSGD(k_steps=4, begin_step=0, delay_steps=1),
    "sparse_loco": lowbw.LocalSGD(k_steps=2, begin_step=0, compression=CHANGES),
}


def strategy_of(name: str, **kwargs: Any) -> lowbw.ShardedStrategy:
    return Sharded(METHODS[name], **{"topology": 2, **kwargs})


def kill_the_last() -> At:
    return At(KILLED_AFTER, lambda *_: os.kill(os.getpid(), signal.SIGTERM), ranks=(dist.get_world_size() - 1,))


@pytest.mark.fault
@pytest.mark.parametrize(("name", "whole_file", "step"), [("dgc", True, 4), ("hidden", False, 5)])
@on_ranks(4)
def test_a_sigterm_ends_all_and_saves_all_shards(name: str, whole_file: bool, step: int, tmp_path: Path) -> None:
    def fit(model: ByStep, **options: Any) -> None:
        train_shards(strategy_of(name, save_distributed_checkpoint=not whole_file), model, STEPS, **options)

    straight, killed, resumed = (ByStep(sgd) for _ in range(3))
    fit(straight)
    callbacks = [kill_the_last(), OnExceptionCheckpoint(tmp_path, name)]
    refusal(killed, fit=fit, error=SIGTERMException, callbacks=callbacks, enable_checkpointing=True)
    begun = Noted(lambda module: module.trainer.global_step, "on_train_start")
    fit(resumed, callbacks=[begun], resume=f"{tmp_path}/{name}.ckpt")
    assert begun.values == [step]
    assert shard_digest(straight) == shard_digest(resumed)


@on_ranks(2)
def test_a_sigterm_ends_a_single_node_a_step_later() -> None:
    """The status has arrived by then."""
    model, options = ByStep(sgd), {"error": SIGTERMException, "callbacks": [kill_the_last()]}
    refusal(METHODS["dgc"], model, STEPS, fit=train_shards, **options)
    assert model.trainer.global_step == 5


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
    weights, _ = go_on(lowbw.Strategy(METHODS["dgc"]), f"{folder}/dgc.ckpt", Plain)
    assert distance(weights, before[0]["dgc"][0]) == 0.0


# Overwriting --------------------------------------------------------------------------------------------------------


def fit(path: str, saves: tuple[int, ...], *, is_folder: bool = True, resume: str | None = None) -> tuple[str, int]:
    """Train, saving to one path; return the weights, and the step that it began with."""
    model, begun = ByStep(sgd), Noted(lambda module: module.trainer.global_step, "on_train_start")
    strategy = strategy_of("dgc", save_distributed_checkpoint=is_folder)
    train_shards(strategy, model, STEPS, resume=resume, callbacks=[begun, saving(path, saves)])
    return shard_digest(model), begun.values[0]


@on_ranks(4, timeout_s=90)
def test_a_checkpoint_is_overwritten(tmp_path: Path) -> None:
    """A file by folders."""
    path = tmp_path / "last.ckpt"
    expected, _ = fit(str(path), (1,), is_folder=False)
    fit(str(path), (3, 5))
    assert fit("", (), resume=str(path)) == (expected, 5)
    dist.barrier()
    assert path.is_dir()
