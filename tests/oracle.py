"""Deep gradient compression in one process, written from the paper: slow, and nothing of the package is used.

All ranks are a list of gradients. Signs and averages are torch's: each rank's own mean gradient, not divided by N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class OracleDGC:
    """The paper's equations, with its own Nesterov form: u = m (u + g); v = v + u + g.

    Weight decay is that of the weight which a rank's residual leads to, w - lr v; in small tensors torch's own. Of what
    the paper does not have: the k largest of each chunk, a residual that decays, means over those that have sent.

    Args:
        masking: None is at densities of up to (1 - momentum) / 2.
    """

    num_ranks: int
    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    clip_value: float | None = None
    min_numel: int = 1
    masking: bool | None = None
    chunk: int | None = None
    decay: float = 1.0
    mean_over: str = "ranks"
    u: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    v: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    buffer: dict[int, Tensor] = field(default_factory=dict)

    def dense_step(self, weights: list[Tensor], gradients: list[list[Tensor]]) -> None:
        """Plain momentum SGD on the mean gradient, clipped after the mean."""
        mean = [sum(rank[i] for rank in gradients) / self.num_ranks for i in range(len(weights))]
        if self.clip_norm is not None:
            norm = math.sqrt(sum(float((g * g).sum()) for g in mean))
            mean = [g * min(1.0, self.clip_norm / (norm + 1e-6)) for g in mean]
        if self.clip_value is not None:
            mean = [g.clamp(-self.clip_value, self.clip_value) for g in mean]
        for i, weight in enumerate(weights):
            g = mean[i] + self.weight_decay * weight
            self.buffer[i] = self.momentum * self.buffer[i] + g if i in self.buffer else g.clone()
            update = g + self.momentum * self.buffer[i] if self.nesterov else self.buffer[i]
            weight -= self.lr * update

    def sparse_step(self, weights: list[Tensor], gradients: list[list[Tensor]], density: float) -> None:
        """One step of the paper's algorithm on all ranks."""
        masks = 2 * density <= 1 - self.momentum + 1e-6 if self.masking is None else self.masking
        updates = [torch.zeros_like(weight) for weight in weights]
        senders = [torch.zeros_like(weight) for weight in weights]
        for rank in range(self.num_ranks):
            own = [g.clone() for g in gradients[rank]]
            if self.clip_norm is not None:
                norm = math.sqrt(sum(float((g * g).sum()) for g in own))
                own = [g * min(1.0, self.clip_norm * math.sqrt(self.num_ranks) / (norm + 1e-6)) for g in own]
            if self.clip_value is not None:
                own = [g.clamp(-self.clip_value, self.clip_value) for g in own]
            for i, weight in enumerate(weights):
                is_sparse = weight.numel() >= self.min_numel
                if (rank, i) not in self.u:  # hand-over
                    buffer = self.buffer.get(i, torch.zeros_like(weight))
                    self.u[rank, i] = self.momentum * buffer if self.nesterov else buffer.clone()
                    self.v[rank, i] = torch.zeros_like(weight)
                u, v = self.u[rank, i], self.decay * self.v[rank, i]
                g = own[i] + self.weight_decay * (weight - self.lr * v if is_sparse else weight)
                if self.nesterov:
                    u = self.momentum * (u + g)
                    v = v + u + g
                else:
                    u = self.momentum * u + g
                    v = v + u
                mask = self._largest(v, density) if is_sparse else torch.ones_like(weight, dtype=torch.bool)
                updates[i] += torch.where(mask, v, 0.0)
                senders[i] += mask & (v != 0)
                self.v[rank, i] = torch.where(mask, 0.0, v)
                self.u[rank, i] = torch.where(mask, 0.0, u) if masks and is_sparse else u
        for weight, update, number in zip(weights, updates, senders, strict=True):
            is_over_all = self.mean_over == "ranks" or weight.numel() < self.min_numel
            weight -= self.lr * update / (self.num_ranks if is_over_all else number.clamp(min=1.0))

    def _largest(self, v: Tensor, density: float) -> Tensor:
        """Return where the largest elements of each chunk are; of equal ones the first."""
        mask, size = torch.zeros(v.numel(), dtype=torch.bool), self.chunk or v.numel()
        for start in range(0, v.numel(), size or 1):
            chunk = v.flatten()[start : start + size].abs()
            k = max(1, round(chunk.numel() * density))
            if chunk.numel() < size:  # of a rest as many as of a whole chunk, or of one of 4096
                k = max(k, round(min(size, 4096) * density))
            mask[start + chunk.sort(descending=True, stable=True).indices[:k]] = True
        return mask.view(v.shape)
