"""Flat peers: every rank is a node of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.ops.memory import allocate
from lightning_lowbw.where.collectives import Collectives, Reduction, TensorWork
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.volume import all_reduce_bytes


class FlatPeers:
    """All ranks of a group alike: each is a participant of its own. See `where.peers.Peers`.

    Args:
        group: the process group; None is the world, or one rank where torch.distributed is not initialised.
        ledger: where the traffic is written down.
        nodes: where the model is sharded inside nodes: the ranks of each, of which one is a peer.
    """

    topology = None
    local_rank, num_local_ranks, is_two_level = 0, 1, False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ledger: TrafficLedger | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.nodes = nodes
        self.ledger = TrafficLedger() if ledger is None else ledger
        self.between = Collectives(group, self.ledger)
        self.node = Collectives(group, self.ledger, is_alone=True)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.between.group

    @property
    def num_ranks(self) -> int:
        return self.between.num_ranks

    @property
    def rank(self) -> int:
        return self.between.rank

    @property
    def num_participants(self) -> int:
        return self.between.num_ranks

    def check_parts(self) -> None:
        pass

    def part(self, numel: int, local_rank: int | None = None) -> slice:
        return slice(0, numel)

    def count_dense(self, nbytes: int) -> None:
        self.ledger.dense_bytes += all_reduce_bytes(nbytes, self.num_ranks)

    def begin_all_reduce_(self, tensor: Tensor, *, exact: bool = True) -> Reduction:
        return self.between.begin_all_reduce_(tensor)

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        self.between.all_reduce_(tensor, op)

    def broadcast_(self, tensor: Tensor) -> None:
        self.between.broadcast_(tensor)

    def begin_all_reduce_in_node_(self, tensor: Tensor) -> Reduction:
        return Reduction(tensor)

    def begin_gather(self, message: Tensor) -> TensorWork:
        out = allocate((1, self.num_ranks, message.numel()), message.dtype, message.device)
        return self.between.begin_all_gather(message, out)

    def reduce_scatter_in_node(self, vector: Tensor) -> Tensor:
        return vector

    def gather_parts_in_node(self, part: Tensor, numel: int) -> Tensor:
        return part[:numel]

    def close(self) -> None:
        pass
