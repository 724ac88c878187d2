"""Stop and go on: to the bit with the same ranks, with the same unsent gradient with others."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from lightning_lowbw.engine.slots import numels_by_kind
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbw import DGC, ConfigurationError, Method, Narrow, TopK
from lightning_lowbw.engine.gradients import GradientWorker
from tests.engine.problem import (
    FLAT,
    NODES,
    Nodes,
    Parameters,
    backward,
    each,
    from_memory,
    in_memory,
    make_parameters,
    make_weight,
    message_of,
    take_step,
)
from tests.ranks import run_ranks

SHAPES = {"large": (300, 240), "conv": (8, 4, 3, 3), "scalar": (), "bias": (7,)}  # the first is sampled
METHOD = DGC(rampup_begin_step=2, rampup_step=8, sparsity=[0.5, 0.9, 0.99, 0.999], min_numel=100, value_dtype="float32")


def make_worker(method: Method, **options: Any) -> tuple[GradientWorker, Parameters]:
    parameters = make_parameters(SHAPES)
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, **options}
    worker = method.attach(SGD(parameters.values(), **settings), parameters.items())
    assert isinstance(worker, GradientWorker)
    return worker, parameters


def state_of(step: int = 3, **parts: Any) -> dict[str, Any]:
    """Return the state of a worker that has kept only so much; residuals have the shape of the parameter."""
    residuals = parts.pop("residuals", {})
    state: dict[str, Any] = {
        "step": step,
        "local_rank": (0, 1),
        "nodes": None,
        "num_participants": 2,
        "correction": "momentum",
        "small_numel": 1,
        "shapes": {name: tuple(residual.shape) for name, residual in residuals.items()},
        "orders": {name: tuple(range(residual.dim())) for name, residual in residuals.items()},
        "residuals": {name: residual.reshape(-1) for name, residual in residuals.items()},
        "exchange": None,
    }
    return {**state, "velocities": {}, "rounded": {}, "local": {}, **parts}


def twice(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of two ranks that have kept the same."""
    return [{**state, "rank": (rank, 2)} for rank in range(2)]


def save(worker: GradientWorker, parameters: Parameters, buffers_of_rank_zero: bool) -> bytes:
    """Save as a checkpoint does: weights and optimizer from rank zero, the worker's state from each rank."""
    optimizer_state = [worker.optimizer.state_dict()]
    if buffers_of_rank_zero:
        dist.broadcast_object_list(optimizer_state, src=0)
    buffer = io.BytesIO()
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    torch.save({"weights": weights, "optimizer": optimizer_state[0], "worker": worker.state_dict()}, buffer)
    return buffer.getvalue()


def load(saved: bytes, worker: GradientWorker, parameters: Parameters) -> None:
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint["weights"][name])
    worker.optimizer.load_state_dict(checkpoint["optimizer"])
    worker.load_state_dict(checkpoint["worker"])


# Another number of ranks ----------------------------------------------------------------------------------------------


def train_to_a_state(momentum: float) -> dict[str, Any]:
    worker, parameters = make_worker(METHOD, momentum=momentum, nesterov=False)
    for step in range(6):
        take_step(worker, parameters, step)
    return {"worker": worker.state_dict(), "weights": {name: p.detach() for name, p in parameters.items()}}


def send_everything(state: dict[str, Any], weights: dict[str, Tensor], momentum: float) -> dict[str, Any]:
    """Resume at another world size; then one step without gradients, decay or anything kept back."""
    # Not exactly dense, though all is sent.
    method = DGC(sparsity=[1e-9], min_numel=100, value_dtype="float32")
    worker, parameters = make_worker(method, lr=1.0, momentum=momentum, weight_decay=0.0, nesterov=False)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    worker.load_state_dict(state)
    kept = {name: from_memory(worker.residuals[name], name, SHAPES[name]) for name in state["residuals"]}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()
    return {
        "kept": kept,
        "applied": {name: weights[name].double() - parameters[name].double() for name in kept},
        "left": worker.residual_norm(),
        "step": worker.step,
    }


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_other_ranks_hold_the_same_unsent_gradient(num_ranks: int, momentum: float) -> None:
    """Two ranks stop, three or one go on: (1/N) sum_k v_k is what it was, and so is the mean velocity."""
    old = run_ranks(train_to_a_state, 2, momentum)
    merged = merge_states(facts["worker"] for facts in old)
    assert merged["step"] == 6
    assert set(merged["residuals"]) == {"large", "conv"}
    for facts in run_ranks(send_everything, num_ranks, merged, old[0]["weights"], momentum):
        assert facts["step"] == 7
        assert facts["left"] == 0.0
        for name in ("large", "conv"):
            states, shape = [each["worker"] for each in old], SHAPES[name]
            mean = from_memory(sum(state["residuals"][name].double() for state in states) / 2, name, shape)
            assert mean.norm() > 1
            torch.testing.assert_close(facts["kept"][name].double(), mean, rtol=1e-6, atol=1e-7)
            if momentum:
                velocity = sum(state["velocities"][name].double() for state in states) / 2
                mean += momentum * from_memory(velocity, name, shape)
            torch.testing.assert_close(facts["applied"][name], mean, rtol=0, atol=2e-6)


