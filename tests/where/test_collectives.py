"""The two collectives on real gloo ranks, and what the ledger says of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.where.collectives import Collectives
from lightning_lowbw.where.ledger import MAX_PENDING, TrafficLedger, all_gather_bytes, all_reduce_bytes
from tests.ranks import run_ranks

LATE_S = 0.4


def exchange_once(dtypes: list[torch.dtype]) -> dict[str, Any]:
    exchange = Collectives(None, TrafficLedger())
    rank = exchange.rank
    facts: dict[str, Any] = {"rank": rank, "num_ranks": exchange.num_ranks, "sums": [], "bytes": []}
    for dtype in dtypes:
        tensor = torch.arange(7).to(dtype) * (rank + 1)
        exchange.all_reduce_(tensor)
        facts["sums"].append(tensor)
        facts["bytes"].append((exchange.ledger.sent_bytes, exchange.ledger.received_bytes))
    message = torch.tensor([rank, 255 - rank, 0, 128, 7], dtype=torch.uint8)
    facts["gathered"] = exchange.all_gather(message)
    facts["message"] = message
    facts["bytes"].append((exchange.ledger.sent_bytes, exchange.ledger.received_bytes))
    return facts


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_messages_and_bytes(num_ranks: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16]
    for rank, facts in enumerate(run_ranks(exchange_once, num_ranks, dtypes)):
        assert facts["rank"] == rank
        assert facts["num_ranks"] == num_ranks
        total = 0
        for dtype, result, measured in zip(dtypes, facts["sums"], facts["bytes"], strict=False):
            assert result.dtype == dtype
            assert result.equal(torch.arange(7).to(dtype) * sum(range(1, num_ranks + 1)))
            total += all_reduce_bytes(7 * dtype.itemsize, num_ranks)
            assert measured == (total, total)
        assert facts["gathered"].dtype == torch.uint8
        assert facts["gathered"].tolist() == [[sender, 255 - sender, 0, 128, 7] for sender in range(num_ranks)]
        assert facts["message"].tolist() == [rank, 255 - rank, 0, 128, 7]  # untouched
        total += all_gather_bytes(5, num_ranks)
        assert facts["bytes"][-1] == (total, total)


def wait_for_a_late_rank(collective: str) -> float:
    exchange = Collectives(None, TrafficLedger())
    dist.barrier()
    if exchange.rank == 1:
        time.sleep(LATE_S)
    tensor = torch.zeros(4, dtype=torch.uint8)
    exchange.all_reduce_(tensor) if collective == "all_reduce_" else exchange.all_gather(tensor)
    return exchange.ledger.exposed_s


@pytest.mark.parametrize("collective", ["all_reduce_", "all_gather"])
def test_waiting_is_counted_where_it_happens(collective: str) -> None:
    waited, late = run_ranks(wait_for_a_late_rank, 2, collective)
    assert LATE_S / 2 < waited < 10 * LATE_S
    assert 0 < late < waited


def exchange_in_a_subgroup() -> dict[str, Any] | None:
    members = [0, 2]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    exchange = Collectives(group, TrafficLedger())
    tensor = torch.ones(10)
    exchange.all_reduce_(tensor)
    gathered = exchange.all_gather(torch.tensor([dist.get_rank()], dtype=torch.uint8))
    return {
        "rank": exchange.rank,
        "num_ranks": exchange.num_ranks,
        "sum": tensor.tolist(),
        "gathered": gathered.tolist(),
        "sent_bytes": exchange.ledger.sent_bytes,
    }


def test_a_subgroup_has_its_own_ranks_and_volumes() -> None:
    first, outsider, last = run_ranks(exchange_in_a_subgroup, 3)
    assert outsider is None
    for rank, facts in enumerate((first, last)):
        assert facts == {
            "rank": rank,
            "num_ranks": 2,
            "sum": [2.0] * 10,
            "gathered": [[0], [2]],
            "sent_bytes": all_reduce_bytes(40, 2) + all_gather_bytes(1, 2),
        }


def test_without_a_process_group_there_is_one_rank() -> None:
    exchange = Collectives(None, TrafficLedger())
    assert (exchange.num_ranks, exchange.rank) == (1, 0)


def test_every_exchange_has_its_own_ledger() -> None:
    one, other = Collectives(None, TrafficLedger()), Collectives(None, TrafficLedger())
    one.ledger.record(10)
    assert other.ledger == TrafficLedger()
    assert one.ledger == TrafficLedger(sent_bytes=10, received_bytes=10)
    shared = TrafficLedger()
    assert Collectives(None, shared).ledger is shared


def test_waits_on_a_cpu_add_up_at_once() -> None:
    ledger = TrafficLedger()
    for _ in range(2):
        with ledger.waiting(torch.device("cpu")):
            time.sleep(0.02)
    assert 0.04 <= ledger.exposed_s < 2.0
    before = ledger.exposed_s
    ledger.settle()
    assert ledger.exposed_s == before


@pytest.mark.gpu
def test_waits_on_a_gpu_are_read_later() -> None:
    ledger, device = TrafficLedger(), torch.device("cuda")
    for _ in range(MAX_PENDING + 10):  # the oldest are dropped
        with ledger.waiting(device):
            torch.zeros(1 << 20, device=device).sum()
    assert ledger.exposed_s == 0.0
    torch.cuda.synchronize()
    ledger.settle()
    assert 0.0 < ledger.exposed_s < 10.0
    before = ledger.exposed_s
    ledger.settle()
    assert ledger.exposed_s == before
