"""An exchange of the largest elements that may be in progress, and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_lowbw.ops.averages import Arrival
from lightning_lowbw.ops.dispatch import averages_for
from lightning_lowbw.what.sparse_sum import Sparse

if TYPE_CHECKING:
    from lightning_lowbw.engine.sparse_exchange import SparseExchange

Step = tuple[Tensor, Tensor | None, float]  # room, the weight that is stepped, the rate


class SparseWork:
    """The means of the largest elements of tensors, of an exchange that may be in progress.

    Attributes:
        is_sparse: whether it is known which elements have been sent.
        payload: with which they were sent; that of the exchange may have been replaced since.
    """

    is_sparse = True

    def __init__(self, exchange: SparseExchange) -> None:
        self.exchange, self.payload = exchange, exchange.payload

    def finish(self) -> None:
        """Wait for what is in progress."""

    def take_back(self) -> None:
        """Put this rank's own elements back into its residuals, if the others will not average them.

        In place:
            The residuals.
        """

    def average_(self, outs: Mapping[str, Tensor]) -> None:
        """Write the means into dense tensors.

        In place:
            `outs`: of each tensor one of its size: float32, flat, contiguous; overwritten.
        """
        self.step_({name: (out, None, 0.0) for name, out in outs.items()})

    def step_(self, steps: Mapping[str, Step]) -> None:
        """Step weights where any participant has sent an element: ``w = w - rate mean``.

        In place:
            The weights, and the workspace, which is what `average_` writes where there is no weight, and else undefined
            afterwards.

        Args:
            steps: of each tensor a workspace of its size, its weight, and the rate: float32, flat, contiguous.
        """
        if not steps:
            return
        payload, device = self.payload, next(iter(steps.values()))[0].device
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
        """Yield the elements, of local ranks with parts of equal sizes together."""
        raise NotImplementedError


class GatheredWork(SparseWork):
    """Messages of all participants, in progress.

    Args:
        exchange: that begins it.
        numels: elements of each whole tensor, by name.
        density: the fraction that is sent.
        sizes: bytes of the elements in the message of each local rank.
        control_bytes: of the numbers behind them.
        message: this rank's own.
    """

    def __init__(
        self,
        exchange: SparseExchange,
        numels: Mapping[str, int],
        density: float,
        sizes: list[int],
        control_bytes: int,
        message: Tensor,
    ) -> None:
        super().__init__(exchange)
        self.numels, self._density, self._sizes, self._control_bytes = numels, density, sizes, control_bytes
        self._message: Tensor | None = message
        self._gathered: Tensor | None = None
        try:
            self._work = exchange.peers.begin_gather(message)
        except BaseException:
            self.take_back()
            raise

    def wait(self) -> Tensor:
        """Return the messages of all: uint8, shape (local ranks, participants, nbytes)."""
        if self._gathered is None:
            device = next(iter(self.exchange.residuals.values())).device
            with self.exchange.peers.ledger.waiting(device):
                self._gathered = self._work.wait()
        return self._gathered

    def finish(self) -> None:
        self.wait()

    def take_back(self) -> None:
        if self._message is None:  # has been taken back
            return
        peers, exchange = self.exchange.peers, self.exchange
        numels = dict(zip(self.numels, exchange.local_numels(self.numels, peers.local_rank), strict=True))
        numels = {name: numel for name, numel in numels.items() if numel}
        own = self._message[: self._sizes[peers.local_rank]].view(1, 1, -1)
        self._message = None
        if not numels:
            return
        sizes = list(numels.values())
        counts = [self.payload.num_sent(numel, self._density) for numel in sizes]
        positions, values = (each.flatten().split(counts) for each in self.payload.decode(own, sizes, self._density))
        exchange.put_back(dict(zip(numels, zip(positions, values, strict=True), strict=True)))

    def controls(self) -> Tensor:
        """Return the sum of the control messages of all ranks: float32, in one order, the same bits everywhere."""
        gathered = self.wait()
        controls = (
            gathered[..., gathered.shape[-1] - self._control_bytes :].contiguous().view(torch.float32).flatten(0, 1)
        )
        first, *others = controls
        return sum(others, first)

    def _decode(self) -> Iterator[Decoded]:
        peers, gathered, payload = self.exchange.peers, self.wait(), self.payload
        if self.exchange.damaged is None:
            self.exchange.damaged = torch.zeros((), dtype=torch.bool, device=gathered.device)
        parts = [
            {name: part for name, numel in self.numels.items() if (part := peers.part(numel, each)).stop > part.start}
            for each in range(len(self._sizes))
        ]
        sizes = [[part.stop - part.start for part in of_rank.values()] for of_rank in parts]
        for numels, ranks in groupby(range(len(sizes)), key=lambda each: sizes[each]):
            if numels:
                mine = list(ranks)
                messages = gathered[mine[0] : mine[-1] + 1, :, : self._sizes[mine[0]]]
                positions, values = payload.decode(messages, numels, self._density, self.exchange.damaged)
                counts = [payload.num_sent(numel, self._density) for numel in numels]
                places = [place for row, each in enumerate(mine) for place in _place(parts[each], counts, row)]
                yield Decoded(positions, values, places)


class ReducedWork(SparseWork):
    """Sparse means that have been computed: by the reduce-scatter."""

    def __init__(self, exchange: SparseExchange, means: dict[str, Sparse]) -> None:
        super().__init__(exchange)
        self._means = means

    def _decode(self) -> Iterator[Decoded]:
        positions, values = (torch.cat(column).view(1, 1, -1) for column in zip(*self._means.values(), strict=True))
        counts = [each.numel() for each, _ in self._means.values()]
        yield Decoded(positions, values, _place(dict.fromkeys(self._means, slice(None)), counts, 0))


class DenseWork(SparseWork):
    """Dense means that have been computed: by an all-reduce."""

    is_sparse = False

    def __init__(self, exchange: SparseExchange, means: dict[str, Tensor]) -> None:
        super().__init__(exchange)
        self._means = means

    def average_(self, outs: Mapping[str, Tensor]) -> None:
        for name, out in outs.items():
            out.copy_(self._means[name])


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
