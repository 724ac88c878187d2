"""Checkpoints of sharded models: both formats, resumed to the bit, by other nodes, and by other strategies."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ShardedStrategy, Strategy
from lightning_lowbw.engine.presets import DGC, LocalSGD, preset
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.what.top_k import SPARSE_LOCO
from tests.engine.problem import each
from tests.ranks import run_ranks
from tests.strategies.sharded_models import ByStep, Plain, distance, shard_digest, train, whole
from tests.tiny import Watcher, sgd

STEPS, SAVED_AT = 8, 5
OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "adamw": functools.partial(torch.optim.AdamW, lr=1e-2)}
METHODS = {
    "dgc": DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=50),
    "local_sgd": LocalSGD(k_steps=3, begin_step=0),
    "diloco": LocalSGD(k_steps=2, begin_step=0, outer="nesterov"),
    "sparse_loco": LocalSGD(k_steps=2, begin_step=0, compression={**SPARSE_LOCO, "min_numel": 50, "density": 0.1}),
    "int8": preset("int8"),
}


def strategy_of(name: str, **kwargs: Any) -> ShardedStrategy:
    return ShardedStrategy(METHODS[name], **{"topology": 2, **kwargs})


def run(name: str, optimizer: str, path: str, whole_file: bool) -> dict[str, Any]:
    """Train with a save on the way, and once more from that."""
    kwargs = {"save_distributed_checkpoint": not whole_file}
    model = ByStep(OPTIMIZERS[optimizer])
    train(strategy_of(name, **kwargs), model, STEPS, 4, dist.get_rank(), callbacks=[Watcher(path, (SAVED_AT,))])
    expected = shard_digest(model)
    unwatched = ByStep(OPTIMIZERS[optimizer])
    train(strategy_of(name, **kwargs), unwatched, STEPS, 4, dist.get_rank())
    resumed = ByStep(OPTIMIZERS[optimizer])
    saved = path.format(SAVED_AT)
    trainer = train(strategy_of(name, **kwargs), resumed, STEPS, 4, dist.get_rank(), ckpt_path=saved)
    assert trainer.global_step == STEPS
    return {"watched": expected, "unwatched": shard_digest(unwatched), "resumed": shard_digest(resumed)}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("optimizer", "whole_file"), [("sgd", True), ("adamw", False)], ids=["file", "folder"])
def test_a_resume_is_the_same_to_the_bit(name: str, optimizer: str, whole_file: bool, tmp_path: Path) -> None:
    for result in run_ranks(run, 4, name, optimizer, str(tmp_path / "step-{}.ckpt"), whole_file):
        assert result["watched"] == result["unwatched"] == result["resumed"]
    saved = tmp_path / f"step-{SAVED_AT}.ckpt"
    assert saved.is_file() == whole_file
    assert len(os.listdir(f"{saved}.ranks")) == 4


def save(name: str, path: str, topology: int, whole_file: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train; return the weights that were saved, and what this rank's shards keep back."""
    model = ByStep(OPTIMIZERS["sgd"])
    strategy = strategy_of(name, topology=topology, save_distributed_checkpoint=not whole_file)
    train(strategy, model, STEPS, 4, dist.get_rank(), callbacks=[Watcher(path, (STEPS,))])
    (worker,) = strategy.workers
    return whole(model), {n: r.clone() for n, r in residuals_of(worker).items()}


def residuals_of(worker: Any) -> dict[str, Tensor]:
    sparse = worker.averaging.sparse if hasattr(worker, "averaging") else worker.sparse
    return {} if sparse is None else dict(sparse.residuals)