def pass_on(state: dict[str, Any]) -> dict[str, Any]:
    """Load a state and save it, without a step."""
    worker, _ = make_worker(METHOD, momentum=0.0, nesterov=False)
    worker.load_state_dict(state)
    return worker.state_dict()


def test_a_world_that_shrinks_to_one_rank_and_grows_holds_the_same_unsent_gradient() -> None:
    old = run_ranks(train_to_a_state, 2, 0.0)
    (alone,) = run_ranks(pass_on, 1, merge_states(facts["worker"] for facts in old))
    for facts in run_ranks(send_everything, 2, merge_states([alone]), old[0]["weights"], 0.0):
        assert facts["left"] == 0.0
        for name in ("large", "conv"):
            mean = sum(each["worker"]["residuals"][name].double() for each in old) / 2
            mean = from_memory(mean, name, SHAPES[name])
            assert mean.norm() > 1
            torch.testing.assert_close(facts["applied"][name], mean, rtol=0, atol=2e-6)


def test_merging_keeps_dtypes_and_copies() -> None:
    velocities = [torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([3.0, 4.0]).bfloat16()]
    states = [
        state_of(4, rank=(number, 2), residuals={"w": torch.tensor([1.0, -2.0 * number])}, velocities={"w": velocity})
        for number, velocity in enumerate(velocities)
    ]
    merged = merge_states(states)
    assert merged["step"] == 4
    assert merged["residuals"]["w"].tolist() == [1.0, -1.0]
    assert merged["velocities"]["w"].dtype == torch.bfloat16
    assert merged["velocities"]["w"].tolist() == [2.0, 3.0]
    merged["residuals"]["w"].zero_()
    assert states[0]["residuals"]["w"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("ranks", "steps", "message"),
    [
        ([], [], "not given the state of rank 0 of 1"),
        ([(0, 2)], [4], "not given the state of rank 1 of 2"),
        ([(2, 4), (0, 4)], [4, 4], "not given the state of rank 1, 3 of 4"),
        ([(0, 2), (0, 2)], [4, 4], "given the state of rank 0 twice"),
        ([(0, 2), (1, 2)], [3, 9], "rank 0 after step 3 of 2 ranks, and that of rank 1 after step 9 of 2 ranks"),
        ([(0, 2), (1, 3)], [3, 3], "rank 0 after step 3 of 2 ranks, and that of rank 1 after step 3 of 3 ranks"),
    ],
)
def test_states_that_are_not_those_of_all_ranks_at_one_step_are_not_merged(
    ranks: list[tuple[int, int]], steps: list[int], message: str
) -> None:
    states = [state_of(step, rank=rank) for rank, step in zip(ranks, steps, strict=True)]
    with pytest.raises(ConfigurationError, match=rf"{message}.*\. Give it worker.state_dict\(\) of each rank"):
        merge_states(states)


def test_only_states_are_merged() -> None:
    whole = merge_states(twice(state_of(4)))
    for given in ("state", whole):
        with pytest.raises(ConfigurationError, match=f"given a {type(given).__name__} that is no state"):
            merge_states([given])  # type: ignore[list-item]


