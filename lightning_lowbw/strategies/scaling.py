"""GradScaler: gradients are exchanged unscaled, because a residual outlives the scale of its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbw.sync.local_view import DTensor


def scaler_of(precision_plugin: Any) -> Any:
    """Return the GradScaler that is in use; None if there is none."""
    scaler = getattr(precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def exchange_unscaled_(precision_plugin: Any, optimizer: Optimizer, exchange: Callable[[bool], bool]) -> None:
    """Exchange the gradients of an optimizer without the scale of a GradScaler, if there is one.

    In place:
        `.grad` of its parameters. If the step is not to be taken, the scaler will find an inf, and skip it.

    Args:
        precision_plugin: Lightning's.
        optimizer: the user's own.
        exchange: whether to skip steps with inf or NaN -> whether the step is to be taken.
    """
    scaler = scaler_of(precision_plugin)
    if scaler is None:
        exchange(False)
        return
    scale = scaler._get_scale_async()  # `get_scale` waits for a GPU
    _apply_(torch._foreach_div_, optimizer, scale)
    if exchange(True):
        _apply_(torch._foreach_mul_, optimizer, scale)  # which the plugin takes out again
    else:
        let_scaler_skip_(optimizer)


def _apply_(function: Callable[[list[Tensor], Tensor], None], optimizer: Optimizer, scale: Tensor) -> None:
    """Multiply or divide what the gradients of an optimizer contain on this rank, if there are any."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        function(
            [g._values() if g.is_sparse else g.to_local() if isinstance(g, DTensor) else g for g in gradients], scale
        )


def let_scaler_skip_(optimizer: Optimizer) -> None:
    """Make a gradient infinite: the scaler finds it, skips the step and lowers its scale. Called on all ranks.

    In place:
        `.grad` of the first trained parameter.
    """
    parameter = next(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    parameter.grad = torch.full_like(parameter, float("inf"))
