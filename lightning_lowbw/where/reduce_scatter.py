"""The sparse reduce-scatter on a process group: `what.sparse_sum` between real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.sparse_sum import Sparse, SparseSum, even_boundaries, sum_in_order
from lightning_lowbw.where.collectives import Collectives


@dataclass(frozen=True)
class Averaged:
    """The result of a step's exchange on a rank, tensor by tensor.

    Attributes:
        means: 1/N of the sums that were sent to all: the gradients; float32, the same bits on all ranks.
        unsent: what is to be added to this rank's residual, undivided: its own elements that did not fit, and, of the
            part that it owns, sums that were not handed out; float32, positions distinct.
    """

    means: list[Sparse]
    unsent: list[Sparse]


@dataclass
class SparseReduceScatter:
    """Averages sparse vectors over the ranks of a group, step after step.

    Args:
        collectives: of the process group, with their ledger.
        codec: of the elements on the wire.

    Attributes:
        numels: elements of each tensor in the last step.
        boundaries: where each rank's part begins in the next one; the same on all ranks. Both belong into a
            checkpoint, else a resumed run keeps back other elements.
    """

    collectives: Collectives
    codec: SparseCodec
    numels: tuple[int, ...] = field(default=(), init=False)
    boundaries: tuple[int, ...] = field(default=(), init=False)

    def average(self, parts: Sequence[Sparse], numels: Sequence[int], counts: Sequence[int]) -> Averaged:
        """Average what all ranks have selected.

        Collective: all ranks; an all-to-all and an all-gather; blocking. Needs more than one rank.

        Wire: see `SparseSum`; `where.ledger.sparse_reduce_scatter_elements` elements.

        Args:
            parts: (positions, values) of each tensor; positions int64, distinct, ascending; values of any floating
                dtype.
            numels: elements of each tensor.
            counts: k of each tensor; the same on all ranks, each has selected this many at most.

        Raises:
            ConfigurationError: on all ranks; there are more elements than positions.
        """
        if (tuple(numels), self.collectives.num_ranks) != (self.numels, len(self.boundaries) - 1):
            self.boundaries = even_boundaries(numels, counts, self.collectives.num_ranks)
            self.numels = tuple(numels)
        plan, rank = SparseSum(self.numels, sum(counts), self.boundaries, self.codec), self.collectives.rank
        outgoing = plan.prepare(rank, plan.join(parts))
        received = self.collectives.all_to_all(outgoing.message.view(-1)).view_as(outgoing.message)
        owned = plan.combine(rank, outgoing.own, received)
        reduced = plan.finish(self.collectives.all_gather(owned.message))
        self.boundaries = reduced.boundaries
        unsent = sum_in_order([outgoing.unsent, owned.unsent])
        return Averaged(plan.split(reduced.mean), plan.split(unsent))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, the same on all ranks."""
        return {"numels": list(self.numels), "boundaries": list(self.boundaries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; that of another number of ranks is ignored."""
        self.numels, self.boundaries = tuple(state["numels"]), tuple(state["boundaries"])
