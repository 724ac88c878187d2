"""How a row is trained in a plain loop, and what is noted of it: the promises are about that."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer
from tests.contract.rows import ROWS, Row
from tests.ranks import run_ranks
from tests.sync.problem import AWKWARD, Parameters, backward, make_parameters

STEPS = 11
STOPS = (2, 9)  # at the hand-over; and in mid-interval, where averages have been begun just before
RESUMED_IN = dict(zip(STOPS, (torch.float32, torch.float64), strict=True))  # the default dtype: nothing to rely on


def attach(row: Row) -> tuple[Synchronizer, Parameters, dict[str, Tensor]]:
    parameters = make_parameters(AWKWARD)
    mean, variance = (torch.full((5,), value, dtype=torch.float32) for value in (0.0, 1.0))
    buffers = {"norm.running_mean": mean, "norm.running_var": variance, "norm.count": torch.tensor(0)}
    optimizer = row.optimizer(parameters.values())
    method = row.method if dist.is_initialized() and dist.get_world_size() > 1 else row.method.at("flat")
    return method.attach(optimizer, parameters.items(), named_buffers=buffers), parameters, buffers


def backward_of(worker: Synchronizer, parameters: Parameters, number: int) -> None:
    """Compute this rank's gradients of a step, and its loss, which falls."""
    worker.optimizer.zero_grad()
    backward(parameters, number)
    if isinstance(worker, LocalSync):
        rank = dist.get_rank() if dist.is_initialized() else 0
        loss = torch.tensor(0.75**number * (1 + rank), dtype=torch.float32)
        worker.observe_loss(loss)  # without that of some steps k would be another


