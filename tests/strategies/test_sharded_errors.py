"""What `ShardedStrategy` refuses, on all ranks, and what the sentence tells the user to do."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_lowbw import (
    DGC,
    AdaptiveLocalSGD,
    ConfigurationError,
    LocalSGD,
    Method,
    NarrowGradients,
    NonFiniteGradientError,
    ShardedStrategy,
)
from lightning_lowbw.engine.presets import preset
from tests.engine.problem import each
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Configured, Plain, train
from tests.tiny import sgd

DENSE = preset("hierarchical")

KEYWORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "search": (lambda: ShardedStrategy(DENSE, find_unused_parameters=True), "need not: they have no gradient. Leave"),
    "static graph": (lambda: ShardedStrategy(DENSE, static_graph=True), "has no DDP. Leave it out"),
    "unknown": (lambda: ShardedStrategy(DENSE, shards=2), "unknown keyword. Allowed: method, topology"),
    "offloaded gradients": (lambda: ShardedStrategy(DGC(sparsity=[0.9]), offload_state=True), "state in every step"),
    "offload": (lambda: ShardedStrategy(LocalSGD(k_steps=2), offload_state=1), "give True or False"),
    "auto sparsity": (lambda: ShardedStrategy(DGC(sparsity="auto")), "Give the numbers, as in DGC(sparsity=[0.99]"),
    "delay": (lambda: ShardedStrategy(LocalSGD(delay_steps="auto")), "Give a number of steps"),
    "rule": (lambda: ShardedStrategy(AdaptiveLocalSGD(rule="fleet")), "Take 'fixed' or 'qsr'"),
    "fragments": (
        lambda: ShardedStrategy(preset("streaming_diloco").replace(delay_steps=1)),
        "parts are balanced by bytes",
    ),
    "flat": (lambda: ShardedStrategy(DENSE, topology="flat"), "a model is sharded over the ranks of a node. Give"),
    "tensor parallel": (lambda: ShardedStrategy(DENSE, tensor_parallel_size=0), "give an integer >= 1"),
    "blocks": (lambda: ShardedStrategy(DENSE, blocks="Block"), "blocks=['Block']"),
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


class TensorParallelOnly(Configured):
    def configure_model(self) -> None:
        self.make()
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel()})
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net[2], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net[3], mesh=self.device_mesh["data_parallel"])


SWA = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
FITS: dict[str, tuple[type[Plain], dict[str, Any], Any, str]] = {
    "unequal nodes": (Configured, {"topology": [[0, 1, 2], [3]]}, sgd, "Start as many ranks on each"),
    "not all ranks": (Configured, {"topology": 3}, sgd, "4 ranks cannot be divided into nodes of"),
    "tensor parallel size": (Configured, {"tensor_parallel_size": 3}, sgd, "does not divide the 2 ranks of a node"),
    "over the world": (WholeWorld, {}, sgd, 'mesh=self.device_mesh["data_parallel"]'),
    "unsharded": (HalfSharded, {}, sgd, "'head.weight' is not sharded: its gradient would be that of this rank alone"),
    "no average": (TensorParallelOnly, {"topology": 4, "tensor_parallel_size": 2}, sgd, "'net.0.weight' is sharded by"),
    "blocks": (Plain, {"blocks": ["Block"]}, sgd, "no layer of class Block; its classes are LayerNorm, Linear"),
    "blocks and own": (Configured, {"blocks": ["Linear"]}, sgd, "Configured shards itself in configure_model"),
    "averaging of weights": (Configured, {"callbacks": [SWA]}, sgd, "StochasticWeightAveraging: it averages copies of"),
    "LBFGS": (Configured, {}, functools.partial(torch.optim.LBFGS, lr=0.1), "LBFGS"),
}


def refused(name: str) -> str:
    cls, options, optimizer, _ = FITS[name]
    model, of_trainer = cls(optimizer), {"callbacks": options.get("callbacks")}
    strategy = ShardedStrategy(DENSE, **{"topology": 2, **{k: v for k, v in options.items() if k not in of_trainer}})
    try:
        train(strategy, model, 2, 4, dist.get_rank(), **of_trainer)
    except ConfigurationError as error:
        return str(error)
    return "trained"


def test_what_a_fit_refuses_on_all_ranks() -> None:
    for name, *messages in zip(FITS, *run_ranks(each, 4, refused, [(name,) for name in FITS]), strict=True):
        for message in messages:
            assert FITS[name][3] in message, (name, messages)


class Large(Configured):
    """Two gradients of one shard, one after another, that are finite, and whose sum is not."""

    def __init__(self, since: int, path: str = "") -> None:
        super().__init__(functools.partial(sgd, lr=0.0))  # the weights would overflow
        self.since, self.path = since, path

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step >= self.since:
            self.net[2].weight.grad.to_local().fill_(3e38)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.path and self.trainer.global_step == self.since + 2:
            self.trainer.save_checkpoint(self.path)


def add_up_too_much(since: int, path: str) -> tuple[str, bool]:
    strategy = ShardedStrategy(DGC(sparsity=[0.99], min_numel=1, rampup_begin_step=0), topology=2)
    try:
        train(strategy, Large(since, path), 4, 4, dist.get_rank())
    except NonFiniteGradientError as error:
        return str(error), os.path.exists(path)
    return "trained", False


@pytest.mark.fault("gradients of 3e38, which are finite, and whose sum with earlier ones is not")
def test_finite_gradients_whose_sum_is_not_are_told_by_a_shard(tmp_path: Any) -> None:
    """In the next step, at the end of the fit, or where it is saved, by all ranks: also those with another shard."""
    cases = [(1, ""), (2, ""), (1, str(tmp_path / "last.ckpt"))]
    for in_next, at_the_end, when_saved in run_ranks(each, 4, add_up_too_much, cases):
        for step, (said, is_saved) in ((3, in_next), (4, at_the_end), (3, when_saved)):
            assert f"Step {step}: the gradient of 'net.2.weight' on " in said
            assert "added to the residual, has become too large for float32" in said
            assert not is_saved
        assert "on rank 1, added" in at_the_end[0]
        assert "on a rank of node 0 (ranks [0, 1]), added" in in_next[0]


class LargeChange(Configured):
    """The gradient of one shard is 3e38 in the second step."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 1:
            self.net[2].weight.grad.to_local().fill_(3e38)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.path and self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.path)


