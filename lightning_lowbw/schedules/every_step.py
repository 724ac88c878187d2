"""Every optimizer step: dense first, then with the sparsity of the stairs of the warm-up.

Source: arXiv 1712.01887, section 3.3 ("warm-up training"), with the knobs of PaddlePaddle Fleet's `dgc_configs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_lowbw.arguments import is_count, is_number
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.schedule import Schedule

AUTO = "auto"


@dataclass(frozen=True)
class EveryStep(Schedule, key="step"):
    """Exchange gradients in every optimizer step; the density is a function of the step.

    ``i = min(int((t - rampup_begin_step) * len(sparsity) / rampup_step), len(sparsity) - 1)``

    Args:
        rampup_begin_step: optimizer steps that are dense (plain DDP), >= 0.
        rampup_step: optimizer steps over which the stairs are spread, at least one for each stair.
        sparsity: the fraction of elements *not* sent at each stair, each in [0, 1). A leading 0 is a dense stair.
            None: no warm-up, and the payload's own density from `rampup_begin_step` on. "auto": a Lightning strategy
            takes some dense steps, measures, and replaces this schedule by one of numbers; see `cost_model`.
        budget: with "auto", the fraction of a step that its exchange may take, in (0, 1].
        pretrained: with "auto", whether the weights are trained already: then there is no warm-up.

    Raises:
        ConfigurationError: a value is out of range, `sparsity` falls, `rampup_step` is smaller than the number of its
            values, or there is only one to be spread.

    Examples:
        >>> schedule = EveryStep(rampup_begin_step=10, rampup_step=100, sparsity=(0.75, 0.9375, 0.999))
        >>> [round(schedule.density(step), 4) for step in (9, 10, 43, 44, 1000)]
        [1.0, 0.25, 0.25, 0.0625, 0.001]
    """

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: Sequence[float] | str | None = None
    budget: float = 0.05
    pretrained: bool = False

    def __post_init__(self) -> None:
        if self.sparsity is not None and not self.is_auto:
            object.__setattr__(self, "sparsity", as_stairs(self.sparsity))
        shown = f"sparsity={self.sparsity and list(self.sparsity)}"
        for name, least in (("rampup_begin_step", 0), ("rampup_step", 1)):
            value = getattr(self, name)
            if not is_count(value, least):
                raise ConfigurationError(f"{name}={value!r}: give a number of optimizer steps, an integer >= {least}.")
        if self.rampup_step < len(self.stairs):
            raise ConfigurationError(
                f"rampup_step={self.rampup_step} for the {len(self.stairs)} values of sparsity={list(self.stairs)}: "
                "there is no step for each. Give the number of optimizer steps that the warm-up takes, or the last "
                "value alone."
            )
        if self.rampup_step > 1 and len(self.stairs) < 2 and not self.is_auto:
            raise ConfigurationError(
                f"rampup_step={self.rampup_step} with {shown}: a warm-up needs "
                "several values to be spread over these steps, as in sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999]. "
                "Give them, or leave rampup_step out."
            )
        if not is_number(self.budget) or not 0 < self.budget <= 1:
            raise ConfigurationError(
                f"budget={self.budget!r}: give the share of a step that its exchange may take, above 0 and up to 1."
            )
        if self.is_auto and (self.rampup_begin_step, self.rampup_step) != (0, 1):
            raise ConfigurationError(
                f"sparsity='auto' with rampup_begin_step={self.rampup_begin_step}, rampup_step={self.rampup_step}: "
                "these are chosen, too. Leave them out, or give the stairs of sparsity."
            )
        of_auto = [name for name in ("budget", "pretrained") if getattr(self, name) != getattr(EveryStep, name)]
        if not self.is_auto and of_auto:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in of_auto)
            raise ConfigurationError(f"{given} with {shown}: this is for sparsity='auto'. Leave one of the two out.")

    @property
    def is_auto(self) -> bool:
        """Whether the numbers are still to be chosen, and steps are dense."""
        return isinstance(self.sparsity, str) and self.sparsity == AUTO

    @property
    def begin_step(self) -> int:
        return self.rampup_begin_step

    @property
    def stairs(self) -> tuple[float, ...]:
        """The values of `sparsity`; empty if there are no stairs, or not yet."""
        return () if self.sparsity is None or isinstance(self.sparsity, str) else tuple(self.sparsity)

    def density(self, step: int, otherwise: float = 1.0) -> float:
        if step < self.rampup_begin_step or self.is_auto:
            return 1.0
        stairs = self.stairs
        if not stairs:
            return otherwise
        # The i of the equation, in integers: nothing is rounded.
        stair = (step - self.rampup_begin_step) * len(stairs) // self.rampup_step
        return 1.0 - stairs[min(stair, len(stairs) - 1)]


def as_stairs(sparsity: Sequence[float] | str | float) -> tuple[float, ...]:
    """Return the values of `sparsity`, checked.

    Raises:
        ConfigurationError: the value is no list of numbers in [0, 1), or a number is smaller than the last.
    """
    if not isinstance(sparsity, Sequence) or isinstance(sparsity, str) or not all(map(is_number, sparsity)):
        raise ConfigurationError(
            f"sparsity={sparsity!r}: give a list of numbers in [0, 1), for instance [0.999], or 'auto'."
        )
    stairs = tuple(map(float, sparsity))
    if not stairs:
        raise ConfigurationError("sparsity=[]: give at least one value in [0, 1), for instance [0.999].")
    for value in stairs:
        if not 0.0 <= value < 1.0:
            raise ConfigurationError(
                f"sparsity={list(stairs)}: {value!r} is outside [0, 1). "
                "It is the fraction kept back: 0.999 sends 0.1 %."
            )
    # Values that fall suggest that sparsity was taken for density.
    for before, after in pairwise(stairs):
        if after < before:
            raise ConfigurationError(
                f"sparsity={list(stairs)}: {after} follows {before}, so more would be sent after the warm-up than in "
                "it. Give values that rise, as in [0.75, 0.9375, 0.999]: the fraction kept back, not the one sent."
            )
    return stairs