def step(worker: Synchronizer, parameters: Parameters, buffers: dict[str, Tensor], number: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    backward_of(worker, parameters, number)
    buffers["norm.running_mean"].add_(0.1 * (number + rank))
    buffers["norm.count"].add_(1 + rank)
    worker.optimizer.step()


def everything(worker: Synchronizer, parameters: Parameters, buffers: dict[str, Tensor]) -> str:
    """Return a digest of weights, buffers and the optimizer's state of this rank."""
    state = [
        value
        for entry in worker.optimizer.state_dict()["state"].values()
        for _, value in sorted(entry.items())
        if isinstance(value, Tensor)
    ]
    return digest([*parameters.values(), *buffers.values(), *state])


def tensors_of(state: Any) -> Iterator[Tensor]:
    """Yield all tensors of a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in [state[key] for key in sorted(state, key=str)] if isinstance(state, dict) else state:
            yield from tensors_of(part)


@dataclass(frozen=True)
class Trained:
    """What a training on one rank was like.

    Attributes:
        weights: digests after each step, and after `finish`.
        everything: digests of weights, buffers and the optimizer's state after each step; then of all that is kept.
        shown: digests of the last average, as shown after each step, with its buffers; if it was looked at.
        has_moved: whether the weights have changed.
        k_steps: the period that the worker has reported before each step; of methods that average weights.
        num_averages: those that it has reported after each step.
        fragments: the parameters that are averaged together.
        wire_bytes: sent after each step, on two levels between nodes, by the ledger.
        num_messages: collectives in each step, on two levels between nodes, by the ledger.
        dense_bytes: what DDP would have sent, by the ledger.
        sent_bytes: by the ledger, with those of `finish`.
        given_bytes: the same, by what torch.distributed was given.
    """

    weights: list[str]
    everything: list[str]
    shown: list[str]
    has_moved: bool
    k_steps: list[int]
    num_averages: list[int]
    fragments: list[list[str]]
    wire_bytes: list[int]
    num_messages: list[int]
    dense_bytes: int
    sent_bytes: int
    given_bytes: int


# The volume of each collective that a step may use, by the tensors of its call and the number of ranks.
VOLUMES: dict[str, Callable[..., int]] = {
    "all_reduce": lambda num_ranks, tensor, *_, **__: all_reduce_bytes(tensor.nbytes, num_ranks),
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
    for name in ("all_gather", "reduce", "all_to_all_single", "reduce_scatter_tensor"):
        setattr(dist, name, uncounted)
    allowed = iter([dist.all_gather_object] * 3)  # the first step compares the ranks, by two, and the end
    dist.all_gather_object = lambda *args, **kwargs: next(allowed, uncounted)(*args, **kwargs)


def train(name: str, look: bool = False, saved: dict[int, bytes] | None = None) -> Trained:
    """Train on this rank.

    Args:
        look: whether to ask for metrics, state and the last average after each step.
        saved: gets what a checkpoint has, before each of the `STOPS`.
    """
    worker, parameters, buffers = attach(ROWS[name])
    start, volumes, ledger = digest(parameters.values()), list[int](), worker.peers.ledger
    lists: dict[str, list[Any]] = {key: [] for key in ("weights", "everything", "shown", "k_steps", "num_averages")}
    wire_bytes: list[int] = []
    levels, record = list[str](), ledger.record
    is_between = ("inter",) if worker.peers.is_two_level else ("inter", None)
    vars(ledger)["record"] = lambda nbytes, level=None: (levels.append(level), record(nbytes, level))
    num_messages: list[int] = []
    if not look:
        count(volumes)
    for number in range(STEPS):
        if saved is not None and number in STOPS:
            file = io.BytesIO()
            optimizer = worker.optimizer.state_dict()
            state = {"worker": worker.state_dict(), "weights": dict(parameters), "buffers": buffers}
            torch.save({**state, "optimizer": optimizer}, file)
            saved[number] = file.getvalue()
        if isinstance(worker, LocalSync):
            lists["k_steps"].append(worker.plan.k_steps)
        step(worker, parameters, buffers, number)
        if look:
            worker.metrics(True)
            for kept in tensors_of(worker.state_dict()):
                kept.fill_(77)  # what is saved is a copy
            if isinstance(worker, LocalSync):
                with worker.consensus():
                    anchored = [buffer for name, buffer in buffers.items() if name in worker.buffers.start]
                    lists["shown"].append(digest([*parameters.values(), *anchored]))
        if isinstance(worker, LocalSync):
            lists["num_averages"].append(worker.num_averages)
        lists["weights"].append(digest(parameters.values()))
        lists["everything"].append(everything(worker, parameters, buffers))
        num_messages.append(sum(level in is_between for level in levels))
        levels.clear()
        wire_bytes.append(ledger.of_slow_network[0])
    lists["everything"].append(digest(tensors_of(worker.state_dict())))
    wire_bytes[-1] = ledger.of_slow_network[0]  # what has been saved has arrived
    fragments = worker.fragments if isinstance(worker, LocalSync) else []
    dense_bytes = ledger.dense_bytes
    worker.finish()
    lists["weights"].append(digest(parameters.values()))
    return Trained(
        **lists,
        has_moved=lists["weights"][-1] != start,
        fragments=[[worker.params.name_of(each) for each in fragment.parameters] for fragment in fragments],
        wire_bytes=wire_bytes,
        num_messages=num_messages,
        dense_bytes=dense_bytes,
        sent_bytes=ledger.sent_bytes,
        given_bytes=sum(volumes),
    )


@functools.cache
def trained(name: str) -> list[Trained]:
    """Return what `train` says on each rank; most promises are about it."""
    return run_ranks(train, ROWS[name].num_ranks, name)


def look_and_resume(name: str) -> tuple[Trained, dict[int, list[str]]]:
    """Train with a look at everything after each step; then begin anew from what was saved before each of the stops.

    Returns:
        What `train` does; and digests of everything in the steps after each stop.
    """
    saved: dict[int, bytes] = {}
    straight = train(name, look=True, saved=saved)
    resumed: dict[int, list[str]] = {}
    for stop, content in saved.items():
        torch.set_default_dtype(RESUMED_IN[stop])  # put back by `run_ranks`
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
        resumed[stop].append(digest(tensors_of(worker.state_dict())))
        worker.finish()
    return straight, resumed


@functools.cache
def looked_at(name: str) -> list[tuple[Trained, dict[int, list[str]]]]:
    return run_ranks(look_and_resume, ROWS[name].num_ranks, name)
