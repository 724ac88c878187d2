"""Nodes inside of which a model is sharded: the mesh of this rank's node, and its peers in the other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.where.collectives import Held, group_of
from lightning_lowbw.where.topology import Topology

NAMES = ("data_parallel", "tensor_parallel")  # as in Lightning's ModelParallelStrategy


@dataclass(frozen=True)
class NodeMesh:
    """The mesh of a rank's node, and the rank's coordinate in it.

    Attributes:
        topology: which ranks share a node, each of which holds the whole model.
        mesh: of this rank's node: ("data_parallel", "tensor_parallel").
        coordinate: this rank's local rank, in the order of the mesh.
    """

    topology: Topology
    mesh: DeviceMesh
    coordinate: int
    _node: Held
    _peers: Held

    @property
    def node(self) -> dist.ProcessGroup | None:
        """The process group of the node."""
        return self._node()

    @property
    def peers(self) -> dist.ProcessGroup | None:
        """That of the ranks with this coordinate in all nodes, which hold the same shards."""
        return self._peers()

    @property
    def sizes(self) -> tuple[int, int]:
        """Ranks that share data-parallel shards, and those that share tensor-parallel ones."""
        data, tensor = self.mesh.mesh.shape
        return data, tensor

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        return [list(node) for node in self.topology.nodes]

    def sampler_arguments(self, rank: int) -> dict[str, int]:
        """Return how many different batches there are at a time, and which one is that of a rank."""
        data, tensor = self.sizes
        number = self.topology.node_of(rank) * data + self.coordinate // tensor
        return {"num_replicas": self.topology.num_nodes * data, "rank": number}


def make_node_mesh(
    topology: Topology, rank: int, device_type: str, tensor_parallel_size: int, timeout: timedelta | None
) -> NodeMesh:
    """Make the meshes of all nodes, and the process groups between them.

    Collective: all ranks, blocking. Each mesh is one of its own, and not a part of one with a dimension for nodes:
    modules take ``mesh["data_parallel"]`` of it, and not every torch can slice what is a slice already. It is made of
    groups that are there: those that `DeviceMesh` makes itself have torch's own timeout, whatever the user has said.

    Raises:
        ConfigurationError: on all ranks; the nodes are of different sizes, or not divisible.
    """
    if not topology.has_equal_nodes:
        sizes = ", ".join(f"node {index} has {len(node)}" for index, node in enumerate(topology.nodes))
        raise ConfigurationError(
            f"The nodes have different numbers of ranks ({sizes}): their shards would be of different sizes, and each "
            "rank exchanges its shard with one of the same size in every other node. Start as many ranks on each."
        )
    if topology.ranks_per_node % tensor_parallel_size:
        raise ConfigurationError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the {topology.ranks_per_node} ranks of a "
            "node: tensor parallelism is inside nodes. Give a divisor."
        )
    own: list[dist.ProcessGroup] = []
    for ranks in topology.nodes:
        table = torch.tensor(ranks, dtype=torch.int).view(-1, tensor_parallel_size)
        for name, lines in zip(NAMES, (table.t().tolist(), table.tolist()), strict=True):
            groups = {tuple(line): group_of(tuple(line), name, timeout) for line in lines}
            own += [group for line, group in groups.items() if rank in line and group is not None]
    mesh = DeviceMesh.from_group(
        own,
        device_type,
        torch.tensor(topology.nodes[topology.node_of(rank)], dtype=torch.int).view(-1, tensor_parallel_size),
        mesh_dim_names=NAMES,
    )
    coordinate = topology.local_rank_of(rank)
    nodes = [group_of(ranks, "shards of a node", timeout) for ranks in topology.nodes]
    between = [group_of(topology.peers(each), "equal shards", timeout) for each in range(topology.ranks_per_node)]
    return NodeMesh(topology, mesh, coordinate, Held(nodes[topology.node_of(rank)]), Held(between[coordinate]))
