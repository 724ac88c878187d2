"""Sparse local SGD on real ranks, against algorithm 1 of SparseLoCo in one process, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, DisagreementError, LocalSGD, NonFiniteGradientError
from lightning_lowbw.engine.replicas import LocalSGDWorker
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.what.values import VALUE_NAMES, make_value_format
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes
from tests.engine.problem import coefficients, make_parameters, make_weight
from tests.engine.test_replicas import OPTIMIZERS
from tests.engine.test_two_levels import NODES, Nodes, exchange_of
from tests.local_oracle import OracleSparseLoCo, mean_of
from tests.ranks import run_ranks

STEPS = 14
CHUNK, DENSITY = 64, 1 / 16
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (30, 50),  # 23 chunks, and 28 elements
    "conv": (8, 4, 3, 3),  # channels_last
    "transposed": (20, 30),
    "vector": (64,),
    "single": (1,),
    "scalar": (),
    "empty": (0, 3),
    "bias": (10,),
}
SPARSE = [name for name, shape in SHAPES.items() if torch.Size(shape).numel() >= 64]
BASE: dict[str, Any] = {"density": DENSITY, "chunk": CHUNK, "min_numel": 64, "value_dtype": "float32"}


def gradient_of(name: str, weight: Tensor, rank: int, step: int) -> Tensor:
    return coefficients(name, weight, rank, step) + weight.detach()


def attach(
    method: LocalSGD, optimizer: str, exchange: Exchange | None, names: Sequence[str] = tuple(SHAPES)
) -> tuple[LocalSGDWorker, dict[str, Parameter]]:
    parameters = make_parameters({name: SHAPES[name] for name in names})
    return method.attach(OPTIMIZERS[optimizer](parameters.values()), parameters.items(), exchange), parameters


def train_on(worker: LocalSGDWorker, parameters: dict[str, Parameter], steps: Sequence[int]) -> list[str]:
    rank, digests = dist.get_rank() if dist.is_initialized() else 0, []
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = gradient_of(name, parameter, rank, step)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        digests.append(digest(parameters.values()))
    return digests


def residuals_of(worker: LocalSGDWorker) -> dict[str, Tensor]:
    by_fragment = [fragment["payload"].get("residuals", {}) for fragment in worker.state_dict()["fragments"]]
    return {name: residual for residuals in by_fragment for name, residual in residuals.items()}


def train(
    choices: dict[str, Any],
    optimizer: str,
    nodes: Nodes = (),
    steps: int = STEPS,
    names: Sequence[str] = tuple(SHAPES),
) -> dict[str, Any]:
    exchange = exchange_of(nodes, "sharded", "averages") if nodes else Exchange()
    worker, parameters = attach(LocalSGD(**{"begin_step": 0, **choices}), optimizer, exchange, names)
    sent = []
    digests = []
    for step in range(steps):
        digests += train_on(worker, parameters, [step])
        sent.append((exchange.ledger.sent_bytes, exchange.ledger.inter_bytes))
    own = {name: p.detach().clone() for name, p in parameters.items()}
    state = residuals_of(worker)
    return {"own": own, "digests": digests, "sent": sent, "residuals": state, "averages": worker.num_averages}


def by_oracle(
    name: str, optimizer: str, groups: Sequence[Sequence[int]], steps: int = STEPS, **choices: Any
) -> OracleSparseLoCo:
    """Each of the groups is a node; the gradient of several ranks is summed as the wire does."""
    value_dtype = choices.pop("value_dtype", "float32")
    value_format = make_value_format(value_dtype)
    is_per_tensor = choices.get("chunk", CHUNK) != CHUNK

    def quantise(values: Tensor) -> Tensor:
        return value_format.decode(value_format.encode(values, [values.numel()]), [values.numel()])

    oracle = OracleSparseLoCo(
        make_weight(name, SHAPES[name]),
        len(groups),
        OPTIMIZERS[optimizer],
        top=lambda numel: min(numel, max(1, round((numel if is_per_tensor else CHUNK) * DENSITY))),
        quantise=quantise,
        **{"chunk": CHUNK, **choices},
    )
    for step in range(steps):
        gradients = []
        for ranks, replica in zip(groups, oracle.replicas, strict=True):
            by_rank = [gradient_of(name, replica, rank, step) / len(ranks) for rank in ranks]
            gradients.append(sum(by_rank[1:], start=by_rank[0]))
        oracle.take_step(gradients)
    return oracle


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


def with_base(choices: dict[str, Any]) -> dict[str, Any]:
    return {**choices, "compression": {**BASE, **choices.get("compression", {})}}


def check(results: list[dict[str, Any]], optimizer: str, groups: Sequence[Sequence[int]], choices: Any) -> None:
    for name in SPARSE:
        oracle = by_oracle(name, optimizer, groups, **choices)
        assert oracle.rounds >= 2
        for number, ranks in enumerate(groups):
            for rank in ranks:
                assert torch.equal(results[rank]["own"][name], oracle.replicas[number].detach()), (name, rank)
                # the residual of changes, which are minus the pseudo-gradients
                assert torch.equal(-results[rank]["residuals"][name], oracle.e[number]), (name, rank)
    assert set(results[0]["residuals"]) == set(SPARSE), "small tensors are averaged whole"
    k, delay = oracle.k, oracle.delay
    for step in range(STEPS if not delay else 0):
        num_different = len({result["digests"][step] for result in results})
        assert num_different == (1 if (step + 1) % k == 0 else len(groups))


def train_each(methods: list[dict[str, Any]], optimizer: str) -> list[dict[str, Any]]:
    return [train(choices, optimizer) for choices in methods]


@functools.cache
def results_of(num_ranks: int, optimizer: str) -> dict[str, list[dict[str, Any]]]:
    """Start the ranks once for all cases."""
    by_rank = run_ranks(train_each, num_ranks, [with_base(choices) for choices, _ in CASES.values()], optimizer)
    return {case: list(results) for case, results in zip(CASES, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_algorithm_in_one_process_to_the_bit(case: str, optimizer: str) -> None:
    for num_ranks in (2, 3):
        check(results_of(num_ranks, optimizer)[case], optimizer, [[rank] for rank in range(num_ranks)], CASES[case][1])


def test_small_tensors_are_averaged_whole() -> None:
    results = run_ranks(train, 2, with_base({"k_steps": 4}), "sgd", (), 12)
    dense = run_ranks(train, 2, {"k_steps": 4}, "sgd", (), 12)
    for name in SHAPES:
        same = torch.equal(results[0]["own"][name], dense[0]["own"][name])
        assert same == (name not in SPARSE)


def test_an_outer_optimizer_steps_with_the_sparse_mean() -> None:
    choices = {"k_steps": 4, "outer": "nesterov", "outer_momentum": 0.9}
    results = run_ranks(train, 2, with_base(choices), "sgd")
    for name in SPARSE:
        oracle = by_oracle(name, "sgd", [[0], [1]], momentum=0.9)
        torch.testing.assert_close(results[0]["own"][name], oracle.replicas[0].detach(), rtol=1e-5, atol=1e-5)


def test_one_rank_is_plain_training() -> None:
    (result,) = run_ranks(train, 1, with_base({"k_steps": 3}), "sgd")
    for name, shape in SHAPES.items():
        weight = make_weight(name, shape).requires_grad_()
        optimizer = OPTIMIZERS["sgd"]([weight])
        for step in range(STEPS):
            weight.grad = gradient_of(name, weight, 0, step)
            optimizer.step()
        assert torch.equal(result["own"][name], weight.detach())
    assert result["sent"][-1] == (0, 0)


@pytest.mark.parametrize("case", ["chunked", "two bits", "delayed", "delayed two bits"])
def test_bytes_are_those_of_the_formula(case: str) -> None:
    num_ranks, choices = 3, with_base(CASES[case][0])
    numels = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    message = Compression(**choices["compression"]).nbytes([numels[name] for name in SPARSE])
    whole = sum(numel for name, numel in numels.items() if name not in SPARSE) + 8 + 2 * num_ranks
    per_average = all_gather_bytes(message, num_ranks) + all_reduce_bytes(4 * whole, num_ranks)
    for result in results_of(num_ranks, "sgd")[case]:
        averages = [(step + 1) // choices["k_steps"] for step in range(STEPS)]
        assert [sent for sent, _ in result["sent"]] == [number * per_average for number in averages]


@pytest.mark.parametrize("case", ["two bits", "delayed"])
@pytest.mark.parametrize("nodes", [None, "three nodes"])
def test_where_nothing_is_whole_a_round_is_one_all_gather(nodes: str | None, case: str) -> None:
    """The numbers beside an average ride in the messages; a small all-reduce costs more frames than they have bytes."""
    choices, oracle_choices = CASES[case]
    groups = NODES[nodes] if nodes else [[0], [1], [2]]
    num_ranks = sum(map(len, groups))
    results = run_ranks(train, num_ranks, with_base(choices), "sgd", groups if nodes else (), STEPS, SPARSE)
    check(results, "sgd", groups, oracle_choices)
    numels = [torch.Size(SHAPES[name]).numel() for name in SPARSE]
    message = Compression(**with_base(choices)["compression"]).nbytes(numels) + 4 * (8 + 2 * num_ranks)
    for result in results if case == "two bits" or not nodes else ():  # between nodes, what is hidden counts when done
        sent = [inter if nodes else everything for everything, inter in result["sent"]]
        per_average = all_gather_bytes(message, len(groups)) / (num_ranks / len(groups))  # a node's ranks share it
        averages = [(step + 1) // choices["k_steps"] for step in range(STEPS)]
        assert sent == pytest.approx([number * per_average for number in averages], abs=8)


def kinds_of_averages(names: Sequence[str]) -> list[set[str]]:
    method = LocalSGD(begin_step=0, num_fragments=2, **with_base({"k_steps": 4, "delay_steps": 1}))
    worker, parameters = attach(method, "sgd", None, names)
    kinds: list[set[str]] = [set(), set()]
    for step in range(8):
        train_on(worker, parameters, [step])
        for seen, fragment in zip(kinds, worker._fragments, strict=True):
            seen |= {type(fragment.flight.mean).__name__} if fragment.flight is not None else set()
    worker.finish()
    return kinds


def test_fragments_have_one_kind_of_average_among_them() -> None:
    """Ranks that are out of turn, each at another fragment, would wait in different collectives for ever."""
    for names, kind in ((SPARSE, "TailInFlight"), ([*SPARSE, "bias"], "MeanInFlight")):
        assert run_ranks(kinds_of_averages, 2, names) == [[{kind}, {kind}]] * 2


# Two levels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "case"),
    [("blocks", "two bits"), ("crossed", "chunked"), ("blocks", "delayed"), ("three nodes", "clipped")],
)
def test_on_two_levels_a_node_is_what_a_rank_is(nodes: str, case: str) -> None:
    choices, oracle_choices = CASES[case]
    groups = NODES[nodes]
    results = run_ranks(train, sum(map(len, groups)), with_base(choices), "sgd", groups)
    check(results, "sgd", groups, oracle_choices)


def test_nodes_of_three_agree_whatever_the_rounding_of_their_mean() -> None:
    results = run_ranks(train, 6, with_base({"k_steps": 4}), "adamw", NODES["three each"], 12)
    assert len({result["digests"][-1] for result in results}) == 1


def test_the_bytes_between_nodes() -> None:
    choices = with_base({"k_steps": 4, "compression": {"value_dtype": "int2"}})
    results = run_ranks(train, 4, choices, "sgd", NODES["blocks"])
    numels = [torch.Size(SHAPES[name]).numel() for name in SPARSE]
    message = Compression(**choices["compression"]).nbytes(numels)
    whole = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if name not in SPARSE) + 8 + 2 * 4
    for result in results:
        inter = [inter for _, inter in result["sent"]]
        assert [step + 1 for step in range(STEPS) if inter[step] > (inter[step - 1] if step else 0)] == [4, 8, 12]
        # each of two ranks sends a half of the node's message, and of the rest
        assert inter[3] == pytest.approx(message / 2 + all_reduce_bytes(4 * -(-whole // 2), 2), abs=8)


@pytest.mark.parametrize("delay", [0, 2])
def test_ranks_that_step_alone_inside_their_nodes_send_the_mean_of_the_node(delay: int) -> None:
    choices = with_base({"k_steps": 4, "node_k_steps": 3, "delay_steps": delay})
    results = run_ranks(train, 4, choices, "sgd", NODES["blocks"], 12)
    for first, second in ((0, 1), (2, 3)):
        for name in SPARSE:
            assert torch.equal(results[first]["residuals"][name], results[second]["residuals"][name])
    assert len({result["digests"][-1] for result in results}) == (4 if delay else 1)
    assert results[0]["digests"][2] == results[1]["digests"][2] != results[2]["digests"][2]
    assert results[0]["digests"][0] != results[1]["digests"][0]


def wait_for_the_slow_network() -> tuple[list[float], int]:
    exchange, delay_s = exchange_of(NODES["blocks"], "sharded", "averages"), 0.5
    assert exchange.hierarchy is not None
    all_reduce = exchange.hierarchy._all_reduce_

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(delay_s)
        all_reduce(*args, **kwargs)

    exchange.hierarchy._all_reduce_ = slowly  # type: ignore[method-assign]
    worker, parameters = attach(LocalSGD(begin_step=0, **with_base({"k_steps": 4, "delay_steps": 3})), "sgd", exchange)
    train_on(worker, parameters, range(3))
    seconds = []
    for step in range(3, 7):
        started_s = time.perf_counter()
        train_on(worker, parameters, [step])
        seconds.append((time.perf_counter() - started_s) / delay_s)
    return seconds, worker.num_averages


def test_on_two_levels_a_hidden_average_is_not_waited_for() -> None:
    """The mean inside the node is of the step, and must not queue behind what crosses the slow network."""
    for seconds, num_averages in run_ranks(wait_for_the_slow_network, 4):
        assert max(seconds[:3]) < 0.8
        assert num_averages == 1


def through_leaders() -> str:
    try:
        attach(LocalSGD(compression=Compression()), "sgd", exchange_of(NODES["blocks"], "leader"))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_leaders_are_refused() -> None:
    assert all("sharded" in message for message in run_ranks(through_leaders, 4))


# State -------------------------------------------------------------------------------------------------------------


def stop_and_resume(choices: dict[str, Any], at: int, names: Sequence[str]) -> tuple[list[str], list[str]]:
    exchange = exchange_of(NODES["blocks"], "sharded", "averages")
    worker, parameters = attach(LocalSGD(**choices), "adamw", exchange, names)
    train_on(worker, parameters, range(at))
    state = copy.deepcopy(worker.state_dict())
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    straight = train_on(worker, parameters, range(at, STEPS))
    worker.finish()  # the next one has the same process groups, which must not hear of two averages at once
    exchange = exchange_of(NODES["blocks"], "sharded", "averages")
    worker, parameters = attach(LocalSGD(**choices), "adamw", exchange, names)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    worker.load_state_dict(state)
    resumed = train_on(worker, parameters, range(at, STEPS))
    worker.finish()
    return straight, resumed


def stop_at_each(choices: dict[str, Any], steps: Sequence[int]) -> list[tuple[list[str], list[str]]]:
    return [stop_and_resume(choices, at, names) for at in steps for names in (tuple(SHAPES), SPARSE)]


def test_resume_on_two_levels_is_to_the_bit() -> None:
    choices = with_base({"k_steps": 4, "delay_steps": 2, "compression": {"value_dtype": "int2"}})
    for results in run_ranks(stop_at_each, 4, choices, (2, 5, 8)):
        for straight, resumed in results:
            assert straight == resumed


METHOD = LocalSGD(k_steps=4, begin_step=0, compression=Compression(**BASE))


def state_after(steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    worker, parameters = attach(METHOD, "sgd", None)
    train_on(worker, parameters, range(steps))
    state = copy.deepcopy(worker.state_dict())
    with worker.consensus():
        return state, {name: p.detach().clone() for name, p in parameters.items()}


def go_on(state: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    worker, parameters = attach(METHOD, "sgd", None)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    worker.load_state_dict(copy.deepcopy(state))  # arguments of ranks are in memory that they share
    kept = residuals_of(worker)
    train_on(worker, parameters, range(6, 10))
    return {
        "kept": kept,
        "after": {name: digest([p]) for name, p in parameters.items()},
        "averages": worker.num_averages,
    }


def test_another_number_of_ranks_keeps_the_mean_of_what_was_unsent() -> None:
    results = run_ranks(state_after, 2, 6)
    states = [state for state, _ in results]
    merged = METHOD.merge_states(copy.deepcopy(states))
    residuals = merged["fragments"][0]["payload"]["residuals"]
    for name in SPARSE:
        mean = mean_of([state["fragments"][0]["payload"]["residuals"][name] for state in states])
        torch.testing.assert_close(residuals[name], mean)
        assert mean.any()
    continued = run_ranks(go_on, 3, merged, results[0][1])
    assert continued[0]["after"] == continued[1]["after"] == continued[2]["after"]
    for result in continued:
        assert result["averages"] == 2
        for name in SPARSE:
            assert torch.equal(result["kept"][name], residuals[name])


def resume_otherwise(first: dict[str, Any], second: dict[str, Any], at: int) -> str | dict[str, Tensor]:
    """Train with the one, resume with the other; return the weights, or why not."""
    worker, parameters = attach(LocalSGD(begin_step=0, **first), "sgd", None)
    train_on(worker, parameters, range(at))
    state = copy.deepcopy(worker.state_dict())
    worker.finish()
    worker, shown = attach(LocalSGD(begin_step=0, **second), "sgd", None)
    with torch.no_grad():
        for name, parameter in shown.items():
            parameter.copy_(parameters[name])
    try:
        worker.load_state_dict(state)
        train_on(worker, shown, range(at, STEPS))
    except (ConfigurationError, DisagreementError) as error:
        return str(error)
    return {name: p.detach().clone() for name, p in shown.items()}


@pytest.mark.parametrize("delay", [0, 1])
def test_an_average_on_its_way_lands_also_where_less_delay_goes_on(delay: int) -> None:
    first, second = (with_base({"k_steps": 4, "delay_steps": each}) for each in (3, delay))
    results = run_ranks(resume_otherwise, 2, first, second, 6)
    for name in SPARSE:
        oracle = by_oracle(name, "sgd", [[0], [1]], delay=3, steps=7)  # at the next step, which was its time anyway
        oracle.delay = delay
        for step in range(7, STEPS):
            oracle.take_step([gradient_of(name, replica, rank, step) for rank, replica in enumerate(oracle.replicas)])
        for result, replica in zip(results, oracle.replicas, strict=True):
            assert torch.equal(result[name], replica.detach())


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "whole": (with_base({"k_steps": 4}), {"k_steps": 4}, 6, "and without compression"),
    "narrow": (with_base({"k_steps": 4}), {"k_steps": 4, "value_dtype": "bfloat16"}, 6, "never would be"),
    "other tensors": (
        with_base({"k_steps": 4}),
        with_base({"compression": {"min_numel": 700}}),
        6,
        "with min_numel=700",
    ),
    "in mid-round": ({"k_steps": 4}, with_base({"k_steps": 4}), 6, "between two averages"),
    "outer in mid-round": ({"k_steps": 4}, {"k_steps": 4, "outer": "nesterov"}, 6, "last consensus"),
    "after a round": ({"k_steps": 4}, with_base({"k_steps": 4}), 8, ""),
    "other bits": (with_base({"k_steps": 4}), with_base({"k_steps": 3, "compression": {"value_dtype": "int8"}}), 6, ""),
}


def resume_all() -> dict[str, str | dict[str, Tensor]]:
    return {name: resume_otherwise(*case[:3]) for name, case in OTHERWISE.items()}


def test_what_a_state_keeps_is_not_dropped_by_another_method() -> None:
    for results in run_ranks(resume_all, 2):
        for name, (_, _, _, word) in OTHERWISE.items():
            if word:
                assert word in results[name], name
            else:
                assert isinstance(results[name], dict), results[name]


# What goes wrong ---------------------------------------------------------------------------------------------------


def begin_differently(choices: dict[str, Any]) -> str:
    worker, parameters = attach(LocalSGD(k_steps=3, begin_step=0, **choices), "sgd", None)
    with torch.no_grad():
        parameters["matrix"][2, 3] += dist.get_rank()
    try:
        train_on(worker, parameters, range(3))
    except DisagreementError as error:
        return str(error)
    return digest(parameters.values())


def begin_all_differently() -> list[str]:
    return [
        begin_differently(choices) for choices in (with_base({}), {"value_dtype": "float16"}, {"outer": "slowmo"}, {})
    ]


def test_ranks_that_begin_with_different_weights_are_told() -> None:
    """Changes of them would never make them equal; the mean of the weights does."""
    first, second = run_ranks(begin_all_differently, 2)
    assert first == second
    assert all("Begin with the same weights" in message for message in first[:3])


def poison(choices: dict[str, Any], value: float, names: Sequence[str] = tuple(SHAPES)) -> tuple[int, str]:
    worker, parameters = attach(LocalSGD(k_steps=3, begin_step=0, **choices), "sgd", None, names)
    for step in range(9):
        if step == 4 and dist.get_rank() == 1:
            with torch.no_grad():
                parameters["matrix"][1, 2] = value
        try:
            train_on(worker, parameters, [step])
        except NonFiniteGradientError as error:
            return step, str(error)
    return -1, ""


def poison_all() -> list[tuple[int, str]]:
    kinds = [{"value_dtype": name} for name in VALUE_NAMES] + [{"chunk": None, "clip_to_median": True}]
    cases = [with_base({"compression": kind}) for kind in kinds]
    cases.append(with_base({"delay_steps": 1}))
    told = [poison(case, value) for case in cases for value in (math.nan, math.inf)]
    return [poison(with_base({}), math.nan, SPARSE), *told]


def test_a_rank_that_is_not_finite_is_named_on_all_and_nothing_is_averaged() -> None:
    first, second = run_ranks(poison_all, 2)
    assert first == second
    assert [step for step, _ in first[:-2]] == [5] * len(first[:-2])
    assert [step for step, _ in first[-2:]] == [6, 6], "that of the delayed ones"
    assert all("rank 1 up to step 6 left parameter 'matrix'" in message for _, message in first)


def stand_still(clips: bool) -> list[str]:
    worker, parameters = attach(
        LocalSGD(begin_step=0, **with_base({"k_steps": 2, "compression": {"clip_to_median": clips}})), "sgd", None
    )
    if dist.get_rank() == 1:
        worker.optimizer.param_groups[0]["lr"] = 0.0
    return train_on(worker, parameters, range(6))


@pytest.mark.parametrize("clips", [False, True])
def test_a_rank_that_has_not_moved_receives_like_the_others(clips: bool) -> None:
    first, second = run_ranks(stand_still, 2, clips)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True] * 3
    assert len(set(first[1::2])) == 3


# Parameters of all kinds -------------------------------------------------------------------------------------------


def accumulate_small_steps() -> tuple[float, str]:
    """Changes far below the rounding of a bfloat16 weight, which the consensus in float32 adds up."""
    weight = Parameter(torch.full((64,), 256.0, dtype=torch.bfloat16))
    double = Parameter(torch.ones(64, dtype=torch.float64))
    compression = Compression(density=0.9, min_numel=1, value_dtype="float32", mean_over="ranks")
    optimizer = torch.optim.SGD([weight, double], lr=1.0)
    worker = LocalSGD(k_steps=2, begin_step=0, compression=compression).attach(
        optimizer, [("w", weight), ("d", double)]
    )
    for step in range(16):
        # a step of 2 on one of two ranks in every other step, of which half arrives: 257, and in bfloat16 256 again
        weight.grad = torch.zeros_like(weight)
        weight.grad[0] = -2.0 if dist.get_rank() == 0 and step % 2 else 0.0
        double.grad = torch.full_like(double, 1e-12)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    assert float(double[0].detach()) == pytest.approx(1 - 16e-12, abs=1e-14), "float64 is averaged whole"
    return float(weight[0].detach()), digest([weight, double])


def test_a_narrow_weight_does_not_forget_what_is_below_its_rounding() -> None:
    (first, one), (_, other) = run_ranks(accumulate_small_steps, 2)
    assert first == pytest.approx(256.0 + 8, abs=1)
    assert one == other


def freeze() -> dict[str, Tensor]:
    parameters = make_parameters({"a": (64,), "late": (64,), "never": (64,)})
    parameters["late"].requires_grad_(False)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    worker = LocalSGD(k_steps=2, begin_step=0, compression=Compression(**BASE)).attach(optimizer, parameters.items())
    seen = {}
    for step in range(8):
        if step == 4:
            parameters["late"].requires_grad_(True)
        for name in ("a", "late"):
            if parameters[name].requires_grad:
                parameters[name].grad = gradient_of(name, parameters[name], dist.get_rank(), step)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
        if step == 3:
            seen["frozen"] = parameters["late"].detach().clone()
    return {**seen, **{name: p.detach().clone() for name, p in parameters.items()}}


def test_frozen_and_unused_parameters() -> None:
    first, second = run_ranks(freeze, 2)
    assert torch.equal(first["frozen"], make_weight("late", (64,)))
    assert torch.equal(first["never"], make_weight("never", (64,)))
    assert not torch.equal(first["late"], first["frozen"])
    assert all(torch.equal(first[name], second[name]) for name in first)


def train_with(name: str) -> tuple[str, float]:
    """Toward a target: any inner optimizer, with the preset's wire."""
    weight, target = Parameter(torch.zeros(4096)), torch.linspace(-1, 1, 4096)
    optimizer: Any = getattr(torch.optim, name)([weight], lr=0.02)
    worker = LocalSGD(k_steps=5, begin_step=0, compression=Compression(density=1 / 16)).attach(
        optimizer, [("w", weight)]
    )
    for step in range(300):
        weight.grad = weight.detach() - target + 0.1 * coefficients("w", target, dist.get_rank(), step)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    return digest([weight]), float((weight.detach() - target).norm() / target.norm())


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_any_inner_optimizer_trains(optimizer: str) -> None:
    (first, distance), (second, _) = run_ranks(train_with, 2, optimizer)
    assert first == second
    assert distance < (0.6 if optimizer == "Adagrad" else 0.25)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="value_dtype='bfloat16' with a compression"):
        LocalSGD(value_dtype="bfloat16", compression=Compression())
    with pytest.raises(ConfigurationError, match="no bits"):
        LocalSGD(compression={"bits": 2})  # type: ignore[arg-type]
    assert LocalSGD(compression={"density": 0.5}).compression == Compression(density=0.5)  # type: ignore[arg-type]
    described = LocalSGD(compression=Compression()).describe()["compression"]
    assert described == dataclasses.asdict(Compression())


