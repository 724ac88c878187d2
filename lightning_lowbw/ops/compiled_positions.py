"""Twins of `pack` and `unpack` of `what.positions`, compiled by numba: the same bits. See `compiler` for numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.ops.compiler import compile_kernel, register

WORD = 32  # bits


def pack_(positions: Tensor, fields: Tensor, words: Tensor) -> None:
    """Write the positions of all tensors.

    In place:
        `words`, zeros before.

    Args:
        positions: int64, of all tensors, concatenated; contiguous.
        fields: where they lie, of `what.positions.fields_of`.
        words: int32, with one past the end.
    """
    _kernels()[0](positions.numpy(), fields.numpy(), words.numpy().view(np.uint32))


def unpack(words: Tensor, fields: Tensor, num_unary: int, count: int) -> tuple[Tensor, int, int]:
    """Return so many positions, int64, how many there are and how many lie outside their tensors.

    Not to be used where there is another number of them, or one lies outside.

    Args:
        words: int32, contiguous; all that `pack_` has written.
        fields: as `pack_` had them.
        num_unary: bits of the unary part.
        count: positions that are expected.
    """
    positions = torch.empty(count + WORD, dtype=torch.int64)
    found, outside = _kernels()[1](words.numpy().view(np.uint32), fields.numpy(), num_unary, count, positions.numpy())
    return positions[:count], found, outside


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., Any]]:
    register(_field)
    return (
        compile_kernel(_pack, "void(int64[::1], int64[:, ::1], uint32[::1])"),
        compile_kernel(_unpack, "UniTuple(int64, 2)(uint32[::1], int64[:, ::1], int64, int64, int64[::1])"),
    )


# What numba compiles.


def _field(fields, tensor):  # type: ignore[no-untyped-def]
    """Return how many positions a tensor has, the first, the width of the low bits, the first unary and low bit."""
    return fields[tensor, 0], fields[tensor, 1], fields[tensor, 2], fields[tensor, 3], fields[tensor, 5]


def _pack(positions, fields, words):  # type: ignore[no-untyped-def]
    for tensor in range(fields.shape[0]):
        count, first, width, unary, low = _field(fields, tensor)
        for i in range(count):
            bit = unary + i + (positions[first + i] >> width)
            words[bit >> 5] |= np.uint32(1) << np.uint32(bit & 31)
        mask = (np.int64(1) << width) - 1
        for i in range(count if width else 0):
            bit = low + i * width
            both = np.uint64(positions[first + i] & mask) << np.uint64(bit & 31)
            words[bit >> 5] |= np.uint32(both & np.uint64(0xFFFFFFFF))
            words[(bit >> 5) + 1] |= np.uint32(both >> np.uint64(WORD))


def _unpack(words, fields, num_unary, expected, positions):  # type: ignore[no-untyped-def]
    count = outside = 0
    for start in range(0, num_unary, WORD):
        word = words[start >> 5]
        if word == 0:
            continue
        for bit in range(min(WORD, num_unary - start)):
            if count <= expected:  # else there is no room: they are counted
                positions[count] = start + bit
            count += (word >> np.uint32(bit)) & np.uint32(1)
    if count != expected:
        return np.int64(count), np.int64(outside)
    for tensor in range(fields.shape[0]):
        number, first, width, unary, low = _field(fields, tensor)
        mask = (np.int64(1) << width) - 1
        for i in range(number):
            bit = low + i * width
            place = bit >> 5
            both = np.uint64(words[place]) if place < words.size else np.uint64(0)
            if place + 1 < words.size:
                both |= np.uint64(words[place + 1]) << np.uint64(WORD)
            own = np.int64(both >> np.uint64(bit & 31)) & mask
            position = ((positions[first + i] - unary - i) << width) | own
            positions[first + i] = position
            outside += position < 0 or position >= fields[tensor, 6]
    return np.int64(count), np.int64(outside)
