"""How selected elements are laid out on the wire.

One message holds all sparse tensors of a step: the positions of all of them, then their values (`compress.values`). How
many elements each tensor has is known to all ranks (`num_selected`), so it is not sent.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_lowbw.compress.values import FloatFormat, make_value_format
from lightning_lowbw.kernels import gpu
from lightning_lowbw.kernels.dispatch import compiled_for
from lightning_lowbw.kernels.table import Field, upload
from lightning_lowbw.kernels.tensors import allocate

MAX_NUMEL = 2**31 - 1  # the largest tensor
MAX_WIDTH = 30  # low bits of an element: from any bit of a word on they lie in two
WORD_BITS, WORD_MASK = 32, (1 << 32) - 1
ALIGNMENT_BYTES = 4  # messages of all ranks are concatenated and are read as int32


class Layout(NamedTuple):
    """How the positions of a step are coded.

    Attributes:
        width: l, the low bits of an element.
        unary_bits: before the low bits.
        num_words: int32 of the message.
    """

    width: int
    unary_bits: int
    num_words: int


@lru_cache(maxsize=64)  # of the groups of tensors that are sent together, in the stages of a warm-up
def layout_of(counts: tuple[int, ...], numels: tuple[int, ...]) -> Layout:
    """Return the layout of `counts[i]` positions in a tensor of `numels[i]` elements.

    Raises:
        ValueError: a tensor has more than MAX_NUMEL elements, or fewer than are to be sent of it.
    """
    for count, numel in zip(counts, numels, strict=True):
        if not 0 <= count <= numel <= MAX_NUMEL:
            raise ValueError(f"{count} positions in a tensor of {numel} elements; it may have up to {MAX_NUMEL}.")
    k, n = sum(counts), sum(numels)
    if k == 0:
        return Layout(0, 0, 0)
    width = min(MAX_WIDTH, (n // k).bit_length() - 1)
    unary_bits = k + (n >> width)
    return Layout(width, unary_bits, -(-(unary_bits + k * width) // WORD_BITS))


@lru_cache(maxsize=64)
def fields_of(counts: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table of the tensors: int64, shape (tensors, columns of `Field`)."""
    firsts, starts = accumulate(counts, initial=0), accumulate(numels, initial=0)
    fields = [Field(*each) for each in zip(counts, firsts, starts, numels)]  # noqa: B905 - both have an end more
    return upload(fields, torch.int64, device).view(len(fields), len(Field._fields))


