"""Vectors in few bits per value, for a mean with error feedback: half types, or integers with a scale per block.

A linear format ("int8", "int4") cuts a vector into blocks of BLOCK values and sends of each block one scale, its
largest magnitude in units of the largest integer, rounded upwards to bfloat16, and of each value the nearest integer in
units of that scale. For dense values, mostly near zero, that is closer than the logarithmic levels of `what.values`,
which are made for what top-k leaves.

Source: a scale per small block as in Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep
Learning", arXiv 2111.08617. Deviation: rounds to nearest, not at random, for the error is fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_lowbw.what.values import FloatFormat

NarrowName = Literal["bfloat16", "float16", "int8", "int4"]
NARROW_NAMES: tuple[str, ...] = get_args(NarrowName)

BLOCK = 128  # values; the scale of a block is 16 bits, an eighth of a bit per value
SCALE_BYTES = 2  # a bfloat16
HALF = 16  # bits between bfloat16 and float32


class NarrowFormat(Protocol):
    """How the values of vectors are written in few bits; several vectors of one length at once, each by itself.

    Zero stays zero. What is too large for the format is written as its largest value.
    """

    def nbytes(self, numel: int) -> int:
        """Return the size of a vector of `numel` values, in bytes."""
        ...

    def encode(self, vectors: Tensor) -> Tensor:
        """Return vectors, float32 or wider, shape (vectors, numel), as bytes: uint8, shape (vectors, nbytes(numel))."""
        ...

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """Return what `encode` has written: float32, shape (vectors, numel)."""
        ...


@dataclass(frozen=True)
class HalfFormat:
    """Values as floats of a half type: 16 bits each.

    Args:
        dtype: bfloat16 or float16. Float16 ends at 65504.
    """

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return FloatFormat(self.dtype).nbytes([numel])

    def encode(self, vectors: Tensor) -> Tensor:
        return FloatFormat(self.dtype).encode(vectors, [vectors.numel()])

    def decode(self, data: Tensor, numel: int) -> Tensor:
        return FloatFormat(self.dtype).decode(data, [numel * len(data)])


@dataclass(frozen=True)
class LinearFormat:
    """Integers from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1 in units of a scale, [scales of all blocks | integers].

    A value that is not finite in float32 makes its whole block not finite.

    Args:
        bits: 8 or 4.
    """

    bits: int

    @property
    def largest(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * SCALE_BYTES + -(-numel * self.bits // 8)

    def encode(self, vectors: Tensor) -> Tensor:
        numel = vectors.shape[1]
        blocks = _blocks(vectors.to(torch.float32))
        scales = _round_up(blocks.abs().amax(2) / self.largest, torch.finfo(torch.float32).max / self.largest)
        integers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).round_()
        integers = integers.clamp_(-self.largest, self.largest).to(torch.int8).flatten(1)[:, :numel]
        return torch.cat([scales.to(torch.bfloat16).view(torch.uint8), self._pack(integers.view(torch.uint8))], 1)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        split = -(-numel // BLOCK) * SCALE_BYTES
        scales = data[:, :split].reshape(-1).clone().view(torch.bfloat16).to(torch.float32)  # aligned
        blocks = _blocks(self._unpack(data[:, split:], numel).to(torch.float32))
        return (blocks * scales.view(len(data), blocks.shape[1], 1)).flatten(1)[:, :numel]

    def _pack(self, integers: Tensor) -> Tensor:
        """Return int8, as their bytes, as bytes of 8 / bits integers each, the first lowest."""
        if self.bits == 8:
            return integers
        even = torch.nn.functional.pad(integers, (0, integers.shape[1] % 2))
        return (even[:, ::2] & 0xF) | (even[:, 1::2] << 4)

    def _unpack(self, data: Tensor, numel: int) -> Tensor:
        """Return the integers that `_pack` has packed: int8."""
        if self.bits == 8:
            return data.contiguous().view(torch.int8)
        low, high = (data << 4).view(torch.int8) >> 4, data.contiguous().view(torch.int8) >> 4  # keeps the sign
        return torch.stack([low, high], 2).flatten(1)[:, :numel]


@cache
def make_narrow_format(name: str) -> NarrowFormat:
    """Return a format by its public name, one of `NARROW_NAMES`."""
    formats: dict[str, NarrowFormat] = {f"int{bits}": LinearFormat(bits) for bits in (8, 4)}
    for dtype in (torch.bfloat16, torch.float16):
        formats[str(dtype).removeprefix("torch.")] = HalfFormat(dtype)
    return formats[name]


def _blocks(vectors: Tensor) -> Tensor:
    """Return the values of each block, the last filled with zeros: shape (vectors, blocks, BLOCK)."""
    num_vectors, numel = vectors.shape
    return torch.nn.functional.pad(vectors, (0, -numel % BLOCK)).view(num_vectors, -(-numel // BLOCK), BLOCK)


def _round_up(magnitudes: Tensor, limit: float) -> Tensor:
    """Return float32 magnitudes, rounded upwards to a bfloat16 below a limit; those that are not finite stay so."""
    largest = int(torch.tensor(limit, dtype=torch.float32).view(torch.int32)) >> HALF
    bits = ((magnitudes.view(torch.int32) + 0xFFFF) >> HALF).clamp_(max=largest) << HALF
    return torch.where(magnitudes.isfinite(), bits.view(torch.float32), magnitudes)
