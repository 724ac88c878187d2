"""The methods in one process, written from their papers and definitions: slow, and nothing of the package is used.

All ranks are a list of gradients, signals or replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer


def largest(values: Tensor, density: float, chunk: int | None = None) -> Tensor:
    """Return where the largest elements of each chunk are; of equal ones the first."""
    mask, size = torch.zeros(values.numel(), dtype=torch.bool), chunk or values.numel()
    for start in range(0, values.numel(), size or 1):
        of_chunk = values.flatten()[start : start + size].abs()
        k = max(1, round(of_chunk.numel() * density))
        if of_chunk.numel() < size:  # of a rest as many as of a whole chunk, or of one of 4096
            k = max(k, round(min(size, 4096) * density))
        mask[start + of_chunk.sort(descending=True, stable=True).indices[:k]] = True
    return mask.view(values.shape)


def mean_of(replicas: list[Tensor]) -> Tensor:
    return (sum(replica.detach().double() for replica in replicas) / len(replicas)).to(replicas[0].dtype)


# Deep gradient compression --------------------------------------------------------------------------------------------


@dataclass
class OracleDGC:
    """The paper's equations, with its own Nesterov form: u = m (u + g); v = v + u + g.

    Signs and averages are torch's: each rank's own mean gradient, not divided by N. Weight decay is that of the weight
    which a rank's residual leads to, w - lr v; in small tensors torch's own. Of what the paper does not have: the k
    largest of each chunk, a residual that decays, means over those that have sent.

    Args:
        masking: None is at densities of up to (1 - momentum) / 2.
    """

    num_ranks: int
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    min_numel: int = 1
    masking: bool | None = None
    chunk: int | None = None
    decay: float = 1.0
    mean_over: str = "ranks"
    u: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    v: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    buffer: dict[int, Tensor] = field(default_factory=dict)

    def dense_step(self, weights: list[Tensor], gradients: list[list[Tensor]]) -> None:
        """Plain momentum SGD on the mean gradient."""
        for i, weight in enumerate(weights):
            g = sum(rank[i] for rank in gradients) / self.num_ranks + self.weight_decay * weight
            self.buffer[i] = self.momentum * self.buffer[i] + g if i in self.buffer else g.clone()
            weight -= self.lr * (g + self.momentum * self.buffer[i] if self.nesterov else self.buffer[i])

    def sparse_step(self, weights: list[Tensor], gradients: list[list[Tensor]], density: float) -> None:
        """One step of the paper's algorithm on all ranks."""
        masks = 2 * density <= 1 - self.momentum + 1e-6 if self.masking is None else self.masking
        updates, senders = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
        for rank in range(self.num_ranks):
            for i, weight in enumerate(weights):
                is_sparse = weight.numel() >= self.min_numel
                if (rank, i) not in self.u:  # hand-over
                    buffer = self.buffer.get(i, torch.zeros_like(weight))
                    self.u[rank, i] = self.momentum * buffer if self.nesterov else buffer.clone()
                    self.v[rank, i] = torch.zeros_like(weight)
                u, v = self.u[rank, i], self.decay * self.v[rank, i]
                g = gradients[rank][i] + self.weight_decay * (weight - self.lr * v if is_sparse else weight)
                u = self.momentum * (u + g) if self.nesterov else self.momentum * u + g
                v = v + u + g if self.nesterov else v + u
                mask = largest(v, density, self.chunk) if is_sparse else torch.ones_like(weight, dtype=torch.bool)
                updates[i] += torch.where(mask, v, 0.0)
                senders[i] += mask & (v != 0)
                self.v[rank, i] = torch.where(mask, 0.0, v)
                self.u[rank, i] = torch.where(mask, 0.0, u) if masks and is_sparse else u
        for weight, update, number in zip(weights, updates, senders, strict=True):
            is_over_all = self.mean_over == "ranks" or weight.numel() < self.min_numel
            weight -= self.lr * update / (self.num_ranks if is_over_all else number.clamp(min=1.0))


LARGEST_BETA1 = 0.7
Moments = tuple[Tensor, Tensor, Tensor]  # m, v and the largest v


