"""GradScaler: gradients are exchanged unscaled, because a residual outlives the scale of its step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def scaler_of(precision_plugin: Any) -> Any:
    """Return the GradScaler that is in use; None if there is none."""
    scaler = getattr(precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def scale_gradients_(optimizer: Optimizer, factor: float) -> None:
    """Multiply the gradients of an optimizer; exact where the factor is a power of two, as scales are by default.

    In place:
        `.grad` of its parameters.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def let_scaler_skip_(optimizer: Optimizer) -> None:
    """Make a gradient infinite: the scaler finds it, skips the step and lowers its scale. Called on all ranks.

    In place:
        `.grad` of the first trained parameter.
    """
    parameter = next(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    parameter.grad = torch.full_like(parameter, float("inf"))
