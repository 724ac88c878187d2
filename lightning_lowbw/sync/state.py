"""The states of workers: tensors on the CPU and primitives; and what another world starts with.

A rank's own state is keyed by the names of parameters. What it keeps back is that of its part of each tensor: ranks of
the same world load theirs as it is, others cut theirs out of the mean over the participants of the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.peers import Peers, part_of
from lightning_lowbw.compress.params import check_shapes
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels.tensors import Order, as_real, order_of
from lightning_lowbw.sync.exchange import Deferred, DenseMean
from lightning_lowbw.sync.fragments import NUM_SAVE, NUM_STOP, Average, Fragment, change_of

Named = dict[str, Tensor]

OF_GRADIENTS = ("step", "small_numel", "correction", "payload", "shapes", "orders", "num_participants")


def saved(tensors: Mapping[str, Tensor]) -> Named:
    """Return copies on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def loaded(tensors: Mapping[str, Tensor], device: torch.device) -> Named:
    """Return copies on a device."""
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def on_cpu(value: Any) -> Any:
    """Return a copy of a nested state on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # a subclass (an 8-bit state) may not know `clone`
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if getattr(value, "shape", None) == ():  # of numpy, as a user's formula returns; a shard with one does not load
        return value.item()
    return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value


def is_loadable(value: Any) -> bool:
    """Return whether torch loads a value where nothing but tensors and primitives may be in a file."""
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_loadable, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_loadable, [*value, *value.values()]))
    return isinstance(value, (Tensor, bool, int, float, str, type(None))) or getattr(value, "shape", None) == ()


def own_part(kept: Tensor, numel: int, of: tuple[int, int]) -> Tensor:
    """Return a rank's part of what a state has of a tensor with so many elements, flat; a merged state has it whole."""
    part = part_of(numel, *of)
    return kept if kept.numel() == part.stop - part.start else kept[part]


def origin(peers: Peers) -> dict[str, Any]:
    """Return whose state it is: the rank of how many, which part of every tensor it keeps, and the nodes."""
    nodes = None if peers.topology is None else [list(node) for node in peers.topology.nodes]
    return {
        "rank": (peers.rank, peers.num_ranks),
        "local_rank": (peers.local_rank, peers.num_local_ranks),
        "nodes": nodes,
    }


def check_origin(state: Mapping[str, Any], peers: Peers) -> None:
    """Check that a state is that of this rank, with the parts that it keeps, or of `merge_states`.

    Raises:
        ConfigurationError: it is not, and something is kept in it.
    """
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
    """Check that a parameter lies in memory as when a state was saved, which keeps its elements in that order.

    Raises:
        ConfigurationError: it does not.
    """
    new = order_of(as_real(parameter))
    if tuple(old) != new:
        raise ConfigurationError(
            f"The checkpoint keeps {name!r} in the order of its dimensions {tuple(old)}, and it now lies in memory in "
            f"the order {new}. Resume with the memory format of that run (model.to(memory_format=...)), or "
            f"{WITHOUT_RESIDUALS}."
        )


# A replica ------------------------------------------------------------------------------------------------------------


def fragment_state(fragment: Fragment, name_of: Callable[[Parameter], str]) -> dict[str, Any]:
    """Return a fragment on the CPU, by the names of its parameters; waits for its average."""
    return {
        "names": [name_of(parameter) for parameter in fragment.parameters],
        "steps": fragment.steps,
        "moved": [name_of(parameter) for parameter in fragment.moved],
        "work": None if fragment.work is None else _average_state(fragment.work, name_of),
    }


def _average_state(average: Average, name_of: Callable[[Parameter], str]) -> dict[str, Any]:
    """Wait for an average, and return it on the CPU; it may be waited for again."""
    means, status = average.wait_for_whole()
    changes = average.changes.wait()[0].dense()
    average.whole = Deferred(lambda: DenseMean(means), status)
    average.changes = Deferred(lambda: DenseMean(changes))
    return {
        "step": average.step,
        "parameters": [name_of(parameter) for parameter in average.parameters],
        "means": saved(means),
        "changes": saved(changes),
        "status": status.cpu().clone(),
        "snapshots": [snapshot.cpu().clone() for snapshot in average.snapshots or []],
        "buffer_snapshots": saved(average.buffer_snapshots),
        "unsent": list(average.unsent),
    }


def load_fragments_(
    fragments: Sequence[Fragment],
    states: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, Parameter],
    device: torch.device,
) -> None:
    """Load what `fragment_state` has returned of each fragment.

    In place:
        The fragments.

    Args:
        parameters: of the optimizer, by name.
        device: of these.
    """
    for fragment, state in zip(fragments, states, strict=True):
        fragment.parameters = [parameters[name] for name in state["names"]]
        fragment.steps = state["steps"]
        fragment.moved = {parameters[name]: None for name in state["moved"]}
        fragment.work = None if state["work"] is None else _loaded_average(state["work"], parameters, device)


