"""Times the first optimizer steps of a fit, and says from these what is known of the run."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch.optim import Adam, AdamW

from lightning_lowbw.engine.auto import Run
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.strategies.advice import num_steps_of, steps_per_epoch_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_lowbw.strategies.strategy import Strategy

NUM_UNTIMED, NUM_TIMED = 2, 4  # optimizer steps; the first ones allocate
NUM_STEPS = 1 + NUM_UNTIMED + NUM_TIMED  # of the first only the end is known


class StepTimes:
    """The times of the first optimizer that steps; of several, the others step between two of its steps.

    Args:
        strategy: whose steps these are.

    Attributes:
        is_timing: whether steps are timed now; then the host waits for a CUDA device after backward.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.is_timing = False
        self._restart()

    def _restart(self) -> None:
        self._worker: Worker | None = None  # whose steps are timed
        self._num_steps = self._first_step = self._first_batch = 0
        self._last: tuple[float, float] | None = None  # the clock, and the seconds waited so far
        self._times: list[tuple[float, float]] = []  # seconds of a step, and those without what was waited

    def begin_training(self, trainer: pl.Trainer, *, is_timing: bool) -> None:
        """Begin to count steps, and to time them if `is_timing`."""
        self._restart()
        self.is_timing = is_timing
        self._first_step = trainer.global_step
        self._first_batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def counts(self, worker: Worker) -> bool:
        """Count a step; return whether it is one of the optimizer that is timed."""
        self._worker = self._worker or worker
        self._num_steps += worker is self._worker
        return worker is self._worker

    def restart_clock(self) -> None:
        """Do not count the time since the last step, such as validation or a checkpoint."""
        self._last = (time.perf_counter(), self._strategy.ledger.exposed_s)

    def end_step(self) -> bool:
        """Time the step that has ended; return whether it is the last one that is timed."""
        if not self.is_timing:
            return False
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)
        before = self._last
        self.restart_clock()
        if before is None or self._last is None:
            return False
        seconds, waited = (now - then for now, then in zip(self._last, before, strict=True))
        self._times.append((seconds, seconds - waited))
        self.is_timing = len(self._times) < NUM_UNTIMED + NUM_TIMED
        return not self.is_timing

    def medians(self) -> tuple[float, float]:
        """Return the seconds of a step without communication, and of a dense one, on this rank."""
        dense_s, step_s = (statistics.median(times) for times in zip(*self._times[NUM_UNTIMED:], strict=True))
        return max(step_s, 1e-6), dense_s

    def run(self, trainer: pl.Trainer, *, is_pretrained: bool) -> Run:
        """Return what is known of the run, after a step of the optimizer that is timed; on this rank."""
        worker = self._worker
        assert worker is not None
        total, steps_per_epoch = self._num_steps_of(trainer), steps_per_epoch_of(trainer)
        max_epochs = trainer.max_epochs or 0
        if math.isnan(total) and math.isinf(trainer.num_training_batches) and trainer.current_epoch and max_epochs > 0:
            steps_per_epoch = max(1, trainer.global_step // trainer.current_epoch)  # learnt from those that have ended
            total = steps_per_epoch * max_epochs
        num_done = trainer.global_step + 1  # it does not count this one yet
        share = self._num_steps / max(1, num_done - self._first_step)  # of the Trainer's steps, that of this optimizer
        left = (total - num_done) * min(1.0, share)
        return Run(
            num_done=worker.step,
            num_steps=worker.step + max(0, int(left)) if math.isfinite(left) else None,
            steps_per_epoch=steps_per_epoch,
            is_pretrained=is_pretrained,
            is_adam=isinstance(worker.optimizer, (Adam, AdamW)),
        )

    def _num_steps_of(self, trainer: pl.Trainer) -> float:
        """Return the steps of the run, of all optimizers, as `trainer.global_step` counts them."""
        total, most = num_steps_of(trainer), trainer.max_steps
        if trainer.lightning_module.automatic_optimization or total == most:
            return total
        # Lightning counts batches, with any number of steps in each.
        num_batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1 - self._first_batch
        total *= (trainer.global_step + 1 - self._first_step) / max(1, num_batches)
        return min(total, most) if most >= 0 else total
