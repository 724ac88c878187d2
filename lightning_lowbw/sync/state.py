"""The states of workers, as tensors on the CPU and primitives, and the state with which another world starts.

A rank's own state is keyed by the names of parameters. Its residuals cover its part of each tensor. A rank of the same
world loads its own state; a rank of another world takes its part of the mean over participants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.peers import Peers, part_of
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels.tensors import CPU, Order, as_real, copy_in_order_, device_of, order_of, saved
from lightning_lowbw.payloads.corrections import ErrorFeedback
from lightning_lowbw.payloads.params import check_shapes
from lightning_lowbw.sync.fragments import differing
from lightning_lowbw.sync.replica import COPY, Replica

Named = dict[str, Tensor]

# Keys of the values that are equal on all ranks: a checkpoint itself has them.
EQUAL = ("step", "small_numel", "local_since", "period", "num_averages", "elastic")
OF_GRADIENTS = ("step", "small_numel", "correction", "payload", "shapes", "orders", "num_participants")


def loaded(tensors: Mapping[str, Tensor], device: torch.device) -> Named:
    """Return copies on a device."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def on_cpu(value: Any) -> Any:
    """Return a copy of a nested state on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # a subclass (an 8-bit state) may not know `clone`
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if getattr(value, "shape", None) == ():  # a numpy scalar, as from a user's formula; a shard with it does not load
        return value.item()
    return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value


def is_loadable(value: Any) -> bool:
    """Return whether torch loads a value from a file that may hold only tensors and primitives."""
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_loadable, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_loadable, [*value, *value.values()]))
    return isinstance(value, (Tensor, bool, int, float, str, type(None))) or getattr(value, "shape", None) == ()


def own_part(kept: Tensor, numel: int, of: tuple[int, int]) -> Tensor:
    """Return a rank's part, flat, of the entry for a tensor of `numel` elements; a merged state has whole tensors."""
    part = part_of(numel, *of)
    return kept if kept.numel() == part.stop - part.start else kept[part]


def equal_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a worker's state that are the same on all ranks: numbers, for the checkpoint itself."""
    return {key: state[key] for key in EQUAL if key in state}


def origin(peers: Peers) -> dict[str, Any]:
    """Return the origin of a state: the rank and the number of ranks, its part of every tensor, and the nodes."""
    nodes = None if peers.topology.is_flat else [list(node) for node in peers.topology.nodes]
    return {
        "rank": (peers.rank, peers.num_ranks),
        "local_rank": (peers.local_rank, peers.num_local_ranks),
        "nodes": nodes,
    }


def check_origin(state: Mapping[str, Any], peers: Peers) -> None:
    """Check that a state is this rank's, with the parts that the rank keeps, or a result of `merge_states`.

    Raises:
        ConfigurationError: the state is neither, and has values of one rank.
    """
    # A dense step leaves no values of one rank: any rank may load such a state.
    keeps = any(state.get(key) for key in ("residuals", "velocities", "local", "own"))
    keeps = keeps or bool(state.get("optimizer", {}).get("state"))
    if state["local_rank"] is None or not keeps:
        return
    here = origin(peers)
    rank, own = state.get("rank", here["rank"]), here["rank"]
    if tuple(rank) != own:
        raise ConfigurationError(
            f"The state is that of rank {rank[0]} of {rank[1]}, and this is rank {own[0]} of {own[1]}: what a rank has "
            "kept back is its own. Let each rank save worker.state_dict() in a file of its own and load that; for "
            "another number of ranks load what lightning_lowbw.merge_states makes of the states of all."
        )
    if state["nodes"] != here["nodes"] and state["residuals"]:
        raise ConfigurationError(
            f"The state is that of a rank on nodes {state['nodes']}, and the ranks are now on nodes {here['nodes']}, "
            "where each keeps other parts of the tensors. Resume with the topology of that run, or load what "
            "lightning_lowbw.merge_states makes of the states of all its ranks."
        )


def check_order(parameter: Parameter, name: str, old: Order) -> None:
    """Check that a parameter has the memory order of the saved state, whose elements have that order.

    Raises:
        ConfigurationError: the order is different.
    """
    new = order_of(as_real(parameter))
    if tuple(old) != new:
        raise ConfigurationError(
            f"The checkpoint keeps {name!r} in the order of its dimensions {tuple(old)}, and it now lies in memory in "
            f"the order {new}. Resume with the memory format of that run (model.to(memory_format=...)), or "
            f"{WITHOUT_RESIDUALS}."
        )


