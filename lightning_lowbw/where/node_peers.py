"""Peers on two levels: a fast network inside nodes, a slow one between them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.memory import allocate
from lightning_lowbw.where.collectives import Collectives, Reduction, TensorWork
from lightning_lowbw.where.groups import group_of, is_gloo
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.side_queue import SideQueue
from lightning_lowbw.where.topology import Topology, part_of
from lightning_lowbw.where.volume import all_reduce_bytes

Algorithm = Literal["sharded", "leader"]


class NodePeers:
    """The ranks of the world, on nodes: a node is one participant. See `where.peers.Peers`.

    Operations of several collectives run in order on one thread with gloo, on one stream with NCCL. They use their own
    groups, because collectives on `node` and `between` may be issued at any time.

    Args:
        topology: of the world.
        algorithm: how tensors are summed over all ranks. "sharded": every rank of a node exchanges its part of them
            with the ranks that have its local rank in the other nodes. "leader": the first rank of each node exchanges
            all of them, for nodes of different sizes; there are no parts then.
        inter_dtype: what an inexact all-reduce sends between nodes of wider tensors; None is the tensor's own dtype.
        ledger: of the traffic, by level.
        timeout: of the groups that are made here; None is that of the world.
        purpose: peers that are in use at the same time need groups of their own.

    Attributes:
        node: the collectives of this node's ranks.
        local_rank: of this rank in its node.
        num_local_ranks: of this node.

    Raises:
        ConfigurationError: on all ranks; the nodes are of different sizes, and the algorithm is "sharded".

    Collective: all ranks, at the first use of a topology: groups are made once, in one order.
    """

    group = nodes = None

    def __init__(
        self,
        topology: Topology,
        *,
        algorithm: Algorithm,
        inter_dtype: torch.dtype | None,
        ledger: TrafficLedger,
        timeout: timedelta | None,
        purpose: str,
    ) -> None:
        if algorithm == "sharded":
            _ = topology.ranks_per_node  # raises where they differ
        self.topology, self.algorithm, self.inter_dtype, self.ledger = topology, algorithm, inter_dtype, ledger
        self.rank = dist.get_rank()
        self._own_node = topology.nodes[topology.node_of(self.rank)]
        # On a single node nothing is exchanged between nodes, so that there are no parts.
        self.local_rank = topology.local_rank_of(self.rank) if topology.num_nodes > 1 else 0
        self.num_local_ranks = len(self._own_node) if topology.num_nodes > 1 else 1
        self._queue = SideQueue(purpose)
        # What all ranks do together crosses the slow network, where there is one.
        self._world = Collectives(None, ledger, "inter" if self.is_two_level else "intra")
        queued = f"{purpose}, in turn"
        for ranks in topology.nodes:
            group_of(ranks, purpose, timeout), group_of(ranks, queued, timeout)
        self.node = Collectives(group_of(self._own_node, purpose, timeout), ledger, "intra")
        self._parts = self.node if self.is_two_level else Collectives(None, ledger, is_alone=True)
        self._queued_node = Collectives(group_of(self._own_node, queued, timeout), ledger, "intra")
        self._between: Collectives | None = None
        if algorithm == "leader":
            self._queued_between = Collectives(group_of(topology.leaders, queued, timeout), ledger, "inter")
        else:
            for local_rank in range(topology.ranks_per_node):
                peers = topology.peers(local_rank)
                group_of(peers, purpose, timeout), group_of(peers, queued, timeout)
            peers = topology.peers(topology.local_rank_of(self.rank))
            self._between = Collectives(group_of(peers, purpose, timeout), ledger, "inter")
            self._queued_between = Collectives(group_of(peers, queued, timeout), ledger, "inter")

    @property
    def num_ranks(self) -> int:
        return self.topology.world_size

    @property
    def num_participants(self) -> int:
        return self.topology.num_nodes

    @property
    def is_two_level(self) -> bool:
        return self.topology.num_nodes > 1

    @property
    def between(self) -> Collectives:
        self.check_parts()
        assert self._between is not None
        return self._between

    def check_parts(self) -> None:
        if self._between is None:
            _ = self.topology.ranks_per_node  # raises where they differ
            sizes = ", ".join(str(len(node)) for node in self.topology.nodes)
            raise ConfigurationError(
                f"algorithm='leader' on nodes of {sizes} ranks: only the first rank of each node exchanges something, "
                "and this method needs all of them, each for its part. Take algorithm='sharded'."
            )

    def part(self, numel: int, local_rank: int | None = None) -> slice:
        return part_of(numel, self.local_rank if local_rank is None else local_rank, self.num_local_ranks)

    def count_dense(self, nbytes: int) -> None:
        self.ledger.dense_bytes += all_reduce_bytes(nbytes, self.num_ranks)
        if self.algorithm == "leader":
            part = nbytes if self.local_rank == 0 else 0
        else:
            part = -(-nbytes // self.num_local_ranks)
        self.ledger.dense_inter_bytes += all_reduce_bytes(part, self.num_participants)

    def begin_all_reduce_(self, tensor: Tensor, *, exact: bool = True) -> Reduction:
        if self.num_participants == 1:
            return self.node.begin_all_reduce_(tensor)
        inter_dtype = None if exact else self.inter_dtype
        stages = self._through_leaders_ if self.algorithm == "leader" else self._in_parts_
        return Reduction(tensor, self._begin(lambda: stages(tensor, inter_dtype), tensor))

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if op != dist.ReduceOp.SUM:
            self._world.all_reduce_(tensor, op)
            return
        with self.ledger.waiting(tensor.device):
            self.begin_all_reduce_(tensor).wait()

    def broadcast_(self, tensor: Tensor) -> None:
        self._world.broadcast_(tensor)

    def begin_all_reduce_in_node_(self, tensor: Tensor) -> Reduction:
        return Reduction(tensor, self._begin(lambda: self._queued_node.begin_all_reduce_(tensor).wait(), tensor))

    def begin_gather(self, message: Tensor) -> TensorWork:
        self.check_parts()
        shape = self.num_local_ranks, self.num_participants, message.numel()
        out = allocate(shape, message.dtype, message.device)
        return self._begin(lambda: self._gather_into(out, message), out, message)

    def reduce_scatter_in_node(self, vector: Tensor) -> Tensor:
        with self.ledger.waiting(vector.device):
            return self._parts.reduce_scatter(vector)

    def gather_parts_in_node(self, part: Tensor, numel: int) -> Tensor:
        with self.ledger.waiting(part.device):
            return self._parts.gather_parts(part, numel)

    def close(self) -> None:
        self._queue.close()

    def _begin(self, collectives: Callable[[], object], result: Tensor, *reads: Tensor) -> torch.futures.Future[Tensor]:
        return self._queue.begin(collectives, result, reads, in_thread=is_gloo(None, result.device))

    def _in_parts_(self, tensor: Tensor, inter_dtype: torch.dtype | None) -> None:
        part = self._queued_node.reduce_scatter(tensor)
        self._sum_between_(part, inter_dtype)
        tensor.copy_(self._queued_node.gather_parts(part, tensor.numel()))

    def _through_leaders_(self, tensor: Tensor, inter_dtype: torch.dtype | None) -> None:
        leader, group = self._own_node[0], self._queued_node.group
        staged = tensor.cpu() if is_gloo(group, tensor.device) else tensor  # whose reduce takes the CPU's only
        if self.num_local_ranks > 1:
            dist.reduce(staged, dst=leader, group=group)
        if self.local_rank == 0:
            self._sum_between_(staged, inter_dtype)
        if self.num_local_ranks > 1:
            dist.broadcast(staged, src=leader, group=group)
            self.ledger.record(tensor.nbytes, "intra")
        if staged is not tensor:
            tensor.copy_(staged)

    def _sum_between_(self, tensor: Tensor, inter_dtype: torch.dtype | None) -> None:
        # A float16 goes as it is: rounded to bfloat16, 65504 becomes 65536, which is an infinity in float16.
        is_narrower = inter_dtype is not None and inter_dtype.itemsize < tensor.itemsize
        wire = tensor.to(inter_dtype) if is_narrower else tensor
        self._queued_between.begin_all_reduce_(wire).wait()
        if wire is not tensor:
            tensor.copy_(wire)

    def _gather_into(self, out: Tensor, message: Tensor) -> None:
        received = self._queued_between.begin_all_gather(message).wait()
        # A group has its ranks in ascending order; nodes need not be in the same order at all local ranks.
        peers = self.topology.peers(self.local_rank)
        if list(peers) != sorted(peers):
            rows = received.unbind(0)
            received = torch.stack([rows[sorted(peers).index(rank)] for rank in peers])
        self._queued_node.begin_all_gather(received.view(-1), out).wait()
