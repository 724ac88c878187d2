"""The sum of sparse vectors over ranks at a volume that does not grow with the ranks: reduce-scatter, then all-gather.

Every rank owns a part of the index space, which is that of all sparse tensors of a step, concatenated. A rank
sends to each owner what it has selected in the owner's part; the owner adds up, and sends the largest sums to all.

Source: after Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk),
arXiv 2201.07598. Deviations: all messages have a fixed size, because agreeing on sizes costs a round trip; the parts
follow from the last step's result, without a separate message; sums that are not sent out stay at their owner.

Nothing is lost: the sums sent out plus the elements that ranks get back equal the selected elements, up to the rounding
of a float32 sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt

import torch
from torch import Tensor

from lightning_lowbw.compress.codec import MAX_NUMEL, SparseCodec
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import upload

Sparse = tuple[Tensor, Tensor]  # (positions int64, values), positions ascending

COUNT_BYTES = 4  # an int32 in front of the elements
GATHERED = 4  # what all ranks together are handed by the owners of a sparse reduce-scatter, in units of k


def scatter_capacity(num_selected: int, num_ranks: int) -> int:
    """Return how many elements a rank can send to each owner in the sparse reduce-scatter: at least k / W.

    A quarter above the mean, because the owners' parts are balanced by the steps before, and twice the standard
    deviation of a count. What does not fit stays with its sender, so an overflow costs time and no gradient.
    """
    mean = num_selected // num_ranks
    return min(num_selected, mean + mean // 4 + 2 * isqrt(mean) + 1)


def gather_capacity(num_selected: int, num_ranks: int) -> int:
    """Return how many sums each owner can hand out in the sparse reduce-scatter: GATHERED k / W, rounded up."""
    return -(-GATHERED * num_selected // num_ranks)


def message_sizes(codec: SparseCodec, numel: int, num_selected: int, num_ranks: int) -> tuple[int, int]:
    """Return the bytes of a message to an owner, and of one from it, where the parts of all owners are equally wide."""
    width = -(-numel // num_ranks)
    capacities = scatter_capacity(num_selected, num_ranks), gather_capacity(num_selected, num_ranks)
    to_owner, from_owner = (COUNT_BYTES + codec.nbytes([each], [max(each, width)]) for each in capacities)
    return to_owner, from_owner


def scatter_operations(num_tensors: int, num_ranks: int) -> int:
    """Return about how many operations the host calls for a reduce-scatter, each of its 10 waits for a GPU as 5.

    As benchmarks/results/launches.md counts them: some for each owner, and for each tensor of one, of which an owner of
    small tensors has about half.
    """
    return 200 + 10 * 5 + 14 * num_ranks + 12 * (num_tensors // 2)


@dataclass(frozen=True)
class Outgoing:
    """A rank's selection, sorted by owner.

    Attributes:
        message: one row per owner; uint8, shape (ranks, nbytes). That of the rank itself is not read.
        own: what it has selected in its own part: all of it, no message bounds it.
        unsent: of each element selected: its value if it did not fit, else the rounding error; 0 in the own part.
    """

    message: Tensor
    own: Sparse
    unsent: Tensor


@dataclass(frozen=True)
class Owned:
    """The sums of an owner's part.

    Attributes:
        message: the sums it hands out; uint8, shape (nbytes,).
        unsent: of each sum: its value if it does not, else the rounding error.
    """

    message: Tensor
    unsent: Sparse


@dataclass(frozen=True)
class Reduced:
    """The result that all ranks read from the owners' messages; the same bits everywhere.

    Attributes:
        mean: 1/N of the sums.
        boundaries: where the parts begin in the next step.
    """

    mean: Sparse
    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class SparseSum:
    """One step's reduction as three pure phases; positions are global, in the index space of all tensors.

    `prepare` (each rank) - all-to-all of the rows - `combine` (each owner) - all-gather - `finish` (each rank).

    Args:
        numels: elements of each tensor.
        num_selected: elements that each rank has selected, of all tensors together; at most.
        boundaries: where each rank's part begins, and the end of the last; see `even_boundaries`.
        codec: of the elements on the wire.

    Raises:
        ConfigurationError: there are more elements than positions.
    """

    numels: tuple[int, ...]
    num_selected: int
    boundaries: tuple[int, ...]
    codec: SparseCodec

    def __post_init__(self) -> None:
        if sum(self.numels) > MAX_NUMEL:
            raise ConfigurationError(
                f"{sum(self.numels)} elements in sparse tensors; a reduce-scatter has positions for {MAX_NUMEL}."
            )

    @property
    def num_ranks(self) -> int:
        """The number of ranks, each with a part of its own."""
        return len(self.boundaries) - 1

    @property
    def widths(self) -> list[int]:
        """The elements of each part."""
        return [end - begin for begin, end in pairwise(self.boundaries)]

    @property
    def scatter_capacity(self) -> int:
        """The elements that fit into a row of `Outgoing.message`."""
        return scatter_capacity(self.num_selected, self.num_ranks)

    @property
    def gather_capacity(self) -> int:
        """The elements that fit into `Owned.message`."""
        return gather_capacity(self.num_selected, self.num_ranks)

    def prepare(self, rank: int, selected: Sparse) -> Outgoing:
        """Sort a rank's selection by owner.

        Wire:
            A row is the number of elements selected there (int32), then the elements; of more than fit, the same
            fraction of every tensor, and of each tensor the largest.

        Args:
            rank: this one.
            selected: at most `num_selected` elements, distinct, ascending; values of any floating dtype.
        """
        # Positions ascend: the elements of an owner are a range, whose ends a search finds.
        positions, values = selected[0], selected[1].float()
        edges = upload(self.boundaries, torch.int64, positions.device)
        ends = torch.searchsorted(positions, edges)
        cuts, nbytes = ends.tolist(), self._nbytes(self.scatter_capacity)
        message = torch.zeros((self.num_ranks, COUNT_BYTES + nbytes), dtype=torch.uint8, device=positions.device)
        message[:, :COUNT_BYTES] = ends.diff().to(torch.int32).view(torch.uint8).view(-1, COUNT_BYTES)
        unsent = values.clone()
        for owner, (begin, end) in enumerate(pairwise(cuts)):
            if owner == rank:
                unsent[begin:end] = 0
                continue
            here, there = positions[begin:end], values[begin:end]
            sent = self._largest(here, there, self.scatter_capacity)
            local = here[sent] - self.boundaries[owner]
            packed, rounded = self._pack(local, there[sent], self.scatter_capacity)
            unsent[begin:end][sent] -= rounded
            message[owner, COUNT_BYTES:] = packed
        mine = slice(cuts[rank], cuts[rank + 1])
        return Outgoing(message, (positions[mine], values[mine]), unsent)

    def combine(self, rank: int, own: Sparse, received: Tensor) -> Owned:
        """Add up, in rank order, what all ranks selected in the part of one, and choose what is handed out.

        Wire:
            The number of elements selected there by all ranks, the number handed out (int32), then those elements.
            Of more than fit the same fraction of every tensor, so that none with small gradients is left waiting, and
            of each tensor the largest.

        Args:
            rank: the owner.
            own: of `prepare` on this rank.
            received: the rows of all ranks for this owner: uint8, shape (ranks, nbytes).

        Raises:
            ValueError: a row is damaged: its numbers or positions cannot be.
        """
        counts = received[:, :COUNT_BYTES].contiguous().view(torch.int32).flatten().tolist()
        counts[rank] = own[0].numel()
        if not all(0 <= count <= self.num_selected for count in counts):
            raise ValueError(f"A damaged message: {counts} elements; a rank has selected {self.num_selected} at most.")
        # Of this rank's own selection nothing was sent, so that nothing is rounded.
        others = torch.cat([received[:rank], received[rank + 1 :]])[:, COUNT_BYTES:]
        sent = [min(count, self.scatter_capacity) for sender, count in enumerate(counts) if sender != rank]
        parts = self._unpack(others, [rank] * len(sent), self.scatter_capacity, sent)
        positions, sums = sum_in_order([*parts[:rank], own, *parts[rank:]])
        handed = self._largest(positions, sums, self.gather_capacity)
        local = positions[handed] - self.boundaries[rank]
        packed, rounded = self._pack(local, sums[handed], self.gather_capacity)
        unsent = sums.clone()
        unsent[handed] -= rounded
        # How many elements were selected in this part, by which parts are balanced, and how many sums follow.
        header = upload([sum(counts), local.numel()], torch.int32, packed.device).view(torch.uint8)
        message = torch.cat([header, packed])
        return Owned(message, (positions, unsent))

    def finish(self, gathered: Tensor) -> Reduced:
        """Read the messages of all owners.

        Args:
            gathered: of all owners, in rank order: uint8, shape (ranks, nbytes).

        Raises:
            ValueError: a message is damaged: its numbers or positions cannot be.
        """
        header = gathered[:, : 2 * COUNT_BYTES].contiguous().view(torch.int32).tolist()
        most = self.num_ranks * self.num_selected
        if not all(0 <= count <= min(mass, self.gather_capacity) and mass <= most for mass, count in header):
            raise ValueError(
                f"A damaged message: elements selected and handed out of each part are {header}; they may be "
                f"{most} and {self.gather_capacity}."
            )
        # Of each owner: elements selected in its part, and sums handed out.
        masses, counts = ([*column] for column in zip(*header, strict=True))
        owners = range(self.num_ranks)
        parts = self._unpack(gathered[:, 2 * COUNT_BYTES :], owners, self.gather_capacity, counts)
        positions, sums = (torch.cat(column) for column in zip(*parts, strict=True))
        boundaries = self._rebalance(masses, counts, positions)
        return Reduced((positions, sums * (1.0 / self.num_ranks)), boundaries)

    def join(self, parts: Sequence[Sparse]) -> Sparse:
        """Concatenate the sparse vectors of the tensors."""
        local, values = (torch.cat(column) for column in zip(*parts, strict=True))
        starts, counts = accumulate(self.numels[:-1], initial=0), [positions.numel() for positions, _ in parts]
        start, count = upload([[*starts], counts], torch.int64, local.device)
        return local + start.repeat_interleave(count, output_size=local.numel()), values

    def split(self, *wholes: Sparse) -> list[list[Sparse]]:
        """Undo `join`, for any subsets of the elements in ascending order; waits for a GPU, once for all of them."""
        starts = upload(accumulate(self.numels, initial=0), torch.int64, wholes[0][0].device)
        cuts = torch.stack([torch.searchsorted(positions, starts) for positions, _ in wholes]).tolist()
        parts = []
        for (positions, values), edges in zip(wholes, cuts, strict=True):
            local = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
            parts.append([(local[begin:end], values[begin:end]) for begin, end in pairwise(edges)])
        return parts

    def _largest(self, positions: Tensor, values: Tensor, capacity: int) -> Tensor | slice:
        """Return which elements fit, ascending: of each tensor the same fraction, the largest of it."""
        if positions.numel() <= capacity:
            return slice(None)
        # Selecting is several times faster than sorting.
        edges = upload(accumulate(self.numels, initial=0), torch.int64, positions.device)
        counts = torch.searchsorted(positions, edges).diff()
        tensor = torch.repeat_interleave(counts, output_size=positions.numel())
        first = counts.cumsum(0) - counts
        place = torch.arange(positions.numel(), device=positions.device) - first[tensor]
        quantile = (place + 0.5).double() / counts[tensor]  # of a tensor's elements, from the largest down
        num_sent = torch.zeros_like(counts).index_add_(0, tensor, _are_smallest(quantile, capacity).long())
        magnitudes, is_chosen = values.abs(), torch.zeros_like(positions, dtype=torch.bool)
        for begin, count, sent in torch.stack([first, counts, num_sent], 1).tolist():
            if sent:
                here = slice(begin, begin + count)
                is_chosen[here] = _are_smallest(-magnitudes[here], sent)
        return is_chosen.nonzero().squeeze(1)  # once: a GPU is waited for

    def _rebalance(self, masses: list[int], counts: list[int], positions: Tensor) -> tuple[int, ...]:
        """Return the boundaries of parts with equal numbers of selected elements.

        Each element handed out stands for `masses / counts` of its part. In integers, because ranks on unlike machines
        have to find the same.
        """
        # The j-th boundary is where j / W of all selected elements are before it.
        total, ends, starts = sum(masses), [*accumulate(masses)], [*accumulate(counts, initial=0)]
        marks, part = [], 0
        for number in range(1, self.num_ranks):
            target = number * total // self.num_ranks
            while part < self.num_ranks - 1 and ends[part] <= target:
                part += 1
            before = ends[part] - masses[part]
            marks.append(starts[part] + (target - before) * counts[part] // max(1, masses[part]))
        if positions.numel() == 0:
            return self.boundaries
        places = [min(mark, positions.numel() - 1) for mark in marks]
        inner = positions[upload(places, torch.int64, positions.device)].tolist()
        return (0, *inner, self.boundaries[-1])

    def _numel(self, capacity: int) -> int:
        """Return the index space of a message: one for all owners, so that their messages have one size."""
        return max(capacity, *self.widths)

    def _nbytes(self, capacity: int) -> int:
        return self.codec.nbytes([capacity], [self._numel(capacity)])

    def _pack(self, positions: Tensor, values: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Return a message of `capacity` elements, filled up with zeros behind the last, and the values it carries."""
        # The last position again, with zeros: the code is one of ascending positions.
        padding = capacity - positions.numel()
        last = positions[-1:] if positions.numel() else positions.new_zeros(1)
        padded = torch.cat([positions, last.expand(padding)]), torch.cat([values, values.new_zeros(padding)])
        message = self.codec.encode([padded], [self._numel(capacity)])
        (sent,) = self.codec.decode_values(message, [capacity], [self._numel(capacity)])
        return message, sent[: positions.numel()]

    def _unpack(self, messages: Tensor, owners: Sequence[int], capacity: int, counts: Sequence[int]) -> list[Sparse]:
        """Return the elements of several messages that have room for `capacity`, all read together; waits for a GPU.

        Args:
            messages: one row each.
            owners: about whose part each is.
            capacity: elements that each has room for.
            counts: elements of each, at most `capacity`: the first ones.

        Raises:
            ValueError: they are not distinct positions in the owner's part, ascending.
        """
        damaged = torch.zeros((), dtype=torch.bool, device=messages.device)
        positions, values = self.codec.decode(messages, [capacity], [self._numel(capacity)], damaged)
        table = [counts, [self.widths[owner] for owner in owners], [self.boundaries[owner] for owner in owners]]
        count, width, start = upload(table, torch.int64, messages.device).unsqueeze(2)
        # What fills a message up behind its last element is no element.
        is_there = torch.arange(capacity, device=messages.device) < count
        is_wrong = is_there & (positions >= width)
        is_wrong[:, 1:] |= is_there[:, 1:] & (positions[:, 1:] <= positions[:, :-1])
        if damaged | is_wrong.any():  # checked here, because compiled passes write without a check
            raise ValueError("A damaged message: positions that are outside of their owner's part, or not ascending.")
        rows = zip(positions + start, values, counts, strict=True)
        return [(own[:number], sent[:number]) for own, sent, number in rows]


