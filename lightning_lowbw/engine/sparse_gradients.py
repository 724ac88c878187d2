"""The sparse tensors of a step of gradients: checked, accumulated, sent, and applied as gradients or as steps.

One pass over memory reads a gradient, checks it for inf and NaN, corrects it, accumulates it, and finds the candidates
of the selection (`ops`). Only the weights of sent elements are changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from lightning_lowbw.engine.faults import Found
from lightning_lowbw.engine.slots import Slot, by_group, keep_fields, numels_of, segment_fields, sparse_of
from lightning_lowbw.engine.sparse_exchange import SparseExchange
from lightning_lowbw.engine.sparse_work import SparseWork
from lightning_lowbw.engine.velocities import Velocities
from lightning_lowbw.ops.layout import copy_in_order_, flat_in_order
from lightning_lowbw.what.momentum import ErrorFeedback
from lightning_lowbw.what.sparse_sum import Sparse
from lightning_lowbw.where.peers import Peers


class SparseGradients:
    """The sparse tensors of the step in progress.

    Args:
        exchange: of the large tensors.
        correction: how a gradient enters the residual, and how the mean is applied to the weights.
        velocities: of the optimizer.
        peers: who takes part.
        found: where the pass that accumulates reports inf and NaN.

    Attributes:
        begun: what has been sent: the slots, and the messages.
    """

    def __init__(
        self, exchange: SparseExchange, correction: ErrorFeedback, velocities: Velocities, peers: Peers, found: Found
    ) -> None:
        self._exchange, self._correction, self._velocities, self._peers = exchange, correction, velocities, peers
        self._found = found
        self.begun: list[tuple[list[Slot], SparseWork]] = []
        self._compressed: set[str] = set()
        self._selected: dict[str, Sparse] = {}  # of these, except parts of no elements; until it is sent

    @property
    def sent(self) -> set[Parameter]:
        """The parameters whose elements have been sent."""
        return {slot.parameter for slots, _ in self.begun for slot in slots}

    def take_back(self) -> bool:
        """End a step; elements that were not averaged because of an exception are put back into the residuals.

        In place:
            The residuals: with this step's gradients. Velocities that were cleared for it stay so.

        Returns:
            Whether gradients had been accumulated that were not averaged.
        """
        is_torn = bool(self._compressed)
        for _, work in self.begun:
            work.take_back()
        self._exchange.put_back(self._selected)
        self._forget()
        return is_torn

    def _forget(self) -> None:
        self.begun, self._compressed, self._selected = [], set(), {}

    def compress(self, slots: Sequence[Slot], density: float) -> None:
        """Accumulate gradients, and take the largest elements out of the residuals of this rank's parts.

        In place:
            Residuals and velocities; inf and NaN do not enter them.

        Args:
            slots: with gradients.
            density: the fraction that is to be sent.
        """
        if not slots:
            return
        payload = self._exchange.payload
        gradients = {slot.name: self._exchange.part(flat_in_order(slot.gradient, slot.parameter)) for slot in slots}
        flags = torch.zeros(len(slots), dtype=torch.bool, device=slots[0].gradient.device).unbind()
        fields = {}
        for slot, flag in zip(slots, flags, strict=True):
            corrected = segment_fields(slot, self._correction, self._velocities, self._peers)
            fields[slot.name] = {**corrected, "fault": flag}
        table = self._exchange.segments(gradients, density, fields)
        masking = self._correction.masks if payload.momentum_masking is None else payload.momentum_masking
        if masking and payload.keep_momentum:  # 1 - 0.9 is not 0.1
            masking = not any(2.0 * density > 1.0 - each.momentum + 1e-6 for each in table.values())
        self._compressed |= {slot.name for slot in slots}  # also those that an exception keeps from it
        self._selected |= self._exchange.compress(table, masking=masking)
        for slot, flag in zip(slots, flags, strict=True):
            if slot.name not in table:  # this rank's part has no elements
                for other in fields[slot.name]["elsewhere"]:
                    other.take_()
            else:
                keep_fields(slot, table[slot.name], self._correction, self._velocities, self._peers)
            found = self._found.late if slot.parameter in self._found.now else self._found.now
            found[slot.parameter] = flag

    def compress_unchecked(self, slots: Sequence[Slot], density: float) -> None:
        """Compress the sparse tensors whose gradients nobody has checked: the pass that accumulates them does it."""
        unchecked = [slot for slot in sparse_of(slots) if not slot.is_missing and slot.parameter not in self._found.now]
        self.compress(unchecked, density)

    def begin(self, slots: list[Slot], density: float, kind: str = "all_gather") -> None:
        """Send the selected elements of some tensors; selects those that are not selected yet.

        Collective: as `SparseExchange.begin`.
        """
        self.compress([slot for slot in slots if slot.name not in self._compressed], density)
        in_order = {slot.name: self._selected.pop(slot.name) for slot in slots if slot.name in self._selected}
        self.begun.append((slots, self._exchange.begin(kind, in_order, numels_of(slots), density)))

    def average(self, slots: Sequence[Slot], density: float, step: int, *, applies: bool) -> None:
        """Send the remaining tensors, and apply the means: as gradients, or as steps of the weights.

        In place:
            `.grad`, and the parameters: decoupled weight decay; with `applies` the whole step, and `.grad` is None,
            where the correction can take it.

        Collective: as `SparseExchange.choose` and `begin`; blocking.
        """
        sent, told = self.sent, set(self._found.now)
        self._found.late.clear()
        rest = [slot for slot in sparse_of(slots) if slot.parameter not in sent]
        self.compress([slot for slot in rest if slot.name not in self._compressed], density)  # Adam counts its steps
        rest = [slot for slot in rest if slot.parameter.numel()]  # an empty shard: the peers have nothing of it either
        if rest:
            kind = self._exchange.choose(numels_of(rest), density, step, rest[0].parameter.device)
            self.begin(rest, density, kind)
        for _, work in self.begun:  # all of them, before the first weight changes: a rank may be gone
            work.finish()
        for mine, work in self.begun:
            for group, parameters in by_group(mine):
                self._correction.decay_weights(parameters, group)
            can_step = [
                applies and work.is_sparse and self._correction.can_step(slot.parameter, slot.group) for slot in mine
            ]
            self._step([slot for slot, can in zip(mine, can_step, strict=True) if can], work)
            self._take([slot for slot, can in zip(mine, can_step, strict=True) if not can], work)
        self._found.late |= {parameter: fault for parameter, fault in self._found.now.items() if parameter not in told}
        self._forget()

    def _step(self, slots: Sequence[Slot], work: SparseWork) -> None:
        """Step the weights at the elements that any rank has sent; the gradients are reused as workspace."""
        work.step_({slot.name: (*slot.flat_pair, self._correction.rate_of(slot.group)) for slot in slots})
        for slot in slots:
            slot.parameter.grad = None

    def _take(self, slots: Sequence[Slot], work: SparseWork) -> None:
        """Take the means as gradients."""
        outs = {slot.name: slot.flat_target for slot in slots}
        work.average_(outs)
        for slot in slots:
            if not slot.is_flat_target:
                copy_in_order_(slot.gradient, slot.parameter, outs[slot.name])
        climbing = []
        for slot in slots:
            if self._correction.constants(slot.parameter, slot.group).sign < 0:
                climbing.append(slot.gradient)  # torch's sign, for an optimizer with maximize=True
        if climbing:
            torch._foreach_neg_(climbing)
