"""What every method promises, in a plain loop on real ranks: one test a promise, one row a method."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ConfigurationError, EveryK, Method, Narrow, TopK
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.state import merge
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes
from tests.contract.rows import ROWS, Row
from tests.engine.problem import AWKWARD, Parameters, backward, in_memory, make_parameters
from tests.ranks import run_ranks

STEPS = 11
EVERY_ROW = pytest.mark.parametrize("name", list(ROWS))


def attach(row: Row) -> tuple[Worker, Parameters, dict[str, Tensor]]:
    parameters = make_parameters(AWKWARD)
    buffers = {"norm.running_mean": torch.zeros(5), "norm.running_var": torch.ones(5)}
    optimizer = row.optimizer(parameters.values())
    method = row.method if dist.is_initialized() and dist.get_world_size() > 1 else row.method.at("flat")
    return method.attach(optimizer, parameters.items(), named_buffers=buffers), parameters, buffers


def step(worker: Worker, parameters: Parameters, buffers: dict[str, Tensor], number: int) -> None:
    worker.optimizer.zero_grad()
    backward(parameters, number)
    buffers["norm.running_mean"].add_(0.1 * (number + dist.get_rank() if dist.is_initialized() else 0))
    worker.optimizer.step()


def everything(worker: Worker, parameters: Parameters, buffers: dict[str, Tensor]) -> str:
    """Return a digest of weights, buffers and the optimizer's state of this rank."""
    state = [
        value
        for entry in worker.optimizer.state_dict()["state"].values()
        for _, value in sorted(entry.items())
        if isinstance(value, Tensor)
    ]
    return digest([*parameters.values(), *buffers.values(), *state])


def spoil(state: Any) -> None:
    """Fill all tensors of a state: what is saved is a copy."""
    if isinstance(state, Tensor):
        state.fill_(77)
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            spoil(part)


@dataclass(frozen=True)
class Trained:
    """What a training on one rank was like: digests of the weights and of everything, after each step, of the weights
    after the last average, too; whether the weights have moved; the bytes sent by the ledger, and by what
    torch.distributed was given."""

    weights: list[str]
    everything: list[str]
    has_moved: bool
    sent_bytes: int
    given_bytes: int


# The volume of each collective that a step may use, by the tensors of its call and the number of ranks.
VOLUMES: dict[str, Callable[..., int]] = {
    "all_reduce": lambda num_ranks, tensor, **_: all_reduce_bytes(tensor.nbytes, num_ranks),
    "all_gather_single": lambda num_ranks, _, tensor, **__: all_gather_bytes(tensor.nbytes, num_ranks),
    "all_gather_into_tensor": lambda num_ranks, _, tensor, **__: all_gather_bytes(tensor.nbytes, num_ranks),
    "broadcast": lambda _, tensor, **__: tensor.nbytes,
    "isend": lambda _, tensor, *__, **___: tensor.nbytes,
}


