"""Detects overflow (inf or NaN) of what is kept back.

The sum of finite gradients may overflow. The pass that adds them up detects this. Usually that is before the control
message of the step, so that the fault is reported like an inf or NaN in a gradient, and nothing is exchanged. With
clipping, with a GradScaler that skips steps and with shards it is after that message: then the next control message
reports it, or `check_kept`, when the weights are saved or the training ends.
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
    """Report the faults that the last step has found after its control message.

    Collective: all ranks, blocking; an all-reduce of two numbers per rank, if there are residuals.

    Raises:
        NonFiniteGradientError: on all ranks; a residual of a rank has an inf or NaN.
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
    """Return the number of this rank's fault for `check_kept`, 0 if there is none; a scalar."""
    narrow, parameters = worker.narrow, list(worker.by_name().values())
    nothing = constant((False,), torch.bool, worker.device).squeeze()
    damaged = None if worker.sparse is None else worker.sparse.damaged
    late = [worker.late_faults.get(each, nothing) for each in parameters]
    fault = first_fault([*late, nothing if damaged is None else damaged])
    if narrow is not None and narrow.left is not None:
        fault = torch.where(narrow.left.isfinite(), fault, len(parameters) + 2)
    return fault


def error_of(worker: GradientWorker, number: int, rank: int) -> ValueError | NonFiniteGradientError:
    """Return the error that all ranks raise for a number of `kept_fault`."""
    parameters = list(worker.by_name().values())
    if number == len(parameters) + 2:
        return kept_error(f"what was kept of earlier gradients on rank {rank}", worker.step)
    if number == len(parameters) + 1:
        return damage_error(rank, worker.step)
    if not 0 < number <= len(parameters):
        return unknown_fault(number, rank)
    return late_error(worker.name_of(parameters[number - 1]), rank, worker.step)


def forget(worker: GradientWorker) -> None:
    """Forget faults that have been reported."""
    worker.late_faults.clear()
    if worker.narrow is not None:
        worker.narrow.left = None


def late_error(name: str, rank: int, step: int) -> NonFiniteGradientError:
    """Return the error that all ranks raise if a gradient of the previous step was too large to be added."""
    return kept_error(f"the gradient of {name!r} on rank {rank}, with what earlier ones have left,", step)


def kept_error(what: str, step: int) -> NonFiniteGradientError:
    """Return the error that all ranks raise if a sum of a rank has overflowed."""
    return NonFiniteGradientError(
        f"Step {step}: {what} has become too large for float32: a sum was not finite, or the value_dtype ends below it "
        "(float16 at 65504). Lower the learning rate, or clip the gradients, and go on from an earlier checkpoint."
    )
