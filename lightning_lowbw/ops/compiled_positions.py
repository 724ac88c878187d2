"""Twins of `pack` and `unpack` of `what.positions`, compiled by numba: the same bits. See `compiler` for numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from lightning_lowbw.ops.compiled_places import BYTE, NUM_PLACES, write_places
from lightning_lowbw.ops.compiler import compile_kernel, register

WORD = 32  # bits


def pack_(positions: Tensor, fields: Tensor, words: Tensor) -> None:
    """Write the positions of all tensors.

    In place:
        `words`, zeros before.

    Args:
        positions: int64, of all tensors, concatenated; contiguous.
        fields: where they lie, of `what.positions.fields_of`.
        words: int32.
    """
    _kernels()[0](positions.numpy(), fields.numpy(), words.numpy().view(np.uint32))


def unpack(words: Tensor, fields: Tensor, num_unary: int, positions: Tensor) -> tuple[int, int]:
    """Read positions; return how many there are, and how many of them lie outside their tensors.

    In place:
        `positions`, not to be used where there is another number of them, or one lies outside.

    Args:
        words: int32, contiguous; all that `pack_` has written.
        fields: as `pack_` had them.
        num_unary: bits of the unary part.
        positions: int64, contiguous; as many as are expected, and room for BYTE more.
    """
    kernel = _kernels()[1]
    found, outside = kernel(words.numpy().view(np.uint32), fields.numpy(), num_unary, positions.numpy())
    return found, outside


@cache
def _kernels() -> tuple[Callable[..., None], Callable[..., Any]]:
    register(write_places, _field, _pack_low, _unpack_low)
    return (
        compile_kernel(_pack, "void(int64[::1], int64[:, ::1], uint32[::1])"),
        compile_kernel(_unpack, "UniTuple(int64, 2)(uint32[::1], int64[:, ::1], int64, int64[::1])"),
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
        if count and width:
            _pack_low(positions[first : first + count], width, low, words)


def _pack_low(positions, width, low, words):  # type: ignore[no-untyped-def]
    """Write the low bits of positions from a bit on: a word when it is full, no word twice."""
    mask = (np.int64(1) << width) - 1
    place, num_held = low >> 5, low & 31
    held = np.uint64(words[place])
    for i in range(positions.size):
        held |= np.uint64(positions[i] & mask) << np.uint64(num_held)
        num_held += width
        if num_held >= WORD:
            words[place] = np.uint32(held & np.uint64(0xFFFFFFFF))
            held >>= np.uint64(WORD)
            num_held -= WORD
            place += 1
    if num_held:
        words[place] = np.uint32(held)


def _unpack_low(words, low, width, highs, before, numel):  # type: ignore[no-untyped-def]
    """Put the low bits from a bit on behind the high ones, each counted from one further on; return how many positions
    lie outside."""
    outside, mask = 0, (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    place, held, num_held = low >> 5, np.uint64(0), 0
    if width:
        held, num_held = np.uint64(words[place]) >> np.uint64(low & 31), WORD - (low & 31)
    for i in range(highs.size):
        if num_held < width:
            place += 1
            held |= np.uint64(words[place]) << np.uint64(num_held)
            num_held += WORD
        position = ((highs[i] - before - i) << width) | np.int64(held & mask)
        held >>= np.uint64(width)
        num_held -= width
        highs[i] = position
        outside += np.uint64(position) >= np.uint64(numel)  # a negative one is a very large one
    return outside


def _unpack(words, fields, num_unary, positions):  # type: ignore[no-untyped-def]
    expected, count, outside = positions.size - BYTE, 0, 0
    octets, num_whole = words.view(np.uint8), num_unary // BYTE
    for i in range(num_whole):
        if count <= expected:
            count = write_places(octets[i], np.int64(BYTE * i), positions, count)
        else:  # there is no room: they are counted
            count += NUM_PLACES[octets[i]]
    for bit in range(BYTE * num_whole, num_unary):
        if count <= expected:
            positions[count] = bit
        count += (octets[num_whole] >> (bit - BYTE * num_whole)) & 1
    if count != expected:
        return np.int64(count), np.int64(outside)
    for tensor in range(fields.shape[0]):
        number, first, width, unary, low = _field(fields, tensor)
        if number:
            mine = positions[first : first + number]
            outside += _unpack_low(words, low, width, mine, unary, fields[tensor, 6])
    return np.int64(count), np.int64(outside)
