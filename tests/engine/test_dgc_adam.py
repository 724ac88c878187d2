"""DGC for Adam and AdamW on real gloo ranks, against its equations in one process."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam, AdamW

from lightning_lowbw import DGC, ConfigurationError, FrozenVariance
from lightning_lowbw.what.corrections import correction_for
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.volume import all_reduce_bytes
from tests.adam_oracle import OracleAdam
from tests.engine.problem import AWKWARD, backward, coefficients, make_parameters, make_weight, take_step
from tests.engine.test_dgc_failures import message_of
from tests.engine.test_two_levels import NODES, exchange_of
from tests.ranks import run_ranks

BEGIN, STEPS, LR = 4, 12, 0.01
SHAPES = {**AWKWARD, "large": (40, 30)}
MIN_NUMEL = 100
EXACT: dict[str, Any] = {"selection": "exact", "value_dtype": "float32", "min_numel": MIN_NUMEL}


def method_for(**changes: Any) -> DGC:
    return DGC(**{"rampup_begin_step": BEGIN, "rampup_step": 4, "sparsity": [0.5, 0.9], **EXACT, **changes})


def train(
    kind: str,
    options: dict[str, Any],
    changes: dict[str, Any],
    nodes: Any = (),
    sign: float = 1.0,
    steps: int = STEPS,
) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    optimizer = {"Adam": Adam, "AdamW": AdamW}[kind](parameters.values(), lr=LR, **options)
    ledger = TrafficLedger()
    exchange = exchange_of(nodes) if nodes else Exchange(None, ledger)
    worker = method_for(**changes).attach(optimizer, parameters.items(), exchange)
    frozen, num_begun, densities, sent_bytes = None, [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        backward(parameters, step, sign=sign)
        worker.begin([parameters["matrix"], parameters["large"]])  # nothing but with overlap
        num_begun.append(len(worker._begun))
        if worker.is_sparse and frozen is None and "exp_avg_sq" in optimizer.state[parameters["large"]]:
            frozen = optimizer.state[parameters["large"]]["exp_avg_sq"].clone()
        densities.append(worker.density)
        before = ledger.sent_bytes
        with worker.stepping():
            worker.exchange()
            optimizer.step()
        sent_bytes.append(ledger.sent_bytes - before)
        assert "_init_group" not in vars(optimizer)
    state = optimizer.state[parameters["large"]]
    return {
        "digest": digest(parameters.values()),
        "begun": num_begun,
        "densities": densities,
        "sent_bytes": sent_bytes,
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "keeps": frozen is not None and torch.equal(frozen, state["exp_avg_sq"]),
        "steps": [float(optimizer.state[parameters[name]]["step"]) for name in ("large", "vector")],
        "large": {key: value.clone() for key, value in state.items()},
    }


def by_the_equations(
    num_ranks: int, kind: str, options: dict[str, Any], changes: dict[str, Any], nodes: Any = (), steps: int = STEPS
) -> tuple[dict[str, Tensor], OracleAdam, int | None]:
    """Return the weights, the optimizer, and which step is the first sparse one."""
    options = {key: value for key, value in options.items() if key in ("betas", "eps", "weight_decay", "amsgrad")}
    oracle = OracleAdam(len(nodes) or num_ranks, LR, is_decoupled=kind == "AdamW", min_numel=MIN_NUMEL, **options)
    choice = changes.get("correction", "auto")
    oracle.is_frozen = choice != "auto"
    oracle.masking = changes.get("momentum_masking", oracle.is_frozen)
    choice = choice if isinstance(choice, FrozenVariance) else FrozenVariance()
    oracle.floor = choice.floor
    earliest = changes.get("rampup_begin_step", BEGIN)
    begin = earliest if choice.stable is None else None
    if kind == "AdamW" and "weight_decay" not in options:
        oracle.weight_decay = 0.01  # torch's default
    weights = {name: make_weight(name, shape).contiguous() for name, shape in SHAPES.items()}
    for step in range(steps):
        gradients = [
            [coefficients(name, w, rank, step) + w for name, w in weights.items()] for rank in range(num_ranks)
        ]
        if nodes:
            gradients = [
                [torch.stack(own).mean(0) for own in zip(*(gradients[r] for r in node), strict=True)] for node in nodes
            ]
        every = list(weights.values())
        if begin is None or step < begin:
            oracle.dense_step(every, gradients)
            if choice.stable is not None and oracle.stability(every, step + 1) >= choice.stable:
                begin = step + 1 if step + 1 >= earliest else None
        else:
            refreshes = choice.refresh and step - begin in REFRESHES
            oracle.sparse_step(every, gradients, 0.5 if step < begin + 2 else 0.1, refreshes)
    return weights, oracle, begin


REFRESHES = {*range(17), 18, 20, 22}  # of the first 24 sparse steps
FROZEN = {"correction": "frozen_variance"}
REFRESHED = {"correction": FrozenVariance(refresh=True)}
STABLE = {"correction": FrozenVariance(stable=0.972), "rampup_begin_step": 0}
LOOKS = {"betas": (0.8, 0.75)}  # after 4, 8, ... steps; that is reached after 16 and after 24
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
    ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {**FROZEN, "momentum_masking": False}),
    ("AdamW", {"betas": (0.0, 0.95)}, {"correction": FrozenVariance(floor=0.8)}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.05}, FROZEN),
    ("AdamW", {"foreach": True}, FROZEN),
    ("AdamW", {"fused": True}, FROZEN),
]


@pytest.mark.parametrize(("kind", "options", "changes"), CASES)
def test_equals_the_equations(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    results = run_ranks(train, 2, kind, options, changes)
    expected, _, _ = by_the_equations(2, kind, options, changes)
    assert len({result["digest"] for result in results}) == 1
    for name, weight in expected.items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=2e-5)
    is_frozen = "correction" in changes
    assert results[0]["keeps"] == is_frozen  # the second moment, for dense training to go on with
    assert results[0]["steps"] == [BEGIN if is_frozen else STEPS, STEPS]  # the small tensors' steps are Adam's own


REFRESHED_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("AdamW", {}, REFRESHED),
    ("AdamW", {"fused": True, "betas": (0.8, 0.95)}, {**REFRESHED, "momentum_masking": False}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.05}, REFRESHED),
]


@pytest.mark.parametrize(("kind", "options", "changes"), REFRESHED_CASES)
def test_a_refreshed_variance_equals_the_equations(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    steps = BEGIN + 24
    results = run_ranks(train, 3, kind, options, changes, (), 1.0, steps)
    expected, oracle, _ = by_the_equations(3, kind, options, changes, (), steps)
    assert len({result["digest"] for result in results}) == 1
    for name, weight in expected.items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=3e-5)
    large = list(SHAPES).index("large")
    for rank, result in enumerate(results):
        assert result["steps"] == [BEGIN + len(REFRESHES), steps]
        torch.testing.assert_close(result["large"]["exp_avg_sq"], oracle.v[large], rtol=1e-4, atol=1e-6)
        # As Adam has it, which takes out a bias, so that Adam can go on.
        m = result["large"]["exp_avg"] / (1 - options.get("betas", (0.9,))[0] ** result["steps"][0])
        torch.testing.assert_close(m, oracle.own_m[rank, large], rtol=1e-4, atol=1e-5)
    # Beside the sparse exchange the gradients are sent whole, as DDP would.
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values() if torch.Size(shape).numel() >= MIN_NUMEL)
    sent = [nbytes for step, nbytes in enumerate(results[0]["sent_bytes"]) if step >= BEGIN + 2]
    plain = min(sent)
    whole = all_reduce_bytes(4 * (numel + 1), 3)
    assert sent == [plain + whole * (step + 2 in REFRESHES) for step in range(22)]


@pytest.mark.parametrize(("earliest", "begin"), [(0, 16), (16, 16), (17, 24)])
def test_the_dense_phase_goes_on_until_the_variance_is_stable(earliest: int, begin: int) -> None:
    changes = {**STABLE, "rampup_begin_step": earliest}
    results = run_ranks(train, 2, "AdamW", LOOKS, changes, (), 1.0, 28)
    expected, _, expected_begin = by_the_equations(2, "AdamW", LOOKS, changes, (), 28)
    assert expected_begin == begin
    for result in results:
        assert [step for step, density in enumerate(result["densities"]) if density < 1] == list(range(begin, 28))
        assert result["densities"][begin : begin + 4] == pytest.approx([0.5, 0.5, 0.1, 0.1])
        assert result["digest"] == results[0]["digest"]
    for name, weight in expected.items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=2e-5)
    # One number at each look, beside what DDP sends.
    dense = results[0]["sent_bytes"][:begin]
    assert [nbytes - min(dense) for nbytes in dense] == [4 if (step + 1) % 4 == 0 else 0 for step in range(begin)]


def look_otherwise() -> list[int]:
    """One rank sees what is stable to the others as a jump, at the look after 16 steps."""
    parameters = make_parameters(SHAPES)
    worker = method_for(**STABLE).attach(AdamW(parameters.values(), lr=LR, **LOOKS), parameters.items())
    for step in range(26):
        take_step(worker, parameters, step)
        if step == 13 and dist.get_rank() == 1:
            worker._correction.load_state_dict({**worker._correction.state_dict(), "sum": 1e9})
    return [worker.step, int(worker._correction.begin_step)]


def test_all_ranks_decide_alike() -> None:
    assert run_ranks(look_otherwise, 2) == [[26, 24]] * 2


@pytest.mark.parametrize(
    ("kind", "options", "changes"),
    [
        ("AdamW", {}, {}),
        ("AdamW", {}, REFRESHED),
        ("Adam", {"weight_decay": 0.05}, {**FROZEN, "momentum_masking": True}),
        ("AdamW", {**LOOKS, "betas": (0.8, 0.5)}, {"correction": FrozenVariance(stable=0.5), "rampup_begin_step": 4}),
    ],
)
def test_on_two_levels_a_node_is_a_rank(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    nodes = NODES["blocks"]
    results = run_ranks(train, 4, kind, options, changes, nodes)
    assert len({result["digest"] for result in results}) == 1
    expected, _, begin = by_the_equations(4, kind, options, changes, nodes)
    assert begin == BEGIN
    for name, weight in expected.items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "options", "changes"), [("AdamW", {}, {}), ("Adam", {"weight_decay": 0.05}, REFRESHED)]
)
def test_climbing_is_descending_the_negative(kind: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    down = run_ranks(train, 2, kind, options, changes)
    up = run_ranks(train, 2, kind, {**options, "maximize": True}, changes, (), -1.0)
    for name, weight in down[0]["weights"].items():
        torch.testing.assert_close(up[0]["weights"][name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("changes", [{"selection": "sampled"}, {"value_dtype": "bfloat16"}])
def test_with_the_other_choices_replicas_are_equal(changes: dict[str, Any]) -> None:
    results = run_ranks(train, 2, "AdamW", {}, changes)
    assert len({result["digest"] for result in results}) == 1


@pytest.mark.parametrize("changes", [{}, FROZEN, REFRESHED])
def test_sent_during_backward_it_is_the_same_to_the_bit(changes: dict[str, Any]) -> None:
    steps = BEGIN + 20
    plain, overlapped = (
        run_ranks(train, 2, "AdamW", {}, {**changes, "overlap": overlap}, (), 1.0, steps) for overlap in (False, True)
    )
    assert plain[0]["begun"] == [0] * steps
    waits = REFRESHES if changes is REFRESHED else set()  # for all gradients
    assert overlapped[0]["begun"] == [int(step >= BEGIN and step - BEGIN not in waits) for step in range(steps)]
    assert len({result["digest"] for result in (*plain, *overlapped)}) == 1


def resume(
    states: list[Any], first: int, last: int, nodes: Any, changes: dict[str, Any], options: dict[str, Any]
) -> Any:
    parameters = make_parameters(SHAPES)
    optimizer = AdamW(parameters.values(), lr=LR, **options)
    method = method_for(**changes)
    worker = method.attach(optimizer, parameters.items(), exchange_of(nodes) if nodes else Exchange())
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


def check_resume(stop: int, last: int, nodes: Any, changes: dict[str, Any], options: dict[str, Any]) -> None:
    num_ranks = 4 if nodes else 2
    whole = run_ranks(resume, num_ranks, [], 0, last, nodes, changes, options)
    half = run_ranks(resume, num_ranks, [], 0, stop, nodes, changes, options)
    # As in a file: the optimizer's state is rank 0's.
    half = [(state, weights, half[0][2]) for state, weights, _ in half]
    again = run_ranks(resume, num_ranks, half, stop, last, nodes, changes, options)
    for (state, weights, _), (expected_state, expected, _) in zip(again, whole, strict=True):
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
        assert state["correction"] == expected_state["correction"]
    assert not torch.equal(whole[0][0]["tensors"]["large"]["residual"], whole[-1][0]["tensors"]["large"]["residual"])


@pytest.mark.parametrize("nodes", [(), NODES["blocks"]], ids=["flat", "two levels"])
@pytest.mark.parametrize("changes", [{}, FROZEN], ids=["own", "frozen"])
@pytest.mark.parametrize("stop", [BEGIN, BEGIN + 3])
def test_resumes_to_the_bit(stop: int, changes: dict[str, Any], nodes: Any) -> None:
    check_resume(stop, STEPS, nodes, changes, {})


@pytest.mark.parametrize("nodes", [(), NODES["blocks"]], ids=["flat", "two levels"])
def test_resumes_between_refreshes_to_the_bit(nodes: Any) -> None:
    check_resume(BEGIN + 19, BEGIN + 24, nodes, REFRESHED, {})


@pytest.mark.parametrize("stop", [14, 16, 18])
def test_resumes_around_the_end_of_the_dense_phase_to_the_bit(stop: int) -> None:
    """Between two looks, at its end, after it."""
    check_resume(stop, 22, (), STABLE, LOOKS)


def test_refreshes_are_ever_further_apart() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    correction = correction_for(AdamW([parameter]), FrozenVariance(refresh=True), 2)
    refreshes = []
    for step in range(100, 300):
        if step != 116 and correction.is_refresh(step):  # a step that a GradScaler skips
            refreshes.append(step)
            correction.end_refresh(step)
    gaps = [after - before for before, after in pairwise(refreshes)]
    assert refreshes[0] == 100
    assert gaps == [1] * 15 + [2] + [2] * 16 + [4] * 16 + [8] * 10


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
        ({}, {**REFRESHED, "rampup_begin_step": 0}, "dense steps"),
        ({"capturable": True}, {}, "capturable"),
        ({"capturable": True}, FROZEN, "capturable"),
        ({"differentiable": True}, {}, "differentiable"),
        ({"differentiable": True}, FROZEN, "differentiable"),
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
    states = [state for state, _, _ in run_ranks(resume, 3, [], 0, BEGIN + 2, (), {}, {})]
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
    states = run_ranks(resume, 2, [], 0, BEGIN + 3, (), FROZEN, {})
    parameters = make_parameters(SHAPES)
    optimizer = AdamW(parameters.values(), lr=LR)
    method = method_for(**FROZEN)
    worker = method.attach(optimizer, parameters.items())
    optimizer.load_state_dict(copy.deepcopy(states[0][2]))
    worker.load_state_dict(method.merge_states(state for state, _, _ in states))
    take_step(worker, parameters, 0)
    mean = sum(state["tensors"]["large"]["momentum_buffer"] for state, _, _ in states) / 2
    kept = optimizer.state[parameters["large"]]
    bias = 1 - 0.9 ** float(kept["step"])
    expected = 0.9 * mean + 0.1 * bias * (coefficients("large", mean, 0, 0) + make_weight("large", SHAPES["large"]))
    torch.testing.assert_close(kept["exp_avg"], expected)
