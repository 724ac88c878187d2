"""Status: everything that ranks exchange apart from tensors, as one row of numbers that is summed.

The first numbers are sums (the number of ranks that have a gradient, the losses). After them each rank has two elements
of its own: whether it has found a fault, such as an inf in a gradient, and a mark, equal on all ranks at the same step
with the same weights. Requests to stop or to save are the bits above the mark.

A fault is one bit. Its kind and its tensor are gathered only after some rank has reported a fault (`first_fault`).

If ranks must agree and exchange nothing else, for instance after a step whose gradients DDP reduces, they exchange
`flags` and read the maximum. The maximum over the shards of a node becomes part of their status without a wait.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.errors import ConfigurationError, NonFiniteGradientError
from lightning_lowbw.kernels.tensors import checksum, constant, upload
from lightning_lowbw.sync.checks import compare_batches

MODULUS = 1 << 10  # of counts and of checksums in a mark: together below 2^20
STOP, SAVE, ALL = 1, 2, 4  # requests, as bits above a mark: together below 2^22, which float32 carries exactly
EXACT = 1 << 24  # integers below are exact in float32


@dataclass(frozen=True)
class Status:
    """The sum of the messages of all ranks.

    Attributes:
        sums: the sums over the ranks.
        is_faulty: whether any rank has found a fault.
        marks: the mark of each rank.
        requests: the requests of all ranks together: `STOP` and `SAVE`.
    """

    sums: list[float]
    is_faulty: bool
    marks: list[int]
    requests: int = 0

    @classmethod
    def read(cls, values: list[float], num_ranks: int) -> Status:
        """Read the sum of the ranks' messages.

        Raises:
            ValueError: the sum contains numbers that no rank can have written; on all ranks that received the same sum.
        """
        sums, faults, marks = values[: -2 * num_ranks], values[-2 * num_ranks : -num_ranks], values[-num_ranks:]
        are_whole = all(abs(value) < EXACT and value == round(value) for value in (*faults, *marks))
        if not (are_whole and all(0 <= mark < MODULUS**2 * ALL for mark in marks)):
            raise ValueError(f"A damaged status: {[*faults, *marks]} are no faults and marks of {num_ranks} ranks.")
        if any(map(math.isnan, sums)):
            raise ValueError(f"A damaged status, or a NaN in what the ranks have counted: {sums}.")
        requests, own_marks = zip(*(divmod(round(mark), MODULUS**2) for mark in marks), strict=True)
        return cls(sums, any(faults), list(own_marks), functools.reduce(operator.or_, requests))

    def differences(self) -> tuple[str, str]:
        """Return the counts and the checksums in the marks of all ranks, for an error; each empty if all are equal."""
        checksums, counts = zip(*(divmod(mark, MODULUS) for mark in self.marks), strict=True)
        return _by_rank(counts), _by_rank(checksums)


def _by_rank(numbers: Sequence[int]) -> str:
    shown = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers))
    return shown if len(set(numbers)) > 1 else ""


def status_message(
    sums: Sequence[float],
    fault: Tensor | float,
    mark: Tensor | int,
    rank: int,
    num_ranks: int,
    device: torch.device,
) -> Tensor:
    """Return a rank's message: float32, shape (sums + 2 ranks,); summed over the ranks it is read by `Status`."""
    numbers, own = [*sums, *[0.0] * (2 * num_ranks)], len(sums) + rank
    places: dict[int, Tensor] = {}
    for place, number in ((own, fault), (own + num_ranks, mark)):
        if isinstance(number, Tensor):
            places[place] = number
        else:
            numbers[place] = number
    message = upload(numbers, torch.float32, device)
    for place, number in places.items():
        message[place] = number
    return message


def make_mark(count: int, weights: Iterable[Tensor] | None, requests: Tensor | int = 0) -> Tensor | int:
    """Return as one number: a count of steps or batches, a checksum of the weights if any are given, the requests."""
    mark = count % MODULUS + MODULUS**2 * requests
    return mark if weights is None else mark + MODULUS * (checksum(weights) % MODULUS)


# Requests -------------------------------------------------------------------------------------------------------------


