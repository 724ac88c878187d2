"""The collectives between the members of a round, each the leader of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.collectives import (
    Collectives,
    TensorWork,
    TrafficLedger,
    all_gather_bytes,
    all_reduce_bytes,
)
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.elastic.membership import Membership, Quorum
from lightning_lowbw.kernels.tensors import CPU
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)


class MemberCollectives(Collectives):
    """Collectives of the members of the current round, on the CPU; blocking.

    A lost member fails the round: nothing is communicated from then on, the returned values have no meaning, and
    `Membership.commit` returns False.

    Attributes:
        has_failed: whether a collective of this round has failed.
        is_hidden: whether a thread waits for the collectives, and no step.
    """

    is_hidden = False

    def __init__(self, membership: Membership, ledger: TrafficLedger) -> None:
        super().__init__(None, ledger, "inter")
        self._membership = membership

    def begin(self, quorum: Quorum) -> None:
        """Begin a round of the members of a quorum."""
        self.has_failed = False
        self.num_ranks, self.rank = len(quorum.members), quorum.rank

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        self._run(lambda group: group.allreduce([tensor]), all_reduce_bytes(tensor.nbytes, self.num_ranks))
        return TensorWork(tensor)

    begin_sum_ = begin_all_reduce_

    def begin_all_gather(self, message: Tensor, out: Tensor | None = None) -> TensorWork:
        sent = message.contiguous()
        rows = sent.new_zeros(self.num_ranks, sent.numel())
        rows[self.rank] = sent
        nbytes = all_gather_bytes(message.nbytes, self.num_ranks)
        self._run(lambda group: group.allgather([list(rows.unbind())], [sent]), nbytes)
        return TensorWork(rows if out is None else out.copy_(rows.view(out.shape)))

    def _run(self, begin: Callable[[dist.ProcessGroup], Any], nbytes: int) -> None:
        if self.num_ranks == 1 or self.has_failed:
            return
        try:
            with nullcontext() if self.is_hidden else self.ledger.waiting(CPU):
                self._membership.collective(begin)
        except RuntimeError as error:
            _logger.warning("The round has failed and is repeated, because a member was lost: %s", error)
            self.has_failed = True
        self._record(nbytes)


class Members(Peers):
    """The members of a round, each with a whole replica on the host of its leader.

    Args:
        membership: finds the members.
        ledger: counts the traffic.

    Attributes:
        between: their collectives.
        weights: weights of the members in the mean of this round.
    """

    may_grow = True
    between: MemberCollectives

    def __init__(self, membership: Membership, ledger: TrafficLedger | None = None) -> None:
        super().__init__(None, ledger)
        self._all = self.between = MemberCollectives(membership, self.ledger)
        self.begin(Quorum(0, ("",)))

    def begin(self, quorum: Quorum) -> None:
        """Begin a round of the members of a quorum, at first of this group alone; nothing is communicated."""
        self.between.begin(quorum)
        self.num_ranks = self.num_participants = self.between.num_ranks
        self.rank, weights = self.between.rank, quorum.weights
        self.weights = weights if len({*weights}) > 1 else ()

    @property
    def weight(self) -> float:
        return self.weights[self.rank] if self.weights else super().weight
