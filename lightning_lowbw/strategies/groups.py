"""The peers of the ranks of a fit, made from the method's `where` and the user's timeout, for each fit."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Topology
from lightning_lowbw.method import Method


class Groups:
    """The peers of a fit.

    Attributes:
        gradients: for reductions during backward.
        workers: for exchanges of the workers. Averages that are hidden behind local steps have process groups of
            their own, so that gradients do not wait for them.
    """

    def __init__(self) -> None:
        self.gradients: Peers = Peers()
        self.workers: Peers = self.gradients

    def make(
        self,
        caller: str,
        method: Method,
        group: dist.ProcessGroup | None,
        ledger: TrafficLedger,
        timeout: timedelta | None,
    ) -> None:
        """Find out which ranks share a node, and make the process groups.

        Collective: all ranks, blocking.

        Raises:
            ConfigurationError, DisagreementError: on all ranks; the topology does not fit the world, or ranks were
                given different ones.
        """
        self.gradients = self.workers = method.make_peers(group, ledger=ledger, timeout=timeout)
        topology = self.gradients.topology
        chosen = f"{caller}, topology={method.where.topology!r}"
        if topology is None:
            if method.where.topology != "flat" and self.gradients.num_ranks > 1:
                rank_zero_warn(
                    f"{chosen}: one rank on each node, so there is one level only, and this trains as with "
                    "topology='flat'."
                )
            return
        if topology.num_nodes == 1:
            rank_zero_warn(
                f"{chosen}: all ranks are on one node, so there is one level only, and no slow network between nodes: "
                "this trains as DDP."
            )
        rank_zero_info(f"{caller}: nodes {', '.join(str(list(node)) for node in topology.nodes)}.")
        self.make_for_averages(method, timeout)

    def make_for_averages(self, method: Method, timeout: timedelta | None) -> None:
        """Make the process groups of averages that are hidden behind local steps, where there are two levels.

        Collective: all ranks, blocking.
        """
        if self.gradients.topology is not None and method.hides_averages:
            self.workers = method.make_peers(ledger=self.gradients.ledger, timeout=timeout, purpose="averages")

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a node, where there is more than one node with several ranks."""
        return self.gradients.topology if self.gradients.is_two_level else None

    @property
    def nodes(self) -> list[list[int]] | None:
        """The ranks of each node, also of a single one, which has other state than flat ranks; None where flat."""
        topology = self.gradients.topology
        return None if topology is None else [list(node) for node in topology.nodes]

    def close(self) -> None:
        """End the threads, after the work that has been begun."""
        self.gradients.close()
        self.workers.close()
