"""Status: everything that ranks exchange apart from tensors, as one row of numbers that is summed.

Some numbers are sums (the number of ranks that have a gradient, the mean loss, the number of requests to stop). Then
each rank has two elements of its own: whether it has found a fault, such as an inf in a gradient, and a mark, which is
equal on all ranks at the same step with the same weights. If requests to stop or to save are not among the sums, they
are the bits above the mark, and need no extra bytes.

A fault is one bit. What it is, and of which tensor, is gathered only after some rank has one (`first_fault`).

Where ranks must agree and exchange nothing else, for instance after a step whose gradients DDP reduces, they exchange
`flags` alone.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.errors import NonFiniteGradientError
from lightning_lowbw.kernels.tensors import checksum, constant, upload

MODULUS = 1 << 10  # of counts and of checksums in a mark: together below 2^20
STOP, SAVE, ALL = 1, 2, 4  # requests, as bits above a mark: together below 2^22, which float32 carries exactly
EXACT = 1 << 24  # integers below are exact in float32


@dataclass(frozen=True)
class Status:
    """The sum of the messages of all ranks.

    Attributes:
        sums: over the ranks.
        is_faulty: whether any rank has found a fault.
        marks: of each rank.
        requests: of any rank: `STOP` and `SAVE`.
    """

    sums: list[float]
    is_faulty: bool
    marks: list[int]
    requests: int = 0

    @classmethod
    def read(cls, numbers: Tensor, num_ranks: int) -> Status:
        """Read the sum of the ranks' messages; the one wait for the device.

        Raises:
            ValueError: they contain numbers that no rank can have written; on all ranks that have received the same.
        """
        values = numbers.tolist()
        sums, faults, marks = values[: -2 * num_ranks], values[-2 * num_ranks : -num_ranks], values[-num_ranks:]
        are_whole = all(abs(value) < EXACT and value == round(value) for value in (*faults, *marks))
        if not (are_whole and all(0 <= mark < MODULUS**2 * ALL for mark in marks)):
            raise ValueError(f"A damaged status: {[*faults, *marks]} are no faults and marks of {num_ranks} ranks.")
        if any(math.isnan(number) for number in sums):
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
    """Return a count of steps or batches, where weights are given a checksum of them, and requests, as one number."""
    mark = count % MODULUS + MODULUS**2 * requests
    return mark if weights is None else mark + MODULUS * (checksum(weights) % MODULUS)


# Requests -------------------------------------------------------------------------------------------------------------


def counts_of(requests: int) -> list[float]:
    """Return what a rank adds to the sums of a message: whether it has requested to stop, and to save."""
    return [float(bool(requests & each)) for each in (STOP, SAVE)]


def requests_of(num_stop: float, num_save: float) -> int:
    """Return the requests, if the sums of a message contain the number of ranks with each."""
    return STOP * (num_stop > 0) | SAVE * (num_save > 0)


def flags(requests: int, device: torch.device, fault: Tensor | None = None, batch: int = 0) -> Tensor:
    """Return a message without sums and marks: float32, shape (5,); its maximum over ranks is read by `read_flags`.

    Args:
        requests: of this rank.
        device: of the message.
        fault: whether this rank has found one; a scalar. None counts as False.
        batch: the number of this rank's batch.
    """
    batch %= MODULUS
    message = upload([0.0, *counts_of(requests), float(batch), -float(batch)], torch.float32, device)
    if fault is not None:
        message[0] = fault
    return message


def read_flags(message: Tensor) -> tuple[bool, int, bool]:
    """Return whether any rank has a fault, the requests of all, and whether all are at one batch; waits for the
    device."""
    fault, num_stop, num_save, last, first = message.tolist()
    return bool(fault), requests_of(num_stop, num_save), last == -first


# Synchronous steps of replicas ----------------------------------------------------------------------------------------


def step_flags(
    requests: int, batch: int, rank: int, num_ranks: int, *, has_decayed: bool, has_ended: bool
) -> list[float]:
    """Return what a rank says in a synchronous step; the sum over ranks is read by `StepStatus`.

    Args:
        requests: of this rank.
        batch: the number of its batch.
        rank: its number.
        num_ranks: of all.
        has_decayed: whether its learning rate has fallen.
        has_ended: whether its data have ended; then the number of the batch is negative.
    """
    batches = [0.0] * num_ranks
    batches[rank] = float(batch % EXACT) * (-1.0 if has_ended else 1.0)
    return [*counts_of(requests), float(has_decayed), *batches]


def requests_of_node(flags: Tensor, read_before: int) -> Tensor:
    """Return what is added to `step_flags` where a model is sharded: the requests of the node.

    Args:
        flags: maximum over the node, of `flags`.
        read_before: requests that have been read in this step, which the node had not when it made them.
    """
    _, stop, save, last, minus_first = flags.unbind()
    # Not finite where the batches of the node differ.
    return torch.stack([stop, save * (not read_before & SAVE)]) / (last == -minus_first)


@dataclass(frozen=True)
class StepStatus:
    """What the ranks have said in a synchronous step. It is read in a later one, so that the host need not wait.

    Attributes:
        step: in which it was.
        read: returns the numbers; waits for the device.
    """

    step: int
    read: Callable[[], list[float]]

    @functools.cached_property
    def sums(self) -> list[float]:
        """The numbers, read once."""
        return self.read()

    @property
    def requests(self) -> int:
        """Those of all ranks."""
        return requests_of(*self.sums[:2])

    @property
    def has_decayed(self) -> bool:
        """Whether the learning rate of any rank has fallen."""
        return self.sums[2] > 0

    @property
    def have_ended(self) -> bool:
        """Whether the data of all ranks have."""
        return max(self.sums[3:]) < 0

    @property
    def is_at_one_batch(self) -> bool:
        """Whether all ranks are."""
        num_stop, _, _, *batches = self.sums
        return math.isfinite(num_stop) and len(set(map(abs, batches))) == 1


# Faults ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What a rank has found.

    Attributes:
        rank_of_kind: of several faults that with the lowest is raised: later ones may be its consequences.
        error: raised for it on all ranks.
        text: of the error; says on which rank it is.
        is_skipped: whether a step that may be skipped is skipped for it: an inf or NaN in a gradient.
    """

    rank_of_kind: int
    error: type[Exception]
    text: str
    is_skipped: bool = False


