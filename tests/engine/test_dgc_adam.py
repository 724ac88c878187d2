"""DGC for Adam and AdamW on real gloo ranks, against its equations in one process; on one level and on two."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from lightning_lowbw import DGC, ConfigurationError, Method
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.what.corrections import AdamCorrection
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.topology import part_of
from tests.adam_oracle import OracleAdam
from tests.engine.problem import (
    AWKWARD,
    FLAT,
    NODES,
    Nodes,
    Said,
    backward,
    coefficients,
    each,
    from_memory,
    in_memory,
    make_gradient_worker,
    make_parameters,
    make_weight,
    message_of,
    take_step,
)
from tests.ranks import run_ranks

BEGIN, STEPS, LR = 4, 12, 0.01
SHAPES = {**AWKWARD, "large": (40, 30)}
MIN_NUMEL = 100
EXACT: dict[str, Any] = {"selection": "exact", "value_dtype": "float32", "min_numel": MIN_NUMEL}
Case = tuple[str, dict[str, Any], dict[str, Any]]


def method_for(**changes: Any) -> Method:
    return DGC(**{"rampup_begin_step": BEGIN, "rampup_step": 4, "sparsity": [0.5, 0.9], **EXACT, **changes})


def train(
    kind: str, options: dict[str, Any], changes: dict[str, Any], nodes: Nodes = FLAT, sign: float = 1.0
) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    optimizer = {"Adam": Adam, "AdamW": AdamW}[kind](parameters.values(), lr=LR, **options)
    worker = make_gradient_worker(method_for(**changes).at(nodes), optimizer, parameters)
    assert worker.sparse_gradients is not None
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step, sign=sign)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
        assert "_init_group" not in vars(optimizer)
    return {
        "digest": digest(parameters.values()),
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "steps": [float(optimizer.state[parameters[name]]["step"]) for name in ("large", "vector")],
    }


def by_the_equations(
    kind: str, options: dict[str, Any], changes: dict[str, Any], nodes: Nodes = FLAT
) -> dict[str, Tensor]:
    """Return the weights: of each part of a tensor, trained by one rank per node."""
    options = {key: value for key, value in options.items() if key in ("betas", "eps", "weight_decay", "amsgrad")}
    if kind == "AdamW":
        options = {"weight_decay": 0.01, **options}  # torch's default
    begin = changes.get("rampup_begin_step", BEGIN)
    weights = {name: in_memory(make_weight(name, shape), name) for name, shape in SHAPES.items()}
    oracles = {
        (name, local_rank): OracleAdam(
            len(nodes),
            LR,
            is_decoupled=kind == "AdamW",
            min_numel=1 if weight.numel() >= MIN_NUMEL else weight.numel() + 1,
            masking=changes.get("momentum_masking", False),
            keep_momentum=changes.get("keep_momentum", False),
            **options,
        )
        for name, weight in weights.items()
        for local_rank in range(len(nodes[0]))
    }
    for step in range(STEPS):
        density = 1.0 if step < begin else 0.5 if step < begin + 2 else 0.1
        for name, weight in weights.items():
            like = torch.empty(SHAPES[name])
            random = [[in_memory(coefficients(name, like, rank, step), name) for rank in n] for n in nodes]
            of_nodes = [sum(c + weight for c in of_node) / len(of_node) for of_node in random]
            for local_rank in range(len(nodes[0])):
                part = part_of(weight.numel(), local_rank, len(nodes[0]))
                own = [[gradient[part]] for gradient in of_nodes]
                if not own[0][0].numel():
                    continue
                if density == 1.0:
                    oracles[name, local_rank].dense_step([weight[part]], own)
                else:
                    oracles[name, local_rank].sparse_step([weight[part]], own, density)
    return {name: from_memory(weight, name, SHAPES[name]) for name, weight in weights.items()}


CASES: list[Case] = [
    ("AdamW", {}, {}),
    ("AdamW", {"eps": 1e-3}, {"rampup_begin_step": 0}),
    ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {"momentum_masking": True}),
    ("AdamW", {"betas": (0.0, 0.95)}, {}),
    ("AdamW", {}, {"keep_momentum": True}),
    ("AdamW", {"betas": (0.95, 0.99)}, {"keep_momentum": True, "momentum_masking": True}),
    ("Adam", {"weight_decay": 0.05}, {}),
    ("Adam", {"amsgrad": True, "eps": 1e-3}, {}),
    ("AdamW", {"foreach": True}, {}),
    ("AdamW", {"fused": True}, {}),
]


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [(FLAT, CASES), (NODES["blocks"], [CASES[0], CASES[4]])],
    ids=["flat", "two levels"],
)
def test_equals_the_equations(nodes: Nodes, cases: list[Case]) -> None:
    by_rank = run_ranks(each, sum(map(len, nodes)), train, [(*case, nodes) for case in cases])
    for case, *results in zip(cases, *by_rank, strict=True):
        assert len({result["digest"] for result in results}) == 1
        for name, weight in by_the_equations(*case, nodes).items():
            torch.testing.assert_close(
                results[0]["weights"][name],
                weight,
                rtol=1e-4,
                atol=2e-5,
                msg=lambda m: f"{case} {name}: {m}",  # noqa: B023
            )
        assert results[0]["steps"] == [STEPS, STEPS]


def test_climbing_is_descending_the_negative() -> None:
    cases = [("AdamW", {}, {}, FLAT, 1.0), ("AdamW", {"maximize": True}, {}, FLAT, -1.0)]
    down, up = run_ranks(each, 2, train, cases)[0]
    for name, weight in down["weights"].items():
        torch.testing.assert_close(up["weights"][name], weight, rtol=1e-6, atol=1e-7)


def test_with_the_other_choices_replicas_are_equal() -> None:
    choices = [{"selection": "sampled"}, {"value_dtype": "bfloat16"}]
    for first, second in zip(*run_ranks(each, 2, train, [("AdamW", {}, changes) for changes in choices]), strict=True):
        assert first["digest"] == second["digest"]


def resume(states: list[Any], first: int, last: int, nodes: Nodes) -> Any:
    parameters = make_parameters(SHAPES)
    optimizer = AdamW(parameters.values(), lr=LR)
    worker = method_for().attach(optimizer, parameters.items(), topology=nodes)
    assert isinstance(worker, GradientWorker)
    if states:
        state, weights, of_optimizer = states[dist.get_rank()]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))  # which the ranks have in shared memory
        worker.load_state_dict(state)
    for step in range(first, last):
        take_step(worker, parameters, step)
    of_optimizer, whole = optimizer.state_dict(), worker.whole_momentum()
    for index, parameter in enumerate(parameters.values()):
        if parameter in whole:
            of_optimizer["state"][index]["exp_avg"] = whole[parameter]
    return worker.state_dict(), {name: p.detach().clone() for name, p in parameters.items()}, of_optimizer


def test_what_cannot_be_corrected_is_refused() -> None:
    parameters = make_parameters({"large": (40, 30)})
    optimizer = AdamW(parameters.values(), differentiable=True)
    message = message_of(lambda: method_for().attach(optimizer, parameters.items()), ConfigurationError)
    assert message is not None
    assert "differentiable=True" in message
    assert "correction=" in message


def attach_and_listen() -> list[str]:
    parameters, said = make_parameters({"large": (40, 30)}), Said()
    logger = logging.getLogger(LOGGER)
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    method_for().attach(AdamW(parameters.values()), parameters.items())
    return said.messages


def test_a_lowered_beta1_is_told_in_plain_loops_once() -> None:
    first, second = run_ranks(attach_and_listen, 2)
    assert ["beta1=0.9 is lowered to 0.7" in each for each in first] == [True]
    assert second == []


def test_a_lowered_beta1_is_told() -> None:
    parameters = make_parameters({"large": (40, 30)})
    notes = []
    for optimizer in (
        AdamW(parameters.values()),
        AdamW(parameters.values(), betas=(0.7, 0.99)),
        SGD(parameters.values()),
    ):
        worker = method_for().attach(optimizer, parameters.items())
        assert isinstance(worker, GradientWorker)
        notes.append(worker.correction.note())
    assert "beta1=0.9 is lowered to 0.7" in notes[0]
    assert notes[1:] == ["", ""]


def test_other_ranks_hold_the_mean_of_the_moments() -> None:
    """As means of squares divided by their own number of participants."""
    states = [state for state, _, _ in run_ranks(resume, 3, [], 0, BEGIN + 2, ((0,), (1,), (2,)))]
    merged = merge_states(states)
    for name in ("large", "cube"):
        own = [state["local"][name]["exp_avg_sq"] for state in states]
        assert not torch.equal(own[0], own[1])
        torch.testing.assert_close(merged["local"][name]["exp_avg_sq"], sum(own) / 3)
    assert merged["num_participants"] == 3
    parameters = make_parameters(SHAPES)
    optimizer = AdamW(parameters.values(), lr=LR)
    for parameter in parameters.values():
        optimizer.state[parameter] = {"step": torch.tensor(1.0)}
        optimizer.state[parameter].update({k: torch.zeros_like(parameter) for k in ("exp_avg", "exp_avg_sq")})
    worker = method_for().attach(optimizer, parameters.items())
    worker.load_state_dict(merged)  # one rank
    torch.testing.assert_close(
        optimizer.state[parameters["large"]]["exp_avg_sq"], 3 * merged["local"]["large"]["exp_avg_sq"]
    )


def moments_of_a_single_element(nodes: Nodes) -> list[Tensor]:
    """Return the means of squares of a tensor of which only the first rank of a node has a part."""
    parameters = make_parameters({"large": (40, 30), "single": (1,)})
    optimizer = AdamW(parameters.values(), lr=LR)
    worker = DGC(**{**EXACT, "sparsity": [0.5], "min_numel": 1}).attach(optimizer, parameters.items(), topology=nodes)
    for _ in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    return [optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters.values()]


def test_all_ranks_of_a_node_keep_the_moments_of_all_parts() -> None:
    first, *others = run_ranks(moments_of_a_single_element, 4, ((0, 1), (2, 3)))
    assert all(moment.any() for moment in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_count_of_steps_is_read_anew_where_it_was_changed() -> None:
    """In place, as torch.distributed.checkpoint loads it."""
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    optimizer = AdamW([parameter], lr=LR)
    correction, group = AdamCorrection(optimizer, 2), optimizer.param_groups[0]
    beta2 = group["betas"][1]
    for expected in (1, 2, 101, 102):
        if expected == 101:
            optimizer.state[parameter]["step"].fill_(100)
        moment = correction.second_moment(parameter, group, slice(0, 8))
        assert moment.corrections[1] == 1.0 - beta2**expected
        correction.give_back()
        assert optimizer.state[parameter]["step"].item() == expected


@pytest.mark.parametrize("has_stepped", [False, True])
def test_amsgrad_is_that_of_the_param_group(has_stepped: bool) -> None:
    """Also where a dense step of Adam's own has made the state."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = Adam([{"params": parameters[:1], "amsgrad": True}, {"params": parameters[1:]}], lr=LR)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    if has_stepped:
        optimizer.step()
    correction = AdamCorrection(optimizer, 2)
    for parameter, group in zip(parameters, optimizer.param_groups, strict=True):
        moment = correction.second_moment(parameter, group, slice(0, 4))
        assert (moment.largest is not None) == group["amsgrad"]
        correction.keep_second_moment(parameter, slice(0, 4), moment)
        assert ("max_exp_avg_sq" in optimizer.state[parameter]) == group["amsgrad"]
