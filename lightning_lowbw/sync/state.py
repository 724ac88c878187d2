"""The states of workers: tensors on the CPU and primitives; and what another world starts with.

A rank's own state is keyed by the names of parameters. What it keeps back is that of its part of each tensor: ranks of
the same world load theirs as it is, others cut theirs out of the mean over the participants of the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.peers import Peers, part_of
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels.tensors import Order, as_real, order_of
from lightning_lowbw.sync.average import change_of

Named = dict[str, Tensor]

OF_GRADIENTS = ("step", "small_numel", "correction", "payload", "shapes", "orders", "num_participants")


def saved(tensors: Mapping[str, Tensor]) -> Named:
    """Return copies on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


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
