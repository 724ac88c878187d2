"""The values of selected elements on the wire: floats, or a sign and a level between the extremes of a block.

A float format says float32, bfloat16 or float16. A level format ("int8", "int4") cuts the values of a tensor into
blocks of BLOCK and sends of each block the smallest and the largest magnitude, rounded outwards to bfloat16, and of
each value a sign and the number of the nearest of 128 or 8 levels between the two, which are equidistant in the bits of
a float32. Those bits, read as an integer, are a logarithm in straight pieces (its exponent, then its fraction): what
top-k leaves lies between a threshold and an open end, mostly near the threshold. A level is found with integers alone,
so every machine decodes the same bits; a power function is not that exact.

It is the form with the smallest relative error, the more so the heavier the tail; the usual one, levels equidistant in
the value from zero to the largest, is far behind. Errors: `benchmarks/results/wire.md`.

"int2" has one bit for the level. Extremes would put most values far from both; its two levels are the means of the
smaller and of the larger values of the block, parted where the squared error is least (Lloyd, "Least squares
quantization in PCM", 1982). Both are on the wire in place of the extremes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_lowbw.kernels.table import upload
from lightning_lowbw.kernels.tensors import allocate

ValueName = Literal["float32", "bfloat16", "float16", "int8", "int4", "int2"]
VALUE_NAMES: tuple[str, ...] = get_args(ValueName)

BLOCK_SHIFT = 7
BLOCK = 1 << BLOCK_SHIFT  # values; the extremes of a block are 32 bits, a quarter of a bit per value
EXTREME_BYTES = 4  # of a block: two bfloat16
LARGEST = 0x7F7F  # the bits of the largest finite bfloat16
PIECE = 1 << 16  # values coded at a time; what is computed for them stays in the cache
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
        """Return the values that `encode` has written: float32, shape (sum(counts),); of several messages in rows."""
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
        values = data.view(self.dtype)
        if self.dtype == torch.float32:
            return values
        return allocate(values.shape, torch.float32, data.device).copy_(values)


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
        # What a GPU takes from its memory at once it need not take in pieces.
        pieces = [list(counts)] if values.is_cuda else list(_pieces(counts))
        of_piece = values.split([sum(piece) for piece in pieces])
        coded = [self._encode_blocks(*each) for each in zip(of_piece, pieces, strict=True)]
        extremes, codes = (torch.cat(column) for column in zip(*coded, strict=True))
        return torch.cat([extremes.view(torch.uint8).view(-1), self._pack(codes)])

    def _encode_blocks(self, values: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the extremes of every block, int16, shape (blocks, 2), and a code per value, uint8."""
        blocks = _blocks(values, counts)
        magnitudes = blocks.abs().view(torch.int32).clamp_(max=(LARGEST << HALF) | 0xFFFF)
        is_zero = magnitudes == 0
        lowest, highest = _extremes(magnitudes) if self.bits > 2 else _two_means(magnitudes, counts)
        has_zero = is_zero.any(1)
        # From here on floats will do: only the sender chooses a level.
        top = self.num_levels - 1
        if self.bits == 2:
            ends = torch.stack([lowest, highest]) << HALF
            middle = ends.view(torch.float32).mul(0.5).sum(0)
            codes = (magnitudes.view(torch.float32) > middle.unsqueeze(1)).to(torch.uint8)
        else:
            per_bit = top / ((highest - lowest).clamp(min=1) << HALF).to(torch.float32)
            scaled = magnitudes.sub_((lowest << HALF).unsqueeze(1)) * per_bit.unsqueeze(1)
            codes = scaled.round_().clamp_(min=0, max=top).to(torch.uint8)
        codes = codes.maximum(has_zero.to(torch.uint8).unsqueeze(1)).masked_fill_(is_zero, 0)
        codes += (blocks < 0).to(torch.uint8) << (self.bits - 1)
        extremes = torch.stack([torch.where(has_zero, -lowest, lowest), highest], 1).to(torch.int16)
        codes = codes.view(-1)
        return extremes, codes[: counts[0]] if len(counts) == 1 else codes.take(_slots(counts, values.device))

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
        return torch.stack(codes, -1).flatten(-2)[..., :count]

    def decode(self, data: Tensor, counts: Sequence[int]) -> Tensor:
        split = sum(_num_blocks(counts)) * EXTREME_BYTES
        extremes = data[..., :split].view(torch.int16).to(torch.int32).unflatten(-1, (-1, 2))
        lowest, highest = extremes.unbind(-1)
        codes = self._unpack(data[..., split:], sum(counts))
        has_zero, lowest = lowest < 0, lowest.abs()
        step = ((highest - lowest) << HALF) // (self.num_levels - 1)
        level, row = codes & (self.num_levels - 1), _rows(counts, data.device)
        bits = step.index_select(-1, row).mul_(level).add_((lowest << HALF).index_select(-1, row))
        magnitudes = bits.mul_((level != 0) | ~has_zero.index_select(-1, row)).view(torch.float32)
        return magnitudes.mul_(1.0 - (codes >> (self.bits - 1)) * 2.0)


