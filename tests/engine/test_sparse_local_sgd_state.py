"""Sparse local SGD: what is kept survives a resume, another world and the end; and what goes wrong is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, DisagreementError, LocalSGD, NonFiniteGradientError
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.what.values import VALUE_NAMES
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import TensorWork
from tests.engine.problem import NODES, Nodes, Shape, weights_of
from tests.engine.replica_problem import (
    BASE,
    SHAPES,
    SPARSE,
    SPARSE_STEPS,
    attach,
    by_sparse_oracle,
    flat_groups,
    gradient_of,
    residuals_of,
    run_each,
    set_weights,
    train_on,
    with_base,
)
from tests.local_oracle import mean_of
from tests.ranks import run_ranks

# Resume ------------------------------------------------------------------------------------------------------------


METHOD = LocalSGD(k_steps=4, begin_step=0, compression=Compression(**BASE))


def state_after(steps: int, nodes: Nodes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    worker, parameters = attach(METHOD, "sgd", SHAPES, nodes)
    train_on(worker, parameters, range(steps))
    state = copy.deepcopy(worker.state_dict())
    with worker.consensus():
        return state, weights_of(parameters)


def go_on(state: dict[str, Any], weights: dict[str, Tensor], nodes: Nodes) -> dict[str, Any]:
    worker, parameters = attach(METHOD, "sgd", SHAPES, nodes)
    set_weights(parameters, weights)
    worker.load_state_dict(copy.deepcopy(state))  # arguments of ranks are in memory that they share
    kept, again = residuals_of(worker), worker.state_dict()
    train_on(worker, parameters, range(6, 10))
    after = {name: digest([p]) for name, p in parameters.items()}
    return {"kept": kept, "state": again, "after": after, "averages": worker.num_averages}


@pytest.mark.parametrize(("first", "second"), [("", ""), ("", "blocks"), ("crossed", ""), ("blocks", "three nodes")])
def test_another_world_keeps_the_mean_of_what_was_unsent(first: str, second: str) -> None:
    before, after = NODES.get(first, ()), NODES.get(second, ())
    results = run_ranks(state_after, sum(map(len, before)) or 2, 6, before)
    states = [state for state, _ in results]
    merged = merge_states(copy.deepcopy(states))
    for name in SPARSE:
        nodes = before or flat_groups(2)
        kept = [torch.cat([states[rank]["residuals"][name] for rank in node]) for node in nodes]
        torch.testing.assert_close(merged["residuals"][name], mean_of(kept))
        assert merged["residuals"][name].any()
    continued = run_ranks(go_on, sum(map(len, after)) or 3, merged, results[0][1], after)
    assert all(result["after"] == continued[0]["after"] for result in continued)
    assert all(result["averages"] == 2 for result in continued)
    again = merge_states([result["state"] for result in continued])
    for name in SPARSE:
        whole = torch.cat([continued[rank]["kept"][name] for rank in (after or flat_groups(1))[0]])
        assert torch.equal(whole, merged["residuals"][name])
        torch.testing.assert_close(again["residuals"][name], merged["residuals"][name])


# Resume with another method ----------------------------------------------------------------------------------------


def resume_otherwise(first: dict[str, Any], second: dict[str, Any], at: int) -> str | dict[str, Tensor]:
    """Train with the one, resume with the other; return the weights, or why not."""
    worker, parameters = attach(LocalSGD(**{"begin_step": 0, **first}), "sgd", SHAPES)
    train_on(worker, parameters, range(at))
    state = copy.deepcopy(worker.state_dict())
    worker.finish()
    worker, shown = attach(LocalSGD(**{"begin_step": 0, **second}), "sgd", SHAPES)
    set_weights(shown, weights_of(parameters))
    try:
        worker.load_state_dict(state)
        train_on(worker, shown, range(at, SPARSE_STEPS))
    except (ConfigurationError, DisagreementError) as error:
        return str(error)
    return weights_of(shown)


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "whole": (with_base({"k_steps": 4}), {"k_steps": 4}, 6, "and with Whole() they never would be"),
    "narrow": (with_base({"k_steps": 4}), {"k_steps": 4, "value_dtype": "bfloat16"}, 6, "never would be"),
    "other tensors": (
        with_base({"k_steps": 4}),
        with_base({"compression": {"min_numel": 700}}),
        6,
        "min_numel=700",
    ),
    "in mid-round": ({"k_steps": 4}, with_base({"k_steps": 4}), 6, "between two averages"),
    "outer in mid-round": ({"k_steps": 4}, {"k_steps": 4, "outer": "nesterov"}, 6, "last consensus"),
    "after a round": ({"k_steps": 4}, with_base({"k_steps": 4}), 8, ""),
    "other bits": (with_base({"k_steps": 4}), with_base({"k_steps": 3, "compression": {"value_dtype": "int8"}}), 6, ""),
}


def test_what_a_state_keeps_is_not_dropped_by_another_method() -> None:
    calls: dict[str, Any] = {name: partial(resume_otherwise, *case[:3]) for name, case in OTHERWISE.items()}
    first = with_base({"k_steps": 4, "delay_steps": 3})
    for delay in (0, 1):
        calls[f"delay {delay}"] = partial(resume_otherwise, first, with_base({"k_steps": 4, "delay_steps": delay}), 6)
    results = run_each(2, calls)
    for name, (_, _, _, word) in OTHERWISE.items():
        for result in results[name]:
            if word:
                assert word in result, name
            else:
                assert isinstance(result, dict), result
    for delay in (0, 1):  # an average that has been begun is applied also where less delay goes on
        for name in SPARSE:
            oracle = by_sparse_oracle(name, "sgd", flat_groups(2), delay=3, steps=7)  # at its time, the next step
            oracle.delay = delay
            for step in range(7, SPARSE_STEPS):
                oracle.take_step(
                    [gradient_of(name, replica, rank, step) for rank, replica in enumerate(oracle.replicas)]
                )
            for result, replica in zip(results[f"delay {delay}"], oracle.replicas, strict=True):
                assert torch.equal(result[name], replica.detach())


# An average that is dropped ----------------------------------------------------------------------------------------

PULL = torch.linspace(1, 2, 256)


def drop(stop: int, nodes: Nodes, node_k_steps: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    weight = Parameter(torch.zeros(256))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    compression = Compression(decay=1.0, density=0.1, min_numel=1, value_dtype="float32", mean_over="ranks")
    method = LocalSGD(6, 0, delay_steps=3, compression=compression, node_k_steps=node_k_steps)
    worker: Any = method.attach(optimizer, [("w", weight)], topology=nodes or None)
    for _ in range(stop):
        weight.grad = -PULL.roll(40 * dist.get_rank())
        optimizer.step()
    state = worker.state_dict()
    worker.finish()
    return weight.detach().clone(), residuals_of(worker)["w"], state


def test_an_average_that_is_dropped_is_not_counted_twice() -> None:
    """Where nothing is forgotten, weights and residuals are together what the steps have done, in the mean of ranks."""
    stops = (6, 8, 9, 13)  # after 6 to 8 and 12 to 14 steps an average has been begun and not applied
    topologies: list[tuple[Nodes, int]] = [((), 1), (NODES["blocks"], 1), (NODES["blocks"], 5)]
    for nodes, node_k_steps in topologies:
        num_ranks = sum(map(len, nodes)) or 2
        results = run_each(num_ranks, {str(stop): partial(drop, stop, nodes, node_k_steps) for stop in stops})
        groups = nodes or flat_groups(2)
        for stop in stops:
            ranks = results[str(stop)]
            done = stop * mean_of([PULL.roll(40 * rank) for rank in range(num_ranks)])
            weights = mean_of([weight for weight, _, _ in ranks])
            residual = mean_of([torch.cat([ranks[rank][1] for rank in node]) for node in groups])
            torch.testing.assert_close(weights + residual, done)
            merged = merge_states([state for _, _, state in ranks])
            own = mean_of([state["own"]["w"] if state["own"] else weights for _, _, state in ranks])
            torch.testing.assert_close(own + merged["residuals"]["w"], done)


def end_half_an_average(end: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return what is kept before an average of bfloat16 weights has begun, and after it is given up."""
    weight = Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    method = LocalSGD(2, 0, delay_steps=1, compression=Compression(decay=1.0, density=0.1, min_numel=1))
    worker: Any = method.attach(optimizer, [("w", weight)])
    kept = torch.empty(0)
    for _ in range(4):  # the second average is measured from the consensus of the first, which is no bfloat16
        kept = residuals_of(worker)["w"] if worker.averaging.sparse.residuals else kept
        weight.grad = -PULL.roll(40 * dist.get_rank()).bfloat16() * (1 + dist.get_rank())
        optimizer.step()
    state = worker.state_dict() if end in ("merge", "save") else {}  # after which this rank's message is gone
    if end == "drop":
        worker.finish()
    elif end != "merge":
        worker.recall()
    return kept, residuals_of(worker)["w"], state


