"""How selected elements are laid out on the wire.

One message holds all sparse tensors of a step: the positions of all tensors, then the values. All ranks know how many
elements each tensor has (`num_selected`), so the counts are not sent.

Positions take about two bits above the entropy, in a size that all ranks know beforehand. The tensors of a step are one
vector: position p of a tensor is p + the elements of the tensors before it. Elias-Fano coding of k ascending positions
below n: the lowest l = floor(log2(n / k)) bits of each as they are, the rest in unary. Ordered, the high parts are a
staircase of k steps and at most n / 2^l risers; a bit vector with a one per step and a zero per riser holds it. That
makes k (l + 1) + floor(n / 2^l) bits whatever the positions are: 12.0 per element at one in a thousand, where log2 of n
over k is 11.4, and never more than n + k.

Source: Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, "On the number of
bits required to implement an associative memory", 1971. A Golomb-Rice code is as short, but its length depends on the
data, so ranks would have to exchange sizes first.

[unary part | low bits of every element], in words of 32, the first bit lowest.

Values are floats, or a sign and a level between the extremes of a block. A level format ("int8", "int4";
`payloads.quantized` has other formats under these names) cuts the values of a tensor into blocks of LEVELS_BLOCK. For
each block it sends the smallest and the largest magnitude, rounded outwards to bfloat16; for each value a sign and the
number of the nearest of 128 or 8 levels between the two, which are equidistant in the bits of a float32. These bits,
read as an integer, are a logarithm in straight pieces (its exponent, then its fraction): the values that top-k selects
lie between a threshold and an open end, mostly near the threshold. A level is found with integers alone, so every
machine decodes the same bits; a power function is not that exact. Among the formats compared, this one has the smallest
relative error: `benchmarks/results/wire.md`.

"int2" has one bit for the level. Most values would be far from both extremes; so its two levels are the means of the
smaller and of the larger values of the block, divided where the squared error is least (Lloyd, "Least squares
quantization in PCM", 1982). The message has both means in place of the extremes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.kernels import dispatch, gpu
from lightning_lowbw.kernels.dispatch import compiled_for
from lightning_lowbw.kernels.gpu import CodedValues
from lightning_lowbw.kernels.table import LEVELS_SHIFT, Field
from lightning_lowbw.kernels.tensors import allocate, upload

MAX_NUMEL = 2**31 - 1  # the largest tensor
MAX_WIDTH = 30  # low bits of an element: wherever in a word they begin, they lie in two words
WORD_BITS, WORD_MASK = 32, (1 << 32) - 1
BYTE = 8  # a compiled pass needs room for so many positions in addition
ALIGNMENT_BYTES = 4  # messages of all ranks are concatenated and are read as int32

LEVELS_BLOCK = 1 << LEVELS_SHIFT  # values; the extremes of a block are 32 bits, a quarter of a bit per value
EXTREME_BYTES = 4  # of a block: two bfloat16
LARGEST = 0x7F7F  # the bits of the largest finite bfloat16
PIECE = 1 << 16  # values coded at a time; intermediate results stay in the cache
HALF = 16  # bits between bfloat16 and float32
ALL = slice(None)  # tensors of a message
LLOYD_ITERATIONS = 8  # more change the error in the third digit only, also of heavy tails


# Positions ------------------------------------------------------------------------------------------------------------


class PositionLayout(NamedTuple):
    """How the positions of a step are coded.

    Attributes:
        width: l, the low bits of an element.
        unary_bits: before the low bits.
        num_words: int32 of the message.
    """

    width: int
    unary_bits: int
    num_words: int


@lru_cache(maxsize=64)  # one entry for each group of tensors that are sent together, in each stage of a warm-up
def layout_of(counts: tuple[int, ...], numels: tuple[int, ...]) -> PositionLayout:
    """Return the layout of `counts[i]` positions in a tensor of `numels[i]` elements.

    Raises:
        ValueError: a tensor has more than MAX_NUMEL elements, or fewer elements than positions.
    """
    for count, numel in zip(counts, numels, strict=True):
        if not 0 <= count <= numel <= MAX_NUMEL:
            raise ValueError(f"{count} positions in a tensor of {numel} elements; it may have up to {MAX_NUMEL}.")
    k, n = sum(counts), sum(numels)
    if k == 0:
        return PositionLayout(0, 0, 0)
    width = min(MAX_WIDTH, (n // k).bit_length() - 1)
    unary_bits = k + (n >> width)
    return PositionLayout(width, unary_bits, -(-(unary_bits + k * width) // WORD_BITS))


@lru_cache(maxsize=64)
def fields_of(counts: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table of the tensors: int64, shape (tensors, columns of `Field`)."""
    firsts, starts, blocks = (accumulate(each, initial=0) for each in (counts, numels, _num_blocks(counts)))
    fields = [Field(*each) for each in zip(counts, firsts, starts, numels, blocks)]  # noqa: B905 - three have an end more
    return upload(fields, torch.int64, device).view(len(fields), len(Field._fields))