@dataclass
class OracleAdam:
    """The same for Adam and AdamW. In a sparse step each rank does, with its own m and v,

        m = b1 m + (1 - b1) G;  v = b2 v + (1 - b2) G^2 / N;  r = r + m_hat / (sqrt(v_hat) + eps)

    with a b1 of at most LARGEST_BETA1; to begin with they are those of the dense phase, which is Adam on the mean
    gradient. The k largest |r| are averaged, and cleared in r (with masking, in m); ``w = w (1 - lr c) - lr average``
    (AdamW; Adam's decay goes into G).
    """

    num_ranks: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_decoupled: bool = True
    amsgrad: bool = False
    min_numel: int = 1
    masking: bool = False
    step: dict[int, int] = field(default_factory=dict)
    moments: dict[tuple[int | None, int], Moments] = field(default_factory=dict)  # by rank; None is all
    r: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def dense_step(self, weights: list[Tensor], gradients: list[list[Tensor]]) -> None:
        """Adam on the mean gradient."""
        for i, weight in enumerate(weights):
            self._adam(i, weight, sum(rank[i] for rank in gradients) / self.num_ranks)

    def sparse_step(self, weights: list[Tensor], gradients: list[list[Tensor]], density: float) -> None:
        """One compressed step; small tensors take one of Adam's own."""
        for i, weight in enumerate(weights):
            if weight.numel() < self.min_numel:
                self._adam(i, weight, sum(rank[i] for rank in gradients) / self.num_ranks)
                continue
            total, decay = torch.zeros_like(weight), 0.0 if self.is_decoupled else self.weight_decay
            self.step[i] = self.step.get(i, 0) + 1
            for rank in range(self.num_ranks):
                r, g = self.r.get((rank, i), torch.zeros_like(weight)), gradients[rank][i]
                square = (g + decay * weight) ** 2 / self.num_ranks
                r = r + self._move(rank, i, g + decay * (weight - self.lr * r), square, LARGEST_BETA1)
                mask = largest(r, density)
                total += torch.where(mask, r, 0.0)
                self.r[rank, i] = torch.where(mask, 0.0, r)
                if self.masking:
                    m, *others = self.moments[rank, i]
                    self.moments[rank, i] = (torch.where(mask, 0.0, m), *others)  # type: ignore[assignment]
            self._decay(weight)
            weight -= self.lr * total / self.num_ranks

    def _adam(self, i: int, weight: Tensor, g: Tensor) -> None:
        g = g if self.is_decoupled else g + self.weight_decay * weight
        self.step[i] = self.step.get(i, 0) + 1
        self._decay(weight)
        weight -= self.lr * self._move(None, i, g, g * g, 1.0)

    def _decay(self, weight: Tensor) -> None:
        if self.is_decoupled:
            weight *= 1 - self.lr * self.weight_decay

    def _move(self, rank: int | None, i: int, g: Tensor, square: Tensor, most_beta1: float) -> Tensor:
        """Return m_hat / (sqrt(v_hat) + eps) of moments that a gradient, and its square, have entered."""
        b1, b2, zeros, step = min(self.betas[0], most_beta1), self.betas[1], torch.zeros_like(g), self.step[i]
        m, v, largest_v = self.moments.get((rank, i), self.moments.get((None, i), (zeros, zeros, zeros)))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * square
        self.moments[rank, i] = m, v, torch.maximum(largest_v, v)
        v_hat = (self.moments[rank, i][2] if self.amsgrad else v) / (1 - b2**step)
        return m / (1 - b1**step) / (v_hat.sqrt() + self.eps)


# Few bits per value ---------------------------------------------------------------------------------------------------

BLOCK = 128


def encode(values: np.ndarray, bits: int) -> np.ndarray:
    """Return what the other side reads of a vector."""
    most, read = 2 ** (bits - 1) - 1, np.zeros_like(values)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = round_up(np.float32(np.abs(block).max() / np.float32(most)))
        if scale > 0:
            integers = np.rint(block / scale)  # to the nearest, ties to even
            read[start : start + BLOCK] = integers.clip(-most, most) * scale
    return read


def round_up(value: np.float32) -> np.float32:
    """Return the smallest number of eight significant bits, those of a bfloat16, that is not below a magnitude."""
    mantissa, exponent = math.frexp(value)
    return np.float32(math.ldexp(math.ceil(mantissa * 256), exponent - 8))


