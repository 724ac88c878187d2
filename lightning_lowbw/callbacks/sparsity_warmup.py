"""The sparsity warm-up in epochs, for a strategy that was given by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_lowbw.arguments import is_count, is_number, names_arguments
from lightning_lowbw.callbacks.epochs import OF_PACKAGE, named, steps_per_epoch
from lightning_lowbw.engine.presets import DGC_SPARSITY
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.when.every_step import AUTO, EveryStep, as_stairs


@names_arguments
class SparsityWarmup(Callback):
    """Set when deep gradient compression begins, and over how many steps or epochs its sparsity increases.

    Epochs are only known to the Trainer: they are turned into optimizer steps at the start of the fit, and override the
    strategy's own `rampup_begin_step`, `rampup_step` and `sparsity`. Give epochs or steps, not both.

    Args:
        begin_epoch: epochs of dense exchange before the first sparse step; may be a fraction. Default 2.
        epochs: epochs over which the stairs are spread; may be a fraction. Default 3. Where epochs have too few steps,
            as with `fast_dev_run`, each value is taken for one step.
        begin_step: the same in optimizer steps.
        steps: the same in optimizer steps. Default: one for each value.
        sparsity: the stairs.

    Raises:
        ConfigurationError: epochs and steps are mixed, a value is out of range, one value is to be spread, the strategy
            compresses no gradients, or the number of steps in an epoch cannot be known.

    Source: the defaults are those advised for ImageNet by PaddlePaddle Fleet.

    Example:
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
        for name, value in (("begin_epoch", begin_epoch), ("epochs", epochs)):
            if value is not None and not (is_number(value) and value >= 0):
                raise ConfigurationError(f"{name}={value!r}: give a number of epochs, >= 0.")
        for name, value in (("begin_step", begin_step), ("steps", steps)):
            if value is not None and not is_count(value, 0):
                raise ConfigurationError(f"{name}={value!r}: give a number of optimizer steps, an integer >= 0.")
        self._in_steps = in_steps
        self._begin: float = (begin_step or 0) if in_steps else 2 if begin_epoch is None else begin_epoch
        if sparsity is None or isinstance(sparsity, str):
            raise ConfigurationError(f"sparsity={sparsity!r}: give the stairs, a list of numbers in [0, 1).")
        self._sparsity = as_stairs(sparsity)
        if steps is not None and steps < len(self._sparsity) > 1:
            raise ConfigurationError(
                f"SparsityWarmup(steps={steps}, sparsity={list(self._sparsity)}): there is no step for each value. "
                f"Give at least {len(self._sparsity)} steps, fewer values, or {_leave_out('steps', begin_step)}."
            )
        if len(self._sparsity) == 1 and (epochs or (steps is not None and steps > 1)):
            name, number = ("epochs", epochs) if epochs else ("steps", steps)
            raise ConfigurationError(
                f"SparsityWarmup({name}={number}, sparsity={list(self._sparsity)}): one value of sparsity "
                "cannot be spread over steps. Give several that increase, such as [0.984375, 0.996, 0.999], or "
                f"{_leave_out(name, begin_epoch if epochs else begin_step)}."
            )
        of_steps = len(self._sparsity) if steps is None else steps
        self._length: float = of_steps if in_steps else 3 if epochs is None else epochs

    def schedule(self, steps_per_epoch: int) -> EveryStep:
        """Return the warm-up in optimizer steps."""
        unit = 1 if self._in_steps else steps_per_epoch
        num = len(self._sparsity)
        length = 1 if num == 1 else max(num, round(self._length * unit))
        return EveryStep(round(self._begin * unit), length, self._sparsity)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, OF_PACKAGE) or not strategy.method.compresses_gradients:
            raise ConfigurationError(
                "SparsityWarmup sets the sparsity of methods that compress gradients, such as strategy='dgc'; the "
                f"strategy is {named(strategy)}. Use another strategy, or leave out the callback."
            )
        schedule = self.schedule(
            0 if self._in_steps else steps_per_epoch(trainer, pl_module, "SparsityWarmup(begin_step=..., steps=...)")
        )
        given = strategy.method.when
        assert isinstance(given, EveryStep)
        defaults = [EveryStep(sparsity=each) for each in (AUTO, DGC_SPARSITY)]
        if given not in (*defaults, schedule):
            rank_zero_warn(f"SparsityWarmup overrides the strategy's own {given} with {schedule}.")
        strategy.reconfigure(dataclasses.replace(strategy.method, when=schedule))
        rank_zero_info(
            f"{type(strategy).__name__}: dense up to step {schedule.rampup_begin_step}, then sparsity "
            f"{list(self._sparsity)} over {schedule.rampup_step} steps."
        )


def _leave_out(name: str, begin: float | None) -> str:
    """Return what to do without `steps` or `epochs`, so that the first sparse step stays the same."""
    return "give begin_step=0 in place of steps" if name == "steps" and begin is None else f"leave out {name}"
