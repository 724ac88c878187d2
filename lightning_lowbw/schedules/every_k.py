"""Every k local steps: ranks step with their own gradients, and their weights are averaged periodically.

The period k is fixed or adapted to the learning rate and the loss; an outer optimizer is applied to the mean; fragments
of a model are averaged at different steps, which lowers the peak of the traffic.

With one rank alone the outer optimizer steps with the change of its own weights: Kallusky et al., "SNOO: Step-K
Nesterov outer optimizer", arXiv 2510.15830.

Source: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Lin et al., "Don't use large
mini-batches, use local SGD", arXiv 1808.07217 (post-local); Wang and Joshi, "Adaptive communication strategies", arXiv
1810.08313 (adacomm); Gu et al., "A quadratic synchronization rule", arXiv 2310.14423 (qsr); Wang et al., "SlowMo",
arXiv 1910.00643, algorithm 1; Douillard et al., "DiLoCo", arXiv 2311.08105; Douillard et al., "Streaming DiLoCo with
overlapping communication", arXiv 2501.18512, section 2.2 and algorithm 2 (fragments).

Deviation: the authors' fragments are whole layers in a known order; here tensors are combined so that fragments have
nearly equal sizes, for any model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from lightning_lowbw.arguments import check_one_of, is_count, is_number
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.schedule import Schedule

Rule = Literal["fixed", "fleet", "adacomm", "qsr"]
OuterName = Literal["none", "slowmo", "nesterov"]
RELATIVE_CHANGE = 1e-6  # a learning rate that differs by less has not changed
LOSS_DECAY = 0.9  # the weight of a step shrinks by this factor with each later step
AUTO = "auto"
MOST_FRAGMENTS = 4  # for "auto"
DEFAULT_OUTER_LR = {"none": 1.0, "slowmo": 1.0, "nesterov": 0.7}
# Deviation: DiLoCo has a momentum of 0.9, which loses more in each row of benchmarks/results/defaults.md.
DEFAULT_OUTER_MOMENTUM = {"none": 0.0, "slowmo": 0.5, "nesterov": 0.6}


@dataclass(frozen=True)
class Period:
    """The period in use, and the values from which the next period is computed.

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


