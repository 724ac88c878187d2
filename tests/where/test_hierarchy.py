"""Two levels give the sum over the world, on any topology, with the bytes of the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import Topology
from lightning_lowbw.where.hierarchy import Hierarchy, discover
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.volume import all_reduce_bytes, reduce_scatter_bytes
from tests.ranks import run_ranks

TOPOLOGIES: dict[str, Any] = {
    "blocks": ((0, 1), (2, 3)),
    "strided": ((0, 2), (1, 3)),
    "backwards": ((3, 1), (0, 2)),
    "three nodes": ((0, 1), (2, 3), (4, 5)),
    "three each": ((0, 1, 2), (3, 4, 5)),
}
UNEQUAL: dict[str, Any] = {"unequal": ((0, 1, 2), (3,)), "leader alone": ((1,), (0, 2, 3))}


def reduce_all(nodes: Any, algorithm: Any, inter_dtype: torch.dtype | None) -> dict[str, Any]:
    results = []
    ledger = TrafficLedger()
    for _ in range(2):  # groups are made once
        hierarchy = Hierarchy(Topology(nodes), algorithm, inter_dtype, ledger)
    for numel in (1, 5, 12, 1000):
        buffer = torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + dist.get_rank()))
        expected = torch.zeros(numel, dtype=torch.float64)
        for rank in range(dist.get_world_size()):
            expected += torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + rank)).double()
        hierarchy.all_reduce(buffer, exact=False).wait()
        results.append((buffer, expected.float()))
    return {"results": results, "intra": ledger.intra_bytes, "inter": ledger.inter_bytes, "sent": ledger.sent_bytes}


@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
@pytest.mark.parametrize("name", [*TOPOLOGIES, *UNEQUAL])
def test_the_sum_over_the_world(name: str, algorithm: str) -> None:
    nodes = {**TOPOLOGIES, **UNEQUAL}[name]
    if name in UNEQUAL and algorithm == "sharded":
        pytest.skip("needs nodes of one size")
    by_rank = run_ranks(reduce_all, sum(map(len, nodes)), nodes, algorithm, None)
    for result in by_rank:
        for (buffer, expected), (first, _) in zip(result["results"], by_rank[0]["results"], strict=True):
            torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(buffer, first), "replicas differ"
        assert result["sent"] == result["intra"] + result["inter"]


def test_bytes_of_the_formulas() -> None:
    nodes = TOPOLOGIES["three nodes"]
    numels = (2, 6, 12, 1000)  # padded to the node's size
    for result in run_ranks(reduce_all, 6, nodes, "sharded", None):
        assert result["inter"] == sum(all_reduce_bytes(4 * numel // 2, 3) for numel in numels)
        assert result["intra"] == sum(2 * reduce_scatter_bytes(4 * numel, 2) for numel in numels)
    for rank, result in enumerate(run_ranks(reduce_all, 6, nodes, "leader", torch.bfloat16)):
        inter = sum(all_reduce_bytes(2 * numel, 3) for numel in (1, 5, 12, 1000))
        assert result["inter"] == (inter if rank % 2 == 0 else 0)


@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
def test_half_types_between_nodes_only(algorithm: str) -> None:
    by_rank = run_ranks(reduce_all, 4, TOPOLOGIES["blocks"], algorithm, torch.bfloat16)
    for result in by_rank:
        for (buffer, expected), (first, _) in zip(result["results"], by_rank[0]["results"], strict=True):
            torch.testing.assert_close(buffer, expected, rtol=2**-6, atol=2**-5)
            assert torch.equal(buffer, first)


def test_the_launcher_knows_the_nodes() -> None:
    (nodes,) = {topology.nodes for topology in run_ranks(discover, 3)}
    assert nodes == ((0, 1, 2),)  # the tests' ranks say GROUP_RANK=0


def discover_by_variable() -> Topology:
    import os

    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    return discover()


def test_nodes_that_share_a_host_name() -> None:
    assert {topology.nodes for topology in run_ranks(discover_by_variable, 4)} == {((0, 1), (2, 3))}
