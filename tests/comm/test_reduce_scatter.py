"""The sparse reduce-scatter on real gloo ranks: equal replicas, nothing lost, the bytes of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.compress.sparse_sum import COUNT_BYTES, gather_capacity, scatter_capacity
from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.sync.exchange import ReduceScatterExchange
from tests.ranks import run_ranks

NUMELS, COUNTS, STEPS = (3000, 1, 500, 6000), (60, 1, 10, 120), 8


def gradient(step: int, rank: int, is_skewed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tensors = {str(number): torch.randn(numel, generator=generator) for number, numel in enumerate(NUMELS)}
    if is_skewed:
        tensors["3"][200:] = 0.0  # all of the last tensor's elements lie at its beginning
    return tensors


def train(value_dtype: str, is_skewed: bool) -> dict[str, Any]:
    peers = Peers()
    payload = TopK(density=0.02, value_dtype=value_dtype, exchange="reduce_scatter")
    exchange = ReduceScatterExchange(payload, peers)
    assert tuple(payload.nums_sent(NUMELS)) == COUNTS
    applied = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
    for step in range(STEPS):
        means = exchange.begin(gradient(step, peers.rank, is_skewed)).wait()[0].dense()
        for total, mean in zip(applied, means.values(), strict=True):
            total += mean.double() * peers.num_ranks
    return {
        "applied": applied,
        "residuals": list(exchange.residuals.values()),
        "received": peers.ledger.received_bytes,
        "state": exchange.state_dict()["reducer"],
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
            gradient(step, rank, is_skewed)[str(number)].double() for step in range(STEPS) for rank in range(num_ranks)
        )
        torch.testing.assert_close(by_rank[0]["applied"][number] + kept, made, rtol=1e-5, atol=2e-5)
    k, headers = sum(COUNTS), (num_ranks - 1) * 3 * COUNT_BYTES
    elements = (num_ranks - 1) * (scatter_capacity(k, num_ranks) + gather_capacity(k, num_ranks))
    nbytes = 4 if value_dtype == "float32" else 2  # of a value; a position has 4 to 12 bits
    for result in by_rank:
        assert STEPS * nbytes * elements < result["received"] < STEPS * ((nbytes + 1.5) * elements + headers)
