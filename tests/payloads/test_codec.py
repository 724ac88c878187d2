"""Messages: positions and values come out as they went in, in the size that was said, close to the entropy."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.reference import largest
from lightning_lowbw.payloads.codec import (
    ALIGNMENT_BYTES,
    MAX_NUMEL,
    VALUE_FORMATS,
    VALUE_NAMES,
    SparseCodec,
    layout_of,
    pack,
    unpack,
)

# Positions ------------------------------------------------------------------------------------------------------------

# (k, n): one of one, the first and last sizes around powers of two, all, all but one, none of none
AWKWARD = [(1, 1), (1, 2), (2, 2), (1, 31), (1, 32), (32, 32), (64, 64), (63, 64), (1, MAX_NUMEL), (3, MAX_NUMEL)]
AWKWARD += [(0, 0), (0, 5), (31, 33), (999, 1000), (1000, 1000), (16, 16384), (7, 8), (5, 255), (5, 256), (5, 257)]


def num_words(counts: list[int], numels: list[int]) -> int:
    return layout_of(tuple(counts), tuple(numels)).num_words


def draw(count: int, numel: int) -> Tensor:
    """`count` distinct positions below `numel`, ascending; the first and the last are among them."""
    if numel <= 1 << 16:
        drawn = torch.randperm(numel)[:count]
    else:  # no memory of that size
        drawn = torch.tensor(random.Random(count).sample(range(1, numel - 1), count), dtype=torch.int64)
    if count:
        drawn = drawn.sort().values
        if count < numel:
            drawn[0], drawn[-1] = (0, numel - 1) if count > 1 else (numel - 1, numel - 1)
    return drawn


def check(sizes: list[tuple[int, int]], parts: list[Tensor]) -> None:
    counts, numels = [count for count, _ in sizes], [numel for _, numel in sizes]
    positions = torch.cat(parts)
    words = pack(positions, counts, numels)
    assert words.dtype == torch.int32
    assert words.shape == (num_words(counts, numels),)
    (decoded,) = unpack(words.unsqueeze(0), counts, numels)
    assert decoded.dtype == torch.int32
    assert decoded.equal(positions.int())
    for first, stop in ((0, 1), (1, 4), (len(sizes) - 1, len(sizes))):  # some tensors
        (some,) = unpack(words.unsqueeze(0), counts, numels, slice(first, stop))
        assert some.equal(decoded[sum(counts[:first]) : sum(counts[:stop])])


def test_what_comes_out_is_what_went_in() -> None:
    """Each tensor alone, with drawn positions and positions at either end; and all tensors in one stream."""
    for count, numel in AWKWARD:
        for positions in (draw(count, numel), torch.arange(count), torch.arange(numel - count, numel)):
            check([(count, numel)], [positions])
    check(AWKWARD, [draw(*sizes) for sizes in AWKWARD])


@pytest.mark.parametrize("density", [0.9, 0.25, 0.001])
def test_the_size_is_near_the_entropy(density: float) -> None:
    """At most 0.6 bits per element above log2 of n over k where few are sent, and never more than n + k in all."""
    numel = 10_000_000
    count = round(numel * density)
    entropy = (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2)
    bits = 32 * num_words([count], [numel])
    assert entropy < bits <= numel + count + 32
    if density <= 0.25:
        assert (bits - entropy) / count < (0.8 if density == 0.25 else 0.6)


def test_sizes_that_cannot_be_are_refused() -> None:
    for count, numel in ((2, 1), (-1, 5), (1, MAX_NUMEL + 1)):
        with pytest.raises(ValueError, match=f"{count} positions in a tensor of {numel} elements"):
            num_words([count], [numel])


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", VALUE_FORMATS)
@pytest.mark.parametrize("sizes", [[(1, 1)], [(16, 16384), (1, 5), (7, 7), (129, 10**5)], [(2, 9), (0, 3), (5, 31)]])
def test_what_comes_out_is_what_the_values_became(value_dtype: str, sizes: list[tuple[int, int]]) -> None:
    counts, numels, parts = [count for count, _ in sizes], [numel for _, numel in sizes], []
    for count, numel in sizes:
        values = torch.randn(numel)
        indices = largest(values, count)
        parts.append((indices, values[indices]))
    codec, value_format = SparseCodec(value_dtype), VALUE_FORMATS[value_dtype]
    message = codec.encode(parts, numels)
    assert message.dtype == torch.uint8  # gloo takes no 16-bit integers
    assert message.shape == (codec.nbytes(counts, numels),)
    assert message.numel() % ALIGNMENT_BYTES == 0
    positions, decoded = codec.decode(message.unsqueeze(0), counts, numels)
    sent = decoded[0].split(counts)
    values = torch.cat([values for _, values in parts])
    assert torch.cat(sent).equal(value_format.decode(value_format.encode(values, counts), counts))
    assert positions[0].equal(torch.cat([indices for indices, _ in parts]))
    residuals = [torch.zeros(numel) for numel in numels]
    assert codec.encode(parts, numels, residuals).equal(message)
    for residual, (indices, exact), mine in zip(residuals, parts, sent, strict=True):
        assert residual[indices].equal(exact - mine)


# Damaged messages: an error, or positions inside their tensors, because compiled passes write there ---------------

SAID = r"damaged message|A message (of|with) -?\d+ "  # what an error must say
COUNTS, NUMELS = [3, 0, 2, 40], [100, 7, 50, 300]


def damaged(message: Tensor, chance: random.Random) -> Tensor:
    """Flip, exchange or overwrite bytes, or lose or add bytes at the end."""
    data, kind = bytearray(message.numpy().tobytes()), chance.choice(["flip", "swap", "write", "zero", "cut", "longer"])
    for _ in range(chance.randint(1, 8) if kind in ("flip", "swap", "write") else 1):
        at, other, number = chance.randrange(len(data)), chance.randrange(len(data)), chance.randrange(256)
        if kind == "flip":
            data[at] ^= 1 << number % 8
        elif kind == "swap":
            data[at], data[other] = data[other], data[at]
        elif kind == "longer":
            data += bytes([number]) * (1 + at % 9)
        else:
            new = {"write": bytes([number]) * 4, "zero": bytes(len(data)), "cut": b""}[kind]
            data[at:] = new[: len(data) - at] + (data[at + 4 :] if kind == "write" else b"")
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", VALUE_NAMES)
def test_positions_stay_inside_their_tensors(name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(torch.randperm(n)[:k].sort().values, torch.randn(k)) for k, n in zip(COUNTS, NUMELS, strict=True)]
    codec = SparseCodec(name)
    monkeypatch.setattr(dispatch, "_disabled", set() if is_compiled else {"cpu"})
    whole, chance, errors = codec.encode(parts, NUMELS), random.Random(name), list[str]()
    for _ in range(40):
        message = damaged(whole, chance)
        try:
            positions, values = codec.decode(message.unsqueeze(0), COUNTS, NUMELS)
        except ValueError as error:
            errors.append(str(error))
            continue
        assert positions.shape == values.shape == (1, sum(COUNTS))
        for numel, mine in zip(NUMELS, positions[0].split(COUNTS), strict=True):
            assert ((mine >= 0) & (mine < numel)).all()
    assert all(re.search(SAID, error) for error in errors)
    assert 0 < len(errors) < 40
