"""When replicas are averaged, in epochs, for a strategy that was given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.callbacks.epochs import steps_per_epoch
from lightning_lowbw.engine.replicas import LocalSGD
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.local_sgd import LocalSGDStrategy


class AveragingSchedule(Callback):
    """Set when local SGD begins, and after how many steps replicas are averaged.

    Epochs are only known to the Trainer: they are turned into optimizer steps at the start of the fit. What is left
    out stays as the strategy has it.

    Args:
        k_steps: local steps between two averages; the first k of "adaptive_local_sgd".
        begin_epoch: epochs of synchronous steps before the first local one; may be a fraction.
        begin_step: the same as a number of steps, a fraction of the run (float in (0, 1)), or "first_lr_decay".
        max_k_steps: the largest k of "adaptive_local_sgd".

    Raises:
        ConfigurationError: `begin_epoch` and `begin_step` are both given, a value is out of range, the strategy does
            not average, or the number of steps in an epoch cannot be known.

    Example:
        >>> callback = AveragingSchedule(k_steps=4, begin_epoch=1.5)
        >>> callback.method(LocalSGD(), steps_per_epoch=100).begin_step
        150
    """

    def __init__(
        self,
        *,
        k_steps: int | None = None,
        begin_epoch: float | None = None,
        begin_step: int | float | str | None = None,
        max_k_steps: int | None = None,
    ) -> None:
        if begin_epoch is not None and begin_step is not None:
            raise ConfigurationError(
                f"AveragingSchedule(begin_epoch={begin_epoch}, begin_step={begin_step!r}): give one of the two."
            )
        if begin_epoch is not None and not begin_epoch >= 0:
            raise ConfigurationError(f"begin_epoch={begin_epoch!r}: give a number >= 0.")
        changes = {"k_steps": k_steps, "begin_step": begin_step, "max_k_steps": max_k_steps}
        self._changes: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        self._begin_epoch = begin_epoch
        dataclasses.replace(LocalSGD(), **self._changes)  # checked now, not after the data have been loaded

    def method(self, method: LocalSGD, steps_per_epoch: int = 1) -> LocalSGD:
        """Return a configuration with the changes of this callback."""
        changes = dict(self._changes)
        if self._begin_epoch is not None:
            changes["begin_step"] = round(self._begin_epoch * steps_per_epoch)
        return dataclasses.replace(method, **changes)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, LocalSGDStrategy):
            raise ConfigurationError(
                "AveragingSchedule is for strategy='local_sgd', 'post_local_sgd', 'adaptive_local_sgd', 'diloco', "
                "'streaming_diloco' or 'sparse_loco'; "
                f"the strategy is {type(strategy).__name__}."
            )
        num_steps = 1
        if self._begin_epoch is not None:
            num_steps = steps_per_epoch(trainer, pl_module, "AveragingSchedule(begin_step=...)")
        strategy.reconfigure(self.method(strategy.method, num_steps))
        rank_zero_info(f"Local SGD: k_steps={strategy.method.k_steps}, begin_step={strategy.method.begin_step!r}.")
