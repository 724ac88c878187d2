"""When replicas are averaged, in epochs, for a strategy that was given by name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.arguments import is_number, names_arguments
from lightning_lowbw.callbacks.epochs import OF_PACKAGE, named, steps_per_epoch
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import LocalSGD
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.when.every_k import EveryK


@names_arguments
class AveragingSchedule(Callback):
    """Set when local SGD begins, and after how many steps replicas are averaged.

    Epochs are only known to the Trainer: they are turned into optimizer steps at the start of the fit. Arguments that
    are left out stay as the strategy has them.

    Args:
        k_steps: local steps between two averages; the first k of "adaptive_local_sgd".
        begin_epoch: epochs of synchronous steps before the first local one; may be a fraction.
        begin_step: the same as a number of steps, a fraction of the run (float in (0, 1)), or "first_lr_decay".
        max_k_steps: the largest k of "adaptive_local_sgd".

    Raises:
        ConfigurationError: `begin_epoch` and `begin_step` are both given, a value is out of range, the method does not
            average weights, or the number of steps in an epoch cannot be known.

    Example:
        >>> callback = AveragingSchedule(k_steps=4, begin_epoch=1.5)
        >>> callback.method(LocalSGD(), steps_per_epoch=100).when.begin_step
        150
    """

    sets_method = True  # so all ranks must have it

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
                f"AveragingSchedule(begin_epoch={begin_epoch!r}, begin_step={begin_step!r}): give one of the two."
            )
        if begin_epoch is not None and not (is_number(begin_epoch) and begin_epoch >= 0):
            raise ConfigurationError(f"begin_epoch={begin_epoch!r}: give a number of epochs, >= 0.")
        changes = {"k_steps": k_steps, "begin_step": begin_step, "max_k_steps": max_k_steps}
        self._changes: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        self._begin_epoch = begin_epoch
        rule = {"rule": "fleet", "k_steps": 1} if max_k_steps is not None else {}  # one that has use for it
        LocalSGD().replace(**rule | self._changes)  # checked now, not after the data have been loaded

    def method(self, method: Method, steps_per_epoch: int = 1) -> Method:
        """Return a configuration with the changes of this callback."""
        changes = dict(self._changes)
        if self._begin_epoch is not None:
            changes["begin_step"] = round(self._begin_epoch * steps_per_epoch)
        return method.replace(**changes)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, OF_PACKAGE) or not strategy.method.averages_weights:
            raise ConfigurationError(
                "AveragingSchedule is for methods that average weights, such as strategy='local_sgd' or 'diloco'; the "
                f"strategy is {named(strategy)}. Use another strategy, or leave out the callback."
            )
        num_steps = 1
        if self._begin_epoch is not None:
            num_steps = steps_per_epoch(trainer, pl_module, "AveragingSchedule(begin_step=...)")
        strategy.reconfigure(self.method(strategy.method, num_steps))
        when = strategy.method.when
        assert isinstance(when, EveryK)
        rank_zero_info(f"{type(strategy).__name__}: k_steps={when.k_steps}, begin_step={when.begin_step!r}.")
