"""Tensors in few bits per value, with error feedback: the exchange of `Quantized`.

Each rank writes the N parts of its vector in few bits and sends part j to rank j; rank j averages what it got, and
sends the mean, in few bits as well, to all. Rounding errors stay in the residual of the rank that has rounded: those of
the vector on every rank, those of the mean, times N, on the owner of the part. Two ranks need no owners: each sends its
vector to the other, and the mean is rounded no more. Nor have averages that are hidden behind steps owners: nobody is
there to answer between two messages. So each sends its vector to all.

All tensors of a call are one vector. Signal and residual are read once, residual and message written once: on a CPU in
ranges that fit into the cache (`InRanges`), on a GPU by one kernel, which finds the tensors in a table (`InKernels`).
Only messages are allocated in the vector's size.

A linear format ("int8", "int4") cuts a vector into blocks of SCALED values and sends of each block one scale and of
each value the nearest integer in units of it. For dense values, mostly near zero, that is closer than the logarithmic
levels of `compress.codec`, which are made for the elements that top-k selects.

Source: error feedback on both ways as in Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
Double-Pass Error-Compensated Compression", arXiv 1905.05957; the server's work is divided among the ranks. A scale for
each small block as in Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning", arXiv
2111.08617. Deviation: rounds to nearest, not at random, because the error is fed back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import accumulate, zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_lowbw.arguments import check_one_of, names_arguments
from lightning_lowbw.comm.collectives import TensorWork, all_gather_bytes, all_reduce_bytes
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.compress.corrections import ErrorFeedback
from lightning_lowbw.compress.payload import FLOAT_BYTES, Message, Payload, Shapes
from lightning_lowbw.compress.selection import Residuals
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels import dispatch, gpu
from lightning_lowbw.kernels.dispatch import blocks_for
from lightning_lowbw.kernels.reference import SCALED, Code
from lightning_lowbw.kernels.table import DTYPES, JoinedRow, JoinedTable
from lightning_lowbw.kernels.tensors import allocate, copy_all_, flat, split_front
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.beside import Beside
from lightning_lowbw.sync.exchange import (
    Arrived,
    DenseMean,
    Faulty,
    Pending,
    Prepared,
    Signal,
)

RANGE = 1 << 18  # values, 1 MiB: they stay in the second cache, and are many beside the cost of a call
RANGE_OF_GPU = 1 << 24  # values, 64 MiB: few launches, and few bytes beside a model that takes more ranges than one

SCALE_BYTES = 2  # a bfloat16, an eighth of a bit per value

# Few bits per value ---------------------------------------------------------------------------------------------------


class QuantizedFormat(Protocol):
    """How the values of vectors are written in few bits; several vectors of one length at once, each by itself.

    A vector has at least one value. A message is written and read in ranges, so that on a CPU what belongs to a range
    stays in the cache. A range begins at a multiple of SCALED, and ends at one or with the vector; the message is the
    same however it is divided.

    Zero stays zero. Values that are too large for the format are written as its largest value.
    """

    def nbytes(self, numel: int) -> int:
        """Return the size of a vector of `numel` values, in bytes."""
        ...

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        """Write a range of vectors into their messages.

        In place:
            The messages; the values, which become their rounding errors.

        Args:
            messages: uint8, shape (vectors, nbytes(numel)).
            numel: values of a whole vector.
            start: of the range.
            values: float32 or wider, shape (vectors, values of the range).
        """
        ...

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """Return a range of what `write_` has written: float32, shape (vectors, stop - start).

        Raises:
            ValueError: the messages are not `nbytes(numel)` long.
        """
        ...


@dataclass(frozen=True)
class HalfFormat:
    """Values as floats of a half type: 16 bits each.

    Args:
        dtype: bfloat16 or float16. Float16 ends at 65504.
    """

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        sent, limit = messages.view(self.dtype)[:, start : start + values.shape[1]], torch.finfo(self.dtype).max
        sent.copy_(values.clamp(-limit, limit))  # a late burst would become inf
        values.sub_(sent)  # what is left is the rounding error, which error feedback sends later

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        sent = messages.view(self.dtype)[:, start:stop]
        return allocate(sent.shape, torch.float32, sent.device).copy_(sent)


@dataclass(frozen=True)
class LinearFormat:
    """Integers from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1 in units of a scale, [scales of all blocks | integers].

    A value that is not finite in float32 makes its whole block not finite.

    Args:
        bits: 8 or 4.
    """

    bits: int

    def nbytes(self, numel: int) -> int:
        return self._scales_end(numel) + self._integers_end(numel)

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        sent, integers = (messages[:, each] for each in self._sections(numel, start, start + values.shape[1]))
        scales = sent.new_empty((len(values), sent.shape[1] // SCALE_BYTES), dtype=torch.bfloat16)
        blocks_for(values, integers).encode_blocks_(values, scales, integers, self.bits)
        sent.copy_(scales.view(torch.uint8))  # a copy: a range may begin at an odd byte

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        received, integers = (messages[:, section] for section in self._sections(numel, start, stop))
        scales = received.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)  # aligned for its dtype
        values: Tensor = blocks_for(scales).decode_blocks(scales, integers, stop - start, self.bits)
        return values

    def _sections(self, numel: int, start: int, stop: int) -> tuple[slice, slice]:
        """Return where in a message the scales and the integers of a range are."""
        split = self._scales_end(numel)
        integers = slice(split + self._integers_end(start), split + self._integers_end(stop))
        return slice(self._scales_end(start), self._scales_end(stop)), integers

    def _scales_end(self, numel: int) -> int:
        return -(-numel // SCALED) * SCALE_BYTES

    def _integers_end(self, numel: int) -> int:
        return -(-numel * self.bits // 8)  # rounded up: the last byte of int4 may hold one value


def _check_size(messages: Tensor, nbytes: int) -> None:
    if messages.shape[1] != nbytes:
        raise ValueError(f"A message of {messages.shape[1]} bytes; {nbytes} were expected.")


FORMATS: dict[str, QuantizedFormat] = {  # by their public names; a file with another one adds it here
    "bfloat16": HalfFormat(torch.bfloat16),
    "float16": HalfFormat(torch.float16),
    "int8": LinearFormat(8),
    "int4": LinearFormat(4),
}

# What the kernels of a GPU are told of a format; those that they do not know are written in ranges there, too.
CODES: dict[str, Code] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": 8, "int4": 4}


def quantized_mean_bytes(numel: int, num_ranks: int, value_format: QuantizedFormat, *, is_hidden: bool = False) -> int:
    """Return the bytes a rank sends for a mean of vectors in few bits: 2 (W - 1) parts of ceil(numel / W) values.

    Of two ranks each sends its whole vector to the other; in hidden averages each sends it to all.

    On two levels that of a part of ceil(numel / ranks of a node) elements, between nodes; and in a node, to gather the
    parts of the mean, `all_gather_bytes` of a part in the vector's own dtype.
    """
    if num_ranks == 2 or is_hidden:
        return all_gather_bytes(value_format.nbytes(numel), num_ranks)
    return 2 * (num_ranks - 1) * value_format.nbytes(-(-numel // num_ranks))


# The payload and its exchange -----------------------------------------------------------------------------------------


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Quantized(Payload, key="quantized"):
    """Every element in few bits, with error feedback: rounding errors are added to the next message.

    Args:
        value_dtype: "bfloat16", "float16", "int8" or "int4"; the integers with a scale per block of 128 values. Under
            these names `TopK` sends another format, of levels: see `LinearFormat`, and `compress.codec`.

    Raises:
        ConfigurationError: the dtype is none of these.
    """

    value_dtype: str = "int8"

    can_be_early = can_be_hidden = True

    def __post_init__(self) -> None:
        check_one_of("value_dtype", self.value_dtype, tuple(FORMATS))

    @property
    def steps_to_loss(self) -> float | None:  # type: ignore[override]
        # int4 loses in one of three tasks: benchmarks/results/quantized_accuracy.md
        return None if self.value_dtype == "int4" else 1.0

    def exchange(self, peers: Peers, when: Schedule) -> QuantizedExchange:
        return QuantizedExchange(self, peers, is_hidden=bool(when.delay_steps))

    def uses_kernels(self, device: torch.device) -> bool:
        code = CODES.get(self.value_dtype)
        return isinstance(code, int) or (code is not None and device.type == "cuda")

    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        part, nbytes = -(-sum(map(math.prod, shapes)) // num_parts), FORMATS[self.value_dtype].nbytes
        in_node = Message("gather_in_node", FLOAT_BYTES * part)
        if when.delay_steps:
            in_node = Message("gather_in_node", num_participants * nbytes(part))
        if num_participants == 2 or when.delay_steps:
            return [Message("all_gather", nbytes(part)), in_node]
        of_owner = nbytes(-(-part // num_participants))  # to its owner, and back as a mean
        return [Message("all_to_all", of_owner), Message("all_gather", of_owner), in_node]


class QuantizedExchange:
    """Averages tensors in few bits per value; rounding errors are added to the next ones.

    Args:
        payload: what is sent; may be replaced between steps, on all ranks.
        peers: who takes part; on two levels the tensors are those of nodes, equal on the ranks of each.
        is_hidden: whether steps are taken between a message and its mean.

    Raises:
        ConfigurationError: averages are hidden, and among so many participants whole values are fewer bytes.
    """

    def __init__(self, payload: Quantized, peers: Peers, *, is_hidden: bool = False) -> None:
        self.payload, self.peers, self.is_hidden, num = payload, peers, is_hidden, peers.num_participants
        nbytes = quantized_mean_bytes(SCALED, num, FORMATS[payload.value_dtype], is_hidden=True)
        if is_hidden and num > 1 and nbytes >= all_reduce_bytes(FLOAT_BYTES * SCALED, num):
            raise ConfigurationError(
                f"delay_steps with {payload} among {num} participants: each would send its values to all others, which "
                "is more than an average of whole ones. Leave out delay_steps, or the compression."
            )
        self.residuals = Residuals()
        self.fault: Tensor | None = None
        self._tables: dict[tuple[str, ...], Tables] = {}

    def prepare(self, signal: Signal, correction: ErrorFeedback | None = None) -> Prepared:
        """Prepare tensors: any floating dtype and shape. Kernels of a GPU encode them now, and find inf and NaN."""
        if self._is_in_kernels(signal.values()):
            pending = PendingQuantized(self, signal, self._tables_of(signal))
            return Prepared(pending.send, pending.faults)
        return Prepared(lambda status, whole: PendingQuantized(self, signal, None).send(status, whole))

    def _tables_of(self, signal: Iterable[str]) -> Tables:
        """Return those of a fragment: another one may be in progress, or come between two of its averages."""
        return self._tables.setdefault(tuple(signal), Tables())

    def _is_in_kernels(self, tensors: Collection[Tensor]) -> bool:
        return (
            self.payload.value_dtype in CODES
            and self.peers.num_participants > 1
            and all(tensor.dtype in DTYPES for tensor in tensors)
            and any(tensor.numel() and dispatch.uses_triton(tensor.device) for tensor in tensors)
        )

    def to(self, device: torch.device) -> None:
        self.residuals.to(device)
        self.fault = None if self.fault is None else self.fault.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class PendingQuantized(Pending):
    """The first message: the parts of this rank's vector in few bits, for their owners; between two, all for the other.
    Where averages are hidden, all for all, and nothing is sent later.

    Behind them a status, and what is sent whole (`Beside`). Among more than two participants the second message has the
    means of the owners. On two levels each rank of a node does this for its part of every tensor, and the means are
    gathered in the node. With a single participant the mean is signal plus residual: nothing is sent or rounded.

    In place:
        The residuals; with the mean the signal, where it is contiguous, which becomes the mean: the same bits on all
        ranks.

    Collective: all ranks with tensors of the same sizes, on the ranks of a node equal ones.

    Wire:
        `quantized_mean_bytes` of all elements together: for int8 a quarter, for int4 an eighth of
        the float32 all-reduce, and a scale per 128 values. An all-to-all and an all-gather; between two one all-gather.

    Args:
        exchange: that has the residuals.
        signal: by name; sums are in float32, or wider if a tensor is.
        tables: of the kernels of a GPU, which encode it at once; None: it is processed in ranges.

    Attributes:
        faults: see `Prepared.faults`.
    """

    def __init__(self, exchange: QuantizedExchange, signal: Mapping[str, Tensor], tables: Tables | None) -> None:
        self._exchange, self._peers, peers = exchange, exchange.peers, exchange.peers
        tensors, value_dtype = list(signal.values()), exchange.payload.value_dtype
        self._device, parts = tensors[0].device, [peers.part(tensor.numel()) for tensor in tensors]
        numels = {name: part.stop - part.start for name, part in zip(signal, parts, strict=True)}
        exchange.residuals.ensure(numels, self._device)
        residuals = [exchange.residuals[name] for name in signal]
        self._numel, num = sum(peers.part(tensor.numel(), 0).stop for tensor in tensors), peers.num_participants
        # Of the part that a rank owns; of two ranks each sends all to the other.
        has_owners = num != 2 and not exchange.is_hidden
        shape = (num, -(-self._numel // num)) if has_owners else (1, self._numel)
        make: Callable[..., Vector] = InRanges if tables is None else partial(InKernels, tables=tables)
        self._vector = make(value_dtype, tensors, residuals, peers, shape)
        self._signal = dict(zip(signal, self._vector.signals, strict=True))
        flags = self._vector.flags
        self.faults: Faulty | None = None if flags is None else ([*signal], flags)
        self._work: TensorWork | None = None  # of the first message, and of the second
        self._answers: TensorWork | None = None
        self._received: Tensor | None = None  # of the ranks of the node, or of this one alone, from all participants
        self._told: tuple[Tensor, dict[str, Tensor]] | None = None  # what was beside it

    def send(self, status: Tensor | None, whole: Signal | None) -> PendingQuantized:
        """Send it, and what is beside it; see `Prepared.send`."""
        self._beside = Beside(status, whole, self._peers, self._device)
        self._beside.begin()
        if self._peers.num_participants > 1 and self._numel:
            self._vector.write_message(self._beside.parts)
            self._beside.parts.clear()
            message, between = self._vector.message.view(-1), self._peers.between
            if self._exchange.is_hidden:
                self._work = self._peers.begin_gather(message)
            elif len(self._vector.message) == 1:
                self._work = between.begin_all_gather(message)
            else:
                self._work = between.begin_all_to_all(message)
        return self

    def answer(self) -> None:
        """Read the first message. Among more than two participants average this rank's row, and send the mean."""
        if self._work is None:
            return
        peers, vector, is_of_node = self._peers, self._vector, self._exchange.is_hidden
        with peers.ledger.waiting(self._device):
            received = self._work.wait()
        self._work = None  # memory
        self._received = received if is_of_node else received.view(1, peers.num_participants, -1)
        besides = self._received[..., vector.nbytes :]
        if peers.num_local_ranks > 1 and besides.numel() and not is_of_node:
            besides = peers.node.all_gather(besides.reshape(-1)).view(-1, *besides.shape[1:])
        self._told = self._beside.read(besides)
        if len(vector.message) > 1:
            messages = self._received[0, :, : vector.nbytes]
            mean = vector.combine_(messages, peers.between.rank)
            room = vector.message.view(-1)[: messages.numel()]
            self._answers = peers.between.begin_all_gather(mean.view(-1), room.view(messages.shape))

    def _receive(self) -> Arrived:
        self.answer()
        vector, peers, exchange = self._vector, self._peers, self._exchange
        if self._answers is not None:
            with peers.ledger.waiting(self._device):
                means = self._answers.wait()
            vector.read_(means)
        elif self._received is not None:
            vector.average_(self._received[..., : vector.nbytes])
        elif self._numel:  # one participant
            vector.add_residuals_()
        vector.message, self._received, self._answers = torch.empty(0), None, None  # memory for the gather in the node
        exchange.fault = vector.is_infinite if exchange.fault is None else exchange.fault | vector.is_infinite
        if peers.num_local_ranks > 1 and self._numel and not exchange.is_hidden:
            rows = peers.gather_parts_in_node(vector.of_rank(), self._numel * peers.num_local_ranks)
            vector.write_ranks_(rows.view(-1, self._numel))
        return Arrived(DenseMean(self._signal), *(self._told or (torch.empty(0), {})))


