"""Twins of `blocks` compiled by numba: the same bits, no temporaries. See `compiler` for numba itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.ops.blocks import BLOCK, HALF, TINY, largest_integer, largest_scale_bits
from lightning_lowbw.ops.compiler import INFINITE, MAGNITUDE, compile_kernel

__all__ = ["decode", "encode_"]


def encode_(values: Tensor, bits: int, packed: Tensor) -> Tensor:
    """Write vectors in few bits, and replace them by their rounding errors; see `blocks.encode_`.

    For contiguous float32 and contiguous bytes.
    """
    scales = torch.empty((len(values), -(-values.shape[1] // BLOCK)), dtype=torch.int16)
    constants = (largest_integer(bits), largest_scale_bits(bits), TINY, bits)
    _kernels()[0](values.numpy(), scales.numpy(), packed.numpy(), *constants)
    return scales.view(torch.bfloat16)


def decode(scales: Tensor, packed: Tensor, numel: int, bits: int) -> Tensor:
    """Return what `encode_` has written, integers times scales; see `blocks.decode`. For contiguous tensors."""
    values = torch.empty((len(packed), numel), dtype=torch.float32)
    _kernels()[1](scales.view(torch.int16).numpy(), packed.numpy(), values.numpy(), bits)
    return values


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile `_encode` and `_decode`."""
    return (
        compile_kernel(_encode, "void(float32[:, ::1], int16[:, ::1], uint8[:, ::1], float32, int32, float32, int64)"),
        compile_kernel(_decode, "void(int16[:, ::1], uint8[:, ::1], float32[:, ::1], int64)"),
    )


# What numba compiles. A loop is made of vector instructions only where it does one thing.


def _encode(values, scales, packed, largest, limit, tiny, bits):  # type: ignore[no-untyped-def]
    num_vectors, numel = values.shape
    scale = np.empty(scales.shape[1], dtype=np.float32)
    scale_bits = scale.view(np.int32)
    integers = np.empty(BLOCK, dtype=np.int8)
    pairs = integers.view(np.uint16)  # the first of two is in the lower byte
    for row in range(num_vectors):
        magnitudes = values[row].view(np.int32)
        for block in range(scale.size):
            top = np.int32(0)
            for i in range(block * BLOCK, min(block * BLOCK + BLOCK, numel)):
                magnitude = np.int32(magnitudes[i] & MAGNITUDE)  # which numba has widened
                top = magnitude if magnitude > top else top
            scale_bits[block] = top
        for block in range(scale.size):
            scale[block] /= largest
        for block in range(scale.size):
            if scale_bits[block] < INFINITE:
                scale_bits[block] = min((scale_bits[block] + 0xFFFF) >> HALF, limit) << HALF
            scales[row, block] = scale_bits[block] >> HALF
        for block in range(scale.size):
            start = block * BLOCK
            size = min(BLOCK, numel - start)
            v, own = values[row, start : start + size], scale[block]
            if scale_bits[block] < INFINITE:
                unit = max(own, tiny)
                for i in range(size):
                    integers[i] = np.int8(min(max(np.rint(v[i] / unit), -largest), largest))
            else:
                integers[:] = 0
            for i in range(size):
                v[i] -= np.float32(integers[i]) * own
            if bits == 8:
                for i in range(size):
                    packed[row, start + i] = np.uint8(integers[i])
            else:
                for i in range(size, size + size % 2):
                    integers[i] = 0
                for i in range((size + 1) // 2):
                    packed[row, start // 2 + i] = np.uint8((pairs[i] & 0xF) | ((pairs[i] >> 4) & 0xF0))


def _decode(scales, packed, values, bits):  # type: ignore[no-untyped-def]
    num_vectors, numel = values.shape
    scale = np.empty(scales.shape[1], dtype=np.float32)
    scale_bits = scale.view(np.int32)
    integers = np.empty(BLOCK, dtype=np.int8)
    for row in range(num_vectors):
        for block in range(scale.size):
            scale_bits[block] = np.int32(scales[row, block]) << HALF
        for block in range(scale.size):
            start = block * BLOCK
            size = min(BLOCK, numel - start)
            own = scale[block]
            if bits == 8:
                for i in range(size):
                    integers[i] = np.int8(packed[row, start + i])
            else:
                for i in range((size + 1) // 2):
                    both = packed[row, start // 2 + i]
                    integers[2 * i] = np.int8(np.int8(both << 4) >> 4)
                    integers[2 * i + 1] = np.int8(np.int8(both) >> 4)
            for i in range(size):
                values[row, start + i] = np.float32(integers[i]) * own
