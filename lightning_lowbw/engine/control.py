"""The control message: what the ranks tell each other beside tensors, in one row of numbers that is summed.

Some numbers are sums (how many ranks have a gradient, the mean loss, who asks for a stop); then each rank has two
places of its own: a fault, which names the tensor that is not finite, and a mark, which is the same on all ranks that
are at the same step and have the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbw.ops.table import constant, upload
from lightning_lowbw.where.agreement import checksum

MODULUS = 1 << 10  # of counts and of checksums in a mark: together below 2^20, which float32 carries exactly


@dataclass(frozen=True)
class Control:
    """What all ranks have said.

    Attributes:
        sums: over the ranks.
        faults: of each rank: 0, or the number, from 1, of the first tensor that is not finite; negative for one that is
            not dense.
        marks: of each rank.
    """

    sums: list[float]
    faults: list[int]
    marks: list[int]

    @classmethod
    def read(cls, numbers: Tensor, num_ranks: int) -> Control:
        """Read the sum of the ranks' messages; the one wait for the device."""
        values = numbers.tolist()
        sums, others = values[: -2 * num_ranks], [round(value) for value in values[-2 * num_ranks :]]
        return cls(sums, others[:num_ranks], others[num_ranks:])

    @property
    def first_fault(self) -> tuple[int, int] | None:
        """The first rank with a fault, and the fault."""
        return next(((rank, fault) for rank, fault in enumerate(self.faults) if fault), None)


def control_message(
    sums: Sequence[float], fault: Tensor | float, mark: Tensor | int, rank: int, num_ranks: int, device: torch.device
) -> Tensor:
    """Return a rank's message: float32, shape (sums + 2 ranks,); summed over the ranks it is read by `Control`."""
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


def make_mark(count: int, weights: Iterable[Tensor] | None) -> Tensor | int:
    """Return a count of steps or backward passes and, where weights are given, a checksum of them, as one number."""
    mark = count % MODULUS
    return mark if weights is None else mark + MODULUS * (checksum(weights) % MODULUS)


def first_fault(faults: Sequence[Tensor]) -> Tensor:
    """Return 1 + the index of the first that is set, else 0: int64, a scalar on the device."""
    nothing = constant((False,), torch.bool, faults[0].device).squeeze()
    return torch.stack([nothing, *faults]).view(torch.uint8).argmax()  # of equal ones the first
