"""Positions of selected elements in about two bits above the entropy, and in a size that all ranks know beforehand.

Elias-Fano coding of k ascending positions below n: the lowest l = floor(log2(n / k)) bits of each as they are, the
rest in unary. Ordered, the high parts are a staircase of k steps and at most n / 2^l risers; a bit vector with a one
per step and a zero per riser holds it. That makes k (l + 1) + floor((n - 1) / 2^l) bits whatever the positions are:
12.0 per element at one in a thousand, where log2 of n over k is 11.4, and never more than n + k.

Source: Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, "On the number of
bits required to implement an associative memory", 1971. A Golomb-Rice code is as short, but its length depends on the
data, so ranks would have to exchange sizes first.

All tensors of a step go into one stream of bits, [unary of every tensor | low bits of every tensor], in words of 32,
the first bit lowest. The arithmetic runs over all elements at once: a handful of passes, however many the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_lowbw.ops.dispatch import compiled_for
from lightning_lowbw.ops.table import Field, upload
from lightning_lowbw.ops.tensors import allocate

MAX_NUMEL = 2**31 - 1  # the largest tensor: a field of 30 low bits, shifted by 31, still fits an int64
CHUNK = 1 << 16  # elements; what is computed for them stays in the cache
WORD_BITS = 32
WORD_SHIFT, WORD_SLOT, WORD_MASK = 5, 31, (1 << 32) - 1


def num_words(counts: Sequence[int], numels: Sequence[int]) -> int:
    """Return how many int32 `pack` makes of `counts[i]` positions in a tensor of `numels[i]` elements.

    Raises:
        ValueError: a tensor has more than MAX_NUMEL elements, or fewer than are to be sent of it.
    """
    unary_bits, low_bits = _sizes(counts, numels)
    return -(-(sum(unary_bits) + sum(low_bits)) // WORD_BITS)


def pack(positions: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Code the positions of all tensors.

    Args:
        positions: int64, shape (sum(counts),): of the first tensor, then of the second, ...; ascending in each.
        counts: how many positions each tensor has.
        numels: the elements of each tensor; positions are below.

    Returns:
        int32, shape (num_words(counts, numels),).
    """
    if (compiled := compiled_for(positions)) is not None:
        packed = torch.zeros(num_words(counts, numels), dtype=torch.int32)
        compiled.pack_(positions, fields_of(tuple(counts), tuple(numels), positions.device), packed)
        return packed
    # Fields of several elements share a word. No bit is set twice, so adding is or-ing. The two words past the end
    # take the empty fields and upper halves that begin there.
    words = torch.zeros(num_words(counts, numels) + 2, dtype=torch.int64, device=positions.device)
    for part, width, unary, low in _fields(counts, numels, positions.device):
        chunk = positions[part]
        ones = (chunk >> width).add_(unary)
        words.index_add_(0, ones >> WORD_SHIFT, 1 << (ones & WORD_SLOT))
        chunk = (chunk & ((1 << width) - 1)) << (low & WORD_SLOT)
        word = low >> WORD_SHIFT
        words.index_add_(0, word, chunk & WORD_MASK)
        words.index_add_(0, word + 1, chunk >> WORD_BITS)
    return words[:-2].to(torch.int32)


