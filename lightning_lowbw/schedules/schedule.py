"""The interface of schedules, and the schedules by their names in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_lowbw.errors import ConfigurationError

SCHEDULES: dict[str, type[Schedule]] = {}


@dataclass(frozen=True)
class Schedule:
    """When the ranks communicate: the base of frozen dataclasses, which are registered when they are defined.

    The defaults are those of a schedule that exchanges gradients in every step from the first step on.

    Attributes:
        key: the name in a file, ``{every: step}``; an argument of the class statement.
        averages_weights: whether ranks step alone and average their weights; else they exchange gradients.
    """

    key: ClassVar[str]
    averages_weights: ClassVar[bool] = False

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:  # else a user's subclass of a schedule
            cls.key = key
            SCHEDULES[key] = cls

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients are ever exchanged between all ranks."""
        return not self.averages_weights

    @property
    def is_always_synchronous(self) -> bool:
        """Whether weights would be averaged after every step, so that gradients are averaged instead, as in DDP."""
        return False

    @property
    def acts_alone(self) -> bool:
        """Whether the schedule changes the training of a single rank, without communication."""
        return False

    @property
    def is_auto(self) -> bool:
        """Whether a Lightning strategy, which times the first steps, still has to choose the numbers."""
        return False

    @property
    def budget(self) -> float:
        """For the choice: the fraction of a step that an exchange may take."""
        return 0.05

    @property
    def pretrained(self) -> bool:
        """For the choice: whether the weights are trained already."""
        return False

    @property
    def begin_step(self) -> int | float:
        """The last step that is DDP's, as in `EveryK`."""
        return 0

    @property
    def end_of_warm_up(self) -> int:
        """The step from which on all exchanges have the same size."""
        return 0

    @property
    def steps_to_first(self) -> int:
        """The steps from `begin_step` to the first exchange that is not DDP's."""
        return 1

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

    def is_dense(self, step: int) -> bool:
        """Return whether the exchange of a step is DDP's, whatever the payload is."""
        return False

    @property
    def k_steps(self) -> int:
        """Steps from one exchange to the next."""
        return 1

    @property
    def delay_steps(self) -> int:
        """Steps during which an exchange is in progress."""
        return 0

    def steps_to_loss(self, num_participants: int, num_steps: float) -> float | None:
        """Return the optimizer steps to DDP's loss, divided by DDP's, for averages of weights; None: not measured.

        Args:
            num_participants: N.
            num_steps: the steps of DDP.
        """
        return None

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

    def num_copies(self, *, keeps_start: bool) -> int:
        """Return how many copies of the weights each rank keeps; for the cost model.

        Args:
            keeps_start: whether the payload sends changes, for which the anchor is kept on the device.
        """
        return 0
