"""Sparse steps: gradients are looked at while they are accumulated, and weights stepped where something was sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.late_faults import check_late_faults
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_lowbw import DGC, LocalSGD, NonFiniteGradientError
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.what import codec
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import (
    AWKWARD,
    FLAT,
    NODES,
    Nodes,
    backward,
    each,
    make_gradient_worker,
    make_parameters,
    message_of,
)
from tests.ranks import run_ranks

STEPS, FIRST_SPARSE = 6, 2
SHAPES = {name: AWKWARD[name] for name in ("matrix", "transposed", "conv", "pointwise", "vector", "scalar", "empty")}
METHOD = DGC(rampup_begin_step=FIRST_SPARSE, sparsity=[0.9], min_numel=18)
MakeOptimizer = Callable[[Iterable[Tensor]], Optimizer]
DECAYED: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, **DECAYED),
    "nesterov, foreach": partial(SGD, **DECAYED, nesterov=True, foreach=True),
    "maximize": partial(SGD, lr=0.01, momentum=0.9, maximize=True),
    "a tensor's rate": partial(SGD, lr=torch.tensor(0.05), momentum=0.9),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.3),
    "adam": partial(Adam, lr=0.02, weight_decay=0.01, amsgrad=True),
    "adam, foreach, maximize": partial(AdamW, lr=0.002, maximize=True, foreach=True),
    "rmsprop": partial(RMSprop, lr=0.002),
}
PAYLOADS: dict[str, tuple[dict[str, Any], Nodes]] = {
    "flat": ({}, FLAT),
    "senders": ({"mean_over": "senders", "value_dtype": "int8"}, FLAT),
    "reduce-scatter": ({"exchange": "reduce_scatter", "value_dtype": "float32"}, FLAT),
    "dense": ({"exchange": "dense"}, FLAT),
    "two levels": ({}, NODES["strided"]),
}


def train(kind: str, payload: str, by_hand: bool) -> tuple[str, list[list[str]]]:
    """Return a digest of the weights, and of each step whose gradients are None after it."""
    options, nodes = PAYLOADS[payload]
    parameters = make_parameters(SHAPES)
    optimizer = OPTIMIZERS[kind](parameters.values())
    method = METHOD.replace(**options)
    worker = method.attach(optimizer, parameters.items(), topology=None if nodes == FLAT else nodes)
    absent = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        if by_hand:
            with worker.stepping():
                worker.exchange()
                optimizer.step()
        else:
            optimizer.step()
        absent.append([name for name, parameter in parameters.items() if parameter.grad is None])
    return digest(parameters.values()), absent


@pytest.mark.parametrize("payload", PAYLOADS)
def test_weights_are_stepped_where_something_was_sent_as_the_optimizer_would(payload: str) -> None:
    cases = [(kind, payload, by_hand) for kind in OPTIMIZERS for by_hand in (False, True)]
    by_rank = run_ranks(each, sum(map(len, PAYLOADS[payload][1])), train, cases)
    by_kind = ([*zip(rank[::2], rank[1::2], strict=True)] for rank in by_rank)
    for kind, *results in zip(OPTIMIZERS, *by_kind, strict=True):
        for (direct, absent), (by_hand, of_dense) in results:
            assert direct == by_hand, kind
            assert not any(of_dense)
            can_step = payload != "dense" and kind != "rmsprop"
            expected = ["matrix", "transposed", "conv", "pointwise"] if can_step else []
            assert absent == [[]] * FIRST_SPARSE + [expected] * (STEPS - FIRST_SPARSE), kind
        assert len({direct for (direct, _), _ in results}) == 1


def watch(hook: str) -> list[dict[str, Tensor | None]]:
    """Return what a hook of the optimizer's step sees; with "" what an exchange by hand gives."""
    parameters = make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), **DECAYED)
    worker = METHOD.attach(optimizer, parameters.items())
    seen: list[dict[str, Tensor | None]] = []

    def look(*_: Any) -> None:
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})

    handle = None
    if hook == "pre":
        handle = optimizer.register_step_pre_hook(look)
    elif hook == "post":
        handle = optimizer.register_step_post_hook(look)
    elif hook == "all optimizers":
        handle = register_optimizer_step_pre_hook(look)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        if hook:
            optimizer.step()
        else:
            with worker.stepping():
                worker.exchange()
                look()
                optimizer.step()
    if handle is not None:
        handle.remove()
    return seen


def test_hooks_of_the_step_see_dense_gradients() -> None:
    hooks = ["", "pre", "post", "all optimizers"]
    for expected, *others in run_ranks(each, 2, watch, [(hook,) for hook in hooks]):
        for seen in others:
            assert len(seen) == STEPS
            for mine, theirs in zip(seen, expected, strict=True):
                for name, gradient in theirs.items():
                    assert gradient is not None
                    assert gradient.equal(mine[name]), name  # type: ignore[arg-type]


