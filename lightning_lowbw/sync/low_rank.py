"""Low-rank approximations of matrices, with error feedback: PowerSGD as a payload.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
arXiv 1905.13727, algorithms 1 and 2. With e_i the residual of rank i and M_i = signal_i + e_i as an n x m matrix:

    P_i = M_i orthogonalize(Q)         | Q, of the last exchange, is the warm start
    P   = orthogonalize(mean P_i)      | an all-reduce of n r numbers
    Q_i = M_i^T P
    Q   = mean Q_i                     | an all-reduce of m r numbers
    mean = P Q^T;  e_i = M_i - P Q^T

A tensor is a matrix of its first dimension and the product of the others. Those of which the two factors have more
elements than a half of the matrix (vectors, too) are sent whole, with the factors P.

Deviations: Q is orthogonalized, too, as torch's hook does. It changes no mean, as only the space of the columns counts,
but P = M Q has the square of the size of M without it, and leaves the range of float32. Orthogonalization is QR, not
Gram-Schmidt, which divides by zero where columns are dependent. On two levels e is kept whole, and the mean is over all
ranks, of which those of a node have equal gradients: its factors are sent once.

Each rank orthogonalizes and multiplies for itself: replicas are equal to the bit where the libraries, and the kind of
processor, are the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.arguments import is_count, names_arguments
from lightning_lowbw.comm.peers import MeanWork, Peers, mean_over
from lightning_lowbw.compress.payload import FLOAT_BYTES, Message, Payload, Shapes
from lightning_lowbw.compress.selection import Residuals
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.exchange import Arrived, Correction, DenseMean, LateMean, PreparedWhole, Signal, exchanges
from lightning_lowbw.sync.status import Fault, overflow


@names_arguments
@dataclass(frozen=True, kw_only=True)
class LowRank(Payload, key="low_rank"):
    """Every matrix as the product of two thin ones, with error feedback.

    Args:
        rank: r, columns of the factors. More is closer to the gradient, and costs more bytes and time.

    Raises:
        ConfigurationError: it is no number of columns.
    """

    rank: int = 2

    keeps_parts = False

    def __post_init__(self) -> None:
        if not is_count(self.rank):
            raise ConfigurationError(f"rank={self.rank!r}: give a number of columns, an integer >= 1.")

    def factors(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return n, m and r of a tensor's factors, r at most n and m; None if it is sent whole."""
        if len(shape) < 2:
            return None
        n, m = shape[0], math.prod(shape[1:])
        rank = min(self.rank, n, m)
        return (n, m, rank) if 2 * (n + m) * rank < n * m else None

    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        factors = [(self.factors(shape), math.prod(shape)) for shape in shapes]
        lefts = sum(of[0] * of[2] if of else numel for of, numel in factors)
        rights = sum(of[1] * of[2] for of, _ in factors if of)
        return [
            Message("all_reduce", FLOAT_BYTES * lefts, carries_status=True),
            Message("all_reduce", FLOAT_BYTES * rights),
        ]


