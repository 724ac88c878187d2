"""What is asked of every schedule, and the schedules by the names that they have in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_lowbw.errors import ConfigurationError

SCHEDULES: dict[str, type[Schedule]] = {}


@dataclass(frozen=True)
class Schedule:
    """When the ranks communicate: a frozen dataclass that answers what follows, and is registered as it is defined.

    What is not answered is as in a schedule that exchanges gradients in every step from the first one on.

    Attributes:
        key: its name in a file, ``{every: step}``; the argument of the class statement.
        averages_weights: whether ranks step alone and average their weights; else they exchange gradients.
    """

    key: ClassVar[str]
    averages_weights: ClassVar[bool] = False

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:  # else it is a user's own, of one of these
            cls.key = key
            SCHEDULES[key] = cls

    @property
    def exchanges_gradients(self) -> bool:
        """Whether gradients are ever exchanged between all ranks."""
        return not self.averages_weights

    @property
    def is_always_synchronous(self) -> bool:
        """Whether it averages weights after every step, so that gradients are averaged instead, as in DDP."""
        return False

    @property
    def acts_alone(self) -> bool:
        """Whether it changes the training of one rank alone, which has nobody to communicate with."""
        return False

    @property
    def is_auto(self) -> bool:
        """Whether its numbers are still to be chosen, by a Lightning strategy that times the first steps."""
        return False

    @property
    def budget(self) -> float:
        """For this choice, the fraction of a step that its exchange may take."""
        return 0.05

    @property
    def pretrained(self) -> bool:
        """For this choice, whether the weights are trained already."""
        return False

    @property
    def begin_step(self) -> int | float:
        """The last step that is DDP's, as `EveryK` has it."""
        return 0

    @property
    def end_of_warm_up(self) -> int:
        """The step from which on all exchanges are of the same size."""
        return 0

    @property
    def steps_to_first(self) -> int:
        """The steps from there to the first exchange that is not DDP's."""
        return 1

    @property
    def stairs(self) -> tuple[float, ...]:
        """The sparsity of each stair of a warm-up; none where it says nothing about how much is sent."""
        return ()

    def density(self, step: int, otherwise: float = 1.0) -> float:
        """Return the fraction of elements sent at optimizer step `step` (0-based); 1.0 while the exchange is dense.

        Args:
            step: optimizer steps completed.
            otherwise: the payload's own density, where there are no stairs.
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
        """Steps beside which an exchange is in progress."""
        return 0

    def steps_to_loss(self, num_participants: int, num_steps: float) -> float | None:
        """Return the optimizer steps to DDP's loss, times DDP's, where weights are averaged; None: not measured.

        Args:
            num_participants: N.
            num_steps: of DDP.
        """
        return None

    def check_replacement(self, before: Schedule) -> None:
        """Check that the schedule can take the place of another one, for which a worker has been made.

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
            keeps_start: whether the payload sends changes, for which the last consensus is kept.
        """
        return 0
