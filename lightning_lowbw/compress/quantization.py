"""Vectors in few bits per value, for a mean with error feedback: half types, or integers with a scale per block.

A linear format ("int8", "int4") cuts a vector into blocks of BLOCK values and sends of each block one scale and of each
value the nearest integer in units of it. For dense values, mostly near zero, that is closer than the logarithmic levels
of `compress.codec`, which are made for the elements that top-k selects.

Source: a scale per small block as in Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep
Learning", arXiv 2111.08617. Deviation: rounds to nearest, not at random, because the error is fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_lowbw.compress.codec import FloatFormat
from lightning_lowbw.kernels.dispatch import compiled_for

QuantizedName = Literal["bfloat16", "float16", "int8", "int4"]
QUANTIZED_NAMES: tuple[str, ...] = get_args(QuantizedName)

BLOCK = 128  # values; the scale of a block is 16 bits, an eighth of a bit per value
SCALE_BYTES = 2  # a bfloat16
HALF = 16  # bits between bfloat16 and float32
TINY = torch.finfo(torch.float32).tiny


class QuantizedFormat(Protocol):
    """How the values of vectors are written in few bits; several vectors of one length at once, each by itself.

    A message is written and read in ranges, so that on a CPU what belongs to a range stays in the cache. A range begins
    at a multiple of BLOCK, and ends at one or with the vector; the message is the same however it is divided.

    Zero stays zero. Values that are too large for the format are written as its largest value.
    """

    def nbytes(self, numel: int) -> int:
        """Return the size of a vector of `numel` values, in bytes."""
        ...

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        """Write a range of vectors into their messages.

        In place:
            The messages; the values, which become their rounding errors.

        Args:
            messages: uint8, shape (vectors, nbytes(numel)).
            numel: values of a whole vector.
            start: of the range.
            values: float32 or wider, shape (vectors, values of the range).
        """
        ...

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """Return a range of what `write_` has written: float32, shape (vectors, stop - start).

        Raises:
            ValueError: the messages are not `nbytes(numel)` long.
        """
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

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        data = FloatFormat(self.dtype).encode(values, [values.numel()])
        messages[:, self.nbytes(start) : self.nbytes(start + values.shape[1])] = data
        values.sub_(FloatFormat(self.dtype).decode(data, [values.numel()]))

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        data = messages[:, self.nbytes(start) : self.nbytes(stop)].flatten()
        return FloatFormat(self.dtype).decode(data, [data.numel()]).view(len(messages), stop - start)


@dataclass(frozen=True)
class LinearFormat:
    """Integers from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1 in units of a scale, [scales of all blocks | integers].

    A value that is not finite in float32 makes its whole block not finite.

    Args:
        bits: 8 or 4.
    """

    bits: int

    def nbytes(self, numel: int) -> int:
        return self._scales_end(numel) + self._integers_end(numel)

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        scales, integers = (messages[:, each] for each in self._sections(numel, start, start + values.shape[1]))
        scales.copy_(encode_(values, self.bits, integers).view(torch.uint8))

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        scales, integers = (messages[:, section].contiguous() for section in self._sections(numel, start, stop))
        aligned = scales.flatten().clone().view(torch.bfloat16).view(len(messages), -(-(stop - start) // BLOCK))
        return decode(aligned, integers, stop - start, self.bits)

    def _sections(self, numel: int, start: int, stop: int) -> tuple[slice, slice]:
        """Return where in a message the scales and the integers of a range are."""
        split = self._scales_end(numel)
        integers = slice(split + self._integers_end(start), split + self._integers_end(stop))
        return slice(self._scales_end(start), self._scales_end(stop)), integers

    def _scales_end(self, numel: int) -> int:
        return -(-numel // BLOCK) * SCALE_BYTES

    def _integers_end(self, numel: int) -> int:
        return -(-numel * self.bits // 8)


def _check_size(messages: Tensor, nbytes: int) -> None:
    if messages.shape[1] != nbytes:
        raise ValueError(f"A message of {messages.shape[1]} bytes; {nbytes} were expected.")


@cache
def make_format(name: str) -> QuantizedFormat:
    """Return a format by its public name, one of `QUANTIZED_NAMES`."""
    formats: dict[str, QuantizedFormat] = {f"int{bits}": LinearFormat(bits) for bits in (8, 4)}
    for dtype in (torch.bfloat16, torch.float16):
        formats[str(dtype).removeprefix("torch.")] = HalfFormat(dtype)
    return formats[name]


def quantized_mean_bytes(numel: int, num_ranks: int, value_format: QuantizedFormat) -> int:
    """Return the bytes a rank sends for a mean of vectors in few bits: 2 (W - 1) parts of ceil(numel / W) values.

    On two levels that of a part of ceil(numel / ranks of a node) elements, between nodes; and in a node, to gather the
    parts of the mean, `all_gather_bytes` of a part in the vector's own dtype.
    """
    return 2 * (num_ranks - 1) * value_format.nbytes(-(-numel // num_ranks))


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
    compiled = compiled_for(values, packed) if values.dtype == torch.float32 else None
    if compiled is not None:
        scales = torch.empty((len(values), -(-numel // BLOCK)), dtype=torch.bfloat16)
        compiled.encode_blocks_(values, scales, packed, largest, largest_scale_bits(bits), bits)
        return scales
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
    compiled = compiled_for(scales, packed)
    if compiled is not None:
        values: Tensor = compiled.decode_blocks(scales, packed, numel, bits)
        return values
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
