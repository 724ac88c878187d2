"""Sparse local SGD on real ranks, against algorithm 1 of SparseLoCo in one process, bit for bit."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, LocalSGD
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.ledger import all_gather_bytes
from lightning_lowbw.where.topology import part_of
from tests.engine.problem import NODES, Shape, coefficients, make_parameters, make_weight
from tests.engine.replica_problem import (
    BASE,
    SHAPES,
    SPARSE,
    SPARSE_STEPS,
    attach,
    by_sparse_oracle,
    check_sparse,
    flat_groups,
    gradient_of,
    run_each,
    train,
    train_on,
    with_base,
)
from tests.ranks import run_ranks

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunked": ({"k_steps": 4}, {}),
    "two bits": ({"k_steps": 3, "compression": {"value_dtype": "int2"}}, {"k": 3, "value_dtype": "int2"}),
    "four bits": ({"k_steps": 4, "compression": {"value_dtype": "int4"}}, {"value_dtype": "int4"}),
    "eight bits": ({"k_steps": 4, "compression": {"value_dtype": "int8"}}, {"value_dtype": "int8"}),
    "per tensor": ({"k_steps": 4, "compression": {"chunk": None}}, {"chunk": 1 << 30}),
    "over all ranks": (
        {"k_steps": 3, "compression": {"mean_over": "ranks", "value_dtype": "int4"}},
        {"k": 3, "over_senders": False, "value_dtype": "int4"},
    ),
    "all is kept": ({"k_steps": 2, "compression": {"decay": 1.0}}, {"k": 2, "decay": 1.0}),
    "clipped": (
        {"k_steps": 4, "compression": {"clip_to_median": True, "value_dtype": "bfloat16"}},
        {"clips": True, "value_dtype": "bfloat16"},
    ),
    "delayed": ({"k_steps": 4, "delay_steps": 3}, {"delay": 3}),
    "delayed two bits": (
        {"k_steps": 5, "delay_steps": 2, "compression": {"value_dtype": "int2"}},
        {"k": 5, "delay": 2, "value_dtype": "int2"},
    ),
}
# Where nothing is whole the control message is a part of the sparse one: a small all-reduce of its own costs more
# frames than it has bytes.
ALONE = ("two bits", "delayed")


def sparse_train(
    choices: Mapping[str, Any], optimizer: str = "sgd", shapes: Mapping[str, Shape] = SHAPES, **kwargs: Any
) -> dict[str, Any]:
    return train(LocalSGD(**with_base(choices)), optimizer, shapes=shapes, **{"steps": SPARSE_STEPS, **kwargs})


@functools.cache
def results_of(num_ranks: int, optimizer: str) -> dict[str, list[Any]]:
    """Start the ranks once for all cases."""
    calls = {case: partial(sparse_train, choices, optimizer) for case, (choices, _) in CASES.items()}
    calls |= {f"alone, {case}": partial(sparse_train, CASES[case][0], optimizer, SPARSE) for case in ALONE}
    calls["whole"] = partial(train, LocalSGD(k_steps=4, begin_step=0), optimizer, shapes=SHAPES, steps=SPARSE_STEPS)
    outer = {"k_steps": 4, "outer": "nesterov", "outer_momentum": 0.9}
    calls["outer"] = partial(sparse_train, outer, optimizer)
    return run_each(num_ranks, calls)


@pytest.mark.parametrize(("optimizer", "num_ranks"), [("sgd", 3), ("adamw", 2)])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_algorithm_in_one_process_to_the_bit(case: str, optimizer: str, num_ranks: int) -> None:
    check_sparse(results_of(num_ranks, optimizer)[case], optimizer, flat_groups(num_ranks), **CASES[case][1])


def test_small_tensors_are_averaged_whole() -> None:
    results = results_of(2, "adamw")
    for name in SHAPES:
        same = torch.equal(results["chunked"][0]["own"][name], results["whole"][0]["own"][name])
        assert same == (name not in SPARSE)


def test_an_outer_optimizer_steps_with_the_sparse_mean() -> None:
    results = results_of(3, "sgd")["outer"]
    for name in SPARSE:
        oracle = by_sparse_oracle(name, "sgd", flat_groups(3), momentum=0.9)
        torch.testing.assert_close(results[0]["own"][name], oracle.replicas[0].detach(), rtol=1e-5, atol=1e-5)


# Bytes -------------------------------------------------------------------------------------------------------------


def message_bytes(choices: Mapping[str, Any], num_parts: int = 1) -> int:
    """Of the longest part of a node."""
    numels = [torch.Size(shape).numel() for shape in SPARSE.values()]
    parts = [part_of(numel, 0, num_parts).stop for numel in numels]
    return Compression(**with_base(choices)["compression"]).nbytes(parts)


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("nodes", [None, "three nodes"])
def test_where_nothing_is_whole_a_round_is_one_all_gather(nodes: str | None, case: str) -> None:
    choices, oracle_choices = CASES[case]
    groups = NODES[nodes] if nodes else flat_groups(3)
    num_ranks, num_parts = sum(map(len, groups)), len(groups[0])
    results = (two_level_results(nodes) if nodes else results_of(3, "sgd"))[f"alone, {case}"]
    check_sparse(results, "sgd", groups, **oracle_choices)
    message = message_bytes(choices, num_parts) + 4 * (6 + 2 * num_ranks)
    for result in results if case == "two bits" or not nodes else ():  # between nodes, what is hidden counts when done
        averages = [(step + 1) // choices["k_steps"] for step in range(SPARSE_STEPS)]
        sent = result["inter" if nodes else "sent"]
        assert sent == [number * all_gather_bytes(message, len(groups)) for number in averages]


def kinds_of_averages(shapes: Mapping[str, Shape]) -> list[set[str]]:
    method = LocalSGD(num_fragments=2, **with_base({"k_steps": 4, "delay_steps": 1}))
    worker, parameters = attach(method, "sgd", shapes)
    kinds: list[set[str]] = [set(), set()]
    for step in range(8):
        train_on(worker, parameters, [step])
        for seen, fragment in zip(kinds, worker.fragments, strict=True):
            seen |= {type(fragment.work.whole).__name__} if fragment.work is not None else set()
    worker.finish()
    return kinds


def test_fragments_have_one_kind_of_average_among_them() -> None:
    """Ranks that are out of turn, each at another fragment, would wait in different collectives for ever."""
    some = {**SPARSE, "bias": SHAPES["bias"]}
    results = run_each(2, {"sparse": partial(kinds_of_averages, SPARSE), "some": partial(kinds_of_averages, some)})
    assert results == {"sparse": [[{"_ControlWork"}] * 2] * 2, "some": [[{"MeanWork"}] * 2] * 2}


# Two levels --------------------------------------------------------------------------------------------------------

ON_TWO_LEVELS = {"blocks": ("two bits", "delayed"), "crossed": ("chunked", "per tensor"), "three nodes": ("clipped",)}


@functools.cache
def two_level_results(nodes: str) -> dict[str, list[Any]]:
    groups = NODES[nodes]
    calls = {case: partial(sparse_train, CASES[case][0], nodes=groups) for case in ON_TWO_LEVELS.get(nodes, ())}
    if nodes == "three nodes":
        alone = {case: partial(sparse_train, CASES[case][0], shapes=SPARSE, nodes=groups) for case in ALONE}
        calls |= {f"alone, {case}": call for case, call in alone.items()}
    return run_each(sum(map(len, groups)), calls)


@pytest.mark.parametrize(("nodes", "case"), [(nodes, case) for nodes, cases in ON_TWO_LEVELS.items() for case in cases])
def test_each_part_of_a_node_is_what_a_rank_is(nodes: str, case: str) -> None:
    """A node with the mean of its changes; k, chunks, messages and residuals are those of each rank's part."""
    check_sparse(two_level_results(nodes)[case], "sgd", NODES[nodes], **CASES[case][1])


