"""Faults: their numbers in a control message, and the errors that all ranks raise for them.

A message reports faults of some kinds. A rank has one number in it: 0, or that of its first fault. Numbers begin at 1,
in the order of the kinds: a kind has one for each tensor that is checked, or a single one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.control import Control
from lightning_lowbw.errors import ConfigurationError, NonFiniteGradientError
from lightning_lowbw.ops.reference import are_not_finite
from lightning_lowbw.ops.table import constant

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker
    from lightning_lowbw.engine.replicas import ReplicaWorker
    from lightning_lowbw.engine.slots import Slot
    from lightning_lowbw.engine.worker import Worker


class Kind(Enum):
    """Kinds of faults, in the order in which a rank reports them: later ones may be consequences of earlier ones.

    Attributes:
        LAYOUT: a gradient is a sparse tensor. Its numbers are negative: it is known on the host, and only on the rank
            that has it.
        LATE: a residual has become inf or NaN in the last step, after its control message.
        DAMAGED: a message that an earlier exchange has received was damaged; see `SparseExchange`.
        ROUNDED: a residual of values in few bits has become inf or NaN in an earlier exchange; see `NarrowExchange`.
        GRADIENT: a gradient has an inf or NaN, or, if it is sent sparse, its sum with the residual.
        WEIGHT: a parameter has an inf or NaN.
    """

    LAYOUT = auto()
    LATE = auto()
    DAMAGED = auto()
    ROUNDED = auto()
    GRADIENT = auto()
    WEIGHT = auto()


@dataclass
class Found:
    """What this rank has found in the gradients of a worker, by parameter: bool, scalars on the device.

    Attributes:
        now: whether a gradient of the step in progress has an inf or NaN, or, if it is sent sparse, its sum with the
            residual; of those that have been checked.
        late: the same, of what was checked in the last step after its control message; for the next one.
    """

    now: dict[Parameter, Tensor] = field(default_factory=dict)
    late: dict[Parameter, Tensor] = field(default_factory=dict)


HAS_TENSORS = (Kind.LAYOUT, Kind.LATE, Kind.GRADIENT, Kind.WEIGHT)  # these have a number for each tensor

# The kinds that are reported before gradients are exchanged, before weights are averaged, and after the last exchange.
OF_GRADIENTS = (Kind.LAYOUT, Kind.LATE, Kind.DAMAGED, Kind.ROUNDED, Kind.GRADIENT)
OF_WEIGHTS = (Kind.DAMAGED, Kind.ROUNDED, Kind.WEIGHT)
OF_LAST = (Kind.LATE, Kind.DAMAGED, Kind.ROUNDED)


def numbers_of(kinds: Iterable[Kind], num_tensors: int) -> dict[Kind, range]:
    """Return the numbers of each kind, of a message about `num_tensors` tensors."""
    numbers: dict[Kind, range] = {}
    first = 1
    for kind in kinds:
        if kind is Kind.LAYOUT:
            numbers[kind] = range(-1, -1 - num_tensors, -1)
            continue
        numbers[kind] = range(first, first + (num_tensors if kind in HAS_TENSORS else 1))
        first = numbers[kind].stop
    return numbers


# The number of a rank's first fault -----------------------------------------------------------------------------------


def first_fault(flags: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return 1 + the index of the first flag that is set, else 0: int64, a scalar on the device.

    Args:
        flags: bool, scalars; on the device, except those of a state that is offloaded. None: not set.
        device: of the number.
    """
    nothing = constant((False,), torch.bool, device).squeeze()
    row = [nothing, *(nothing if flag is None else flag.to(device) for flag in flags)]
    return torch.stack(row).view(torch.uint8).argmax()  # of equal ones the first


def gradient_fault(worker: GradientWorker, slots: Sequence[Slot]) -> Tensor:
    """Return the number of this rank's first fault `OF_GRADIENTS`, 0 if there is none; a scalar.

    In place:
        `worker.found`: gradients that have not been checked are.

    Args:
        worker: of the gradients.
        slots: at least one.
    """
    known = worker.found.now
    unchecked: dict[Parameter, Tensor] = {}
    device = slots[0].parameter.device
    for index, slot in enumerate(slots):
        parameter, gradient = slot.parameter, slot.parameter.grad
        if slot.has_sparse_layout:
            number = numbers_of(OF_GRADIENTS, len(slots))[Kind.LAYOUT][index]
            return torch.tensor(number, dtype=torch.float32, device=device)
        if gradient is not None and parameter not in known:
            unchecked[parameter] = gradient
    known.update(zip(unchecked, are_not_finite(list(unchecked.values())), strict=True))
    late, now = ([flags.get(slot.parameter) for slot in slots] for flags in (worker.found.late, known))
    return first_fault([*late, *flags_of_exchanges(worker), *now], device)


def weight_fault(worker: ReplicaWorker, parameters: Sequence[Parameter]) -> Tensor:
    """Return the number of this rank's first fault `OF_WEIGHTS`, 0 if there is none; a scalar."""
    now = are_not_finite([parameter.detach() for parameter in parameters])
    return first_fault([*flags_of_exchanges(worker), *now], worker.device)


def last_fault(worker: Worker) -> Tensor:
    """Return the number of this rank's first fault `OF_LAST`, of all parameters, 0 if there is none; a scalar."""
    late = [worker.found.late.get(parameter) for parameter in worker.parameters()]
    return first_fault([*late, *flags_of_exchanges(worker)], worker.device)


def flags_of_exchanges(worker: Worker) -> tuple[Tensor | None, Tensor | None]:
    """Return the flags of `Kind.DAMAGED` and `Kind.ROUNDED`."""
    sparse, narrow = worker.sparse, worker.narrow
    return None if sparse is None else sparse.damaged, None if narrow is None else narrow.overflowed


