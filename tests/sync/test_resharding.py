"""The states of shards, cut anew for shards of another size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.sync.state import Chunk, reshard

SHAPES = {"weight": (5, 3), "bias": (7,), "row": (1, 4)}
WHOLE = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}


def rows(whole: Tensor, chunk: Chunk) -> Tensor:
    own = chunk.rows(len(whole))
    return whole[own.start : own.stop]


def state_of(chunk: Chunk) -> dict[str, Any]:
    """Return what a shard has of each tensor, in each place of a state; of no rows nothing is kept."""
    own = {name: rows(whole, chunk) for name, whole in WHOLE.items()}
    kept = {name: part for name, part in own.items() if part.numel()}
    return {
        "step": 3,
        "residuals": {name: part.reshape(-1) for name, part in kept.items()},
        "start": own,
        "local": {name: {"exp_avg": 2 * part} for name, part in kept.items()},
        "optimizer": {"state": {n: {"step": torch.tensor(3.0), "m": -part} for n, part in enumerate(own.values())}},
        "shapes": {name: tuple(part.shape) for name, part in kept.items()},
        "orders": {name: tuple(range(part.dim())) for name, part in kept.items()},
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("before", [1, 2, 3, 8])
@pytest.mark.parametrize("after", [1, 2, 3, 8])
def test_a_shard_has_its_rows_of_what_all_had(before: int, after: int) -> None:
    for number in range(after):
        own = Chunk(number, after)
        found = reshard((state_of(Chunk(each, before)) for each in range(before)), list(SHAPES), SHAPES, before, own)
        assert equal(found, state_of(own))