def go_on_alone(sign: float, bad_step: bool, **options: Any) -> list[Tensor]:
    """Three steps of one rank that got a residual, a velocity and a dense tensor's velocity from others."""
    worker, parameters = make_worker(METHOD, momentum=0.9, nesterov=False, maximize=sign < 0, **options)
    for name in ("large", "bias"):
        worker.optimizer.state[parameters[name]]["momentum_buffer"] = make_weight("velocity", SHAPES[name])
    residual = make_weight("residual", SHAPES["large"])
    worker.load_state_dict(merge_states(twice(state_of(6, residuals={"large": residual}))))
    if bad_step:
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, float("nan"))
        with worker.stepping():
            worker.exchange(skip_nonfinite=True)  # as a GradScaler does, which then takes no step
    for step in range(3):
        take_step(worker, parameters, step, sign=sign)
        assert worker.residuals == {}
        assert worker.optimizer.param_groups[0]["momentum"] == 0.9
    return [parameter.detach() for parameter in parameters.values()]


def test_one_rank_goes_on_with_plain_momentum() -> None:
    """Its first step is SGD with the residual added, and with the decay of what that leads to; then SGD goes on."""
    trained = go_on_alone(1.0, False)
    parameters = make_parameters(SHAPES)
    sgd = SGD(parameters.values(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for name in ("large", "bias"):
        sgd.state[parameters[name]]["momentum_buffer"] = make_weight("velocity", SHAPES[name])
    for step in range(3):
        sgd.zero_grad()
        backward(parameters, step)
        if step == 0:
            with torch.no_grad():
                parameters["large"].sub_(make_weight("residual", SHAPES["large"]), alpha=0.05)
        sgd.step()
    for weight, expected in zip(trained, parameters.values(), strict=True):
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-5, atol=1e-6)


def test_one_rank_may_climb() -> None:
    for down, up in zip(go_on_alone(1.0, False), go_on_alone(-1.0, False), strict=True):
        assert down.equal(up)


def test_one_rank_keeps_its_residual_through_a_skipped_step() -> None:
    for good, after_bad in zip(go_on_alone(1.0, False), go_on_alone(1.0, True), strict=True):
        assert after_bad.equal(good)


# A state of another model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("renamed", (300, 240), r"residual of shape \(300, 240\) for 'renamed'; the optimizer has no such parameter"),
        ("large", (240, 300), r"shape \(240, 300\) for 'large'; the optimizer has shape \(300, 240\)"),
        ("conv", (8, 4, 9), r"shape \(8, 4, 9\) for 'conv'; the optimizer has shape \(8, 4, 3, 3\)"),
    ],
)
def test_the_state_of_another_model_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    worker, _ = make_worker(METHOD)
    state = state_of(residuals={name: make_weight(name, shape)})
    with pytest.raises(ConfigurationError, match=message):
        worker.load_state_dict(state)


def resume_with(saved: tuple[str, str], kinds: list[tuple[str, str]], nodes: Nodes, merges: bool) -> list[str | None]:
    """Train under the first correction, go on under each of the others; what each resume says."""

    def attach(optimizer_name: str, correction: str) -> tuple[GradientWorker, Parameters]:
        parameters = make_parameters({"large": (40, 30)})
        optimizer = getattr(torch.optim, optimizer_name)(parameters.values(), lr=0.01)
        worker = METHOD.replace(correction=correction).attach(optimizer, parameters.items(), topology=nodes)
        assert isinstance(worker, GradientWorker)
        return worker, parameters

    worker, parameters = attach(*saved)
    for step in range(3):
        if step == 2:
            in_the_dense_phase = worker.state_dict()
        take_step(worker, parameters, step)
    state = merge_states(twice(worker.state_dict())) if merges else worker.state_dict()
    messages = []
    for kind in kinds:
        worker, _ = attach(*kind)
        messages.append(message_of(partial(worker.load_state_dict, state), ConfigurationError))
        worker.load_state_dict(in_the_dense_phase)  # in which they do not differ
    return messages


KINDS = [("SGD", "auto"), ("SGD", "error_feedback"), ("AdamW", "auto"), ("AdamW", "error_feedback")]
NAMES_OF_KINDS = ["momentum", "error_feedback", "own_variance", "error_feedback"]


@pytest.mark.parametrize(
    ("nodes", "merges"), [(FLAT, False), (FLAT, True), (NODES["blocks"], False)], ids=["flat", "merged", "two levels"]
)
def test_residuals_of_another_correction_are_refused(nodes: Nodes, merges: bool) -> None:
    cases = [(saved, KINDS, nodes, merges) for saved in KINDS]
    for by_case in run_ranks(each, sum(map(len, nodes)), resume_with, cases):
        for name_of_saved, messages in zip(NAMES_OF_KINDS, by_case, strict=True):
            for (optimizer_name, _), name, message in zip(KINDS, NAMES_OF_KINDS, messages, strict=True):
                if name == name_of_saved:
                    assert message is None
                    continue
                assert message is not None
                assert f"keeps what {name_of_saved!r} had not sent, " in message
                assert f"with {optimizer_name}, which is {name!r}" in message


