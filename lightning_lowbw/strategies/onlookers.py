"""Finds hooks that may read gradients after the exchange: only for them sparse means become dense gradients."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_lowbw.engine.checks import has_step_hooks
from lightning_lowbw.strategies.bypass import BypassGuard

HOOKS = ("on_before_optimizer_step", "on_before_zero_grad")  # of this step, and of the last one before it is forgotten


def is_gradient_seen(trainer: pl.Trainer, optimizer: Optimizer, guard: BypassGuard) -> bool:
    """Return whether a hook of Lightning or of the optimizer may read the gradients that an optimizer steps with.

    In manual optimization the user's own code follows the step, and may read them as well.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization or has_step_hooks(optimizer, but=[guard.check, guard.end]):
        return True
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return any(
        is_overridden(hook, module) or any(is_overridden(hook, each, parent=Callback) for each in callbacks)
        for hook in HOOKS
    )
