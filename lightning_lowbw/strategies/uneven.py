"""Ranks with different or unknown numbers of batches: before they communicate, they exchange which of them have ended.

Where `len()` of the training data is not known (an `IterableDataset`), the last batch of a rank is known to be the last
only when it begins. Until a rank has ended they train as on data of equal, known lengths, with the same bits. Before
each average, each synchronous step, and each batch that is followed by validation or a checkpoint, the ranks meet: they
exchange one small message with who has ended, who has its last batch, and the number of steps. A rank that has ended
continues to meet the others, and takes part in their averages, until all have ended.

If ranks end at different batches, those with more finish them, weighted by samples, or stop. They stop with the batch
before which they meet, also with "finish", if no rank can continue alone: in a synchronous step; if validation or a
checkpoint follows the batch; and if ranks must have equal weights (a delay, fragments, a payload of changes). Then the
counters, schedulers and learning rates of the rank with the most batches become those of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_lowbw.arguments import check_one_of
from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.strategies.progress import batches_of, counters_of, ends_epoch, is_over, set_counters
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.sync.local import LocalSync

Policy = Literal["finish", "stop"]

# What a rank is about to do when it meets the others; from AVERAGE on it is the number of the worker that averages.
ENDED, EMPTY, SYNCHRONOUS_BATCH, BATCH, VIEW, AVERAGE = range(6)
IN_WORDS = (
    "at the end of its epoch",
    "without a batch",
    "before a synchronous step",
    "before a batch",
    "before validation or a checkpoint",
    "before an average",
)


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank when the ranks meet.

    Attributes:
        what: it is about to do.
        is_last: whether it has no batch after this one.
        is_over: whether it is at the end of the training.
        num_batches: of this epoch, this one included.
        steps: of each worker.
    """

    what: int
    is_last: bool
    is_over: bool
    num_batches: int
    steps: tuple[int, ...]

    def in_words(self) -> str:
        """Return the state in words, for messages."""
        return f"{IN_WORDS[min(self.what, AVERAGE)]} after {' and '.join(str(steps) for steps in self.steps)} steps"