def test_what_another_payload_keeps_is_refused() -> None:
    """It would never be sent."""
    rounded = state_of(rounded={"large": make_weight("rounded", SHAPES["large"]).view(-1)})
    worker, _ = make_worker(METHOD)
    with pytest.raises(ConfigurationError, match=r"gradients that have not been sent, and with TopK\("):
        worker.load_state_dict(rounded)
    for method, state in ((Method(), rounded), (Method(what=Narrow()), state_of(residuals={"conv": torch.ones(8)}))):
        parameters = make_parameters({"large": SHAPES["large"], "conv": (8,)})
        sgd = SGD(parameters.values(), lr=0.1)
        kind = type(method.what).__name__
        other = method.attach(sgd, parameters.items())
        with pytest.raises(ConfigurationError, match=f"and with {kind}|that means something else"):
            other.load_state_dict(state)
        assert other.step == 0


def test_a_state_takes_the_layout_of_the_parameter() -> None:
    """Optimizer memory is channels_last where the parameter is; a saved contiguous buffer goes there by value."""
    worker, parameters = make_worker(METHOD)
    residual, momentum_buffer = make_weight("conv", (8, 4, 3, 3)).contiguous(), torch.randn(8, 4, 3, 3)
    state = state_of(7, residuals={"conv": residual}, velocities={"conv": momentum_buffer.view(-1)})
    state["exchange"] = {"thresholds": {"conv": 0.25}, "link": None, "reducer": {"numels": [], "boundaries": []}}
    worker.load_state_dict(state)
    conv = parameters["conv"]
    assert worker.step == 7
    assert worker.residuals["conv"].equal(in_memory(residual, "conv"))
    loaded = worker.optimizer.state[conv]["momentum_buffer"]
    assert loaded.equal(momentum_buffer)
    assert loaded.is_contiguous(memory_format=torch.channels_last)
    assert worker.state_dict()["exchange"]["thresholds"] == {"conv": 0.25}


def test_a_run_goes_on_in_another_memory_format() -> None:
    """What is kept follows the elements; parts of it cannot, and say so."""
    other = {name: Parameter(p.detach().contiguous()) for name, p in make_parameters(SHAPES).items()}
    method = DGC(min_numel=1)
    contiguous = method.attach(SGD(other.values(), lr=0.1, momentum=0.9), other.items())
    worker, parameters = make_worker(method)
    residual, velocity = torch.randn(2, *SHAPES["conv"])
    state = state_of(residuals={"conv": residual}, velocities={"conv": velocity.view(-1)})
    contiguous.load_state_dict(state)
    for _ in range(2):
        worker.load_state_dict(contiguous.state_dict())
        assert worker.residuals["conv"].equal(in_memory(residual, "conv"))
        assert worker.optimizer.state[parameters["conv"]]["momentum_buffer"].equal(velocity)
        contiguous.load_state_dict(worker.state_dict())
        assert contiguous.residuals["conv"].equal(residual.view(-1))
    state = {**worker.state_dict(), "nodes": None, "local_rank": (0, 2)}
    state |= {key: {"conv": state[key]["conv"].view(-1)[:144]} for key in ("residuals", "velocities")}
    in_few_bits = {**state, "residuals": {}, "velocities": {}, "rounded": state["residuals"], "exchange": None}
    merged = {**in_few_bits, "local_rank": None, "rounded": {"conv": residual.view(-1)}}
    merged["orders"] = {"conv": (0, 1, 2, 3)}
    narrow = Method(what=Narrow()).attach(SGD(other.values(), lr=0.1), other.items())
    for refusing, each_state in ((contiguous, state), (narrow, in_few_bits)):
        with pytest.raises(
            ConfigurationError, match=r"\(0, 2, 3, 1\), and it now lies in memory in the order \(0, 1, 2, 3\)"
        ):
            refusing.load_state_dict(each_state)
    last = Method(what=Narrow()).attach(SGD(parameters.values(), lr=0.1), parameters.items())
    last.load_state_dict(merged)
    assert last.narrow is not None
    assert last.narrow.residuals["conv"].equal(in_memory(residual, "conv"))