def meet_a_fault(kind: str, name: str, nodes: Nodes) -> tuple[str | None, bool, bool]:
    """Return the message, and whether weights stay as they are, and whether all that is kept is finite."""
    parameters = make_parameters(SHAPES)
    optimizer = OPTIMIZERS[kind](parameters.values())
    worker = make_gradient_worker(METHOD.at(nodes), optimizer, parameters)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        optimizer.step()
    before = digest(parameters.values())
    optimizer.zero_grad()
    backward(parameters, STEPS)
    if dist.get_rank() == 1:
        gradient = parameters[name].grad
        assert gradient is not None
        gradient.view(-1)[0] = torch.nan
    message = message_of(optimizer.step, NonFiniteGradientError)  # type: ignore[arg-type]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    kept = [*worker.residuals.values(), *states]
    return message, digest(parameters.values()) == before, all(bool(tensor.isfinite().all()) for tensor in kept)


@pytest.mark.parametrize("nodes", [FLAT, NODES["blocks"]])
def test_what_is_not_finite_enters_no_state_and_ends_the_training_on_all_ranks(nodes: Nodes) -> None:
    cases = [(kind, name, nodes) for kind in ("sgd", "adamw", "rmsprop") for name in ("matrix", "vector")]
    results = run_ranks(each, sum(map(len, nodes)), meet_a_fault, cases)
    for (kind, name, *_), *of_case in zip(cases, *results, strict=True):
        assert len({message for message, _, _ in of_case}) == 1
        for message, are_weights_kept, is_state_finite in of_case:
            assert message is not None
            assert f"Step {STEPS}: the gradient of '{name}'" in message
            assert are_weights_kept, (kind, name)
            assert is_state_finite, (kind, name)


def count_steps(nodes: Nodes) -> dict[str, float]:
    """A tensor of one element has a part of none on the second rank of a node."""
    parameters = make_parameters({"single": (1,), "matrix": (30, 20)})
    optimizer = AdamW(parameters.values(), lr=0.02)
    METHOD.replace(min_numel=1).attach(optimizer, parameters.items(), topology=nodes)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        optimizer.step()
    return {name: float(optimizer.state[parameter]["step"]) for name, parameter in parameters.items()}


def test_each_step_is_taken_once_where_a_part_is_empty() -> None:
    for counted in run_ranks(count_steps, 4, NODES["blocks"]):
        assert counted == {"single": STEPS, "matrix": STEPS}


def go_on_after_a_fault(with_prepare: bool) -> tuple[str, str]:
    """By hand, without `stepping`: what the failed exchange has selected is not sent by the next one."""
    parameters = make_parameters({"matrix": (30, 20)})
    optimizer = SGD(parameters.values(), lr=0.05)
    worker = DGC(sparsity=[0.9], min_numel=18).attach(optimizer, parameters.items())
    backward(parameters, 0)
    assert parameters["matrix"].grad is not None
    if dist.get_rank() == 1:
        parameters["matrix"].grad[0, 0] = torch.nan
    message_of(worker.exchange, NonFiniteGradientError)  # type: ignore[arg-type]
    optimizer.zero_grad()
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[7, 7] = 1000.0
    if with_prepare:
        worker.prepare()
    worker.exchange()
    assert parameters["matrix"].grad is not None
    return digest([parameters["matrix"].grad]), str(float(parameters["matrix"].grad[7, 7]))


@pytest.mark.parametrize("with_prepare", [False, True])
def test_what_a_failed_exchange_has_selected_is_not_sent(with_prepare: bool) -> None:
    (first, value), (second, _) = run_ranks(go_on_after_a_fault, 2, with_prepare)
    assert first == second
    assert 900 < float(value) < 1100


FAILING: dict[str, tuple[Any, str, int]] = {
    "the positions": (codec, "pack", 1),
    "the values": (codec, "joined", 1),
}


def run_out_of_memory(where: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, str]:
    """Return what is missing of the first tensor's gradients after a step that failed, and what is torn."""
    parameters = make_parameters({"first": (70, 50), "second": (80, 20)})
    optimizer = SGD(parameters.values(), lr=1.0)
    method = DGC(sparsity=[0.9], min_numel=18, value_dtype="float32")
    worker = method.attach(optimizer, parameters.items())
    assert isinstance(worker, GradientWorker)
    weight, given = parameters["first"], torch.zeros(70 * 50)
    before = weight.detach().clone()
    owner, name, number = FAILING[where]
    torn = ""
    for step in range(3):
        torch.manual_seed(step)  # the same on all ranks: their mean is each one's own
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        given += weight.grad.flatten()  # type: ignore[union-attr]
        if step == 1:
            calls, function = Counter[str](), getattr(owner, name)

            def failing(*args: Any, function: Any = function, calls: Counter[str] = calls) -> Any:
                calls.update([name])
                if calls.total() == number:
                    raise MemoryError
                return function(*args)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                with pytest.raises(MemoryError):
                    optimizer.step()
            torn = worker.torn
        else:
            optimizer.step()
    missing = given - (before - weight.detach()).flatten() - worker.residuals["first"]
    return float(missing.abs().max()), torn