class Uneven:
    """Ends the epochs of ranks together whose numbers of batches differ or are unknown.

    Args:
        policy: what ranks do that have more batches than others: "finish" them, or "stop" when they average next.
        signals: those of other ranks are read after averages in which this rank takes part at the end of its epoch.

    Attributes:
        meets: whether the numbers of batches differ or are unknown, so that the ranks meet; equal on all of them.
        all_are_here: whether no rank has ended before the others, by the last message of this batch.
        has_ended: whether this rank's epoch is over, and those of the others too.

    Raises:
        ConfigurationError: the policy is none of these.
    """

    def __init__(self, policy: Policy, signals: Signals) -> None:
        check_one_of("uneven", policy, get_args(Policy))
        self._policy, self._signals = policy, signals
        self._loader: Any = None  # whose length on this rank is `_num_batches`
        self._num_batches = 0.0
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self.meets = self.has_ended = False
        self.all_are_here = True
        self._trainer: pl.Trainer | None = None
        self._workers: Sequence[LocalSync] = ()
        self._peers: Peers | None = None
        self._can_weigh = self._can_finish = False  # whether replicas may have weights of their own, or go on alone

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Begin an epoch, for which the data may have been loaded anew.

        Collective: as `begin_training`, if they have.
        """
        self.has_ended = False
        is_new = trainer.fit_loop._last_train_dl_reload_epoch == trainer.current_epoch
        if is_new and trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:  # type: ignore[attr-defined]
            assert self._peers is not None
            self.begin_training(trainer, self._workers, self._peers)

    def begin_training(self, trainer: pl.Trainer, workers: Sequence[LocalSync], peers: Peers) -> None:
        """Let the workers meet before they average, where the numbers of batches differ or are unknown.

        Collective: all ranks, blocking.

        Args:
            trainer: of this rank.
            workers: of the optimizers, until the next call.
            peers: all ranks.

        Raises:
            ConfigurationError: on all ranks; it would not be known which batch is the last one.
        """
        self._trainer, self._workers, self._peers = trainer, workers, peers
        loader = trainer.fit_loop._combined_loader
        if loader is not self._loader:  # else `_make_equal` has replaced it: a tuner starts the training twice
            self._loader, self._num_batches = loader, trainer.num_training_batches
        lengths = gather(self._num_batches, "number of batches")  # infinity where it is not known
        longest = max(lengths)
        self.meets = min(lengths) < longest or longest == math.inf
        for worker in workers:
            worker.meet = self._meet_for_average if self.meets else None
            worker.weighs_samples, worker.num_samples = False, 0.0
        if not self.meets:
            return
        self._can_weigh = not any(
            each.method.sends_changes or each.when.delay_steps or each.when.num_fragments != 1 for each in workers
        )
        self._can_finish = self._policy == "finish" and self._can_weigh
        counts = " and ".join("an unknown number of" if n == math.inf else f"{n:.0f}" for n in sorted(set(lengths)))
        if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
            raise ConfigurationError(
                "training_step(dataloader_iter) does not show which batch is the last one, and the ranks have "
                f"{counts} batches, so that they cannot agree on it. Take the batch as argument, or make the data even."
            )
        # Schedulers may have been made for the number of steps of this rank.
        set_counters(trainer, trainer.strategy.broadcast(counters_of(trainer), src=lengths.index(longest)))
        self._make_equal(trainer, longest)
        does = "finish" if self._can_finish else "stop when they average next"
        rank_zero_info(
            f"{type(trainer.strategy).__name__}: the ranks have {counts} batches, so before each average they exchange "
            f"which of them have ended; those with more {does}."
        )

    @staticmethod
    def _make_equal(trainer: pl.Trainer, longest: float) -> None:
        """Let Lightning count on all ranks the batches of the longest epoch: they validate and resume alike.

        A rank with fewer ends its epoch where its loader ends.
        """
        trainer.fit_loop.max_batches = longest if longest == math.inf else int(longest)
        loop = trainer.fit_loop.epoch_loop
        if loop.batch_progress.is_last_batch and getattr(loop, "restarted_on_train_batch_end", False):
            # Resumed after the last batch of an epoch, which may have been shorter: then Lightning begins the next one.
            loop.batch_progress.current.completed = trainer.fit_loop.max_batches  # type: ignore[assignment]
        interval = trainer.val_check_interval
        if trainer.val_check_batch is None or not isinstance(interval, float):
            return
        # Infinity: after the last batch, whichever that is.
        trainer.val_check_batch = math.inf if interval == 1.0 else max(1, int(longest * interval))

    def count(self, batch: Any) -> None:
        """Add the samples of a batch to this rank's weight."""
        for worker in self._workers if self.meets else ():
            worker.num_samples += _num_samples(batch)

    # Meeting ----------------------------------------------------------------------------------------------------

    def _meet(self, what: int, is_over: bool = False) -> list[RankStatus]:
        """Exchange the states of the ranks.

        Collective: all ranks, blocking; 4 + workers integers of each rank.

        Raises:
            DisagreementError: on all ranks; those that train are not at the same point.
            ConfigurationError: on all ranks; one of them has no batch at all, or ended where all are needed.
        """
        assert self._trainer is not None
        assert self._peers is not None
        peers, progress = self._peers, batches_of(self._trainer)
        is_last = progress.is_last_batch or what in (ENDED, EMPTY)
        own = [what, is_last, is_over, progress.current.ready, *(worker.step for worker in self._workers)]
        rows = torch.zeros(peers.num_ranks, len(own), dtype=torch.int64)
        rows[peers.rank] = torch.tensor(own, dtype=torch.int64)
        rows = rows.to(self._workers[0].device)
        # Without an exchange of gradients or weights, it is no step's traffic.
        with nullcontext() if what == SYNCHRONOUS_BATCH or what >= AVERAGE else peers.ledger.paused():
            peers.all_reduce_(rows, dist.ReduceOp.MAX)
        statuses = [
            RankStatus(what, bool(is_last), bool(is_over), num_batches, tuple(steps))
            for what, is_last, is_over, num_batches, *steps in rows.tolist()
        ]
        self._check(statuses)
        if any(status.is_last for status in statuses) and not all(status.is_last for status in statuses):
            self.all_are_here = False
        return statuses

    def _check(self, statuses: list[RankStatus]) -> None:
        whats = {status.what for status in statuses}
        if EMPTY in whats and len(whats) > 1:
            empty = [rank for rank, status in enumerate(statuses) if status.what == EMPTY]
            raise ConfigurationError(
                f"Ranks {empty} have no batch in this epoch, and others have some. Each rank must have at least one. "
                "Divide the data differently."
            )
        going = [status for status in statuses if status.what not in (ENDED, EMPTY)]
        if BATCH in whats:  # the last step of an epoch may come early while others accumulate: it waits for theirs
            going = [status for status in going if not (status.what >= AVERAGE and status.is_last)]
        averaging = {(status.what - AVERAGE, status.steps) for status in going if status.what >= AVERAGE}
        ended_later = any(
            status.what == ENDED and status.steps[number] > steps[number]
            for status in statuses
            for number, steps in averaging
        )
        if ended_later or len({(status.what, status.steps) for status in going}) > 1:
            each = ", ".join(f"rank {rank} {status.in_words()}" for rank, status in enumerate(statuses))
            raise DisagreementError(
                f"The ranks are at different places: {each}. Each rank must take the same optimizer steps, and "
                "validate, save and stop at the same ones, until its data end."
            )
        ended = [rank for rank, status in enumerate(statuses) if status.what == ENDED]
        if ended and whats & {SYNCHRONOUS_BATCH, VIEW}:
            what = "a synchronous step" if SYNCHRONOUS_BATCH in whats else "validation or a checkpoint in mid-epoch"
            raise ConfigurationError(
                f"The epoch of ranks {ended} has ended, and {what} of the others needs all ranks. Stop the training on "
                "all ranks at the same step, and save and validate by Trainer(val_check_interval=...), "
                "ModelCheckpoint(every_n_train_steps=...) or at the end of an epoch."
            )

    def begin_batch(self, trainer: pl.Trainer) -> None:
        """Make this batch the last one of all ranks if it is the last of one, and all are needed in it or after it.

        Collective: all ranks, in a synchronous step, or before validation or a checkpoint; else those of a node.
        """
        self.all_are_here = True
        if not self.meets:
            return
        progress = batches_of(trainer)
        is_synchronous = not all(worker.is_local for worker in self._workers)
        if is_synchronous or self._is_view_due(trainer):
            statuses = self._meet(SYNCHRONOUS_BATCH if is_synchronous else BATCH)
            progress.is_last_batch = any(status.is_last for status in statuses)
            return
        peers = self._peers
        assert peers is not None
        if peers.num_local_ranks > 1:  # the ranks of a node step together
            is_last = torch.tensor([progress.is_last_batch], dtype=torch.int64, device=self._workers[0].device)
            peers.node.all_reduce_(is_last, dist.ReduceOp.MAX)
            progress.is_last_batch = bool(is_last)

    def _is_view_due(self, trainer: pl.Trainer) -> bool:
        """Return whether validation or a checkpoint may come after this batch, in the middle of the epoch."""
        loop, every = trainer.fit_loop.epoch_loop, trainer.val_check_batch
        if every not in (None, float("inf")) and loop._should_check_val_epoch():
            number = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
            if (number + 1) % int(every) == 0:
                return True
        # In manual optimization any number of steps may be taken in a batch, and each counts.
        most = 1 if trainer.lightning_module.automatic_optimization else math.inf
        savers = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]  # type: ignore[attr-defined]
        intervals = [each._every_n_train_steps for each in savers if each._every_n_train_steps > 0]
        return any(trainer.global_step % steps + most >= steps for steps in intervals)

    def _meet_for_average(self, worker: LocalSync) -> None:
        assert self._trainer is not None
        what = AVERAGE + self._workers.index(worker)
        statuses = self._meet(what)
        while any(status.what == BATCH for status in statuses):  # the last one of the others, too, after this message
            statuses = self._meet(what)
        self._weigh(worker, statuses)
        if not self._can_finish and any(status.is_last for status in statuses):
            batches_of(self._trainer).is_last_batch = True
        if any(status.is_over for status in statuses):
            self._trainer.should_stop = True

    def _weigh(self, worker: LocalSync, statuses: list[RankStatus]) -> None:
        worker.weighs_samples = self._can_weigh and any(status.what == ENDED for status in statuses)

    def check_view(self, trainer: pl.Trainer) -> None:
        """Raise where the consensus is to be shown in the middle of an epoch that some ranks have ended.

        Collective: all ranks.
        """
        if self.meets and not self.has_ended and trainer.state.fn == TrainerFn.FITTING:
            self._meet(VIEW)

    # The end ----------------------------------------------------------------------------------------------------

    def end_batch(self, trainer: pl.Trainer) -> None:
        """End the epoch with this batch, if it is the last one of this rank.

        Collective: all ranks, at the ends of their epochs.
        """
        if self.meets and ends_epoch(trainer):
            self.finish_epoch(trainer, is_over(trainer))

    def finish_epoch(self, trainer: pl.Trainer, is_over: bool) -> None:
        """Take part in the averages of the others until all ranks have ended their epochs, if they have not.

        Collective: all ranks, at the ends of their epochs.

        Args:
            trainer: of this rank.
            is_over: whether this rank is at the end of the training.

        Raises:
            SIGTERMException: a signal ends the training in the middle of the epochs of other ranks.
        """
        if not self.meets or self.has_ended:
            return
        if trainer.received_sigterm and not self.all_are_here:
            raise SIGTERMException
        what = ENDED if batches_of(trainer).current.ready else EMPTY
        while True:
            statuses = self._meet(what, is_over)
            others = [status for status in statuses if status.what not in (ENDED, EMPTY)]
            if not others:
                break
            number = others[0].what - AVERAGE
            if number < 0:  # a batch, after which they end, too
                continue
            worker = self._workers[number]
            self._weigh(worker, statuses)
            worker.idle(others[0].steps[number] - worker.step)
            worker.average_due(finished=True)
            self._signals.read_requests(worker, trainer)
            if worker.stop_agreed:  # the others leave after this average, in mid-epoch
                raise SIGTERMException
        self.has_ended = True
        if len({(status.num_batches, status.steps) for status in statuses}) > 1:
            self._become_equal(trainer, statuses)

    def _become_equal(self, trainer: pl.Trainer, statuses: list[RankStatus]) -> None:
        """Average the weights trained since some have ended, and continue with the counters of the rank with most
        batches.

        Collective: all ranks.
        """
        for number, worker in enumerate(self._workers):
            if num_missed := max(status.steps[number] for status in statuses) - worker.step:
                worker.idle(num_missed)
            if self._can_weigh and worker.steps_since_average:
                worker.weighs_samples = True
                worker.average()
                self._signals.read_requests(worker, trainer)
        longest = max(range(len(statuses)), key=lambda rank: statuses[rank].num_batches)
        set_counters(trainer, trainer.strategy.broadcast(counters_of(trainer), src=longest))
        if any(status.is_over for status in statuses):
            trainer.should_stop = True


def _num_samples(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # nothing in it has a size
        return 1