# The error for a number -----------------------------------------------------------------------------------------------


def first_reported(faults: Sequence[int], numbers: Mapping[Kind, range]) -> tuple[int, int] | None:
    """Return the number and the rank of the fault of the earliest kind; of several that of the first rank.

    Args:
        faults: the number of each rank, 0 where it has none.
        numbers: of each kind.
    """
    order = [None, *numbers]  # unknown numbers first
    reported = [(order.index(_find(fault, numbers)[0]), rank) for rank, fault in enumerate(faults) if fault]
    return (faults[min(reported)[1]], min(reported)[1]) if reported else None


def check_faults(
    control: Control, worker: Worker, kinds: Sequence[Kind], parameters: Sequence[Parameter], step: int
) -> None:
    """Raise `error_of`, if a rank has reported a fault.

    Args:
        control: of all ranks.
        worker: has the names.
        kinds: of the message.
        parameters: those that were checked.
        step: optimizer steps completed then.
    """
    fault = first_reported(control.faults, numbers_of(kinds, len(parameters)))
    if fault is not None:
        raise error_of(worker, *fault, kinds, parameters, step)


def error_of(
    worker: Worker,
    number: int,
    rank: int,
    kinds: Sequence[Kind],
    parameters: Sequence[Parameter],
    step: int,
    node: int | None = None,
    who: str = "",
) -> ValueError | NonFiniteGradientError:
    """Return the error that all ranks raise for a fault; for `Kind.GRADIENT` see `gradient_error`.

    Args:
        worker: has the names.
        number: not 0.
        rank: who has reported it.
        kinds: of the message.
        parameters: those that were checked.
        step: optimizer steps completed then.
        node: that of the rank, if its weights are a shard of the node's.
        who: who has reported it, if the rank is not known.
    """
    kind, index = _find(number, numbers_of(kinds, len(parameters)))
    reporter = who or f"rank {rank}"
    if kind is Kind.DAMAGED:
        return ValueError(
            f"Step {step}: {reporter} has received a damaged message: its positions were too many, too few, or "
            "outside their tensors, and its weights may differ from those of the others. Look at the memory and the "
            "network of its host, and go on from an earlier checkpoint."
        )
    if kind is Kind.ROUNDED:
        signal = "changes of the weights" if worker.method.averages_weights else "gradients"
        return _overflow(f"what was kept of earlier {signal} on {reporter}", step)
    if kind is None:
        return ValueError(f"A damaged control message: {reporter} reported the unknown fault number {number}.")
    name = worker.name_of(parameters[index])
    if kind is Kind.LATE:
        return _overflow(f"the gradient of {name!r} on {reporter}, added to the residual,", step)
    if kind is Kind.LAYOUT:
        return ConfigurationError(
            f"The gradient of {name!r} on {reporter} is sparse; only dense ones are exchanged. Build the layer with "
            "sparse=False."
        )
    assert kind is Kind.WEIGHT
    stepped, shard = (f"rank {rank}", "") if node is None else (f"node {node}", f", in the shard of rank {rank}")
    return NonFiniteGradientError(
        f"The local steps of {stepped} up to step {step} left parameter {name!r} infinite or NaN{shard}. Nothing was "
        "averaged. Lower the learning rate, or clip gradients."
    )


def gradient_error(
    worker: GradientWorker, number: int, rank: int, slots: Sequence[Slot]
) -> ValueError | NonFiniteGradientError:
    """Return the error that all ranks raise for a fault `OF_GRADIENTS`.

    Args:
        worker: of the gradients.
        number: not 0.
        rank: who has reported it.
        slots: of the step.
    """
    kind, index = _find(number, numbers_of(OF_GRADIENTS, len(slots)))
    peers = worker.peers
    if kind is not Kind.GRADIENT:
        parameters = [slot.parameter for slot in slots]
        who = "" if peers.nodes is None else f"a rank of node {rank} (ranks {list(peers.nodes[rank])})"  # as reported
        return error_of(worker, number, rank, OF_GRADIENTS, parameters, worker.step, who=who)
    slot, where = slots[index], f"on rank {rank}"
    if worker.reduces_in_node and peers.topology is not None:  # it is the mean of the rank's node already
        node = peers.topology.node_of(rank)
        where = f"of node {node} (ranks {list(peers.topology.nodes[node])})"
    elif peers.nodes is not None:
        where = f"of node {rank} (ranks {list(peers.nodes[rank])})"
    is_from_start = slot.is_sparse and worker.when.rampup_begin_step == 0 and len(worker.when.stairs) <= 1
    warm_up = "give it a warm-up (there is none: see rampup_begin_step, rampup_step), " if is_from_start else ""
    return NonFiniteGradientError(
        f"Step {worker.step}: the gradient of {slot.name!r} {where} is not finite"
        f"{', or too large to be added to the residual' if slot.is_sparse else ''}. "
        f"Nothing was exchanged. "
        f"Lower the learning rate, clip the gradient, {warm_up}or look at the data there; with a GradScaler "
        "(precision='16-mixed') such steps are skipped."
    )


def _find(number: int, numbers: Mapping[Kind, range]) -> tuple[Kind | None, int]:
    """Return the kind of a number, None if it has none, and which of the kind it is."""
    return next(((kind, mine.index(number)) for kind, mine in numbers.items() if number in mine), (None, 0))


def _overflow(what: str, step: int) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"Step {step}: {what} has become too large for float32: a sum was not finite, or the value_dtype ends below it "
        "(float16 at 65504). Lower the learning rate, or clip the gradients, and go on from an earlier checkpoint."
    )