def window_of(counts: Sequence[int], numels: Sequence[int], width: int, tensors: slice) -> tuple[int, int]:
    """Return where in the unary part the bits of consecutive tensors begin and end."""
    first, stop, _ = tensors.indices(len(counts))
    begin, end = ((sum(numels[:each]) >> width) + sum(counts[:each]) for each in (first, stop))
    return begin, end


def pack(positions: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code the positions of all tensors.

    Args:
        positions: int64, shape (sum(counts),): of the first tensor, then of the second, ...; ascending in each.
        counts: how many positions each tensor has.
        numels: the elements of each tensor; positions are below.

    Returns:
        int32, shape (`PositionLayout.num_words`,).
    """
    width, unary_bits, num_words = layout_of(tuple(counts), tuple(numels))
    fields = fields_of(tuple(counts), tuple(numels), positions.device)
    if (compiled := compiled_for(positions)) is not None and num_words:
        packed = torch.zeros(num_words, dtype=torch.int32)
        compiled.pack_(positions, fields, width, unary_bits, packed)
        return packed
    element = torch.arange(positions.numel(), device=positions.device)
    whole = positions + _per_element(fields, "start", positions.numel())
    # Elements share words. No bit is set twice, so adding is or-ing. Empty upper halves may lie past the end.
    words = torch.zeros(num_words + 2, dtype=torch.int64, device=positions.device)
    ones = (whole >> width) + element
    words.index_add_(0, ones // WORD_BITS, 1 << ones % WORD_BITS)
    low = element * width + unary_bits
    bits = (whole & ((1 << width) - 1)) << low % WORD_BITS
    words.index_add_(0, low // WORD_BITS, bits & WORD_MASK)
    words.index_add_(0, low // WORD_BITS + 1, bits >> WORD_BITS)
    return words[:-2].to(torch.int32)


def unpack(words: Tensor, counts: Sequence[int], numels: Sequence[int], tensors: slice = ALL) -> Tensor:
    """Return what `pack` was given for some tensors, of several messages.

    Args:
        words: int32, shape (messages, `PositionLayout.num_words`).
        counts: as `pack` had them.
        numels: as `pack` had them.
        tensors: consecutive ones.

    Returns:
        int32, shape (messages, sum(counts[tensors])).

    Raises:
        ValueError: there are more or fewer words, or they hold another number of positions, or one outside its tensor.
    """
    layout, expected = layout_of(tuple(counts), tuple(numels)), sum(counts[tensors])
    if words.shape[1] != layout.num_words:
        raise ValueError(f"A message with {words.shape[1]} words of positions; {layout.num_words} were expected.")
    if not expected:
        return words.new_empty(len(words), 0)
    fields = fields_of(tuple(counts), tuple(numels), words.device)[tensors]
    window = window_of(counts, numels, layout.width, tensors)
    compiled = compiled_for(*words)
    positions = allocate(len(words) * expected + BYTE, torch.int32, words.device)
    for number, message in enumerate(words):  # in order, because a compiled pass writes behind its own
        mine = positions[number * expected : (number + 1) * expected + BYTE]
        if compiled is not None:
            found, outside = compiled.unpack(message, fields, layout[:2], window, mine)
        else:
            found, outside = _unpack_one(message, fields, layout[:2], window, mine[:-BYTE])
        if found != expected:
            raise ValueError(f"A message with {found} positions; {expected} were expected.")
        if outside:  # checked here, because compiled passes write without a check
            raise ValueError(f"A damaged message: {outside} of its positions lie outside their tensors.")
    return positions[:-BYTE].view(len(words), expected)


def _unpack_one(
    words: Tensor, fields: Tensor, code: tuple[int, int], window: tuple[int, int], positions: Tensor
) -> tuple[int, int]:
    """Read positions; return the number of positions, and the number of positions outside their tensors."""
    (width, unary_bits), (first_bit, end_bit) = code, window
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=words.device)
    octets = words.view(torch.uint8)[first_bit // 8 : -(-end_bit // 8)]
    ones = (octets.unsqueeze(1) & bits).view(-1)[first_bit % 8 :][: end_bit - first_bit].nonzero().squeeze(1)
    if (count := ones.numel()) != positions.numel():
        return count, 0
    element = torch.arange(count, device=words.device) + fields[0, 1]
    low = element * width + unary_bits
    wide = torch.cat([words, words.new_zeros(2)]).to(torch.int64).bitwise_and_(WORD_MASK)
    both = wide[low // WORD_BITS] | (wide[low // WORD_BITS + 1] << WORD_BITS)
    whole = (ones + first_bit - element) << width | (both >> low % WORD_BITS) & ((1 << width) - 1)
    whole -= _per_element(fields, "start", count)
    positions.copy_(whole)
    return count, int(((whole < 0) | (whole >= _per_element(fields, "numel", count))).sum())


def _per_element(fields: Tensor, column: str, count: int) -> Tensor:
    """Return a number of each element's tensor: int64, shape (count,)."""
    return fields[:, Field._fields.index(column)].repeat_interleave(fields[:, 0], output_size=count)


# Values ---------------------------------------------------------------------------------------------------------------


# A value format writes all tensors of a step at once. Zero stays zero and no value changes its sign; decoded
# values are finite.


@dataclass(frozen=True)
class FloatFormat:
    """Values as floats of one dtype. Float16 ends at 65504 and has nothing below 6e-8: smaller values become zero."""

    dtype: torch.dtype

    def nbytes(self, counts: Sequence[int]) -> int:
        """Return the size of `counts[i]` values of tensor i, in bytes."""
        return sum(counts) * self.dtype.itemsize

    def encode(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Return float32 values, shape (sum(counts),), as bytes: uint8, shape (nbytes(counts),)."""
        limit = torch.finfo(self.dtype).max
        return values.clamp(-limit, limit).to(self.dtype).view(torch.uint8)  # a late burst would become inf

    def coded(self, begin: int, counts: Sequence[int]) -> CodedValues:
        """Return where the kernels find values that begin at a byte of a message, and how these are coded."""
        return CodedValues(self.dtype, begin // self.dtype.itemsize, 0)

    def decode(self, data: Tensor, counts: Sequence[int], tensors: slice = ALL) -> Tensor:
        """Return the values of some tensors, as float32; several messages give one row each."""
        values = data.view(self.dtype)[..., _elements(counts, tensors)]
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
        pieces = [list(counts)] if values.device.type != "cpu" else list(_pieces(counts))
        of_piece = values.split([sum(piece) for piece in pieces])
        coded = [self._encode_blocks(*each) for each in zip(of_piece, pieces, strict=True)]
        extremes, codes = (torch.cat(column) for column in zip(*coded, strict=True))
        return torch.cat([extremes.view(torch.uint8).view(-1), self._pack(codes)])

    def coded(self, begin: int, counts: Sequence[int]) -> CodedValues:
        return CodedValues(self.bits, begin // ALIGNMENT_BYTES, begin + sum(_num_blocks(counts)) * EXTREME_BYTES)

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

    def _unpack(self, data: Tensor, elements: slice) -> Tensor:
        per_byte = 8 // self.bits
        octets = data[..., elements.start // per_byte : -(-elements.stop // per_byte)]
        codes = [(octets >> shift) & ((1 << self.bits) - 1) for shift in range(0, 8, self.bits)]
        first = elements.start % per_byte
        return torch.stack(codes, -1).flatten(-2)[..., first : first + elements.stop - elements.start]

    def decode(self, data: Tensor, counts: Sequence[int], tensors: slice = ALL) -> Tensor:
        blocks = _num_blocks(counts)
        split = sum(blocks) * EXTREME_BYTES
        extremes = data[..., :split].view(torch.int16).to(torch.int32).unflatten(-1, (-1, 2))
        lowest, highest = extremes[..., _elements(blocks, tensors), :].unbind(-1)
        codes, counts = self._unpack(data[..., split:], _elements(counts, tensors)), counts[tensors]
        has_zero, lowest = lowest < 0, lowest.abs()
        step = ((highest - lowest) << HALF) // (self.num_levels - 1)
        level, row = codes & (self.num_levels - 1), _slots(counts, data.device) >> LEVELS_SHIFT
        bits = step.index_select(-1, row).mul_(level).add_((lowest << HALF).index_select(-1, row))
        magnitudes = bits.mul_((level != 0) | ~has_zero.index_select(-1, row)).view(torch.float32)
        return torch.where(codes >= self.num_levels, -magnitudes, magnitudes)


VALUE_FORMATS: dict[str, FloatFormat | LevelFormat] = {
    **{str(each).removeprefix("torch."): FloatFormat(each) for each in (torch.float32, torch.bfloat16, torch.float16)},
    **{f"int{bits}": LevelFormat(bits) for bits in (8, 4, 2)},
}
VALUE_NAMES = tuple(VALUE_FORMATS)


def _extremes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of the smallest and largest magnitude of each block, zeros apart, rounded outwards to bfloat16.

    Args:
        blocks: magnitudes as the bits of float32, int32, shape (blocks, LEVELS_BLOCK).
    """
    highest = ((blocks.amax(1) + 0xFFFF) >> HALF).clamp_(max=LARGEST)
    lowest = (blocks.masked_fill(blocks == 0, LARGEST << HALF).amin(1) >> HALF).clamp_(min=1)
    return lowest, highest


def _two_means(blocks: Tensor, of_tensor: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the bits of the means, in bfloat16, of the smaller and of the larger magnitudes of each block.

    In a block with zeros the lower level is the zeros', and the upper level is the mean of all other values.

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


def _elements(counts: Sequence[int], tensors: slice) -> slice:
    """Return the slice of the elements of consecutive tensors."""
    first, stop, _ = tensors.indices(len(counts))
    return slice(sum(counts[:first]), sum(counts[:stop]))


def _num_blocks(counts: Sequence[int]) -> list[int]:
    return [-(-count // LEVELS_BLOCK) for count in counts]


def _pieces(counts: Sequence[int]) -> Iterator[list[int]]:
    """Cut tensors between blocks into pieces of at most PIECE values, small tensors together, in order."""
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
    """Return the values of each block: shape (blocks, LEVELS_BLOCK); a short one repeats its last."""
    if len(counts) != 1:
        return values.take(_members(counts, values.device))
    missing = -counts[0] % LEVELS_BLOCK
    return pad(values.unsqueeze(0), (0, missing), mode="replicate").view(-1, LEVELS_BLOCK)


def _slots(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the place of each value in the blocks of all tensors: int64, shape (sum(counts),)."""
    table = upload([counts, _shifts(counts)], torch.int64, device)
    places = torch.arange(sum(counts), device=device)
    return places.add_(table[1].repeat_interleave(table[0], output_size=len(places)))


def _members(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the values of each block: int64, shape (blocks, LEVELS_BLOCK); a short block repeats its last value."""
    blocks, lasts = _num_blocks(counts), [end - 1 for end in accumulate(counts)]
    table = upload([blocks, _shifts(counts), lasts], torch.int64, device)
    shift, last = table[1:].repeat_interleave(table[0], dim=1, output_size=sum(blocks)).unsqueeze(2)
    slots = torch.arange(len(shift) * LEVELS_BLOCK, device=device).view(-1, LEVELS_BLOCK)
    return slots.sub_(shift).minimum(last)


def _shifts(counts: Sequence[int]) -> list[int]:
    """Return, for each tensor, the difference between a value's place in the blocks and its number among all values."""
    rows = accumulate(_num_blocks(counts), initial=0)
    return [row * LEVELS_BLOCK - first for row, first, _ in zip(rows, accumulate(counts, initial=0), counts)]  # noqa: B905


# Messages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseCodec:
    """[positions in Elias-Fano code | values in one of `VALUE_NAMES`], padded to four bytes.

    The size follows from the number of elements alone, so it is the same on all ranks. At one in a thousand an element
    takes 12.0 bits for its position and 32, 16, 8.25 or 4.25 for its value.

    Args:
        value_dtype: one of `VALUE_NAMES`.
    """

    value_dtype: str = "bfloat16"

    def nbytes(self, counts: Sequence[int], numels: Sequence[int]) -> int:
        """Return the size of a message with `counts[i]` of the `numels[i]` elements of tensor i, in bytes.

        Raises:
            ValueError: a tensor has more than MAX_NUMEL elements, or fewer elements than positions.
        """
        return self._sections(counts, numels)[2]

    def encode(
        self, parts: Sequence[tuple[Tensor, Tensor]], numels: Sequence[int], residuals: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Pack (positions int64, ascending; values float32) of each tensor into one message: uint8, shape (nbytes,).

        In place:
            `residuals`, to which the rounding errors of the value format are added: one per tensor, float32, flat;
            None: the rounding errors are lost.
        """
        counts = [values.numel() for _, values in parts]
        positions, values = (joined(column) for column in zip(*parts, strict=True))
        begin, end, nbytes = self._sections(counts, numels)
        value_format, device = VALUE_FORMATS[self.value_dtype], values.device
        if dispatch.uses_triton(device):
            message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if not isinstance(value_format, FloatFormat):
                message[begin:end].copy_(value_format.encode(values, counts))
            fields, layout = fields_of(tuple(counts), tuple(numels), device), layout_of(tuple(counts), tuple(numels))
            coded, words = value_format.coded(begin, counts), message.view(torch.int32)
            gpu.pack(positions, values, fields, layout[:2], max(counts), words, coded, residuals)
            return message
        words, data = pack(positions, counts, numels), value_format.encode(values, counts)
        if residuals is not None and self.value_dtype != "float32":
            errors = (values - value_format.decode(data, counts)).split(counts)
            for residual, (at, _), error in zip(residuals, parts, errors, strict=True):
                residual.index_add_(0, at, error)
        return torch.cat([words.view(torch.uint8), data, data.new_zeros(nbytes - end)])

    def decode(
        self, messages: Tensor, counts: Sequence[int], numels: Sequence[int], tensors: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        """Unpack some tensors of messages: positions int32 and values float32, both of shape (messages, elements).

        Args:
            messages: uint8, shape (messages, nbytes), whose rows are contiguous and begin at multiples of four bytes.
            counts: positions of each tensor.
            numels: elements of each tensor.
            tensors: consecutive ones.

        Raises:
            ValueError: messages are not `nbytes(counts, numels)` long; or, on a CPU, a message holds another number of
                positions, or a position outside its tensor. A GPU clamps such positions into their tensors.
        """
        begin, end, nbytes = self._sections(counts, numels)
        if messages.shape[1] != nbytes:
            raise ValueError(f"A message of {messages.shape[1]} bytes; {nbytes} were expected.")
        value_format, device = VALUE_FORMATS[self.value_dtype], messages.device
        if not dispatch.uses_triton(device):
            positions = unpack(messages[:, :begin].view(torch.int32), counts, numels, tensors)
            return positions, value_format.decode(messages[:, begin:end], counts, tensors)
        layout = layout_of(tuple(counts), tuple(numels))
        fields = fields_of(tuple(counts), tuple(numels), device)[tensors]
        window, coded = window_of(counts, numels, layout.width, tensors), value_format.coded(begin, counts)
        return gpu.unpack(messages.view(torch.int32), fields, layout[:2], window, sum(counts[tensors]), coded)

    def _sections(self, counts: Sequence[int], numels: Sequence[int]) -> tuple[int, int, int]:
        """Return where in a message the values begin and end, and its size, in bytes."""
        begin = layout_of(tuple(counts), tuple(numels)).num_words * ALIGNMENT_BYTES
        end = begin + VALUE_FORMATS[self.value_dtype].nbytes(counts)
        return begin, end, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return flat tensors, concatenated; no copy if they are contiguous in memory, as the parts of a split are."""
    first, starts = tensors[0], [each.data_ptr() for each in tensors]
    *expected, _ = accumulate([each.nbytes for each in tensors], initial=starts[0])
    is_one = first.untyped_storage()._cdata == tensors[-1].untyped_storage()._cdata  # so are all tensors in between
    numel = sum(map(Tensor.numel, tensors))
    if is_one and starts == expected and all(map(Tensor.is_contiguous, tensors)):
        return first.as_strided((numel,), (1,))
    return torch.cat(list(tensors), out=allocate(numel, first.dtype, first.device))
