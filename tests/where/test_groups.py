"""The private things of torch's groups that are relied on. A test here fails when they have moved."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.where.collectives import group_of
from lightning_lowbw.where.node_mesh import NAMES, make_node_mesh
from lightning_lowbw.where.topology import Topology
from tests.ranks import run_ranks


def test_a_group_has_the_timeout_that_the_world_was_given() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        timeouts = []
        for timeout in (None, timedelta(seconds=3)):
            group = group_of((0,), f"test {timeout}", timeout)
            assert group is not None
            timeouts.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    finally:
        dist.destroy_process_group()
    assert timeouts == [7, 3]


def timeouts_of_a_mesh(tensor_parallel_size: int) -> tuple[list[float], list[list[int]]]:
    """Return the timeouts of the groups inside this rank's node, and their ranks."""
    nodes = Topology(((0, 1), (2, 3)))
    mesh = make_node_mesh(nodes, dist.get_rank(), "cpu", tensor_parallel_size, timedelta(seconds=7)).mesh
    groups = [mesh.get_group(name) for name in NAMES]
    of_slice = mesh["data_parallel"].get_group()  # what FSDP takes
    timeouts = [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in (*groups, of_slice)]
    return timeouts, [dist.get_process_group_ranks(each) for each in groups]


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_so_have_those_inside_a_node_of_shards(tensor_parallel_size: int) -> None:
    for rank, (timeouts, ranks) in enumerate(run_ranks(timeouts_of_a_mesh, 4, tensor_parallel_size)):
        assert timeouts == [7, 7, 7]
        node = [0, 1] if rank < 2 else [2, 3]
        assert ranks == ([node, [rank]] if tensor_parallel_size == 1 else [[rank], node])


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
