"""Every k local steps: ranks step with their own gradients, and their weights are averaged periodically.

Source: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Lin et al., "Don't use large
mini-batches, use local SGD", arXiv 1808.07217 (post-local); Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512 (fragments).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_lowbw.arguments import is_count, is_number, names_arguments
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.when.adaptive import PeriodSchedule, Rule
from lightning_lowbw.when.outer import OuterName, OuterOptimizer

AUTO = "auto"
MOST_FRAGMENTS = 4  # of "auto"


@names_arguments
@dataclass(frozen=True, kw_only=True)
class EveryK:
    """Average the replicas after every k-th local step.

    Args:
        k_steps: local steps between two averages; for the adaptive rules the first k. 1 is DDP.
        begin_step: synchronous steps before the first local one: a number of steps, a fraction of the run (float in
            (0, 1)), or "first_lr_decay"; see `PeriodSchedule`.
        rule: "fixed", "fleet", "adacomm" or "qsr", as in `PeriodSchedule`.
        max_k_steps: the largest k of the adaptive rules.
        qsr_alpha: for "qsr".
        outer: "none", "slowmo" or "nesterov" (DiLoCo), as in `OuterOptimizer`.
        outer_lr: of the outer optimizer.
        outer_momentum: of the outer optimizer.
        delay_steps: local steps that hide an average: it is begun after step t and applied after t + delay_steps,
            and the steps in between are kept. 0 waits for it. Less than k_steps. "auto" waits for the first two
            averages of each fragment, and delays by the time of the second, in local steps; the same on all ranks, but
            not from run to run.
        num_fragments: the number of parts, of nearly equal size, in which parameters are averaged, each every k steps,
            one after another: the peak of the traffic is divided by it. "auto": 4, or as many as there are tensors.
        mixing: alpha, the fraction of its own weights that a rank keeps when a delayed average is applied:
            ``x = alpha x + (1 - alpha) average``. None keeps the steps in between: ``x = x + (average - x at the
            begin)``.

    Raises:
        ConfigurationError: a value is out of range, or two cannot be combined.
    """

    k_steps: int = 8
    begin_step: int | float | str = 1
    rule: Rule = "fixed"
    max_k_steps: int = 16
    qsr_alpha: float = 0.01
    outer: OuterName = "none"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    delay_steps: int | str = 0
    num_fragments: int | str = 1
    mixing: float | None = None
    schedule: PeriodSchedule = field(init=False, repr=False, compare=False)
    outer_optimizer: OuterOptimizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        schedule = PeriodSchedule(self.k_steps, self.begin_step, self.rule, self.max_k_steps, self.qsr_alpha)
        object.__setattr__(self, "schedule", schedule)
        outer_optimizer = OuterOptimizer(self.outer, self.outer_lr, self.outer_momentum)
        object.__setattr__(self, "outer_optimizer", outer_optimizer)
        if schedule.is_always_synchronous and self.outer != "none":
            raise ConfigurationError(
                f"outer={self.outer!r} with k_steps=1, which is DDP: it is for averages of weights. Give k_steps > 1, "
                "or leave it out."
            )
        self._check_delay()
        self._check_fragments()

    def num_fragments_of(self, num_tensors: int) -> int:
        """Return in how many parts the tensors are averaged: for "auto" no more than there are tensors or steps."""
        if isinstance(self.num_fragments, int):
            return self.num_fragments
        return min(MOST_FRAGMENTS, self.k_steps, max(1, num_tensors))

    @property
    def is_always_local(self) -> bool:
        """Whether no step is synchronous."""
        return self.begin_step == 0 and not self.schedule.is_always_synchronous

    @property
    def has_fragments(self) -> bool:
        """Whether the parameters are averaged in parts, if there are enough of them."""
        return self.num_fragments != 1

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

    def _check_delay(self) -> None:
        delay, mixing = self.delay_steps, self.mixing
        is_below = isinstance(delay, int) and is_count(delay, 0) and delay < self.k_steps
        if not is_below and delay != AUTO:
            raise ConfigurationError(
                f"delay_steps={delay!r} with k_steps={self.k_steps}: give an integer from 0 to k_steps - 1, or "
                f"{AUTO!r}."
            )
        if mixing is not None:
            if not is_number(mixing) or not 0 <= mixing <= 1:
                raise ConfigurationError(f"mixing={mixing!r}: give a number in [0, 1], or None.")
            if not delay:
                raise ConfigurationError(f"mixing={mixing!r} is for averages that are applied later: give delay_steps.")
