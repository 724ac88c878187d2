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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.arguments import is_count, names_arguments
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.compress.payload import FLOAT_BYTES, Message, Payload, Shapes
from lightning_lowbw.compress.selection import Residuals
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.exchange import Correction, Deferred, DenseMean, PreparedWhole, Signal, exchanges
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
        return [Message("all_reduce", FLOAT_BYTES * numel) for numel in (lefts, rights)]


@exchanges(LowRank)
@dataclass
class LowRankExchange:
    """Averages matrices by their factors; see the module.

    Args:
        payload: what is sent; may be replaced between steps, on all ranks.
        peers: who takes part.

    Attributes:
        residuals: e by name: float32, flat.
        fault: whether a mean, and so a residual, has become infinite: bool, a scalar on the device; None if not.
    """

    payload: LowRank
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals)
    fault: Tensor | None = None
    _starts: dict[str, Tensor] = field(default_factory=dict)  # Q by name: float32, shape (m, r)

    def prepare(
        self, signal: Mapping[str, Tensor | None], correction: Correction | None = None, *, is_late: bool = False
    ) -> PreparedWhole:
        """Prepare tensors of any floating dtype and shape; the two all-reduces follow one another, in `wait`."""

        def begin(tensors: dict[str, Tensor], _: Tensor | None) -> Deferred:
            # In manual optimization steps are taken under the autocast of `training_step`, which would round products.
            average = torch.autocast(next(iter(tensors.values())).device.type, enabled=False)(self.average)
            return Deferred(lambda: average(tensors))

        return PreparedWhole(signal, begin)

    @torch.no_grad()
    def average(self, signal: Signal) -> DenseMean:
        """Return the means: float32.

        In place:
            The residuals, and the warm starts; and the signal, where it is float32 and contiguous, becomes the mean.

        Collective: all ranks, with the same names; two all-reduces, blocking.

        Wire:
            4 bytes for the (n + m) r numbers of each matrix, and for each element of what is sent whole.
        """
        device = next(iter(signal.values())).device
        shapes = {name: shape for name, each in signal.items() if (shape := self.payload.factors(each.shape))}
        # What a matrix has kept that does not pay any more, with another rank, is sent whole, too.
        whole = {name: each.float() for name, each in signal.items() if name not in shapes}
        whole |= {
            name: each + self.residuals.pop(name).view_as(each)
            for name, each in whole.items()
            if name in self.residuals
        }
        # M = signal + e, in the memory of e
        self.residuals.ensure({name: n * m for name, (n, m, _) in shapes.items()}, device)
        matrices = {name: self.residuals[name].view(n, m) for name, (n, m, _) in shapes.items()}
        for name, matrix in matrices.items():
            matrix.add_(signal[name].reshape(matrix.shape))
        # P = M Q
        starts = [self._start(name, m, rank, device) for name, (_, m, rank) in shapes.items()]
        lefts = [matrix @ start for matrix, start in zip(matrices.values(), starts, strict=True)]
        means = self._mean([*lefts, *whole.values()])
        by_name = dict(zip(whole, means[len(lefts) :], strict=True))
        lefts = [torch.linalg.qr(left).Q for left in means[: len(lefts)]]
        # Q = M^T P
        rights = self._mean([matrix.mT @ left for matrix, left in zip(matrices.values(), lefts, strict=True)])
        # A column of zeros, as of a gradient of zeros, is no start: from it the same columns would be asked for ever.
        kept = [torch.where(right.any(0), right, start) for right, start in zip(rights, starts, strict=True)]
        self._starts |= zip(shapes, kept, strict=True)
        # mean = P Q^T;  e = M - P Q^T
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            is_room = signal[name].dtype == torch.float32 and signal[name].is_contiguous()
            mean = signal[name].view(matrix.shape) if is_room else torch.empty_like(matrix)
            by_name[name] = torch.mm(left, right.mT, out=mean)
            matrix.sub_(mean)
        return DenseMean({name: by_name[name].view(-1) for name in signal})

    def _start(self, name: str, numel: int, rank: int, device: torch.device) -> Tensor:
        """Return Q of the last exchange with orthogonal columns; the first time random ones."""
        if name not in self._starts or self._starts[name].shape != (numel, rank):
            generator = torch.Generator().manual_seed(len(self._starts))
            self._starts[name] = torch.randn(numel, rank, generator=generator, dtype=torch.float32)
        return torch.linalg.qr(self._starts[name].to(device)).Q

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means of tensors over all ranks, with the same bits everywhere; one all-reduce."""
        if not tensors:
            return []
        message = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(self.peers.num_ranks)
        with self.peers.ledger.waiting(message.device):
            self.peers.all_reduce_(message)
        nonfinite = ~message.isfinite().all()  # an infinity in M is one in M Q
        self.fault = nonfinite if self.fault is None else self.fault | nonfinite
        parts = message.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def describe_fault(self, step: int, kept: str, here: str) -> Fault:
        return overflow(3, step, f"{kept} on {here}")

    def to(self, device: torch.device) -> None:
        self.residuals.to(device)
        self._starts = {name: start.to(device) for name, start in self._starts.items()}
        self.fault = None if self.fault is None else self.fault.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"starts": {name: start.cpu().clone() for name, start in self._starts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._starts = {name: start.clone() for name, start in state.get("starts", {}).items()}
