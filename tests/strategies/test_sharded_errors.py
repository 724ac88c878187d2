"""What `ShardedStrategy` refuses, on all ranks, and what happens when something ends."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbw import (
    DGC,
    AdaptiveLocalSGD,
    ConfigurationError,
    DisagreementError,
    LocalSGD,
    Method,
    NonFiniteGradientError,
    ShardedStrategy,
)
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Topology, make_node_mesh
from lightning_lowbw.presets import preset
from lightning_lowbw.sync.local_view import agree_in_node
from tests.programs import free_port
from tests.ranks import run_ranks
from tests.strategies.sharded_models import ByStep, Configured, Plain, shard_digest, train
from tests.sync.problem import each
from tests.tiny import sgd

DENSE = preset("hierarchical")

KEYWORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown": (lambda: ShardedStrategy(DENSE, static_graph=True), "static_graph'. Its arguments are: method, topol"),
    "auto sparsity": (lambda: ShardedStrategy(DGC(sparsity="auto")), "Give the numbers: DGC(sparsity=[0.99]"),
    "rule": (lambda: ShardedStrategy(AdaptiveLocalSGD(rule="fleet")), "Take 'fixed' or 'qsr'"),
    "fragments": (lambda: ShardedStrategy(LocalSGD(4, num_fragments=2)), "parts are balanced by bytes"),
    "flat": (lambda: ShardedStrategy(DENSE, topology="flat"), "a model is sharded over the ranks of a node. Give"),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_what_the_constructor_refuses(name: str) -> None:
    make, said = KEYWORDS[name]
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        make()


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
FITS: dict[str, tuple[type[Plain], dict[str, Any], str]] = {
    "unequal nodes": (Configured, {"topology": [[0, 1, 2], [3]]}, "Start as many ranks on each"),
    "over the world": (WholeWorld, {}, "is sharded over ranks [0, 1, 2, 3], and this node has "),
    "unsharded": (HalfSharded, {}, "'head.weight' is sharded over ranks [], and this node has "),
    "averaging of weights": (Configured, {"callbacks": [SWA]}, "StochasticWeightAveraging: it averages copies of"),
}


def refused(name: str) -> str:
    cls, options, _ = FITS[name]
    strategy = ShardedStrategy(DENSE, topology=options.get("topology", 2))
    with pytest.raises(ConfigurationError) as caught:
        train(strategy, cls(sgd), 2, 4, dist.get_rank(), callbacks=options.get("callbacks"))
    return str(caught.value)


def test_what_a_fit_refuses_on_all_ranks() -> None:
    for name, *messages in zip(FITS, *run_ranks(each, 4, refused, [(name,) for name in FITS]), strict=True):
        for message in messages:
            assert FITS[name][2] in message, (name, messages)


class Large(Configured):
    """Gradients of one shard that are finite, and become too large for what is kept of them."""

    def __init__(self, steps: tuple[int, ...], save_at: int, path: str) -> None:
        super().__init__(functools.partial(sgd, lr=0.0 if len(steps) > 1 else 0.05))  # else the weights overflow
        self.steps, self.save_at, self.path = steps, save_at, path

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step in self.steps:
            self.net[2].weight.grad.to_local().fill_(3e38)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == self.save_at:
            self.trainer.save_checkpoint(self.path)


SPARSE = DGC(sparsity=[0.99], min_numel=1, rampup_begin_step=0)
HALF = LocalSGD(k_steps=2, begin_step=0, compression="float16")
ON_NODE = "on node 0 (ranks [0, 1])"
SUM, CHANGES = "the gradient of 'net.2.weight'", "what was kept of earlier changes of the weights"
# The method; in which of four steps the gradient is large; after which the weights are saved; what is said.
OVERFLOWS: dict[str, tuple[Method, tuple[int, ...], int, str]] = {
    "in the next step": (SPARSE, (1, 2), 9, f"Step 3: {SUM} {ON_NODE}, added to the residual"),
    "at the end": (SPARSE, (2, 3), 9, f"Step 4: {SUM} {ON_NODE}, added to the residual"),
    "when saved": (SPARSE, (1, 2), 3, f"Step 3: {SUM} {ON_NODE}, added to the residual"),
    "before the next average": (HALF, (1,), 9, f"Step 4: {CHANGES} {ON_NODE} has become too large"),
    "when saved, of weights": (HALF, (1,), 2, f"Step 2: {CHANGES} {ON_NODE} has become too large"),
}


def overflow(name: str, path: str) -> str:
    method, large, save_at, _ = OVERFLOWS[name]
    with pytest.raises(NonFiniteGradientError) as caught:
        train(ShardedStrategy(method, topology=2), Large(large, save_at, path), 4, 4, dist.get_rank())
    assert not os.path.exists(path)
    return str(caught.value)


@pytest.mark.fault("gradients of 3e38, which are finite, and whose sum with earlier ones is not")
def test_an_overflow_in_a_shard_is_told_by_all_ranks(tmp_path: Any) -> None:
    """Also by those with another shard."""
    cases = [(name, str(tmp_path / name)) for name in OVERFLOWS]
    for (name, _), *messages in zip(cases, *run_ranks(each, 4, overflow, cases, timeout_s=90.0), strict=True):
        for message in messages:
            assert OVERFLOWS[name][3] in message, (name, messages)


# What ends ----------------------------------------------------------------------------------------------------------

STEPS, KILLED_AFTER = 8, 3
METHODS = {
    "dgc": DGC(sparsity=[0.9], min_numel=50),
    "hidden": LocalSGD(k_steps=4, begin_step=0, delay_steps=1),
}


class KillAfter(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == KILLED_AFTER and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def kill_and_resume(name: str, folder: str, whole_file: bool) -> tuple[int, bool]:
    """Return the step at which a rank ended, and whether a run that was resumed there ends with the same bits."""
    digests, begun = [], []
    look = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, _: begun.append(trainer.global_step))

    def fit(**kwargs: Any) -> None:
        model = ByStep(sgd)
        strategy = ShardedStrategy(METHODS[name], topology=2, save_distributed_checkpoint=not whole_file)
        train(strategy, model, STEPS, 4, dist.get_rank(), **kwargs)
        digests.append(shard_digest(model))

    fit()
    with pytest.raises(SIGTERMException):
        fit(callbacks=[KillAfter(), OnExceptionCheckpoint(folder, name)], enable_checkpointing=True)
    fit(ckpt_path=f"{folder}/{name}.ckpt", callbacks=[look])
    return begun[0], digests[0] == digests[1]


@pytest.mark.fault(
    "SIGTERM on one rank of a sharded model",
    "all end after the same step; `OnExceptionCheckpoint` saves a complete checkpoint, which resumes to the bit",
)
@pytest.mark.parametrize(("name", "whole_file", "step"), [("dgc", True, 4), ("hidden", False, 5)])
def test_a_sigterm_ends_all_and_saves_all_shards(name: str, whole_file: bool, step: int, tmp_path: Path) -> None:
    assert run_ranks(kill_and_resume, 4, name, str(tmp_path), whole_file) == [(step, True)] * 4


def kill_on_one_node() -> int:
    model = ByStep(sgd)
    with pytest.raises(SIGTERMException):
        train(ShardedStrategy(METHODS["dgc"], topology=2), model, STEPS, 2, dist.get_rank(), callbacks=[KillAfter()])
    return model.trainer.global_step


def test_a_sigterm_ends_a_single_node_a_step_later() -> None:
    """What it is read from has arrived by then."""
    assert run_ranks(kill_on_one_node, 2) == [5, 5]


NODES = ((0, 1), (2, 3))


def take_steps(method: Method, skips: bool) -> list[Any]:
    """Return after which of four steps this rank stops and saves, as rank 3 requests in the second; or the error."""
    rank, found, parameter = dist.get_rank(), list[Any](), Parameter(torch.ones(8))
    mesh = make_node_mesh(Topology(NODES), rank, "cpu", None)
    peers = Peers(mesh.peers(), nodes=NODES)
    worker = method.make_synchronizer(SGD([parameter], lr=0.1, momentum=0.9), [("shard", parameter)], peers, {})
    for step in range(4):
        worker.batch = step + (skips and rank == 1 and step > 0)
        if rank == 3 and step == 1:
            worker.stop_requested = worker.save_requested = True
        parameter.grad = torch.ones(8)
        try:
            with worker.stepping():
                worker.prepare()
                agree_in_node(worker, mesh.node())
                worker.exchange()
        except DisagreementError as error:
            return [str(error)]
        found.append((worker.stop_agreed, worker.save_agreed))
        worker.save_agreed = False
    return found


def test_all_nodes_are_told_what_one_shard_has() -> None:
    """A request after the same step, and once; and that the ranks of one node are at different batches."""
    methods = SPARSE, LocalSGD(k_steps=4, begin_step=8)  # whose synchronous steps are read a step late
    cases = [(method, skips) for skips in (False, True) for method in methods]
    (*stopped, sparse, late), *others = run_ranks(each, 4, take_steps, cases)
    assert all(other == [*stopped, sparse, late] for other in others)
    nothing, both, stop = (False, False), (True, True), (True, False)
    assert stopped == [[nothing, both, stop, stop], [nothing, nothing, both, stop]]
    assert "batch: rank 0 has 1, rank 1 has 2, rank 2 has 1, rank 3 has 1" in sparse[0]
    assert "batch: rank 0 has 2, rank 1 has 3, rank 2 has 2, rank 3 has 2" in late[0]


class FailsOnTheLastRank(pl.Callback):
    """Fails in the middle of the fit; a callback saves then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no such file")

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def lose_a_rank(port: int, path: str) -> tuple[str, float]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()  # that of the tests has no server
    os.environ.update(MASTER_PORT=str(port), GROUP_RANK=str(rank // 2))
    begin, strategy = time.monotonic(), ShardedStrategy(METHODS["dgc"], topology=2, timeout=3)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        train(strategy, Configured(sgd), STEPS, num_ranks, rank, callbacks=[FailsOnTheLastRank(path)])
    seconds = time.monotonic() - begin
    assert not os.path.exists(path)
    if dist.is_initialized():
        dist.destroy_process_group()
    return str(caught.value), seconds


@pytest.mark.fault("a rank that raises an error of its own")
def test_a_rank_that_fails_is_named_on_all_and_nothing_is_saved(record_property: Any, tmp_path: Path) -> None:
    *others, (own, _) = run_ranks(lose_a_rank, 4, free_port(), str(tmp_path / "last.ckpt"), timeout_s=60.0)
    assert own == "no such file"
    for message, seconds in others:
        assert "rank 3 (node 1, host " in message
        assert "has failed: ValueError in the training after step 3: no such file" in message
        assert seconds < 30.0
        record_property("seconds", seconds)
