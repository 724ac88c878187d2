"""A run that is resumed with one participant: it applies the residuals, which are no longer sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lowbw.engine.faults import OF_GRADIENTS, Kind, gradient_error, gradient_fault, numbers_of
from lightning_lowbw.engine.slots import (
    Slot,
    by_group,
    keep_fields,
    segment_fields,
    sparse_of,
)
from lightning_lowbw.ops.layout import copy_in_order_, flat_in_order
from lightning_lowbw.ops.reference import accumulate_
from lightning_lowbw.what.residuals import Residuals

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker


def apply_unsent(worker: GradientWorker, *, skip_nonfinite: bool) -> bool:
    """Add the residuals to the gradients of this step.

    In place:
        `.grad`, and parameters: their decay; residuals are taken out.

    Returns:
        Whether the step is to be taken.

    Raises:
        NonFiniteGradientError: a gradient is not finite; nothing has changed then.
    """
    correction, rounded = worker.correction, Residuals() if worker.narrow is None else worker.narrow.residuals
    slots = [
        Slot(name, parameter, group, name in worker.residuals)
        for group in worker.optimizer.param_groups
        for name, parameter in ((worker.name_of(parameter), parameter) for parameter in group["params"])
        if parameter.grad is not None
    ]
    fault = int(gradient_fault(worker, slots)) if slots else 0
    if fault:
        if skip_nonfinite and fault in numbers_of(OF_GRADIENTS, len(slots))[Kind.GRADIENT]:
            return False
        raise gradient_error(worker, fault, worker.peers.rank, slots)
    correction.take_over([slot.parameter for slot in sparse_of(slots)])
    for group, parameters in by_group(sparse_of(slots)):
        correction.decay_weights(parameters, group)
    for slot in slots:
        if slot.name in rounded:
            gradient = slot.in_order(slot.gradient)
            gradient.add_(rounded.pop(slot.name).view(gradient.shape))
        if not slot.is_sparse:  # `take_over` has taken momentum and decay from the optimizer
            correction.correct_dense([slot.parameter], slot.group)
            continue
        assert worker.sparse is not None
        fields = segment_fields(slot, correction, worker.velocities, worker.peers)
        own = worker.sparse.part(flat_in_order(slot.gradient, slot.parameter))
        table = worker.sparse.segments({slot.name: own}, 1.0, {slot.name: fields})
        for segment in table.values():  # none of an empty tensor
            accumulate_(segment, 0.0)
            copy_in_order_(slot.gradient, slot.parameter, segment.residual * segment.sign)
            keep_fields(slot, segment, correction, worker.velocities, worker.peers)
        worker.sparse.residuals.pop(slot.name)
    return True
