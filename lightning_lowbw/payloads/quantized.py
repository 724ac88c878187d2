"""Tensors in few bits per value, with error feedback: the exchange of `Quantized`.

Let x_i = signal_i + e_i be the vector of rank i, all tensors of a call joined, and Q a rounding to few bits. Among N
ranks, rank j owns part j of the vector:

    q_i    = Q(x_i);  e_i = x_i - q_i            | rank i sends part j of q_i to rank j: an all-to-all
    mean_j = 1/N sum_i q_i, of part j            | on rank j
    a_j    = Q(mean_j);  e_j += N (mean_j - a_j) | rank j sends a_j to all ranks: an all-gather

Two ranks need no owners: each rank sends its vector to the other rank, and mean = 1/2 (q_0 + q_1) is not rounded again.
Averages that are hidden behind steps have no owners either, because no rank can answer between two messages: each rank
sends its vector to all ranks. On two levels the nodes are the participants: each rank of a node does this for its part
of every tensor, and the means are gathered in the node. A single participant sends and rounds nothing.

All tensors of a call are one vector. Signal and residual are read once, residual and message written once: on a CPU in
ranges that fit into the cache (`InRanges`), on a GPU by one kernel, which finds the tensors in a table (`InKernels`).
Only messages are allocated in the vector's size.

A linear format ("int8", "int4") cuts a vector into blocks of SCALED values. A block is sent as one scale and, for each
value, the nearest integer in units of the scale. For dense values, mostly near zero, the linear format is closer than
the logarithmic levels of `payloads.codec`, which are made for the elements that top-k selects.

Source: error feedback on both ways as in Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
Double-Pass Error-Compensated Compression", arXiv 1905.05957; the server's work is divided among the ranks. A scale for
each small block as in Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning", arXiv
2111.08617. Deviation: rounds to nearest, not at random, because the error is fed back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_lowbw.arguments import check_one_of
from lightning_lowbw.comm.collectives import TensorWork, all_gather_bytes, all_reduce_bytes
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels import dispatch, gpu
from lightning_lowbw.kernels.dispatch import blocks_for
from lightning_lowbw.kernels.reference import SCALED, Code, scales_end
from lightning_lowbw.kernels.table import JoinedRow, JoinedTable
from lightning_lowbw.kernels.tensors import allocate, copy_all_, flat, split_front
from lightning_lowbw.payloads.corrections import Fields
from lightning_lowbw.payloads.exchange import (
    Arrived,
    Beside,
    DenseMean,
    Exchange,
    Faulty,
    Pending,
    Prepared,
    Residuals,
    Signal,
)
from lightning_lowbw.payloads.payload import FLOAT_BYTES, Message, Payload, Shapes
from lightning_lowbw.schedules.schedule import Schedule

RANGE = 1 << 18  # values, 1 MiB: they stay in the second cache, and are many beside the cost of a call
RANGE_OF_GPU = 1 << 22  # values, 16 MiB, for each message that is read: few launches

SCALE_BYTES = 2  # a bfloat16, an eighth of a bit per value

# Few bits per value ---------------------------------------------------------------------------------------------------


class QuantizedFormat(Protocol):
    """How the values of vectors are written in few bits; several vectors of one length at once, each by itself.

    A vector has at least one value. A message is written and read in ranges, so that the data of a range stay in the
    cache of a CPU. A range begins at a multiple of SCALED, and ends at one or with the vector; the message does not
    depend on the ranges.

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
            values: float32, shape (vectors, values of the range).
        """
        ...

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """Return a range of the vectors in messages of `write_`: float32, shape (vectors, stop - start).

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
        values.sub_(sent)  # the rounding error, which error feedback sends later

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
        return scales_end(numel) + self._integers_end(numel)

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
        split = scales_end(numel)
        integers = slice(split + self._integers_end(start), split + self._integers_end(stop))
        return slice(scales_end(start), scales_end(stop)), integers

    def _integers_end(self, numel: int) -> int:
        return -(-numel * self.bits // 8)  # rounded up: the last byte of int4 may hold one value


def _check_size(messages: Tensor, nbytes: int) -> None:
    if messages.shape[1] != nbytes:
        raise ValueError(f"A message of {messages.shape[1]} bytes; {nbytes} were expected.")


# The codes of the formats for the kernels of a GPU, by their public names. A format without a code is processed in
# ranges on a GPU, too.
CODES: dict[str, Code] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": 8, "int4": 4}
FORMATS: dict[str, QuantizedFormat] = {  # a file with another format adds it here
    name: LinearFormat(code) if isinstance(code, int) else HalfFormat(code) for name, code in CODES.items()
}


# The payload and its exchange -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Quantized(Payload, key="quantized"):
    """Every element in few bits, with error feedback: rounding errors are added to the next message.

    Args:
        value_dtype: "bfloat16", "float16", "int8" or "int4"; the integers with a scale per block of 128 values. Under
            these names `TopK` sends another format, of levels: see `LinearFormat`, and `payloads.codec`.

    Raises:
        ConfigurationError: the dtype has another name.
    """

    value_dtype: str = "int8"

    can_be_early = can_be_hidden = True

    def __post_init__(self) -> None:
        check_one_of("value_dtype", self.value_dtype, tuple(FORMATS))

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


class QuantizedExchange(Exchange):
    """Averages tensors in few bits per value; rounding errors are added to the next messages.

    Args:
        payload: the payload; may be replaced between steps, on all ranks.
        peers: the participants; on two levels the ranks of a node have equal tensors.
        is_hidden: whether steps are taken between a message and its mean.

    Raises:
        ConfigurationError: averages are hidden, and among so many participants whole values are fewer bytes.
    """

    def __init__(self, payload: Quantized, peers: Peers, *, is_hidden: bool = False) -> None:
        self.payload, self.peers, self.is_hidden, num = payload, peers, is_hidden, peers.num_participants
        nbytes = all_gather_bytes(FORMATS[payload.value_dtype].nbytes(SCALED), num)
        if is_hidden and num > 1 and nbytes >= all_reduce_bytes(FLOAT_BYTES * SCALED, num):
            raise ConfigurationError(
                f"delay_steps with {payload} among {num} participants: each rank would send its values to all ranks, "
                "in more bytes than an average of whole values takes. Leave out delay_steps, or the compression."
            )
        self.residuals = Residuals()
        self._tables: dict[tuple[str, ...], Tables] = {}

    def prepare(self, signal: Signal, fields: Fields | None = None) -> Prepared:
        """Prepare tensors: any floating dtype of 16 or 32 bits, any shape.

        The kernels of a GPU encode them now, and find inf and NaN.
        """
        pending = PendingQuantized(self, signal)
        return Prepared(pending.send, pending.faults)

    def vector_of(self, signal: Signal, num_rows: int) -> Vector:
        """Return a signal as a vector. Each fragment has its own tables: several fragments may be in progress."""
        tensors, residuals = list(signal.values()), [self.residuals[name] for name in signal]
        given = self.payload.value_dtype, tensors, residuals, self.peers, num_rows
        has_kernels = given[0] in CODES and dispatch.uses_triton(tensors[0].device)
        if has_kernels and self.peers.num_participants > 1:
            return InKernels(*given, tables=self._tables.setdefault(tuple(signal), Tables()))
        return InRanges(*given)


class PendingQuantized(Pending):
    """A signal that is sent and becomes the mean; see the equations of the module.

    The first message is q, with the status and the whole tensors in its end (`Beside`). If the parts have owners, the
    second message is a.

    In place:
        The residuals, and the signal, if it is contiguous, which becomes the mean: the same bits on all ranks.

    Collective: all ranks with tensors of the same sizes, and equal tensors on the ranks of a node.

    Wire:
        2 (N - 1) parts of ceil(n / N) values, in an all-to-all and an all-gather; with n the elements of this rank's
        parts. Between two ranks, and if averages are hidden, N - 1 vectors of n values, in one all-gather. On two
        levels then the parts of the mean, in float32, or if averages are hidden the received messages, in the node.

    Args:
        exchange: the exchange, which has the residuals.
        signal: the tensors by name; sums are in float32.

    Attributes:
        faults: see `Prepared.faults`.
    """

    def __init__(self, exchange: QuantizedExchange, signal: Signal) -> None:
        self._exchange, self._peers, peers = exchange, exchange.peers, exchange.peers
        self._device = next(iter(signal.values())).device
        parts = {name: peers.part(tensor.numel()) for name, tensor in signal.items()}
        exchange.residuals.ensure({name: part.stop - part.start for name, part in parts.items()}, self._device)
        has_owners = peers.num_participants != 2 and not exchange.is_hidden
        self._vector = exchange.vector_of(signal, peers.num_participants if has_owners else 1)
        self._gathers_parts = peers.num_local_ranks > 1 and not exchange.is_hidden
        self._names, flags = list(signal), self._vector.flags
        self.faults: Faulty | None = None if flags is None else (self._names, flags)
        self._work: TensorWork | None = None  # the first message
        self._answers: TensorWork | None = None  # the second message
        self._received: Tensor | None = None  # q of all participants: shape (vectors of the node, participants, bytes)
        self._told: tuple[Tensor, dict[str, Tensor]] = torch.empty(0), {}  # the status and the whole tensors

    def send(self, status: Tensor | None = None, whole: Signal | None = None) -> PendingQuantized:
        """Send the first message; see `Prepared.send`."""
        peers, vector = self._peers, self._vector
        self._beside = Beside(status, whole, peers, self._device)
        self._beside.begin()
        if peers.num_participants > 1:
            vector.write_message(self._beside.parts)
            self._beside.parts.clear()
            message = vector.message.view(-1)
            if self._exchange.is_hidden:
                self._work = peers.begin_gather(message)
            elif len(vector.message) == 1:
                self._work = peers.between.begin_all_gather(message)
            else:
                self._work = peers.between.begin_all_to_all(message)
        return self

    def answer(self) -> None:
        """Read the first message; as the owner of a part, begin to send the mean."""
        if self._work is None:
            return
        peers, vector = self._peers, self._vector
        num_vectors = peers.num_local_ranks if self._exchange.is_hidden else 1
        with peers.ledger.waiting(self._device):
            self._received = self._work.wait().view(num_vectors, peers.num_participants, -1)
        self._work = None  # memory
        besides = self._received[..., vector.nbytes :]
        if self._gathers_parts and besides.numel():
            besides = peers.node.all_gather(besides.reshape(-1)).view(-1, *besides.shape[1:])
        self._told = self._beside.read(besides)
        if len(vector.message) > 1:
            messages = self._received[0, :, : vector.nbytes]
            mean = vector.combine_(messages, peers.between.rank)
            room = vector.message.view(-1)[: messages.numel()]
            self._answers = peers.between.begin_all_gather(mean, room.view(messages.shape))

    def _receive(self) -> Arrived:
        self.answer()
        vector, peers, exchange = self._vector, self._peers, self._exchange
        if self._received is None:  # a single participant
            torch._foreach_add_(vector.signals, vector.residuals)
            torch._foreach_zero_(vector.residuals)
        elif self._answers is not None:
            with peers.ledger.waiting(self._device):
                means = self._answers.wait()
            vector.read_(means, num_messages=1)
        else:
            messages = self._received[..., : vector.nbytes].flatten(0, 1)
            vector.read_(messages, num_messages=peers.num_participants)
        vector.message, self._received, self._answers = torch.empty(0), None, None  # memory for the gather in the node
        exchange.fault = vector.is_infinite if exchange.fault is None else exchange.fault | vector.is_infinite
        if self._gathers_parts:
            num = peers.num_local_ranks
            vector.write_parts_(peers.gather_parts_in_node(vector.own_part(), num * vector.longest).view(num, -1))
        return Arrived(DenseMean(dict(zip(self._names, vector.signals, strict=True))), *self._told)


def _ranges(num_rows: int, size: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Cut rows of one size: yield the row, and a range of its columns."""
    step = RANGE if device.type == "cpu" else RANGE_OF_GPU
    for row, start in product(range(num_rows), range(0, size, step)):
        yield row, start, min(start + step, size)


class Vector(ABC):
    """The part of all signals that this rank exchanges, as one vector, which becomes the mean; and its residuals.

    Args:
        value_dtype: the name of the format.
        signals: all tensors.
        residuals: the residuals of this rank's part of each tensor: float32, flat.
        peers: the participants.
        num_rows: the rows of the message: one for each owner, or 1.

    Attributes:
        flags: for each signal, whether this rank's part has an inf or NaN; None: nothing has looked for them.
        longest: elements of the longest vector of a rank of the node.
        size: elements of a row.
        nbytes: bytes of a row, without the status and the whole tensors.
        message: uint8, shape (rows, bytes); empty before it has been written, and after the mean has been read.
    """

    flags: Tensor | None = None

    def __init__(
        self, value_dtype: str, signals: list[Tensor], residuals: list[Tensor], peers: Peers, num_rows: int
    ) -> None:
        self.signals, self.residuals, self._peers, self._num_rows = signals, residuals, peers, num_rows
        self._format, self._device = FORMATS[value_dtype], signals[0].device
        self.longest = sum(part.stop - part.start for part in self._parts(0))
        self.size = -(-self.longest // num_rows)
        self.nbytes, self.message = self._format.nbytes(self.size), torch.empty(0)

    @property
    @abstractmethod
    def is_infinite(self) -> Tensor:
        """Whether an inf or NaN has been left in a residual: bool, a scalar on the device."""

    @abstractmethod
    def write_message(self, beside: Sequence[Tensor]) -> None:
        """Write the message: the values in few bits, and in the end of each row the tensors beside them.

        In place:
            The residuals, which become the rounding errors.
        """

    @abstractmethod
    def combine_(self, received: Tensor, row: int) -> Tensor:
        """Return the mean of the messages about a row of the vector, in few bits: uint8, shape (nbytes,).

        In place:
            The residuals, to which the rounding errors are added.
        """

    @abstractmethod
    def read_(self, messages: Tensor, *, num_messages: int) -> None:
        """Read the mean of so many adjacent messages about each row of the vector, or of the vector of each local rank.

        Args:
            messages: uint8, shape (messages, nbytes).
            num_messages: about a row.
        """

    @abstractmethod
    def own_part(self) -> Tensor:
        """Return the means that `read_` has read: shape (longest,)."""

    @abstractmethod
    def write_parts_(self, parts: Tensor) -> None:
        """Write the means of the vectors of all ranks of the node: shape (local ranks, longest)."""

    def _parts(self, local_rank: int | None = None) -> list[slice]:
        return [self._peers.part(signal.numel(), local_rank) for signal in self.signals]


class InRanges(Vector):
    """A vector that is processed in ranges, which stay in the cache of a CPU."""

    def __init__(self, value_dtype: str, signals: list[Tensor], *given: Any) -> None:
        super().__init__(value_dtype, list(map(flat, signals)), *given)
        self._left = torch.zeros((), device=self._device)

    @cached_property
    def _joined(self) -> tuple[Joined, Joined]:
        """This rank's parts of the signals, and the residuals."""
        return self._joined_part(self._peers.local_rank), Joined(self.residuals)

    def _joined_part(self, local_rank: int) -> Joined:
        """Return the parts of the signals that a rank of the node exchanges."""
        if self._peers.num_local_ranks == 1:
            return Joined(self.signals)  # without views: hundreds of views take milliseconds
        pairs = zip(self.signals, self._parts(local_rank), strict=True)
        return Joined([signal[part] for signal, part in pairs])

    @property
    def is_infinite(self) -> Tensor:
        return self._left * 0 != 0  # NaN of a NaN, and of an infinity

    def write_message(self, beside: Sequence[Tensor]) -> None:
        num_rows, size, (signals, residuals) = self._num_rows, self.size, self._joined
        row_bytes = self.nbytes + sum(part.numel() for part in beside)
        self.message = torch.empty((num_rows, row_bytes), dtype=torch.uint8, device=self._device)
        if beside:
            self.message[:, self.nbytes :] = torch.cat(list(beside))
        for row, start, stop in _ranges(num_rows, size, self._device):
            first = row * size + start
            values = residuals.read(first, stop - start)
            signals.add_to_(first, values)
            self._format.write_(self.message[row : row + 1, : self.nbytes], size, start, values.unsqueeze(0))
            residuals.write_(first, values)
            self._left += values.sum()  # while it is in the cache

    def combine_(self, received: Tensor, row: int) -> Tensor:
        answer, size, num = self.message.new_empty((1, self.nbytes)), self.size, len(received)
        for _, start, stop in _ranges(1, size, self._device):
            mean = self._format.read(received, size, start, stop).sum(0, keepdim=True)
            self._format.write_(answer, size, start, mean.div_(num))
            # N times, because a residual enters the mean divided by N.
            self._joined[1].add_(row * size + start, mean.view(-1).mul_(num))
            self._left += mean.sum()
        return answer.view(-1)

    def read_(self, messages: Tensor, *, num_messages: int) -> None:
        size, num, of_vectors = self.size, num_messages, messages.split(num_messages * self._num_rows)
        rooms = [self._joined[0]] if len(of_vectors) == 1 else map(self._joined_part, range(len(of_vectors)))
        for means, of_vector in zip(rooms, of_vectors, strict=True):
            for row, start, stop in _ranges(self._num_rows, size, self._device):
                values = self._format.read(of_vector[row * num : (row + 1) * num], size, start, stop)
                # The sum of shares, because the sum of the values may overflow.
                values = values.mul_(1.0 / num).sum(0) if num > 1 else values.view(-1)
                means.write_(row * size + start, values)

    def own_part(self) -> Tensor:
        return self._joined[0].read(0, self.longest)

    def write_parts_(self, parts: Tensor) -> None:
        for local_rank, part in enumerate(parts):
            self._joined_part(local_rank).write_(0, part)


class Tables:
    """The tables of a GPU's kernels for some tensors, kept from call to call.

    Attributes:
        own: this rank's parts.
        read: the vector into which this rank reads the means of its parts on two levels.
        all: the parts of all ranks of the node.
    """

    def __init__(self) -> None:
        self.own, self.read, self.all = JoinedTable(), JoinedTable(), JoinedTable()


class InKernels(Vector):
    """A vector that the kernels of a GPU process: one launch each to encode, to combine and to decode all tensors.

    In place:
        The residuals: the message is encoded at once, so that the status beside it has the flags.

    Args:
        value_dtype: a name in `CODES`.
        signals: tensors with elements, in `table.DTYPES`.
        given: see `Vector`.
        tables: the tables of the kernels.
    """

    flags: Tensor

    def __init__(self, value_dtype: str, signals: list[Tensor], *given: Any, tables: Tables) -> None:
        contiguous = [signal if signal.is_contiguous() else flat(signal) for signal in signals]
        super().__init__(value_dtype, contiguous, *given)
        self._code, self._tables = CODES[value_dtype], tables
        starts = accumulate(map(torch.numel, self.residuals), initial=0)
        columns = self.signals, self._parts(), starts, self.residuals
        self._table = tables.own.update((JoinedRow.of(*row) for row in zip(*columns, strict=False)), self._device)
        self._flags = torch.zeros(len(self.signals) + 1, dtype=torch.bool, device=self._device)
        self.flags = self._flags[:-1]
        self.message = torch.empty((self._num_rows, self.nbytes), dtype=torch.uint8, device=self._device)
        gpu.encode_(self._table, self.message, self.size, self._code, self._flags)
        self._read = torch.empty(0)

    @property
    def is_infinite(self) -> Tensor:
        return self._flags[-1]

    def write_message(self, beside: Sequence[Tensor]) -> None:
        if beside:
            row = beside[0] if len(beside) == 1 else torch.cat(list(beside))
            self.message = torch.cat([self.message, row.expand(len(self.message), -1)], 1)

    def combine_(self, received: Tensor, row: int) -> Tensor:
        answer = self.message.new_empty(self.nbytes)
        gpu.combine_(self._table, received, answer, row, self.size, self._code, self._flags)
        return answer

    def read_(self, messages: Tensor, *, num_messages: int) -> None:
        table = self._table
        if len(messages) > num_messages * self._num_rows:
            table = self._all()
        elif self._peers.num_local_ranks > 1:  # into a vector, which the other ranks of the node get, too
            self._read = torch.empty(self.longest, dtype=torch.float32, device=self._device)
            table = self._tables.read.update([JoinedRow.of(self._read, slice(0, self.longest), 0)], self._device)
        gpu.decode_(table, messages, self.size, self._code, num_messages=num_messages)

    def own_part(self) -> Tensor:
        return self._read

    def write_parts_(self, parts: Tensor) -> None:
        gpu.decode_(self._all(), parts.view(torch.uint8), self.longest, torch.float32, num_messages=1)

    def _all(self) -> JoinedTable:
        """Return the table of the parts of all ranks of the node; the vector of each rank has `longest` elements."""
        table = list[JoinedRow]()
        for local_rank in range(self._peers.num_local_ranks):
            parts = self._parts(local_rank)
            starts = accumulate((part.stop - part.start for part in parts), initial=local_rank * self.longest)
            table += [JoinedRow.of(*row) for row in zip(self.signals, parts, starts, strict=False)]
        return self._tables.all.update(table, self._device)


class Joined:
    """Flat tensors as one vector. Beyond its end are zeros, and values that are written there are dropped.

    Args:
        tensors: at least one; 1-d, of any floating dtypes, on one device; values are written into them.

    Attributes:
        numel: elements of all tensors together.
        device: the device of the tensors.

    Examples:
        >>> tensors = [torch.ones(2), torch.ones(3)]
        >>> Joined(tensors).write_(1, torch.tensor([5.0, 6.0]))
        >>> tensors
        [tensor([1., 5.]), tensor([6., 1., 1.])]
        >>> Joined(tensors).read(3, 4)
        tensor([1., 1., 0., 0.])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._numels = [tensor.numel() for tensor in self._tensors]
        self._ends = list(accumulate(self._numels))
        self.numel = self._ends[-1] if self._ends else 0

    def read(self, start: int, numel: int) -> Tensor:
        """Return a range of values, float32: a view if they lie in one float32 tensor, else a copy; see `write_`."""
        pieces, sizes = self._pieces(start, numel)
        if sizes == [numel] and pieces[0].dtype == torch.float32:
            return pieces[0]
        out = torch.empty(numel, dtype=torch.float32, device=self.device)
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
        """Return the tensors of a range, cut to the range, and their numbers of elements.

        Only the first and the last tensor are cut: hundreds of views take longer than the remaining work here.
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
