"""Topology: which ranks share a node, given by the user or found by the launcher's variables and the host names."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowbw.arguments import is_count
from lightning_lowbw.comm.agreement import failing_together, gather
from lightning_lowbw.comm.collectives import WeakGroup, group_of
from lightning_lowbw.errors import ConfigurationError

Algorithm = Literal["sharded", "leader", "flat"]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux: an identifier of a machine and of its last boot


@dataclass(frozen=True)
class Topology:
    """The ranks of each node, in the order of the nodes.

    Ranks need not be contiguous, and nodes need not be of one size; methods that require this raise an error.

    Args:
        nodes: the ranks of each node, in any order. The lowest rank of a node is its leader.

    Raises:
        ConfigurationError: a rank is missing or named twice, or a node is empty.

    Examples:
        >>> topology = Topology.blocks(world_size=6, ranks_per_node=2)
        >>> topology.nodes, topology.node_of(3), topology.local_rank_of(3)
        (((0, 1), (2, 3), (4, 5)), 1, 1)
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        nodes: object = self.nodes
        is_list = isinstance(nodes, Sequence) and all(isinstance(node, Sequence) for node in nodes)
        if not is_list or not all(is_count(rank, 0) for node in self.nodes for rank in node):
            raise ConfigurationError(f"topology {nodes!r}: give the ranks of each node, as in ((0, 1), (2, 3)).")
        object.__setattr__(self, "nodes", tuple(tuple(sorted(node)) for node in self.nodes))
        ranks = sorted(rank for node in self.nodes for rank in node)
        if ranks != list(range(len(ranks))) or not all(self.nodes) or not ranks:
            raise ConfigurationError(
                f"topology {self.nodes}: each rank from 0 on belongs to exactly one node, and no node is empty."
            )

    @classmethod
    def blocks(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Return nodes of `ranks_per_node` neighbouring ranks.

        Raises:
            ConfigurationError: the world is not divisible, or there are no such numbers of ranks.
        """
        for name, value in (("world_size", world_size), ("ranks_per_node", ranks_per_node)):
            if not is_count(value):
                raise ConfigurationError(f"{name}={value!r}: give an integer >= 1.")
        if world_size % ranks_per_node:
            raise ConfigurationError(
                f"{world_size} ranks cannot be divided into nodes of {ranks_per_node} ranks. Give a divisor of "
                f"{world_size}, or the ranks of each node."
            )
        # As launchers count ranks: node by node.
        starts = range(0, world_size, ranks_per_node)
        return cls(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

    @property
    def is_flat(self) -> bool:
        """Whether each node has one rank, so that there is one network only."""
        return self.num_nodes == self.world_size

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each node."""
        return tuple(node[0] for node in self.nodes)

    @property
    def has_equal_nodes(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def ranks_per_node(self) -> int:
        """The size of each node.

        Raises:
            ConfigurationError: the sizes differ; the message names them.
        """
        if not self.has_equal_nodes:
            sizes = (f"{len(node)} ({', '.join(map(str, node))})" for node in self.nodes)
            shown = ", ".join(f"node {index} has {size}" for index, size in enumerate(sizes))
            raise ConfigurationError(
                f"The nodes have different numbers of ranks ({shown}). Only local SGD of whole weights (no "
                "compression, no shards) and HierarchicalStrategy(algorithm='leader' or 'flat') support that. Start "
                "the same number of ranks on each node."
            )
        return len(self.nodes[0])

    def node_of(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return next(index for index, node in enumerate(self.nodes) if rank in node)

    def local_rank_of(self, rank: int) -> int:
        """Return the local rank of a rank: its index among the ranks of its node, in ascending order."""
        return self.nodes[self.node_of(rank)].index(rank)

    def peers(self, local_rank: int) -> tuple[int, ...]:
        """Return the ranks with one local rank in all nodes, which exchange a part. Needs nodes of one size."""
        assert local_rank < self.ranks_per_node
        return tuple(node[local_rank] for node in self.nodes)


# "flat", "auto", ranks per node, the ranks of each node, or these as a value
TopologyChoice = int | str | Sequence[Sequence[int]] | Topology
# Variables of torchrun, Lightning and SLURM that distinguish nodes with the same host name (containers, the lab).
NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


def check_choice(choice: object) -> Topology | None:
    """Return the topology that a choice spells out; None for "flat", "auto" and numbers, which need a world.

    Raises:
        ConfigurationError: it is none of `TopologyChoice`.
    """
    if isinstance(choice, Topology):
        return choice
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return Topology(tuple(choice))
    if is_count(choice) or choice in ("flat", "auto"):
        return None
    raise ConfigurationError(
        f"topology={choice!r}: give 'flat', 'auto' (by the launcher and the host names), an integer >= 1 (ranks "
        "per node), the ranks of each node such as [[0, 1], [2, 3]], or a Topology."
    )


def resolve(choice: TopologyChoice, world_size: int) -> Topology | None:
    """Return the topology of the world; None if flat.

    Collective: all ranks, blocking; no communication if torch.distributed is not initialised.

    Raises:
        ConfigurationError: on all ranks; the choice does not fit the world.
    """
    with failing_together():  # else one rank would raise alone, and the other ranks would wait for it
        topology = check_choice(choice)
        if isinstance(choice, int):
            topology = Topology.blocks(world_size, choice)
        if topology is not None and topology.world_size != world_size:
            raise ConfigurationError(
                f"The topology {topology} has {topology.world_size} ranks, the world {world_size}. Give the nodes of "
                f"ranks 0 to {world_size - 1}, or topology='auto', by the launcher and the host names."
            )
    return discover() if choice == "auto" else topology


def discover() -> Topology:
    """Return which ranks share a node, by host name, by the launcher's number of the node and by the machine's boot.

    Cloned machines, and containers, may share a host name.

    Collective: all ranks, blocking; no communication if torch.distributed is not initialised: there is one rank then.
    """
    number = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), "")
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    # Two machines may share a name (cloned images) or a number (if every node has its own launcher).
    host = f"{socket.gethostname()}/{number}/{boot}"
    by_host: dict[str, list[int]] = {}  # in the order of their first rank, as the launcher counts nodes
    for rank, its_host in enumerate(gather(host, "host")):
        by_host.setdefault(its_host, []).append(rank)
    return Topology(tuple(map(tuple, by_host.values())))


# Models that are sharded over the ranks of each node ------------------------------------------------------------------

DIMENSIONS = ("data_parallel", "tensor_parallel")  # as in Lightning's ModelParallelStrategy


@dataclass(frozen=True)
class NodeMesh:
    """The mesh and group of a node, and the group of the ranks that hold the same shards in all nodes.

    Attributes:
        topology: which ranks share a node. Each node holds the whole model.
        mesh: the mesh of this rank's node. Its second dimension has size 1, as in Lightning's ModelParallelStrategy.
        coordinate: which shards this rank holds; equal to its local rank.
        node: returns the process group of the node.
        peers: returns the process group of the ranks with this coordinate in all nodes.
    """

    topology: Topology
    mesh: DeviceMesh
    coordinate: int
    node: WeakGroup
    peers: WeakGroup


def make_node_mesh(topology: Topology, rank: int, device_type: str, timeout: timedelta | None) -> NodeMesh:
    """Make the meshes of all nodes, and the process groups between them.

    Collective: all ranks, blocking. A mesh is made from existing groups: groups that `DeviceMesh` makes itself have
    torch's default timeout, not the user's.

    Raises:
        ConfigurationError: on all ranks; the nodes are of different sizes.
    """
    ranks_per_node = topology.ranks_per_node  # raises if the sizes differ
    node, coordinate = topology.node_of(rank), topology.local_rank_of(rank)
    # `new_group` is collective: all ranks make all groups, in one order, also groups that do not contain them.
    nodes = [group_of(ranks, DIMENSIONS[0], timeout) for ranks in topology.nodes]
    alone = [group_of((rank,), DIMENSIONS[1], timeout) for rank in range(topology.world_size)]
    between = [group_of(topology.peers(number), "equal shards", timeout) for number in range(ranks_per_node)]
    mesh = DeviceMesh.from_group(
        [group for group in (nodes[node], alone[rank]) if group is not None],
        device_type,
        torch.tensor(topology.nodes[node], dtype=torch.int).view(-1, 1),
        mesh_dim_names=DIMENSIONS,
    )
    # Weak references: a group that a strategy keeps alive could abort the interpreter at exit, see `comm.collectives`.
    return NodeMesh(topology, mesh, coordinate, WeakGroup(nodes[node]), WeakGroup(between[coordinate]))


@dataclass(frozen=True, kw_only=True)
class Where:
    """The topology, and how dense gradients are summed.

    Args:
        topology: "flat" or, for two levels, "auto" (by the launcher and the host names), a number of ranks per node,
            the ranks of each node, or a `Topology`. Inside a node everything is summed densely; the payload is sent
            between nodes.
        algorithm: of dense all-reduces on two levels: "sharded" (reduce-scatter, all-reduce of the parts, all-gather),
            "leader" (reduce, all-reduce among the first ranks, broadcast), or "flat" (one all-reduce over all ranks, as
            DDP's). None chooses "sharded" if all nodes have the same number of ranks, else "leader".
        inter_dtype: "float32", or "bfloat16" for gradients of a wider type in dense steps: between nodes, or between
            all ranks if flat, as DDP with torch's `bf16_compress_hook`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    topology: TopologyChoice = "flat"
    algorithm: Algorithm | None = None
    inter_dtype: str = "float32"

    def __post_init__(self) -> None:
        topology = check_choice(self.topology)
        if topology is not None:  # one value for lists, tuples and a `Topology`
            object.__setattr__(self, "topology", topology)
        if self.inter_dtype == "float16":
            raise ConfigurationError(
                "inter_dtype='float16': gradients would be summed in a type that ends at 65504, and finite ones would "
                "become infinite. Take 'bfloat16', which has the range of float32, or what=Quantized(value_dtype="
                "'float16'), which sends later what does not fit."
            )
        for name, allowed in (("algorithm", (None, *get_args(Algorithm))), ("inter_dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in allowed:
                choices = ", ".join(str(each) for each in allowed if each is not None)
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: choose one of {choices}.")

    @property
    def is_flat(self) -> bool:
        """Whether each node has one rank; False for "auto", for which the world decides."""
        return self.topology.is_flat if isinstance(self.topology, Topology) else self.topology in ("flat", 1)

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """The dtype in which dense steps send gradients of a wider dtype; None is the gradients' own."""
        return None if self.inter_dtype == "float32" else getattr(torch, self.inter_dtype)
