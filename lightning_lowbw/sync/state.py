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

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import part_of
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels.reference import as_real, is_finite
from lightning_lowbw.kernels.tensors import Order, order_of, reordered
from lightning_lowbw.sync.average import change_of

Named = dict[str, Tensor]

OF_GRADIENTS = ("step", "small_numel", "correction", "payload", "shapes", "orders", "num_participants")
NO_DELAY: dict[str, Any] = {"chosen": None, "average_s": {}}  # a world of another size measures again


def saved(tensors: Mapping[str, Tensor]) -> Named:
    """Return copies on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def on_cpu(value: Any) -> Any:
    """Return a copy of a nested state on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # a subclass (an 8-bit state) may not know `clone`
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if getattr(value, "shape", None) == ():  # of numpy, as a user's formula returns; a shard with one does not load
        return value.item()
    return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value


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
    """Check that a state is that of this rank, with the parts that it keeps, or of `merge_states`; and finite.

    Raises:
        ConfigurationError: it is not.
    """
    for key in ("residuals", "velocities"):
        for name, kept in state.get(key, {}).items():
            if not is_finite(kept):
                raise ConfigurationError(
                    f"The state's {key} of {name!r}, which this rank has kept back for later steps, contain inf or "
                    "NaN in the checkpoint itself. Resume from an earlier checkpoint, or begin a new run with the "
                    "weights alone."
                )
    here = origin(peers)
    is_merged, rank, own = state["local_rank"] is None, state.get("rank"), here["rank"]
    keeps = any(state.get(key) for key in ("residuals", "velocities", "local", "own"))
    keeps = keeps or bool(state.get("optimizer", {}).get("state"))
    if keeps and not is_merged and rank is not None and tuple(rank) != own:
        raise ConfigurationError(
            f"The state is that of rank {rank[0]} of {rank[1]}, and this is rank {own[0]} of {own[1]}: what a rank has "
            "kept back is its own. Let each rank save worker.state_dict() in a file of its own and load that; for "
            "another number of ranks load what lightning_lowbw.merge_states makes of the states of all."
        )
    if not is_merged and state["nodes"] != here["nodes"] and state["residuals"]:
        raise ConfigurationError(
            f"The state is that of a rank {_on(state['nodes'])}, and the ranks are now {_on(here['nodes'])}, where "
            "each keeps other parts of the tensors. Resume with the topology of that run, or load what "
            "lightning_lowbw.merge_states makes of the states of all its ranks."
        )


def _on(nodes: list[list[int]] | None) -> str:
    return "without nodes" if nodes is None else f"on nodes {nodes}"


def in_order_of(kept: Tensor, parameter: Parameter, name: str, old: Order) -> Tensor:
    """Return what a state has kept of a parameter, flat, in the present order of its elements in memory.

    Args:
        old: the order in which it was kept.

    Raises:
        ConfigurationError: there is only a part, of another order.
    """
    real = as_real(parameter)
    new = order_of(real)
    if tuple(old) == new:
        return kept
    if kept.numel() != real.numel():
        raise ConfigurationError(
            f"The checkpoint keeps parts of {name!r} in the order of its dimensions {tuple(old)}, and it now lies "
            f"in memory in the order {new}. Resume with the memory format of that run "
            f"(model.to(memory_format=...)), or {WITHOUT_RESIDUALS}."
        )
    return reordered(kept, tuple(real.shape), tuple(old), new)


# Another world --------------------------------------------------------------------------------------------------------


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state every rank of another world starts with; of all methods. Reads one state at a time.

    Args:
        states: `worker.state_dict()` of every rank, in any order.

    Raises:
        ConfigurationError: a rank's state is missing or given twice, is that of no rank, or they are not of one step:
            what the ranks have not sent would be lost, or sent twice.
    """
    checked = _of_one_world(states)
    first = next(checked)
    everything = itertools.chain([first], checked)
    return merge_replicas(everything) if "fragments" in first else merge_gradients(everything)


def _of_one_world(states: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the states, which must be those of all ranks, each once, after the same step or average."""
    advice = "Give it worker.state_dict() of each rank that trained, once, all saved after the same step."
    seen: dict[int, str] = {}
    num_ranks = 1
    for state in states:
        if not isinstance(state, Mapping) or "rank" not in state:  # or is of `merge_states` itself
            raise ConfigurationError(f"merge_states was given a {type(state).__name__} that is no state. {advice}")
        rank, num_ranks = state["rank"]
        # With data of unequal lengths the ranks have taken different numbers of steps.
        place = f"{state['num_averages']} averages" if "num_averages" in state else f"step {state['step']}"
        place = f"{place} of {num_ranks} ranks"
        if rank in seen:
            raise ConfigurationError(f"merge_states was given the state of rank {rank} twice. {advice}")
        other = next(iter(seen), rank)
        if place != seen.get(other, place):
            raise ConfigurationError(
                f"merge_states was given the state of rank {other} after {seen[other]}, and that of rank {rank} after "
                f"{place}. {advice}"
            )
        seen[rank] = place
        yield state
    if missing := [str(rank) for rank in range(num_ranks) if rank not in seen]:
        raise ConfigurationError(
            f"merge_states was not given the state of rank {', '.join(missing)} of {num_ranks}. {advice}"
        )


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
    residuals = _Mean()
    totals: dict[tuple[Any, str], Tensor] = {}
    counts: dict[tuple[Any, str], int] = {}
    num_states, num_parts = 0, 1
    for state in states:
        num_states, (_, num_parts) = num_states + 1, state["local_rank"]
        merged = merged or {**state, "own": {}, "buffers": {}, "steps_since_average": 0, "delay": NO_DELAY}
        for name, kept in state["residuals"].items():
            residuals.add(name, kept, state["start"][name].numel(), state["local_rank"])
        for fragment in state["fragments"]:
            work = fragment["work"] or {"parameters": [], "snapshots": [], "changes": {}}
            for name, snapshot in zip(work["parameters"], work["snapshots"], strict=False):
                # The weights have this rank's change, and the consensus its mean: the difference is unsent again. It
                # holds for the mean over participants; elements taken from one residual are put back by others.
                if name in work["changes"]:
                    change = change_of(snapshot, state["start"][name], as_real(state["own"][name]).dtype)
                    back = work["changes"][name] - change.reshape(-1)
                    residuals.add(name, back / num_parts, back.numel(), (0, 1))
        for index, entry in state["optimizer"]["state"].items():
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    wide = value.to(torch.promote_types(value.dtype, torch.float32))
                    totals[index, name] = totals[index, name] + wide if (index, name) in totals else wide
                    counts[index, name] = counts.get((index, name), 0) + 1
    merged |= {
        "local_rank": None,
        "nodes": None,
        "exchange": None,
        "residuals": residuals.divide(num_states / num_parts),
        "fragments": [{**fragment, "work": None, "moved": [], "steps": None} for fragment in merged["fragments"]],
    }
    optimizer_state = merged["optimizer"]["state"]
    for (index, name), total in totals.items():
        entry = optimizer_state.setdefault(index, {})
        dtype = entry[name].dtype if isinstance(entry.get(name), Tensor) else total.dtype
        entry[name] = (total / counts[index, name]).to(dtype)
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