def keep_what_is_small(options: dict[str, Any]) -> dict[str, Any]:
    """Of a hundred elements one is sent; another gets 1, and then a billionth in each step."""
    weight = Parameter(torch.zeros(100, dtype=torch.float64))
    method = DGC(sparsity=[0.99], min_numel=1, **options)
    worker = method.attach(SGD([weight], lr=0.1), [("weight", weight)])
    assert isinstance(worker, GradientWorker)
    for step in range(21):
        weight.grad = torch.zeros_like(weight)
        weight.grad[7], weight.grad[5] = 10.0, 1e-9 if step else 1.0
        if step == 20:
            worker.load_state_dict(worker.state_dict())
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
    merged = merge_states(twice(worker.state_dict()))
    return {"kept": worker.residuals["weight"], "merged": merged["residuals"]["weight"], "weight": weight.detach()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_dtype": "int8"},
        {"selection": "exact", "chunk": 50},
        {"exchange": "dense"},
        {"exchange": "reduce_scatter"},
    ],
    ids=str,
)
def test_residuals_of_float64_are_float64(options: dict[str, Any]) -> None:
    for result in run_ranks(keep_what_is_small, 2, options):
        for kept in (result["kept"], result["merged"]):
            assert kept.dtype == torch.float64
            assert abs(float(kept[5]) - (1 + 20e-9)) < 1e-14
        torch.testing.assert_close(float(result["weight"][7]), -21.0, rtol=2e-2, atol=0.0)


def change_the_memory_format() -> str | None:
    worker, parameters = make_worker(DGC(min_numel=1))
    take_step(worker, parameters, 0)
    conv = parameters["conv"]
    conv.data = conv.data.contiguous()
    return message_of(lambda: take_step(worker, parameters, 1), ConfigurationError)


def test_a_memory_format_that_changes_under_what_is_kept_is_told() -> None:
    for said in run_ranks(change_the_memory_format, 2):
        assert said is not None
        assert "the memory format of 'conv' has changed" in said
        assert "model.to(memory_format=...)" in said


def test_what_is_small_is_decided_once_and_kept_over_a_resume() -> None:
    """A layer that is unfrozen later is most of the model then; what has been sent sparse must stay so."""
    small, large = make_parameters({"adapter": (50, 40)}), make_parameters({"layer": (2048, 2048)})
    parameters = {**small, **large}
    large["layer"].requires_grad_(False)

    def attach() -> GradientWorker:
        worker = DGC(sparsity=(0.99,)).attach(SGD(parameters.values(), lr=0.1), parameters.items())
        assert isinstance(worker, GradientWorker)
        return worker

    worker = attach()
    what = worker.method.what
    assert isinstance(what, TopK)
    assert numels_by_kind(worker, what) == ([2000], [])
    state = worker.state_dict()
    large["layer"].requires_grad_(True)
    resumed = attach()
    assert resumed.small_numel == 16384
    for saved in (state, merge_states(twice(state))):
        resumed.load_state_dict(saved)
        assert resumed.small_numel == 2000
    for each_worker in (worker, resumed):
        assert numels_by_kind(each_worker, what) == ([2000, 2048**2], [])
    with_all = attach()
    assert numels_by_kind(with_all, what) == ([2048**2], [2000])


def replace_parameters() -> tuple[list[float], list[str]]:
    """Put another parameter in the place of one, twice; the second has no gradient."""
    weight, other = Parameter(torch.zeros(1000)), Parameter(torch.zeros(1000))
    optimizer = SGD([weight, other], lr=1.0)
    worker = DGC(sparsity=[0.9], min_numel=1).attach(optimizer, [("weight", weight), ("other", other)])
    moved = []
    for step in range(6):
        if step in (2, 4):
            weight = Parameter(torch.zeros(1000))
            optimizer.param_groups[0]["params"][0] = weight
        weight.grad, other.grad = torch.full((1000,), float(step < 4)), torch.ones(1000)
        optimizer.step()
        moved.append(float(weight.detach().norm()))
    return moved, sorted(worker.state_dict()["residuals"])


def test_a_parameter_does_not_get_what_was_kept_of_another_at_its_place() -> None:
    for moved, saved in run_ranks(replace_parameters, 2):
        assert all(moved[:4])
        assert moved[4:] == [0.0, 0.0]
        assert saved == ["optimizer.0'", "other"]