@cache
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


def _two_means(blocks: Tensor, of_tensor: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the bits of the means, in bfloat16, of the smaller and of the larger magnitudes of each block.

    Where a block has zeros they have the lower level for themselves, and the upper one is the mean of all others.

    Args:
        blocks: as of `_extremes`.
        of_tensor: values of each tensor; a short block repeats its last one, which counts once.
    """
    members, magnitudes = _members(of_tensor, blocks.device), blocks.view(torch.float32).double()
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


def _pieces(counts: Sequence[int]) -> Iterator[list[int]]:
    """Cut tensors between blocks into pieces of at most PIECE values, what is small together, in order."""
    together: list[int] = []
    for count in counts:
        if together and sum(together) + count > PIECE:
            yield together
            together = []
        for _ in range(0, count - PIECE, PIECE):
            yield [PIECE]
        together.append(count - max(0, -(-count // PIECE) - 1) * PIECE)
    yield together


def _blocks(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the values of each block: shape (blocks, BLOCK); a short one repeats its last."""
    if len(counts) != 1:
        return values.take(_members(counts, values.device))
    missing = -counts[0] % BLOCK
    return torch.cat([values, values[-1:].expand(missing)]).view(-1, BLOCK) if missing else values.view(-1, BLOCK)


def _rows(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the block of each value: int64, shape (sum(counts),). A block ends with its tensor."""
    return _slots(counts, device) >> BLOCK_SHIFT


def _slots(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the place of each value among those of all blocks: int64, shape (sum(counts),)."""
    shifts, first, row = [], 0, 0
    for count, blocks in zip(counts, _num_blocks(counts), strict=True):
        shifts.append(row * BLOCK - first)
        first, row = first + count, row + blocks
    owner = torch.repeat_interleave(upload(counts, torch.int64, device), output_size=first)
    shift = upload(shifts, torch.int64, device).index_select(0, owner)
    return shift.add_(torch.arange(first, device=device))


def _members(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the values of each block: int64, shape (blocks, BLOCK); a short one repeats its last."""
    shifts, ends, first, row = [], [], 0, 0
    for count, blocks in zip(counts, _num_blocks(counts), strict=True):
        shifts.append(first - row * BLOCK)
        ends.append(first + count - 1)
        first, row = first + count, row + blocks
    owner = torch.repeat_interleave(upload(_num_blocks(counts), torch.int64, device), output_size=row)
    table = upload([shifts, ends], torch.int64, device)
    slots = torch.arange(row * BLOCK, device=device).view(row, BLOCK)
    return (slots + table[0].index_select(0, owner).unsqueeze(1)).minimum(table[1].index_select(0, owner).unsqueeze(1))
