"""Models sharded inside nodes of two ranks: the same trainings as without shards, and what the nodes send."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ShardedStrategy, Strategy
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import DGC, LocalSGD, NarrowGradients, preset
from lightning_lowbw.what.top_k import SPARSE_LOCO
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Configured, Plain, distance, shard_digest, train, whole
from tests.tiny import sgd

STEPS = 6
OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "adamw": functools.partial(torch.optim.AdamW, lr=1e-2)}


def sharded(
    method: Method | str, module: type[Plain] = Plain, optimizer: str = "sgd", **trainer: Any
) -> tuple[dict[str, Tensor], str]:
    model = module(OPTIMIZERS[optimizer])
    strategy = method if isinstance(method, str) else ShardedStrategy(method, topology=2)
    train(strategy, model, STEPS, 4, dist.get_rank(), **trainer)
    return whole(model), shard_digest(model)


def alone(strategy: Any, optimizer: str = "sgd", **trainer: Any) -> dict[str, Tensor]:
    """Train without shards, each rank on an equal share of the same batches."""
    model = Plain(OPTIMIZERS[optimizer])
    strategy = Strategy(strategy) if isinstance(strategy, Method) else strategy
    train(strategy, model, STEPS, dist.get_world_size(), dist.get_rank(), **trainer)
    return whole(model)


def check_equal(results: list[tuple[dict[str, Tensor], str]], expected: dict[str, Tensor], tolerance: float) -> None:
    for weights, _ in results:
        assert distance(weights, expected) < tolerance
    digests = [digest for _, digest in results]
    assert digests[0] == digests[2] != digests[1] == digests[3]


@pytest.mark.parametrize("module", [Plain, Configured])
@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_dense_exchange_is_ddp(module: type[Plain], trainer: dict[str, Any]) -> None:
    results = run_ranks(functools.partial(sharded, **trainer), 4, preset("hierarchical"), module)
    expected = run_ranks(functools.partial(alone, **trainer), 4, "ddp")[0]
    check_equal(results, expected, 1e-6)


LOCAL = {
    "local_sgd": LocalSGD(k_steps=2),
    "diloco": LocalSGD(k_steps=2, begin_step=0, outer="nesterov"),
    "delayed": LocalSGD(k_steps=3, begin_step=0, delay_steps=1),
    "averaged momentum": LocalSGD(k_steps=2, begin_step=0, inner_momentum="average"),
    "all of the changes": LocalSGD(
        k_steps=2, begin_step=0, compression={**SPARSE_LOCO, "density": 0.999, "value_dtype": "float32", "min_numel": 1}
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", LOCAL)
def test_a_node_is_one_worker_of_local_sgd(name: str, optimizer: str) -> None:
    """To rounding: each node trains on its batch as one rank does on the whole of it."""
    results = run_ranks(sharded, 4, LOCAL[name], Configured, optimizer)
    expected = run_ranks(alone, 2, LOCAL[name], optimizer)[0]
    check_equal(results, expected, 2e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_node_is_one_participant_in_few_bits(optimizer: str) -> None:
    """bfloat16 on the wire: elements are rounded one by one, so that shards round as whole tensors do."""
    method = NarrowGradients("bfloat16")
    results = run_ranks(sharded, 4, method, Configured, optimizer)
    check_equal(results, run_ranks(alone, 2, method, optimizer)[0], 2e-3)


@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.05}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dgc_that_sends_nearly_all(optimizer: str, trainer: dict[str, Any]) -> None:
    """The corrections, the hand-over and clipping before the exchange, where shards choose what whole tensors do."""
    method = DGC(sparsity=[1e-6], rampup_begin_step=2, min_numel=1, value_dtype="float32", selection="exact")
    results = run_ranks(functools.partial(sharded, **trainer), 4, method, Configured, optimizer)
    expected = run_ranks(functools.partial(alone, **trainer), 2, method, optimizer)[0]
    check_equal(results, expected, 2e-5)
