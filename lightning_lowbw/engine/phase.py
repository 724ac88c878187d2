"""Where a run of local SGD is in its schedule: whether steps are local yet, and the period that is in use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.when.adaptive import FIRST_LR_DECAY, RELATIVE_CHANGE, Period

if TYPE_CHECKING:
    from lightning_lowbw.engine.replicas import ReplicaWorker

_logger = logging.getLogger(LOGGER)


class Phase:
    """Where one worker is in the schedule of its averages; equal on all ranks, known without communication.

    Args:
        worker: whose schedule, step and optimizer these are.
    """

    def __init__(self, worker: ReplicaWorker) -> None:
        self._worker = worker
        self._local_since: int | None = None  # the step from which on it is local, once that has come
        self._period: Period | None = None
        self._highest_lr = 0.0

    @property
    def begin(self) -> int | None:
        """The first local step; None while that is not known."""
        begin = self._worker.when.begin_step
        return self._local_since if self._local_since is not None else begin if isinstance(begin, int) else None

    @property
    def is_local(self) -> bool:
        """Whether the coming step is after the synchronous ones."""
        begin, is_synchronous = self.begin, self._worker.when.schedule.is_always_synchronous
        return not is_synchronous and begin is not None and self._worker.step >= begin

    @property
    def k_steps(self) -> int:
        """The period of local steps."""
        when = self._worker.when
        return when.k_steps if when.rule == "fixed" else (self._period or when.schedule.first()).k

    @property
    def lr(self) -> float:
        """The largest learning rate of the param groups; 1 where there is none."""
        return max((float(group["lr"]) for group in self._worker.optimizer.param_groups if "lr" in group), default=1.0)

    def begin_local(self) -> None:
        """Keep the step from which on steps are local, whatever becomes of the schedule."""
        self._local_since = self.begin

    def note_lr(self) -> bool:
        """Return whether the learning rate is lower than it has been; on this rank."""
        lr = self.lr
        has_decayed = 0.0 < lr < self._highest_lr * (1 - RELATIVE_CHANGE)
        self._highest_lr = max(lr, self._highest_lr)
        return has_decayed

    def lr_has_decayed(self) -> None:
        """Begin the local steps, if they wait for this: the learning rate has decayed on some rank."""
        if self._worker.when.begin_step == FIRST_LR_DECAY and self.begin is None:
            self._local_since = self._worker.step + 1  # this step's gradients are the mean already
            if self._worker.peers.rank == 0:
                _logger.info("The learning rate has fallen: synchronous up to step %d, then local.", self._local_since)

    def adapt(self, lr: float, loss: float, has_losses: bool) -> None:
        """Choose the period after an average, by the rule.

        Args:
            lr: mean over ranks.
            loss: mean since the last average, over the ranks that have one.
            has_losses: whether all ranks have one that should.

        Raises:
            ConfigurationError: on all ranks; the rule needs a loss.
        """
        rule, schedule = self._worker.when.rule, self._worker.when.schedule
        if rule == "fixed":
            return
        if rule != "qsr" and not has_losses:
            raise ConfigurationError(
                f"rule={rule!r} chooses k by the training loss, and there was none: return it from "
                "training_step, or call worker.observe_loss(loss) in a loop of your own; or use rule='qsr'."
            )
        self._period = schedule.next(self._period or schedule.first(), lr, loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        period = None if self._period is None else asdict(self._period)
        return {"local_since": self._local_since, "highest_lr": self._highest_lr, "period": period}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, among other values."""
        self._local_since, self._highest_lr = state["local_since"], state["highest_lr"]
        self._period = None if state["period"] is None else Period(**state["period"])
