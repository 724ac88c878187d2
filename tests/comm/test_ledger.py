"""The volume formulas, against a walk through the algorithms they stand for."""

from __future__ import annotations

import pytest

from lightning_lowbw.comm.collectives import (
    all_gather_bytes,
    all_gather_rounds,
    all_reduce_bytes,
    all_reduce_rounds,
)
from lightning_lowbw.compress.quantization import make_format, quantized_mean_bytes
from lightning_lowbw.compress.sparse_sum import gather_capacity, reduce_scatter_elements, scatter_capacity


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 32])
def test_the_ring_sends_so_many_bytes_in_so_many_rounds(num_ranks: int) -> None:
    nbytes = 96 * 1000  # divisible by every number of ranks here
    chunks = sum(nbytes // num_ranks for _ in range(num_ranks - 1))  # each step one chunk goes to the neighbour
    assert all_reduce_bytes(nbytes, num_ranks) == 2 * chunks  # reduce-scatter, and all-gather of the chunks
    assert all_gather_bytes(nbytes, num_ranks) == sum(nbytes for _ in range(num_ranks - 1))
    assert all_gather_rounds(num_ranks) == num_ranks - 1
    assert all_reduce_rounds(num_ranks) == 2 * all_gather_rounds(num_ranks)


def test_whole_bytes_rounded_down_without_floating_point() -> None:
    assert all_reduce_bytes(10, 3) == 13  # 13.33
    assert all_reduce_bytes(3 * 10**17 + 3, 3) == 4 * 10**17 + 4  # a double has no such number


@pytest.mark.parametrize(("value_dtype", "bits"), [("bfloat16", 16), ("int8", 8 + 16 / 128), ("int4", 4 + 16 / 128)])
def test_few_bits_are_that_share_of_an_all_reduce(value_dtype: str, bits: float) -> None:
    numel, num_ranks = 4197, 3
    narrow = quantized_mean_bytes(numel, num_ranks, make_format(value_dtype))
    assert bits / 32 <= narrow / all_reduce_bytes(4 * numel, num_ranks) < 1.01 * bits / 32


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_room_for_a_fair_share_at_least(num_ranks: int) -> None:
    for num_selected in (0, 1, 5, 64, 25_000):
        assert num_selected / num_ranks <= scatter_capacity(num_selected, num_ranks) <= num_selected
        assert gather_capacity(num_selected, num_ranks) * num_ranks >= 4 * num_selected
    assert reduce_scatter_elements(0, num_ranks) == 0
