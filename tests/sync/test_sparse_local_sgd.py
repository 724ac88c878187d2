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
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.ledger import all_gather_bytes
from lightning_lowbw.comm.topology import part_of
from lightning_lowbw.compress.top_k import Compression
from tests.ranks import run_ranks
from tests.sync.problem import NODES, Nodes, Shape, make_parameters, make_weight, run_each
from tests.sync.replica_problem import (
    BASE,
    SHAPES,
    SPARSE,
    SPARSE_STEPS,
    attach,
    by_sparse_oracle,
    check_sparse,
    flat_groups,
    gradient_of,
    train,
    train_on,
    with_base,
)

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
    "delayed": ({"k_steps": 4, "delay_steps": 3}, {"delay": 3}),
    "delayed two bits": (
        {"k_steps": 5, "delay_steps": 2, "compression": {"value_dtype": "int2"}},
        {"k": 5, "delay": 2, "value_dtype": "int2"},
    ),
}
ALONE = ("two bits", "delayed")


def sparse_train(
    choices: Mapping[str, Any], optimizer: str = "sgd", shapes: Mapping[str, Shape] = SHAPES, **kwargs: Any
) -> dict[str, Any]:
    return train(LocalSGD(**with_base(choices)), optimizer, shapes=shapes, **{"steps": SPARSE_STEPS, **kwargs})


PLACES: dict[str, tuple[Nodes, str, tuple[str, ...]]] = {
    "2 ranks": (flat_groups(2), "adamw", (*CASES,)),
    "3 ranks": (flat_groups(3), "sgd", ("chunked", "over all ranks", "delayed two bits")),
    "blocks": (NODES["blocks"], "sgd", ("two bits", "delayed")),
    "crossed": (NODES["crossed"], "sgd", ("chunked", "per tensor")),
}


@functools.cache
def results_of(place: str) -> dict[str, list[Any]]:
    """Start the ranks once for all cases."""
    nodes, optimizer, cases = PLACES[place]
    training = partial(sparse_train, optimizer=optimizer, nodes=nodes if len(nodes[0]) > 1 else ())
    calls = {case: partial(training, CASES[case][0]) for case in cases}
    calls |= {f"alone, {case}": partial(training, CASES[case][0], shapes=SPARSE) for case in ALONE if case in cases}
    if place == "2 ranks":
        whole = LocalSGD(k_steps=4, begin_step=0)
        calls["whole"] = partial(train, whole, optimizer, shapes=SHAPES, steps=SPARSE_STEPS)
        calls["outer"] = partial(training, {"k_steps": 4, "outer": "nesterov", "outer_momentum": 0.9})
        calls |= {case: partial(training, choices) for case, (choices, _) in FRAGMENTS.items()}
    return run_each(sum(map(len, nodes)), calls)


FRAGMENTS: dict[str, tuple[dict[str, Any], int]] = {
    f"fragments, delay {delay}": (
        {"k_steps": 4, "num_fragments": 2, "delay_steps": delay, "compression": {"value_dtype": "int2"}},
        delay,
    )
    for delay in (0, 2)
}


@pytest.mark.parametrize("place", PLACES)
def test_equals_the_algorithm_in_one_process_to_the_bit(place: str) -> None:
    """A node is a participant with the mean of its changes; k, chunks, messages, residuals are of each rank's part."""
    nodes, optimizer, cases = PLACES[place]
    for case in cases:
        check_sparse(results_of(place)[case], optimizer, nodes, **CASES[case][1])


def test_small_tensors_are_averaged_whole() -> None:
    results = results_of("2 ranks")
    for name in SHAPES:
        same = torch.equal(results["chunked"][0]["own"][name], results["whole"][0]["own"][name])
        assert same == (name not in SPARSE)


def test_an_outer_optimizer_steps_with_the_sparse_mean() -> None:
    results = results_of("2 ranks")["outer"]
    for name in SPARSE:
        oracle = by_sparse_oracle(name, "adamw", flat_groups(2), momentum=0.9)
        torch.testing.assert_close(results[0]["own"][name], oracle.replicas[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", FRAGMENTS)
def test_sparse_fragments_are_to_the_bit(case: str) -> None:
    results, delay = results_of("2 ranks")[case], FRAGMENTS[case][1]
    for fragment, members in enumerate(results[0]["fragments"]):
        for name in set(members) & set(SPARSE):
            phase = 4 - round((fragment + 1) * 4 / 2)
            oracle = by_sparse_oracle(name, "adamw", flat_groups(2), value_dtype="int2", phase=phase, delay=delay)
            for rank in (0, 1):
                assert torch.equal(results[rank]["own"][name], oracle.replicas[rank].detach())
                assert torch.equal(-results[rank]["residuals"][name], oracle.e[rank])


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "case"), [("2 ranks", "two bits"), ("2 ranks", "delayed"), ("blocks", "two bits"), ("blocks", "delayed")]
)
def test_where_nothing_is_whole_a_round_is_one_all_gather(place: str, case: str) -> None:
    """The status is part of it: a small all-reduce of its own costs more frames than it has bytes."""
    (choices, oracle_choices), (nodes, optimizer, _) = CASES[case], PLACES[place]
    num_ranks, num_parts = sum(map(len, nodes)), len(nodes[0])
    results = results_of(place)[f"alone, {case}"]
    check_sparse(results, optimizer, nodes, **oracle_choices)
    parts = [part_of(torch.Size(shape).numel(), 0, num_parts).stop for shape in SPARSE.values()]
    message = Compression(**with_base(choices)["compression"]).nbytes(parts) + 4 * (6 + 2 * num_ranks)
    if num_parts > 1 and case == "delayed":  # between nodes, what is hidden counts when it is done
        return
    for result in results:
        averages = [(step + 1) // choices["k_steps"] for step in range(SPARSE_STEPS)]
        expected = [number * all_gather_bytes(message, len(nodes)) for number in averages]
        assert result["inter" if num_parts > 1 else "sent"] == expected


def kinds_of_averages(shapes: Mapping[str, Shape]) -> list[set[bool]]:
    method = LocalSGD(num_fragments=2, **with_base({"k_steps": 4, "delay_steps": 1}))
    worker, parameters = attach(method, "sgd", shapes)
    has_whole: list[set[bool]] = [set(), set()]
    for step in range(8):
        train_on(worker, parameters, [step])
        for seen, fragment in zip(has_whole, worker.fragments, strict=True):
            seen |= {fragment.work.whole is not None} if fragment.work is not None else set()
    worker.finish()
    return has_whole


def test_fragments_have_one_kind_of_average_among_them() -> None:
    """Ranks that are out of turn, each at another fragment, would wait in different collectives for ever."""
    some = {**SPARSE, "bias": SHAPES["bias"]}
    results = run_each(2, {"sparse": partial(kinds_of_averages, SPARSE), "some": partial(kinds_of_averages, some)})
    assert results == {"sparse": [[{False}] * 2] * 2, "some": [[{True}] * 2] * 2}


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
    assert worker.compressed is not None
    return sorted(worker.compressed.residuals), worker.num_averages


def test_parameters_of_all_kinds() -> None:
    calls: dict[str, Any] = {"narrow": accumulate_small_steps, "frozen": freeze}
    calls |= {pattern: partial(exclude, pattern) for pattern in ("mat*", "nothing")}
    results = run_each(2, calls)
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
