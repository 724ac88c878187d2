"""An exchange of the largest elements that may be in progress, and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbw.ops.averages import Arrival
from lightning_lowbw.ops.dispatch import averages_for
from lightning_lowbw.what.sparse_sum import Sparse

if TYPE_CHECKING:
    from lightning_lowbw.engine.sparse_exchange import SparseExchange

Step = tuple[Tensor, Tensor | None, float]  # room, the weight that is stepped, the rate


@dataclass
class SparseWork:
    """Messages in progress, or the means made of them.

    Args:
        exchange: that has begun it.
        numels: elements of each whole tensor, by name.
        density: the fraction that is sent.
        work: of the gather; has a `wait()`.
        sizes: bytes of the elements in the message of each local rank.
        control_bytes: of the numbers behind them.
        message: this rank's own.
        means: sparse means, if they have been computed.
        dense: dense means, if they have been computed.
    """

    exchange: SparseExchange
    numels: Mapping[str, int]
    density: float
    work: Any = None
    sizes: list[int] = field(default_factory=list)
    control_bytes: int = 0
    message: Tensor | None = None
    means: dict[str, Sparse] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    _gathered: Tensor | None = field(default=None, init=False)

    def wait(self) -> Tensor:
        """Return the messages of all: uint8, shape (local ranks, participants, nbytes)."""
        if self._gathered is None:
            device = next(iter(self.exchange.residuals.values())).device
            with self.exchange.peers.ledger.waiting(device):
                self._gathered = self.work.wait()
        return self._gathered

    def finish(self) -> None:
        """Wait for the messages, if there are any."""
        if self.work is not None:
            self.wait()

    def take_back(self) -> None:
        """Put this rank's own elements back into its residuals, because the others will not average them.

        In place:
            The residuals.
        """
        if self.message is None:  # all sent elements have been averaged
            return
        peers, exchange = self.exchange.peers, self.exchange
        numels = dict(zip(self.numels, exchange.local_numels(self.numels, peers.local_rank), strict=True))
        numels = {name: numel for name, numel in numels.items() if numel}
        own = self.message[: self.sizes[peers.local_rank]].view(1, 1, -1)
        self.message = None
        if not numels:
            return
        sizes = list(numels.values())
        counts = [exchange.payload.num_sent(numel, self.density) for numel in sizes]
        positions, values = (each.flatten().split(counts) for each in exchange.payload.decode(own, sizes, self.density))
        exchange.put_back(dict(zip(numels, zip(positions, values, strict=True), strict=True)))

    def controls(self) -> Tensor:
        """Return the sum of the control messages of all ranks: float32, in one order, the same bits everywhere."""
        gathered = self.wait()
        controls = (
            gathered[..., gathered.shape[-1] - self.control_bytes :].contiguous().view(torch.float32).flatten(0, 1)
        )
        first, *others = controls
        return sum(others, first)

    def average_(self, outs: Mapping[str, Tensor]) -> None:
        """Write the means into dense tensors.

        In place:
            `outs`: of each tensor one of its size: float32, flat, contiguous; overwritten.
        """
        if self.dense:
            for name, out in outs.items():
                out.copy_(self.dense[name])
        else:
            self._apply({name: (out, None, 0.0) for name, out in outs.items()})

    def step_(self, steps: Mapping[str, Step]) -> None:
        """Step weights where any participant has sent an element: ``w = w - rate mean``.

        In place:
            The weights, and the workspace, whose content is undefined afterwards.

        Args:
            steps: of each tensor a workspace of its size, its weight, and the rate: float32, flat, contiguous.
        """
        self._apply(steps)

    @property
    def is_sparse(self) -> bool:
        """Whether it is known which elements have been sent."""
        return not self.dense

    def _apply(self, steps: Mapping[str, Step]) -> None:
        if not steps:
            return
        payload, device = self.exchange.payload, next(iter(steps.values()))[0].device
        decoded = list(self._decode())
        if payload.mean_over == "ranks":
            kernels = averages_for(device)
            for each in decoded:
                if arrivals := each.arrivals(steps):
                    kernels.average_many_(arrivals, each.positions, each.values)
            return
        for name, (out, weight, rate) in steps.items():
            parts = _joined([part for each in decoded for part in each.of(name)])
            payload.average_(out, parts)
            if weight is not None:
                touched = torch.cat([positions for positions, _ in parts])
                weight[touched] = weight[touched].add_(out[touched], alpha=-rate)

    def _decode(self) -> Iterator[Decoded]:
        """Yield the received elements, of local ranks with parts of equal sizes together."""
        if self.means:
            positions, values = (torch.cat(column).view(1, 1, -1) for column in zip(*self.means.values(), strict=True))
            counts = [each.numel() for each, _ in self.means.values()]
            yield Decoded(positions, values, _place(dict.fromkeys(self.means, slice(None)), counts, 0))
            return
        peers, gathered, payload = self.exchange.peers, self.wait(), self.exchange.payload
        if self.exchange.damaged is None:
            self.exchange.damaged = torch.zeros((), dtype=torch.bool, device=gathered.device)
        parts = [
            {name: part for name, numel in self.numels.items() if (part := peers.part(numel, each)).stop > part.start}
            for each in range(len(self.sizes))
        ]
        sizes = [[part.stop - part.start for part in of_rank.values()] for of_rank in parts]
        for numels, ranks in groupby(range(len(sizes)), key=lambda each: sizes[each]):
            if numels:
                mine = list(ranks)
                messages = gathered[mine[0] : mine[-1] + 1, :, : self.sizes[mine[0]]]
                positions, values = payload.decode(messages, numels, self.density, self.exchange.damaged)
                counts = [payload.num_sent(numel, self.density) for numel in numels]
                places = [place for row, each in enumerate(mine) for place in _place(parts[each], counts, row)]
                yield Decoded(positions, values, places)


class Place(NamedTuple):
    """The position of the elements of a tensor, or a part of one, among those received."""

    name: str
    part: slice  # of the tensor
    row: int
    first: int
    num_sent: int


@dataclass(frozen=True)
class Decoded:
    """The elements that all participants have sent for parts of equal sizes.

    Attributes:
        positions: in the part: int64, shape (local ranks, participants, elements).
        values: float32, of the same shape.
        places: of the tensors.
    """

    positions: Tensor
    values: Tensor
    places: list[Place]

    def arrivals(self, steps: Mapping[str, Step]) -> list[Arrival]:
        """Return what a kernel takes."""
        arrivals = []
        for name, part, row, first, count in self.places:
            if name in steps:
                out, weight, rate = steps[name]
                own = None if weight is None else weight[part]
                arrivals.append(Arrival(out[part], row, first, count, own, rate))
        return arrivals

    def of(self, name: str) -> list[list[Sparse]]:
        """Return the sparse vectors of a tensor, one per participant, for each part of it that is here."""
        found = []
        for other, part, row, first, count in self.places:
            if other == name:
                mine = slice(first, first + count)
                positions, values = self.positions[row, :, mine], self.values[row, :, mine]
                shifted = positions + part.start if part.start else positions
                found.append(list(zip(shifted, values, strict=True)))
        return found


def _place(parts: Mapping[str, slice], counts: Sequence[int], row: int) -> list[Place]:
    ends = accumulate(counts)
    return [
        Place(name, part, row, end - count, count)
        for (name, part), end, count in zip(parts.items(), ends, counts, strict=True)
    ]


def _joined(pieces: list[list[Sparse]]) -> list[Sparse]:
    """Concatenate the parts of the local ranks, for each participant."""
    if len(pieces) == 1:
        return pieces[0]
    return [
        (torch.cat([positions for positions, _ in of_one]), torch.cat([values for _, values in of_one]))
        for of_one in zip(*pieces, strict=True)
    ]