@dataclass
class Requests:
    """Requests to stop (`STOP`) or to save (`SAVE`), as bits.

    Attributes:
        asked: the requests of this rank, for the next status; set it on any rank to stop all ranks, or to save on all.
        agreed: the requests of all ranks in the last status; equal on all ranks.
    """

    asked: int = 0
    agreed: int = 0

    def agree_on(self, requests: int) -> None:
        """Take in the requests of a status; a request to save has been answered."""
        self.agreed = requests
        self.asked &= ~(requests & SAVE)


def flags(requests: int, device: torch.device, fault: Tensor | None = None, batch: int = 0) -> Tensor:
    """Return a message without sums and marks: float32, shape (5,); its maximum over ranks is read by `read_flags`.

    Args:
        requests: the requests of this rank.
        device: the device of the message.
        fault: whether this rank has found a fault; a scalar. None counts as False.
        batch: the number of this rank's batch.
    """
    batch %= MODULUS
    asked = [float(bool(requests & request)) for request in (STOP, SAVE)]
    message = upload([0.0, *asked, float(batch), -float(batch)], torch.float32, device)
    if fault is not None:
        message[0] = fault
    return message


def read_flags(message: Tensor) -> tuple[bool, int, bool]:
    """Return whether any rank has a fault, the requests of all ranks, and whether all ranks are at the same batch.

    Waits for the device.
    """
    fault, num_stop, num_save, last, first = message.tolist()
    return bool(fault), STOP * (num_stop > 0) | SAVE * (num_save > 0), last == -first


def flags_of_node(message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of a node for a status: whether a shard has a fault, whether the batches of the shards differ
    (positive if they do), and the requests; scalars on the device, without a wait.

    Args:
        message: the maximum of the node's `flags`.
    """
    fault, stop, save, last, minus_first = message.unbind()
    return fault, last + minus_first, STOP * stop + SAVE * save


# Faults ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault that a rank has found.

    Attributes:
        rank_of_kind: if there are several faults, the one with the lowest number is raised: the other faults may be its
            consequences.
        error: the type of the error that all ranks raise.
        text: the text of the error; says on which rank the fault is.
        is_skipped: whether the fault makes ranks skip a step that may be skipped: an inf or NaN in a gradient.
    """

    rank_of_kind: int
    error: type[Exception]
    text: str
    is_skipped: bool = False


class Faults:
    """The faults that a rank has found, as flags on the device; a fault is described only if its flag is set.

    Examples:
        >>> faults = Faults()
        >>> faults.add(torch.tensor([False, True]), ["a", "b"], lambda name: Fault(4, ValueError, name))
        >>> bool(faults.any(torch.device("cpu"))), faults.first().text
        (True, 'b')
    """

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Sequence[str], Callable[[str], Fault]]] = []

    def add(self, flags: Tensor, names: Sequence[str], describe: Callable[[str], Fault]) -> None:
        """Add flags (bool, of any shape, one for each name), and a function that returns the fault of a name."""
        self._found.append((flags, names, describe))

    def any(self, device: torch.device) -> Tensor:
        """Return whether any flag is set: bool, a scalar on the device."""
        return any_of((flags for flags, _, _ in self._found), device)

    def first(self, order: Sequence[str] = ()) -> Fault | None:
        """Return the fault with the lowest `rank_of_kind`, None if no flag is set; waits for the device.

        Args:
            order: the names in the order in which faults of the same kind are reported.
        """
        places = {name: place for place, name in enumerate(order)}
        found = [
            (describe(name), places.get(name, 0))
            for flags, names, describe in self._found
            for name in compress(names, flags.view(-1).tolist())
        ]
        return min(found, key=lambda each: (each[0].rank_of_kind, each[1]), default=(None, 0))[0]


def sparse_gradient(here: str, name: str) -> Fault:
    """Return the fault of a gradient with a sparse layout; `here` is the rank or the node."""
    return Fault(
        0,
        ConfigurationError,
        f"The gradient of {name!r} on {here} is sparse; only dense ones are exchanged. Build the layer with "
        "sparse=False.",
    )


