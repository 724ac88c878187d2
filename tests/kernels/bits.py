"""Comparing tensors to the bit, on the device and in the dtypes of the tests of kernels."""

from __future__ import annotations

import os

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_TRITON = DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def equal_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bits; unlike `torch.equal` this tells -0 from 0 and NaN from NaN."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return actual.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))
