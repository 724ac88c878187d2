"""What the callbacks have in common: which strategies they are for; epochs in steps, which only the Trainer knows."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import ShardedStrategy, Strategy, accumulates_by_schedule, steps_per_epoch_of
from lightning_lowbw.where.agreement import failing_together, gather

OF_PACKAGE = (Strategy, ShardedStrategy)  # their twins for the other Lightning are known as subclasses


def steps_per_epoch(trainer: pl.Trainer, pl_module: pl.LightningModule, alternative: str) -> int:
    """Return the optimizer steps of an epoch; where ranks have different numbers, the largest.

    Collective: all ranks, blocking.

    Args:
        trainer: in a fit.
        pl_module: the one that is fitted.
        alternative: how to give the same in steps, for the message.

    Raises:
        ConfigurationError: on all ranks; the number cannot be known.
    """
    with failing_together():
        number = _steps_per_epoch_here(trainer, pl_module, alternative)
    return max(gather(number, "number of steps per epoch"))


def _steps_per_epoch_here(trainer: pl.Trainer, pl_module: pl.LightningModule, alternative: str) -> int:
    in_steps = f"Give it in steps: {alternative}."
    if not pl_module.automatic_optimization:
        raise ConfigurationError(f"In manual optimization only the module knows its steps per epoch. {in_steps}")
    if accumulates_by_schedule(trainer):
        raise ConfigurationError(
            "With GradientAccumulationScheduler the steps per epoch are not known when the training starts. Use "
            f"Trainer(accumulate_grad_batches=...) instead. Or: {in_steps}"
        )
    number = steps_per_epoch_of(trainer)
    if number is None:
        raise ConfigurationError(f"The training data has no length. {in_steps}")
    return number


def named(strategy: object) -> str:
    """Return a strategy as an error message names it: one of this package with what it does."""
    return repr(strategy) if isinstance(strategy, OF_PACKAGE) else type(strategy).__name__