def even_boundaries(numels: Sequence[int], counts: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return parts of equal expectation where nothing is known but how many elements of each tensor are selected.

    Args:
        numels: elements of each tensor.
        counts: of these, selected by each rank; spread evenly over the tensor.
        num_ranks: the number of parts.
    """
    # Elements are taken to lie evenly in their tensor, so a boundary is a share of one.
    starts, ends = [*accumulate(numels, initial=0)], [*accumulate(counts)]
    boundaries, tensor = [0], 0
    for number in range(1, num_ranks):
        target = number * ends[-1] // num_ranks
        while tensor < len(counts) - 1 and ends[tensor] <= target:
            tensor += 1
        before = ends[tensor] - counts[tensor]
        boundaries.append(starts[tensor] + (target - before) * numels[tensor] // max(1, counts[tensor]))
    return (*boundaries, starts[-1])


def sum_in_order(parts: Sequence[Sparse]) -> Sparse:
    """Add up sparse vectors, equal positions in the order of the vectors: float32, positions ascending."""
    positions, places = torch.cat([positions for positions, _ in parts]).unique(return_inverse=True)
    sums = torch.zeros(positions.numel(), dtype=torch.float32, device=positions.device)
    for place, (_, values) in zip(places.split([p.numel() for p, _ in parts]), parts, strict=True):
        sums.index_add_(0, place, values.float())  # positions are distinct within a vector: no two additions meet
    return positions, sums


def _are_smallest(values: Tensor, count: int) -> Tensor:
    """Return of each value whether it is one of the `count` smallest, at least one; of equal ones the first."""
    bound = values.topk(count, largest=False, sorted=False).values.max()
    is_chosen, is_tied = values < bound, values == bound
    return is_chosen | (is_tied & (is_tied.cumsum(0) <= count - is_chosen.sum()))