def train_in_node(delay: int) -> dict[str, Any]:
    return sparse_train({"k_steps": 4, "node_k_steps": 3, "delay_steps": delay}, nodes=NODES["blocks"], steps=12)


def test_ranks_that_step_alone_inside_their_nodes_send_the_mean_of_the_node() -> None:
    calls: dict[str, Any] = {f"delay {delay}": partial(train_in_node, delay) for delay in (0, 2)}
    results = run_each(4, calls)
    for case, by_rank in results.items():
        assert len({result["digests"][-1] for result in by_rank}) == (1 if case == "delay 0" else 4)
        assert by_rank[0]["digests"][2] == by_rank[1]["digests"][2] != by_rank[2]["digests"][2]
        assert by_rank[0]["digests"][0] != by_rank[1]["digests"][0]


def test_nodes_of_three_agree_whatever_the_rounding_of_their_mean() -> None:
    nodes = NODES["three each"]
    results = run_ranks(partial(sparse_train, {"k_steps": 4}, "adamw", nodes=nodes, steps=12), 6)
    assert len({result["digests"][-1] for result in results}) == 1
    for name, shape in SPARSE.items():
        assert sum(results[rank]["residuals"][name].numel() for rank in nodes[0]) == torch.Size(shape).numel()


def wait_for_the_slow_network() -> tuple[list[float], int]:
    method, delay_s = LocalSGD(**with_base({"k_steps": 4, "delay_steps": 3})), 0.5
    worker, parameters = attach(method, "sgd", SHAPES, NODES["blocks"])
    peers: Any = worker.peers
    begin = peers._begin

    def slowly(collectives: Any, *tensors: Tensor) -> Any:
        def later() -> None:
            time.sleep(delay_s)
            collectives()

        return begin(later, *tensors)

    peers._begin = slowly
    train_on(worker, parameters, range(3))
    seconds = []
    for step in range(3, 7):
        started_s = time.perf_counter()
        train_on(worker, parameters, [step])
        seconds.append((time.perf_counter() - started_s) / delay_s)
    return seconds, worker.num_averages


