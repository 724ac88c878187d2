"""The collectives on real gloo ranks, and what the ledger says of them; groups, with what is private in torch."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.comm.collectives import (
    MAX_PENDING,
    Collectives,
    TrafficLedger,
    all_gather_bytes,
    all_reduce_bytes,
    group_of,
)
from lightning_lowbw.comm.topology import Topology
from lightning_lowbw.strategies.fsdp import DIMENSIONS, make_node_mesh
from tests.ranks import run_ranks

LATE_S = 0.4


def exchange_once(members: list[int]) -> dict[str, Any] | None:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    exchange = Collectives(group, TrafficLedger())
    rank, num_ranks = exchange.rank, exchange.num_ranks
    sent = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = torch.arange(7).to(dtype) * (rank + 1)
        exchange.all_reduce_(tensor)
        assert tensor.equal(torch.arange(7).to(dtype) * sum(range(1, num_ranks + 1)))
        sent.append(exchange.ledger.sent_bytes)
    message = torch.tensor([rank, 255 - rank, 0, 128, 7], dtype=torch.uint8)
    gathered = exchange.all_gather(message)
    assert message.tolist() == [rank, 255 - rank, 0, 128, 7]
    assert exchange.ledger.received_bytes == exchange.ledger.sent_bytes
    return {"gathered": gathered.tolist(), "sent": [*sent, exchange.ledger.sent_bytes], "place": (rank, num_ranks)}


@pytest.mark.parametrize("members", [[0, 1], [0, 2], [0, 1, 2]])
def test_sums_messages_and_bytes(members: list[int]) -> None:
    num_ranks = len(members)
    one, two = all_reduce_bytes(28, num_ranks), all_reduce_bytes(56, num_ranks)
    sums = [one, one + two, one + two + all_reduce_bytes(14, num_ranks)]
    found = [result for result in run_ranks(exchange_once, 3, members) if result is not None]
    for rank, result in enumerate(found):
        assert result["place"] == (rank, num_ranks)
        assert result["gathered"] == [[sender, 255 - sender, 0, 128, 7] for sender in range(num_ranks)]
        assert result["sent"] == [*sums, sums[-1] + all_gather_bytes(5, num_ranks)]


def wait_for_a_late_rank(collective: str) -> float:
    exchange = Collectives(None, TrafficLedger())
    dist.barrier()
    if exchange.rank == 1:
        time.sleep(LATE_S)
    getattr(exchange, collective)(torch.zeros(4, dtype=torch.uint8))
    return exchange.ledger.exposed_s


@pytest.mark.parametrize("collective", ["all_reduce_", "all_gather"])
def test_waiting_is_counted_where_it_happens(collective: str) -> None:
    waited, late = run_ranks(wait_for_a_late_rank, 2, collective)
    assert LATE_S / 2 < waited < 10 * LATE_S
    assert 0 < late < waited


def test_without_a_process_group_there_is_one_rank() -> None:
    exchange = Collectives()
    assert (exchange.num_ranks, exchange.rank, exchange.ledger) == (1, 0, TrafficLedger())


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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 32])
def test_the_ring_sends_so_many_bytes_in_so_many_rounds(num_ranks: int) -> None:
    nbytes = 96 * 1000  # divisible by every number of ranks here
    chunks = sum(nbytes // num_ranks for _ in range(num_ranks - 1))  # each step one chunk goes to the neighbour
    assert all_reduce_bytes(nbytes, num_ranks) == 2 * chunks  # reduce-scatter, and all-gather of the chunks
    assert all_gather_bytes(nbytes, num_ranks) == sum(nbytes for _ in range(num_ranks - 1))
    assert all_reduce_bytes(3 * 10**17 + 3, 3) == 4 * 10**17 + 4  # a double has no such number


# Groups ---------------------------------------------------------------------------------------------------------------


def timeout_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_group_has_the_timeout_that_the_world_was_given() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        groups = [group_of((0,), "test", timeout) for timeout in (None, timedelta(seconds=3))]
        assert [timeout_of(group) for group in groups] == [7, 3]
    finally:
        dist.destroy_process_group()


def timeouts_of_a_mesh() -> tuple[list[float], list[list[int]]]:
    """Return the timeouts of the groups inside this rank's node, and their ranks."""
    mesh = make_node_mesh(Topology(((0, 1), (2, 3))), dist.get_rank(), "cpu", timedelta(seconds=7)).mesh
    groups = [mesh.get_group(name) for name in DIMENSIONS]
    of_slice = mesh["data_parallel"].get_group()  # what FSDP takes
    return [timeout_of(each) for each in (*groups, of_slice)], [dist.get_process_group_ranks(each) for each in groups]


def test_so_have_those_inside_a_node_of_shards() -> None:
    for rank, (timeouts, ranks) in enumerate(run_ranks(timeouts_of_a_mesh, 4)):
        assert timeouts == [7, 7, 7]
        assert ranks == [[0, 1] if rank < 2 else [2, 3], [rank]]


def bind_to_a_gpu() -> list[bool]:
    """Make groups as Lightning's world does, which is bound to a GPU; return whether this rank is in each."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)
    members = [group_of((rank,), "test of a bound world") is not dist.GroupMember.NON_GROUP_MEMBER for rank in (0, 1)]
    assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None
    return members


def test_groups_are_made_in_a_world_that_is_bound_to_a_gpu() -> None:
    assert run_ranks(bind_to_a_gpu, 2) == [[True, False], [False, True]]