def pack(positions: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code the positions of all tensors.

    Args:
        positions: int64, shape (sum(counts),): of the first tensor, then of the second, ...; ascending in each.
        counts: how many positions each tensor has.
        numels: the elements of each tensor; positions are below.

    Returns:
        int32, shape (`Layout.num_words`,).
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


def unpack(words: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Return what `pack` was given, of several messages.

    Args:
        words: int32, shape (messages, `Layout.num_words`).
        counts: as `pack` had them.
        numels: as `pack` had them.

    Returns:
        int64, shape (messages, sum(counts)).

    Raises:
        ValueError: there are more or fewer words, or they hold another number of positions, or one outside its tensor.
    """
    layout, expected = layout_of(tuple(counts), tuple(numels)), sum(counts)
    if words.shape[1] != layout.num_words:
        raise ValueError(f"A message with {words.shape[1]} words of positions; {layout.num_words} were expected.")
    fields = fields_of(tuple(counts), tuple(numels), words.device)
    compiled = compiled_for(*words)
    positions = allocate(len(words) * expected + 1, torch.int64, words.device)
    for number, message in enumerate(words):  # in order, because a compiled pass writes one more than its own
        mine = positions[number * expected : (number + 1) * expected + 1]
        if compiled is not None:
            found, outside = compiled.unpack(message, fields, layout.width, layout.unary_bits, mine)
        else:
            found, outside = _unpack_one(message, fields, layout, mine[:-1])
        if found != expected:
            raise ValueError(f"A message with {found} positions; {expected} were expected.")
        if outside:  # checked here, because compiled passes write without a check
            raise ValueError(f"A damaged message: {outside} of its positions lie outside their tensors.")
    return positions[:-1].view(len(words), expected)


def _unpack_one(words: Tensor, fields: Tensor, layout: Layout, positions: Tensor) -> tuple[int, int]:
    """Read positions; return how many there are, and how many of them lie outside their tensors."""
    width, unary_bits, _ = layout
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=words.device)
    octets = words.view(torch.uint8)[: -(-unary_bits // 8)]
    ones = (octets.unsqueeze(1) & bits).view(-1)[:unary_bits].nonzero().squeeze(1)
    if (count := ones.numel()) != positions.numel():
        return count, 0
    element = torch.arange(count, device=words.device)
    low = element * width + unary_bits
    wide = torch.cat([words, words.new_zeros(2)]).to(torch.int64).bitwise_and_(WORD_MASK)
    both = wide[low // WORD_BITS] | (wide[low // WORD_BITS + 1] << WORD_BITS)
    torch.sub(ones, element, out=positions).bitwise_left_shift_(width)
    positions |= (both >> low % WORD_BITS) & ((1 << width) - 1)
    positions -= _per_element(fields, "start", count)
    return count, int(((positions < 0) | (positions >= _per_element(fields, "numel", count))).sum())


def _per_element(fields: Tensor, column: str, count: int) -> Tensor:
    """Return a number of each element's tensor: int64, shape (count,)."""
    return fields[:, Field._fields.index(column)].repeat_interleave(fields[:, 0], output_size=count)


@dataclass(frozen=True)
class SparseCodec:
    """[positions in Elias-Fano code | values in one of `VALUE_NAMES`], padded to four bytes.

    The size follows from the number of elements alone, so it is the same on all ranks. At one in a thousand an element
    takes 12.0 bits and those of its value: 32, 16, 8.25 or 4.25.

    Args:
        value_dtype: one of `VALUE_NAMES`.
    """

    value_dtype: str = "bfloat16"

    def nbytes(self, counts: Sequence[int], numels: Sequence[int]) -> int:
        """Return the size of a message with `counts[i]` of the `numels[i]` elements of tensor i, in bytes.

        Raises:
            ValueError: a tensor has more than MAX_NUMEL elements, or fewer than are to be sent of it.
        """
        return sum(self._sections(counts, numels))

    def encode(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        numels: Sequence[int],
        residuals: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Pack (positions int64, ascending; values float32) of each tensor into one message: uint8, shape (nbytes,).

        In place:
            `residuals`, to which the rounding errors of the value format are added: of each tensor, float32 or float64,
            flat; None: they are lost. The sent values are `decode_values`.
        """
        counts = [values.numel() for _, values in parts]
        positions, values = (joined(column) for column in zip(*parts, strict=True))
        words_bytes, data_bytes, padding_bytes = self._sections(counts, numels)
        value_format = make_value_format(self.value_dtype)
        is_wide = residuals is not None and any(residual.dtype != torch.float32 for residual in residuals)
        if gpu.is_available(values.device) and not is_wide:
            message = torch.zeros(words_bytes + data_bytes + padding_bytes, dtype=torch.uint8, device=values.device)
            data = message[words_bytes : words_bytes + data_bytes]
            is_float = isinstance(value_format, FloatFormat)
            if isinstance(value_format, FloatFormat):
                sent = data.view(value_format.dtype)
            else:
                data.copy_(value_format.encode(values, counts))
                sent = value_format.decode(data, counts)
            fields = fields_of(tuple(counts), tuple(numels), values.device)
            words = message.view(torch.int32)
            code = layout_of(tuple(counts), tuple(numels))[:2]
            gpu.pack(positions, values, fields, code, max(counts), words, sent, residuals, is_written=not is_float)
            return message
        words = pack(positions, counts, numels)
        data = value_format.encode(values, counts)
        assert data.numel() == data_bytes
        if residuals is not None and self.value_dtype != "float32":
            errors = (values - value_format.decode(data, counts)).split(counts)
            for residual, (at, _), error in zip(residuals, parts, errors, strict=True):
                residual.index_add_(0, at, error.to(residual.dtype))
        return torch.cat([words.view(torch.uint8), data, data.new_zeros(padding_bytes)])

    def decode(
        self, messages: Tensor, counts: Sequence[int], numels: Sequence[int], damaged: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Unpack messages: positions int64 and values float32, both of shape (messages, sum(counts)).

        Args:
            messages: uint8, shape (messages, nbytes), whose rows are contiguous and begin at multiples of four bytes.
            damaged: bool, a scalar on the device: set on a GPU where a CPU would raise an error, to be checked later;
                the positions are clamped into their tensors then. None: the host waits, and raises.

        Raises:
            ValueError: they are not `nbytes(counts, numels)` long, or one holds another number of positions, or one
                outside its tensor.
        """
        words_bytes, data_bytes, padding_bytes = self._sections(counts, numels)
        if messages.shape[1] != words_bytes + data_bytes + padding_bytes:
            raise ValueError(
                f"A message of {messages.shape[1]} bytes; {words_bytes + data_bytes + padding_bytes} were expected."
            )
        value_format, device = make_value_format(self.value_dtype), messages.device
        words, data = messages[:, :words_bytes], messages[:, words_bytes : words_bytes + data_bytes]
        if gpu.is_available(device):
            dtype = value_format.dtype if isinstance(value_format, FloatFormat) else None
            found = torch.zeros((), dtype=torch.bool, device=device) if damaged is None else damaged
            positions, values = gpu.unpack(
                messages.view(torch.int32),
                fields_of(tuple(counts), tuple(numels), device),
                layout_of(tuple(counts), tuple(numels))[:2],
                sum(counts),
                dtype,
                0 if dtype is None else words_bytes // dtype.itemsize,
                found,
            )
            if damaged is None and found:
                raise ValueError("A damaged message: its positions are too many, too few, or outside their tensors.")
            return positions, values if dtype is not None else value_format.decode(data, counts)
        positions = unpack(words.view(torch.int32), counts, numels)
        return positions, value_format.decode(data, counts)

    def decode_values(self, message: Tensor, counts: Sequence[int], numels: Sequence[int]) -> list[Tensor]:
        """Unpack only the values of each tensor: to a sender, what it has sent.

        Raises:
            ValueError: the message is not `nbytes(counts, numels)` long.
        """
        sections = self._sections(counts, numels)
        if message.numel() != sum(sections):
            raise ValueError(f"A message of {message.numel()} bytes; {sum(sections)} were expected.")
        data = message[sections[0] : sections[0] + sections[1]]
        return list(make_value_format(self.value_dtype).decode(data, counts).split(list(counts)))

    def _sections(self, counts: Sequence[int], numels: Sequence[int]) -> tuple[int, int, int]:
        """Return the bytes of positions, values and padding."""
        data_bytes = make_value_format(self.value_dtype).nbytes(counts)
        return (
            layout_of(tuple(counts), tuple(numels)).num_words * ALIGNMENT_BYTES,
            data_bytes,
            -data_bytes % ALIGNMENT_BYTES,
        )


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return flat tensors, concatenated; no copy where they are contiguous in memory, as the parts of a split do."""
    numel, first = sum(tensor.numel() for tensor in tensors), tensors[0]
    if _is_one_piece(tensors):
        return first.as_strided((numel,), (1,))
    return torch.cat(list(tensors), out=allocate(numel, first.dtype, first.device))


def _is_one_piece(tensors: Sequence[Tensor]) -> bool:
    storage, end = tensors[0].untyped_storage()._cdata, tensors[0].storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end or not tensor.is_contiguous():
            return False
        end += tensor.numel()
    return True
