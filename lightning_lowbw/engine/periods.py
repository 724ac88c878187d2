"""Where a run of local SGD is in its schedule: local or not yet, the period, and how many steps hide an average."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.when.every_k import AUTO, FIRST_LR_DECAY, RELATIVE_CHANGE, EveryK, Period, hiding_steps
from lightning_lowbw.where.peers import Peers

_logger = logging.getLogger(LOGGER)
LOSS_DECAY = 0.9  # of the weight of a step, with each step after it


class Phase:
    """Whether steps are local, and the period; equal on all ranks, known without communication."""

    def __init__(self) -> None:
        self._local_since: int | None = None  # the step from which on steps are local, once that has come
        self._period: Period | None = None
        self._highest_lr = 0.0

    def _begin(self, when: EveryK) -> int | None:
        """Return the first local step; None while that is not known."""
        return (
            self._local_since
            if self._local_since is not None or not isinstance(when.begin_step, int)
            else (when.begin_step)
        )

    def is_local(self, when: EveryK, step: int) -> bool:
        """Return whether the coming step is after the synchronous ones."""
        begin = self._begin(when)
        return not when.schedule.is_always_synchronous and begin is not None and step >= begin

    def k_steps(self, when: EveryK) -> int:
        """Return the period of local steps."""
        return when.k_steps if when.rule == "fixed" else (self._period or when.schedule.first()).k

    def begin_local(self, when: EveryK) -> None:
        """Keep the step from which on steps are local, whatever becomes of the schedule."""
        self._local_since = self._begin(when)

    def has_decayed(self, lr: float) -> bool:
        """Note a learning rate; return whether it is lower than it has been; on this rank."""
        has_decayed = 0.0 < lr < self._highest_lr * (1 - RELATIVE_CHANGE)
        self._highest_lr = max(lr, self._highest_lr)
        return has_decayed

    def begin_after_decay(self, when: EveryK, step: int) -> bool:
        """Begin the local steps after this one, if they wait for this: the learning rate has decayed on some rank."""
        if when.begin_step != FIRST_LR_DECAY or self._local_since is not None:
            return False
        self._local_since = step + 1  # this step's gradients are the mean already
        return True

    def adapt(self, when: EveryK, lr: float, loss: float, *, has_losses: bool) -> None:
        """Choose the period after an average, by the rule.

        Args:
            lr: mean over ranks.
            loss: mean since the last average, over the ranks that have one.
            has_losses: whether all ranks have one that should.

        Raises:
            ConfigurationError: on all ranks; the rule needs a loss.
        """
        if when.rule == "fixed":
            return
        if when.rule != "qsr" and not has_losses:
            raise ConfigurationError(
                f"rule={when.rule!r} chooses k by the training loss, and there was none: return it from "
                "training_step, or call worker.observe_loss(loss) in a loop of your own; or use rule='qsr'."
            )
        self._period = when.schedule.next(self._period or when.schedule.first(), lr, loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        period = None if self._period is None else asdict(self._period)
        return {"local_since": self._local_since, "highest_lr": self._highest_lr, "period": period}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, among other values."""
        self._local_since, self._highest_lr = state["local_since"], state["highest_lr"]
        self._period = None if state["period"] is None else Period(**state["period"])


class RunningLoss:
    """A mean of losses since the last average, in which late steps weigh more. Waits for no device.

    Example:
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
        """Return the mean; None where none has been observed."""
        return None if self._total is None else self._total / self._weight

    def clear(self) -> None:
        """Begin anew, with the next step."""
        self._total, self._weight = None, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return it on the CPU."""
        return {"total": None if self._total is None else self._total.cpu().clone(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state_dict` returned."""
        total, self._weight = state["total"], state["weight"]
        self._total = None if total is None else total.to(device)


class Delay:
    """How many local steps hide an average; with "auto", chosen once from measured times.

    Attributes:
        chosen: tau, once it has been measured.
        average_s: the seconds of an average, by fragment.
    """

    def __init__(self) -> None:
        self.chosen: int | None = None
        self.average_s: dict[int, float] = {}
        self._waited: set[int] = set()  # fragments whose first average has paid for connections and allocations
        self._step_s = self._last_s = 0.0  # of the local steps since the last average; the end of the last one

    def steps(self, when: EveryK) -> int:
        """Return tau; 0 while "auto" measures."""
        return when.delay_steps if isinstance(when.delay_steps, int) else self.chosen or 0

    def measures(self, when: EveryK) -> bool:
        """Return whether steps and averages are timed."""
        return when.delay_steps == AUTO and self.chosen is None

    def restart(self) -> None:
        """Begin to time local steps anew."""
        self._step_s, self._last_s = 0.0, time.perf_counter()

    def begin_after_step(self, device: torch.device, *, measures: bool) -> None:
        """Add the time since the last step, after a local one; the time that follows does not belong to a step."""
        if measures and device.type == "cuda":  # what has only been launched takes no time yet
            torch.cuda.current_stream(device).synchronize()
        self._step_s += time.perf_counter() - self._last_s

    def end_after_step(self) -> None:
        """Begin to time the next step."""
        self._last_s = time.perf_counter()

    def step_s(self, num_steps: int) -> float:
        """Return the mean time of the local steps since the last average."""
        return self._step_s / max(num_steps, 1)

    def choose(
        self,
        fragment: int,
        num_fragments: int,
        k_steps: int,
        average_s: float,
        step_s: float,
        peers: Peers,
        device: Any,
    ) -> None:
        """Keep the time of a blocking average, but the first of a fragment here; choose tau when each has been timed.

        Collective: all ranks, once; an all-reduce of two numbers.

        Args:
            fragment: its number.
            num_fragments: how many there are.
            k_steps: the period.
            average_s: the seconds of the average.
            step_s: the mean time of the local steps before it.
        """
        if fragment not in self._waited:
            self._waited.add(fragment)
            return
        self.average_s[fragment] = average_s
        if len(self.average_s) < num_fragments:
            return
        # The last rank waits for no other: its time is that of the network. All ranks use the time of the slowest step.
        times = torch.tensor([max(self.average_s.values()), -step_s], dtype=torch.float32, device=device)
        peers.all_reduce_(times, dist.ReduceOp.MIN)
        average_s, step_s = float(times[0]), -float(times[1])
        self.chosen = hiding_steps(average_s, step_s, k_steps)
        if peers.rank == 0:
            _logger.info(
                "An average takes %.3g s, a local step %.3g s: it is hidden behind %d steps.",
                *(average_s, step_s, self.chosen),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured."""
        return {"chosen": self.chosen, "average_s": dict(self.average_s)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.chosen, self.average_s = state["chosen"], dict(state["average_s"])
        self.restart()