@dataclass
class OracleQuantized:
    """The mean in few bits over ranks, with what each of them keeps; all numbers are float32, as on the wire.

    Tang et al., arXiv 1905.05957, with N servers, each for its part; two ranks need none, nor have hidden averages any.
    On two levels a rank is a node, the vector one local rank's part of all tensors, and there is an oracle for each.

    Attributes:
        residuals: of each rank, of the whole vector.
    """

    num_ranks: int
    bits: int
    is_hidden: bool = False
    residuals: list[np.ndarray] = field(default_factory=list)

    def mean(self, signals: list[np.ndarray]) -> np.ndarray:
        """Return the mean that all ranks get."""
        num_ranks, numel = self.num_ranks, len(signals[0])
        if not self.residuals:
            self.residuals = [np.zeros(numel, dtype=np.float32) for _ in range(num_ranks)]
        if num_ranks == 2 or self.is_hidden:
            wanted = [signal + residual for signal, residual in zip(signals, self.residuals, strict=True)]
            sent = [encode(each, self.bits) for each in wanted]
            self.residuals = [each - own for each, own in zip(wanted, sent, strict=True)]
            return np.add.reduce([each * np.float32(1 / num_ranks) for each in sent])
        size = math.ceil(numel / num_ranks)
        received = np.zeros((num_ranks, num_ranks, size), dtype=np.float32)  # by sender and owner
        unsent = np.zeros_like(received)
        for rank, signal in enumerate(signals):
            wanted = np.zeros(num_ranks * size, dtype=np.float32)
            wanted[:numel] = signal + self.residuals[rank]
            for owner, part in enumerate(wanted.reshape(num_ranks, size)):
                received[rank, owner] = encode(part, self.bits)
                unsent[rank, owner] = part - received[rank, owner]
        answers = []
        for owner in range(num_ranks):
            mean = received[0, owner].copy()
            for rank in range(1, num_ranks):
                mean += received[rank, owner]
            mean /= np.float32(num_ranks)
            answers.append(encode(mean, self.bits))
            unsent[owner, owner] += np.float32(num_ranks) * (mean - answers[-1])
        self.residuals = [own.reshape(-1)[:numel] for own in unsent]
        return np.concatenate(answers)[:numel]


# Local SGD: replicas, each with a torch optimizer of its own ----------------------------------------------------------


@dataclass
class Replicas:
    """One tensor on N ranks, with gradients from outside; a class below says what an average is.

    Args:
        begin: steps before it are synchronous.
        delay: steps from the begin of an average to its end.
        phase: steps that the first period is shorter by.
    """

    start: Tensor
    num_ranks: int
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer]
    k: int = 4
    begin: int = 0
    delay: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.replicas = [self.start.clone().requires_grad_() for _ in range(self.num_ranks)]
        self.optimizers = [self.make_optimizer([replica]) for replica in self.replicas]
        self.step, self.since, self.rounds = 0, self.phase, 0
        self.x0 = self.start.clone()
        self.u = torch.zeros_like(self.x0)
        self.pending: Any = None

    def average(self) -> Tensor:
        """Return what `apply` needs."""
        raise NotImplementedError

    def apply(self, average: Tensor, snapshots: list[Tensor]) -> None:
        raise NotImplementedError

    def take_step(self, gradients: list[Tensor]) -> None:
        if self.step < self.begin:
            gradients = [mean_of(gradients)] * self.num_ranks
        for replica, optimizer, gradient in zip(self.replicas, self.optimizers, gradients, strict=True):
            replica.grad = gradient.clone()
            optimizer.step()
        self.step += 1
        if self.step <= self.begin:
            self.x0 = self.replicas[0].detach().to(self.x0.dtype, copy=True)
            return
        self.since += 1
        if self.pending is not None and self.since == self.delay:
            self.end()
        if self.since == self.k:
            self.pending = (self.average(), [replica.detach().clone() for replica in self.replicas])
            self.since = 0
            if not self.delay:
                self.end()

    def end(self) -> None:
        with torch.no_grad():
            self.apply(*self.pending)
        self.pending = None
        self.rounds += 1


