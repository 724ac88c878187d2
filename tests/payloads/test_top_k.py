"""How much of each tensor is sent, and how; that it is the largest, and that nothing is lost, is in `tests/sync`."""

from __future__ import annotations

import math

import pytest

from lightning_lowbw.payloads.params import small_numel
from lightning_lowbw.payloads.top_k import ChunkLayout, TopK
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.presets import Compression, LocalSGD


def test_how_many_of_each_chunk_are_sent() -> None:
    """Of the last one, which is shorter, not fewer than its share of a whole one."""
    cases = {
        (1 / 16, 64): ChunkLayout(15, 4, 4),
        (1 / 16, None): ChunkLayout(0, 0, 62),
        (1e-6, 64): ChunkLayout(15, 1, 1),
        (0.99, 64): ChunkLayout(15, 63, 40),
        (1 / 256, 1 << 20): ChunkLayout(0, 4096, 16),
    }
    for (density, chunk), expected in cases.items():
        assert TopK(density=density, chunk=chunk).layout(1000) == expected


def test_bits_per_parameter_and_step_of_the_preset() -> None:
    """A transformer's matrices in 15 local steps: at most 0.02 bits; the positions take under a bit above entropy."""
    numels = [256 * 256] * 16 + [256 * 1024] * 8 + [50_000 * 256]
    bits = 8 * Compression().nbytes(numels)
    assert bits / sum(numels) / 15 < 0.02
    entropy = (math.lgamma(4097) - math.lgamma(65) - math.lgamma(4033)) / math.log(2) / 64
    assert bits / sum(map(Compression().num_sent, numels)) == pytest.approx(10.25, abs=0.01)  # as the card says
    assert entropy + 1 + 2.25 > 10.25


def test_what_is_small_depends_on_what_is_trained() -> None:
    assert small_numel([]) == small_numel([10, 20]) == 1024
    assert small_numel([32 * 32] * 40 + [32] * 40) == 1024
    assert small_numel([6144] * 24) == 6144
    assert small_numel([100_000, 2000, 1000]) == 16384, "the small ones are 2.9 %"
    assert small_numel([90_000, 2000, 1000]) == 2000, "3.2 %: not all of them"
    assert TopK().compresses("", 6144, 6144)
    assert not TopK().compresses("", 6143, 6144)
    assert TopK(min_numel=5000).compresses("", 5000, 6144)


def test_a_mapping_says_the_same_as_a_value() -> None:
    assert LocalSGD(compression={"value_dtype": "int4"}) == LocalSGD(compression=Compression(value_dtype="int4"))
    assert LocalSGD(compression={}).what == Compression()
    assert LocalSGD(compression=None).what == Whole()
