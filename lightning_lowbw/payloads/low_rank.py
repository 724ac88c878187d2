"""Low-rank approximations of matrices, with error feedback: PowerSGD as a payload.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
arXiv 1905.13727, algorithms 1 and 2. With e_i the residual of rank i and M_i = signal_i + e_i as an n x m matrix:

    P_i = M_i orthogonalize(Q)         | Q, of the last exchange, is the warm start
    P   = orthogonalize(mean P_i)      | an all-reduce of n r numbers
    Q_i = M_i^T P
    Q   = mean Q_i                     | an all-reduce of m r numbers
    mean = P Q^T;  e_i = M_i - P Q^T

A tensor is a matrix: its first dimension, and the product of the remaining dimensions. A tensor whose two factors have
at least half as many elements as the matrix is sent whole, with the factors P. Vectors are sent whole, too.

Deviations: Q is orthogonalized, too, as torch's hook does. It changes no mean, as only the space of the columns counts,
but without it P = M Q has the square of the size of M and leaves the range of float32, and its columns differ by the
square of their differences only. A column that depends on the columns before it becomes zero in P; in Q it becomes the
column of the last start, from which the next exchange tries again. On two levels each rank keeps all of e. The mean is
over all ranks; the ranks of a node have equal gradients, so the factors of a node are sent once.

Each rank orthogonalizes and multiplies the same received factors for itself. The replicas are equal to the bit if all
ranks have the same libraries and the same kind of processor. Every 100 steps a comparison finds replicas that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.arguments import is_count
from lightning_lowbw.comm.peers import MeanWork, Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import CPU, copy_all_, device_of
from lightning_lowbw.payloads.corrections import Fields
from lightning_lowbw.payloads.exchange import Arrived, DenseMean, Exchange, Pending, Prepared, Residuals, Signal
from lightning_lowbw.payloads.payload import FLOAT_BYTES, Message, Payload, Shapes
from lightning_lowbw.schedules.schedule import Schedule

# Most elements of the matrices that are multiplied together; a larger matrix is multiplied alone. A GPU takes many, for
# few launches, with a copy of 64 MiB; a CPU takes them one by one, because memory bounds its time.
BATCH, BATCH_OF_CPU = 1 << 24, 1
HAVE_FLOAT64 = ("cpu", "cuda")  # Apple's GPUs, and some of Intel's, have none
DEPENDENT = 2.0**-18  # a remainder shorter than this part of its column may be a rounding error of float32
PADDED = 1 << 20  # elements of factors that may be orthogonalized together with any padding: 8 MiB
ALIGNED = 16  # rows: 64 bytes or more


@dataclass(frozen=True, kw_only=True)
class LowRank(Payload, key="low_rank"):
    """Every matrix as the product of two thin ones, with error feedback.

    Args:
        rank: r, columns of the factors. More is closer to the gradient, and costs more bytes and time.

    Raises:
        ConfigurationError: `rank` is no integer >= 1.
    """

    rank: int = 2

    keeps_parts = False

    def __post_init__(self) -> None:
        if not is_count(self.rank):
            raise ConfigurationError(f"rank={self.rank!r}: give a number of columns, an integer >= 1.")

    def factors(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return n, m and r of a tensor's factors; None if the tensor is sent whole."""
        if len(shape) < 2:
            return None
        n, m = shape[0], math.prod(shape[1:])
        return (n, m, self.rank) if 2 * (n + m) * self.rank < n * m else None

    def exchange(self, peers: Peers, when: Schedule) -> LowRankExchange:
        return LowRankExchange(self, peers)

    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        factors = [(self.factors(shape), math.prod(shape)) for shape in shapes]
        lefts = sum(of[0] * of[2] if of else numel for of, numel in factors)
        rights = sum(of[1] * of[2] for of, _ in factors if of)
        return [
            Message("all_reduce", FLOAT_BYTES * lefts),
            Message("all_reduce", FLOAT_BYTES * rights),
        ]


