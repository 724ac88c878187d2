"""Converts the states of shards to those of shards of another size.

`fully_shard` divides the rows of a tensor (its first dimension) into equal chunks, the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLAT = ("residuals", "velocities", "rounded")  # sections of a state, by name; of a shard without rows nothing is kept
SHAPED = ("start", "velocity")
SECTIONS = (*FLAT, *SHAPED, "local")


@dataclass(frozen=True)
class Chunk:
    """Which rows of each tensor a rank holds: chunk `number` of `size`."""

    number: int
    size: int

    def rows(self, num_rows: int) -> range:
        """Return the rows of a tensor with `num_rows`."""
        chunk = -(-num_rows // self.size)
        return range(min(self.number * chunk, num_rows), min((self.number + 1) * chunk, num_rows))


def reshard(
    states: Iterable[Mapping[str, Any]],
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    num_shards: int,
    own: Chunk,
) -> dict[str, Any]:
    """Return the state with which a rank starts if the shards of the checkpoint have another size.

    Args:
        states: what `merge_states` returns for each shard of a node, in their order; one is in memory at a time.
        names: of the optimizer's parameters, in the order of its groups.
        shapes: of the whole tensors, by name.
        num_shards: how many states there are.
        own: what this rank holds.
    """
    state: dict[str, Any] = {}
    parts: dict[tuple[Any, ...], Tensor] = {}  # the rows that this rank is to hold, by section and key
    for number, old in enumerate(states):
        state = state or dict(old)
        for key, name, values in _tensors(old, names, shapes, Chunk(number, num_shards)):
            there, here = (each.rows(shapes[name][0]) for each in (Chunk(number, num_shards), own))
            rest = shapes[name][1:]
            part = parts.setdefault(key, torch.zeros(len(here), *rest, dtype=values.dtype))
            first, last = max(here.start, there.start), min(here.stop, there.stop)
            if first < last:
                rows = values.reshape(len(there), *rest)[first - there.start : last - there.start]
                part[first - here.start : last - here.start] = rows
    state |= {section: {} for section in SECTIONS if section in state}
    for (section, name, *rest_of_key), part in parts.items():
        if section == "optimizer":
            state[section]["state"].setdefault(name, {})[rest_of_key[0]] = part
        elif section in SHAPED:
            state[section][name] = part
        elif part.numel() and section == "local":
            state[section].setdefault(name, {})[rest_of_key[0]] = part
        elif part.numel():
            state[section][name] = part.reshape(-1)
    if "shapes" in state:
        kept = {key[1]: part.shape for key, part in parts.items() if key[0] in ("residuals", "rounded")}
        state["shapes"] = {name: tuple(shape) for name, shape in kept.items() if math.prod(shape)}
        state["orders"] = {name: tuple(range(len(shape))) for name, shape in state["shapes"].items()}
    return state


def _tensors(
    state: Mapping[str, Any], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], chunk: Chunk
) -> Iterator[tuple[tuple[Any, ...], str, Tensor]]:
    """Yield what a state has of shards: the keys under which it is, the parameter's name, and the values."""
    for section in (*FLAT, *SHAPED):
        for name, values in state.get(section, {}).items():
            yield (section, name), name, values
    for name, entry in state.get("local", {}).items():
        for key, values in entry.items():
            yield ("local", name, key), name, values
    for index, entry in state.get("optimizer", {}).get("state", {}).items():
        shape = shapes[names[index]]
        numel = len(chunk.rows(shape[0])) * math.prod(shape[1:])
        for key, values in entry.items():
            if isinstance(values, Tensor) and values.dim() and values.numel() == numel:  # a count is none of a shard
                yield ("optimizer", index, key), names[index], values
