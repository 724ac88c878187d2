"""Weights that were trained on a GPU beside those of a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FEW = 1e-4  # of the elements; on a CPU, gradients that differ by 1e-3 of their size let twice as many differ


def check_near(mine: Sequence[Tensor], expected: Sequence[Tensor], *, rtol: float, atol: float, selects: bool) -> None:
    """Check that all weights agree; with a method that sends the largest elements, all but a few.

    The gradients of two devices differ by some 3e-6 of their size. Where two magnitudes at the border of the selection
    differ by less, each device sends the other element, and these two weights differ by a whole step, however small
    the noise is. So such elements are counted: a tolerance that covers them would cover every fault.
    """
    assert all(bool(each.isfinite().all()) for each in mine)
    pairs = list(zip(mine, expected, strict=True))
    num_apart = sum(int((~torch.isclose(a, b, rtol=rtol, atol=atol)).sum()) for a, b in pairs)
    num_allowed = 4 + round(FEW * sum(a.numel() for a in mine)) if selects else 0
    assert num_apart <= num_allowed, f"{num_apart} elements differ, {num_allowed} may"
