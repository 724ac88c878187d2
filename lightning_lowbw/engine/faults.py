"""What a rank can tell of a fault in the control message; for that of a gradient see `slots` and `kept`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.control import Control, first_fault
from lightning_lowbw.errors import NonFiniteGradientError
from lightning_lowbw.ops.reference import are_not_finite

if TYPE_CHECKING:
    from lightning_lowbw.engine.replicas import ReplicaWorker


def fault_of(parameters: Sequence[Tensor], device: torch.device, damaged: Tensor | None = None) -> Tensor:
    """Return 1 + the number of the first parameter that is not finite, else 0; a scalar.

    Behind the parameters is `SparseExchange.damaged`, where it is given.
    """
    faults = [
        *are_not_finite([parameter.detach() for parameter in parameters]),
        *([] if damaged is None else [damaged]),
    ]
    return first_fault(faults) if faults else torch.zeros((), dtype=torch.float32, device=device)


def check_faults(control: Control, worker: ReplicaWorker, parameters: Sequence[Parameter], step: int) -> None:
    """Raise where a rank has told a fault, as `fault_of` numbers it: NonFiniteGradientError, or ValueError.

    Args:
        control: what all ranks have told.
        worker: which knows the names.
        parameters: those that were looked at.
        step: optimizer steps completed then.
    """
    if control.first_fault is not None:
        rank, fault = control.first_fault
        if fault == len(parameters) + 1:
            raise damage_error(rank, step)
        if not 0 < fault <= len(parameters):
            raise unknown_fault(fault, rank)
        name = worker.name_of(parameters[fault - 1])
        raise NonFiniteGradientError(
            f"The local steps of rank {rank} up to step {step} left parameter {name!r} infinite or NaN. "
            "Nothing was averaged. Lower the learning rate, or clip gradients."
        )


def damage_error(rank: int, step: int) -> ValueError:
    """Return what all ranks raise where a rank has found a damaged message in an earlier step."""
    return ValueError(
        f"Step {step}: rank {rank} has received a damaged message: its positions were too many, too few, or outside "
        "their tensors, and its weights may differ from those of the others. Look at the memory and the network of its "
        "host, and go on from an earlier checkpoint."
    )


def unknown_fault(fault: int, rank: int) -> ValueError:
    """Return what all ranks raise where a rank has told a fault that there is not."""
    return ValueError(f"A damaged control message: rank {rank} tells a fault number {fault}, which there is not.")
