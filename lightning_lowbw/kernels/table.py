"""The table of a compress step's segments on a device: one row per tensor, and the workspace of the kernels.

The kernels of `gpu` run over all tensors at once and find them by this table. It is built once, and written again only
when an address, a length or a factor has changed. On a CPU the segments themselves are the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.kernels.reference import OtherPart, Segment, factors_of
from lightning_lowbw.kernels.tensors import device_of, upload

GPU_BLOCK = 2048  # elements per program
SURPLUS, MARGIN = 2, 32  # candidates aimed at: 2 k, and some more, or a small k might be missed by chance
ROOM = 4  # room for candidates, in units of the candidates aimed at: in its first steps a residual grows fast
# In units of the tensor's elements. A candidate takes 16 bytes of room: so the room is a byte per parameter at most.
# Without a bound it is 8 bytes at a sparsity of 0.9375, as much as a model and its gradient, in the middle of the run.
MOST_ROOM = 1 / 16
FREE_ROOM = 256  # candidates, 4 KiB: so much every tensor may have
LEAST_ROOM = 1.5  # in units of the candidates aimed at; if there is less, the whole tensor is searched
DIGITS = ((22, 9), (11, 11), (0, 11))  # the digits of a magnitude, from the highest: first bit, number of bits
BINS = 1 << 11  # values of the widest digit
# The share of the k-th magnitude's growth that the threshold follows: from one step to the next this grows less. A
# threshold that does not follow has four times as many candidates in the next step, for some times 1 / density steps.
FOLLOWED = 0.8
LEVELS_SHIFT = 7  # values of a block of levels, see `payloads.codec`
ALIGNMENT_BYTES, ALIGNMENT_NUMEL = 16, 8  # of the widest load; elements in it, of the narrowest dtype
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TableRow(NamedTuple):
    """The description of a tensor for the kernels: addresses in bytes, 0 for a missing tensor; the rest in elements.

    The address of the gradient is written into the table alone: it may change in each step.
    """

    residual: int
    momentum_buffer: int
    gradient: int
    weight: int
    square: int
    largest: int
    fault: int
    momentum_itemsize: int  # in bytes
    is_nesterov: int
    numel: int
    k: int
    aim: int  # candidates wanted
    capacity: int  # candidates there is room for; 0: the whole tensor is searched
    first_block: int
    first_candidate: int
    first_output: int


GRADIENT = TableRow._fields.index("gradient")


class Field(NamedTuple):
    """A tensor of a message, see `payloads.codec`; in elements."""

    num_sent: int
    first: int  # the number of its first sent element, counted over all tensors
    start: int  # the number of its first element, counted over all tensors
    numel: int
    first_block: int  # the number of the first block of its levels, counted over all tensors


class ArrivalRow(NamedTuple):
    """The description of a `reference.Arrival`."""

    out: int  # address
    weight: int  # address; 0 without a weight
    group: int  # the row of messages
    first: int  # the place of its first element in each message of the row
    num_sent: int  # its elements in each message
    shift: int  # a tile has 2^shift elements
    first_tile: int
    rate: int  # of the step: the bits of a float32


class JoinedRow(NamedTuple):
    """A tensor, or a part of one, in a vector of several; addresses in bytes, the rest in elements."""

    signal: int
    residual: int  # float32; 0 without
    start: int  # in the vector
    numel: int
    dtype: int  # of the signal: its number in `DTYPES`

    @classmethod
    def of(cls, signal: Tensor, part: slice, start: int, residual: Tensor | None = None) -> JoinedRow:
        """Return the row of a part of a contiguous tensor: by its address, because hundreds of views take long."""
        address = signal.data_ptr() + part.start * signal.itemsize
        return cls(address, _address(residual), start, part.stop - part.start, DTYPES.index(signal.dtype))


class Kind(NamedTuple):
    """What a kernel is compiled for; aligned: all tensors start at 16 bytes and have a multiple of 8 elements."""

    gradient: torch.dtype
    momentum_buffer: torch.dtype
    weight: torch.dtype
    is_adam: bool
    is_aligned: bool


class Workspace:
    """The state of `compress_many_` between steps: thresholds, the device's table of the tensors, and room for results.

    On the device it takes 8 KiB per tensor, and about a byte per parameter at most, mostly far less.

    The table is written again when an address has changed (gradients may move in every step), the factors when one has
    changed, the remaining state only when the tensors or their k have changed.

    Attributes:
        thresholds: magnitude that somewhat more than 2 k elements reach, per tensor; float32, on the device; 0 if none
            is known. They influence the time, never which elements are selected: no checkpoint need keep them.
        counts: elements that have reached the threshold in the last step, per tensor; int32, on the device.
    """

    def __init__(self) -> None:
        self.thresholds = torch.empty(0, dtype=torch.float32)
        self.rows: list[TableRow] = []  # of the segments, then of other parts
        self.kinds: list[Kind] = []
        self._sizes: list[tuple[int, int, int]] = []  # addresses of residuals, elements and k
        self._gradients: list[int] = []  # their addresses
        self._sources: tuple[Any, ...] = ()  # the values from which the rows are made
        self._constants: list[tuple[Any, ...]] = []  # of the factors

    def update(self, segments: Sequence[Segment]) -> None:
        """Take over the tensors of this step."""
        device = segments[0].residual.device
        others = [other for segment in segments for other in segment.other_parts]
        everything: list[Segment | OtherPart] = [*segments, *others]
        gradients = [segment.gradient.data_ptr() for segment in everything]
        sources = _sources(everything, gradients)
        self.num_tensors = len(segments)
        if sources != self._sources:
            self._describe(everything, gradients, device)
            self._sources = sources
        if gradients != self._gradients:
            self._host[:, GRADIENT] = gradients
            self.table = device_of(device).upload(torch.from_numpy(self._host.copy()))
            self._gradients = gradients
        constants = [
            (_NUMBERS(each), None if each.second_moment is None else _NUMBERS_OF_MOMENT(each.second_moment))
            for each in everything
        ]
        if constants != self._constants:
            self.factors = upload([factors_of(segment) for segment in everything], torch.float32, device)
            self._constants = constants

    def _describe(self, everything: list[Segment | OtherPart], gradients: list[int], device: torch.device) -> None:
        kinds = [_kind(*each) for each in zip(everything, gradients, strict=True)]
        rows = _rows(everything, kinds)
        sizes = [(row.residual, row.numel, row.k) for row in rows]
        if sizes != self._sizes:
            self.thresholds, self.last_kth = torch.zeros(2, len(rows), dtype=torch.float32, device=device)
        if sizes != self._sizes or kinds != self.kinds:
            self._allocate(rows, kinds, device)
        if rows != self.rows:
            self._host, self._gradients = np.array(rows, dtype=np.int64), []  # so that the table is written again
        self.rows, self.kinds, self._sizes = rows, kinds, sizes

    def _allocate(self, rows: Sequence[TableRow], kinds: Sequence[Kind], device: torch.device) -> None:
        num_blocks = [num_blocks_of(row.numel) for row in rows]
        # (kind, its first block, its number of blocks); the blocks of a kind are consecutive
        self.launches: list[tuple[Kind, int, int]] = []
        owners: list[Tensor] = []
        for kind in dict.fromkeys(kinds):
            alike = [number for number, other in enumerate(kinds) if other == kind]
            self.launches.append((kind, rows[alike[0]].first_block, sum(num_blocks[number] for number in alike)))
            owners += [torch.full((num_blocks[number],), number, dtype=torch.int32, device="cpu") for number in alike]
        self.owners = torch.cat(owners).to(device)
        self.counts, self.counting = torch.zeros(2, len(rows), dtype=torch.int32, device=device)
        self.block_counts = torch.empty_like(self.owners)
        self.block_bases = torch.empty_like(self.owners)
        # For the selection, which has at most as many blocks.
        self.ends = torch.empty(len(rows), dtype=torch.int64, device=device)
        self.kth, self.left = torch.empty(2, len(rows), dtype=torch.int32, device=device)
        self.bins = torch.zeros(len(rows), BINS, dtype=torch.int32, device=device)
        self.found = torch.zeros(2, self.owners.numel(), dtype=torch.int32, device=device)  # greater values, and ties
        room = sum(row.capacity for row in rows)
        self.positions, self.ordered_positions = torch.empty(2, room, dtype=torch.int32, device=device)
        self.values, self.ordered_values = torch.empty(2, room, dtype=torch.float32, device=device)


class JoinedTable:
    """Tensors that are one vector, on a device; written again only if an address or a size has changed.

    Attributes:
        rows: the rows of the tensors, in the order of their starts.
        table: the same on the device: int64.
    """

    table: Tensor

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._layout: list[tuple[int, int]] = []
        self._spans: dict[tuple[int, int], Tensor] = {}

    def update(self, rows: Iterable[tuple[int, ...]], device: torch.device) -> JoinedTable:
        """Take over the tensors of this call, each a `JoinedRow`, or a tuple like it; return the table."""
        rows, is_here = list(rows), bool(self.rows) and self.table.device == device
        if not is_here or rows != self.rows:
            layout = [(start, numel) for _, _, start, numel, _ in rows]
            if not is_here or layout != self._layout:
                self._layout, self._spans = layout, {}
            self.table, self.rows = upload(rows, torch.int64, device), rows
        return self

    def spans(self, num_rows: int, size: int) -> Tensor:
        """Return for each block of GPU_BLOCK elements its first tensor, and the tensor behind its last: int32.

        Args:
            num_rows: the number of rows of the vector; each row has blocks of its own.
            size: elements of a row.
        """
        if (num_rows, size) not in self._spans:
            columns, rows = np.arange(0, size, GPU_BLOCK), np.arange(num_rows)[:, None]
            begins, ends = rows * size + columns, rows * size + np.minimum(columns + GPU_BLOCK, size)
            starts, numels = np.array(self._layout, dtype=np.int64).reshape(-1, 2).T
            firsts = np.searchsorted(starts + numels, begins, side="right")
            spans = np.stack([firsts, np.searchsorted(starts, ends, side="left")], axis=-1)
            self._spans[num_rows, size] = upload(spans.ravel().tolist(), torch.int32, self.table.device)
        return self._spans[num_rows, size]


def num_blocks_of(numel: int) -> int:
    """Return the number of blocks of GPU_BLOCK elements."""
    return -(-numel // GPU_BLOCK)


def _tensors(segment: Segment | OtherPart) -> tuple[Tensor | None, ...]:
    """Return the tensors whose addresses are in a `TableRow`, in its order; without the gradient."""
    moment, weight = segment.second_moment, None if segment.weight_decay == 0 else segment.weight
    square, largest = (None, None) if moment is None else (moment.square, moment.largest)
    return segment.residual, segment.momentum_buffer, None, weight, square, largest, segment.fault


def _kind(segment: Segment | OtherPart, gradient: int) -> Kind:
    """Return the kind of the kernel that corrects a tensor, or updates a second moment."""
    moment, buffer, weight = segment.second_moment, segment.momentum_buffer, segment.weight
    addresses = [gradient, *map(_address, _tensors(segment)[:6])]
    squares = torch.float32 if moment is None else moment.square.dtype
    return Kind(
        segment.gradient.dtype,
        squares if buffer is None else buffer.dtype,
        segment.gradient.dtype if weight is None else weight.dtype,  # so decay makes no other kind
        moment is not None,
        segment.gradient.numel() % ALIGNMENT_NUMEL == 0 and not any(address % ALIGNMENT_BYTES for address in addresses),
    )


_NUMBERS = attrgetter("momentum", "weight_decay", "ahead", "sign", "dampening")
_NUMBERS_OF_MOMENT = attrgetter("beta2", "share", "eps", "corrections")


def _sources(segments: Sequence[Segment | OtherPart], gradients: Sequence[int]) -> tuple[Any, ...]:
    """Return the values from which the table is made, apart from the addresses of gradients; in few calls."""
    moments = [segment.second_moment for segment in segments if segment.second_moment is not None]
    tensors = [
        tensor
        for key in ("residual", "momentum_buffer", "weight", "fault")
        for tensor in map(attrgetter(key), segments)
    ]
    tensors += [tensor for moment in moments for tensor in (moment.square, moment.largest)]
    return (
        [None if each is None else (each.data_ptr(), each.numel(), each.dtype) for each in tensors],
        [(each.k, each.nesterov, each.weight_decay == 0, each.second_moment is None) for each in segments],
        [(each.gradient.dtype, at % ALIGNMENT_BYTES) for each, at in zip(segments, gradients, strict=True)],
    )


def _rows(segments: Sequence[Segment | OtherPart], kinds: Sequence[Kind]) -> list[TableRow]:
    """Return the table; the blocks of one kind are consecutive, candidates and output are in order."""
    first_blocks, num_blocks = [0] * len(segments), 0
    for kind in dict.fromkeys(kinds):
        for number, segment in enumerate(segments):
            if kinds[number] == kind:
                first_blocks[number] = num_blocks
                num_blocks += num_blocks_of(segment.gradient.numel())
    rows: list[TableRow] = []
    first_candidate = first_output = 0
    for segment, first_block in zip(segments, first_blocks, strict=True):
        numel, buffer = segment.gradient.numel(), segment.momentum_buffer
        aim = SURPLUS * segment.k + MARGIN
        capacity = min(ROOM * aim, numel, max(FREE_ROOM, int(numel * MOST_ROOM)))
        capacity = capacity if segment.k and capacity >= LEAST_ROOM * aim else 0
        sizes = numel, segment.k, aim, capacity, first_block, first_candidate, first_output
        flags = 0 if buffer is None else buffer.itemsize, int(segment.nesterov and buffer is not None)
        rows.append(TableRow._make((*map(_address, _tensors(segment)), *flags, *sizes)))
        first_candidate += capacity
        first_output += segment.k
    return rows


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
