"""Low-rank approximations of matrices, with error feedback: PowerSGD as a payload.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
arXiv 1905.13727, algorithms 1 and 2. With e_i the residual of rank i and M_i = signal_i + e_i as an n x m matrix:

    P_i = M_i Q                        | Q, of the last exchange, is the warm start
    P   = orthogonalize(mean P_i)      | an all-reduce of n r numbers
    Q_i = M_i^T P
    Q   = mean Q_i                     | an all-reduce of m r numbers
    mean = P Q^T;  e_i = M_i - P Q^T

A tensor is a matrix of its first dimension and the product of the others. Those of which the two factors have more
elements than a half of the matrix (vectors, too) are sent whole, with the factors P.

Deviation: orthogonalization is torch's QR, not Gram-Schmidt: one call for all matrices of a shape. On two levels the
signal is the node's, and equal on its ranks: the sum over all ranks, which sends a node's factors once, has the same
mean. e is kept whole then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.arguments import is_count, names_arguments
from lightning_lowbw.engine.exchange import DenseMean, Signal, exchanges
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.what.residuals import Residuals
from lightning_lowbw.where.ledger import all_reduce_bytes
from lightning_lowbw.where.peers import Peers


@names_arguments
@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Every matrix as the product of two thin ones, with error feedback.

    Args:
        rank: r, columns of the factors. More is closer to the gradient, and costs more bytes and time.

    Raises:
        ConfigurationError: it is no number of columns.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        if not is_count(self.rank):
            raise ConfigurationError(f"rank={self.rank!r}: give a number of columns, an integer >= 1.")

    def factors(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return n, m and r of a tensor's factors, r at most n and m; None if it is sent whole."""
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = shape[0], math.prod(shape[1:])
        rank = min(self.rank, n, m)
        return (n, m, rank) if 2 * (n + m) * rank < n * m else None


@dataclass(frozen=True)
class _Deferred:
    exchange: LowRankExchange
    signal: Signal

    def wait(self) -> tuple[DenseMean, None]:
        return self.exchange.average(self.signal), None


@exchanges("low_rank", LowRank)
@dataclass
class LowRankExchange:
    """Averages matrices by their factors; see the module.

    Args:
        payload: what is sent; may be replaced between steps, on all ranks.
        peers: who takes part.

    Attributes:
        residuals: e by name: float32, flat.
        fault: whether a residual has become infinite: bool, a scalar on the device; None before the first exchange.
    """

    payload: LowRank
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals)
    fault: Tensor | None = None
    _starts: dict[str, Tensor] = field(default_factory=dict)  # Q by name: float32, shape (m, r)
    keeps_parts = False

    def begin(self, signal: Signal, status: Tensor | None = None) -> _Deferred:
        """Average tensors of any floating dtype and shape; the two all-reduces follow one another, in `wait`."""
        assert status is None
        return _Deferred(self, signal)

    def average(self, signal: Signal) -> DenseMean:
        """Return the means: float32, in the shapes of the signal.

        In place:
            The residuals, and the warm starts.

        Collective: all ranks, with the same names; two all-reduces, blocking.

        Wire:
            4 bytes for n r + m r numbers of each matrix, and for each element of what is sent whole.
        """
        shapes = {name: shape for name, each in signal.items() if (shape := self.payload.factors(each.shape))}
        whole = {name: each.float() for name, each in signal.items() if name not in shapes}
        device = next(iter(signal.values())).device
        self.residuals.ensure({name: n * m for name, (n, m, _) in shapes.items()}, device)
        groups = list(_by_shape(shapes))
        matrices, starts = [], []  # one batch for each shape: few launches, whatever the number of tensors
        for (n, m, rank), names in groups:
            signals = torch.stack([signal[name].reshape(n, m).float() for name in names])
            matrices.append(signals + torch.stack([self.residuals[name].view(n, m) for name in names]))
            starts.append(torch.stack([self._start(name, m, rank, device) for name in names]))
        # P = M Q, orthogonal columns of the mean
        lefts = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        *lefts, rest = self._mean(
            [*lefts, torch.cat([torch.empty(0, device=device), *(each.reshape(-1) for each in whole.values())])]
        )
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        # Q = M^T P
        rights = self._mean([matrix.mT @ left for matrix, left in zip(matrices, lefts, strict=True)])
        means = dict(zip(whole, rest.split([each.numel() for each in whole.values()]), strict=True))
        means = {name: mean.view(whole[name].shape) for name, mean in means.items()}
        left_over = torch.zeros((), device=device)
        for ((_, names), matrix), left, right in zip(zip(groups, matrices, strict=True), lefts, rights, strict=True):
            mean = left @ right.mT
            matrix.sub_(mean)  # e = M - P Q^T
            left_over = left_over + matrix.sum()
            for index, name in enumerate(names):
                self.residuals[name].copy_(matrix[index].view(-1))
                self._starts[name] = right[index]
                means[name] = mean[index].view(signal[name].shape)
        self.fault = left_over * 0 != 0  # NaN of a NaN, and of an infinity
        return DenseMean({name: means[name] for name in signal})

    def _start(self, name: str, numel: int, rank: int, device: torch.device) -> Tensor:
        """Return Q of the last exchange; the first time random numbers, the same on all ranks."""
        if name not in self._starts or self._starts[name].shape != (numel, rank):
            generator = torch.Generator().manual_seed(len(self._starts))
            self._starts[name] = torch.randn(numel, rank, generator=generator)
        self._starts[name] = self._starts[name].to(device)
        return self._starts[name]

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means of tensors over all ranks, with the same bits everywhere; one all-reduce."""
        message = torch.cat([tensor.reshape(-1) for tensor in tensors] or [torch.empty(0)])
        if message.numel():
            with self.peers.ledger.waiting(message.device):
                self.peers.all_reduce_(message.div_(self.peers.num_ranks))
        parts = message.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def sent_bytes(self, shape: torch.Size) -> int:
        """Return the bytes of two all-reduces; see `Exchange`."""
        factors = self.payload.factors(shape)
        numel = shape.numel() if factors is None else (factors[0] + factors[1]) * factors[2]
        return all_reduce_bytes(4 * numel, self.peers.num_participants)

    def to(self, device: torch.device) -> None:
        self.residuals.to(device)
        self._starts = {name: start.to(device) for name, start in self._starts.items()}
        self.fault = None if self.fault is None else self.fault.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"starts": {name: start.cpu().clone() for name, start in self._starts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._starts = {name: start.clone() for name, start in state["starts"].items()}


def _by_shape(shapes: Mapping[str, tuple[int, int, int]]) -> Iterator[tuple[tuple[int, int, int], list[str]]]:
    """Yield each shape with the names of its tensors, in the order of their first."""
    for shape in dict.fromkeys(shapes.values()):
        yield shape, [name for name, each in shapes.items() if each == shape]
