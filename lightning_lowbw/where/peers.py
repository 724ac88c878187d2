"""Who communicates with whom, behind one interface: flat, or on two levels.

A method keeps an equal part of every flat tensor on each rank of a node, exchanges messages about its part with the
ranks that keep the same part in other nodes, and gathers in its node what they have sent. When flat, each rank is a
node of its own: its part is the whole tensor, and operations inside the node do nothing. So a method does not need to
distinguish the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.where.agreement import agree
from lightning_lowbw.where.collectives import Collectives, Reduction, TensorWork
from lightning_lowbw.where.flat_peers import FlatPeers
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.node_peers import Algorithm, NodePeers
from lightning_lowbw.where.topology import Topology
from lightning_lowbw.where.topology_choice import TopologyChoice, check_choice, resolve


class Peers(Protocol):
    """The ranks of a training, as a method on one rank uses them.

    Operations run in the order of calls, on all ranks. On two levels they use their own groups, so that collectives of
    `node` and `between` may be issued at any time.
    """

    @property
    def ledger(self) -> TrafficLedger:
        """The ledger of the traffic, by level if there are two."""
        ...

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None is the world."""
        ...

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a node; None when flat. For messages, checks and saved states; the arithmetic of a
        method does not depend on it."""
        ...

    @property
    def nodes(self) -> Sequence[Sequence[int]] | None:
        """The ranks of each node, where a model is sharded inside nodes and each peer is one of them. For messages."""
        ...

    @property
    def num_ranks(self) -> int:
        """The number of all ranks; 1 where torch.distributed is not initialised."""
        ...

    @property
    def rank(self) -> int:
        """This rank among all; 0 where torch.distributed is not initialised."""
        ...

    @property
    def num_participants(self) -> int:
        """N of the equations, the participants in the exchange on the slow network: ranks when flat, else nodes."""
        ...

    @property
    def num_local_ranks(self) -> int:
        """How many ranks this rank's node has; 1 when flat."""
        ...

    @property
    def local_rank(self) -> int:
        """This rank among those of its node; 0 when flat. The launcher may count them in another order."""
        ...

    @property
    def is_two_level(self) -> bool:
        """Whether there are several nodes, at least one of several ranks: then gradients are summed inside the node
        before the method sees them, and each rank keeps and exchanges its part of what the node has."""
        ...

    @property
    def node(self) -> Collectives:
        """The collectives of this node's ranks; when flat, of this rank alone, which do nothing."""
        ...

    @property
    def between(self) -> Collectives:
        """The collectives of the ranks that keep this rank's part in all nodes; when flat, of all ranks.

        Raises:
            ConfigurationError: as `check_parts`.
        """
        ...

    def check_parts(self) -> None:
        """Check that the ranks of a node can keep parts of a tensor, and exchange them with those of other nodes.

        Raises:
            ConfigurationError: on all ranks; the nodes are of different sizes, or their leaders do the exchange.
        """
        ...

    def part(self, numel: int, local_rank: int | None = None) -> slice:
        """Return the part of a flat tensor that this, or that, rank of a node keeps: all of it when flat.

        Every part has ceil(numel / ranks of the node) elements, except the last ones, which may be shorter or empty.
        """
        ...

    def count_dense(self, nbytes: int) -> None:
        """Add to the ledger the traffic of a dense exchange of gradients of this size; communicates nothing."""
        ...

    def begin_all_reduce_(self, tensor: Tensor, *, exact: bool = True) -> Reduction:
        """Begin to sum a flat tensor over all ranks, in place; all ranks get the same bits.

        Collective: all ranks, in the same order of calls.

        Wire:
            Flat: an all-reduce. Two levels, "sharded": reduce-scatter in the node, all-reduce of each part between
            nodes, all-gather in the node; "leader": reduce to the first rank of the node, all-reduce among these,
            broadcast in the node.

        Args:
            exact: whether `inter_dtype` is disregarded, as for tensors in which there are not only gradients.
        """
        ...

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a flat tensor over all ranks, in place; by default the sum.

        Collective: all ranks, blocking (on CUDA, for the stream).

        Wire:
            A sum as `begin_all_reduce_`; any other operation as one all-reduce of all ranks.
        """
        ...

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        ...

    def begin_all_reduce_in_node_(self, tensor: Tensor) -> Reduction:
        """Begin to sum a flat tensor over the ranks of this node, in place; when flat it is the sum already.

        Collective: all ranks of the node, in the same order of calls as `begin_all_reduce_`.
        """
        ...

    def begin_gather(self, message: Tensor) -> TensorWork:
        """Begin to gather the messages of all ranks of all nodes, each about the part of its rank.

        Who waits accounts for the time.

        Collective: all ranks with messages of one size, in the same order of calls as `begin_all_reduce_`.

        Wire:
            An all-gather between nodes; on two levels, an all-gather in the node of what was received.

        Args:
            message: uint8, 1-d, not to be written before it has been waited for.

        Returns:
            Work on a tensor: uint8, shape (local ranks, participants, bytes of a message): first whose part it is
            about, then the node, in the order of the topology; when flat (1, ranks, bytes), in rank order. The same on
            all ranks.

        Raises:
            ConfigurationError: as `check_parts`.
        """
        ...

    def reduce_scatter_in_node(self, vector: Tensor) -> Tensor:
        """Return this rank's part of the sum over the node, filled with zeros to the size of the first part.

        When flat it is the vector itself, no copy.

        Collective: all ranks of the node, blocking (on CUDA, for the stream).
        """
        ...

    def gather_parts_in_node(self, part: Tensor, numel: int) -> Tensor:
        """Return the whole of which each rank of the node has a part: shape (numel,).

        When flat it is the part itself, no copy.

        Collective: all ranks of the node, blocking (on CUDA, for the stream).

        Args:
            part: 1-d, of the size of the first part; see `reduce_scatter_in_node`.
        """
        ...

    def close(self) -> None:
        """End the threads, after the work that has been begun."""
        ...


def make_peers(
    topology: TopologyChoice = "flat",
    process_group: dist.ProcessGroup | None = None,
    ledger: TrafficLedger | None = None,
    algorithm: Algorithm | None = None,
    inter_dtype: torch.dtype | None = None,
    timeout: timedelta | None = None,
    purpose: str = "gradients",
) -> Peers:
    """Return the ranks of a training as the user describes them: flat, or on two levels.

    A topology with one rank on each node is flat. One with a single node is on two levels, with one participant: there
    is no slow network, and nothing to compress.

    Collective: all ranks of the group, blocking; with a topology the world, which makes groups in one order.

    Args:
        topology: "flat", "auto" (by the launcher and the host names), ranks per node, the ranks of each node, or a
            `Topology`.
        process_group: of a flat training; None is the world.
        ledger: where the traffic is written down; a new one if left out.
        algorithm: see `NodePeers`; None is "sharded" where all nodes have as many ranks, else "leader".
        inter_dtype: what an inexact all-reduce sends between nodes; None is the tensor's own dtype.
        timeout: of the groups that are made for a topology; None is that of the world.
        purpose: peers that are in use at the same time, as for gradients and for averages that they hide, need groups
            of their own.

    Raises:
        ConfigurationError: on all ranks; the topology is none, does not fit the world or the algorithm, or comes with
            a process group other than the world.
        DisagreementError: on all ranks; they were given different arguments.
    """
    is_world = process_group is None or (dist.is_initialized() and process_group is dist.group.WORLD)
    if not is_world and topology != "flat":
        check_choice(topology)
        raise ConfigurationError(
            f"topology={topology!r} together with a process group other than the world: a topology is of all ranks of "
            "the world. Leave process_group out, or take topology='flat'."
        )
    facts: dict[str, Any] = {"topology": topology, "algorithm": algorithm, "inter_dtype": inter_dtype}
    agree("topology", {**facts, "timeout": timeout}, process_group)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    resolved = resolve(topology, num_ranks) if is_world else None
    if resolved is None or resolved.num_nodes == num_ranks:
        return FlatPeers(process_group, ledger)
    algorithm = algorithm or ("sharded" if resolved.has_equal_nodes else "leader")
    ledger = TrafficLedger() if ledger is None else ledger
    return NodePeers(
        resolved, algorithm=algorithm, inter_dtype=inter_dtype, ledger=ledger, timeout=timeout, purpose=purpose
    )
