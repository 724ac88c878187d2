"""The numbers of faults in the control message, and their errors; for faults of gradients see `slots` and `kept`."""

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
    """Return 1 + the number of the first parameter with an inf or NaN, else 0; a scalar.

    The number after the parameters is `SparseExchange.damaged`, if it is given.
    """
    faults = [
        *are_not_finite([parameter.detach() for parameter in parameters]),
        *([] if damaged is None else [damaged]),
    ]
    return first_fault(faults) if faults else torch.zeros((), dtype=torch.float32, device=device)


def check_faults(control: Control, worker: ReplicaWorker, parameters: Sequence[Parameter], step: int) -> None:
    """Raise if a rank has reported a fault, numbered by `fault_of`: NonFiniteGradientError, or ValueError.

    Args:
        control: of all ranks.
        worker: has the names.
        parameters: those that were checked.
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
    """Return the error that all ranks raise if a rank has found a damaged message in an earlier step."""
    return ValueError(
        f"Step {step}: rank {rank} has received a damaged message: its positions were too many, too few, or outside "
        "their tensors, and its weights may differ from those of the others. Look at the memory and the network of its "
        "host, and go on from an earlier checkpoint."
    )


def unknown_fault(fault: int, rank: int) -> ValueError:
    """Return the error that all ranks raise if a rank has reported an unknown fault number."""
    return ValueError(f"A damaged control message: rank {rank} reported the unknown fault number {fault}.")