def whole_momentum(correction: ErrorFeedback | None, peers: Peers) -> dict[Parameter, Tensor]:
    """Return the velocities that this node keeps in parts, whole; on the CPU, so that the device has one at a time.

    Collective: the ranks of a node, blocking.
    """
    whole = {}
    for parameter, velocity in ({} if correction is None else correction.parts).items():
        # In float32, which holds narrower ones exactly.
        wide = velocity.to(torch.promote_types(velocity.dtype, torch.float32))
        longest = peers.part(parameter.numel(), 0).stop
        wide = torch.nn.functional.pad(wide, (0, longest - wide.numel()))
        ordered = torch.empty_like(parameter, requires_grad=False)
        copy_in_order_(ordered, parameter, peers.gather_parts_in_node(wide, parameter.numel()))
        whole[parameter] = ordered.cpu()
    return whole


# A replica ------------------------------------------------------------------------------------------------------------


def replica_state(replica: Replica, optimizer: Optimizer, k_steps: int) -> dict[str, Any]:
    """Return the state of a replica, on the CPU and by name.

    Averages in progress are not included: in the state they have not begun, and are due in the next step. If the
    payload has residuals, the call waits for these averages.

    Args:
        replica: the replica of this rank.
        optimizer: the optimizer of this rank.
        k_steps: the period.
    """
    buffers, exchange, name_of = replica.buffers, replica.exchange, replica.params.name_of
    starts = replica.start if replica.needs_start or not replica.parameters_agree else {}
    residuals = {} if exchange is None else saved(exchange.residuals)
    for name, unsent in replica.unapplied():
        residuals[name] = residuals[name] + unsent.cpu()
    device_of(replica.params.device).join(COPY, on_host=True)
    return {
        **origin(replica.peers),
        "own": {} if replica.parameters_agree else saved(replica.own_tensors()),
        "buffers": saved(buffers.start),
        "layout": buffers.state_dict(),
        "start": saved({name_of(parameter): start for parameter, start in starts.items()}),
        "velocity": saved({name_of(parameter): tensor for parameter, tensor in replica.velocity.items()}),
        "residuals": residuals,
        "exchange": None if exchange is None else exchange.state_dict(),
        "fragments": [
            {
                "names": list(map(name_of, fragment.parameters)),
                "steps": fragment.steps if fragment.work is None else (fragment.steps or 0) + k_steps,
                "moved": list(map(name_of, differing([fragment]))),
            }
            for fragment in replica.fragments
        ],
        "optimizer": _optimizer_state(optimizer),
    }


def load_replica_(replica: Replica, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state that contains the values of `replica_state`, after `check_replica` has checked it.

    In place:
        The replica; the model's parameters and buffers; the optimizer, except for values that its state leaves out.
    """
    parameters, peers, exchange = replica.params.by_name(), replica.peers, replica.exchange
    device = replica.params.device
    replica.buffers.load_state_dict(state.get("layout"), loaded(state["buffers"], device))
    # Frozen parameters that were never trained are absent: the model's file has them.
    targets: dict[str, Tensor] = {**parameters, **replica.buffers.now()}
    for name, own in state["own"].items():
        if name in targets and targets[name].shape == own.shape:  # else a buffer, which the next average compares
            targets[name].copy_(own)
    starts = loaded(state["start"], device if replica.needs_start else CPU)
    replica.start = {parameters[name]: start for name, start in starts.items()}
    replica.velocity = {parameters[name]: u for name, u in loaded(state["velocity"], device).items()}
    if exchange is not None:
        of = (peers.local_rank, peers.num_local_ranks) if exchange.payload.keeps_parts else (0, 1)
        residuals = state["residuals"].items()
        parts = {name: own_part(kept, as_real(parameters[name]).numel(), of) for name, kept in residuals}
        exchange.residuals.load(parts, device)
        if state["exchange"] is not None:  # None in a state for another world
            exchange.load_state_dict(state["exchange"])
    for fragment, kept in zip(replica.fragments, state["fragments"], strict=True):
        fragment.parameters = [parameters[name] for name in kept["names"]]
        fragment.steps = kept["steps"]
        fragment.moved = {parameters[name]: None for name in kept["moved"]}
        fragment.work = None
    # A value that a user's code has put into a group, and that no file can hold, stays as this run has made it.
    given = zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True)
    groups = [{**{key: value for key, value in own.items() if not is_loadable(value)}, **kept} for own, kept in given]
    optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state without values that a shard cannot hold, such as a function in a param group."""
    state = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if is_loadable(value)} for group in state["param_groups"]]
    copied: dict[str, Any] = on_cpu({**state, "param_groups": groups})
    return copied