@dataclass(frozen=True, kw_only=True)
class EveryK(Schedule, key="k"):
    """Average the replicas after every k-th local step.

    Args:
        k_steps: local steps between two averages; for the adaptive rules the first k (for "qsr" the least k). 1 is DDP.
        begin_step: the last synchronous step: gradients are all-reduced in steps 1 to `begin_step`, averages are
            counted from there. A number of steps (int), or a fraction of the run (float in (0, 1)).
        rule: "fixed", or how the next k follows from the learning rate and the loss, both means over ranks:

            - "fleet": ``k = ceil(sqrt(lr_0 L k_0 / (lr L_0)))`` (PaddlePaddle Fleet)
            - "adacomm": ``k = ceil(sqrt(lr_0 L / (lr L_0)) k_0)``; halved if this does not fall while lr stays
            - "qsr": ``k = floor((qsr_alpha / lr)^2)``
        max_k_steps: the largest k of the adaptive rules.
        qsr_alpha: the numerator of "qsr", in units of the learning rate.
        outer: the step from the anchor x0 to the next, with u the outer velocity, which begins at 0:

            - "none": ``x = mean``
            - "slowmo": ``u = momentum u + (x0 - mean) / inner_lr;  x = x0 - lr inner_lr u``
            - "nesterov": ``u = momentum u + (x0 - mean);  x = x0 - lr (x0 - mean + momentum u)`` (DiLoCo)
        outer_lr: by default 1 for "slowmo", 0.7 for "nesterov".
        outer_momentum: by default 0.5 for "slowmo", 0.6 for "nesterov" (the paper of DiLoCo: 0.9).
        delay_steps: local steps that hide an average: it begins after step t and is applied after t + delay_steps,
            and the steps in between are kept. 0 waits for the average. Less than k_steps.
        num_fragments: the number of parts, of nearly equal size, in which parameters are averaged, each every k steps,
            one after another: it divides the peak of the traffic. "auto": 4, or the number of tensors if that is less.
        mixing: alpha, the fraction of its own weights that a rank keeps when a delayed average is applied:
            ``x = alpha x + (1 - alpha) average``. None keeps the steps in between: ``x = x + (average - x at the
            begin)``.

    Raises:
        ConfigurationError: a value is out of range, or two values cannot be combined.

    Examples:
        >>> schedule = EveryK(k_steps=4, rule="adacomm")
        >>> period = schedule.next_period(Period(4), lr=0.1, loss=2.0)
        >>> schedule.next_period(period, lr=0.1, loss=0.5).k
        2
    """

    k_steps: int = 8
    begin_step: int | float = 1
    rule: Rule = "fixed"
    max_k_steps: int = 16
    qsr_alpha: float = 0.01
    outer: OuterName = "none"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    delay_steps: int = 0
    num_fragments: int | str = 1
    mixing: float | None = None

    averages_weights = True

    def __post_init__(self) -> None:
        self._check_period()
        self._check_begin()
        self._check_outer()
        self._check_delay()
        self._check_fragments()

    @property
    def is_always_synchronous(self) -> bool:
        """Whether this is DDP: an average after every step is one of gradients, for any optimizer and clipping."""
        return self.rule == "fixed" and self.k_steps == 1

    @property
    def needs_loss(self) -> bool:
        """Whether the next k follows from the loss."""
        return self.rule in ("fleet", "adacomm")

    def check_replacement(self, before: Schedule) -> None:
        super().check_replacement(before)
        made_for = cast("EveryK", before)
        if (self.outer == "none") != (made_for.outer == "none"):
            raise ConfigurationError(
                f"outer={self.outer!r} in place of {made_for.outer!r}: with an outer optimizer the anchor is kept "
                "on the device, without on the host. Change outer_lr, or attach the method anew."
            )
        # A delay changes the messages and the process groups.
        if (self.delay_steps > 0, self.num_fragments) != (made_for.delay_steps > 0, made_for.num_fragments):
            raise ConfigurationError(
                f"delay_steps={self.delay_steps}, num_fragments={self.num_fragments!r} in place of "
                f"{made_for.delay_steps}, {made_for.num_fragments!r}: whether averages are hidden, and in how many "
                "fragments, cannot change during a training. Change k_steps, or a delay to another value above 0; or "
                "attach the method anew."
            )

    def next_period(self, period: Period, lr: float, loss: float | None) -> Period:
        """Return the period after an average, from numbers that are equal on all ranks.

        While the learning rate still rises above all earlier values (warm-up) the reference follows it and k keeps its
        first value. A learning rate or a loss that is not positive and finite leaves k as it is.

        Args:
            period: the period in use.
            lr: the mean over ranks.
            loss: the mean since the last average, over ranks; None if a rank has none.

        Raises:
            ConfigurationError: the rule needs a loss.
        """
        if self.rule == "fixed" or not (lr > 0 and math.isfinite(lr)):
            return period
        # k = floor((alpha / lr)^2).
        if self.rule == "qsr":
            root = min(self.qsr_alpha / lr, float(self.max_k_steps))  # the square of a larger root would overflow
            return replace(period, k=min(max(self.k_steps, math.floor(root**2)), self.max_k_steps), last_lr=lr)
        if loss is None:
            raise ConfigurationError(
                f"rule={self.rule!r} chooses k by the training loss, and there was none: return it from "
                "training_step, or call worker.observe_loss(loss) in a loop of your own; or use rule='qsr'."
            )
        if not (loss > 0 and math.isfinite(loss)):
            return period
        if period.peak_lr is None or period.reference_loss is None or lr > period.peak_lr * (1 + RELATIVE_CHANGE):
            return Period(self.k_steps, lr, loss, lr)
        # lr_0 L / (lr L_0): it grows as the rate falls, and falls with the loss.
        ratio = period.peak_lr * loss / (lr * period.reference_loss)
        wanted = math.sqrt(ratio * self.k_steps) if self.rule == "fleet" else math.sqrt(ratio) * self.k_steps
        # not ceil(1.0000000000000002) = 2
        k = max(1, min(math.ceil(min(wanted, self.max_k_steps) * (1 - 1e-12)), self.max_k_steps))
        same_lr = period.last_lr is not None and abs(lr - period.last_lr) <= RELATIVE_CHANGE * period.last_lr
        # AdaComm: at a constant rate k falls with the loss; if the loss does not lower k, k is halved.
        if self.rule == "adacomm" and same_lr and k >= period.k:
            k = max(1, period.k // 2)
        return replace(period, k=k, last_lr=lr)

    def outer_step_(self, starts: list[Tensor], means: list[Tensor], velocities: list[Tensor], inner_lr: float) -> None:
        """Move the anchor to the next one, of all tensors at once; replicated: all ranks compute the same.

        In place:
            `starts` and `means`, which become x; `velocities`, which are u. No memory is allocated.

        Args:
            starts: x0, the anchor; float32 or float64, any shapes, at least one.
            means: the means of the replicas; as `starts`.
            velocities: as `starts`; empty with "none".
            inner_lr: the learning rate of the inner optimizer; with 0 nothing has moved, and SlowMo's u stays the same.
        """
        lr = DEFAULT_OUTER_LR[self.outer] if self.outer_lr is None else self.outer_lr
        momentum = DEFAULT_OUTER_MOMENTUM[self.outer] if self.outer_momentum is None else self.outer_momentum
        if self.outer == "none" or (self.outer == "slowmo" and inner_lr <= 0):
            torch._foreach_copy_(starts, means)
            return
        moves = means
        torch._foreach_sub_(moves, starts)  # mean - x0: the pseudo-gradient, negated
        torch._foreach_mul_(velocities, momentum)
        if self.outer == "slowmo":
            torch._foreach_sub_(velocities, moves, alpha=1.0 / inner_lr)  # u = m u + (x0 - mean) / inner_lr
            torch._foreach_sub_(starts, velocities, alpha=lr * inner_lr)  # x = x0 - lr inner_lr u
        else:
            torch._foreach_sub_(velocities, moves)  # u = m u + (x0 - mean)
            torch._foreach_sub_(moves, velocities, alpha=momentum)
            torch._foreach_add_(starts, moves, alpha=lr)  # x = x0 + lr (mean - x0 - m u)
        torch._foreach_copy_(means, starts)

    def num_fragments_of(self, num_tensors: int) -> int:
        """Return the number of parts in which tensors are averaged: "auto" has at most one per tensor, and per step."""
        if isinstance(self.num_fragments, int):
            return self.num_fragments
        return min(MOST_FRAGMENTS, self.k_steps, max(1, num_tensors))

    # Checks of the values -------------------------------------------------------------------------------------------

    def _check_period(self) -> None:
        check_one_of("rule", self.rule, get_args(Rule))
        for name in ("k_steps", "max_k_steps"):
            value = getattr(self, name)
            if not is_count(value):
                raise ConfigurationError(f"{name}={value!r}: give a number of optimizer steps, an integer >= 1.")
        for name, rules in (("max_k_steps", ("fleet", "adacomm", "qsr")), ("qsr_alpha", ("qsr",))):
            if self.rule not in rules and getattr(self, name) != getattr(EveryK, name):  # its default
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

    def _check_begin(self) -> None:
        begin = self.begin_step
        is_fraction = isinstance(begin, float) and 0.0 < begin < 1.0
        if not (is_count(begin, 0) or is_fraction):
            raise ConfigurationError(
                f"begin_step={begin!r}: give a number of steps (an integer >= 0), or a fraction of the run (between 0 "
                "and 1, as 0.5)."
            )

    def _check_outer(self) -> None:
        check_one_of("outer", self.outer, get_args(OuterName))
        lr, momentum = self.outer_lr, self.outer_momentum
        for name, value in (("outer_lr", lr), ("outer_momentum", momentum)):
            if value is not None and self.outer == "none":
                raise ConfigurationError(f"{name}={value!r} without an outer optimizer: set outer='slowmo'.")
        if lr is not None and not (is_number(lr) and lr > 0):
            raise ConfigurationError(f"outer_lr={lr!r}: give a number > 0.")
        if momentum is not None and not (is_number(momentum) and 0 <= momentum < 1):
            raise ConfigurationError(f"outer_momentum={momentum!r}: give a number in [0, 1).")
        if self.is_always_synchronous and self.outer != "none":
            raise ConfigurationError(
                f"outer={self.outer!r} with k_steps=1, which is DDP: it is for averages of weights. Give k_steps > 1, "
                "or leave it out."
            )

    def _check_delay(self) -> None:
        delay, mixing = self.delay_steps, self.mixing
        if not (is_count(delay, 0) and delay < self.k_steps):
            raise ConfigurationError(
                f"delay_steps={delay!r} with k_steps={self.k_steps}: give an integer from 0 to k_steps - 1."
            )
        if mixing is not None:
            if not is_number(mixing) or not 0 <= mixing <= 1:
                raise ConfigurationError(f"mixing={mixing!r}: give a number in [0, 1], or None.")
            if not delay:
                raise ConfigurationError(f"mixing={mixing!r} is for averages that are applied later: give delay_steps.")

    def _check_fragments(self) -> None:
        num = self.num_fragments
        if num != AUTO and not is_count(num):
            raise ConfigurationError(f"num_fragments={num!r}: give an integer >= 1, or {AUTO!r}.")
        if num != 1 and self.rule != "fixed":
            raise ConfigurationError(
                f"num_fragments={num!r} requires a fixed period, the same for all ranks: leave out rule."
            )
        if isinstance(num, int) and num > self.k_steps:
            raise ConfigurationError(
                f"num_fragments={num} with k_steps={self.k_steps}: give at most one fragment per step."
            )


# Fragments -----------------------------------------------------------------------------------------------------------


def balance(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return a fragment for each tensor: the largest first, each to the smallest fragment so far.

    The largest fragment is at most 4/3 of the best possible one (Graham, "Bounds on multiprocessing timing anomalies",
    1969). Tensors are not cut, so that a tensor with more than 1/P of all elements is the peak.

    Args:
        sizes: the size of each tensor, in elements or sent bytes.
        loads: the size that each fragment already has.

    Examples:
        >>> balance([10, 50, 30, 20], [0, 0])
        [0, 0, 1, 1]
    """
    totals, chosen = list(loads), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[index] = min(range(len(totals)), key=lambda p: (totals[p], p))
        totals[chosen[index]] += max(sizes[index], 1)  # empty tensors are spread, too
    return chosen


def steps_before(fragment: int, num_fragments: int, k_steps: int) -> int:
    """Return the number of steps by which a fragment's first period is shorter than k: the last fragment waits k
    steps.

    Examples:
        >>> [100 - steps_before(fragment, 4, 100) for fragment in range(4)]
        [25, 50, 75, 100]
    """
    return k_steps - round((fragment + 1) * k_steps / num_fragments)


# The loss of the adaptive rules ---------------------------------------------------------------------------------------


class RunningLoss:
    """A mean of losses since the last average, in which late steps weigh more. Waits for no device.

    Examples:
        >>> loss = RunningLoss()
        >>> for value in (1.0, 3.0):
        ...     loss.observe(torch.tensor(value))
        ...     loss.end_step()
        >>> loss.mean()  # (0.9 + 3) / (0.9 + 1)
        tensor(2.0526)
    """

    def __init__(self) -> None:
        self._of_step: Tensor | None = None
        self._total: Tensor | None = None
        self._weight = 0.0

    def observe(self, loss: Tensor) -> None:
        """Add to the loss of the step in progress; a scalar, any device."""
        loss = loss.detach().float()
        self._of_step = loss if self._of_step is None else self._of_step + loss

    def end_step(self) -> None:
        """Add the loss of the step to the mean, if one has been observed."""
        if self._of_step is not None:
            self._total = self._of_step if self._total is None else LOSS_DECAY * self._total + self._of_step
            self._weight = LOSS_DECAY * self._weight + 1.0
            self._of_step = None

    def mean(self) -> Tensor | None:
        """Return the mean; None if no loss has been observed."""
        return None if self._total is None else self._total / self._weight

    def clear(self) -> None:
        """Begin anew, with the next step."""
        self._total, self._weight = None, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state on the CPU."""
        return {"total": None if self._total is None else self._total.cpu().clone(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state_dict` returned."""
        total, self._weight = state["total"], state["weight"]
        self._total = None if total is None else total.to(device)
