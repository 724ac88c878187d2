"""The fast twins on a CPU against their specification: the same results to the bit."""

from __future__ import annotations

import pytest
import torch

from lightning_lowbw.ops import cpu, reference
from lightning_lowbw.ops.cpu import CHUNK, ROW

SIZES = [0, 1, ROW - 1, ROW, ROW + 1, 1000, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + ROW, 2 * CHUNK + 3 * ROW + 5]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("threshold", [1e-45, 0.5, 3.0, 3.3, 1e30, float("inf")])
def test_reach(numel: int, threshold: float) -> None:
    values = torch.randn(numel)
    positions = cpu.reach(values, threshold)
    assert positions.dtype == torch.int64
    assert positions.equal(reference.reach(values, threshold))


def test_reach_at_the_borders() -> None:
    """The first and last element of chunks and rows, a value equal to the threshold, and what cannot be compared."""
    numel = 2 * CHUNK + ROW + 3
    borders = [0, ROW - 1, ROW, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, numel - ROW, numel - 1]
    values = torch.zeros(numel)
    values[borders] = torch.tensor([2.0, -2.0, 3.0] * 3)
    values[[5, CHUNK + 5]] = float("nan")
    values[[6, 7]] = torch.tensor([float("inf"), float("-inf")])
    before = values.clone()
    expected = sorted({*borders, 6, 7})
    assert cpu.reach(values, 2.0).tolist() == expected
    assert reference.reach(values, 2.0).tolist() == expected
    assert values.view(torch.int32).equal(before.view(torch.int32))


def test_a_short_last_chunk_sees_nothing_of_the_one_before() -> None:
    values = torch.ones(CHUNK + 3)
    values[CHUNK:] = 0
    assert cpu.reach(values, 1.0).equal(torch.arange(CHUNK))
