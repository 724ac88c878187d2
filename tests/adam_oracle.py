"""DGC for Adam and AdamW in one process, written from its equations: slow, and nothing of the package is used.

All ranks are a list of gradients, each rank's own mean, not divided by N. Dense steps are Adam on the mean gradient. In
a sparse step each rank does, with its own m and v (those of the dense phase to begin with),

    m = b1 m + (1 - b1) G;  v = b2 v + (1 - b2) G^2 / N;  r = r + m_hat / (sqrt(v_hat) + eps)

with a b1 of at most LARGEST_BETA1. The k largest |r| are averaged, and cleared in r (with masking, in m);
``w = w (1 - lr c) - lr average`` (AdamW; Adam's decay goes into G).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST_BETA1 = 0.7


@dataclass
class OracleAdam:
    """All ranks, all tensors; weights are changed in place."""

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
    m: dict[int, Tensor] = field(default_factory=dict)
    v: dict[int, Tensor] = field(default_factory=dict)
    largest_v: dict[int, Tensor] = field(default_factory=dict)
    own_m: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    own_v: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    own_largest: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    r: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def dense_step(self, weights: list[Tensor], gradients: list[list[Tensor]]) -> None:
        """Adam on the mean gradient."""
        for i, weight in enumerate(weights):
            self._adam(i, weight, sum(rank[i] for rank in gradients) / self.num_ranks)

    def _v_hat(self, i: int) -> Tensor:
        return (self.largest_v[i] if self.amsgrad else self.v[i]) / (1 - self.betas[1] ** self.step[i])

    def sparse_step(self, weights: list[Tensor], gradients: list[list[Tensor]], density: float) -> None:
        """One compressed step; small tensors take one of Adam's own."""
        b1, b2 = min(self.betas[0], LARGEST_BETA1), self.betas[1]
        for i, weight in enumerate(weights):
            if weight.numel() < self.min_numel:
                self._adam(i, weight, sum(rank[i] for rank in gradients) / self.num_ranks)
                continue
            total, k, zeros = torch.zeros(weight.numel()), max(1, round(weight.numel() * density)), weight * 0
            self.step[i] = self.step.get(i, 0) + 1
            for rank in range(self.num_ranks):
                decay = 0.0 if self.is_decoupled else self.weight_decay
                g = gradients[rank][i] + decay * weight
                ahead = gradients[rank][i] + decay * (weight - self.lr * self.r.get((rank, i), zeros))
                m = self.own_m.get((rank, i), self.m.get(i, zeros))
                m = self.own_m[rank, i] = b1 * m + (1 - b1) * ahead
                v = self.own_v.get((rank, i), self.v.get(i, zeros))
                v = self.own_v[rank, i] = b2 * v + (1 - b2) * g * g / self.num_ranks
                largest = self.own_largest.get((rank, i), self.largest_v.get(i, zeros))
                self.own_largest[rank, i] = torch.maximum(largest, v)
                v = self.own_largest[rank, i] if self.amsgrad else v
                d = (v / (1 - b2 ** self.step[i])).sqrt() + self.eps
                self.r[rank, i] = self.r.get((rank, i), zeros) + m / (1 - b1 ** self.step[i]) / d
                r = self.r[rank, i].view(-1)
                sent = r.abs().topk(k).indices
                total[sent] += r[sent]
                r[sent] = 0
                if self.masking:
                    self.own_m[rank, i].view(-1)[sent] = 0
            if self.is_decoupled:
                weight *= 1 - self.lr * self.weight_decay
            weight -= self.lr * (total / self.num_ranks).view(weight.shape)

    def _adam(self, i: int, weight: Tensor, g: Tensor) -> None:
        b1, zeros = self.betas[0], torch.zeros_like(weight)
        if self.is_decoupled:
            weight *= 1 - self.lr * self.weight_decay
        else:
            g = g + self.weight_decay * weight
        self.m[i] = b1 * self.m.get(i, zeros) + (1 - b1) * g
        self._square(i, g)
        weight -= self.lr * (self.m[i] / (1 - b1 ** self.step[i])) / (self._v_hat(i).sqrt() + self.eps)

    def _square(self, i: int, g: Tensor) -> None:
        b2, zeros = self.betas[1], torch.zeros_like(g)
        self.step[i] = self.step.get(i, 0) + 1
        self.v[i] = b2 * self.v.get(i, zeros) + (1 - b2) * g * g
        self.largest_v[i] = torch.maximum(self.largest_v.get(i, zeros), self.v[i])
