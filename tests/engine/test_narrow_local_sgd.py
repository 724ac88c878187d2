"""Local SGD whose changes are sent in few bits: nothing is lost, on one level and on two, and over a resume."""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, LocalSGD, NonFiniteGradientError
from lightning_lowbw.what.narrow_values import NARROW_NAMES
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import NODES, Nodes, make_weight, mean_of_nodes, weights_of
from tests.engine.replica_problem import attach, flat_groups, residuals_of, run_each, set_weights, train, train_on
from tests.local_oracle import mean_of
from tests.ranks import run_ranks

SHAPES = {"a": (64, 64), "b": (101,)}
# Of the largest change that an average sends, once: not twenty times, as without error feedback.
LIMIT = {"bfloat16": 2.0**-7, "float16": 2.0**-7, "int8": 2.0**-5, "int4": 2.0**-1}


@functools.cache
def results_of() -> dict[str, list[Any]]:
    calls = {
        name: partial(train, LocalSGD(k_steps=2, begin_step=0, value_dtype=name), steps=40, shapes=SHAPES)
        for name in ("float32", *NARROW_NAMES)
    }
    return run_each(3, calls)


@pytest.mark.parametrize("value_dtype", NARROW_NAMES)
def test_replicas_are_equal_and_near_those_that_send_float32(value_dtype: str) -> None:
    narrow, wide = results_of()[value_dtype], results_of()["float32"][0]
    assert len({result["digests"][-1] for result in narrow}) == 1
    assert len({result["digests"][-2] for result in narrow}) == 3
    for name, shape in SHAPES.items():
        scale = float((wide["own"][name] - make_weight(name, shape)).abs().max())
        assert float((narrow[0]["own"][name] - wide["own"][name]).abs().max()) < LIMIT[value_dtype] * scale


# Nothing is lost ---------------------------------------------------------------------------------------------------

NUMELS = {"w": 257, "late": 40, "x": 3}
STOPS = (5, 6, 10)  # averages come after every third step


def pull(name: str, rank: int) -> Tensor:
    return torch.linspace(1, 2, NUMELS[name]).roll(40 * rank) ** 3


