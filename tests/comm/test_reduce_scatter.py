"""The sparse reduce-scatter on real gloo ranks: equal replicas, nothing lost, the bytes of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.comm.collectives import Collectives, TrafficLedger
from lightning_lowbw.compress.codec import SparseCodec
from lightning_lowbw.compress.sparse_sum import COUNT_BYTES, gather_capacity, scatter_capacity
from lightning_lowbw.kernels.reference import largest
from lightning_lowbw.sync.exchange import SparseReduceScatter
from tests.ranks import run_ranks

NUMELS, COUNTS, STEPS = (3000, 1, 500, 6000), (60, 1, 10, 120), 8


def gradient(step: int, rank: int, is_skewed: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tensors = [torch.randn(numel, generator=generator) for numel in NUMELS]
    if is_skewed:
        tensors[3][200:] = 0.0  # all of the last tensor's elements lie at its beginning
    return tensors


def train(value_dtype: str, is_skewed: bool) -> dict[str, Any]:
    exchange = Collectives(None, TrafficLedger())
    reducer = SparseReduceScatter(exchange, SparseCodec(value_dtype))
    residuals = [torch.zeros(numel, dtype=torch.float32) for numel in NUMELS]
    applied = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
    for step in range(STEPS):
        parts = []
        for residual, tensor, k in zip(residuals, gradient(step, exchange.rank, is_skewed), COUNTS, strict=True):
            residual += tensor
            positions = largest(residual, k)
            parts.append((positions, residual[positions]))
            residual[positions] = 0
        means, left = reducer.average(parts, NUMELS, COUNTS)
        for total, residual, mean, unsent in zip(applied, residuals, means, left, strict=True):
            total[mean[0]] += mean[1].double() * exchange.num_ranks
            residual[unsent[0]] += unsent[1]
    return {
        "applied": applied,
        "residuals": residuals,
        "received": exchange.ledger.received_bytes,
        "state": reducer.state_dict(),
    }


@pytest.mark.parametrize("is_skewed", [False, True], ids=["spread", "skewed"])
@pytest.mark.parametrize(("num_ranks", "value_dtype"), [(2, "float32"), (3, "bfloat16"), (4, "float32")])
def test_replicas_are_equal_and_nothing_is_lost_in_the_bytes_of_the_formula(
    num_ranks: int, value_dtype: str, is_skewed: bool
) -> None:
    by_rank = run_ranks(train, num_ranks, value_dtype, is_skewed)
    for result in by_rank:
        assert result["state"] == by_rank[0]["state"]
        for tensor, first in zip(result["applied"], by_rank[0]["applied"], strict=True):
            assert tensor.equal(first), "replicas differ"
    for number in range(len(NUMELS)):
        kept = sum(result["residuals"][number].double() for result in by_rank)
        made = sum(
            gradient(step, rank, is_skewed)[number].double() for step in range(STEPS) for rank in range(num_ranks)
        )
        torch.testing.assert_close(by_rank[0]["applied"][number] + kept, made, rtol=1e-5, atol=2e-5)
    k, headers = sum(COUNTS), (num_ranks - 1) * 3 * COUNT_BYTES
    elements = (num_ranks - 1) * (scatter_capacity(k, num_ranks) + gather_capacity(k, num_ranks))
    nbytes = 4 if value_dtype == "float32" else 2  # of a value; a position has 4 to 12 bits
    for result in by_rank:
        assert STEPS * nbytes * elements < result["received"] < STEPS * ((nbytes + 1.5) * elements + headers)
