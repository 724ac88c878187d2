"""The values of selected elements on the wire: floats, or a sign and a level between the extremes of a block.

A float format says float32, bfloat16 or float16. A level format ("int8", "int4") cuts the values of a tensor into
blocks of BLOCK and sends of each block the smallest and the largest magnitude, rounded outwards to bfloat16, and of
each value a sign and the number of the nearest of 128 or 8 levels between the two, which are equidistant in the bits of
a float32. Those bits, read as an integer, are a logarithm in straight pieces (its exponent, then its fraction): what
top-k leaves lies between a threshold and an open end, mostly near the threshold. A level is found with integers alone,
so every machine decodes the same bits; a power function is not that exact.

What was chosen by the relative error of the 8192 largest of 8 million (root mean square, BLOCK = 128, 8 levels):
normal 1.3 %, Laplace 2.3 %, Student's t with 3 degrees of freedom 7.6 %. Levels equidistant in the value: 1.5, 2.7,
14.0 %; from zero to the largest, the usual form: 5.4, 6.4, 23.4 %. With 128 levels: 0.07, 0.13, 0.44 %; bfloat16 has
0.14 to 0.16 %. One block per tensor: 1.7, 3.3, 13.8 %.

"int2" has one bit for the level. Extremes would put most values far from both; its two levels are the means of the
smaller and of the larger values of the block, parted where the squared error is least (Lloyd, "Least squares
quantization in PCM", 1982). Both are on the wire in place of the extremes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

ValueName = Literal["float32", "bfloat16", "float16", "int8", "int4", "int2"]
VALUE_NAMES: tuple[str, ...] = get_args(ValueName)
FLOAT_NAMES = VALUE_NAMES[:3]  # those that can be summed on the way

BLOCK_SHIFT = 7
BLOCK = 1 << BLOCK_SHIFT  # values; the extremes of a block are 32 bits, a quarter of a bit per value
EXTREME_BYTES = 4  # of a block: two bfloat16
LARGEST = 0x7F7F  # the bits of the largest finite bfloat16
HALF = 16  # bits between bfloat16 and float32
LLOYD_ITERATIONS = 8  # more change the error in the third digit only, also of heavy tails


class ValueFormat(Protocol):
    """What is written for values, all tensors of a step at once.

    Zero stays zero and no value changes its sign; what is decoded is finite.
    """

    def nbytes(self, counts: Sequence[int]) -> int:
        """Return the size of `counts[i]` values of tensor i, in bytes."""
        ...

    def encode(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Return float32 values, shape (sum(counts),), as bytes: uint8, shape (nbytes(counts),)."""
        ...

    def decode(self, data: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the values that `encode` has written: float32, shape (sum(counts),)."""
        ...


@dataclass(frozen=True)
class FloatFormat:
    """Values as floats of one dtype. Float16 ends at 65504 and has nothing below 6e-8: what is smaller goes as zero."""

    dtype: torch.dtype

    def nbytes(self, counts: Sequence[int]) -> int:
        return sum(counts) * self.dtype.itemsize

    def encode(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        limit = torch.finfo(self.dtype).max
        return values.clamp(-limit, limit).to(self.dtype).view(torch.uint8)  # a late burst would become inf

    def decode(self, data: Tensor, counts: Sequence[int]) -> Tensor:
        return data.view(self.dtype).to(torch.float32)


@dataclass(frozen=True)
class LevelFormat:
    """A sign and one of 2^(bits - 1) levels per value, [lowest and highest level of every block | codes].

    In a block with zeros (a dead tensor: fewer than k to send) the lowest level is zero, which the sign of its lower
    extreme says. Nothing else becomes zero.

    Args:
        bits: 8, 4 or 2; with 2 the levels are means of values, not extremes.
    """

    bits: int

    @property
    def num_levels(self) -> int:
        return 1 << (self.bits - 1)

    def nbytes(self, counts: Sequence[int]) -> int:
        return sum(_num_blocks(counts)) * EXTREME_BYTES + -(-sum(counts) * self.bits // 8)

    def encode(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        magnitudes = values.abs().view(torch.int32).clamp_(max=(LARGEST << HALF) | 0xFFFF)
        members = _members(counts, values.device)
        blocks = magnitudes.take(members)
        has_zero = (blocks == 0).any(1)
        lowest, highest = _extremes(blocks) if self.bits > 2 else _two_means(blocks, members)
        # From here on floats will do: only the sender chooses a level.
        row, top = _rows(counts, values.device), self.num_levels - 1
        if self.bits == 2:
            ends = torch.stack([lowest, highest]) << HALF
            middle = ends.view(torch.float32).mul(0.5).sum(0).index_select(0, row)
            codes = (magnitudes.view(torch.float32) > middle).to(torch.uint8)
        else:
            per_bit = top / ((highest - lowest).clamp(min=1) << HALF).to(torch.float32)
            codes = (magnitudes - (lowest << HALF).index_select(0, row)) * per_bit.index_select(0, row)
            codes = codes.round_().clamp_(min=0, max=top).to(torch.uint8)
        codes = codes.maximum(has_zero.to(torch.uint8).index_select(0, row)).mul_(magnitudes != 0)
        codes += (values < 0).to(torch.uint8) << (self.bits - 1)
        extremes = torch.stack([torch.where(has_zero, -lowest, lowest), highest], 1).to(torch.int16)
        return torch.cat([extremes.view(torch.uint8).view(-1), self._pack(codes)])

    def _pack(self, codes: Tensor) -> Tensor:
        """Return codes, one per byte, as bytes of 8 / bits codes, the first lowest."""
        per_byte = 8 // self.bits
        codes = torch.cat([codes, codes.new_zeros(-codes.numel() % per_byte)]).view(-1, per_byte)
        packed = codes[:, 0].clone()
        for place in range(1, per_byte):
            packed |= codes[:, place] << (place * self.bits)
        return packed

    def _unpack(self, data: Tensor, count: int) -> Tensor:
        codes = [(data >> shift) & ((1 << self.bits) - 1) for shift in range(0, 8, self.bits)]
        return torch.stack(codes, 1).view(-1)[:count]

    def decode(self, data: Tensor, counts: Sequence[int]) -> Tensor:
        split = sum(_num_blocks(counts)) * EXTREME_BYTES
        lowest, highest = data[:split].view(torch.int16).view(-1, 2).to(torch.int32).unbind(1)
        codes = self._unpack(data[split:], sum(counts))
        has_zero, lowest = lowest < 0, lowest.abs()
        step = ((highest - lowest) << HALF) // (self.num_levels - 1)
        level, row = codes & (self.num_levels - 1), _rows(counts, data.device)
        bits = step.index_select(0, row).mul_(level).add_((lowest << HALF).index_select(0, row))
        magnitudes = bits.mul_((level != 0) | ~has_zero.index_select(0, row)).view(torch.float32)
        return magnitudes.mul_(1.0 - (codes >> (self.bits - 1)) * 2.0)


def make_value_format(name: str) -> ValueFormat:
    """Return a value format by its public name, one of `VALUE_NAMES`."""
    formats: dict[str, ValueFormat] = {f"int{bits}": LevelFormat(bits) for bits in (8, 4, 2)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        formats[str(dtype).removeprefix("torch.")] = FloatFormat(dtype)
    return formats[name]


def _extremes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the smallest and largest magnitude of each block, zeros apart, rounded outwards to bfloat16.

    Args:
        blocks: magnitudes as the bits of float32, int32, shape (blocks, BLOCK).
    """
    highest = ((blocks.amax(1) + 0xFFFF) >> HALF).clamp_(max=LARGEST)
    lowest = (blocks.masked_fill(blocks == 0, LARGEST << HALF).amin(1) >> HALF).clamp_(min=1)
    return lowest, highest


def _two_means(blocks: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the means, in bfloat16, of the smaller and of the larger magnitudes of each block.

    Where a block has zeros they have the lower level for themselves, and the upper one is the mean of all others.

    Args:
        blocks: as of `_extremes`.
        members: of `_members`; a short block repeats its last value, which counts once.
    """
    magnitudes = blocks.view(torch.float32).double()
    counts = torch.ones_like(magnitudes)
    counts[:, 1:] = (members[:, 1:] != members[:, :-1]).double()
    counts *= blocks != 0
    has_zero = (blocks == 0).any(1, keepdim=True)
    upper = lower = middle = (magnitudes * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    for _ in range(LLOYD_ITERATIONS):
        above = counts * (magnitudes > middle)
        below = counts - above
        upper = (magnitudes * above).sum(1, keepdim=True) / above.sum(1, keepdim=True).clamp(min=1)
        lower = (magnitudes * below).sum(1, keepdim=True) / below.sum(1, keepdim=True).clamp(min=1)
        middle = torch.where(above.any(1, keepdim=True), (lower + upper) / 2, middle)
    whole = (magnitudes * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    upper = torch.where(has_zero | (upper == 0), whole, upper)
    levels = torch.cat([lower, upper], 1).clamp_(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    lowest, highest = levels.view(torch.int16).to(torch.int32).clamp_(min=1, max=LARGEST).unbind(1)
    return lowest.minimum(highest), highest


def _num_blocks(counts: Sequence[int]) -> list[int]:
    return [-(-count // BLOCK) for count in counts]


def _rows(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the block of each value: int64, shape (sum(counts),). A block ends with its tensor."""
    shifts, first, row = [], 0, 0
    for count, blocks in zip(counts, _num_blocks(counts), strict=True):
        shifts.append(row * BLOCK - first)
        first, row = first + count, row + blocks
    owner = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64).to(device), output_size=first)
    shift = torch.tensor(shifts, dtype=torch.int64).to(device).index_select(0, owner)
    return shift.add_(torch.arange(first, device=device)) >> BLOCK_SHIFT


def _members(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the values of each block: int64, shape (blocks, BLOCK); a short one repeats its last."""
    shifts, ends, first, row = [], [], 0, 0
    for count, blocks in zip(counts, _num_blocks(counts), strict=True):
        shifts.append(first - row * BLOCK)
        ends.append(first + count - 1)
        first, row = first + count, row + blocks
    owner = torch.repeat_interleave(torch.tensor(_num_blocks(counts), dtype=torch.int64).to(device), output_size=row)
    table = torch.tensor([shifts, ends], dtype=torch.int64).to(device)
    slots = torch.arange(row * BLOCK, device=device).view(row, BLOCK)
    return (slots + table[0].index_select(0, owner).unsqueeze(1)).minimum(table[1].index_select(0, owner).unsqueeze(1))
