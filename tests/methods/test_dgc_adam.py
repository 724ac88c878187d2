"""DGC for Adam and AdamW on real gloo ranks, against its equations in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam, AdamW

from lightning_lowbw import DGC, ConfigurationError
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import Exchange
from tests.adam_oracle import OracleAdam
from tests.methods.problem import AWKWARD, backward, coefficients, make_parameters, make_weight, take_step
from tests.methods.test_dgc_failures import message_of
from tests.methods.test_two_levels import NODES, exchange_of
from tests.ranks import run_ranks

BEGIN, STEPS, LR = 4, 12, 0.01
SHAPES = {**AWKWARD, "large": (40, 30)}
MIN_NUMEL = 100
EXACT: dict[str, Any] = {"selection": "exact", "value_dtype": "float32", "min_numel": MIN_NUMEL}


def method_for(**changes: Any) -> DGC:
    return DGC(**{"rampup_begin_step": BEGIN, "rampup_step": 4, "sparsity": [0.5, 0.9], **EXACT, **changes})


def train(
    kind: str, options: dict[str, Any], changes: dict[str, Any], nodes: Any = (), sign: float = 1.0
) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    optimizer = {"Adam": Adam, "AdamW": AdamW}[kind](parameters.values(), lr=LR, **options)
    method = method_for(**changes)
    worker = method.attach(optimizer, parameters.items(), exchange_of(nodes) if nodes else Exchange())
    frozen, num_begun = None, 0
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step, sign=sign)
        worker.begin([parameters["matrix"], parameters["large"]])  # nothing but with overlap
        num_begun = max(num_begun, len(worker._begun))
        with worker.stepping():
            worker.exchange()
            optimizer.step()
        assert "_init_group" not in vars(optimizer)
        if step == max(0, worker.method.rampup_begin_step - 1):
            frozen = optimizer.state[parameters["large"]]["exp_avg_sq"].clone()
    assert frozen is not None
    return {
        "digest": digest(parameters.values()),
        "begun": num_begun,
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "keeps": torch.equal(frozen, optimizer.state[parameters["large"]]["exp_avg_sq"]),
        "steps": [float(optimizer.state[parameters[name]]["step"]) for name in ("large", "vector")],
    }


def by_the_equations(
    num_ranks: int, kind: str, options: dict[str, Any], changes: dict[str, Any], nodes: Any = ()
) -> dict[str, Tensor]:
    options = {key: value for key, value in options.items() if key in ("betas", "eps", "weight_decay", "amsgrad")}
    oracle = OracleAdam(len(nodes) or num_ranks, LR, is_decoupled=kind == "AdamW", min_numel=MIN_NUMEL, **options)
    oracle.masking = changes.get("momentum_masking", False)
    oracle.is_frozen = changes.get("correction") == "frozen_variance"
    begin = changes.get("rampup_begin_step", BEGIN)
    if kind == "AdamW" and "weight_decay" not in options:
        oracle.weight_decay = 0.01  # torch's default
    weights = {name: make_weight(name, shape).contiguous() for name, shape in SHAPES.items()}
    for step in range(STEPS):
        gradients = [
            [coefficients(name, w, rank, step) + w for name, w in weights.items()] for rank in range(num_ranks)
        ]
        if nodes:
            gradients = [
                [torch.stack(own).mean(0) for own in zip(*(gradients[r] for r in node), strict=True)] for node in nodes
            ]
        if step < begin:
            oracle.dense_step(list(weights.values()), gradients)
        else:
            oracle.sparse_step(list(weights.values()), gradients, 0.5 if step < begin + 2 else 0.1)
    return weights


FROZEN = {"correction": "frozen_variance"}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("AdamW", {}, {}),
    ("AdamW", {"eps": 1e-3}, {"rampup_begin_step": 0}),
    ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {"momentum_masking": True}),
    ("AdamW", {"betas": (0.0, 0.95)}, {}),
    ("Adam", {"weight_decay": 0.05}, {}),
    ("Adam", {"amsgrad": True, "eps": 1e-3}, {}),
    ("AdamW", {"foreach": True}, {}),
    ("AdamW", {"fused": True}, {}),
    ("AdamW", {}, FROZEN),
    ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {**FROZEN, "momentum_masking": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.05}, FROZEN),
]


@pytest.mark.parametrize(("kind", "options", "changes"), CASES)
def test_equals_the_equations(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    results = run_ranks(train, 2, kind, options, changes)
    expected = by_the_equations(2, kind, options, changes)
    assert len({result["digest"] for result in results}) == 1
    for name, weight in expected.items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=2e-5)
    is_frozen = "correction" in changes
    assert results[0]["keeps"] == is_frozen  # the second moment, for dense training to go on with
    assert results[0]["steps"] == [BEGIN if is_frozen else STEPS, STEPS]  # the small tensors' steps are Adam's own


@pytest.mark.parametrize(
    ("kind", "options", "changes"),
    [("AdamW", {}, {}), ("AdamW", {}, FROZEN), ("Adam", {"weight_decay": 0.05}, {**FROZEN, "momentum_masking": True})],
)
def test_on_two_levels_a_node_is_a_rank(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    nodes = NODES["blocks"]
    results = run_ranks(train, 4, kind, options, changes, nodes)
    assert len({result["digest"] for result in results}) == 1
    for name, weight in by_the_equations(4, kind, options, changes, nodes).items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=2e-5)


def test_climbing_is_descending_the_negative() -> None:
    down = run_ranks(train, 2, "AdamW", {}, {})
    up = run_ranks(train, 2, "AdamW", {"maximize": True}, {}, (), -1.0)
    for name, weight in down[0]["weights"].items():
        torch.testing.assert_close(up[0]["weights"][name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("changes", [{"selection": "sampled"}, {"value_dtype": "bfloat16"}])
def test_with_the_other_choices_replicas_are_equal(changes: dict[str, Any]) -> None:
    results = run_ranks(train, 2, "AdamW", {}, changes)
    assert len({result["digest"] for result in results}) == 1


@pytest.mark.parametrize("changes", [{}, FROZEN])
def test_sent_during_backward_it_is_the_same_to_the_bit(changes: dict[str, Any]) -> None:
    plain, overlapped = (run_ranks(train, 2, "AdamW", {}, {**changes, "overlap": each}) for each in (False, True))
    assert (plain[0]["begun"], overlapped[0]["begun"]) == (0, 1)
    assert len({result["digest"] for result in (*plain, *overlapped)}) == 1


def resume(states: list[Any], first: int, last: int, nodes: Any, correction: str) -> Any:
    parameters = make_parameters(SHAPES)
    optimizer = AdamW(parameters.values(), lr=LR)
    method = method_for(correction=correction)
    worker = method.attach(optimizer, parameters.items(), exchange_of(nodes) if nodes else Exchange())
    if states:
        state, weights, of_optimizer = states[dist.get_rank()]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        optimizer.load_state_dict(copy.deepcopy(of_optimizer))  # which the ranks have in shared memory
        worker.load_state_dict(state)
    for step in range(first, last):
        optimizer.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    of_optimizer, whole = optimizer.state_dict(), worker.whole_momentum()
    for index, parameter in enumerate(parameters.values()):
        if parameter in whole:
            of_optimizer["state"][index]["exp_avg"] = whole[parameter]
    return worker.state_dict(), {name: p.detach().clone() for name, p in parameters.items()}, of_optimizer


@pytest.mark.parametrize("nodes", [(), NODES["blocks"]], ids=["flat", "two levels"])
@pytest.mark.parametrize("correction", ["auto", "frozen_variance"])
@pytest.mark.parametrize("stop", [BEGIN, BEGIN + 3])
def test_resumes_to_the_bit(stop: int, correction: str, nodes: Any) -> None:
    num_ranks = 4 if nodes else 2
    whole = run_ranks(resume, num_ranks, [], 0, STEPS, nodes, correction)
    half = run_ranks(resume, num_ranks, [], 0, stop, nodes, correction)
    # As in a file: the optimizer's state is rank 0's.
    half = [(state, weights, half[0][2]) for state, weights, _ in half]
    if stop > BEGIN:
        assert not torch.equal(half[0][0]["tensors"]["large"]["residual"], half[-1][0]["tensors"]["large"]["residual"])
    again = run_ranks(resume, num_ranks, half, stop, STEPS, nodes, correction)
    for (_, weights, _), (_, expected, _) in zip(again, whole, strict=True):
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def attach(options: dict[str, Any], changes: dict[str, Any]) -> str | None:
    parameters = make_parameters({"large": (40, 30)})

    def step() -> None:
        worker = method_for(**changes).attach(AdamW(parameters.values(), **options), parameters.items())
        backward(parameters, 0)
        with worker.stepping():
            worker.exchange()

    return message_of(step, ConfigurationError)


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({}, {**FROZEN, "rampup_begin_step": 0}, "dense steps"),
        ({"capturable": True}, {}, "capturable"),
        ({"differentiable": True}, {}, "differentiable"),
    ],
)
def test_what_cannot_be_corrected_is_refused(options: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    for message in run_ranks(attach, 2, options, changes):
        assert message is not None
        assert words in message
        assert "correction=" in message


def sgd_without_variance() -> str | None:
    parameters = make_parameters({"large": (40, 30)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    return message_of(lambda: method_for(**FROZEN).attach(optimizer, parameters.items()), ConfigurationError)


def test_there_is_a_variance_to_freeze_in_adam_only() -> None:
    for message in run_ranks(sgd_without_variance, 2):
        assert message is not None
        assert "frozen_variance" in message


def test_other_ranks_hold_the_mean_of_the_moments() -> None:
    states = [state for state, _, _ in run_ranks(resume, 3, [], 0, BEGIN + 2, (), "auto")]
    merged = DGC().merge_states(states)
    for name in ("large", "cube"):
        own = [state["local"][name]["exp_avg_sq"] for state in states]
        assert not torch.equal(own[0], own[1])
        torch.testing.assert_close(merged["local"][name]["exp_avg_sq"], sum(own) / 3)
    assert merged["num_senders"] == 3


def skip_the_dense_phase() -> list[int]:
    """A GradScaler may skip all of it."""
    parameters = make_parameters({"large": (40, 30), "vector": (17,)})
    optimizer = AdamW(parameters.values(), lr=LR)
    worker = method_for(**FROZEN, rampup_begin_step=1).attach(optimizer, parameters.items())
    num_sparse = []
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, step)
        if step == 0:
            parameters["vector"].grad.fill_(torch.inf)  # type: ignore[union-attr]
        with worker.stepping():
            if worker.exchange(skip_nonfinite=True):
                optimizer.step()
        num_sparse.append(len(worker.residuals))
    return num_sparse


def test_a_tensor_without_a_second_moment_is_sent_dense_until_it_has_one() -> None:
    assert run_ranks(skip_the_dense_phase, 2) == [[0, 0, 1]] * 2


def begin_later() -> int:
    parameters = make_parameters({"large": (40, 30)})
    optimizer = AdamW(parameters.values(), lr=LR)
    worker = method_for(**FROZEN).attach(optimizer, parameters.items())
    for step in range(BEGIN + 2):
        take_step(worker, parameters, step)
    again = method_for(**FROZEN, rampup_begin_step=BEGIN + 1).attach(optimizer, parameters.items())
    again.load_state_dict(worker.state_dict())
    take_step(again, parameters, BEGIN + 2)
    return len(again.residuals)


def test_a_sparse_tensor_stays_sparse_where_a_longer_dense_phase_is_set_later() -> None:
    """It has fewer dense steps than that."""
    assert run_ranks(begin_later, 2) == [1, 1]


def test_one_rank_goes_on_with_the_mean_of_the_moments() -> None:
    states = run_ranks(resume, 2, [], 0, BEGIN + 3, (), "frozen_variance")
    parameters = make_parameters(SHAPES)
    optimizer = AdamW(parameters.values(), lr=LR)
    method = method_for(**FROZEN)
    worker = method.attach(optimizer, parameters.items())
    optimizer.load_state_dict(copy.deepcopy(states[0][2]))
    worker.load_state_dict(method.merge_states(state for state, _, _ in states))
    take_step(worker, parameters, 0)
    mean = sum(state["tensors"]["large"]["momentum_buffer"] for state, _, _ in states) / 2
    kept = optimizer.state[parameters["large"]]
    expected = 0.9 * mean + 0.1 * (coefficients("large", mean, 0, 0) + make_weight("large", SHAPES["large"]))
    # Dense steps of Adam's own take out a bias, so there has to be one.
    torch.testing.assert_close(kept["exp_avg"] / (1 - 0.9 ** float(kept["step"])), expected)