@dataclass
class OracleLocalSGD(Replicas):
    """Post-local SGD, SlowMo and (streaming) DiLoCo."""

    outer: str = "none"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    mixing: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.x0, self.u = self.x0.double(), self.u.double()

    def average(self) -> Tensor:
        lr = self.optimizers[0].param_groups[0]["lr"]
        mean = mean_of(self.replicas).double()
        if self.outer == "slowmo":
            self.u = self.outer_momentum * self.u + (self.x0 - mean) / lr
            mean = self.x0 - self.outer_lr * lr * self.u
        elif self.outer == "nesterov":
            self.u = self.outer_momentum * self.u + (self.x0 - mean)
            mean = self.x0 - self.outer_lr * (self.x0 - mean + self.outer_momentum * self.u)
        self.x0 = mean
        return mean

    def apply(self, average: Tensor, snapshots: list[Tensor]) -> None:
        for replica, snapshot in zip(self.replicas, snapshots, strict=True):
            if self.mixing is None:
                replica.add_((average - snapshot.double()).to(replica.dtype))
            else:
                replica.copy_(self.mixing * replica.double() + (1 - self.mixing) * average)


@dataclass
class OracleSparseLoCo(Replicas):
    """Algorithm 1 of arXiv 2508.15706, chunk by chunk, in float32 so that bits can be compared.

    Args:
        num_ranks: participants: ranks, or nodes.
        num_parts: of the tensor, each with chunks and a message of its own: the ranks of a node.
        density: of each chunk, or of the part if that is None.
        quantise: what the wire makes of the values sent of a tensor.
    """

    density: float = 1.0
    chunk: int | None = 4096
    num_parts: int = 1
    decay: float = 0.95
    quantise: Callable[[Tensor], Tensor] = torch.Tensor.clone
    over_senders: bool = True
    momentum: float | None = None  # of an outer Nesterov step of lr 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        self.e = [torch.zeros(self.start.numel()) for _ in range(self.num_ranks)]

    def average(self) -> Tensor:
        sent = [self.send(rank) for rank in range(self.num_ranks)]
        total = torch.zeros(self.start.numel())
        divisors = sum((of_rank != 0).float() for of_rank in sent).clamp(min=1)
        for of_rank in sent:
            total = total + (of_rank / divisors if self.over_senders else of_rank * (1.0 / self.num_ranks))
        return total.view(self.start.shape)

    def send(self, rank: int) -> Tensor:
        e = self.e[rank]
        e.copy_(self.decay * e + (self.x0 - self.replicas[rank].detach()).reshape(-1))
        sent = torch.zeros_like(e)
        size = max(1, -(-e.numel() // self.num_parts))
        for part, of_sent in zip(e.split(size), sent.split(size), strict=True):
            mask = largest(part, self.density, self.chunk)
            if mask.any():
                of_sent[mask] = self.quantise(part[mask])
        e.sub_(sent)
        return sent

    def apply(self, average: Tensor, snapshots: list[Tensor]) -> None:
        step = average
        if self.momentum is not None:
            self.u = self.momentum * self.u + average
            step = 0.7 * (average + self.momentum * self.u)
        self.x0 = self.x0 - step
        for replica, snapshot in zip(self.replicas, snapshots, strict=True):
            replica.copy_(replica + (self.x0 - snapshot) if self.delay else self.x0)


@dataclass
class OracleFewBits(Replicas):
    """Averages of changes in few bits, hidden, of a tensor alone, in float32 so that bits can be compared.

    Args:
        num_parts: of the tensor, each with messages of its own: the ranks of a node.
    """

    bits: int = 8
    num_parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts = [OracleQuantized(self.num_ranks, self.bits, is_hidden=True) for _ in range(self.num_parts)]

    def average(self) -> Tensor:
        moves = [(replica.detach() - self.x0).reshape(-1) for replica in self.replicas]
        of_parts = zip(self.parts, *(move.split(-(-move.numel() // self.num_parts)) for move in moves), strict=True)
        means = [torch.from_numpy(oracle.mean([each.numpy() for each in own])) for oracle, *own in of_parts]
        return torch.cat(means).view(self.start.shape)

    def apply(self, average: Tensor, snapshots: list[Tensor]) -> None:
        self.x0 = self.x0 + average
        for replica, snapshot in zip(self.replicas, snapshots, strict=True):
            replica.add_(self.x0 - snapshot)