@dataclass
class LowRankExchange(Exchange):
    """Averages matrices by their factors; see the module.

    Args:
        payload: the low-rank payload; may be replaced between steps, on all ranks.
        peers: the participants.

    Attributes:
        residuals: e by name: float32, flat.
        starts: Q by name, with orthogonal columns: float32, shape (m, r).
    """

    payload: LowRank
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals)
    starts: dict[str, Tensor] = field(default_factory=dict)
    _together: dict[tuple[str, ...], Tensor] = field(default_factory=dict)  # starts of a batch; `starts` has views

    def prepare(self, signal: Signal, fields: Fields | None = None) -> Prepared:
        """Prepare tensors of any floating dtype and shape."""
        return Prepared(partial(PendingLowRank, self, signal))

    def ensure(self, numels: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """Make the starts that are missing or have another size: random orthogonal columns, equal on all ranks.

        Args:
            numels: rows and columns by name.
            device: the device for the starts.
        """
        for name, shape in numels.items():
            if name not in self.starts or self.starts[name].shape != shape:
                self._together = {}
                generator = torch.Generator().manual_seed(len(self.starts))
                start = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                self.starts[name] = orthogonal([start.unsqueeze(0)])[0][0]
            if self.starts[name].device != device:
                self.starts[name] = self.starts[name].to(device)

    def starts_of(self, batch: list[str]) -> Tensor:
        """Return the starts of some matrices, shape (matrices, m, r)."""
        together = self._together.get(tuple(batch))
        return torch.stack([self.starts[name] for name in batch]) if together is None else together

    def keep(self, starts: dict[tuple[str, ...], Tensor]) -> None:
        """Take over the starts of the next exchange; each key has the names of a batch, whose starts are one tensor."""
        for names, together in starts.items():
            self.starts.update(zip(names, together.unbind(), strict=True))
        self._together = starts

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.starts, self._together = {name: start.to(device) for name, start in self.starts.items()}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"starts": {name: start.cpu().clone() for name, start in self.starts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.starts, self._together = {name: start.clone() for name, start in state.get("starts", {}).items()}, {}


class PendingLowRank(Pending):
    """The first message, in progress: the factors P, the status and the whole tensors. `wait` exchanges Q, too.

    In place:
        The residuals; in `wait` also the warm starts, and each signal that is float32 and contiguous.

    Collective: all ranks, with the same names; an all-reduce, and a second one in `wait`.

    Wire:
        4 bytes for each of the (n + m) r numbers of a matrix, and for each element of a tensor that is sent whole.

    Args:
        exchange: the exchange that has the residuals.
        signal: the tensors by name.
        status: see `Prepared.send`.
        whole: see `Prepared.send`.
    """

    @torch.no_grad()
    def __init__(
        self, exchange: LowRankExchange, signal: Signal, status: Tensor | None = None, whole: Signal | None = None
    ) -> None:
        self._exchange, self._signal, self._whole = exchange, signal, dict(whole or {})
        payload, residuals, device = exchange.payload, exchange.residuals, next(iter(signal.values())).device
        shapes = {name: shape for name, each in signal.items() if (shape := payload.factors(each.shape))}
        self._batches = _batches(signal, shapes)
        # M = signal + e. A tensor whose factors save too little (at this rank) is sent whole, with its residual.
        rest = [name for name in signal if name not in shapes and name in residuals]
        residuals.ensure({name: math.prod(shapes[name][:2]) for batch in self._batches for name in batch}, device)
        self._matrices = _matrices(residuals, self._batches, shapes)
        self._rest = {name: signal[name].float() for name in signal if name not in shapes}
        self._rest |= {name: self._rest[name] + residuals[name].view_as(self._rest[name]) for name in rest}
        # P = M Q = signal Q + e Q
        exchange.ensure({name: (m, rank) for name, (_, m, rank) in shapes.items()}, device)
        with _in_float32(device):
            self._starts = [exchange.starts_of(batch) for batch in self._batches]
            lefts = [
                torch.baddbmm(matrices @ start, self._signals(batch, matrices), start)
                for batch, matrices, start in zip(self._batches, self._matrices, self._starts, strict=True)
            ]
        control = torch.zeros(1, device=device) if status is None else status
        sent = [*lefts, *self._rest.values(), *self._whole.values()]
        self._num_statuses, self._work = 0 if status is None else len(status), MeanWork(sent, control, exchange.peers)

    def _signals(self, batch: list[str], matrices: Tensor) -> Tensor:
        """Return the signals of a batch as float32 matrices: a view of a single float32 gradient, else a copy."""
        tensors = [self._signal[name] for name in batch]
        return (tensors[0] if len(batch) == 1 else torch.stack(tensors)).reshape(matrices.shape).float()

    def _receive(self) -> Arrived:
        means, status = self._work.wait()
        first = len(means) - len(self._whole)
        whole = dict(zip(self._whole, means[first:], strict=True))
        return Arrived(self._finish(means[:first]), status[: self._num_statuses], whole)

    @torch.no_grad()
    def _finish(self, means: list[Tensor]) -> DenseMean:
        """Exchange the second factors; return the means."""
        exchange, signal, starts, num = self._exchange, self._signal, self._starts, len(self._batches)
        device, lefts = next(iter(signal.values())).device, means[:num]
        by_name = dict(zip(self._rest, means[num:], strict=True))
        for name in self._rest:
            if name in exchange.residuals:
                exchange.residuals.pop(name)
        with _in_float32(device):
            lefts = orthogonal(lefts)
            # Q = M^T P, with M written into the memory of e
            rights = []
            for batch, matrices, left in zip(self._batches, self._matrices, lefts, strict=True):
                matrices.add_(self._signals(batch, matrices))
                rights.append(matrices.mT @ left)
            if rights:
                rights, _ = MeanWork(rights, torch.zeros(1, device=device), exchange.peers).wait()
            infinite = are_not_finite([*means, *rights]).any()  # an inf in M makes an inf or NaN in M Q
            exchange.fault = infinite if exchange.fault is None else exchange.fault | infinite
            # mean = P Q^T;  e = M - P Q^T
            for batch, matrices, left, right in zip(self._batches, self._matrices, lefts, rights, strict=True):
                tensors = [signal[name] for name in batch]
                is_room = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
                room = tensors[0].view(matrices.shape) if is_room and len(batch) == 1 else torch.empty_like(matrices)
                mean = torch.bmm(left, right.mT, out=room)
                matrices.sub_(mean)
                parts = mean.view(-1, *tensors[0].shape).unbind()
                if is_room and len(batch) > 1:
                    copy_all_(tensors, parts)
                by_name |= zip(batch, tensors if is_room else parts, strict=True)
            # A column of zeros (from a gradient of zeros) is no start: every later exchange would get zeros again.
            rights = orthogonal(rights, starts)
        exchange.keep(dict(zip(map(tuple, self._batches), rights, strict=True)))
        return DenseMean({name: by_name[name] for name in signal})


def orthogonal(batches: Sequence[Tensor], spares: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return matrices whose columns are orthogonal and of length 1: Gram-Schmidt from the first column to the last.

    A column that depends on the columns before it becomes zero, or the column of the spare. A column that is not finite
    does not spread NaN to other matrices.

    Args:
        batches: float32, shape (matrices, n, r), all with one r.
        spares: of the same shapes.

    Source: classical Gram-Schmidt in float64. Products of float32 are exact there, and rounding of the sums stays below
        float32 for all columns that are not dependent: no second pass is needed.
    """
    results = list(batches)
    for numbers in _padded_together([batch.shape for batch in batches]):
        own = [batches[number] for number in numbers]
        rank, device, sizes = own[0].shape[2], own[0].device, [batch.shape[:2] for batch in own]
        padded, back = _rows(tuple(sizes), device)
        where = device if device.type in HAVE_FLOAT64 else CPU
        columns = _padded(own, padded).mT.to(where, torch.float64, memory_format=torch.contiguous_format)
        factors = list[Tensor]()
        for place in range(rank):
            column = columns[:, place : place + 1]
            length = column.norm(dim=2, keepdim=True)
            if place:
                before = columns[:, :place]
                column.baddbmm_(column @ before.mT, before, alpha=-1)
            left = column.norm(dim=2, keepdim=True)
            factors.append(left.reciprocal().masked_fill_(left <= DEPENDENT * length, 0.0))
            column.mul_(factors[-1])
        found = columns.to(device, torch.float32)
        if spares is not None:
            instead = _padded([spares[number] for number in numbers], padded).mT
            found = torch.where(torch.cat(factors, 1).to(device) == 0, instead, found)
        rows = found.mT.reshape(-1, rank).index_select(0, back).split([_aligned(num * n) for num, n in sizes])
        for number, part, (num, n) in zip(numbers, rows, sizes, strict=True):
            results[number] = part[: num * n].view(batches[number].shape)
    return results


def _padded(batches: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return the rows of all matrices, and zeros for row 0: shape (matrices, rows of the longest, r)."""
    zeros = batches[0].new_zeros(1, batches[0].shape[2])
    flat = torch.cat([zeros, *(batch.flatten(0, 1) for batch in batches)])
    return flat.index_select(0, rows.flatten()).view(*rows.shape, -1)


@lru_cache(maxsize=64)
def _rows(sizes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row number at each place of the padded matrices (from 1; 0 is padding), and the place of each row.

    The rows of each batch begin at a multiple of `ALIGNED`: products of a library may depend on the alignment, and
    after a resume each factor has its own memory.

    Args:
        sizes: matrices and rows of each batch.
    """
    numbers = np.zeros((sum(num for num, _ in sizes), max(n for _, n in sizes)), dtype=np.int64)
    first, row, places = 0, 1, list[np.ndarray]()
    for num, n in sizes:
        numbers[first : first + num, :n] = np.arange(row, row + num * n).reshape(num, n)
        own = first * numbers.shape[1] + np.flatnonzero(numbers[first : first + num])
        places.append(np.pad(own, (0, _aligned(num * n) - num * n)))
        first, row = first + num, row + num * n
    upload = device_of(device).upload
    return upload(torch.from_numpy(numbers)), upload(torch.from_numpy(np.concatenate(places)))


def _aligned(num_rows: int) -> int:
    return -(-num_rows // ALIGNED) * ALIGNED


def _padded_together(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Return groups of batches whose columns are padded to the longest one, the first: few launches, little memory."""
    groups, num_elements = list[list[int]](), 0
    for number in sorted(range(len(shapes)), key=lambda number: -shapes[number][1]):
        numel = shapes[number].numel()
        if groups:
            _, longest, rank = shapes[groups[-1][0]]
            num_padded = sum(shapes[other][0] for other in (*groups[-1], number)) * longest * rank
            if num_padded <= max(PADDED, 2 * (num_elements + numel)):
                groups[-1].append(number)
                num_elements += numel
                continue
        groups.append([number])
        num_elements = numel
    return groups


def _batches(signal: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int, int]]) -> list[list[str]]:
    """Return the names of matrices of one shape and dtype that are multiplied together."""
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name in shapes:
        alike.setdefault((signal[name].shape, signal[name].dtype), []).append(name)
    batches = list[list[str]]()
    for names in alike.values():
        most = BATCH_OF_CPU if signal[names[0]].device.type == "cpu" else BATCH
        at_once = max(1, most // math.prod(shapes[names[0]][:2]))
        batches += [names[first : first + at_once] for first in range(0, len(names), at_once)]
    return batches


def _matrices(
    residuals: Residuals, batches: Sequence[list[str]], shapes: Mapping[str, tuple[int, int, int]]
) -> list[Tensor]:
    """Return the residuals of each batch as one view, of shape (matrices, n, m)."""

    rows = list(map(residuals.together, batches))
    if any(each is None for each in rows):  # some residuals came later, or in another order
        first = [name for batch in batches for name in batch]
        order = dict.fromkeys([*first, *residuals])
        residuals.load({name: residuals[name] for name in order}, residuals[first[0]].device)
        rows = list(map(residuals.together, batches))
    return [
        matrices.unflatten(1, shapes[batch[0]][:2])
        for batch, matrices in zip(batches, rows, strict=True)
        if matrices is not None
    ]


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Keep products of matrices in float32: without TF32, bfloat16 of a CPU, and autocast, under which manual
    optimization takes steps."""
    before, of_backends = "highest", list[tuple[Any, str]]()
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for a backend by name, as from torch 2.9 on
        backends: Any = torch.backends
        of_backends = [(each, each.fp32_precision) for each in (backends.cuda.matmul, backends.mkldnn.matmul)]
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    for backend, _ in of_backends:
        backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)
        for backend, precision in of_backends:
            backend.fp32_precision = precision
