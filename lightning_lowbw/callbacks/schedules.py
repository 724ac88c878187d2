"""Schedules in epochs, which only the Trainer knows, for a strategy that was given by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_lowbw.arguments import is_number
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.presets import DGC_SPARSITY, LocalSGD
from lightning_lowbw.schedules.every_step import AUTO, EveryStep, as_stairs
from lightning_lowbw.strategies import steps_per_epoch_of
from lightning_lowbw.strategies.base import BaseStrategy


class SparsityWarmup(Callback):
    """Set when deep gradient compression begins, and over how many steps or epochs its sparsity increases.

    Epochs are only known to the Trainer: they are turned into optimizer steps at the start of the fit, and override the
    strategy's own `rampup_begin_step`, `rampup_step` and `sparsity`. Give epochs or steps, not both.

    Args:
        begin_epoch: epochs of dense exchange before the first sparse step; may be a fraction. Default 2.
        epochs: epochs over which the stairs are spread; may be a fraction. Default 3. If epochs have too few steps,
            as with `fast_dev_run`, each value lasts one step.
        begin_step: the same in optimizer steps.
        steps: the same in optimizer steps. Default: one for each value.
        sparsity: the stairs.

    Raises:
        ConfigurationError: epochs and steps are mixed, a value is out of range, one value is to be spread, the strategy
            compresses no gradients, or the number of steps in an epoch cannot be known.

    Source: the defaults are those advised for ImageNet by PaddlePaddle Fleet.

    Examples:
        >>> warmup = SparsityWarmup(begin_epoch=1, epochs=2, sparsity=[0.96, 0.999])
        >>> warmup.schedule(steps_per_epoch=100)
        EveryStep(rampup_begin_step=100, rampup_step=200, sparsity=(0.96, 0.999), ...)
    """

    sets_method = True  # so all ranks must have it

    def __init__(
        self,
        *,
        begin_epoch: float | None = None,
        epochs: float | None = None,
        begin_step: int | None = None,
        steps: int | None = None,
        sparsity: Sequence[float] = (0.984375, 0.996, 0.999),
    ) -> None:
        in_steps = begin_step is not None or steps is not None
        if in_steps and (begin_epoch is not None or epochs is not None):
            raise ConfigurationError(
                f"SparsityWarmup(begin_epoch={begin_epoch}, epochs={epochs}, begin_step={begin_step}, steps={steps}): "
                "give epochs or steps, not both."
            )
        _check_epochs(begin_epoch=begin_epoch, epochs=epochs)
        if sparsity is None or isinstance(sparsity, str):
            raise ConfigurationError(f"sparsity={sparsity!r}: give the stairs, a list of numbers in [0, 1).")
        self._in_steps, self._sparsity = in_steps, as_stairs(sparsity)
        num, given = len(self._sparsity), steps if in_steps else epochs
        if num == 1 and (given or 0) > in_steps:  # one step is not spread; an epoch has several steps
            raise ConfigurationError(
                f"SparsityWarmup({'steps' if in_steps else 'epochs'}={given}, sparsity={list(self._sparsity)}): a "
                "single value is not spread. Give several, such as [0.984375, 0.996, 0.999], or leave out the length."
            )
        self._begin: float = (begin_step or 0) if in_steps else 2 if begin_epoch is None else begin_epoch
        self._length: float = given if given is not None else num if in_steps else 3
        if in_steps:  # checked now, not after the data have been loaded
            self.schedule(1)

    def schedule(self, steps_per_epoch: int) -> EveryStep:
        """Return the warm-up in optimizer steps; if epochs have too few steps, each value lasts one step."""
        if self._in_steps:
            return EveryStep(self._begin, self._length, self._sparsity)  # type: ignore[arg-type]  # checks them
        num = len(self._sparsity)
        length = 1 if num == 1 else max(num, round(self._length * steps_per_epoch))
        return EveryStep(round(self._begin * steps_per_epoch), length, self._sparsity)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = _strategy_of(
            trainer,
            lambda method: method.compresses_gradients,
            "SparsityWarmup sets the sparsity of methods that compress gradients, such as strategy='dgc'",
        )
        instead = "SparsityWarmup(begin_step=..., steps=...)"
        schedule = self.schedule(1 if self._in_steps else steps_per_epoch_of(trainer, instead))
        given, defaults = strategy.method.when, [EveryStep(sparsity=each) for each in (AUTO, DGC_SPARSITY)]
        if given not in (*defaults, schedule):
            rank_zero_warn(f"SparsityWarmup overrides the strategy's own {given} with {schedule}.")
        strategy.reconfigure(dataclasses.replace(strategy.method, when=schedule))
        rank_zero_info(
            f"{type(strategy).__name__}: dense up to step {schedule.rampup_begin_step}, then sparsity "
            f"{list(self._sparsity)} over {schedule.rampup_step} steps."
        )


class AveragingSchedule(Callback):
    """Set when local SGD begins, and after how many steps replicas are averaged.

    Epochs are only known to the Trainer: they are turned into optimizer steps at the start of the fit. Arguments that
    are left out stay as the strategy has them.

    Args:
        k_steps: local steps between two averages; the first k of "adaptive_local_sgd".
        begin_epoch: epochs of synchronous steps before the first local one; may be a fraction.
        begin_step: the same as a number of steps, or a fraction of the run (float in (0, 1)).
        max_k_steps: the largest k of "adaptive_local_sgd".

    Raises:
        ConfigurationError: `begin_epoch` and `begin_step` are both given, a value is out of range, the method does not
            average weights, or the number of steps in an epoch cannot be known.

    Examples:
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
        begin_step: int | float | None = None,
        max_k_steps: int | None = None,
    ) -> None:
        if begin_epoch is not None and begin_step is not None:
            raise ConfigurationError(
                f"AveragingSchedule(begin_epoch={begin_epoch!r}, begin_step={begin_step!r}): give one of the two."
            )
        _check_epochs(begin_epoch=begin_epoch)
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
        strategy = _strategy_of(
            trainer,
            lambda method: method.when.averages_weights,
            "AveragingSchedule is for methods that average weights, such as strategy='local_sgd' or 'diloco'",
        )
        num_steps = 1
        if self._begin_epoch is not None:
            num_steps = steps_per_epoch_of(trainer, "AveragingSchedule(begin_step=...)")
        strategy.reconfigure(self.method(strategy.method, num_steps))
        when = strategy.method.when
        rank_zero_info(f"{type(strategy).__name__}: k_steps={when.k_steps}, begin_step={when.begin_step!r}.")


def _check_epochs(**epochs: float | None) -> None:
    for name, value in epochs.items():
        if value is not None and not (is_number(value) and value >= 0):
            raise ConfigurationError(f"{name}={value!r}: give a number of epochs, >= 0.")


def _strategy_of(trainer: pl.Trainer, takes: Callable[[Method], bool], needs: str) -> BaseStrategy:
    strategy = trainer.strategy
    if isinstance(strategy, BaseStrategy) and takes(strategy.method):
        return strategy
    shown = repr(strategy) if isinstance(strategy, BaseStrategy) else type(strategy).__name__
    raise ConfigurationError(f"{needs}; the strategy is {shown}. Use another strategy, or leave out the callback.")
