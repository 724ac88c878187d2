"""Reports what an exchange has found after its control message: overflow (inf or NaN) of residuals, damaged messages.

The sum of finite gradients may overflow. The pass that adds them up detects this. Usually that is before the control
message of the step, so that the fault is reported like an inf or NaN in a gradient, and nothing is exchanged. With
clipping, with a GradScaler that skips steps and with shards it is after that message, and so it always is with values
in few bits: then the next control message reports it, or `check_late_faults`, when the weights are saved or the
training ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_lowbw.engine.control import Control, control_message
from lightning_lowbw.engine.faults import OF_LAST, check_faults, last_fault
from lightning_lowbw.where.mean import MeanWork

if TYPE_CHECKING:
    from lightning_lowbw.engine.worker import Worker


@torch.no_grad()
def check_late_faults(worker: Worker) -> None:
    """Report the faults that the last exchange has found after its control message.

    Collective: all ranks, blocking; an all-reduce of two numbers per rank, if there are residuals. Of averages of
    weights only in few bits, and on a GPU of the largest elements; once after each.

    Raises:
        NonFiniteGradientError: on all ranks; a residual of a rank has an inf or NaN.
        ValueError: on all ranks; a message that a rank has received was damaged.
    """
    peers, sparse, narrow = worker.peers, worker.sparse, worker.narrow
    if worker.method.averages_weights:
        has_decoded = sparse is not None and sparse.damaged is not None
        has_rounded = narrow is not None and narrow.overflowed is not None
        may_report = has_rounded or (has_decoded and worker.device.type != "cpu")  # on a CPU decoding itself raises
    else:  # not by the flags of late faults, which ranks have for different parameters
        may_report = any(exchange is not None and bool(exchange.residuals) for exchange in (sparse, narrow))
    if peers.num_ranks == 1 or not may_report:
        return
    fault = last_fault(worker)
    message = control_message((), fault, 0, peers.rank, peers.num_ranks, fault.device)
    control = Control.read(MeanWork([], message, 1.0, peers).wait()[1], peers.num_ranks)
    check_faults(control, worker, OF_LAST, worker.parameters(), worker.step)
    forget_late_faults(worker)


def forget_late_faults(worker: Worker) -> None:
    """Forget the flags of the last exchange: all ranks have been told, or the residuals are replaced."""
    worker.found.late.clear()
    if worker.sparse is not None:
        worker.sparse.damaged = None
    if worker.narrow is not None:
        worker.narrow.overflowed = None
