"""When replicas are averaged: the period k, fixed or adapted to the learning rate and the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_lowbw.arguments import check_one_of, is_count, is_number
from lightning_lowbw.errors import ConfigurationError

Rule = Literal["fixed", "fleet", "adacomm", "qsr"]
FIRST_LR_DECAY = "first_lr_decay"
RELATIVE_CHANGE = 1e-6  # below it a learning rate has not changed


@dataclass(frozen=True)
class Period:
    """The period in use and what the next one is computed from.

    Attributes:
        k: local steps between two averages.
        peak_lr: the learning rate that the reference loss belongs to; None before the first average.
        reference_loss: the loss at that learning rate.
        last_lr: the learning rate at the last decision.
    """

    k: int
    peak_lr: float | None = None
    reference_loss: float | None = None
    last_lr: float | None = None


@dataclass(frozen=True)
class PeriodSchedule:
    """Synchronous steps first, then an average after every k local ones.

    Args:
        k_steps: k; for the adaptive rules the first one (for "qsr" the least).
        begin_step: the last synchronous step: gradients are all-reduced in steps 1 to `begin_step`, averages are
            counted from there. A step (int), a fraction of the run (float in (0, 1)), or "first_lr_decay".
        rule: "fixed", or how the next k follows from the learning rate and the loss, both means over ranks:

            - "fleet": ``k = ceil(sqrt(lr_0 L k_0 / (lr L_0)))`` (PaddlePaddle Fleet)
            - "adacomm": ``k = ceil(sqrt(lr_0 L / (lr L_0)) k_0)``; halved where this does not fall while lr stays
            - "qsr": ``k = floor((qsr_alpha / lr)^2)``
        max_k_steps: the largest k of the adaptive rules.
        qsr_alpha: the numerator of "qsr", in units of the learning rate.

    Raises:
        ConfigurationError: a value is out of range.

    Source: Lin et al., "Don't use large mini-batches, use local SGD", arXiv 1808.07217 (post-local); Wang and Joshi,
        "Adaptive communication strategies", arXiv 1810.08313 (adacomm); Gu et al., "A quadratic synchronization rule",
        arXiv 2310.14423 (qsr).

    Example:
        >>> schedule = PeriodSchedule(k_steps=4, rule="adacomm")
        >>> period = schedule.next(schedule.first(), lr=0.1, loss=2.0)
        >>> schedule.next(period, lr=0.1, loss=0.5).k
        2
    """

    k_steps: int = 8
    begin_step: int | float | str = 1
    rule: Rule = "fixed"
    max_k_steps: int = 16
    qsr_alpha: float = 0.01

    def __post_init__(self) -> None:
        check_one_of("rule", self.rule, get_args(Rule))
        for name in ("k_steps", "max_k_steps"):
            value = getattr(self, name)
            if not is_count(value):
                raise ConfigurationError(f"{name}={value!r}: give a number of optimizer steps, an integer >= 1.")
        for name, rules in (("max_k_steps", ("fleet", "adacomm", "qsr")), ("qsr_alpha", ("qsr",))):
            if self.rule not in rules and getattr(self, name) != getattr(PeriodSchedule, name):  # its default
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} with rule={self.rule!r}, which has no use for it: leave it out, "
                    f"or set rule to {' or '.join(map(repr, rules))}."
                )
        if self.rule != "fixed" and self.max_k_steps < self.k_steps:
            raise ConfigurationError(
                f"max_k_steps={self.max_k_steps} is below the first k of {self.k_steps}: give at least as many."
            )
        if not (is_number(self.qsr_alpha) and self.qsr_alpha > 0):
            raise ConfigurationError(f"qsr_alpha={self.qsr_alpha!r}: give a number > 0.")
        begin = self.begin_step
        is_step = is_count(begin, 0)
        is_fraction = isinstance(begin, float) and 0.0 < begin < 1.0
        if not (is_step or is_fraction or begin == FIRST_LR_DECAY):
            raise ConfigurationError(
                f"begin_step={begin!r}: give a number of steps (an integer >= 0), a fraction of the run (between 0 "
                f"and 1, as 0.5), or {FIRST_LR_DECAY!r}."
            )

    @property
    def is_always_synchronous(self) -> bool:
        """Whether this is DDP: an average after every step is one of gradients, for any optimizer and clipping."""
        return self.rule == "fixed" and self.k_steps == 1

    def first(self) -> Period:
        """Return the period to begin with."""
        return Period(self.k_steps)

    def next(self, period: Period, lr: float, loss: float) -> Period:
        """Return the period after an average, from numbers that are equal on all ranks.

        While the learning rate still rises above all earlier ones (warm-up) the reference follows it and k stays the
        first one. A learning rate or a loss that is not positive and finite leaves k as it is.
        """
        if self.rule == "fixed" or not (lr > 0 and math.isfinite(lr)):
            return period
        if self.rule == "qsr":
            root = min(self.qsr_alpha / lr, float(self.max_k_steps))  # the square of more would overflow
            return replace(period, k=min(max(self.k_steps, math.floor(root**2)), self.max_k_steps), last_lr=lr)
        if not (loss > 0 and math.isfinite(loss)):
            return period
        if period.peak_lr is None or period.reference_loss is None or lr > period.peak_lr * (1 + RELATIVE_CHANGE):
            return Period(self.k_steps, lr, loss, lr)
        ratio = period.peak_lr * loss / (lr * period.reference_loss)
        wanted = math.sqrt(ratio * self.k_steps) if self.rule == "fleet" else math.sqrt(ratio) * self.k_steps
        # not ceil(1.0000000000000002) = 2
        k = max(1, min(math.ceil(min(wanted, self.max_k_steps) * (1 - 1e-12)), self.max_k_steps))
        same_lr = period.last_lr is not None and abs(lr - period.last_lr) <= RELATIVE_CHANGE * period.last_lr
        if self.rule == "adacomm" and same_lr and k >= period.k:
            k = max(1, period.k // 2)
        return replace(period, k=k, last_lr=lr)
