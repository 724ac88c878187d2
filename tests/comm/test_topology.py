"""Which ranks share a node: as the user says, or as the launcher and the host names do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lowbw import ConfigurationError, Topology
from lightning_lowbw.comm import topology as module
from lightning_lowbw.comm.topology import check_choice, discover, resolve
from tests.ranks import on_ranks

BLOCKS = Topology(((0, 1), (2, 3)))


def test_hosts_in_the_order_of_their_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gather", lambda *_: ["b", "a", "b", "a"])
    topology = discover()
    assert topology.nodes == ((0, 2), (1, 3))
    assert topology.leaders == (0, 1)
    assert [topology.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [topology.local_rank_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.peers(place) for place in (0, 1)] == [(0, 1), (2, 3)]


def test_what_is_spelled_out_needs_no_world() -> None:
    for choice in ([[0, 1], [2, 3]], ((0, 1), (3, 2)), BLOCKS):
        assert check_choice(choice) == resolve(choice, 4) == BLOCKS
    for choice in ("flat", "auto", 2, 10**9):  # not that many ranks are listed to look at it
        assert check_choice(choice) is None
    assert (resolve("flat", 4), resolve(2, 4)) == (None, BLOCKS)
    assert discover() == resolve("auto", 1) == Topology(((0,),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda nodes=nodes: Topology(nodes), "exactly one node") for nodes in (((0, 1), (1, 2)), ((0,), ()), ())),
        *((lambda nodes=nodes: Topology(nodes), "ranks of each node, as in") for nodes in (5, [["a"]])),
        (lambda: Topology.blocks(6, 4), r"nodes of 4 ranks\. Give a divisor of"),
        *((lambda wrong=wrong: Topology.blocks(6, wrong), "integer") for wrong in (0, True)),
        (lambda: Topology(((0, 1), (2,))).ranks_per_node, r"node 0 has 2 \(0, 1\), node 1 has 1 \(2\)"),
        *((lambda it=it: check_choice(it), "give 'flat', 'auto'") for it in ("nodes", True, 0)),
        (lambda: check_choice([["0"]]), "ranks of each node, as in"),
        (lambda: resolve(10**9, 4), "4 ranks cannot be divided into nodes of 1000000000 ranks"),
        (lambda: resolve(BLOCKS, 6), "has 4 ranks, the world 6"),
    ],
)
def test_what_is_refused_and_why(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@on_ranks()
def test_the_launcher_and_the_boot_know_nodes_that_share_a_host_name() -> None:
    rank, apart = dist.get_rank(), Topology(((0,), (1,)))
    assert discover() == Topology(((0, 1),))  # the tests' ranks say GROUP_RANK=0
    os.environ["GROUP_RANK"] = str(rank)
    assert discover() == apart
    os.environ["GROUP_RANK"] = "0"
    module.BOOT_ID = Path(__file__).parent / ("__init__.py" if rank else "test_topology.py")
    assert discover() == apart