def test_rounded_weights_do_not_change_what_an_average_puts_back() -> None:
    ends = ("drop", "save", "recall", "merge")
    for end, ranks in run_each(2, {end: partial(end_half_an_average, end) for end in ends}).items():
        before, after = (mean_of([rank[number] for rank in ranks]) for number in (0, 1))
        if end == "merge":
            after = merge_states([state for _, _, state in ranks])["residuals"]["w"]
        assert before.any()
        assert (after - before).abs().max() < 1e-6, end


# What goes wrong ---------------------------------------------------------------------------------------------------


def begin_differently(choices: dict[str, Any]) -> str:
    worker, parameters = attach(LocalSGD(**{"k_steps": 3, "begin_step": 0, **choices}), "sgd", SHAPES)
    with torch.no_grad():
        parameters["matrix"][2, 3] += dist.get_rank()
    try:
        train_on(worker, parameters, range(3))
    except DisagreementError as error:
        return str(error)
    return digest(parameters.values())


def test_ranks_that_begin_with_different_weights_are_told() -> None:
    """Changes of them would never make them equal, and the mean of two beginnings is none."""
    methods: dict[str, dict[str, Any]] = {
        "sparse": with_base({}),
        "narrow": {"value_dtype": "float16"},
        "outer": {"outer": "slowmo"},
        "plain": {},
    }
    results = run_each(2, {name: partial(begin_differently, choices) for name, choices in methods.items()})
    for first, second in results.values():
        assert first == second
        assert "all begin with the same weights" in first
        assert "checksum of matrix: rank 0 has" in first


