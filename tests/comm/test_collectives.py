"""The collectives on real gloo ranks, and what the ledger says of them; groups, with what is private in torch."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.comm import collectives
from lightning_lowbw.comm.topology import DIMENSIONS, Topology, make_node_mesh
from tests.ranks import on_ranks
from tests.sync.problem import everywhere

LATE_S = 0.3


@on_ranks()
def test_waiting_is_counted_where_it_happens() -> None:
    for collective in ("all_reduce_", "all_gather"):
        exchange = collectives.Collectives(None, collectives.TrafficLedger())
        dist.barrier()
        if exchange.rank == 1:
            time.sleep(LATE_S)
        getattr(exchange, collective)(torch.zeros(4, dtype=torch.uint8))
        waited, late = everywhere(exchange.ledger.exposed_s)
        assert LATE_S / 2 < waited < 10 * LATE_S
        assert 0 < late < waited


@pytest.mark.gpu
def test_waits_on_a_gpu_are_read_later() -> None:
    ledger, device = collectives.TrafficLedger(), torch.device("cuda")
    for _ in range(collectives.MAX_PENDING + 10):  # the oldest are dropped
        with ledger.waiting(device):
            torch.zeros(1 << 20, device=device).sum()
    assert ledger.exposed_s == 0.0
    torch.cuda.synchronize()
    ledger.settle()
    assert 0.0 < ledger.exposed_s < 10.0


# Groups ---------------------------------------------------------------------------------------------------------------


def timeout_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_group_has_the_timeout_that_the_world_was_given() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        groups = [collectives.group_of((0,), "test", timeout) for timeout in (None, timedelta(seconds=3))]
        assert [timeout_of(group) for group in groups] == [7, 3]
    finally:
        dist.destroy_process_group()


@on_ranks(4)
def test_so_have_those_inside_a_node_of_shards() -> None:
    rank = dist.get_rank()
    mesh = make_node_mesh(Topology(((0, 1), (2, 3))), rank, "cpu", timedelta(seconds=7)).mesh
    groups = [mesh.get_group(name) for name in DIMENSIONS]
    of_slice = mesh["data_parallel"].get_group()  # what FSDP takes
    assert [timeout_of(group) for group in (*groups, of_slice)] == [7, 7, 7]
    assert [dist.get_process_group_ranks(group) for group in groups] == [[0, 1] if rank < 2 else [2, 3], [rank]]


@on_ranks()
def test_groups_are_made_in_a_world_that_is_bound_to_a_gpu() -> None:
    """As Lightning's is."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)
    members = [
        collectives.group_of((rank,), "test of a bound world") is not dist.GroupMember.NON_GROUP_MEMBER
        for rank in (0, 1)
    ]
    assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None
    assert members == [rank == dist.get_rank() for rank in (0, 1)]
