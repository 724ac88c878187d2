"""Converts the state of shards to shards of another size.

`fully_shard` divides the rows of a tensor (its first dimension) into equal chunks, the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.ops.layout import reordered

Path = tuple[Any, ...]

FLAT = ("residuals", "velocities", "rounded")  # by name
SHAPED = ("start", "velocity")


@dataclass(frozen=True)
class Coordinate:
    """A rank's coordinate in its node: the rank holds the chunk of this number of each tensor."""

    number: int
    size: int

    def rows(self, num_rows: int) -> range:
        """Return the rows of a tensor with `num_rows`."""
        chunk = -(-num_rows // self.size)
        return range(min(self.number * chunk, num_rows), min((self.number + 1) * chunk, num_rows))


class _Cut:
    """The part of one tensor that a rank is to hold, put together from parts that others held; flat."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, coordinate: Coordinate) -> None:
        self._num_rows, self._row_numel = shape[0], math.prod(shape[1:])
        self._rows = coordinate.rows(self._num_rows)
        self.shape = (len(self._rows), *shape[1:])
        self.values = torch.zeros(len(self._rows) * self._row_numel, dtype=dtype)

    def take(self, values: Tensor, coordinate: Coordinate) -> None:
        """Copy the rows that this part has in common with another part, given flat."""
        theirs = coordinate.rows(self._num_rows)
        first, last = max(self._rows.start, theirs.start), min(self._rows.stop, theirs.stop)
        if first < last:
            own, other = (
                slice((first - rows.start) * self._row_numel, (last - rows.start) * self._row_numel)
                for rows in (self._rows, theirs)
            )
            self.values[own] = values[other]


def reshard(
    states: Iterable[Mapping[str, Any]],
    worker: Worker,
    shapes: Mapping[str, tuple[int, ...]],
    num_shards: int,
    coordinate: Coordinate,
) -> dict[str, Any]:
    """Return the state with which a rank starts if the shards of the checkpoint have another size.

    Args:
        states: what `merge_states` returns for each shard of a node, in their order; one is read at a time.
        worker: that of this rank, whose state it is to be.
        shapes: of the whole tensors, by name.
        num_shards: how many states there are.
        coordinate: of this rank.
    """
    names = [worker.name_of(p) for group in worker.optimizer.param_groups for p in group["params"]]
    state: dict[str, Any] = {}
    cuts: dict[Path, _Cut] = {}
    for number, old in enumerate(states):
        state = state or {key: value for key, value in old.items() if key not in (*FLAT, *SHAPED, "local")}
        theirs = Coordinate(number, num_shards)
        for path, name, values in _tensors(old, names, shapes, theirs):
            cut = cuts.setdefault(path, _Cut(shapes[name], values.dtype, coordinate))
            cut.take(values, theirs)
    sections: dict[str, dict[str, Any]] = {key: {} for key in (*FLAT, *SHAPED, "local")}
    entries = {index: dict(entry) for index, entry in state.get("optimizer", {}).get("state", {}).items()}
    for (section, name, *key), cut in cuts.items():
        if section == "optimizer":
            entries.setdefault(name, {})[key[0]] = cut.values.view(cut.shape)
        elif section == "local" and cut.values.numel():
            sections[section].setdefault(name, {})[key[0]] = cut.values.view(cut.shape)
        elif section in SHAPED:
            sections[section][name] = cut.values.view(cut.shape)
        elif cut.values.numel():  # of a shard without rows nothing is kept
            sections[section][name] = cut.values
    if "optimizer" in state:
        state["optimizer"] = {**state["optimizer"], "state": entries}
    if "shapes" in state:
        kept = {name: cuts[key, name].shape for key in ("residuals", "rounded") for name in sections[key]}
        state |= {"shapes": kept, "orders": {name: tuple(range(len(shape))) for name, shape in kept.items()}}
    return {**state, **{key: value for key, value in sections.items() if key in old}}


def _tensors(
    state: Mapping[str, Any], names: list[str], shapes: Mapping[str, tuple[int, ...]], coordinate: Coordinate
) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield what a state has of shards: where it is, the parameter's name, and the values, flat, as C orders them."""
    for section in FLAT:
        for name, values in state.get(section, {}).items():
            order = state.get("orders", {}).get(name)
            if order is not None:
                shape = (len(coordinate.rows(shapes[name][0])), *shapes[name][1:])
                values = reordered(values, shape, tuple(order), tuple(range(len(shape))))
            yield (section, name), name, values
    for section in SHAPED:
        for name, values in state.get(section, {}).items():
            yield (section, name), name, values.reshape(-1)
    for name, entry in state.get("local", {}).items():
        for key, values in entry.items():
            yield ("local", name, key), name, values.reshape(-1)
    for index, entry in state.get("optimizer", {}).get("state", {}).items():
        numel = math.prod((len(coordinate.rows(shapes[names[index]][0])), *shapes[names[index]][1:]))
        for key, values in entry.items():
            if isinstance(values, Tensor) and values.dim() and values.numel() == numel:  # a count is none of a shard
                yield ("optimizer", index, key), names[index], values.reshape(-1)