def _loaded_average(state: Mapping[str, Any], parameters: Mapping[str, Parameter], device: torch.device) -> Average:
    """Return a saved average, without requests to processes that have ended."""
    status = state["status"].to(device, copy=True)
    status[[NUM_STOP, NUM_SAVE]] = 0.0
    means, changes = loaded(state["means"], device), loaded(state["changes"], device)
    return Average(
        state["step"],
        [parameters[name] for name in state["parameters"]],
        Deferred(lambda: DenseMean(means), status),
        Deferred(lambda: DenseMean(changes)),
        snapshots=[snapshot.to(device) for snapshot in state["snapshots"]],
        buffer_snapshots=loaded(state["buffer_snapshots"], device),
        unsent=state.get("unsent", ()),
    )


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state without what no shard can hold, as a function in a param group."""
    state = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if is_loadable(value)} for group in state["param_groups"]]
    copied: dict[str, Any] = on_cpu({**state, "param_groups": groups})
    return copied


def load_optimizer_(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state` returned; what it has left out stays as it is.

    In place:
        The optimizer.
    """
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [{**{key: value for key, value in own.items() if not is_loadable(value)}, **kept} for own, kept in pairs]
    optimizer.load_state_dict({**state, "param_groups": groups})


def check_replica(
    state: Mapping[str, Any],
    peers: Peers,
    parameters: Mapping[str, Parameter],
    method: Any,
    *,
    num_fragments: int,
    needs_start: bool,
    sends: Callable[[Parameter], bool],
) -> None:
    """Check that a replica can go on from a state.

    Args:
        state: of a replica, or merged.
        peers: of the replica.
        parameters: of its optimizer, by name.
        method: of the replica.
        num_fragments: of the replica.
        needs_start: whether it keeps the last consensus.
        sends: whether the payload sends the change of a parameter.

    Raises:
        ConfigurationError: it cannot.
    """
    check_origin(state, peers)
    if len(state["fragments"]) != num_fragments:
        raise ConfigurationError(
            f"The checkpoint has been written with num_fragments={len(state['fragments'])}, and this is "
            f"{num_fragments}. Resume with the same num_fragments, or {WITHOUT_RESIDUALS}."
        )
    if needs_start and state["own"] and not state["start"]:
        raise ConfigurationError(
            "The checkpoint was written between two averages, and not with an outer optimizer or a compression, "
            "which need the last consensus. Resume without these, from a checkpoint written after an average, or "
            f"{WITHOUT_RESIDUALS}."
        )
    is_one_node = peers.num_participants == 1 and not peers.may_grow
    if state["own"] and peers.num_ranks > 1 and (is_one_node or method.when.is_always_synchronous):
        raise ConfigurationError(
            "The state was written between two averages, where each rank has weights of its own, and here no "
            f"average would ever make them equal: {method}. Resume with the schedule and the topology of that "
            "run, or load what lightning_lowbw.merge_states makes of the states of all its ranks."
        )
    check_shapes({name: own.shape for name, own in state["own"].items() if name in parameters}, parameters)
    reals = {name: as_real(parameter) for name, parameter in parameters.items()}
    check_shapes({name: start.shape for name, start in state["start"].items()}, reals)
    for name in (name for fragment in state["fragments"] for name in fragment["names"]):
        if name not in parameters:
            raise ConfigurationError(
                f"The checkpoint has {name!r}, and this optimizer has no such parameter. Resume with the model it "
                f"was written with, or {WITHOUT_RESIDUALS}."
            )
    for name, residual in state["residuals"].items():
        if residual.any() and not sends(parameters[name]):
            raise ConfigurationError(
                f"The checkpoint keeps changes of {name!r} ({residual.numel()} elements) that have not been sent, "
                f"and with {method.what} they never would be. Resume with the compression of that run, or "
                f"{WITHOUT_RESIDUALS}."
            )


