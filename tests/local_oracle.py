"""Local SGD in one process: a list of replicas, each with a torch optimizer of its own; nothing of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def mean_of(replicas: list[Tensor]) -> Tensor:
    return (sum(replica.detach().double() for replica in replicas) / len(replicas)).to(replicas[0].dtype)


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
        top: how many of `numel` elements are sent.
        quantise: what the wire makes of the values sent of a tensor.
    """

    top: Callable[[int], int] = int
    chunk: int = 4096
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
        divisors = sum((each != 0).float() for each in sent).clamp(min=1)
        for each in sent:
            total = total + (each / divisors if self.over_senders else each * (1.0 / self.num_ranks))
        return total.view(self.start.shape)

    def chunks(self, number: int) -> list[slice]:
        """Return those of a part."""
        size = -(-self.start.numel() // self.num_parts)
        last = min((number + 1) * size, self.start.numel())
        return [slice(first, min(first + self.chunk, last)) for first in range(number * size, last, self.chunk)]

    def send(self, rank: int) -> Tensor:
        e = self.e[rank]
        e.copy_(self.decay * e + (self.x0 - self.replicas[rank].detach()).reshape(-1))
        sent = torch.zeros_like(e)
        for number in range(self.num_parts):
            chosen: list[int] = []
            for each in self.chunks(number):
                chunk = e[each].abs().tolist()
                largest = sorted(range(len(chunk)), key=lambda i: -chunk[i])[: self.top(len(chunk))]
                chosen += [each.start + i for i in sorted(largest)]
            if chosen:
                sent[chosen] = self.quantise(e[chosen])
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
