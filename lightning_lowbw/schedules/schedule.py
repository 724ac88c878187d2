"""The interface of schedules, and the schedules by their names in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_lowbw.errors import ConfigurationError

SCHEDULES: dict[str, type[Schedule]] = {}


@dataclass(frozen=True)
class Schedule:
    """When the ranks communicate: the base of frozen dataclasses, which are registered when they are defined.

    By default a schedule exchanges gradients in every step, from the first step on.

    Attributes:
        key: the name in a file, ``{every: step}``; an argument of the class statement.
        averages_weights: whether ranks step alone and average their weights; else they exchange gradients.
        k_steps: steps from one exchange to the next.
        delay_steps: steps during which an exchange is in progress.
        outer: the outer optimizer of averages.
        budget, pretrained: for the choice of a schedule that `is_auto`, as in `EveryStep`.
    """

    key: ClassVar[str]
    averages_weights = False
    k_steps = 1
    delay_steps = 0
    outer = "none"
    budget = 0.05
    pretrained = False

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:  # else a user's subclass of a schedule
            cls.key = key
            SCHEDULES[key] = cls

    @property
    def is_always_synchronous(self) -> bool:
        """Whether weights would be averaged after every step, so that gradients are averaged instead, as in DDP."""
        return False

    @property
    def is_auto(self) -> bool:
        """Whether a Lightning strategy, which times the first steps, still has to choose the numbers."""
        return False

    @property
    def begin_step(self) -> int | float:
        """The last step that is DDP's, as in `EveryK`."""
        return 0

    @property
    def stairs(self) -> tuple[float, ...]:
        """The sparsity of each stair of a warm-up; empty if the payload alone decides how much is sent."""
        return ()

    def density(self, step: int, otherwise: float = 1.0) -> float:
        """Return the fraction of elements sent at optimizer step `step` (0-based); 1.0 while the exchange is dense.

        Args:
            step: optimizer steps completed.
            otherwise: the payload's own density, for a schedule without stairs.
        """
        return otherwise

    def check_replacement(self, before: Schedule) -> None:
        """Check that this schedule can replace the schedule for which a worker was made.

        Raises:
            ConfigurationError: it cannot.
        """
        if self.averages_weights != before.averages_weights:
            raise ConfigurationError(
                f"{self} in place of {before}: averages of weights and exchanges of gradients cannot replace one "
                "another during a training. Attach the method anew."
            )
