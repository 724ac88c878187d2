"""The sparse tensors of a step of gradients: looked at, accumulated, sent, and taken as gradients or as steps.

One pass over memory reads a gradient: it looks for what is not finite, corrects, accumulates, and finds the candidates
of the selection (`ops`). The weights are touched where something has been sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.slots import Slot, keep_fields, numels_of, segment_fields, sparse_of, zero_unless_finite_
from lightning_lowbw.engine.sparse_exchange import SparseExchange, SparseWork
from lightning_lowbw.engine.velocities import Velocities
from lightning_lowbw.what.momentum import ErrorFeedback
from lightning_lowbw.what.sparse_sum import Sparse
from lightning_lowbw.where.peers import Peers


class SparseGradients:
    """What has become of the sparse tensors of the step in progress.

    Args:
        exchange: of the large tensors.
        correction: how a gradient enters the residual, and what has arrived the weights.
        velocities: of the optimizer.
        peers: who takes part.

    Attributes:
        are_finite: whether gradients are, of the parameters that have been looked at: bool, scalars.
        begun: what has been sent: the slots, and the messages.
    """

    def __init__(
        self, exchange: SparseExchange, correction: ErrorFeedback, velocities: Velocities, peers: Peers
    ) -> None:
        self._exchange, self._correction, self._velocities, self._peers = exchange, correction, velocities, peers
        self.are_finite: dict[Parameter, Tensor] = {}
        self.begun: list[tuple[list[Slot], SparseWork]] = []
        self._compressed: set[str] = set()
        self._selected: dict[str, Sparse] = {}  # of these, but for parts of no elements; until it is sent

    @property
    def sent(self) -> set[Parameter]:
        """The parameters whose elements have been sent."""
        return {slot.parameter for slots, _ in self.begun for slot in slots}

    def forget(self) -> None:
        """End the step."""
        self.begun, self._compressed, self._selected = [], set(), {}
        self.are_finite.clear()

    def looks_later(self, slot: Slot) -> bool:
        """Whether the pass that accumulates a gradient looks at it: on a CPU."""
        return not (slot.is_missing or slot.gradient.is_cuda or slot.parameter in self.are_finite)

    def compress(self, slots: Sequence[Slot], density: float) -> None:
        """Accumulate gradients, and take the largest elements out of the residuals of this rank's parts.

        In place:
            Residuals and velocities, which nothing enters that is not finite.

        Args:
            slots: with gradients.
            density: the fraction that is to be sent.
        """
        if not slots:
            return
        gradients = {slot.name: self._exchange.part(slot.gradient) for slot in slots}
        unlooked = [slot for slot in slots if slot.parameter not in self.are_finite]
        faults = {slot.name: torch.zeros((), dtype=torch.bool) for slot in unlooked if self.looks_later(slot)}
        for slot in unlooked:
            if slot.name not in faults:
                self.are_finite[slot.parameter] = zero_unless_finite_(slot.gradient)
        fields = {}
        for slot in slots:
            corrected = segment_fields(slot, self._correction, self._velocities, self._peers)
            fields[slot.name] = {**corrected, "fault": faults.get(slot.name)}
        table = self._exchange.segments(gradients, density, fields)
        asked_for = self._exchange.payload.momentum_masking
        masking = self._correction.masks if asked_for is None else asked_for
        self._selected |= self._exchange.compress(table, masking=masking)
        self._compressed |= {slot.name for slot in slots}
        for slot in slots:
            if slot.name in table:
                keep_fields(slot, table[slot.name], self._correction, self._velocities, self._peers)
            if slot.name in faults:
                self.are_finite[slot.parameter] = ~faults[slot.name]

    def begin(self, slots: list[Slot], density: float, kind: str = "all_gather") -> None:
        """Send what is selected of some tensors, or is selected now.

        Collective: as `SparseExchange.begin`.
        """
        self.compress([slot for slot in slots if slot.name not in self._compressed], density)
        in_order = {slot.name: self._selected.pop(slot.name) for slot in slots if slot.name in self._selected}
        self.begun.append((slots, self._exchange.begin(in_order, numels_of(slots), density, kind=kind)))

    def average(self, slots: Sequence[Slot], density: float, step: int, *, applies: bool) -> None:
        """Send what is not sent yet, and take what all have sent: as gradients, or as steps of the weights.

        In place:
            `.grad`; with `applies` the parameters, and `.grad` is None, where the correction can step them.

        Collective: as `SparseExchange.choose` and `begin`; blocking.
        """
        sent = self.sent
        rest = [slot for slot in sparse_of(slots) if slot.parameter not in sent]
        if rest:
            self.begin(rest, density, self._exchange.choose(numels_of(rest), density, step))
        for mine, work in self.begun:
            can_step = [applies and work.is_sparse and self._can_step(slot) for slot in mine]
            self._step([slot for slot, can in zip(mine, can_step, strict=True) if can], work)
            self._take([slot for slot, can in zip(mine, can_step, strict=True) if not can], work)
        self.forget()

    def _can_step(self, slot: Slot) -> bool:
        # On a GPU one kernel writes all means as gradients; steps would take a dozen launches for each tensor.
        return not slot.gradient.is_cuda and self._correction.can_step(slot.parameter, slot.group)

    def _step(self, slots: Collection[Slot], work: SparseWork) -> None:
        """Step the weights where any rank has sent an element; the gradients have served, and are room to add in."""
        means = work.means_at({slot.name: slot.gradient.view(-1) for slot in slots})
        for slot in slots:
            self._correction.step_at(slot.parameter, slot.group, *means[slot.name])
            slot.parameter.grad = None

    def _take(self, slots: Collection[Slot], work: SparseWork) -> None:
        """Take the means as gradients."""
        outs = {slot.name: slot.flat_target for slot in slots}
        work.average_(outs)
        for slot in slots:
            gradient, mean = slot.gradient, outs[slot.name]
            if gradient.data_ptr() != mean.data_ptr():
                gradient.copy_(mean.view(gradient.shape))
            if self._correction.constants(slot.parameter, slot.group).sign < 0:
                gradient.neg_()  # torch's sign, for an optimizer that climbs
