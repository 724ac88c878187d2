"""All-reduce on two levels: inside the nodes, where it is fast, and between them, where it is not."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.core.topology import Topology
from lightning_lowbw.core.volume import all_reduce_bytes, reduce_scatter_bytes

Algorithm = Literal["sharded", "leader"]
# What tells nodes apart that share a host name (containers, the lab), in the words of torchrun, Lightning and SLURM.
NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")

_groups: dict[tuple[object, ...], dist.ProcessGroup | None] = {}


def discover() -> Topology:
    """Return which ranks share a node, by host name and by the launcher's number of the node.

    Collective: all ranks, blocking.
    """
    number = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), "")
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, f"{socket.gethostname()}/{number}")
    return Topology.of_hosts(hosts)


@dataclass(frozen=True)
class Hierarchy:
    """The process groups of a topology, as seen from this rank.

    Args:
        topology: of the world.
        algorithm: "sharded": reduce-scatter inside the node, all-reduce of each shard among the ranks with one place
            in all nodes, all-gather inside the node; every rank of a node uses its lane. "leader": reduce to the first
            rank of the node, all-reduce among these, broadcast inside the node.
        inter_dtype: what the stage between nodes sends; None is the tensor's own dtype.
        ledger: where the traffic is written down, by level.

    Raises:
        ConfigurationError: the nodes are of different sizes, and the algorithm is "sharded".

    Collective: all ranks, at the first use of a topology: groups are made once, in one order.
    """

    topology: Topology
    algorithm: Algorithm
    inter_dtype: torch.dtype | None
    ledger: TrafficLedger

    def __post_init__(self) -> None:
        for node in self.topology.nodes:
            _group(node)
        if self.algorithm == "leader":
            _group(self.topology.leaders)
            return
        for place in range(self.topology.ranks_per_node):
            _group(self.topology.peers(place))

    def all_reduce_(self, buffer: Tensor) -> None:
        """Sum a flat tensor over all ranks, in place; all ranks get the same bits.

        Collective: all ranks, in the same order of calls; blocking (on CUDA, for the stream).
        """
        staged = buffer.cpu() if buffer.is_cuda and dist.get_backend() == "gloo" else buffer
        if self.algorithm == "leader":
            self._through_leaders(staged)
        else:
            self._in_shards(staged)
        if staged is not buffer:  # gloo gathers tensors of the CPU only
            buffer.copy_(staged)

    def _in_shards(self, buffer: Tensor) -> None:
        rank = dist.get_rank()
        node = self.topology.nodes[self.topology.node_of(rank)]
        place, intra = node.index(rank), _group(node)
        size = -(-buffer.numel() // len(node))
        padded = buffer
        if size * len(node) != buffer.numel():
            padded = buffer.new_zeros(size * len(node))
            padded[: buffer.numel()] = buffer
        shard = _reduce_scatter(padded, len(node), intra)
        self._between(shard, _group(self.topology.peers(place)), self.topology.num_nodes)
        dist.all_gather(list(padded.view(len(node), size)), shard, group=intra)
        self.ledger.record(2 * reduce_scatter_bytes(padded.nbytes, len(node)), "intra")
        if padded is not buffer:
            buffer.copy_(padded[: buffer.numel()])

    def _through_leaders(self, buffer: Tensor) -> None:
        rank = dist.get_rank()
        node = self.topology.nodes[self.topology.node_of(rank)]
        intra = _group(node)
        if len(node) > 1:
            dist.reduce(buffer, dst=node[0], group=intra)
        if rank == node[0]:
            self._between(buffer, _group(self.topology.leaders), self.topology.num_nodes)
        if len(node) > 1:
            dist.broadcast(buffer, src=node[0], group=intra)
            self.ledger.record(buffer.nbytes, "intra")

    def _between(self, tensor: Tensor, group: dist.ProcessGroup | None, num_nodes: int) -> None:
        wire = tensor if self.inter_dtype is None else tensor.to(self.inter_dtype)
        dist.all_reduce(wire, group=group)
        self.ledger.record(all_reduce_bytes(wire.nbytes, num_nodes), "inter")
        if wire is not tensor:
            tensor.copy_(wire)


def _reduce_scatter(tensor: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of the sum over a node."""
    if dist.get_backend(group) == "gloo":  # which has none in older releases
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group)
        return received.view(num_ranks, -1).sum(0)
    shard = tensor.new_empty(tensor.numel() // num_ranks)
    dist.reduce_scatter_tensor(shard, tensor, group=group)
    return shard


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the group of some ranks, made at the first call; all ranks call this in one order."""
    key = (dist.group.WORLD, ranks)  # a world that was made anew has groups of its own
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks))
    return _groups[key]
