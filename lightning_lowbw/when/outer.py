"""Outer optimizers, which are applied to the mean of the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_lowbw.arguments import check_one_of, is_number
from lightning_lowbw.errors import ConfigurationError

OuterName = Literal["none", "slowmo", "nesterov"]
DEFAULT_LR = {"none": 1.0, "slowmo": 1.0, "nesterov": 0.7}
DEFAULT_MOMENTUM = {"none": 0.0, "slowmo": 0.5, "nesterov": 0.9}


@dataclass(frozen=True)
class OuterOptimizer:
    """A step from the last consensus x0 along the pseudo-gradient x0 - mean; replicated, all ranks compute the same.

    Args:
        name: with u the outer velocity, which begins at 0:

            - "none": ``x = mean``
            - "slowmo": ``u = momentum u + (x0 - mean) / inner_lr;  x = x0 - lr inner_lr u``
            - "nesterov": ``u = momentum u + (x0 - mean);  x = x0 - lr (x0 - mean + momentum u)``
        lr: by default 1 for "slowmo", 0.7 for "nesterov".
        momentum: by default 0.5 for "slowmo", 0.9 for "nesterov".

    Raises:
        ConfigurationError: a value is out of range, or given where it has no meaning.

    Source: Wang et al., "SlowMo", arXiv 1910.00643, algorithm 1; Douillard et al., "DiLoCo", arXiv 2311.08105.
    """

    name: OuterName = "none"
    lr: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        check_one_of("outer", self.name, get_args(OuterName))
        for key, value in (("outer_lr", self.lr), ("outer_momentum", self.momentum)):
            if value is not None and self.name == "none":
                raise ConfigurationError(f"{key}={value!r} without an outer optimizer: set outer='slowmo'.")
        if self.lr is not None and not (is_number(self.lr) and self.lr > 0):
            raise ConfigurationError(f"outer_lr={self.lr!r}: give a number > 0.")
        if self.momentum is not None and not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigurationError(f"outer_momentum={self.momentum!r}: give a number in [0, 1).")

    def step_(self, starts: list[Tensor], means: list[Tensor], velocities: list[Tensor], inner_lr: float) -> None:
        """Move the last consensus to the new one, of all tensors at once.

        In place:
            `starts` and `means`, which become x; `velocities`, which are u. No memory is allocated.

        Args:
            starts: x0, the last consensus; float32 or float64, any shapes, at least one.
            means: of the replicas; as `starts`.
            velocities: as `starts`; empty with "none".
            inner_lr: the learning rate of the inner optimizer; with 0 nothing has moved, and SlowMo's u stays.
        """
        lr = DEFAULT_LR[self.name] if self.lr is None else self.lr
        momentum = DEFAULT_MOMENTUM[self.name] if self.momentum is None else self.momentum
        if self.name == "none" or (self.name == "slowmo" and inner_lr <= 0):
            torch._foreach_copy_(starts, means)
            return
        moves = means
        torch._foreach_sub_(moves, starts)  # mean - x0: the pseudo-gradient, negated
        torch._foreach_mul_(velocities, momentum)
        if self.name == "slowmo":
            torch._foreach_sub_(velocities, moves, alpha=1.0 / inner_lr)
            torch._foreach_sub_(starts, velocities, alpha=lr * inner_lr)
        else:
            torch._foreach_sub_(velocities, moves)
            torch._foreach_sub_(moves, velocities, alpha=momentum)
            torch._foreach_add_(starts, moves, alpha=lr)
        torch._foreach_copy_(means, starts)
