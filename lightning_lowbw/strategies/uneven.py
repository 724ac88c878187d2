"""Ranks with different numbers of batches: those that are out of data take part in the averages of the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.ends import ends_epoch, is_over
from lightning_lowbw.strategies.quiet import is_timed
from lightning_lowbw.when.every_k import EveryK

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy

Policy = Literal["finish", "stop"]


class Uneven:
    """Weights replicas by samples, and ends the epochs of ranks with different numbers of batches together.

    Args:
        strategy: the strategy.
        policy: for ranks with more batches than others: "finish" them, or "stop" at the next average.
        on_average: called with the worker after each average.

    Attributes:
        is_uneven: whether the numbers of batches are known, and differ; equal on all ranks.
        is_unknown: whether a rank does not know its number of batches; equal on all ranks. See `Ends`.
        has_ended_epoch: whether this rank's epoch is over, and those of the others too.

    Raises:
        ConfigurationError: the policy is none of these.
    """

    def __init__(self, strategy: Strategy, policy: Policy, on_average: Callable[[ReplicaWorker], None]) -> None:
        if policy not in get_args(Policy):
            raise ConfigurationError(f"uneven={policy!r}: choose one of {', '.join(get_args(Policy))}.")
        self._strategy, self.policy, self._on_average = strategy, policy, on_average
        self.is_uneven = self.is_unknown = self.has_ended_epoch = False
        self._val_check_batch: float | None = None  # the trainer's, in an epoch that was cut short

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self.is_uneven = self.is_unknown = self.has_ended_epoch = False
        self._val_check_batch = None

    # Which data -------------------------------------------------------------------------------------------------

    def compare_data(self, trainer: pl.Trainer, workers: list[ReplicaWorker]) -> None:
        """Find out whether all ranks have the same number of batches.

        Collective: all ranks, blocking.

        Raises:
            ConfigurationError: on all ranks; the numbers differ, and a setting does not allow it.
        """
        lengths = lengths_of_data(trainer)
        self.is_unknown = math.inf in lengths
        self.is_uneven = len(set(lengths)) > 1 and not self.is_unknown
        for worker in workers:
            worker.weighs_samples = self.is_uneven
        if not self.is_uneven:
            return
        shown = ", ".join(f"{length:.0f}" for length in lengths)
        obstacle = self._obstacle(trainer, lengths)
        if obstacle is not None:
            raise ConfigurationError(
                f"The ranks have different numbers of batches ({shown}), and {obstacle}. Use a DistributedSampler or "
                "Trainer(limit_train_batches=...) for even data."
            )
        rank_zero_info(
            f"{type(self._strategy).__name__}: the ranks have {shown} batches; those with more {self.policy}, replicas "
            "are weighted by samples and averaged at the end of each epoch."
        )

    def _obstacle(self, trainer: pl.Trainer, lengths: list[float]) -> str | None:
        """Return the setting that does not allow uneven data."""
        method = self._strategy.method
        when, topology = method.when, self._strategy.groups.gradients.topology
        assert isinstance(when, EveryK)
        if topology is not None and any(len({lengths[rank] for rank in node}) > 1 for node in topology.nodes):
            return "the ranks of a node step together"
        if len(self._strategy.workers) > 1 or not trainer.lightning_module.automatic_optimization:
            return "with several optimizers or manual optimization ranks cannot wait for each other"
        if method.sends_changes or when.delay_steps:
            return "value_dtype, compression and delay_steps require equal weights of the ranks"
        if when.has_fragments:
            return "num_fragments requires all ranks at each of its steps"
        if not isinstance(when.begin_step, int):
            return f"begin_step={when.begin_step!r} is not known in advance; give a number of steps"
        if trainer.val_check_batch not in (trainer.num_training_batches, math.inf):
            return "validation in the middle of an epoch needs all of them"
        num_steps = min(lengths) / trainer.accumulate_grad_batches
        if when.schedule.is_always_synchronous or when.begin_step >= num_steps:
            return "all steps of the shortest rank's first epoch are synchronous"
        return None

    def check_callbacks(self, callbacks: list[Callback]) -> None:
        """Raise ConfigurationError where a callback needs all ranks in the middle of an epoch."""
        for callback in callbacks if self.is_uneven else ():
            saves_by_step = isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps > 0
            if is_timed(callback) or saves_by_step:
                raise ConfigurationError(
                    f"{type(callback).__name__} by time or by step needs all ranks in mid-epoch, and some have fewer "
                    "batches than others. Let it act at the end of an epoch, or make the data even."
                )

    # The epoch --------------------------------------------------------------------------------------------------

    def begin_epoch(self, trainer: pl.Trainer, workers: list[ReplicaWorker]) -> None:
        """Undo what has cut the last epoch short."""
        self.has_ended_epoch = False
        if trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:  # type: ignore[attr-defined]
            self.compare_data(trainer, workers)
        if self._val_check_batch is not None:
            trainer.val_check_batch, self._val_check_batch = self._val_check_batch, None

    def count(self, batch: Any, workers: list[ReplicaWorker]) -> None:
        """Add the samples of a batch to this rank's weight."""
        for worker in workers if self.is_uneven or self.is_unknown else ():
            worker.num_samples += _num_samples(batch)

    def after_average(self, worker: ReplicaWorker) -> None:
        """End the epoch or the training if the last average says that ranks are out of data or at the end."""
        trainer = self._strategy.trainer
        if self.is_uneven and worker.num_finished and self.policy == "stop":
            self._end_epoch(trainer)
        if worker.is_over:
            trainer.should_stop = True

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        """Make the batch in progress the last one of this epoch, and validate after it if that is due then."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        progress.is_last_batch = True
        if trainer.val_check_batch == trainer.num_training_batches and self._val_check_batch is None:
            self._val_check_batch = trainer.val_check_batch
            trainer.val_check_batch = progress.current.ready

    def end_batch(self, trainer: pl.Trainer) -> None:
        """At the end of this rank's epoch: take part in the averages of the others until all are there.

        Collective: all ranks, at the ends of their epochs.
        """
        if not self.is_uneven:
            return
        if ends_epoch(trainer):
            self.finish_epoch(is_over(trainer))

    def finish_epoch(self, is_over: bool) -> None:
        """Take part in averages until all ranks have ended their epochs, where data are uneven and this has not been.

        Collective: all ranks.

        Args:
            is_over: whether this rank is at the end of the training.
        """
        if not self.is_uneven or self.has_ended_epoch:
            return
        (worker,) = self._strategy.workers
        assert isinstance(worker, ReplicaWorker)
        if not worker.is_local:
            raise ConfigurationError(
                f"This rank is out of data after {worker.step} optimizer steps, and the first "
                f"{worker.when.begin_step} are synchronous: give a smaller begin_step."
            )
        worker.num_finished = 0
        while worker.num_finished < self._strategy.world_size:
            if worker.stop_agreed:  # all ranks end after the average with the request, at any point of their epochs
                raise SIGTERMException
            worker.average(finished=True, over=is_over)
            self._on_average(worker)
        self.has_ended_epoch = True

    def check_view(self, trainer: pl.Trainer) -> None:
        """Raise ConfigurationError where the consensus is to be shown in the middle of an epoch of uneven data."""
        if self.is_uneven and not self.has_ended_epoch and not trainer.sanity_checking:
            raise ConfigurationError(
                "Validation and checkpoints in the middle of an epoch need all ranks, and some have fewer batches "
                "than others: do both at the end of the epoch."
            )


def lengths_of_data(trainer: pl.Trainer) -> list[float]:
    """Return the number of batches of each rank's epoch; infinity where it is not known.

    Collective: all ranks, blocking.
    """
    lengths: list[float] = [0.0] * trainer.world_size
    dist.all_gather_object(lengths, float(trainer.num_training_batches))
    return lengths


def _num_samples(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # nothing in it has a size
        return 1
