"""Ranks with different or unknown numbers of batches, where weights are averaged: all take those of the longest epoch.

A rank whose data have ended begins them anew, until those of all ranks have: then all end the epoch with the same
batch, and nothing else (steps, schedulers, validation, checkpoints) need know that the data differ. With lengths that
are known on all ranks that is the last batch of the longest epoch. Where `len()` of the data is not known (an
`IterableDataset`), a rank finds out when it begins its last batch; it says so in the status of the next average, or of
the next synchronous step, with which the epoch ends if it is the last rank to say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.sync.local import LocalSync


class Uneven:
    """Lets all ranks take the same number of batches."""

    def __init__(self) -> None:
        self._is_uneven = False  # equal on all ranks

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Find out whether the numbers of batches differ, and take the largest; for each loading of the data.

        Collective: all ranks, blocking.

        In place:
            Lightning's number of batches, where it validates, and the state of the schedulers, which may have been
            made for the number of steps of this rank.

        Raises:
            ConfigurationError: on all ranks; it would not be known when the data end.
        """
        fetcher: Any = trainer.fit_loop._data_fetcher
        # Not the loop's own number, which is replaced below: a tuner starts the training twice.
        lengths = gather(math.inf if fetcher.length is None else fetcher.length, "number of batches")
        longest = max(lengths)
        self._is_uneven = min(lengths) < longest or longest == math.inf
        if not self._is_uneven:
            return
        counts = " and ".join("an unknown number of" if n == math.inf else f"{n}" for n in sorted(set(lengths)))
        if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
            raise ConfigurationError(
                "training_step(dataloader_iter) does not show which batch is the last one, and the ranks have "
                f"{counts} batches. Take the batch as argument, or make the data even."
            )
        trainer.fit_loop.max_batches = longest
        if trainer.val_check_batch is not None and isinstance(trainer.val_check_interval, float):
            # Of an unknown number of batches Lightning takes 1.0 alone.
            interval = longest * trainer.val_check_interval
            trainer.val_check_batch = interval if interval == math.inf else max(1, int(interval))
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        states = [scheduler.state_dict() for scheduler in schedulers]
        states = trainer.strategy.broadcast(states, src=lengths.index(longest))
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        rank_zero_info(
            f"{type(trainer.strategy).__name__}: the ranks have {counts} batches: those whose data have ended begin "
            "them anew, until the data of all ranks have ended."
        )

    def begin_epoch(self, trainer: pl.Trainer, workers: Sequence[LocalSync]) -> None:
        """Begin an epoch, for which the data may have been loaded anew.

        Collective: as `begin_training`, if they have.
        """
        is_new = trainer.fit_loop._last_train_dl_reload_epoch == trainer.current_epoch
        if is_new and trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:  # type: ignore[attr-defined]
            self.begin_training(trainer)
        for worker in workers:
            worker.begin_epoch()

    def begin_batch(self, trainer: pl.Trainer, workers: Sequence[LocalSync]) -> None:
        """Note that the data of this rank end with this batch; Lightning ends the epoch when all ranks do."""
        progress = _progress(trainer)
        if self._is_uneven and progress.is_last_batch and progress.current.ready < trainer.num_training_batches:
            progress.is_last_batch = False
            for worker in workers:
                worker.has_ended = True

    def end_step(self, trainer: pl.Trainer, worker: LocalSync) -> None:
        """End the epoch with this batch, if the data of all ranks have ended."""
        if self._is_uneven and worker.all_have_ended:
            _progress(trainer).is_last_batch = True

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Begin the data anew, if they have ended before the epoch.

        Raises:
            ConfigurationError: on this rank; there are none.
        """
        fetcher: Any = trainer.fit_loop._data_fetcher
        if not self._is_uneven or not fetcher.done or trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            return
        iter(fetcher)
        if fetcher.done or (fetcher.length is None and not fetcher.batches):
            raise ConfigurationError(
                "The training data of this rank have ended before those of other ranks, and cannot be read a second "
                "time. Let `iter` of the data begin anew, or set Trainer(limit_train_batches=...)."
            )

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Raise ConfigurationError, on this rank, if it had no batch: the others wait for it."""
        if self._is_uneven and not _progress(trainer).current.ready:
            raise ConfigurationError(
                "This rank has no batch in this epoch, and others have some. Divide the data anew."
            )


def _progress(trainer: pl.Trainer) -> Any:
    """Return Lightning's counts of batches in this epoch, and whether the present one is the last."""
    return trainer.fit_loop.epoch_loop.batch_progress
