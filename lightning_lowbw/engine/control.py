"""The control message: everything that ranks exchange apart from tensors, in one row of numbers that is summed.

Some numbers are sums (the number of ranks that have a gradient, the mean loss, the number of requests to stop). Then
each rank has two elements of its own: the number of its first fault, such as an inf in a gradient (see `faults`), and a
mark, which is equal on all ranks at the same step with the same weights. If requests to stop or to save are not among
the sums, they are the bits above the mark, and need no extra bytes.

Where ranks must agree and exchange nothing else, for instance after a step whose gradients DDP reduces, they exchange
`flags` alone.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbw.ops.table import upload
from lightning_lowbw.where.agreement import checksum

MODULUS = 1 << 10  # of counts and of checksums in a mark: together below 2^20
BY_CLIPPING = MODULUS // 2  # added to the number of the batch in an exchange before clipping by hand
STOP, SAVE, ALL = 1, 2, 4  # requests, as bits above a mark: together below 2^22, which float32 carries exactly
EXACT = 1 << 24  # integers below are exact in float32


@dataclass(frozen=True)
class Control:
    """The sum of the control messages of all ranks.

    Attributes:
        sums: over the ranks.
        faults: of each rank: 0, or the number of its first fault; see `faults`.
        marks: of each rank.
        requests: of any rank: `STOP` and `SAVE`.
    """

    sums: list[float]
    faults: list[int]
    marks: list[int]
    requests: int = 0

    @classmethod
    def read(cls, numbers: Tensor, num_ranks: int) -> Control:
        """Read the sum of the ranks' messages; the one wait for the device.

        Raises:
            ValueError: they contain numbers that no rank can have written; on all ranks that have received the same.
        """
        values = numbers.tolist()
        sums, others = values[: -2 * num_ranks], values[-2 * num_ranks :]
        if not (all(map(_is_whole, others)) and all(0 <= mark < MODULUS**2 * ALL for mark in others[num_ranks:])):
            raise ValueError(f"A damaged control message: {others} are no faults and marks of {num_ranks} ranks.")
        if any(math.isnan(number) for number in sums):
            raise ValueError(f"A damaged control message, or a NaN in what the ranks have counted: {sums}.")
        others = [round(value) for value in others]
        requests, marks = zip(*(divmod(number, MODULUS**2) for number in others[num_ranks:]), strict=True)
        return cls(sums, others[:num_ranks], list(marks), functools.reduce(operator.or_, requests))

    def differences(self) -> tuple[str, str]:
        """Return the counts and the checksums in the marks of all ranks, for a message; each empty if all are equal."""
        checksums, counts = zip(*(divmod(mark, MODULUS) for mark in self.marks), strict=True)
        return _by_rank(counts), _by_rank(checksums)


def control_message(
    sums: Sequence[float],
    fault: Tensor | float,
    mark: Tensor | int,
    rank: int,
    num_ranks: int,
    device: torch.device,
    requests: int = 0,
) -> Tensor:
    """Return a rank's message: float32, shape (sums + 2 ranks,); summed over the ranks it is read by `Control`."""
    numbers, own = [*sums, *[0.0] * (2 * num_ranks)], len(sums) + rank
    places: dict[int, Tensor] = {}
    for place, number in ((own, fault), (own + num_ranks, mark + MODULUS**2 * requests if requests else mark)):
        if isinstance(number, Tensor):
            places[place] = number
        else:
            numbers[place] = number
    message = upload(numbers, torch.float32, device)
    for place, number in places.items():
        message[place] = number
    return message


def _by_rank(numbers: Sequence[int]) -> str:
    shown = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers))
    return shown if len(set(numbers)) > 1 else ""


def _is_whole(value: float) -> bool:
    return abs(value) < EXACT and value == round(value)


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
        fault: the number of this rank's first fault; a scalar. None counts as 0.
        batch: the number of this rank's batch.
    """
    batch %= MODULUS
    message = upload([0.0, *counts_of(requests), float(batch), -float(batch)], torch.float32, device)
    if fault is not None:
        message[0] = fault
    return message


def read_flags(message: Tensor) -> tuple[int, int, bool]:
    """Return the largest fault number of any rank, the requests of all, and whether all are at one batch; waits for
    the device."""
    fault, num_stop, num_save, last, first = message.tolist()
    return round(fault), requests_of(num_stop, num_save), last == -first


def make_mark(count: int, weights: Iterable[Tensor] | None) -> Tensor | int:
    """Return a count of steps or batches and, where weights are given, a checksum of them, as one number."""
    mark = count % MODULUS
    return mark if weights is None else mark + MODULUS * (checksum(weights) % MODULUS)