class Look(pl.Callback):
    """Keep what a rank begins with."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if not hasattr(self, "weights"):
            self.weights = whole(module)
            self.residuals = {n: r.clone() for n, r in residuals_of(trainer.strategy.workers[0]).items()}  # type: ignore


def go_on(name: str, path: str, topology: int, **kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]] | str:
    model, look = ByStep(OPTIMIZERS["sgd"]), Look()
    strategy = strategy_of(name, topology=topology, **kwargs)
    try:
        train(strategy, model, 2 * STEPS, 4, 0, ckpt_path=path, callbacks=[look], max_epochs=2)
    except ConfigurationError as error:
        return str(error)
    return look.weights, look.residuals


Kept = tuple[dict[str, Tensor], dict[str, Tensor]]  # weights, and residuals
SAVED_BY = {"dgc": True, "sparse_loco": False, "diloco": True}  # with two nodes of two; whether into one file
OTHERS = [(6, 2), (2, 2), (4, 1), (6, 3)]  # ranks, and how many a node has


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], list[Kept]]:
    """Save with each method, and go on with other nodes; by method, ranks and ranks of a node, for each rank."""
    folder = tmp_path_factory.mktemp("saved")
    cases = [(name, f"{folder}/{name}-{{}}.ckpt", 2, whole_file) for name, whole_file in SAVED_BY.items()]
    found: dict[tuple[Any, ...], list[Kept]] = {}
    for name, of_ranks in zip(SAVED_BY, zip(*run_ranks(each, 4, save, cases), strict=True), strict=True):
        found[name, 4, 2] = list(of_ranks)
    for num_ranks in dict.fromkeys(num for num, _ in OTHERS):
        worlds = [(name, num_ranks, size) for num, size in OTHERS if num == num_ranks for name in SAVED_BY]
        goings = [(name, f"{folder}/{name}-{STEPS}.ckpt", size) for name, _, size in worlds]
        # Fresh ones: torch keeps what it knows of a mesh of ranks 0 and 1 over the end of a world.
        results = run_ranks(each, num_ranks, go_on, goings, fresh=True)
        found |= {world: list(of_ranks) for world, of_ranks in zip(worlds, zip(*results, strict=True), strict=True)}
    return found


def of_node(kept: list[Any], name: str, ranks: list[int], like: Tensor) -> Tensor:
    """Return what the ranks of a node keep of a tensor, put together; a shard without rows keeps nothing."""
    parts = [kept[rank].get(name, torch.zeros(0)).reshape(-1) for rank in ranks]
    whole = torch.cat(parts)
    assert whole.numel() == like.numel()
    return whole


@pytest.mark.parametrize(("num_ranks", "size"), OTHERS)
@pytest.mark.parametrize("name", SAVED_BY)
def test_other_nodes_take_their_rows_of_the_mean(
    name: str, num_ranks: int, size: int, resumed: dict[tuple[Any, ...], list[Kept]]
) -> None:
    """By nodes of other numbers of ranks, too, whose shards have other and no rows."""
    weights, kept = resumed[name, 4, 2][0][0], [rank[1] for rank in resumed[name, 4, 2]]
    assert (kept[0] == {}) == (name == "diloco")
    for result in resumed[name, num_ranks, size]:
        assert not isinstance(result, str), result
        assert distance(result[0], weights) == 0.0
    taken = [rank[1] for rank in resumed[name, num_ranks, size]]
    for tensor in {tensor: None for rank in kept for tensor in rank}:
        like = weights[tensor]
        mean = (of_node(kept, tensor, [0, 1], like) + of_node(kept, tensor, [2, 3], like)) / 2
        for first in range(0, num_ranks, size):
            assert torch.equal(of_node(taken, tensor, list(range(first, first + size)), like), mean)


def save_alone(path: str) -> None:
    model = ByStep(OPTIMIZERS["sgd"])
    train(
        strategy_of("dgc", tensor_parallel_size=2),
        model,
        STEPS,
        4,
        dist.get_rank(),
        callbacks=[Watcher(path, (STEPS,))],
    )


def test_shards_of_tensor_parallelism_are_refused_or_go_on_without(tmp_path: Path) -> None:
    run_ranks(save_alone, 4, str(tmp_path / "{}.ckpt"))
    path = str(tmp_path / f"{STEPS}.ckpt")
    for refusal in run_ranks(go_on, 4, "dgc", path, 2):
        assert "nodes of 1 data-parallel x 2 tensor-parallel ranks" in refusal
        assert "resume='weights and optimizer'" in refusal
    alone = functools.partial(go_on, resume="weights and optimizer")
    for _, residuals in run_ranks(alone, 4, "dgc", path, 2):
        assert residuals == {}


def as_ddp(path: str) -> dict[str, Tensor]:
    model, look = Plain(OPTIMIZERS["sgd"]), Look()
    strategy = Strategy(METHODS["dgc"], resume="exact")
    train(strategy, model, 2 * STEPS, 4, 0, ckpt_path=path, callbacks=[look], max_epochs=2)
    return look.weights


def test_a_whole_file_is_for_any_strategy(tmp_path: Path) -> None:
    saved = run_ranks(save, 4, "dgc", str(tmp_path / "{}.ckpt"), 2, True)
    for weights in run_ranks(as_ddp, 2, str(tmp_path / f"{STEPS}.ckpt")):
        assert distance(weights, saved[0][0]) == 0.0
