"""The number of local steps that hide an average: given by the user, or measured."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.when.every_k import AUTO
from lightning_lowbw.when.fragments import hiding_steps

if TYPE_CHECKING:
    from lightning_lowbw.engine.replicas import ReplicaWorker

_logger = logging.getLogger(LOGGER)


class Delay:
    """The steps that hide an average; with "auto", chosen once from measured times.

    Args:
        worker: whose averages are hidden.

    Attributes:
        chosen: tau, once it has been measured.
        average_s: the seconds of an average, by fragment.
    """

    def __init__(self, worker: ReplicaWorker) -> None:
        self._worker = worker
        self.chosen: int | None = None
        self.average_s: dict[int, float] = {}
        self._waited: set[int] = set()  # fragments whose first average has paid for connections and allocations
        self._step_s = self._last_s = 0.0  # of the local steps since the last average; the end of the last one

    @property
    def steps(self) -> int:
        """The number of local steps that hide an average; 0 while "auto" measures."""
        delay = self._worker.when.delay_steps
        return delay if isinstance(delay, int) else self.chosen or 0

    @property
    def _measures(self) -> bool:
        return self._worker.when.delay_steps == AUTO and self.chosen is None

    def restart(self) -> None:
        """Begin to time local steps anew."""
        self._step_s, self._last_s = 0.0, time.perf_counter()

    def begin_after_step(self) -> None:
        """Add the time since the last step, after a local one; the time that follows does not belong to a step."""
        if self._measures and self._worker.device.type == "cuda":  # what has only been launched takes no time yet
            torch.cuda.current_stream(self._worker.device).synchronize()
        self._step_s += time.perf_counter() - self._last_s

    def end_after_step(self) -> None:
        """Begin to time the next step."""
        self._last_s = time.perf_counter()

    @property
    def step_s(self) -> float:
        """The mean time of the local steps since the last average."""
        return self._step_s / max(self._worker.steps_since_average, 1)

    def choose(self, fragment: int, average_s: float, step_s: float) -> None:
        """Keep the time of a blocking average, but the first of a fragment here; choose tau when each has been timed.

        Collective: all ranks, once; an all-reduce of two numbers.

        Args:
            fragment: its number.
            average_s: the seconds of the average.
            step_s: the mean time of the local steps before it.
        """
        worker, peers = self._worker, self._worker.peers
        if not self._measures:
            return
        if fragment not in self._waited:
            self._waited.add(fragment)
            return
        self.average_s[fragment] = average_s
        if len(self.average_s) < len(worker.fragments):
            return
        # The last rank waits for no other: its time is that of the network. All ranks use the time of the slowest step.
        times = torch.tensor([max(self.average_s.values()), -step_s], dtype=torch.float32, device=worker.device)
        peers.all_reduce_(times, dist.ReduceOp.MIN)
        average_s, step_s = float(times[0]), -float(times[1])
        self.chosen = hiding_steps(average_s, step_s, worker.k_steps)
        if peers.rank == 0:
            _logger.info(
                "An average takes %.3g s, a local step %.3g s: it is hidden behind %d steps.",
                *(average_s, step_s, self.chosen),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured."""
        return {"chosen": self.chosen, "average_s": dict(self.average_s)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.chosen, self.average_s = state["chosen"], dict(state["average_s"])
        self.restart()