def change_too_much(method: Method, steps: int, path: str) -> tuple[str, bool]:
    try:
        train(ShardedStrategy(method, topology=2), LargeChange(path), steps, 4, dist.get_rank())
    except NonFiniteGradientError as error:
        return str(error), os.path.exists(path)
    return "trained", os.path.exists(path)


@pytest.mark.fault("a change of the weights that overflows in the residual of an average in few bits")
def test_an_overflow_of_what_is_kept_of_changes_is_told_by_a_shard(tmp_path: Any) -> None:
    """Before the next average, at the end of the fit, or where it is saved, by all ranks; also of gradients."""
    local = LocalSGD(k_steps=2, begin_step=0, value_dtype="float16")
    cases = [
        (local, 4, ""),
        (local, 2, ""),
        (local, 4, str(tmp_path / "last.ckpt")),
        (NarrowGradients("float16"), 4, ""),
    ]
    for *of_changes, (of_gradients, _) in run_ranks(each, 4, change_too_much, cases):
        assert (
            "Step 2: what was kept of earlier gradients on a rank of node 0 (ranks [0, 1]) has become" in of_gradients
        )
        for step, (said, is_saved) in zip((4, 2, 2), of_changes, strict=True):
            assert (
                f"Step {step}: what was kept of earlier changes of the weights on rank 1 has become too large" in said
            )
            assert not is_saved


class Failing(pl.Callback):
    """Fails in the middle of the fit."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ValueError("no more")


def saved_after_a_failure(path: str) -> bool:
    model = Configured(sgd)
    with pytest.raises(ValueError, match="no more"):
        train(
            ShardedStrategy(DENSE, topology=2), model, 4, 4, dist.get_rank(), callbacks=[Failing(), SaveAtTheEnd(path)]
        )
    return os.path.exists(path)


class SaveAtTheEnd(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_nothing_is_saved_after_an_exception(tmp_path: Any) -> None:
    assert run_ranks(saved_after_a_failure, 4, str(tmp_path / "last.ckpt")) == [False] * 4
