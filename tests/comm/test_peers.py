"""One interface for flat ranks and for nodes: the same sums, messages and parts, with the bytes of the formulas."""

from __future__ import annotations

import functools
import threading
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, DisagreementError, Topology
from lightning_lowbw.comm.collectives import (
    MAX_CTAS,
    Collectives,
    TensorWork,
    TrafficLedger,
    all_gather_bytes,
    all_reduce_bytes,
    reduce_scatter_bytes,
)
from lightning_lowbw.comm.peers import MeanWork, Peers, average_gradients_, make_peers
from tests.ranks import run_ranks

WORLD = 4
NODES: dict[str, Any] = {
    "flat": ((0,), (1,), (2,), (3,)),
    "blocks": ((0, 1), (2, 3)),
    "crossed": ((0, 2), (1, 3)),
    "backwards": ((3, 1), (0, 2)),  # the local ranks 0 are 1 and 0, in this order
    "leader": ((0, 1, 2), (3,)),
    "three nodes": ((0, 1), (2, 3), (4, 5)),
    "three each": ((0, 1, 2), (3, 4, 5)),
}
NUMELS = (0, 1, 2, 5, 7, 12, 1001)


def vector_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * numel + rank)).to(dtype)


def message_of(rank: int, nbytes: int, call: int = 0) -> Tensor:
    return (torch.arange(nbytes) * 7 + 31 * rank + 101 * call).to(torch.uint8)


def gather(peers: Peers, message: Tensor) -> Tensor:
    return peers.begin_gather(message).wait()


def is_flat(nodes: Any) -> bool:
    return all(len(node) == 1 for node in nodes)


def traffic(ledger: TrafficLedger) -> tuple[int, int, int]:
    return ledger.sent_bytes, ledger.intra_bytes, ledger.inter_bytes


# Cases: each runs on every rank, for every topology of NODES ---------------------------------------------------------


def has_its_place(peers: Peers, nodes: Any) -> None:
    rank, own = dist.get_rank(), next(node for node in nodes if dist.get_rank() in node)
    local_rank = sorted(own).index(rank)
    assert (peers.num_ranks, peers.rank, peers.num_participants) == (dist.get_world_size(), rank, len(nodes))
    assert (peers.num_local_ranks, peers.local_rank) == (len(own), local_rank)
    assert peers.is_two_level == (len(nodes) > 1 and not is_flat(nodes))
    assert (peers.node.num_ranks, peers.node.rank) == (len(own), local_rank)
    assert peers.group is None
    assert peers.topology == (None if is_flat(nodes) else Topology(nodes))


def sums_over_all_ranks(peers: Peers, nodes: Any) -> None:
    for numel in NUMELS:
        for dtype in (torch.float32, torch.float64):
            for exact in (True, False):
                tensor = vector_of(peers.rank, numel, dtype)
                work = peers.begin_all_reduce_(tensor, exact=exact)
                expected = torch.stack([vector_of(rank, numel, dtype).double() for rank in range(peers.num_ranks)]).sum(
                    0
                )
                assert work.get_future().wait() is tensor or numel == 0
                assert work.wait() is tensor
                tolerance = 1e-5 if exact else 2.0**-5  # between nodes in bfloat16
                torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=tolerance)
                assert_replicas_are_equal(tensor)