class Faults:
    """What a rank has found, as flags on the device; described only where one is set.

    Examples:
        >>> faults = Faults()
        >>> faults.add(torch.tensor([False, True]), ["a", "b"], lambda name: Fault(4, ValueError, name))
        >>> bool(faults.any(torch.device("cpu"))), faults.first().text
        (True, 'b')
    """

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Sequence[str], Callable[[str], Fault]]] = []

    def add(self, flags: Tensor, names: Sequence[str], describe: Callable[[str], Fault]) -> None:
        """Add flags: bool, one of each name, of any shape; and what describes the fault of a name."""
        self._found.append((flags, names, describe))

    def any(self, device: torch.device) -> Tensor:
        """Return whether one is set: bool, a scalar on the device."""
        return any_of((flags for flags, _, _ in self._found), device)

    def first(self, order: Sequence[str] = ()) -> Fault | None:
        """Return the one with the lowest `rank_of_kind`, None if none is set; waits for the device.

        Args:
            order: of names, for those of one kind.
        """
        places = {name: place for place, name in enumerate(order)}
        found = [
            (describe(name), places.get(name, 0))
            for flags, names, describe in self._found
            for name in compress(names, flags.view(-1).tolist())
        ]
        return min(found, key=lambda each: (each[0].rank_of_kind, each[1]), default=(None, 0))[0]


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
    nothing = constant((False,), torch.bool, device)  # so that there is one
    return torch.cat([nothing, *(flag.to(device).view(-1) for flag in flags)]).any()


def first_fault(own: Fault | None, group: dist.ProcessGroup | None) -> Fault:
    """Return the fault that all ranks raise an error for, after a status that says that a rank has one.

    Collective: all ranks of the group, blocking.
    """
    faults = [fault for fault in gather(own, "faults", group) if fault is not None]
    unknown = Fault(0, ValueError, "A damaged status: it reported a fault, and no rank has found one.")
    return min(faults, key=lambda fault: fault.rank_of_kind, default=unknown)
