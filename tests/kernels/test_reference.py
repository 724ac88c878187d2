"""The arithmetic on one tensor at the ends of its numbers; its equations are those of tests/sync, step by step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import reference


def test_take_of_infinities() -> None:
    """The sent values are finite; the residual tells that the sum has overflowed."""
    largest, infinity = torch.finfo(torch.float32).max, float("inf")
    residual = torch.tensor([infinity, -infinity, largest, -largest])
    values = reference.take_(residual, None, torch.arange(4))
    assert values.tolist() == [largest, -largest, largest, -largest]
    assert residual.tolist() == [infinity, -infinity, 0.0, 0.0]


def test_the_decay_is_not_lost_in_a_narrow_gradient() -> None:
    v, ones = torch.zeros(3), torch.ones(3, dtype=torch.bfloat16)
    reference.accumulate_(reference.Segment(residual=v, gradient=ones, weight=ones, k=1, weight_decay=1e-4), 0.0)
    torch.testing.assert_close(v, torch.full((3,), 1.0001))


def part(*values: float) -> tuple[Tensor, Tensor]:
    return torch.arange(len(values)), torch.tensor(values)


def test_no_overflow_on_the_way_to_the_mean() -> None:
    out = torch.empty(2)
    reference.scatter_mean_(out, [part(0.0, 3e38), part(0.0, 3e38)])
    assert out.tolist() == [0.0, torch.tensor(3e38).item()]


def test_a_zero_comes_from_no_sender() -> None:
    out = torch.empty(2)
    reference.scatter_mean_(out, [part(0.0, 3.0), part(4.0, 5.0)], over_senders=True)
    assert out.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_finite_tensors_are_told_from_others(dtype: torch.dtype) -> None:
    assert reference.is_finite(torch.zeros(0, 3, dtype=dtype)).item()
    largest = torch.finfo(dtype).max
    assert reference.is_finite(torch.full((4, 3), largest, dtype=dtype)).item(), "a norm would overflow"
    for bad in (math.nan, math.inf, -math.inf):
        tensor = torch.full((4, 3), -largest, dtype=dtype)
        tensor[2, 1] = complex(0, bad) if dtype.is_complex else bad
        assert not reference.is_finite(tensor).item()
