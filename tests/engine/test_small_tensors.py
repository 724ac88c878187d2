"""The small tensors in a half type: half the bytes, and nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import DGC
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.selection import num_selected
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.mean import narrow_mean
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes
from tests.engine.problem import AWKWARD, backward, make_parameters
from tests.engine.test_two_levels import NODES, exchange_of
from tests.ranks import run_ranks

STEPS, LARGE = 6, (40, 50)
SHAPES = {**AWKWARD, "large": LARGE}
MIN_NUMEL = 1000  # "large" alone is sparse
LIMIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # what rounding takes at most, relative


def average(dtype: str, nodes: Any, numel: int) -> list[Tensor]:
    """Three means in a row, each with what the last has left over; what was put in, what came out, what is left."""
    exchange = exchange_of(nodes) if nodes else Exchange()
    rank = dist.get_rank() if not nodes else next(i for i, node in enumerate(nodes) if dist.get_rank() in node)
    given, taken, unsent = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        vector = torch.randn(numel, generator=generator)
        mean, unsent = narrow_mean(vector + unsent, getattr(torch, dtype), exchange)
        given += vector
        taken += mean
    return [given, taken, unsent]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("numel", [1, 2, 7, 1000])
def test_sent_and_unsent_are_what_was_given(dtype: str, numel: int) -> None:
    results = run_ranks(average, 3, dtype, (), numel)
    given = sum(result[0] for result in results) / 3
    unsent = sum(result[2] for result in results) / 3
    for _, taken, _ in results:
        assert torch.equal(taken, results[0][1])
        torch.testing.assert_close(taken + unsent, given, rtol=1e-5, atol=1e-6)
        assert float((taken - given).abs().max()) <= 8 * LIMIT[dtype]  # and the rest is only what is rounded away
    assert numel < 7 or float((results[0][1] - given).abs().max()) > 0


def test_on_two_levels_each_node_sends_half() -> None:
    nodes = NODES["blocks"]
    results = run_ranks(average, 4, "bfloat16", nodes, 1001)
    given = sum(results[node[0]][0] for node in nodes) / len(nodes)
    unsent = sum(result[2] for result in results) / len(nodes)  # each rank keeps that of its part
    for _, taken, _ in results:
        torch.testing.assert_close(taken + unsent, given, rtol=1e-5, atol=1e-6)


def train(dtype: str, states: list[Any], first: int, last: int, nodes: Any = ()) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(sparsity=[0.95], min_numel=MIN_NUMEL, dense_dtype=dtype, selection="exact", value_dtype="float32")
    exchange = exchange_of(nodes) if nodes else Exchange()
    worker = method.attach(sgd, parameters.items(), exchange)
    if states:
        state, weights = states[dist.get_rank()]["state"], states[dist.get_rank()]["weights"]
        buffers = states[dist.get_rank()]["buffers"]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
                if name in buffers:  # on two levels those of sparse tensors are in the worker's state
                    sgd.state[parameter]["momentum_buffer"] = buffers[name].clone()
        worker.load_state_dict(state)
    for step in range(first, last):
        sgd.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            worker.exchange()
            sgd.step()
    return {
        "digest": digest(parameters.values()),
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "buffers": {n: sgd.state[p]["momentum_buffer"].clone() for n, p in parameters.items() if sgd.state[p]},
        "state": worker.state_dict(),
        "sent": exchange.ledger.sent_bytes,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trains_as_in_float32(dtype: str) -> None:
    wide, narrow = run_ranks(train, 2, "float32", [], 0, STEPS), run_ranks(train, 2, dtype, [], 0, STEPS)
    assert len({result["digest"] for result in narrow}) == 1
    assert narrow[0]["digest"] != wide[0]["digest"]
    for name, weight in wide[0]["weights"].items():
        torch.testing.assert_close(narrow[0]["weights"][name], weight, rtol=0, atol=40 * LIMIT[dtype] * 0.05)


def test_bytes_are_those_of_the_formula() -> None:
    num_ranks = 2
    (result, _) = run_ranks(train, num_ranks, "bfloat16", [], 0, STEPS)
    numels = [int(torch.Size(shape).numel()) for shape in AWKWARD.values()]
    flags = 4 * (len(SHAPES) + 2 * num_ranks)
    large = LARGE[0] * LARGE[1]
    sparse = SparseCodec("float32").nbytes([num_selected(large, 0.05)], [large])
    narrow = 2 * -(-sum(numels) // num_ranks)  # bytes of a rank's part
    per_step = all_reduce_bytes(flags, num_ranks) + all_gather_bytes(sparse, num_ranks)
    per_step += reduce_scatter_bytes(num_ranks * narrow, num_ranks) + all_gather_bytes(narrow, num_ranks)
    assert result["sent"] == STEPS * per_step


@pytest.mark.parametrize("nodes", [(), NODES["blocks"]], ids=["flat", "two levels"])
def test_resumes_to_the_bit(nodes: Any) -> None:
    num_ranks = 4 if nodes else 2
    whole = run_ranks(train, num_ranks, "bfloat16", [], 0, STEPS, nodes)
    half = run_ranks(train, num_ranks, "bfloat16", [], 0, 3, nodes)
    again = run_ranks(train, num_ranks, "bfloat16", half, 3, STEPS, nodes)
    assert len({result["digest"] for result in (*whole, *again)}) == 1
    forgetful = [{**result, "state": {**result["state"], "rounded": {}}} for result in half]
    other = run_ranks(train, num_ranks, "bfloat16", forgetful, 3, STEPS, nodes)
    assert other[0]["digest"] != whole[0]["digest"]  # so the test can fail


def test_other_ranks_hold_what_was_rounded_away() -> None:
    states = [result["state"] for result in run_ranks(train, 3, "bfloat16", [], 0, 3)]
    merged = DGC().merge_states(states)["rounded"]
    for name, mean in merged.items():
        torch.testing.assert_close(mean, sum(state["rounded"][name] for state in states) / 3)
    assert set(merged) == {name for name in AWKWARD if Parameter(torch.empty(AWKWARD[name])).numel()}
