"""Comparing tensors to the bit."""

from __future__ import annotations

from torch import Tensor, uint8


def equal_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bits; unlike `torch.equal` this tells -0 from 0 and NaN from NaN."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return actual.contiguous().view(-1).view(uint8).equal(expected.contiguous().view(-1).view(uint8))
