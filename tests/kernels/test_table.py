"""The room that the kernels take on a device, for the tensors of a real model."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from lightning_lowbw.kernels.reference import Segment
from lightning_lowbw.kernels.table import FREE_ROOM, MOST_ROOM, Workspace
from lightning_lowbw.payloads.top_k import num_selected
from tests.shapes import resnet50_shapes

BYTES_OF_DIGITS = 8192  # of a tensor


def workspace_for(numels: list[int], sparsity: float) -> Workspace:
    workspace = Workspace()
    segments = []
    for numel in numels:
        # Never written: they take no memory.
        residual, momentum_buffer, gradient = (torch.empty(numel) for _ in range(3))
        k = num_selected(numel, 1 - sparsity)
        segments.append(Segment(residual=residual, momentum_buffer=momentum_buffer, gradient=gradient, k=k))
    workspace.update(segments)
    return workspace


@pytest.mark.parametrize("sparsity", [0.9375, 0.984375, 0.999])
def test_the_room_is_a_byte_per_parameter_at_most(sparsity: float) -> None:
    """At every stair of the warm-up; without a bound it was 8 bytes at a sparsity of 0.9375, 4 at 0.75."""
    numels = [prod(shape) for shape in resnet50_shapes()]
    workspace = workspace_for(numels, sparsity)
    room = sum(row.capacity for row in workspace.rows)
    assert room <= sum(max(FREE_ROOM, numel * MOST_ROOM) for numel in numels)
    nbytes = sum(each.nbytes for each in vars(workspace).values() if isinstance(each, torch.Tensor))
    assert nbytes <= 1.03 * sum(numels) + BYTES_OF_DIGITS * len(numels)
    large = [row for row in workspace.rows if row.numel >= 16384]
    assert {row.capacity == 0 for row in large} == {sparsity < 0.98}


def test_the_table_follows_whatever_changes() -> None:
    """It is that of a new workspace, though only what has changed is written."""
    kept = Workspace()
    half = {"gradient": torch.ones(64, dtype=torch.bfloat16), "weight": torch.ones(64, dtype=torch.bfloat16)}
    changes: list[dict[str, Any]] = [{}, {"gradient": torch.ones(64)}, {"gradient": torch.ones(65)[1:]}, half]
    changes += [{"momentum_buffer": torch.ones(64)}, {"momentum": 0.5}, {"ahead": 0.25}, {"weight_decay": 0.0}]
    changes += [{"nesterov": True}, {"k": 5}, {"fault": torch.tensor(False)}, {"residual": torch.ones(64)}]
    given = {name: torch.ones(64) for name in ("residual", "momentum_buffer", "gradient", "weight")}

    def compare(*segments: Segment) -> None:
        kept.update(segments)
        fresh = Workspace()
        fresh.update(segments)
        assert (kept.rows, kept.kinds, kept.launches) == (fresh.rows, fresh.kinds, fresh.launches)
        assert kept.table.equal(fresh.table)
        assert kept.factors.equal(fresh.factors)

    for change in changes:
        segment = Segment(**{**given, "k": 3, "momentum": 0.9, "weight_decay": 0.1, **change})
        other = Segment(residual=given["residual"], gradient=given["gradient"], k=1)
        for segments in ([segment], [segment, other], [other, segment]):
            compare(*segments)
    for changed in ({}, {"gradient": torch.ones(65)[1:]}, {"gradient": torch.ones(64)}, {"momentum": 0.25}):
        vars(segment).update(changed)
        compare(other, segment)