def check_replica(replica: Replica, state: Mapping[str, Any], method: Any) -> None:
    """Check that a replica can go on from a state.

    Args:
        replica: the replica that is to go on.
        state: the state of a replica, or a merged state.
        method: the current method.

    Raises:
        ConfigurationError: the replica cannot go on from this state.
    """
    peers, parameters, num_fragments = replica.peers, replica.params.by_name(), len(replica.fragments)
    check_origin(state, peers)
    if len(state["fragments"]) != num_fragments:
        raise ConfigurationError(
            f"The checkpoint has been written with num_fragments={len(state['fragments'])}, and this is "
            f"{num_fragments}. Resume with the same num_fragments, or {WITHOUT_RESIDUALS}."
        )
    # If gradients are averaged in every step, weights are never averaged: weights that differ would stay different.
    is_one_node = peers.num_participants == 1 and not peers.may_grow
    if state["own"] and peers.num_ranks > 1 and (is_one_node or method.when.is_always_synchronous):
        raise ConfigurationError(
            "The state was written between two averages, where each rank has weights of its own, and here no "
            f"average would ever make them equal: {method}. Resume with the schedule and the topology of that "
            "run, or load what lightning_lowbw.merge_states makes of the states of all its ranks."
        )
    check_shapes({name: own.shape for name, own in state["own"].items() if name in parameters}, parameters)
    reals = {name: as_real(parameter) for name, parameter in parameters.items()}  # as changes are measured
    check_shapes({name: start.shape for name, start in state["start"].items()}, reals)
    names = [name for fragment in state["fragments"] for name in fragment["names"]]
    if missing := [name for name in names if name not in parameters]:
        raise ConfigurationError(
            f"The checkpoint has {missing[0]!r}, and this optimizer has no such parameter. Resume with the model it "
            f"was written with, or {WITHOUT_RESIDUALS}."
        )
    # It decides which tensors are sent whole; a rank whose state is refused keeps its own.
    before, replica.params.small_numel = replica.params.small_numel, state["small_numel"]
    for name, residual in state["residuals"].items():
        if residual.any() and not replica.compresses(parameters[name]):
            replica.params.small_numel = before
            raise ConfigurationError(
                f"The checkpoint keeps changes of {name!r} ({residual.numel()} elements) that have not been sent, "
                f"and with {method.what} they never would be. Resume with the compression of that run, or "
                f"{WITHOUT_RESIDUALS}."
            )


