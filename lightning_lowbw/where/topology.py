"""Where the ranks are: which of them share a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_lowbw.arguments import is_count, names_arguments
from lightning_lowbw.errors import ConfigurationError

MOST_RANKS = 1 << 20  # more is a mistake, and a list of them fills the memory


@names_arguments
@dataclass(frozen=True)
class Topology:
    """The ranks of each node, in the order of the nodes.

    Ranks need not be contiguous, and nodes need not be of one size; methods that require this raise an error.

    Args:
        nodes: the ranks of each node, in any order; the lowest of a node is its leader.

    Raises:
        ConfigurationError: a rank is missing or named twice, or a node is empty.

    Example:
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
    @names_arguments
    def blocks(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Return nodes of `ranks_per_node` neighbouring ranks.

        Raises:
            ConfigurationError: the world is not divisible, or there are no such numbers of ranks.
        """
        for name, value in (("world_size", world_size), ("ranks_per_node", ranks_per_node)):
            if not is_count(value):
                raise ConfigurationError(f"{name}={value!r}: give an integer >= 1.")
        if world_size > MOST_RANKS:
            raise ConfigurationError(f"world_size={world_size}: give an integer from 1 to {MOST_RANKS}.")
        if world_size % ranks_per_node:
            raise ConfigurationError(
                f"{world_size} ranks cannot be divided into nodes of {ranks_per_node} ranks. Give a divisor of "
                f"{world_size}, or the ranks of each node."
            )
        starts = range(0, world_size, ranks_per_node)
        return cls(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))

    @classmethod
    def of_hosts(cls, hosts: Sequence[str]) -> Topology:
        """Return one node per distinct name; `hosts` has the name of each rank's."""
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_host.values()))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.nodes)

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
            ConfigurationError: they differ; names them.
        """
        if not self.has_equal_nodes:
            shown = ", ".join(f"node {index} has {_shown(node)}" for index, node in enumerate(self.nodes))
            raise ConfigurationError(
                f"The nodes have different numbers of ranks ({shown}). Only local SGD of whole weights (no "
                "value_dtype, no compression) and HierarchicalStrategy(algorithm='leader') support that. Start the "
                "same number of ranks on each node."
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


def _shown(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{len(ranks)} ({', '.join(map(str, ranks))})"


def part_of(numel: int, local_rank: int, num_local_ranks: int) -> slice:
    """Return the part of a flat tensor that one of a node's ranks keeps; the last ones may be shorter, or empty."""
    size = -(-numel // num_local_ranks)
    return slice(min(local_rank * size, numel), min((local_rank + 1) * size, numel))