def count(volumes: list[int]) -> None:
    """Append the bytes that this rank sends in each collective from now on, till the rank is used again."""

    def counting(collective: Callable[..., Any], volume: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            volumes.append(volume(dist.get_world_size(kwargs.get("group")), *args, **kwargs))
            return collective(*args, **kwargs)

        return call

    def uncounted(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective whose volume is not known here")

    for name, volume in VOLUMES.items():
        if (collective := getattr(dist, name, None)) is not None:
            setattr(dist, name, counting(collective, volume))
    for name in ("all_gather", "reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather_object"):
        setattr(dist, name, uncounted)


def train(name: str, look: bool = False, saved: dict[int, bytes] | None = None) -> Trained:
    """Train on this rank.

    Args:
        look: whether to ask for metrics, state and consensus after each step.
        saved: gets what a checkpoint has, before each of the `STOPS`.
    """
    worker, parameters, buffers = attach(ROWS[name])
    start, weights, all_of_it, volumes = digest(parameters.values()), [], [], list[int]()
    if not look:
        count(volumes)
    for number in range(STEPS):
        if saved is not None and number in STOPS:
            file = io.BytesIO()
            optimizer = worker.optimizer.state_dict()
            state = {"worker": worker.state_dict(), "weights": dict(parameters), "buffers": buffers}
            torch.save({**state, "optimizer": optimizer}, file)
            saved[number] = file.getvalue()
        step(worker, parameters, buffers, number)
        if look:
            worker.metrics(True)
            spoil(worker.state_dict())
            if isinstance(worker, ReplicaWorker):
                with worker.consensus():
                    pass
        weights.append(digest(parameters.values()))
        all_of_it.append(everything(worker, parameters, buffers))
    worker.finish()  # type: ignore[attr-defined]
    weights.append(digest(parameters.values()))
    return Trained(weights, all_of_it, weights[-1] != start, worker.peers.ledger.sent_bytes, sum(volumes))


@functools.cache
def trained(name: str) -> list[Trained]:
    """Return what `train` says on each rank; two promises are about it."""
    return run_ranks(train, ROWS[name].num_ranks, name)


@EVERY_ROW
def test_replicas_are_equal_after_each_synchronisation(name: str) -> None:
    row = ROWS[name]
    results = trained(name)
    ends = {result.weights[-1] for result in results}
    assert len(ends) == 1, "the ranks end with different weights"
    assert all(result.has_moved for result in results)
    by_step = [len({result.weights[number] for result in results}) for number in range(STEPS)]
    if row.method.averages_weights:
        assert max(by_step) > 1, "no step was local"
    else:
        assert by_step == [1] * STEPS, "replicas differ after a step"


@EVERY_ROW
def test_the_ledger_has_the_bytes_of_each_collective(name: str) -> None:
    """By the formulas of the collectives and the tensors that they were given, in the steps and in `finish`."""
    for result in trained(name):
        assert result.sent_bytes == result.given_bytes > 0


PLAIN_LR = 0.05
KEPT_WHOLE: dict[str, Any] = {"decay": 1.0, "mean_over": "ranks"}  # else residuals fade, or a sum is divided otherwise
CONSERVED = [name for name, row in ROWS.items() if getattr(row.method.when, "outer", "none") == "none"]


def flat_in_rows(tensor: Tensor, _: str) -> Tensor:
    return tensor.reshape(-1)


def step_plainly(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Train by plain SGD; return the weights, what this rank's steps have asked of them (both flat, in the order of the
    residuals) and the state of the method."""
    row = ROWS[name]
    in_order = flat_in_rows if row.method.averages_weights else in_memory
    method = row.method.replace(**KEPT_WHOLE) if isinstance(row.method.what, TopK) else row.method
    worker, parameters, _ = attach(Row(method, functools.partial(torch.optim.SGD, lr=PLAIN_LR), row.num_ranks))
    asked = {key: in_order(parameter.detach().double(), key) for key, parameter in parameters.items()}
    for number in range(STEPS):
        worker.optimizer.zero_grad()
        backward(parameters, number)
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            asked[key] = asked[key] - PLAIN_LR * in_order(parameter.grad.double(), key)
        worker.optimizer.step()
    worker.finish()  # type: ignore[attr-defined]
    return {key: in_order(each.detach(), key) for key, each in parameters.items()}, asked, worker.state_dict()


@pytest.mark.parametrize("name", CONSERVED)
def test_what_is_applied_and_what_is_kept_is_all_there_was(name: str) -> None:
    """Sent + residual == signal, in the mean of the participants: nothing is lost, and nothing is applied twice."""
    results = run_ranks(step_plainly, ROWS[name].num_ranks, name)
    merged = merge(state for _, _, state in results)
    of_kept = 1.0 if ROWS[name].method.averages_weights else -PLAIN_LR  # changes of weights are kept, or gradients
    for key, weight in results[0][0].items():
        there = weight.double()
        for kept in (merged["residuals"], merged["rounded"]):
            there += of_kept * kept.get(key, torch.zeros(())).double()
        asked = torch.stack([each[key] for _, each, _ in results]).mean(0)
        torch.testing.assert_close(there, asked, rtol=1e-5, atol=2e-6)
    keeps_back = isinstance(ROWS[name].method.what, TopK | Narrow)
    assert any(each.any() for each in (*merged["residuals"].values(), *merged["rounded"].values())) == keeps_back


FIXED = [
    name
    for name, row in ROWS.items()
    if isinstance(when := row.method.when, EveryK)
    and (when.rule, when.delay_steps, when.num_fragments) == ("fixed", 0, 1)
]


@pytest.mark.parametrize("name", FIXED)
def test_the_average_number_j_comes_after_step_begin_plus_j_times_k(name: str) -> None:
    """And no step before it makes replicas equal, but for the synchronous ones."""
    when = ROWS[name].method.when
    assert isinstance(when, EveryK)
    assert isinstance(when.begin_step, int)
    are_equal = [len({result.weights[step - 1] for result in trained(name)}) == 1 for step in range(1, STEPS + 1)]
    due = [step <= when.begin_step or (step - when.begin_step) % when.k_steps == 0 for step in range(1, STEPS + 1)]
    assert are_equal == due


STOPS = (2, 4, 8)  # at the hand-over, in the middle of the stairs or of an interval, near the end


def look_and_resume(name: str) -> tuple[Trained, dict[int, list[str]]]:
    """Train with a look at everything after each step; then begin anew from what was saved before each of the stops.

    Returns:
        What `train` does; and digests of everything in the steps after each stop.
    """
    saved: dict[int, bytes] = {}
    straight = train(name, look=True, saved=saved)
    resumed: dict[int, list[str]] = {}
    for stop, content in saved.items():
        worker, parameters, buffers = attach(ROWS[name])
        state = torch.load(io.BytesIO(content), weights_only=True)  # tensors and primitives only
        with torch.no_grad():
            for key, weight in state["weights"].items():
                parameters[key].copy_(weight)
            for key, buffer in state["buffers"].items():
                buffers[key].copy_(buffer)
        worker.optimizer.load_state_dict(state["optimizer"])
        worker.load_state_dict(state["worker"])
        resumed[stop] = []
        for number in range(stop, STEPS):
            step(worker, parameters, buffers, number)
            resumed[stop].append(everything(worker, parameters, buffers))
        worker.finish()  # type: ignore[attr-defined]
    return straight, resumed


@functools.cache
def looked_at(name: str) -> list[tuple[Trained, dict[int, list[str]]]]:
    return run_ranks(look_and_resume, ROWS[name].num_ranks, name)


@EVERY_ROW
def test_looking_changes_nothing(name: str) -> None:
    for (result, _), expected in zip(looked_at(name), trained(name), strict=True):
        assert (result.weights, result.everything) == (expected.weights, expected.everything)


@EVERY_ROW
@pytest.mark.parametrize("stop", STOPS)
def test_a_run_that_is_stopped_in_mid_interval_resumes_to_the_bit(name: str, stop: int) -> None:
    for (_, resumed), straight in zip(looked_at(name), trained(name), strict=True):
        assert resumed[stop] == straight.everything[stop:]


def plain(name: str) -> list[str]:
    parameters = make_parameters(AWKWARD)
    optimizer = ROWS[name].optimizer(parameters.values())
    digests = []
    for number in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, number)
        optimizer.step()
        digests.append(digest(parameters.values()))
    return digests


@EVERY_ROW
@pytest.mark.filterwarnings("ignore")
def test_one_rank_is_plain_training(name: str) -> None:
    (result,) = run_ranks(train, 1, name)
    assert result.weights[:STEPS] == plain(name)
    assert result.sent_bytes == 0


@EVERY_ROW
def test_a_method_is_a_value(name: str) -> None:
    method = ROWS[name].method
    assert Method(**method.describe()) == method
    assert all(isinstance(value, (bool, int, float, str, tuple, type(None))) for value in method.facts().values())
    with pytest.raises(ConfigurationError, match="no such_knob"):
        method.replace(such_knob=1)


def test_whole_gradients_are_those_of_ddp() -> None:
    """So are averages after every step: both are momentum SGD on the mean gradient."""
    for weights in run_ranks(train_beside_the_mean, 2):
        for mine, expected in weights:
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


def train_beside_the_mean() -> list[tuple[Tensor, Tensor]]:
    worker, parameters, buffers = attach(ROWS["whole"])
    twins = make_parameters(AWKWARD)
    optimizer: Any = ROWS["whole"].optimizer(twins.values())
    for number in range(STEPS):
        step(worker, parameters, buffers, number)
        optimizer.zero_grad()
        backward(twins, number)
        for twin in twins.values():
            assert twin.grad is not None
            dist.all_reduce(twin.grad)
            twin.grad.div_(dist.get_world_size())
        optimizer.step()
    return [(parameters[key].detach(), twins[key].detach()) for key in parameters]


def train_with_another_default(name: str) -> str:
    torch.set_default_dtype(torch.float64)
    try:
        return train(name).weights[-1]
    finally:
        torch.set_default_dtype(torch.float32)


@EVERY_ROW
def test_the_default_dtype_is_nothing_to_rely_on(name: str) -> None:
    """The weights are float32 all the same; what the package allocates says what it is."""
    assert len(set(run_ranks(train_with_another_default, ROWS[name].num_ranks, name))) == 1
