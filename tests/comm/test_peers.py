"""One interface for flat ranks and for nodes: the same sums, messages and parts."""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, Topology
from lightning_lowbw.comm.collectives import MAX_CTAS, Collectives, TensorWork, all_reduce_bytes
from lightning_lowbw.comm.peers import MeanWork, Peers, average_gradients_, make_peers
from lightning_lowbw.comm.topology import Where
from tests.ranks import on_ranks
from tests.sync.problem import same_on_all

WORLD = 4
NODES: dict[str, Any] = {
    "flat": ((0,), (1,), (2,), (3,)),
    "leader": ((0, 1, 2), (3,)),
    "three nodes": ((1, 3), (2, 4), (0, 5)),  # the local ranks 0 are 1, 2 and 0
}
NUMELS = (0, 1, 5, 1001)


def vector_of(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * numel + rank))


def message_of(rank: int, nbytes: int, call: int = 0) -> Tensor:
    return (torch.arange(nbytes) * 7 + 31 * rank + 101 * call).to(torch.uint8)


def gather(peers: Peers, message: Tensor) -> Tensor:
    return peers.begin_gather(message).wait()


def is_flat(nodes: Any) -> bool:
    return all(len(node) == 1 for node in nodes)


# Cases: each runs on every rank, for every topology of NODES ---------------------------------------------------------


def sums_over_all_ranks(peers: Peers, nodes: Any) -> None:
    for numel in NUMELS:
        for dtype in (None, torch.bfloat16):
            tensor = vector_of(peers.rank, numel)
            work = peers.begin_all_reduce_(tensor, dtype=dtype)
            expected = torch.stack([vector_of(rank, numel).double() for rank in range(peers.num_ranks)]).sum(0)
            assert work.get_future().wait() is tensor or numel == 0
            assert work.wait() is tensor
            tolerance = 1e-5 if dtype is None else 2.0**-5  # between nodes in bfloat16
            torch.testing.assert_close(tensor.double(), expected, rtol=tolerance, atol=tolerance)
            same_on_all(tensor.tolist())


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
        sums = average_gradients_(parameters, who, torch.device("cpu"), lambda used: torch.tensor([*used, 1.0]))
        assert sums.tolist() == [len(ranks), 0.0, len(ranks)]
        assert parameters[0].grad.tolist() == pytest.approx([sum(ranks) / len(ranks)] * 3)
        assert parameters[1].grad is None


def sums_the_next_bucket_meanwhile(peers: Peers, nodes: Any) -> None:
    """The second is summed in the node before the first has come back from the other nodes."""
    if not peers.is_two_level or peers.is_summed_flat:
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


CASES = [sums_over_all_ranks, reduces_and_broadcasts, sums_in_the_node, fuses_means]
CASES_OF_PARTS = [begins_in_order, sums_the_next_bucket_meanwhile, divides_into_parts]


@pytest.mark.parametrize("num_ranks", [4, 6])
@on_ranks()
def test_peers(num_ranks: int) -> None:
    for name, nodes in NODES.items():
        if sum(map(len, nodes)) != num_ranks:
            continue
        for _ in range(2):  # groups are made once
            peers = make_peers(Where(topology="flat" if is_flat(nodes) else nodes))
        for peers.is_summed_flat in (False, True):
            for case in [*CASES, *(CASES_OF_PARTS if name != "leader" else [])]:
                case(peers, nodes)
                dist.barrier()
        peers.close()


@on_ranks(4)
def test_on_two_levels_a_sum_may_be_ddp_s() -> None:
    peers = make_peers(Where(topology=2, algorithm="flat"))
    assert peers.is_two_level
    assert peers.is_summed_flat
    tensor = vector_of(peers.rank, 1000)
    of_ddp = tensor.clone()
    dist.all_reduce(of_ddp)
    assert peers.begin_all_reduce_(tensor).wait().equal(of_ddp)
    assert peers.ledger.sent_bytes == peers.ledger.inter_bytes == all_reduce_bytes(tensor.nbytes, 4)
    peers.close()


# Making them ---------------------------------------------------------------------------------------------------------


class Nccl:
    """In place of ProcessGroupNCCL, in a world of gloo that says it is of NCCL."""

    class Options:
        def __init__(self) -> None:
            self.config, self._timeout = types.SimpleNamespace(max_ctas=0), None


@pytest.mark.skipif(dist.is_nccl_available(), reason="a stand-in would replace it")
@on_ranks(WORLD)
def test_hidden_averages_leave_the_gpu_its_multiprocessors() -> None:
    """Between nodes alone: these groups have a limit of their thread blocks."""
    made, new_group = list[tuple[list[int], int | None]](), dist.new_group

    def note(ranks: list[int], timeout: Any, pg_options: Any) -> Any:
        assert pg_options is None or pg_options._timeout == timeout
        made.append((ranks, None if pg_options is None else pg_options.config.max_ctas))
        return new_group(ranks, timeout=timeout)

    limited, only_here = [([0, 2], MAX_CTAS), ([1, 3], MAX_CTAS)], timedelta(seconds=33)  # so the groups are new
    nodes = [([0, 1], None), ([2, 3], None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", note)
        patch.setattr(dist, "get_backend", lambda *_: "nccl")
        patch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
        for topology, is_hidden, expected in (
            (2, True, sorted([*nodes * 3, *limited * 2], key=str)),
            ("flat", True, [([0, 1, 2, 3], MAX_CTAS)]),
            ("flat", False, []),
        ):
            made.clear()
            make_peers(Where(topology=topology), is_hidden=is_hidden, timeout=only_here)
            assert sorted(made, key=str) == expected


@on_ranks(WORLD)
def test_what_is_refused_and_why() -> None:
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    apart, unequal = [[0, 1, 2], [3]], "node 0 has 3 (0, 1, 2), node 1 has 1 (3)"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: make_peers(Where(topology=apart, algorithm="sharded")), unequal),
        (lambda: make_peers(Where(topology=2), pair), "process group other than the world"),
        (lambda: make_peers(Where(topology="flat" if rank == 0 else 2)), "rank 0 has 'flat', rank 1 has 2"),
        (make_peers(Where(topology=apart)).check_parts, unequal),
    ]
    for call, words in calls:
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            call()
    if rank < 2:
        peers = make_peers(Where(), pair)
        assert (peers.topology.is_flat, peers.num_ranks, peers.rank, peers.group) == (True, 2, rank, pair)
        assert gather(peers, message_of(rank, 3)).equal(torch.stack([message_of(r, 3) for r in range(2)])[None])
    assert make_peers(Where(topology=1)).topology.is_flat  # a node for each rank
    assert make_peers(Where(topology=2), dist.group.WORLD).topology == Topology(((0, 1), (2, 3)))
    on_one_node = make_peers(Where(topology=WORLD))
    on_one_node.all_reduce_(torch.ones(3))
    on_one_node.broadcast_(torch.ones(3))
    assert on_one_node.ledger.inter_bytes == 0 < on_one_node.ledger.intra_bytes
    on_one_node.close()
