"""Which ranks share a node."""

from __future__ import annotations

import pytest

from lightning_lowbw import ConfigurationError, Topology


def test_hosts_in_the_order_of_their_first_rank() -> None:
    topology = Topology.of_hosts(["b", "a", "b", "a"])
    assert topology.nodes == ((0, 2), (1, 3))
    assert topology.leaders == (0, 1)
    assert [topology.node_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [topology.local_rank_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.peers(place) for place in (0, 1)] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("nodes", [((0, 1), (1, 2)), ((0,), (2,)), ((0,), ()), ()])
def test_each_rank_is_on_one_node(nodes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigurationError, match="exactly one node"):
        Topology(nodes)


def test_a_world_that_cannot_be_divided() -> None:
    with pytest.raises(ConfigurationError, match=r"nodes of 4 ranks\. Give a divisor of"):
        Topology.blocks(6, 4)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ConfigurationError, match="integer"):
            Topology.blocks(6, wrong)  # type: ignore[arg-type]


def test_nodes_of_different_sizes_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"node 0 has 2 \(0, 1\), node 1 has 1 \(2\)"):
        _ = Topology(((0, 1), (2,))).ranks_per_node