def accumulate(value_dtype: str, nodes: Nodes, node_k_steps: int) -> dict[int, Any]:
    """Steps of 1 along a constant gradient; one of the parameters joins after an average, another rests for one."""
    parameters = {name: Parameter(torch.zeros(numel)) for name, numel in NUMELS.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    method = LocalSGD(3, 0, value_dtype=value_dtype, node_k_steps=node_k_steps)
    worker: Any = method.attach(optimizer, parameters.items(), topology=nodes or None)
    seen = {}
    for step in range(max(STOPS)):
        parameters["late"].requires_grad_(step >= 3)
        parameters["w"].requires_grad_(step not in (6, 7, 8))
        for name, parameter in parameters.items():
            parameter.grad = -pull(name, dist.get_rank()) if parameter.requires_grad else None
        optimizer.step()
        if step + 1 in STOPS:
            with worker.consensus():
                seen[step + 1] = weights_of(parameters), residuals_of(worker), copy.deepcopy(worker.state_dict())
    return seen


def num_moved(name: str, steps: int) -> int:
    return sum((name != "late" or step >= 3) and (name != "w" or step not in (6, 7, 8)) for step in range(steps))


@pytest.mark.parametrize("value_dtype", NARROW_NAMES)
def test_weights_and_residuals_are_together_what_the_steps_have_done(value_dtype: str) -> None:
    """In the mean of the participants; on two levels a rank keeps the residual of its part."""
    crossed = NODES["crossed"]
    for nodes, node_k_steps in [((), 1), (crossed, 1), (crossed, 2)]:
        num_ranks = sum(map(len, nodes)) or 3
        results = run_ranks(accumulate, num_ranks, value_dtype, nodes, node_k_steps)
        for stop in STOPS:
            by_rank = [result[stop] for result in results]
            merged = merge_states([state for _, _, state in by_rank])
            for name in NUMELS:
                done = num_moved(name, stop) * mean_of([pull(name, rank) for rank in range(num_ranks)])
                kept = [residuals[name] for _, residuals, _ in by_rank if name in residuals]
                unsent = mean_of_nodes(kept, nodes or flat_groups(3)) if kept else torch.zeros(NUMELS[name])
                assert all(torch.equal(weights[name], by_rank[0][0][name]) for weights, _, _ in by_rank)
                torch.testing.assert_close(by_rank[0][0][name] + unsent, done, rtol=1e-5, atol=1e-4)
                torch.testing.assert_close(merged["rounded"].get(name, torch.zeros(NUMELS[name])), unsent)
            assert any(residual.any() for residual in merged["rounded"].values())


# Overflow ----------------------------------------------------------------------------------------------------------


def overflow(value_dtype: str, ends: str, nodes: Nodes) -> list[str]:
    """Return what each period says, until one fails, where ranks move by 3e38 in the first one: with float16 rank 1."""
    weight = Parameter(torch.zeros(600))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    worker: Any = LocalSGD(2, 0, value_dtype=value_dtype).attach(optimizer, [("w", weight)], topology=nodes or None)
    is_large, said = value_dtype != "float16" or dist.get_rank() == 1, []
    for period in range(3):
        try:
            for _ in range(2):
                weight.grad = torch.full_like(weight, -1.5e38 if is_large and period == 0 else -1.0)
                optimizer.step()
            if ends == "finish":
                worker.finish()
            elif ends == "consensus":
                with worker.consensus():
                    pass
            said.append("")
        except NonFiniteGradientError as error:
            return [*said, str(error)]
    return said


@pytest.mark.fault(
    "local steps that change weights by 3e38, which overflows in the residual of an average in few bits",
    "an error on all ranks that names the rank, at the next average, at the end, or before the weights are saved",
)
@pytest.mark.parametrize("value_dtype", NARROW_NAMES)
def test_what_is_kept_of_changes_too_large_is_told(value_dtype: str) -> None:
    """The weights agree then, and may be finite: of 3e38 float16 sends 65504, and the rest adds up to an infinity."""
    calls = {ends: partial(overflow, value_dtype, ends, ()) for ends in ("next", "finish", "consensus")}
    for ends, (first, second) in run_each(2, calls).items():
        *before, said = first
        assert first == second
        assert before == ([""] if ends == "next" else [])
        who = "rank 1" if value_dtype == "float16" else "rank 0"
        assert f"what was kept of earlier changes of the weights on {who} has become too large for float32" in said
        assert f"Step {4 if ends == 'next' else 2}: " in said


def test_what_a_part_of_a_node_keeps_is_told_to_all_nodes() -> None:
    for said in run_ranks(overflow, 4, "float16", "next", NODES["blocks"]):
        assert said[0] == ""
        assert "what was kept of earlier changes of the weights on rank 0 has become too large for float32" in said[1]


# Resume ------------------------------------------------------------------------------------------------------------

METHODS = {
    "int4": LocalSGD(k_steps=3, begin_step=1, value_dtype="int4"),
    "int8 in nodes": LocalSGD(k_steps=5, begin_step=0, value_dtype="int8", node_k_steps=2),
}


def go_on(states: list[Any] | None, is_merged: bool, nodes: Nodes) -> dict[str, Any] | str:
    """Resume after six steps, or take these, too."""
    worker, parameters = attach(METHODS["int4"], "sgd", SHAPES, nodes)
    if states is None:
        train_on(worker, parameters, range(9))
        return {"after": digest(parameters.values())}
    state, weights = copy.deepcopy(states[0] if is_merged else states[dist.get_rank()])
    set_weights(parameters, weights)
    try:
        worker.load_state_dict(state)
    except ConfigurationError as error:
        return str(error)
    again = worker.state_dict()
    train_on(worker, parameters, range(6, 9))  # a whole period
    return {"state": again, "after": digest(parameters.values())}


def state_after(steps: int, nodes: Nodes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    worker, parameters = attach(METHODS["int4"], "sgd", SHAPES, nodes)
    train_on(worker, parameters, range(steps))
    state = copy.deepcopy(worker.state_dict())
    with worker.consensus():
        return state, weights_of(parameters)


def test_another_world_keeps_the_mean_and_another_topology_is_refused() -> None:
    states = run_ranks(state_after, 4, 6, NODES["blocks"])
    merged = merge_states([copy.deepcopy(state) for state, _ in states])
    given = [(merged, states[0][1])]
    calls = {
        "blocks": partial(go_on, given, True, NODES["blocks"]),
        "flat": partial(go_on, given, True, ()),
        "same": partial(go_on, states, False, NODES["blocks"]),
        "without a stop": partial(go_on, None, False, NODES["blocks"]),
        "other": partial(go_on, states, False, NODES["crossed"]),
        "refused": partial(go_on, states, False, ()),
    }
    results = run_each(4, calls)
    for name in ("blocks", "flat"):
        assert len({result["after"] for result in results[name]}) == 1
        again = merge_states([result["state"] for result in results[name]])
        for tensor, rounded in merged["rounded"].items():
            assert rounded.any()
            torch.testing.assert_close(again["rounded"][tensor], rounded)
    after = {name: [result["after"] for result in results[name]] for name in ("same", "without a stop")}
    assert after["same"] == after["without a stop"]
    for message in (*results["other"], *results["refused"]):
        assert "a rank on nodes [[0, 1], [2, 3]], and the ranks are now " in message
    assert all("now on nodes [[0, 3], [1, 2]]" in message for message in results["other"])
    assert all("now without nodes" in message for message in results["refused"])


# Parameters of all kinds -------------------------------------------------------------------------------------------


def add_a_group() -> dict[str, Any]:
    parameters = {"first": Parameter(torch.ones(50)), "double": Parameter(torch.ones(8, dtype=torch.float64))}
    parameters["complex"] = Parameter(torch.ones(9, dtype=torch.complex64))
    late = Parameter(torch.ones(30))
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    worker: Any = LocalSGD(k_steps=2, begin_step=0, value_dtype="int8").attach(
        optimizer, [*parameters.items(), ("late", late)]
    )
    for step in range(8):
        if step == 3:
            parameters["late"] = late
            optimizer.add_param_group({"params": [late]})
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1e-12 * (1 + dist.get_rank()))
        optimizer.step()
    exact = 1 - 8 * 1.5e-12
    return {
        "equal": digest(parameters.values()),
        "taken": sorted(worker.averaging.narrow.residuals),
        "is exact": abs(float(parameters["double"][0].detach()) - exact) < 1e-15,
        "averages": worker.num_averages,
    }


def test_float64_is_sent_whole_and_parameters_may_come_later() -> None:
    results = run_ranks(add_a_group, 2)
    assert results[0] == results[1]
    assert results[0]["taken"] == ["complex", "first", "late"]
    assert results[0]["is exact"]
    assert results[0]["averages"] == 4