@pytest.mark.alone
def test_on_two_levels_a_hidden_average_is_not_waited_for() -> None:
    """The mean inside the node is of the step, and must not queue behind what crosses the slow network."""
    for seconds, num_averages in run_ranks(wait_for_the_slow_network, 4):
        assert max(seconds[:3]) < 0.8
        assert num_averages == 1


# Parameters of all kinds -------------------------------------------------------------------------------------------


def accumulate_small_steps() -> tuple[float, str]:
    """Changes far below the rounding of a bfloat16 weight, which the consensus in float32 adds up."""
    weight = Parameter(torch.full((64,), 256.0, dtype=torch.bfloat16))
    double = Parameter(torch.ones(64, dtype=torch.float64))
    compression = Compression(density=0.9, min_numel=1, value_dtype="float32", mean_over="ranks")
    optimizer = torch.optim.SGD([weight, double], lr=1.0)
    LocalSGD(k_steps=2, begin_step=0, compression=compression).attach(optimizer, [("w", weight), ("d", double)])
    for step in range(16):
        # a step of 2 on one of two ranks in every other step, of which half arrives: 257, and in bfloat16 256 again
        weight.grad = torch.zeros_like(weight)
        weight.grad[0] = -2.0 if dist.get_rank() == 0 and step % 2 else 0.0
        double.grad = torch.full_like(double, 1e-12)
        optimizer.step()
    assert float(double[0].detach()) == pytest.approx(1 - 16e-12, abs=1e-14), "float64 is averaged whole"
    return float(weight[0].detach()), digest([weight, double])


def freeze() -> dict[str, Tensor]:
    parameters = make_parameters({"a": (64,), "late": (64,), "never": (64,)})
    parameters["late"].requires_grad_(False)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    LocalSGD(k_steps=2, begin_step=0, compression=Compression(**BASE)).attach(optimizer, parameters.items())
    seen = {}
    for step in range(8):
        if step == 4:
            parameters["late"].requires_grad_(True)
        for name in ("a", "late"):
            if parameters[name].requires_grad:
                parameters[name].grad = gradient_of(name, parameters[name], dist.get_rank(), step)
        optimizer.step()
        if step == 3:
            seen["frozen"] = parameters["late"].detach().clone()
    return {**seen, **{name: p.detach().clone() for name, p in parameters.items()}}


def exclude(pattern: str) -> tuple[list[str], int] | str:
    compression = Compression(**{**BASE, "exclude": [pattern]})
    try:
        worker, parameters = attach(LocalSGD(k_steps=2, begin_step=0, compression=compression), "sgd", SHAPES)
    except ConfigurationError as error:
        return str(error)
    train_on(worker, parameters, range(2))
    assert worker.averaging.sparse is not None
    return sorted(worker.averaging.sparse.residuals), worker.num_averages


def train_with(name: str) -> tuple[str, float]:
    """Toward a target: any inner optimizer, with the preset's payload."""
    weight, target = Parameter(torch.zeros(4096)), torch.linspace(-1, 1, 4096)
    optimizer: Any = getattr(torch.optim, name)([weight], lr=0.02)
    LocalSGD(k_steps=5, begin_step=0, compression=Compression(density=1 / 16)).attach(optimizer, [("w", weight)])
    for step in range(300):
        weight.grad = weight.detach() - target + 0.1 * coefficients("w", target, dist.get_rank(), step)
        optimizer.step()
    return digest([weight]), float((weight.detach() - target).norm() / target.norm())


def test_parameters_and_optimizers_of_all_kinds() -> None:
    inner = ("SGD", "AdamW", "RMSprop", "Adagrad", "NAdam")
    calls: dict[str, Any] = {"narrow": accumulate_small_steps, "frozen": freeze}
    calls |= {pattern: partial(exclude, pattern) for pattern in ("mat*", "nothing")}
    results = run_each(2, {**calls, **{name: partial(train_with, name) for name in inner}})
    (narrow, one), (_, other) = results["narrow"]
    assert narrow == pytest.approx(256.0 + 8, abs=1), "a narrow weight forgets what is below its rounding"
    assert one == other
    first, second = results["frozen"]
    assert torch.equal(first["frozen"], make_weight("late", (64,)))
    assert torch.equal(first["never"], make_weight("never", (64,)))
    assert not torch.equal(first["late"], first["frozen"])
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert results["mat*"] == [(sorted(set(SPARSE) - {"matrix"}), 1)] * 2
    assert all("'nothing' matches no parameter" in message for message in results["nothing"])
    for name in inner:
        (weights, distance), (others, _) = results[name]
        assert weights == others
        assert distance < (0.6 if name == "Adagrad" else 0.25), name
