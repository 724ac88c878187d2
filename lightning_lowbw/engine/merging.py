"""Merges the states of all ranks into the one that each rank of another world starts with.

Reads one state at a time: of a large model not many fit into memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.engine.averaging import change_of
from lightning_lowbw.engine.state import Named, own_part
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.where.topology import part_of

EQUAL = ("step", "small_numel", "correction", "shapes", "orders", "num_participants")
NO_DELAY: dict[str, Any] = {"chosen": None, "average_s": {}}  # a world of another size measures again


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state every rank of another world starts with; of all methods.

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
    Reads one state at a time.
    """
    merged: dict[str, Any] = {}
    means = {key: _Mean() for key in ("residuals", "velocities", "rounded")}
    local: dict[str, Named] = {}
    num_states, num_parts = 0, 1
    for state in states:
        num_states, (_, num_parts) = num_states + 1, state["local_rank"]
        merged = merged or {key: state[key] for key in EQUAL}
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
    residuals, rounded = _Mean(), _Mean()
    totals: dict[tuple[Any, str], Tensor] = {}
    counts: dict[tuple[Any, str], int] = {}
    num_states, num_parts = 0, 1
    for state in states:
        num_states, (_, num_parts) = num_states + 1, state["local_rank"]
        merged = merged or {**state, "own": {}, "buffers": {}, "steps_since_average": 0, "delay": NO_DELAY}
        for key, mean in (("residuals", residuals), ("rounded", rounded)):
            for name, kept in state[key].items():
                mean.add(name, kept, state["start"][name].numel(), state["local_rank"])
        for fragment in state["fragments"]:
            work = fragment["work"] or {"parameters": [], "snapshots": [], "changes": {}}
            for name, snapshot in zip(work["parameters"], work["snapshots"], strict=False):
                if name in work["changes"]:  # in the mean over the ranks of a node, which may have stepped alone
                    moved = change_of(snapshot, state["start"][name], as_real(state["own"][name]).dtype)
                    back = work["changes"][name] - moved.reshape(-1)
                    residuals.add(name, back / num_parts, back.numel(), (0, 1))
        for index, entry in state["optimizer"]["state"].items():
            for name, value in entry.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    wide = value.to(torch.promote_types(value.dtype, torch.float32))
                    totals[index, name] = totals[index, name] + wide if (index, name) in totals else wide
                    counts[index, name] = counts.get((index, name), 0) + 1
    num_participants = num_states / num_parts
    merged |= {
        "local_rank": None,
        "nodes": None,
        "exchange": None,
        "residuals": residuals.divide(num_participants),
        "rounded": rounded.divide(num_participants),
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
