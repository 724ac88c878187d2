"""Vectors as integers with a scale per block of values, in plain torch: the specification of every faster twin.

Source: a scale per small block as in Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep
Learning", arXiv 2111.08617. Deviation: rounds to nearest, not at random, because the error is fed back.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 128  # values; the scale of a block is 16 bits, an eighth of a bit per value
HALF = 16  # bits between bfloat16 and float32
TINY = torch.finfo(torch.float32).tiny


def largest_integer(bits: int) -> int:
    """Return the largest integer of `bits` bits; the smallest is its negative."""
    return (1 << (bits - 1)) - 1


@cache
def largest_scale_bits(bits: int) -> int:
    """Return the bits of the largest scale, a bfloat16: the largest integer times it is finite in float32."""
    limit = torch.finfo(torch.float32).max / largest_integer(bits)
    return int(torch.tensor(limit, dtype=torch.float32).view(torch.int32)) >> HALF


def encode_(values: Tensor, bits: int, packed: Tensor) -> Tensor:
    """Write vectors in few bits, and replace them by their rounding errors.

    Of each block a scale is returned, its largest magnitude in units of the largest integer, rounded upwards to
    bfloat16; of each value the nearest integer in units of that scale is written. A value that is not finite in float32
    makes its whole block not finite.

    In place:
        The values: value minus integer times scale. And `packed`.

    Args:
        values: float32 or wider, shape (vectors, numel).
        bits: 8 or 4.
        packed: where the integers are written: uint8, shape (vectors, ceil(numel * bits / 8)); of 4 bits two to a byte,
            the first lower.

    Returns:
        The scales: bfloat16, shape (vectors, blocks).
    """
    numel, largest = values.shape[1], largest_integer(bits)
    blocks = _blocks(values.to(torch.float32))
    scales = _round_up(blocks.abs().amax(2) / largest, bits)
    integers = (blocks / scales.clamp(min=TINY).unsqueeze(2)).round_().nan_to_num_(0.0).clamp_(-largest, largest)
    packed.copy_(_pack(integers.to(torch.int8).flatten(1)[:, :numel].view(torch.uint8), bits))
    narrow = scales.to(torch.bfloat16)
    values.sub_(decode(narrow, packed, numel, bits))
    return narrow


def decode(scales: Tensor, packed: Tensor, numel: int, bits: int) -> Tensor:
    """Return what `encode_` has written, integers times scales: float32, shape (vectors, numel).

    Args:
        scales: see `encode_`.
        packed: integers; see `encode_`.
        numel: values of each vector.
        bits: 8 or 4.
    """
    blocks = _blocks(_unpack(packed, numel, bits).to(torch.float32))
    return (blocks * scales.to(torch.float32).unsqueeze(2)).flatten(1)[:, :numel]


def _pack(integers: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return integers
    even = torch.nn.functional.pad(integers, (0, integers.shape[1] % 2))
    return (even[:, ::2] & 0xF) | (even[:, 1::2] << 4)


def _unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Return the integers that `_pack` has packed: int8."""
    if bits == 8:
        return packed.contiguous().view(torch.int8)
    low, high = (packed << 4).view(torch.int8) >> 4, packed.contiguous().view(torch.int8) >> 4  # keeps the sign
    return torch.stack([low, high], 2).flatten(1)[:, :numel]


def _blocks(vectors: Tensor) -> Tensor:
    """Return the values of each block, the last filled with zeros: shape (vectors, blocks, BLOCK)."""
    num_vectors, numel = vectors.shape
    return torch.nn.functional.pad(vectors, (0, -numel % BLOCK)).view(num_vectors, -(-numel // BLOCK), BLOCK)


def _round_up(magnitudes: Tensor, bits: int) -> Tensor:
    """Return float32 magnitudes, rounded upwards to a bfloat16 below a limit; those that are not finite stay so."""
    rounded = ((magnitudes.view(torch.int32) + 0xFFFF) >> HALF).clamp_(max=largest_scale_bits(bits)) << HALF
    return torch.where(magnitudes.isfinite(), rounded.view(torch.float32), magnitudes)