def changed_gradient(here: str, name: str) -> Fault:
    """Return the fault of a gradient that has changed after it was sent in the backward pass."""
    return Fault(
        0,
        ConfigurationError,
        f"The gradient of {name!r} on {here} has changed after the backward pass had made and sent it. Change "
        "gradients in on_after_backward, for which they are kept back. If reentrant checkpointing makes it several "
        "times, pass use_reentrant=False to torch's checkpoint, or define an empty on_after_backward.",
    )


def nonfinite_gradient(here: str, step: int, name: str, *, is_added: bool, has_warm_up: bool) -> Fault:
    """Return the fault of a gradient with an inf or NaN.

    Args:
        here: the rank or the node.
        step: the step.
        name: of the parameter.
        is_added: whether the fault was found as the gradient was added to a residual.
        has_warm_up: whether the schedule has dense steps or several stairs.
    """
    warm_up = "" if has_warm_up else "give it a warm-up (there is none: see rampup_begin_step, rampup_step), "
    return Fault(
        4,
        NonFiniteGradientError,
        f"Step {step}: the gradient of {name!r} on {here} is not finite"
        f"{', or too large to be added to the residual' if is_added else ''}. Nothing was applied. Lower the "
        f"learning rate, clip the gradient, {warm_up if is_added else ''}or look at the data there; with a GradScaler "
        "(precision='16-mixed'), or with skip_nonfinite=True, such steps are skipped; on_after_backward is the hook in "
        "which a NaN can be dropped with every method.",
        is_skipped=True,
    )


def too_many_skipped(here: str, step: int, number: int) -> Fault:
    """Return the fault of too many skipped steps in a row, on a rank whose average follows or on all ranks."""
    return Fault(
        3,
        NonFiniteGradientError,
        f"Step {step}: {number} steps in a row were skipped on {here}, because a gradient had an inf or NaN, or a norm "
        "above skip_norm. Lower the learning rate, look at the data, or go on from an earlier checkpoint.",
    )


def overflow(rank_of_kind: int, step: int, what: str) -> Fault:
    """Return the fault of a sum that was not finite."""
    return Fault(
        rank_of_kind,
        NonFiniteGradientError,
        f"Step {step}: {what} has become too large for float32: a sum was not finite, or the value_dtype ends below it "
        "(float16 at 65504). Lower the learning rate, or clip the gradients, and go on from an earlier checkpoint.",
    )


def any_of(flags: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether any of some flags, of any shapes, is set: bool, a scalar on the device."""
    nothing = constant((False,), torch.bool, device)  # so that there is at least one flag
    return torch.cat([nothing, *(flag.to(device).view(-1) for flag in flags)]).any()


def first_fault(own: Fault | None, group: dist.ProcessGroup | None) -> Fault:
    """Return the fault that all ranks raise an error for, after a status has reported a fault.

    Collective: all ranks of the group, blocking.
    """
    faults = [fault for fault in gather(own, "faults", group) if fault is not None]
    unknown = Fault(0, ValueError, "A damaged status: it reported a fault, and no rank has found one.")
    return min(faults, key=lambda fault: fault.rank_of_kind, default=unknown)


def raise_first(faults: Faults, group: dist.ProcessGroup | None) -> NoReturn:
    """Raise the error that `first_fault` finds, after a status has reported a fault.

    Collective: all ranks of the group, blocking.
    """
    fault = first_fault(faults.first(), group)
    raise fault.error(fault.text)


def agree_in_world(faults: Faults, requests: int, batch: int, step: int, device: torch.device) -> int:
    """Return the requests of all ranks, whichever shards of a model they hold, if no rank has a fault.

    All ranks, not the peers alone: if only the peers raised, the other shards of a node would go on.

    Collective: all ranks, blocking; five numbers.

    Raises:
        NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
        DisagreementError: on all ranks; they are at different batches.
    """
    message = flags(requests, device, faults.any(device), batch)
    all_reduce_(message, op=dist.ReduceOp.MAX)
    is_faulty, requests, is_same_batch = read_flags(message)
    if not is_same_batch:
        compare_batches(batch, step, None)
    if is_faulty:
        raise_first(faults, None)
    return requests
