"""Gradients in few bits per value, every step, all or only the small tensors: nothing is lost, it trains as DDP."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from lightning_lowbw.engine.narrow_exchange import NarrowExchange
from torch import Tensor
from torch.optim import AdamW

from lightning_lowbw import DGC, ConfigurationError, LocalSGD, Method, Narrow, NonFiniteGradientError
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.narrow_values import NARROW_NAMES, make_narrow_format
from lightning_lowbw.what.selection import num_selected
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.ledger import all_gather_bytes, all_reduce_bytes, narrow_mean_bytes
from lightning_lowbw.where.peers import make_peers
from tests.engine.problem import (
    AWKWARD,
    FLAT,
    NODES,
    Nodes,
    backward,
    coefficients,
    each,
    from_memory,
    in_memory,
    make_parameters,
    make_weight,
    mean_of_nodes,
    message_of,
    node_of,
    take_step,
    weights_of,
)
from tests.ranks import run_ranks

STEPS, LARGE = 6, (40, 50)
SHAPES = {**AWKWARD, "large": LARGE}
THREE: Nodes = ((0,), (1,), (2,))
# What rounding takes of values as those here, in units of which tests are tolerant.
LIMIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 2.0**-7, "int4": 2.0**-3}


# The exchange ---------------------------------------------------------------------------------------------------------

VECTORS = {"one": 1, "two": 2, "seven": 7, "thousand": 1001}


def average(dtype: str, nodes: Nodes) -> dict[str, list[Tensor]]:
    """Average four times vectors that come and go; what was put in, what came out, and what is left."""
    exchange = NarrowExchange(dtype, make_peers(nodes))
    node = node_of(dist.get_rank(), nodes)
    given, taken = ({name: torch.zeros(numel) for name, numel in VECTORS.items()} for _ in range(2))
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + node)
        vectors = {name: torch.randn(numel, generator=generator) for name, numel in VECTORS.items()}
        if step == 1:
            del vectors["two"]
        if step == 2:
            del vectors["thousand"]
        for name, mean in exchange.average(vectors).items():
            given[name] += vectors[name]
            taken[name] += mean
    return {name: [given[name], taken[name], exchange.residuals[name]] for name in VECTORS}


@pytest.mark.parametrize("nodes", [THREE, NODES["blocks"]], ids=["flat", "two levels"])
def test_sent_and_unsent_are_what_was_given(nodes: Nodes) -> None:
    """On two levels each rank keeps no more than its part of each tensor, whichever others there are."""
    by_rank = run_ranks(each, sum(map(len, nodes)), average, [(dtype, nodes) for dtype in NARROW_NAMES])
    for dtype, *results in zip(NARROW_NAMES, *by_rank, strict=True):
        for name, numel in VECTORS.items():
            given = sum(results[node[0]][name][0] for node in nodes) / len(nodes)
            unsent = mean_of_nodes([result[name][2] for result in results], nodes)
            for result in results:
                taken = result[name][1]
                assert torch.equal(taken, results[0][name][1])
                torch.testing.assert_close(taken + unsent, given, rtol=1e-5, atol=1e-5)
                assert float((taken - given).abs().max()) <= 8 * LIMIT[dtype]  # the rest is only what is rounded away
                assert result[name][2].numel() <= math.ceil(numel / len(nodes[0]))
            assert numel < 7 or float((results[0][name][1] - given).abs().max()) > 0


def change_the_dtype(method: Method, dtype: str) -> tuple[list[int], str | None]:
    """Return the bytes of each step, in the second half of them with another dtype, and what is not replaced."""
    parameters = make_parameters({"large": LARGE})
    worker = method.attach(torch.optim.SGD(parameters.values(), lr=0.05), parameters.items())
    nbytes = [0]
    for step in range(6):
        if step == 4:
            worker.method = method.replace(value_dtype=dtype)
        take_step(worker, parameters, step)
        nbytes.append(worker.peers.ledger.sent_bytes)
    worker.method = Method(when=method.when)
    said = message_of(lambda: take_step(worker, parameters, 6), ConfigurationError)
    return [after - before for before, after in pairwise(nbytes)], said


def test_a_replaced_dtype_is_sent_and_another_payload_is_refused() -> None:
    methods = [Method(what=Narrow(value_dtype="int8")), LocalSGD(2, 0, value_dtype="int8")]
    cases = [(method, dtype) for method in methods for dtype in ("int8", "int4")]
    of_int8, of_int4, of_local_int8, of_local_int4 = run_ranks(each, 2, change_the_dtype, cases)[0]
    for (same, said), (changed, _) in ((of_int8, of_int4), (of_local_int8, of_local_int4)):
        assert changed[:4] == same[:4]
        assert changed[5] < 0.6 * same[5]
        assert said is not None
        assert "another payload needs a worker of its own" in said


def kept_bytes(method: Method, nodes: Nodes) -> tuple[int, int]:
    """Train two steps; the memory of the residuals, and their bytes in a checkpoint."""
    parameters = make_parameters({"a": (64, 64), "b": (1024,)})
    sgd = torch.optim.SGD(parameters.values(), lr=0.05)
    worker: Any = method.attach(sgd, parameters.items(), topology=nodes)
    for step in range(2):
        take_step(worker, parameters, step)
    narrow: NarrowExchange = worker.averaging.narrow if method.averages_weights else worker.narrow
    storages = [each.untyped_storage() for each in narrow.residuals.values()]
    state = worker.state_dict()["rounded"].values()
    return (
        sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
        sum(each.untyped_storage().nbytes() for each in state),
    )


def test_a_rank_of_a_node_keeps_the_residuals_of_its_part_only() -> None:
    methods = [
        Method(what=Narrow(value_dtype="int8")),
        DGC(sparsity=[0.9], min_numel=2000, dense_dtype="int8"),  # "a" is sparse
        LocalSGD(k_steps=2, begin_step=0, value_dtype="int8"),
    ]
    numels = [64 * 64 + 1024, 1024, 64 * 64 + 1024]
    for nodes in (FLAT, NODES["blocks"]):
        expected = [(4 * numel // len(nodes[0]),) * 2 for numel in numels]
        for kept in run_ranks(each, sum(map(len, nodes)), kept_bytes, [(method, nodes) for method in methods]):
            assert kept == expected


# Every gradient -------------------------------------------------------------------------------------------------------

NARROW_STEPS = 24


def train_narrow(value_dtype: str | None, kind: str, dtype: torch.dtype, nodes: Nodes) -> dict[str, Any]:
    """Train in few bits; without a dtype for the values in float32."""
    parameters = make_parameters(SHAPES, dtype)
    optimizers: dict[str, Any] = {"SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, "AdamW": {"lr": 0.02}}
    optimizer = getattr(torch.optim, kind)(parameters.values(), **optimizers[kind])
    method = Method(where=nodes) if value_dtype is None else Method(what=Narrow(value_dtype=value_dtype), where=nodes)
    worker = method.attach(optimizer, parameters.items())
    assert isinstance(worker, GradientWorker)
    own, applied = ({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in "ab")
    digests = []
    for step in range(NARROW_STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        for name, parameter in parameters.items():
            own[name] += parameter.grad.double()  # type: ignore[union-attr]
        worker.exchange()
        for name, parameter in parameters.items():
            applied[name] += parameter.grad.double()  # type: ignore[union-attr]
        optimizer.step()
        digests.append(digest(parameters.values()))
    unsent = {} if worker.narrow is None else worker.narrow.residuals
    return {
        "digests": digests,
        "weights": weights_of(parameters),
        "own": own,
        "applied": applied,
        "unsent": {name: each.double() for name, each in unsent.items()},
    }


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [
        (
            FLAT,
            [(name, kind, torch.float32) for name in NARROW_NAMES for kind in ("SGD", "AdamW")]
            + [("int8", "SGD", torch.float64), ("int4", "SGD", torch.bfloat16)],
        ),
        (NODES["crossed"], [("int8", "SGD", torch.float32), ("int4", "SGD", torch.float64)]),
    ],
    ids=["flat", "two levels"],
)
def test_training_in_few_bits_loses_nothing_and_goes_where_ddp_goes(nodes: Nodes, cases: list[tuple[Any, ...]]) -> None:
    num_ranks = sum(map(len, nodes))
    references = list(dict.fromkeys((None, *case[1:]) for case in cases))
    by_rank = run_ranks(each, num_ranks, train_narrow, [(*case, nodes) for case in [*references, *cases]])
    by_case = dict(zip([*references, *cases], zip(*by_rank, strict=True), strict=True))
    for value_dtype, kind, dtype in cases:
        results, reference = by_case[value_dtype, kind, dtype], by_case[None, kind, dtype][0]
        assert len({tuple(result["digests"]) for result in results}) == 1
        assert results[0]["digests"][-1] != reference["digests"][-1]
        for name, shape in SHAPES.items():
            weight, expected = results[0]["weights"][name], reference["weights"][name]
            assert weight.dtype == dtype
            if not weight.numel():
                continue
            made = sum(result["own"][name] for result in results) / num_ranks
            kept = mean_of_nodes([result["unsent"][name] for result in results], nodes)
            unsent = from_memory(kept, name, shape)
            if dtype != torch.bfloat16:  # whose gradients are rounded where they are written
                torch.testing.assert_close(results[0]["applied"][name] + unsent, made, rtol=1e-4, atol=2e-4)
            if weight.numel() < 17:  # rounded in units of others of its block
                continue
            moved = float((expected - make_weight(name, shape).to(dtype)).double().norm())
            error = float((weight - expected).double().norm())
            assert error < (0.15 if value_dtype == "int4" or dtype == torch.bfloat16 else 0.03) * moved, (name, kind)


def begin_dense() -> tuple[list[bool], list[bool]]:
    """Three dense steps, then three in few bits; beside plain training on the mean gradient."""
    parameters, plain = make_parameters(SHAPES), make_parameters(SHAPES)
    optimizer, reference = AdamW(parameters.values(), lr=0.02), AdamW(plain.values(), lr=0.02)
    method = Method(what=Narrow(value_dtype="int8")).replace(rampup_begin_step=3)
    worker = method.attach(optimizer, parameters.items())
    assert isinstance(worker, GradientWorker)
    is_equal, reduces = [], []
    for step in range(6):
        reduces.append(worker.reduces_in_backward)
        take_step(worker, parameters, step)
        for name, parameter in plain.items():
            parameter.grad = sum(coefficients(name, parameter, rank, step) + parameter for rank in range(2)) / 2  # type: ignore[assignment]
            parameter.grad = parameter.grad.detach()  # type: ignore[union-attr]
        reference.step()
        is_equal.append(all(torch.allclose(parameters[n], plain[n], rtol=1e-6, atol=1e-7) for n in plain))
    assert not worker.clips_before_exchange
    return is_equal, reduces


def test_few_bits_may_begin_after_a_dense_phase() -> None:
    for is_equal, reduces in run_ranks(begin_dense, 2):
        assert is_equal == reduces == [True] * 3 + [False] * 3


# Small tensors, where the large ones are sparse -----------------------------------------------------------------------

MIN_NUMEL = 1000  # "large" alone is sparse


def method_for(kind: str, dtype: str) -> Method:
    if kind == "narrow":
        return Method(what=Narrow(value_dtype=dtype))
    return DGC(sparsity=[0.95], min_numel=MIN_NUMEL, dense_dtype=dtype, selection="exact", value_dtype="float32")


def train(kind: str, dtype: str, states: list[Any], first: int, last: int, nodes: Nodes = FLAT) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    worker = method_for(kind, dtype).attach(sgd, parameters.items(), topology=nodes)
    assert isinstance(worker, GradientWorker)
    if states:
        own = states[dist.get_rank()]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(own["weights"][name])
                if name in own["buffers"]:  # on two levels those of sparse tensors are in the worker's state
                    sgd.state[parameter]["momentum_buffer"] = own["buffers"][name].clone()
        worker.load_state_dict(own["state"])
    for step in range(first, last):
        take_step(worker, parameters, step)
    return {
        "digest": digest(parameters.values()),
        "weights": weights_of(parameters),
        "buffers": {n: sgd.state[p]["momentum_buffer"].clone() for n, p in parameters.items() if sgd.state[p]},
        "state": worker.state_dict(),
        "sent": worker.peers.ledger.sent_bytes,
    }


def test_small_tensors_train_as_in_float32() -> None:
    dtypes = ["float32", *NARROW_NAMES]
    by_rank = run_ranks(each, 2, train, [("small", dtype, [], 0, STEPS) for dtype in dtypes])
    (wide, _), *others = zip(*by_rank, strict=True)
    num_ranks, large = 2, LARGE[0] * LARGE[1]
    flags = all_reduce_bytes(4 * (len(SHAPES) + 2 * num_ranks), num_ranks)
    sparse = all_gather_bytes(SparseCodec("float32").nbytes([num_selected(large, 0.05)], [large]), num_ranks)
    small = sum(torch.Size(shape).numel() for shape in AWKWARD.values())
    for dtype, (first, second) in zip(NARROW_NAMES, others, strict=True):
        assert first["digest"] == second["digest"] != wide["digest"]
        for name, weight in wide["weights"].items():
            torch.testing.assert_close(first["weights"][name], weight, rtol=0, atol=40 * LIMIT[dtype] * 0.05)
        narrow = narrow_mean_bytes(small, num_ranks, make_narrow_format(dtype))
        assert first["sent"] == STEPS * (flags + sparse + narrow)


# States ---------------------------------------------------------------------------------------------------------------


def overflow(dtype: str, value: float) -> list[str | float]:
    weight = torch.nn.Parameter(torch.zeros(300))
    optimizer = torch.optim.SGD([weight], lr=1e-39)
    Method(what=Narrow(value_dtype=dtype)).attach(optimizer, [("weight", weight)])
    seen: list[str | float] = []
    for _ in range(3):
        weight.grad = torch.full((300,), value)
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            seen.append(str(error))
            break
        seen.append(float(weight.detach().abs().max()))
    return seen


@pytest.mark.parametrize("dtype", NARROW_NAMES)
def test_what_is_kept_of_gradients_too_large_is_told(dtype: str) -> None:
    """The sum of two is not finite, or what is kept of them grows until it is not: never silently."""
    results = run_ranks(overflow, 2, dtype, 3e38)
    for seen in results:
        assert "what was kept of earlier gradients on rank 0 has become too large for float32" in str(seen[-1])
        assert "Lower the learning rate" in str(seen[-1])
    assert all(isinstance(each, float) for seen in run_ranks(overflow, 2, dtype, 1e30) for each in seen)


def go_on(state: dict[str, Any]) -> dict[str, Any]:
    """Resume at another number of ranks; then one step without a gradient."""
    parameters = make_parameters(SHAPES)
    worker = Method(what=Narrow(value_dtype="int8")).attach(
        torch.optim.SGD(parameters.values(), 1.0), parameters.items()
    )
    assert isinstance(worker, GradientWorker)
    worker.load_state_dict(state)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    worker.exchange()
    return {
        "applied": {name: in_memory(p.grad, name) for name, p in parameters.items() if p.grad is not None},
        "unsent": {} if worker.narrow is None else worker.narrow.residuals,
    }


def test_other_ranks_hold_what_was_rounded_away() -> None:
    """Also the ranks of two nodes, each of which has a part of it; and one rank, which applies it."""
    flat = [result["state"] for result in run_ranks(train, 3, "narrow", "int8", [], 0, 3, THREE)]
    levels = [result["state"] for result in run_ranks(train, 4, "narrow", "int8", [], 0, 3, NODES["blocks"])]
    for states, nodes in ((flat, THREE), (levels, NODES["blocks"])):
        merged = merge_states(states)
        assert merged["step"] == 3
        assert set(merged["rounded"]) == {name for name, shape in SHAPES.items() if torch.Size(shape).numel()}
        for name, mean in merged["rounded"].items():
            torch.testing.assert_close(mean, mean_of_nodes([state["rounded"][name] for state in states], nodes))
        for num_ranks in (1, 2):
            results = run_ranks(go_on, num_ranks, merged)
            for name, mean in merged["rounded"].items():
                left = sum(result["unsent"].get(name, torch.zeros(())) for result in results) / num_ranks
                torch.testing.assert_close(results[0]["applied"][name] + left, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["narrow", "small"])
def test_a_checkpoint_of_parts_resumes_to_the_bit(kind: str) -> None:
    nodes = NODES["crossed"]
    half, whole = zip(*run_ranks(each, 4, train, [(kind, "int8", [], 0, n, nodes) for n in (3, STEPS)]), strict=True)
    results = run_ranks(train, 4, kind, "int8", list(half), 3, STEPS, nodes)
    for result, expected in zip(results, whole, strict=True):
        assert result["digest"] == expected["digest"]
        assert result["state"]["shapes"] == expected["state"]["shapes"]
        for name, kept in expected["state"]["rounded"].items():
            assert kept.any() == (kept.numel() > 0)
            assert torch.equal(result["state"]["rounded"][name], kept)
