"""The one all-reduce of a step of gradients: the tensors that are averaged whole, and the control message.

After it all ranks know whether the step is taken, and which parameters it steps; or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_lowbw.engine.control import BY_CLIPPING, Control, control_message, make_mark
from lightning_lowbw.engine.faults import OF_GRADIENTS, Kind, first_reported, gradient_error, numbers_of
from lightning_lowbw.engine.same_training import raise_at_other_batches
from lightning_lowbw.engine.slots import Slot
from lightning_lowbw.errors import DisagreementError
from lightning_lowbw.ops.lists import copy_all_
from lightning_lowbw.where.mean import MeanWork

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker

CHECK_EVERY_STEPS = 100  # compare the replicas; a pass over the weights, no extra message


def agree_on_step(
    worker: GradientWorker,
    slots: Sequence[Slot],
    whole: Sequence[Slot],
    *,
    skip_nonfinite: bool,
) -> list[Slot] | None:
    """Average the tensors that are sent whole; return the slots that are stepped, None if the step is not to be taken.

    In place:
        `.grad` of `whole` becomes the mean; zeros where this rank has none and another has.

    Collective: all ranks; one all-reduce; blocking.

    Args:
        worker: of the gradients, which has checked them.
        slots: of the step.
        whole: of these, the ones that are averaged here.
        skip_nonfinite: whether a gradient with inf or NaN means that the step is not taken, instead of an error.

    Raises:
        NonFiniteGradientError, DisagreementError, ConfigurationError, ValueError: on all ranks.
    """
    peers = worker.peers
    gradients = [
        slot.in_order(torch.zeros_like(slot.parameter) if slot.is_missing else slot.gradient) for slot in whole
    ]
    peers.count_dense(sum(slot.parameter.nbytes for slot in slots))
    exact = worker.method.where.dtype_between_nodes is None or worker.is_sparse
    means, summed = MeanWork(gradients, _message(worker, slots), 1.0 / peers.num_ranks, peers, exact=exact).wait()
    control = Control.read(summed, peers.num_ranks)
    worker.agree_on(control.requests)
    _check_marks(control, worker)
    numbers = numbers_of(OF_GRADIENTS, len(slots))
    fault = first_reported(control.faults, numbers)
    if fault is not None:
        if skip_nonfinite and fault[0] in numbers[Kind.GRADIENT]:
            return None
        raise gradient_error(worker, *fault, slots)
    return _stepped(slots, control.sums, dict(zip((slot.name for slot in whole), means, strict=True)))


def _message(worker: GradientWorker, slots: Sequence[Slot]) -> Tensor:
    """Return the control message of a step; its sums count the ranks that have a gradient of each parameter."""
    assert worker.fault is not None
    peers, device = worker.peers, worker.fault.device
    used = [float(slot.parameter.grad is not None) for slot in slots]
    weights = None if worker.step % CHECK_EVERY_STEPS else (slot.parameter for slot in slots)
    mark = make_mark(worker.batch % BY_CLIPPING + BY_CLIPPING * worker.by_clipping, weights)
    return control_message(used, worker.fault, mark, peers.rank, peers.num_ranks, device, worker.requests)


def _check_marks(control: Control, worker: GradientWorker) -> None:
    counts, checksums = control.differences()
    if counts:
        before = "clip_gradients" if worker.by_clipping else "optimizer.step"
        raise_at_other_batches(worker, worker.peers.group, {"exchange before": before})
    if checksums:
        raise DisagreementError(
            f"Step {worker.step}: the weights differ between the ranks, or one has left out a step; checksums are "
            f"{checksums}. Begin with the same weights on all ranks, change them alike, and take the same steps."
        )


def _stepped(slots: Sequence[Slot], num_users: Sequence[float], means: Mapping[str, Tensor]) -> list[Slot]:
    """Take means over the ranks as gradients; return the slots that are stepped.

    Parameters that no rank has used are not changed, as in DDP.
    """
    stepped, targets, sources = [], [], []
    for slot, number in zip(slots, num_users, strict=True):
        if round(number):
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            if slot.name in means:
                targets.append(slot.in_order(slot.gradient))
                sources.append(means[slot.name])
            stepped.append(slot)
    copy_all_(targets, sources)
    return stepped