@exchanges(LowRank)
@dataclass
class LowRankExchange:
    """Averages matrices by their factors; see the module.

    Args:
        payload: what is sent; may be replaced between steps, on all ranks.
        peers: who takes part.

    Attributes:
        residuals: e by name: float32, flat.
        starts: Q by name: float32, shape (m, r).
        fault: whether a mean, and so a residual, has become infinite: bool, a scalar on the device; None if not.
    """

    payload: LowRank
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals)
    fault: Tensor | None = None
    starts: dict[str, Tensor] = field(default_factory=dict)

    def prepare(
        self, signal: Mapping[str, Tensor | None], correction: Correction | None = None, *, is_late: bool = False
    ) -> PreparedWhole:
        """Prepare tensors of any floating dtype and shape."""
        return PreparedWhole(signal, partial(PendingLowRank, self))

    def carries_status(self, numels: Sequence[int]) -> bool:
        return True

    def start(self, name: str, numel: int, rank: int, device: torch.device) -> Tensor:
        """Return Q of the last exchange with orthogonal columns; the first time random ones."""
        if name not in self.starts or self.starts[name].shape != (numel, rank):
            generator = torch.Generator().manual_seed(len(self.starts))
            self.starts[name] = torch.randn(numel, rank, generator=generator, dtype=torch.float32)
        return torch.linalg.qr(self.starts[name].to(device)).Q

    def describe_fault(self, step: int, kept: str, here: str) -> Fault:
        return overflow(3, step, f"{kept} on {here}")

    def to(self, device: torch.device) -> None:
        self.residuals.to(device)
        self.starts = {name: start.to(device) for name, start in self.starts.items()}
        self.fault = None if self.fault is None else self.fault.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"starts": {name: start.cpu().clone() for name, start in self.starts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.starts = {name: start.clone() for name, start in state.get("starts", {}).items()}


class PendingLowRank(LateMean):
    """The factors P of all matrices, with the status and what is sent whole, in progress; Q is the second message.

    In place:
        The residuals; with the mean also the warm starts, and the signal, where it is float32 and contiguous.

    Collective: all ranks, with the same names; an all-reduce, and another one for the mean.

    Wire:
        4 bytes for the (n + m) r numbers of each matrix, and for each element of what is sent whole.

    Args:
        exchange: that has the residuals.
        signal: by name.
        status: see `Prepared.send`.
        whole: see `Prepared.send`.
    """

    @torch.no_grad()
    def __init__(
        self, exchange: LowRankExchange, signal: dict[str, Tensor], status: Tensor | None, whole: Signal | None
    ) -> None:
        self._exchange, self._signal, self._whole = exchange, signal, dict(whole or {})
        payload, residuals, device = exchange.payload, exchange.residuals, next(iter(signal.values())).device
        shapes = {name: shape for name, each in signal.items() if (shape := payload.factors(each.shape))}
        # M = signal + e. What does not pay as a matrix, or with another rank not any more, is sent whole.
        rest = [name for name in signal if name not in shapes and name in residuals]
        residuals.ensure({name: n * m for name, (n, m, _) in shapes.items()}, device)
        self._matrices = {name: residuals[name].view(n, m) for name, (n, m, _) in shapes.items()}
        self._rest = {name: signal[name].float() for name in signal if name not in shapes}
        self._rest |= {name: self._rest[name] + residuals[name].view_as(self._rest[name]) for name in rest}
        # P = M Q = signal Q + e Q: the residuals change after the status has been read.
        with _as_it_is(device):
            self._starts = [exchange.start(name, m, rank, device) for name, (_, m, rank) in shapes.items()]
            lefts = [
                torch.addmm(matrix @ start, signal[name].reshape(matrix.shape).float(), start)
                for (name, matrix), start in zip(self._matrices.items(), self._starts, strict=True)
            ]
        control = torch.zeros(1, device=device) if status is None else status
        sent = [*lefts, *self._rest.values(), *self._whole.values()]
        self._num_statuses, self._work = 0 if status is None else len(status), MeanWork(sent, control, exchange.peers)

    def wait(self) -> Arrived:
        self._means, status = self._work.wait()
        whole = dict(zip(self._whole, self._means[len(self._means) - len(self._whole) :], strict=True))
        return Arrived(self, status[: self._num_statuses], whole)

    @torch.no_grad()
    def finish(self) -> DenseMean:
        exchange, matrices, signal = self._exchange, self._matrices, self._signal
        means = self._means[: len(self._means) - len(self._whole)]
        device, num = next(iter(signal.values())).device, len(matrices)
        by_name = dict(zip(self._rest, means[num:], strict=True))
        for name in self._rest:
            if name in exchange.residuals:
                exchange.residuals.pop(name)
        with _as_it_is(device):
            lefts = [torch.linalg.qr(left).Q for left in means[:num]]
            # Q = M^T P, with M in the memory of e
            for name, matrix in matrices.items():
                matrix.add_(signal[name].reshape(matrix.shape))
            rights = [matrix.mT @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
            rights = mean_over(rights, exchange.peers, device) if rights else []
            infinite = are_not_finite([*means, *rights]).any()  # an infinity in M is one in M Q
            exchange.fault = infinite if exchange.fault is None else exchange.fault | infinite
            # A column of zeros, as of a gradient of zeros, is no start: from it the same would be asked for ever.
            kept = [torch.where(right.any(0), right, start) for right, start in zip(rights, self._starts, strict=True)]
            exchange.starts |= zip(matrices, kept, strict=True)
            # mean = P Q^T;  e = M - P Q^T
            for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
                is_room = signal[name].dtype == torch.float32 and signal[name].is_contiguous()
                mean = signal[name].view(matrix.shape) if is_room else torch.empty_like(matrix)
                by_name[name] = torch.mm(left, right.mT, out=mean)
                matrix.sub_(mean)
        return DenseMean({name: by_name[name].reshape(-1) for name in signal})

    def take_back(self) -> bool:
        return True  # nothing has changed yet


def _as_it_is(device: torch.device) -> torch.autocast:
    """Turn autocast off: in manual optimization steps are taken under that of `training_step`, which would round."""
    return torch.autocast(device.type, enabled=False)
