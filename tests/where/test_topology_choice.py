"""From what the user says about the nodes to the topology of a world."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lowbw import ConfigurationError, Topology
from lightning_lowbw.where.topology import check_choice, discover, resolve
from tests.ranks import run_ranks

BLOCKS = Topology(((0, 1), (2, 3)))


def test_what_is_spelled_out_needs_no_world() -> None:
    for choice in ([[0, 1], [2, 3]], ((0, 1), (3, 2)), BLOCKS):
        assert check_choice(choice) == BLOCKS
        assert resolve(choice, 4) == BLOCKS
    for choice in ("flat", "auto", 2):
        assert check_choice(choice) is None
    assert resolve("flat", 4) is None
    assert resolve(2, 4) == BLOCKS


@pytest.mark.parametrize("choice", ["nodes", 1.5, True, [0, 1], [["0"]], [[]], None])
def test_what_is_none(choice: Any) -> None:
    with pytest.raises(ConfigurationError, match="give 'flat', 'auto'"):
        check_choice(choice)


def test_a_number_of_ranks_costs_no_memory_and_must_be_one() -> None:
    assert check_choice(10**9) is None  # not that many ranks are listed to look at it
    with pytest.raises(ConfigurationError, match="4 ranks cannot be divided into nodes of 1000000000 ranks"):
        resolve(10**9, 4)
    for choice in (0, -2):
        with pytest.raises(ConfigurationError, match=f"topology={choice}, .* per node: give an integer >= 1"):
            check_choice(choice)
    for nodes in (5, [0, 1], [["a"]], [[0.0]]):
        with pytest.raises(ConfigurationError, match="give the ranks of each node, as in"):
            Topology(nodes)  # type: ignore[arg-type]


def test_a_world_of_another_size() -> None:
    with pytest.raises(ConfigurationError, match="has 4 ranks, the world 6"):
        resolve(BLOCKS, 6)
    with pytest.raises(ConfigurationError, match="6 ranks cannot be divided"):
        resolve(4, 6)


def test_one_rank_is_one_node() -> None:
    assert discover() == resolve("auto", 1) == Topology(((0,),))


def discover_nodes() -> list[Topology]:
    found = [discover()]
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    return [*found, discover()]


def test_the_launcher_knows_nodes_that_share_a_host_name() -> None:
    for alone, pairs in run_ranks(discover_nodes, 4):
        assert alone == Topology(((0, 1, 2, 3),))  # the tests' ranks say GROUP_RANK=0
        assert pairs == BLOCKS