def poison(choices: dict[str, Any], value: float, shapes: Mapping[str, Shape] = SHAPES) -> tuple[int, str]:
    worker, parameters = attach(LocalSGD(**{"k_steps": 3, **choices}), "sgd", shapes)
    for step in range(9):
        if step == 4 and dist.get_rank() == 1:
            with torch.no_grad():
                parameters["matrix"][1, 2] = value
        try:
            train_on(worker, parameters, [step])
        except NonFiniteGradientError as error:
            return step, str(error)
    return -1, ""


def test_a_rank_that_is_not_finite_is_named_on_all_and_nothing_is_averaged() -> None:
    kinds = [{"value_dtype": name} for name in VALUE_NAMES] + [{"chunk": None, "clip_to_median": True}]
    cases = [with_base({"compression": kind}) for kind in kinds]
    cases.append(with_base({"delay_steps": 1}))
    calls = {f"{case}, {value}": partial(poison, case, value) for case in cases for value in (math.nan, math.inf)}
    calls["alone"] = partial(poison, with_base({}), math.nan, SPARSE)
    for case, (first, second) in run_each(2, calls).items():
        assert first == second
        step, message = first
        assert step == (6 if "delay_steps" in case else 5), case
        assert "rank 1 up to step 6 left parameter 'matrix'" in message


def stand_still(clips: bool) -> list[str]:
    method = LocalSGD(**with_base({"k_steps": 2, "compression": {"clip_to_median": clips}}))
    worker, parameters = attach(method, "sgd", SHAPES)
    if dist.get_rank() == 1:
        worker.optimizer.param_groups[0]["lr"] = 0.0
    return train_on(worker, parameters, range(6))


def test_a_rank_that_has_not_moved_receives_like_the_others() -> None:
    for first, second in run_each(2, {str(clips): partial(stand_still, clips) for clips in (False, True)}).values():
        assert [a == b for a, b in zip(first, second, strict=True)] == [False, True] * 3
        assert len(set(first[1::2])) == 3


# The link is lost in the middle of an average -------------------------------------------------------------------------


class LinkLost(RuntimeError):
    pass


def lose_the_link(*_: Any, **__: Any) -> None:
    raise LinkLost


def fail_in_the_average(options: dict[str, Any]) -> dict[str, Any]:
    """Average once, fail in the second average, and take the step again."""
    method = LocalSGD(k_steps=3, begin_step=0, **options)
    worker, parameters = attach(method, "sgd", SHAPES)
    train_on(worker, parameters, range(5))
    kept = residuals_of(worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorWork, "wait", lose_the_link)
        with pytest.raises(LinkLost):
            train_on(worker, parameters, range(5, 6 + worker.delay_steps))
    state = worker.state_dict()
    own = {name: digest([p]) for name, p in parameters.items()}
    assert {name: digest([p]) for name, p in state["own"].items()} == own
    assert not worker.parameters_agree
    errors = [float((v - kept[name]).abs().max()) for name, v in residuals_of(worker).items()]
    again = train_on(worker, parameters, range(worker.step, worker.step + 4))
    with worker.consensus():
        shown = digest(parameters.values())
    return {"torn": state["torn"], "steps": worker.step, "errors": errors, "again": again, "shown": shown}


SPARSE_OPTIONS = {"compression": Compression(**BASE)}


@pytest.mark.parametrize(
    "options",
    [{"compression": None}, SPARSE_OPTIONS, {**SPARSE_OPTIONS, "delay_steps": 2}],
    ids=["whole", "sparse", "hidden"],
)
def test_an_average_that_fails_leaves_each_rank_what_it_had(options: dict[str, Any]) -> None:
    first, second = run_ranks(fail_in_the_average, 2, options)
    assert first["shown"] == second["shown"]
    assert set(first["again"]) != set(second["again"])  # local steps
    for result in (first, second):
        assert "the average" in result["torn"]
        assert all(error < 1e-5 for error in result["errors"])


def test_an_average_that_fails_leaves_no_nan_where_nothing_is_kept_for_later() -> None:
    first, second = run_ranks(fail_in_the_average, 2, {"compression": Compression(**BASE, decay=0.0)})
    assert first["shown"] == second["shown"]
    assert all(math.isfinite(error) for result in (first, second) for error in result["errors"])


def test_a_state_with_numbers_of_numpy_can_be_read(tmp_path: Path) -> None:
    worker, _ = attach(METHOD, "sgd", SHAPES)
    for group in worker.optimizer.param_groups:
        group["lr"] = np.float64(0.05)
        group["betas"] = (np.float32(0.5), 0.9)
    torch.save(worker.state_dict(), tmp_path / "shard.pt")
    (group, *_) = torch.load(tmp_path / "shard.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["lr"] == 0.05
    assert group["betas"] == (0.5, 0.9)