# Another world --------------------------------------------------------------------------------------------------------


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state every rank of another world starts with; of all methods. Reads one state at a time.

    Args:
        states: `worker.state_dict()` of every rank, in any order.

    Raises:
        ConfigurationError: a rank's state is missing or given twice, is that of no rank, or they are not of one step:
            what the ranks have not sent would be lost, or sent twice.
    """
    seen: list[tuple[int, int, str]] = []
    checked = _noted(states, seen)
    first = next(checked, None)
    if first is not None:
        everything = itertools.chain([first], checked)
        merged = merge_replicas(everything) if "fragments" in first else merge_gradients(everything)
    ranks, worlds = sorted(rank for rank, _, _ in seen), {(num_ranks, when) for _, num_ranks, when in seen}
    if len(worlds) != 1 or ranks != list(range(seen[0][1])):
        given = ", ".join(f"rank {rank} of {num_ranks} after {when}" for rank, num_ranks, when in seen) or "nothing"
        raise ConfigurationError(
            f"merge_states was given {given}. Give it worker.state_dict() of each rank that trained, once, all saved "
            "after the same step."
        )
    return merged


def _noted(states: Iterable[Mapping[str, Any]], seen: list[tuple[int, int, str]]) -> Iterator[Mapping[str, Any]]:
    """Yield states; note in `seen` whose they are, and when they were saved."""
    for state in states:
        if not isinstance(state, Mapping) or "rank" not in state:  # or is of `merge_states` itself
            raise ConfigurationError(
                f"merge_states was given a {type(state).__name__} that is no state. Give it worker.state_dict()."
            )
        # With data of unequal lengths the ranks have taken different numbers of steps.
        when = f"{state['num_averages']} averages" if "num_averages" in state else f"step {state['step']}"
        seen.append((*state["rank"], when))
        yield state


def merge_gradients(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of the ranks' states: with it any number of ranks holds the same unsent gradient.

    The update is 1/N sum v_k: the mean over the old participants, given to each of the new ones, leaves it as it was.
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
    wholes = {key: mean.divide(num_states / num_parts) for key, mean in means.items()}
    return {**merged, "local_rank": None, "nodes": None, "local": of_ranks, "exchange": None, **wholes}


def merge_replicas(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state every rank of another world size starts with: no weights of its own, the mean momentum.

    Residuals are averaged, too, so that 1/N of the sum over the participants stays the same. An average that has been
    begun and not applied is dropped; elements that it has taken from the residuals are put back.
    """
    merged: dict[str, Any] = {}
    residuals, optimizer_state = _Mean(), dict[Any, dict[str, Any]]()
    totals: dict[tuple[Any, str], tuple[Tensor, int]] = {}
    num_states, num_parts = 0, 1
    for state in states:
        num_states, (_, num_parts) = num_states + 1, state["local_rank"]
        merged = merged or {**state, "own": {}, "buffers": {}, "layout": None, "steps_since_average": 0}
        for name, kept in state["residuals"].items():
            residuals.add(name, kept, state["start"][name].numel(), state["local_rank"])
        for work in [fragment["work"] for fragment in state["fragments"] if fragment["work"]]:
            snapshots = dict(zip(work["parameters"], work["snapshots"], strict=True))
            for name, mean in work["changes"].items():
                # The weights have this rank's change, and the consensus its mean: the difference is unsent again. It
                # holds for the mean over participants; elements taken from one residual are put back by others.
                change = change_of(snapshots[name], state["start"][name], as_real(state["own"][name]).dtype)
                residuals.add(name, (mean - change.reshape(-1)) / num_parts, mean.numel(), (0, 1))
        for index, entry in state["optimizer"]["state"].items():
            optimizer_state[index] = {**entry, **optimizer_state.get(index, {})}  # not all ranks need have used it
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    total, number = totals.get((index, name), (torch.zeros(()), 0))
                    wide = value.to(torch.promote_types(value.dtype, torch.float32))
                    totals[index, name] = total + wide, number + 1
    merged |= {
        "local_rank": None,
        "nodes": None,
        "exchange": None,
        "optimizer": {**merged["optimizer"], "state": optimizer_state},
        "residuals": residuals.divide(num_states / num_parts),
        "fragments": [{**fragment, "work": None, "moved": [], "steps": None} for fragment in merged["fragments"]],
    }
    for (index, name), (total, number) in totals.items():
        optimizer_state[index][name] = (total / number).to(optimizer_state[index][name].dtype)
    return merged


class _Mean:
    """The mean over participants of tensors of which each rank has a part, added up state by state."""

    def __init__(self) -> None:
        self._totals: Named = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, name: str, kept: Tensor, numel: int, of: tuple[int, int]) -> None:
        """Add what a rank has kept, flat, of its part of a tensor with so many elements; see `own_part`."""
        self._dtypes[name] = kept.dtype
        wide = torch.promote_types(kept.dtype, torch.float32)
        total = self._totals.setdefault(name, torch.zeros(numel, dtype=wide))
        total[part_of(numel, *of)] += own_part(kept, numel, of).to(wide)

    def divide(self, num_participants: float) -> Named:
        """Return the whole means: flat, in the dtype of the parts."""
        return {name: (total / num_participants).to(self._dtypes[name]) for name, total in self._totals.items()}