# Another world --------------------------------------------------------------------------------------------------------


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state with which every rank of another world starts, for any method. Reads one state at a time.

    Args:
        states: `worker.state_dict()` of every rank, in any order.

    Raises:
        ConfigurationError: a state is missing, given twice, or not the state of a rank, or the steps differ. Unsent
            elements would be lost, or sent twice.
    """
    seen: list[tuple[int, int, str]] = []
    checked = _noted(states, seen)
    first = next(checked, None)
    if first is not None:
        everything = itertools.chain([first], checked)
        merged = merge_replicas(everything) if "fragments" in first else merge_gradients(everything)
    # Checked afterwards: the states are read one by one, and each may be as large as the model.
    ranks, worlds = sorted(rank for rank, _, _ in seen), {(num_ranks, when) for _, num_ranks, when in seen}
    if len(worlds) != 1 or ranks != list(range(seen[0][1])):
        given = ", ".join(f"rank {rank} of {num_ranks} after {when}" for rank, num_ranks, when in seen) or "nothing"
        raise ConfigurationError(
            f"merge_states was given {given}. Give it worker.state_dict() of each rank that trained, once, all saved "
            "after the same step."
        )
    return merged


def _noted(states: Iterable[Mapping[str, Any]], seen: list[tuple[int, int, str]]) -> Iterator[Mapping[str, Any]]:
    """Yield states; note in `seen` the rank and the time of each."""
    for state in states:
        if not isinstance(state, Mapping) or "rank" not in state:  # or a result of `merge_states`
            raise ConfigurationError(
                f"merge_states was given a {type(state).__name__} that is no state. Give it worker.state_dict()."
            )
        when = f"{state['num_averages']} averages" if "num_averages" in state else f"step {state['step']}"
        seen.append((*state["rank"], when))
        yield state


def merge_gradients(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of the ranks' states: any number of ranks that loads it holds the same unsent gradient.

    The update is 1/N sum v_k. It does not change if each new participant has the mean over the old participants.
    """
    merged: dict[str, Any] = {}
    means = {key: _Mean() for key in ("residuals", "velocities")}
    local: dict[str, Named] = {}
    num_states, num_parts = 0, 1
    for state in states:
        num_states, (_, num_parts) = num_states + 1, state["local_rank"]
        merged = merged or {key: state[key] for key in OF_GRADIENTS}
        for key, mean in means.items():
            for name, kept in state[key].items():
                mean.add(name, kept, math.prod(state["shapes"][name]), state["local_rank"])
        for name, tensors in state["local"].items():
            for key, value in tensors.items():
                of_tensor = local.setdefault(name, {})
                of_tensor[key] = of_tensor.get(key, torch.zeros(())) + value
    of_ranks = {name: {key: total / num_states for key, total in tensors.items()} for name, tensors in local.items()}
    wholes = {key: mean.divide(num_states / num_parts) for key, mean in means.items()}  # by participants
    return {**merged, "local_rank": None, "nodes": None, "local": of_ranks, "exchange": None, **wholes}


def merge_replicas(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state with which every rank of another world starts: the anchor's weights, the mean momentum.

    Residuals are averaged, too, so that 1/N of the sum over the participants stays the same.
    """
    merged: dict[str, Any] = {}
    residuals, optimizer_state = _Mean(), dict[Any, dict[str, Any]]()
    totals: dict[tuple[Any, str], tuple[Tensor, int]] = {}
    num_states, num_parts = 0, 1
    for state in states:
        num_states, (_, num_parts) = num_states + 1, state["local_rank"]
        # A rank without weights of its own goes on from the anchor, which is in the model's file.
        merged = merged or {**state, "own": {}, "buffers": {}, "layout": None, "steps_since_average": 0}
        for name, kept in state["residuals"].items():
            residuals.add(name, kept, state["start"][name].numel(), state["local_rank"])
        for index, entry in state["optimizer"]["state"].items():
            optimizer_state[index] = {**entry, **optimizer_state.get(index, {})}  # a rank may have no entry
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    total, number = totals.get((index, name), (torch.zeros(()), 0))
                    wide = value.to(torch.promote_types(value.dtype, torch.float32))  # a sum of many half numbers
                    totals[index, name] = total + wide, number + 1
    merged |= {
        "local_rank": None,
        "nodes": None,
        "exchange": None,
        "optimizer": {**merged["optimizer"], "state": optimizer_state},
        "residuals": residuals.divide(num_states / num_parts),
        "fragments": [{**fragment, "moved": [], "steps": None} for fragment in merged["fragments"]],
    }
    for (index, name), (total, number) in totals.items():
        optimizer_state[index][name] = (total / number).to(optimizer_state[index][name].dtype)
    return merged


class _Mean:
    """The mean over participants, added up state by state, of tensors whose parts are on different ranks."""

    def __init__(self) -> None:
        self._totals: Named = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, name: str, kept: Tensor, numel: int, of: tuple[int, int]) -> None:
        """Add a rank's entry, flat, for its part of a tensor of `numel` elements; see `own_part`."""
        self._dtypes[name] = kept.dtype
        wide = torch.promote_types(kept.dtype, torch.float32)
        total = self._totals.setdefault(name, torch.zeros(numel, dtype=wide))
        total[part_of(numel, *of)] += own_part(kept, numel, of).to(wide)

    def divide(self, num_participants: float) -> Named:
        """Return the whole means: flat, in the dtype of the parts."""
        return {name: (total / num_participants).to(self._dtypes[name]) for name, total in self._totals.items()}