def fail_everywhere() -> list[tuple[float, str]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return [run_out_of_memory(where, monkeypatch) for where in FAILING]


def test_what_a_step_has_taken_out_before_it_fails_is_put_back() -> None:
    for found in run_ranks(fail_everywhere, 2):
        for missing, torn in found:
            assert missing < 1e-5
            assert torn == "the exchange of gradients after step 1"


def take_local_steps() -> bool:
    """`applies` means nothing to averages of weights."""
    parameters = make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), **DECAYED)
    LocalSGD(k_steps=2, begin_step=0).attach(optimizer, parameters.items())
    backward(parameters, 0)
    optimizer.step()
    return all(parameter.grad is not None for parameter in parameters.values())


def test_local_steps_keep_their_gradients() -> None:
    assert run_ranks(take_local_steps, 2) == [True, True]


def add_up_too_much(kind: str, checks_now: bool, nodes: Nodes, ends: bool) -> tuple[list[str], bool]:
    """Return what is said in each step, and whether weights are finite; rank 1 has gradients as large as float32."""
    parameters = make_parameters(SHAPES)
    optimizer = OPTIMIZERS[kind](parameters.values())
    method = METHOD.replace(rampup_begin_step=0)
    worker = method.attach(optimizer, parameters.items(), topology=None if nodes == FLAT else nodes)
    assert isinstance(worker, GradientWorker)
    said: list[str] = []
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, step)
        if dist.get_rank() == 1 and (step or not ends):
            assert parameters["matrix"].grad is not None
            parameters["matrix"].grad.fill_(3e38)
        try:
            with worker.stepping():
                if checks_now:
                    worker.prepare()
                worker.exchange()
                optimizer.step()
            if ends and step == 2:
                check_late_faults(worker)
            said.append("")
        except NonFiniteGradientError as error:
            said.append(str(error))
            break
    return said, all(bool(weight.isfinite().all()) for weight in parameters.values())


@pytest.mark.fault(
    "gradients of 3e38, which are finite, and whose sum with earlier ones is not",
    "an error on all ranks that names the rank and the parameter, in the next step, or at the end of the fit",
)
@pytest.mark.parametrize("nodes", [FLAT, NODES["blocks"]], ids=["flat", "two levels"])
def test_finite_gradients_whose_sum_is_not_are_told(nodes: Nodes) -> None:
    """In the step that adds them up; where gradients are looked at before, in the next one, or where the run ends."""
    cases = [("sgd", False, nodes, False), ("sgd", True, nodes, False), ("sgd", True, nodes, True)]
    num_ranks = sum(map(len, nodes))
    for at_once, late, at_the_end in run_ranks(each, num_ranks, add_up_too_much, cases):
        who = "on rank 1" if nodes == FLAT else "of node 0 (ranks [0, 1])"
        assert (
            f"the gradient of 'matrix' {who} is not finite, or too large to be added to the residual" in at_once[0][-1]
        )
        assert at_once[1]
        kept = "the gradient of 'matrix' on rank "
        assert kept in late[0][-1]
        assert "added to the residual, has become too large for float32" in late[0][-1]
        assert kept in at_the_end[0][-1]
        assert len(at_the_end[0]) == 3


def step_beside_empty_shards(shapes: dict[str, tuple[int, ...]], options: dict[str, Any]) -> tuple[str, list[float]]:
    parameters = make_parameters(shapes)
    optimizer = AdamW(parameters.values(), lr=0.02)
    worker = METHOD.replace(rampup_begin_step=0, **options).attach(optimizer, parameters.items())
    worker.whole_numels = dict.fromkeys(parameters.values(), 2000)
    for step in range(2):
        optimizer.zero_grad()
        backward(parameters, step)
        optimizer.step()
    return digest(parameters.values()), [float(optimizer.state[p]["step"]) for p in parameters.values()]


def test_shards_without_elements_are_not_sent() -> None:
    """The whole tensor is sent sparse; a rank and its peers have no row of it. Their counts of steps go on."""
    cases = [
        ({name: (30, 20) if name == "here" else (0, 20) for name in names}, options)
        for names in (["elsewhere"], ["elsewhere", "here"])
        for options, _ in (PAYLOADS[kind] for kind in ("flat", "senders", "reduce-scatter", "dense"))
    ]
    first, second = run_ranks(each, 2, step_beside_empty_shards, cases)
    assert first == second
    assert [counts for _, counts in first] == [[2.0] * len(shapes) for shapes, _ in cases]
