"""Local SGD in one process: a list of replicas, each with a torch optimizer of its own; nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def mean_of(replicas: list[Tensor]) -> Tensor:
    return (sum(replica.detach().double() for replica in replicas) / len(replicas)).to(replicas[0].dtype)


@dataclass
class OracleLocalSGD:
    """One tensor on N ranks, with gradients from outside."""

    start: Tensor
    num_ranks: int
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer]
    begin: int = 1
    k: int = 4
    rule: str = "fixed"
    max_k: int = 16
    alpha: float = 0.01
    outer: str = "none"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    delay: int = 0
    phase: int = 0  # steps that the first period is shorter by
    mixing: float | None = None
    # what happened
    averaged_at: list[int] = field(default_factory=list)
    ks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = [self.start.clone().requires_grad_() for _ in range(self.num_ranks)]
        self.optimizers = [self.make_optimizer([replica]) for replica in self.replicas]
        self.first_k, self.step, self.since = self.k, 0, self.phase
        self.x0 = self.start.clone().double()
        self.u = torch.zeros_like(self.x0)
        self.losses: list[list[float]] = []
        self.reference: tuple[float, float] | None = None
        self.last_lr: float | None = None
        self.pending: Any = None

    def take_step(self, gradients: list[Tensor], losses: list[float]) -> None:
        if self.step < self.begin:
            gradients = [mean_of(gradients)] * self.num_ranks
        for replica, optimizer, gradient in zip(self.replicas, self.optimizers, gradients, strict=True):
            replica.grad = gradient.clone()
            optimizer.step()
        self.step += 1
        if self.step <= self.begin:
            self.x0 = self.replicas[0].detach().double()
            return
        self.since += 1
        self.losses.append(losses)
        if self.pending is not None and self.since == self.delay:
            self.apply()
        if self.since >= max(self.k, self.delay + 1):
            self.averaged_at.append(self.step)
            lr = self.optimizers[0].param_groups[0]["lr"]
            mean = mean_of(self.replicas).double()
            if self.outer == "slowmo":
                self.u = self.outer_momentum * self.u + (self.x0 - mean) / lr
                mean = self.x0 - self.outer_lr * lr * self.u
            elif self.outer == "nesterov":
                self.u = self.outer_momentum * self.u + (self.x0 - mean)
                mean = self.x0 - self.outer_lr * (self.x0 - mean + self.outer_momentum * self.u)
            self.x0 = mean
            self.pending = (mean, [replica.detach().clone() for replica in self.replicas], self.losses, lr)
            self.since, self.losses = 0, []
            if self.delay == 0:
                self.apply()

    def apply(self) -> None:
        mean, snapshots, losses, lr = self.pending
        self.pending = None
        with torch.no_grad():
            for replica, snapshot in zip(self.replicas, snapshots, strict=True):
                if self.mixing is None or not self.delay:
                    replica.add_((mean - snapshot.double()).to(replica.dtype))
                else:
                    replica.copy_(self.mixing * replica.double() + (1 - self.mixing) * mean)
        self.adapt(lr, losses)
        self.ks.append(self.k)

    def adapt(self, lr: float, losses: list[list[float]]) -> None:
        if self.rule == "fixed" or lr <= 0:
            return
        if self.rule == "qsr":
            self.k = max(self.first_k, min(self.max_k, math.floor((self.alpha / lr) ** 2)))
            return
        weights = [0.9 ** (len(losses) - 1 - i) for i in range(len(losses))]
        by_rank = [
            sum(w * row[rank] for w, row in zip(weights, losses, strict=True)) / sum(weights)
            for rank in range(self.num_ranks)
        ]
        loss = sum(by_rank) / self.num_ranks
        if not all(0 < each < math.inf for each in by_rank):
            return
        if self.reference is None or lr > self.reference[0] * (1 + 1e-6):
            self.reference, self.k, self.last_lr = (lr, loss), self.first_k, lr
            return
        lr_0, loss_0 = self.reference
        inside = lr_0 * loss / (lr * loss_0)
        wanted = math.sqrt(inside * self.first_k) if self.rule == "fleet" else math.sqrt(inside) * self.first_k
        k = max(1, min(self.max_k, math.ceil(wanted - 1e-9)))
        if self.rule == "adacomm" and lr == self.last_lr and k >= self.k:
            k = max(1, self.k // 2)
        self.k, self.last_lr = k, lr


@dataclass
class OracleSparseLoCo:
    """Algorithm 1 of arXiv 2508.15706 for one tensor, chunk by chunk, in float32 so that bits can be compared.

    Args:
        num_ranks: participants: ranks, or nodes.
        num_parts: of the tensor, each with chunks and a message of its own: the ranks of a node.
        top: how many of `numel` elements are sent.
        quantise: what the wire makes of the values sent of a tensor.
    """

    start: Tensor
    num_ranks: int
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer]
    top: Callable[[int], int]
    k: int = 4
    chunk: int = 4096
    num_parts: int = 1
    decay: float = 0.95
    quantise: Callable[[Tensor], Tensor] = torch.Tensor.clone
    over_senders: bool = True
    delay: int = 0
    phase: int = 0
    momentum: float | None = None  # of an outer Nesterov step of lr 0.7
    rounds: int = 0

    def __post_init__(self) -> None:
        self.replicas = [self.start.clone().requires_grad_() for _ in range(self.num_ranks)]
        self.optimizers = [self.make_optimizer([replica]) for replica in self.replicas]
        self.x0 = self.start.clone()
        self.e = [torch.zeros(self.start.numel()) for _ in range(self.num_ranks)]
        self.u = torch.zeros_like(self.start)
        self.since = self.phase
        self.pending: Any = None

    def take_step(self, gradients: list[Tensor]) -> None:
        for replica, optimizer, gradient in zip(self.replicas, self.optimizers, gradients, strict=True):
            replica.grad = gradient.clone()
            optimizer.step()
        self.since += 1
        if self.pending is not None and self.since == self.delay:
            self.apply()
        if self.since == self.k:
            self.pending = (self.average(), [replica.detach().clone() for replica in self.replicas])
            self.since = 0
            if not self.delay:
                self.apply()

    def average(self) -> Tensor:
        sent = [self.send(rank) for rank in range(self.num_ranks)]
        total = torch.zeros(self.start.numel())
        divisors = sum((each != 0).float() for each in sent).clamp(min=1)
        for each in sent:
            total = total + (each / divisors if self.over_senders else each * (1.0 / self.num_ranks))
        return total.view(self.start.shape)

    def part(self, number: int) -> slice:
        size = -(-self.start.numel() // self.num_parts)
        return slice(number * size, min((number + 1) * size, self.start.numel()))

    def chunks(self, number: int) -> list[slice]:
        part = self.part(number)
        firsts = range(part.start, part.stop, self.chunk)
        return [slice(first, min(first + self.chunk, part.stop)) for first in firsts]

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

    def apply(self) -> None:
        pseudo_gradient, snapshots = self.pending
        self.pending = None
        self.rounds += 1
        step = pseudo_gradient
        if self.momentum is not None:
            self.u = self.momentum * self.u + pseudo_gradient
            step = 0.7 * (pseudo_gradient + self.momentum * self.u)
        self.x0 = self.x0 - step
        with torch.no_grad():
            for replica, snapshot in zip(self.replicas, snapshots, strict=True):
                replica.copy_(replica + (self.x0 - snapshot) if self.delay else self.x0)