def unpack(words: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    """Return what `pack` was given, of several messages.

    Args:
        words: int32, shape (messages, num_words(counts, numels)).
        counts: as `pack` had them.
        numels: as `pack` had them.

    Returns:
        int64, shape (messages, sum(counts)).

    Raises:
        ValueError: there are more or fewer words, or they hold another number of positions, or one outside its tensor.
    """
    if words.shape[1] != (num_expected := num_words(counts, numels)):
        raise ValueError(f"A message with {words.shape[1]} words of positions; {num_expected} were expected.")
    compiled = compiled_for(*words)
    if compiled is None:
        return torch.stack([_unpack_one(each, counts, numels) for each in words])
    num_unary, expected = sum(_sizes(counts, numels)[0]), sum(counts)
    fields = fields_of(tuple(counts), tuple(numels), words.device)
    positions = allocate(len(words) * expected + 1, torch.int64)
    for number, message in enumerate(words):  # in order, because each writes behind its own
        mine = positions[number * expected : (number + 1) * expected + 1]
        found, outside = compiled.unpack(message, fields, num_unary, mine)
        _check_count(found, expected)
        _check_range(outside)
    return positions[:-1].view(len(words), expected)


def _unpack_one(words: Tensor, counts: Sequence[int], numels: Sequence[int]) -> Tensor:
    num_unary, expected = sum(_sizes(counts, numels)[0]), sum(counts)
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=words.device)
    ones = (words.view(torch.uint8)[: -(-num_unary // 8)].unsqueeze(1) & bits).view(-1)[:num_unary].nonzero().squeeze(1)
    _check_count(ones.numel(), expected)
    wide = torch.cat([words, words.new_zeros(2)]).to(torch.int64).bitwise_and_(WORD_MASK)
    for part, width, unary, low in _fields(counts, numels, words.device):
        word = low >> WORD_SHIFT
        chunk = wide.index_select(0, word + 1).bitwise_left_shift_(WORD_BITS).bitwise_or_(wide.index_select(0, word))
        chunk.bitwise_right_shift_(low & WORD_SLOT).bitwise_and_((1 << width) - 1)
        ones[part] = (ones[part] - unary).bitwise_left_shift_(width).bitwise_or_(chunk)
    table = torch.tensor([list(counts), list(numels)], dtype=torch.int64, device=words.device)
    limits = table[1].repeat_interleave(table[0], output_size=expected)
    _check_range(int(((ones < 0) | (ones >= limits)).sum()))
    return ones


def _check_count(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"A message with {found} positions; {expected} were expected.")


def _check_range(outside: int) -> None:
    if outside:  # checked here, because compiled passes write without a check
        raise ValueError(f"A damaged message: {outside} of its positions lie outside their tensors.")


def _low_width(count: int, numel: int) -> int:
    """Return l = floor(log2(n / k)): one bit more for each of k halves the n / 2^l risers."""
    return (numel // count).bit_length() - 1 if count else 0


def _sizes(counts: Sequence[int], numels: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the bits that each tensor takes in the unary and in the low part."""
    unary_bits, low_bits = [], []
    for count, numel in zip(counts, numels, strict=True):
        if not 0 <= count <= numel <= MAX_NUMEL:
            raise ValueError(f"{count} positions in a tensor of {numel} elements; it may have up to {MAX_NUMEL}.")
        width = _low_width(count, numel)
        unary_bits.append(count + ((numel - 1) >> width) if count else 0)
        low_bits.append(count * width)
    return unary_bits, low_bits


@lru_cache(maxsize=64)  # of the groups of tensors that are sent together, in the stages of a warm-up
def fields_of(counts: tuple[int, ...], numels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where the positions of each tensor lie in a message: int64, shape (tensors, columns of `Field`)."""
    unary_bits, low_bits = _sizes(counts, numels)
    fields, first, unary_start, low_start = [], 0, 0, sum(unary_bits)
    for count, numel, unary, low in zip(counts, numels, unary_bits, low_bits, strict=True):
        width = _low_width(count, numel)
        fields.append(Field(count, first, width, unary_start, unary_start + unary, low_start, numel))
        first, unary_start, low_start = first + count, unary_start + unary, low_start + low
    return upload(fields, torch.int64, device).view(len(fields), len(Field._fields))


def _fields(
    counts: Sequence[int], numels: Sequence[int], device: torch.device
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield for CHUNK elements at a time: which, their l, their unary bits without the risers, their first low bits."""
    table = fields_of(tuple(counts), tuple(numels), device)
    column = {name: table[:, number] for number, name in enumerate(Field._fields)}
    firsts, widths = column["first"], column["width"]
    # Element e of a message adds e and e * width.
    columns = torch.stack([widths, column["unary"] - firsts, column["low"] - firsts * widths])
    num_elements = sum(counts)
    owner: Tensor | None = None
    if len(counts) > 1:
        owner = torch.repeat_interleave(column["num_sent"], output_size=num_elements)
    for start in range(0, num_elements, CHUNK):
        part = slice(start, min(start + CHUNK, num_elements))
        number = torch.arange(part.start, part.stop, device=device)
        # One tensor has one of each, whatever the element.
        mine = columns if owner is None else [each.index_select(0, owner[part]) for each in columns]
        width, unary, low = mine
        yield part, width, unary + number, low + number.mul_(width)