def _ranges(num_rows: int, size: int, device: torch.device, num_read: int = 1) -> Iterator[tuple[slice, int, int]]:
    """Cut contiguous rows of one size: yield the rows, and a range of their columns, of which `num_read` are read."""
    step = RANGE if device.type == "cpu" else max(SCALED, RANGE_OF_GPU // num_read // SCALED * SCALED)
    together = max(1, step // size) if device.type != "cpu" else 1  # short rows in one launch
    for row in range(0, num_rows, together):
        for start in range(0, size, step):
            yield slice(row, min(row + together, num_rows)), start, min(start + step, size)


class Vector(ABC):
    """The signals of a call as one vector, which become the mean, and their residuals.

    Args:
        value_dtype: by which name its values are written.
        signals: of all tensors.
        residuals: of this rank's part of each.
        peers: who takes part.
        shape: of the message: rows, and the elements of each.

    Attributes:
        flags: of each signal whether this rank's part of it has an inf or NaN; None where nobody has looked.
        nbytes: of a row, without what is beside it.
        message: uint8, shape (rows, bytes); empty before it has been written, and after the mean has been read.
    """

    flags: Tensor | None = None

    def __init__(
        self,
        value_dtype: str,
        signals: list[Tensor],
        residuals: list[Tensor],
        peers: Peers,
        shape: tuple[int, int],
    ) -> None:
        self.signals, self._kept, self._peers, self._shape = signals, residuals, peers, shape
        self._format, self._device = FORMATS[value_dtype], signals[0].device
        self._dtype = reduce(torch.promote_types, {signal.dtype for signal in signals}, torch.float32)
        self.nbytes, self.message = self._format.nbytes(shape[1]), torch.empty(0)

    @property
    @abstractmethod
    def is_infinite(self) -> Tensor:
        """Whether something infinite has been left in a residual: bool, a scalar on the device."""

    @abstractmethod
    def write_message(self, beside: Sequence[Tensor]) -> None:
        """Write the message: the values in few bits, and what is beside them in each row.

        In place:
            The residuals, in which what is rounded stays.
        """

    @abstractmethod
    def average_(self, received: Tensor) -> None:
        """Read the mean of what all participants have sent about all of their vectors.

        Args:
            received: uint8, shape (1, participants, nbytes), by this rank of the node; or by all of its ranks.
        """

    @abstractmethod
    def combine_(self, received: Tensor, row: int) -> Tensor:
        """Return the mean of the messages about a row of the vector, in few bits: uint8, shape (nbytes,).

        In place:
            The residuals, in which what is rounded stays.
        """

    @abstractmethod
    def read_(self, gathered: Tensor) -> None:
        """Read the means of all rows: uint8, shape (rows, nbytes)."""

    @abstractmethod
    def of_rank(self) -> Tensor:
        """Return what has been read, of the parts of this rank of the node: shape (longest,)."""

    @abstractmethod
    def write_ranks_(self, rows: Tensor) -> None:
        """Write into the signals what all ranks of the node have read: shape (local ranks, longest)."""

    def add_residuals_(self) -> None:
        """Add the residuals to the signals, and clear them."""
        signals, residuals = self._joined
        whole = residuals.read(0, residuals.numel, self._dtype)
        signals.add_to_(0, whole)
        signals.write_(0, whole)
        residuals.write_(0, torch.zeros_like(whole))

    @cached_property
    def _joined(self) -> tuple[Joined, Joined]:
        """This rank's parts of the signals, and the residuals."""
        parts = list(map(flat, self.signals))
        if self._peers.num_local_ranks > 1:  # else without views: those of hundreds of tensors take milliseconds
            parts = [signal[self._peers.part(signal.numel())] for signal in parts]
        return Joined(parts), Joined(self._kept)

    @cached_property
    def _longest(self) -> int:
        """Elements of the longest vector of a rank of the node."""
        return sum(part.stop - part.start for part in self._parts(0))

    def _parts(self, local_rank: int | None = None) -> list[slice]:
        return [self._peers.part(signal.numel(), local_rank) for signal in self.signals]


class InRanges(Vector):
    """A vector that is processed in ranges, which stay in the cache of a CPU; any floating dtypes and layouts."""

    def __init__(self, value_dtype: str, signals: Iterable[Tensor], *others: Any) -> None:
        super().__init__(value_dtype, list(map(flat, signals)), *others)
        self._left = torch.zeros((), dtype=self._dtype, device=self._device)

    @property
    def is_infinite(self) -> Tensor:
        return self._left * 0 != 0  # NaN of a NaN, and of an infinity

    def write_message(self, beside: Sequence[Tensor]) -> None:
        (num_rows, size), (signals, residuals) = self._shape, self._joined
        row_bytes = self.nbytes + sum(part.numel() for part in beside)
        self.message = torch.empty((num_rows, row_bytes), dtype=torch.uint8, device=self._device)
        if beside:
            self.message[:, self.nbytes :] = torch.cat(list(beside))
        for rows, start, stop in _ranges(num_rows, size, self._device):
            first, num_values = rows.start * size + start, (rows.stop - rows.start) * (stop - start)
            values = residuals.read(first, num_values, self._dtype)
            signals.add_to_(first, values)
            self._format.write_(self.message[rows, : self.nbytes], size, start, values.view(-1, stop - start))
            residuals.write_(first, values)
            self._left += values.sum()  # while it is in the cache

    def average_(self, received: Tensor) -> None:
        size, is_all = self._shape[1], len(received) == self._peers.num_local_ranks
        rooms = self._rooms() if is_all else [self._joined[0]]
        for messages, means in zip(received, rooms, strict=False):  # the last ranks of a node may have no parts
            for _, start, stop in _ranges(1, size, self._device, num_read=len(messages)):
                shares = self._format.read(messages, size, start, stop).mul_(1.0 / len(messages))
                means.write_(start, shares.sum(0))  # of shares: that of the values may overflow

    def combine_(self, received: Tensor, row: int) -> Tensor:
        answer, size, num = self.message.new_empty((1, self.nbytes)), self._shape[1], len(received)
        for _, start, stop in _ranges(1, size, self._device, num_read=num):
            mean = self._format.read(received, size, start, stop).to(self._dtype).sum(0, keepdim=True)
            self._format.write_(answer, size, start, mean.div_(num))
            # N times, because a residual enters the mean divided by N.
            self._joined[1].add_(row * size + start, mean.view(-1).mul_(num))
            self._left += mean.sum()
        return answer.view(-1)

    def read_(self, gathered: Tensor) -> None:
        num_rows, size = self._shape
        for rows, start, stop in _ranges(num_rows, size, self._device):
            values = self._format.read(gathered[rows], size, start, stop)
            self._joined[0].write_(rows.start * size + start, values.reshape(-1))

    def of_rank(self) -> Tensor:
        return self._joined[0].read(0, self._longest, self._dtype)

    def write_ranks_(self, rows: Tensor) -> None:
        for room, row in zip(self._rooms(), rows, strict=False):
            room.write_(0, row)

    def _rooms(self) -> list[Joined]:
        """Return, of each rank of the node that has one, the part of the signals that it exchanges."""
        pieces = [each.split(self._peers.part(each.numel(), 0).stop) for each in self.signals if each.numel()]
        of_ranks = ([of_one for of_one in parts if of_one is not None] for parts in zip_longest(*pieces))
        return [Joined(parts) for parts in of_ranks]


class Tables:
    """The tables of a GPU's kernels for some tensors, kept from call to call: of parts, of what is read, of all."""

    def __init__(self) -> None:
        self.parts, self.read, self.all = JoinedTable(), JoinedTable(), JoinedTable()


class InKernels(Vector):
    """A vector that the kernels of a GPU process: one launch each to encode, to combine and to decode all tensors.

    In place:
        The residuals: the message is encoded at once, so that the flags go in the status beside it.

    Args:
        value_dtype: one of `CODES`.
        signals: with elements; in `table.DTYPES`.
        others: see `Vector`.
        tables: of the kernels.
    """

    flags: Tensor

    def __init__(self, value_dtype: str, signals: Iterable[Tensor], *others: Any, tables: Tables) -> None:
        super().__init__(
            value_dtype, [signal if signal.is_contiguous() else flat(signal) for signal in signals], *others
        )
        self._code, self._tables = CODES[value_dtype], tables
        columns = self.signals, self._parts(), accumulate(map(torch.numel, self._kept), initial=0), self._kept
        self._table = tables.parts.update((JoinedRow.of(*row) for row in zip(*columns, strict=False)), self._device)
        self._flags = torch.zeros(len(self.signals) + 1, dtype=torch.bool, device=self._device)
        self.flags = self._flags[:-1]
        self.message = torch.empty((self._shape[0], self.nbytes), dtype=torch.uint8, device=self._device)
        gpu.encode_(self._table, self.message, self._shape[1], self._code, self._flags)
        self._read = torch.empty(0)

    @property
    def is_infinite(self) -> Tensor:
        return self._flags[-1]

    def write_message(self, beside: Sequence[Tensor]) -> None:
        if beside:
            row = beside[0] if len(beside) == 1 else torch.cat(list(beside))
            self.message = torch.cat([self.message, row.expand(len(self.message), -1)], 1)

    def average_(self, received: Tensor) -> None:
        if len(received) == 1:
            self._decode(received[0], num_messages=received.shape[1])
        else:
            messages = received.flatten(0, 1)
            gpu.decode_(self._all(), messages, self._shape[1], self._code, num_messages=received.shape[1])

    def combine_(self, received: Tensor, row: int) -> Tensor:
        answer = self.message.new_empty(self.nbytes)
        gpu.combine_(self._table, received, answer, row, self._shape[1], self._code, self._flags)
        return answer

    def read_(self, gathered: Tensor) -> None:
        self._decode(gathered, num_messages=1)

    def of_rank(self) -> Tensor:
        return self._read

    def write_ranks_(self, rows: Tensor) -> None:
        gpu.decode_(self._all(), rows.view(torch.uint8), self._longest, torch.float32, num_messages=1)

    def _all(self) -> JoinedTable:
        """Return the table of the parts of all ranks of the node, of each as many elements as the longest has."""
        table = list[JoinedRow]()
        for local_rank in range(self._peers.num_local_ranks):
            parts = self._parts(local_rank)
            starts = accumulate((part.stop - part.start for part in parts), initial=local_rank * self._longest)
            table += [JoinedRow.of(*row) for row in zip(self.signals, parts, starts, strict=False)]
        return self._tables.all.update(table, self._device)

    def _decode(self, messages: Tensor, *, num_messages: int) -> None:
        """Read messages into the signals; on two levels into a vector, of which the ranks of the node read more."""
        table = self._table
        if self._peers.num_local_ranks > 1:
            self._read = torch.empty(self._longest, dtype=torch.float32, device=self._device)
            table = self._tables.read.update([JoinedRow.of(self._read, slice(0, self._longest), 0)], self._device)
        gpu.decode_(table, messages, self._shape[1], self._code, num_messages=num_messages)


class Joined:
    """Flat tensors as one vector. Beyond its end are zeros, and what is written there is dropped.

    Args:
        tensors: at least one; 1-d, of any floating dtypes, on one device; what is written goes into them.

    Attributes:
        numel: elements of all of them together.
        device: where they are.

    Examples:
        >>> tensors = [torch.ones(2), torch.ones(3)]
        >>> Joined(tensors).write_(1, torch.tensor([5.0, 6.0]))
        >>> tensors
        [tensor([1., 5.]), tensor([6., 1., 1.])]
        >>> Joined(tensors).read(3, 4, torch.float32)
        tensor([1., 1., 0., 0.])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._numels = [tensor.numel() for tensor in self._tensors]
        self._ends = list(accumulate(self._numels))
        self.numel = self._ends[-1] if self._ends else 0

    def read(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a range of values: a view where they lie in one tensor of this dtype, else a copy; see `write_`."""
        pieces, sizes = self._pieces(start, numel)
        if sizes == [numel] and pieces[0].dtype == dtype:
            return pieces[0]
        out = torch.empty(numel, dtype=dtype, device=self.device)
        copy_all_(split_front(out, sizes), pieces)
        out[max(0, self.numel - start) :].zero_()
        return out

    def add_to_(self, start: int, out: Tensor) -> None:
        """Add the values from `start` on to `out`, which is 1-d."""
        pieces, sizes = self._pieces(start, out.numel())
        if pieces:
            torch._foreach_add_(split_front(out, sizes), pieces)

    def write_(self, start: int, values: Tensor) -> None:
        """Replace the values from `start` on; `values` are 1-d."""
        pieces, sizes = self._pieces(start, values.numel())
        if not pieces or pieces[0].data_ptr() != values.data_ptr():  # else it is the view that `read` has returned
            copy_all_(pieces, split_front(values, sizes))

    def add_(self, start: int, values: Tensor) -> None:
        """Add to the values from `start` on; `values` are 1-d."""
        pieces, sizes = self._pieces(start, values.numel())
        if pieces:
            torch._foreach_add_(pieces, split_front(values, sizes))

    def _pieces(self, start: int, numel: int) -> tuple[list[Tensor], list[int]]:
        """Return, of each tensor that a range touches, the part inside of it, and how many elements that has.

        Only the first and the last are views: hundreds of them take longer than all else that is done here.
        """
        stop = min(start + numel, self.numel)
        if start >= stop:
            return [], []
        first, last = bisect_right(self._ends, start), bisect_left(self._ends, stop)
        pieces, sizes = self._tensors[first : last + 1], self._numels[first : last + 1]
        if rest := self._ends[last] - stop:
            pieces[-1], sizes[-1] = pieces[-1][:-rest], sizes[-1] - rest
        if skipped := start - (self._ends[first] - self._numels[first]):
            pieces[0], sizes[0] = pieces[0][skipped:], sizes[0] - skipped
        return pieces, sizes
