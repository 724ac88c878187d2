"""What ranks have added up and kept, where that is more than its numbers hold: infinite first, then NaN.

Gradients that are finite may have a sum that is not. It is found in the pass that adds them up. Where that comes before
the control message of its step (always, but where gradients are clipped, a GradScaler skips steps, or shards of a
node must be told first), it is told like
a gradient that is not finite, and nothing is exchanged. Else the next control message tells it; or `check_kept` does,
where the weights are saved, or the training ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_lowbw.engine.control import Control, control_message, first_fault
from lightning_lowbw.engine.faults import damage_error, unknown_fault
from lightning_lowbw.errors import NonFiniteGradientError
from lightning_lowbw.ops.table import constant
from lightning_lowbw.where.mean import MeanWork

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker


@torch.no_grad()
def check_kept(worker: GradientWorker) -> None:
    """Tell now what the last step has found after its control message.

    Collective: all ranks, blocking; an all-reduce of two numbers per rank, where anything is kept.

    Raises:
        NonFiniteGradientError: on all ranks; what a rank has kept is not finite.
        ValueError: on all ranks; a message that a rank has received was damaged.
    """
    peers = worker.peers
    if peers.num_ranks == 1 or not worker.has_residuals:
        return
    fault = kept_fault(worker)
    message = control_message((), fault, 0, peers.rank, peers.num_ranks, fault.device)
    control = Control.read(MeanWork([], message, 1.0, peers).wait()[1], peers.num_ranks)
    if control.first_fault is not None:
        rank, number = control.first_fault
        raise error_of(worker, number, rank)
    forget(worker)


def kept_fault(worker: GradientWorker) -> Tensor:
    """Return what `check_kept` tells of this rank: 0, or a number of which `error_of` knows the meaning; a scalar."""
    narrow, parameters = worker.narrow, list(worker.by_name().values())
    nothing = constant((False,), torch.bool, worker.device).squeeze()
    damaged = None if worker.sparse is None else worker.sparse.damaged
    late = [worker.late_faults.get(each, nothing) for each in parameters]
    fault = first_fault([*late, nothing if damaged is None else damaged])
    if narrow is not None and narrow.left is not None:
        fault = torch.where(narrow.left.isfinite(), fault, len(parameters) + 2)
    return fault


def error_of(worker: GradientWorker, number: int, rank: int) -> ValueError | NonFiniteGradientError:
    """Return what all ranks raise where a rank has told a number of `kept_fault`."""
    parameters = list(worker.by_name().values())
    if number == len(parameters) + 2:
        return kept_error(f"what was kept of earlier gradients on rank {rank}", worker.step)
    if number == len(parameters) + 1:
        return damage_error(rank, worker.step)
    if not 0 < number <= len(parameters):
        return unknown_fault(number, rank)
    return late_error(worker.name_of(parameters[number - 1]), rank, worker.step)


def forget(worker: GradientWorker) -> None:
    """Do not tell once more what has been told."""
    worker.late_faults.clear()
    if worker.narrow is not None:
        worker.narrow.left = None


def late_error(name: str, rank: int, step: int) -> NonFiniteGradientError:
    """Return what all ranks raise where a parameter's gradient of the step before was too large to be added up."""
    return kept_error(f"the gradient of {name!r} on rank {rank}, with what earlier ones have left,", step)


def kept_error(what: str, step: int) -> NonFiniteGradientError:
    """Return what all ranks raise where a rank has added up more than its numbers hold."""
    return NonFiniteGradientError(
        f"Step {step}: {what} has become too large for float32: a sum was not finite, or the value_dtype ends below it "
        "(float16 at 65504). Lower the learning rate, or clip the gradients, and go on from an earlier checkpoint."
    )
