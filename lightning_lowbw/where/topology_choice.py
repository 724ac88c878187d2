"""The user's choice of nodes, and the `Topology` that follows from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from lightning_lowbw.arguments import is_count
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.where.agreement import failing_together, gather
from lightning_lowbw.where.topology import Topology

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
    if isinstance(choice, int) and not isinstance(choice, bool):
        if choice < 1:
            raise ConfigurationError(f"topology={choice!r}, a number of ranks per node: give an integer >= 1.")
        return None
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        nodes = [tuple(node) if isinstance(node, Sequence) else () for node in choice]
        if all(is_count(rank, 0) for node in nodes for rank in node) and all(nodes):
            return Topology(tuple(nodes))
    elif choice in ("flat", "auto"):
        return None
    raise ConfigurationError(
        f"topology={choice!r}: give 'flat', 'auto' (by the launcher and the host names), a number of ranks per node, "
        "the ranks of each node such as [[0, 1], [2, 3]], or a Topology."
    )


def asks_for_two_levels(choice: TopologyChoice) -> bool | None:
    """Return whether a choice is of nodes of several ranks; None for "auto", where only the world tells."""
    if isinstance(choice, int):
        return choice > 1
    if isinstance(choice, str):
        return None if choice == "auto" else False
    topology = check_choice(choice)
    assert topology is not None
    return topology.num_nodes < topology.world_size


def resolve(choice: TopologyChoice, world_size: int) -> Topology | None:
    """Return the topology of the world; None if flat.

    Collective: all ranks, blocking; none where torch.distributed is not initialised.

    Raises:
        ConfigurationError: on all ranks; the choice does not fit the world.
    """
    with failing_together():
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
    """Return which ranks share a node, by host name and by the launcher's number of the node.

    Collective: all ranks, blocking; none where torch.distributed is not initialised, which is one rank.
    """
    number = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), "")
    host = f"{socket.gethostname()}/{number}"
    return Topology.of_hosts(gather(host, "host"))