def drop_in_flight(stop: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    weight = Parameter(torch.zeros(256))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    compression = Compression(decay=1.0, density=0.1, min_numel=1, value_dtype="float32", mean_over="ranks")
    method = LocalSGD(k_steps=6, begin_step=0, delay_steps=3, compression=compression)
    worker = method.attach(optimizer, [("w", weight)])
    pull = torch.linspace(1, 2, 256).roll(40 * dist.get_rank())
    for _ in range(stop):
        weight.grad = -pull
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    state = worker.state_dict()
    worker.finish()
    return weight.detach().clone(), residuals_of(worker)["w"], state


@pytest.mark.parametrize("stop", [6, 8, 9, 13])  # after 6 to 8 and 12 to 14 steps an average is on its way
def test_an_average_that_is_dropped_is_not_counted_twice(stop: int) -> None:
    """Where nothing is forgotten, weights and residuals are together what the steps have done, in the mean of ranks."""
    ranks = run_ranks(drop_in_flight, 2, stop)
    done = stop * sum(torch.linspace(1, 2, 256).roll(40 * rank) for rank in range(2)) / 2
    weights, residuals = (torch.stack(each).mean(0) for each in list(zip(*ranks, strict=True))[:2])
    torch.testing.assert_close(weights + residuals, done)
    merged = LocalSGD(compression={}).merge_states([state for _, _, state in ranks])
    own = torch.stack([state["own"]["w"] if state["own"] else weights for _, _, state in ranks]).mean(0)
    torch.testing.assert_close(own + merged["fragments"][0]["payload"]["residuals"]["w"], done)