def reduces_and_broadcasts(peers: Peers, nodes: Any) -> None:
    largest = torch.tensor([float(peers.rank), -float(peers.rank)])
    peers.all_reduce_(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [peers.num_ranks - 1, 0]
    total = torch.full((3,), float(peers.rank))
    peers.all_reduce_(total)
    assert total.tolist() == [sum(range(peers.num_ranks))] * 3
    of_first = torch.full((5,), float(peers.rank) + 1)
    peers.broadcast_(of_first)
    assert of_first.tolist() == [1.0] * 5


def sums_in_the_node(peers: Peers, nodes: Any) -> None:
    own = next(node for node in nodes if peers.rank in node)
    for numel in NUMELS:
        tensor = vector_of(peers.rank, numel)
        expected = torch.stack([vector_of(rank, numel) for rank in sorted(own)]).sum(0)
        assert peers.begin_all_reduce_in_node_(tensor).wait() is tensor
        torch.testing.assert_close(tensor, expected)


def gathers_messages(peers: Peers, nodes: Any) -> None:
    for nbytes in (0, 1, 5, 260):
        gathered = gather(peers, message_of(peers.rank, nbytes))
        assert gathered.dtype == torch.uint8
        assert gathered.equal(expected_messages(nodes, nbytes))


def begins_in_order(peers: Peers, nodes: Any) -> None:
    """Several at once, waited for in another order; and collectives of `node` and `between` meanwhile."""
    tensor = torch.full((9,), float(peers.rank))
    gatherings = [peers.begin_gather(message_of(peers.rank, 33, call)) for call in range(3)]
    reduction = peers.begin_all_reduce_(tensor)
    last = peers.begin_gather(message_of(peers.rank, 33, 3))
    between = peers.between.all_gather(torch.tensor([peers.rank], dtype=torch.uint8))
    node = peers.node.all_gather(torch.tensor([peers.rank], dtype=torch.uint8))
    assert last.wait().equal(expected_messages(nodes, 33, 3))
    assert reduction.wait().tolist() == [sum(range(peers.num_ranks))] * 9
    for call, gathering in reversed(list(enumerate(gatherings))):
        assert gathering.wait().equal(expected_messages(nodes, 33, call))
    own = sorted(next(node for node in nodes if peers.rank in node))
    assert node.view(-1).tolist() == own
    assert between.view(-1).tolist() == sorted(sorted(node)[own.index(peers.rank)] for node in nodes)


def expected_messages(nodes: Any, nbytes: int, call: int = 0) -> Tensor:
    by_local_rank = zip(*(sorted(node) for node in nodes), strict=True)
    return torch.stack([torch.stack([message_of(rank, nbytes, call) for rank in ranks]) for ranks in by_local_rank])


def divides_into_parts(peers: Peers, nodes: Any) -> None:
    own = sorted(next(node for node in nodes if peers.rank in node))
    for numel in NUMELS:
        parts = [peers.part(numel, local_rank) for local_rank in range(len(own))]
        assert parts[peers.local_rank] == peers.part(numel)
        assert torch.cat([torch.arange(numel)[part] for part in parts]).equal(torch.arange(numel))
        sizes = [part.stop - part.start for part in parts]
        assert sizes[0] == -(-numel // len(own))
        assert sizes == sorted(sizes, reverse=True)
        total = torch.stack([vector_of(rank, numel) for rank in own]).sum(0)
        part = peers.node.reduce_scatter(vector_of(peers.rank, numel))
        assert part.numel() == sizes[0]
        torch.testing.assert_close(part[: sizes[peers.local_rank]], total[peers.part(numel)])
        assert not part[sizes[peers.local_rank] :].any()
        torch.testing.assert_close(peers.gather_parts_in_node(part, numel), total)


def fuses_means(peers: Peers, nodes: Any) -> None:
    own = next(node for node in nodes if peers.rank in node)
    for ranks, who in ((range(peers.num_ranks), peers), (own, peers.node)):
        tensors = [vector_of(peers.rank, numel) for numel in (5, 0, 12)]
        means, tail = MeanWork(tensors, torch.ones(2), who).wait()
        assert tail.tolist() == [len(ranks)] * 2
        for mean, numel in zip(means, (5, 0, 12), strict=True):
            torch.testing.assert_close(mean, torch.stack([vector_of(rank, numel) for rank in ranks]).mean(0))
        parameters = [Parameter(torch.zeros(3)), Parameter(torch.zeros(2))]
        parameters[0].grad = torch.full((3,), float(peers.rank))
        assert average_gradients_(parameters, [1.0], who, torch.device("cpu")).tolist() == [len(ranks)]
        assert parameters[0].grad.tolist() == pytest.approx([sum(ranks) / len(ranks)] * 3)
        assert parameters[1].grad is None


def counts_bytes_by_the_formulas(peers: Peers, nodes: Any) -> None:
    senders, local, flat = len(nodes), peers.num_local_ranks, is_flat(nodes)
    part = -(-1001 // local) * 4

    def expect(intra: int, inter: int, operation: Callable[[], object]) -> None:
        before = traffic(peers.ledger)
        operation()
        measured = [now - then for now, then in zip(traffic(peers.ledger), before, strict=True)]
        assert measured == [intra + inter, 0 if flat else intra, 0 if flat else inter]

    tensor, message = torch.zeros(1001), torch.zeros(77, dtype=torch.uint8)
    if senders == 1:
        expect(all_reduce_bytes(4004, local), 0, lambda: peers.begin_all_reduce_(tensor).wait())
    else:
        in_node = 2 * reduce_scatter_bytes(part * local, local)
        expect(in_node, all_reduce_bytes(part, senders), lambda: peers.begin_all_reduce_(tensor).wait())
        # The narrow stage is that of two levels alone.
        inexact = all_reduce_bytes(part if flat else part // 2, senders)
        expect(in_node, inexact, lambda: peers.begin_all_reduce_(tensor, exact=False).wait())
    expect(all_reduce_bytes(4004, local), 0, lambda: peers.begin_all_reduce_in_node_(tensor).wait())
    between = all_gather_bytes(77, senders)
    expect(all_gather_bytes(senders * 77, local), between, lambda: gather(peers, message))
    expect(reduce_scatter_bytes(part * local, local), 0, lambda: peers.node.reduce_scatter(tensor))
    expect(all_gather_bytes(part, local), 0, lambda: peers.gather_parts_in_node(tensor[: part // 4], 1001))


def sums_the_next_bucket_meanwhile(peers: Peers, nodes: Any) -> None:
    """The second is summed in the node before the first has come back from the other nodes."""
    if not peers.is_two_level:
        return
    between, first = peers._between_in_turn, peers._node_first
    meanwhile, tensors = threading.Event(), [torch.full((9,), float(peers.rank)) for _ in range(2)]
    arrived: list[bool] = []

    def sum_between(tensor: Tensor, **options: Any) -> TensorWork:
        arrived.append(meanwhile.wait(20.0))
        return Collectives.begin_all_reduce_(between, tensor, **options)

    def sum_in_the_node(tensor: Tensor) -> Tensor:
        part = Collectives.reduce_scatter(first, tensor)
        meanwhile.set() if tensor is tensors[1] else None
        return part

    between.begin_all_reduce_, first.reduce_scatter = sum_between, sum_in_the_node  # type: ignore[method-assign]
    works = [peers.begin_all_reduce_(tensor) for tensor in tensors]
    assert all(work.wait().tolist() == [sum(range(peers.num_ranks))] * 9 for work in works)
    assert arrived == [True, True]
    del between.begin_all_reduce_, first.reduce_scatter


def assert_replicas_are_equal(tensor: Tensor) -> None:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tensor.tolist())
    assert everywhere == [tensor.tolist()] * len(everywhere)


CASES = [
    has_its_place,
    sums_over_all_ranks,
    reduces_and_broadcasts,
    sums_in_the_node,
    gathers_messages,
    begins_in_order,
    sums_the_next_bucket_meanwhile,
    divides_into_parts,
    fuses_means,
    counts_bytes_by_the_formulas,
]
NEED_PARTS = {
    gathers_messages,
    begins_in_order,
    sums_the_next_bucket_meanwhile,
    divides_into_parts,
    counts_bytes_by_the_formulas,
}


def run_cases() -> dict[tuple[str, str], str]:
    """Return what failed, and how, by topology and case; on those topologies that have as many ranks."""
    failed = {}
    for name, nodes in NODES.items():
        if sum(map(len, nodes)) != dist.get_world_size():
            continue
        for _ in range(2):  # groups are made once
            peers = make_peers("flat" if is_flat(nodes) else nodes, inter_dtype=torch.bfloat16)
        for case in CASES:
            if name != "leader" or case not in NEED_PARTS:
                try:
                    case(peers, nodes)
                except Exception:  # noqa: BLE001 - shown by the test of this case
                    failed[name, case.__name__] = traceback.format_exc()
                dist.barrier()
        peers.close()
    return failed


@functools.cache
def failures(num_ranks: int) -> list[dict[tuple[str, str], str]]:
    return run_ranks(run_cases, num_ranks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", NODES)
def test_peers(name: str, case: Callable[..., None]) -> None:
    if name == "leader" and case in NEED_PARTS:
        pytest.skip("there are no parts")
    by_rank = failures(sum(map(len, NODES[name])))
    shown = [failed[name, case.__name__] for failed in by_rank if (name, case.__name__) in failed]
    assert not shown, shown[0]


# Making them ---------------------------------------------------------------------------------------------------------


def test_one_rank_alone() -> None:
    """Without torch.distributed nothing is sent, and everything is its own result."""
    for choice in ("flat", "auto", 1, [[0]]):
        peers = make_peers(choice)
        assert (peers.num_ranks, peers.rank, peers.num_participants, peers.num_local_ranks) == (1, 0, 1, 1)
        assert not peers.is_two_level
        vector, message = torch.arange(5.0), torch.arange(5, dtype=torch.uint8)
        assert peers.begin_all_reduce_(vector).wait() is vector
        assert peers.begin_all_reduce_in_node_(vector).get_future().wait() is vector
        peers.all_reduce_(vector)
        peers.broadcast_(vector)
        assert vector.equal(torch.arange(5.0))
        assert gather(peers, message).tolist() == [[[0, 1, 2, 3, 4]]]
        assert peers.gather_parts_in_node(vector, 5).equal(vector)
        assert peers.part(5) == slice(0, 5)
        assert peers.between.all_to_all(message).equal(message)
        assert peers.node.all_gather(vector).equal(vector.view(1, 5))
        peers.check_parts()
        peers.close()
        assert traffic(peers.ledger) == (0, 0, 0)


class Nccl:
    """In place of ProcessGroupNCCL, in a world of gloo that says it is of NCCL."""

    class Options:
        def __init__(self) -> None:
            self.config, self._timeout = types.SimpleNamespace(max_ctas=0), None


def make_groups(topology: Any, is_hidden: bool) -> list[tuple[list[int], int | None, bool]]:
    """Return the ranks of the groups that are made, the limit of their thread blocks, and whether timeouts agree."""
    made, (new_group, get_backend) = [], (dist.new_group, dist.get_backend)

    def note(ranks: list[int], timeout: Any, pg_options: Any) -> Any:
        is_same = pg_options is None or pg_options._timeout == timeout
        made.append((ranks, None if pg_options is None else pg_options.config.max_ctas, is_same))
        return new_group(ranks, timeout=timeout)

    dist.new_group, dist.get_backend, dist.ProcessGroupNCCL = note, lambda *_: "nccl", Nccl
    try:
        make_peers(topology, is_hidden=is_hidden, timeout=timedelta(seconds=33))  # no other test has such groups
    finally:
        dist.new_group, dist.get_backend = new_group, get_backend
        del dist.ProcessGroupNCCL
    return made


@pytest.mark.skipif(dist.is_nccl_available(), reason="a stand-in would replace it")
def test_hidden_averages_leave_the_gpu_its_multiprocessors() -> None:
    """Between nodes alone; and a node of one rank needs no group."""
    nodes, leaders = [([0, 1], None, True)] * 3, [([0, 2], MAX_CTAS, True), ([1, 3], MAX_CTAS, True)]
    made = run_ranks(make_groups, WORLD, 2, True)[0]
    assert sorted(made) == sorted([*nodes, *[([2, 3], None, True)] * 3, *leaders * 2])
    assert {limit for _, limit, _ in run_ranks(make_groups, WORLD, 2, False)[0]} == {None}
    assert run_ranks(make_groups, WORLD, "flat", True)[0] == [([0, 1, 2, 3], MAX_CTAS, True)]
    assert run_ranks(make_groups, WORLD, "flat", False)[0] == []
    of_leaders = [ranks for ranks, _, _ in run_ranks(make_groups, WORLD, [[0, 1, 2], [3]], False)[0]]
    assert of_leaders == [[0, 1, 2]] * 3 + [[0, 3]]
    assert [ranks for ranks, _, _ in run_ranks(make_groups, WORLD, WORLD, False)[0]] == [[0, 1, 2, 3]] * 3


def be_refused() -> dict[str, str]:
    said = {}

    def refused(name: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ConfigurationError) as caught:
            make_peers(*args, **kwargs)
        said[name] = str(caught.value)

    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    refused("sharded", [[0, 1, 2], [3]], algorithm="sharded")
    refused("too small", [[0, 1], [2]])
    refused("group", 2, pair)
    with pytest.raises(DisagreementError) as caught:
        make_peers("flat" if rank == 0 else 2)
    said["disagreement"] = str(caught.value)
    for name, nodes in (("leader, unequal", [[0, 1, 2], [3]]), ("leader, equal", 2)):
        peers = make_peers(nodes, algorithm="leader")
        for needs_parts in (
            peers.check_parts,
            lambda peers=peers: peers.between,
            lambda peers=peers: gather(peers, message_of(0, 4)),
        ):
            with pytest.raises(ConfigurationError) as caught_parts:
                needs_parts()
            said[name] = str(caught_parts.value)
    if rank < 2:
        peers = make_peers("flat", pair)
        assert peers.topology is None
        assert (peers.num_ranks, peers.rank, peers.group) == (2, rank, pair)
        assert gather(peers, message_of(rank, 3)).equal(torch.stack([message_of(r, 3) for r in range(2)])[None])
    assert make_peers(1).topology is None  # a node for each rank
    assert make_peers(2, dist.group.WORLD).topology == Topology(((0, 1), (2, 3)))
    (found,) = {make_peers("auto").topology}
    assert found == Topology(((0, 1, 2, 3),))  # the tests' ranks say GROUP_RANK=0
    return said


def test_what_is_refused_and_why() -> None:
    for said in run_ranks(be_refused, WORLD):
        assert "node 0 has 3 (0, 1, 2), node 1 has 1 (3)" in said["sharded"]
        assert "has 3 ranks, the world 4" in said["too small"]
        assert "process group other than the world" in said["group"]
        assert "rank 0 has 'flat', rank 1 has 2" in said["disagreement"]
        assert "node 0 has 3 (0, 1, 2), node 1 has 1 (3)" in said["leader, unequal"]
        assert "nodes of 2, 2 ranks" in said["leader, equal"]
        assert "algorithm='sharded'" in said["leader, equal"]


def sum_through_leaders() -> tuple[int, int]:
    peers = make_peers([[0, 1], [2, 3]], algorithm="leader", inter_dtype=torch.bfloat16)
    for numel in NUMELS:
        peers.begin_all_reduce_(torch.ones(numel), exact=False).wait()
    return peers.ledger.intra_bytes, peers.ledger.inter_bytes


def test_only_leaders_send_between_nodes() -> None:
    by_rank = run_ranks(sum_through_leaders, WORLD)
    inter = sum(all_reduce_bytes(2 * numel, 2) for numel in NUMELS)
    assert by_rank == [(4 * sum(NUMELS), inter if rank % 2 == 0 else 0) for rank in range(WORLD)]


def on_one_node() -> None:
    ledger = TrafficLedger()
    peers = make_peers(WORLD, ledger=ledger)
    assert (peers.num_ranks, peers.num_participants, peers.is_two_level) == (WORLD, 1, False)
    assert (peers.local_rank, peers.num_local_ranks, peers.part(10)) == (0, 1, slice(0, 10))
    assert (peers.node.num_ranks, peers.between.num_ranks) == (WORLD, 1)
    for numel in NUMELS:
        tensor = vector_of(peers.rank, numel)
        expected = torch.stack([vector_of(rank, numel) for rank in range(WORLD)]).sum(0)
        whole = tensor.clone()
        assert peers.gather_parts_in_node(whole, numel).equal(whole)
        peers.all_reduce_(tensor)
        torch.testing.assert_close(tensor, expected)
    assert ledger.inter_bytes == 0


def test_one_node_has_one_participant_whose_part_is_the_whole() -> None:
    """There is nobody to exchange parts with: each rank has the whole, and only sums are communicated."""
    run_ranks(on_one_node, WORLD)
