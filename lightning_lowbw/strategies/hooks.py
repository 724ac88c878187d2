"""What a strategy does around its steps, for methods of two kinds: chosen once, when the workers are made.

`GradientHooks`: gradients are exchanged in every step, so weights are equal on all ranks. What else has to be equal is
compared; buffers are made equal for whoever looks at them. `ReplicaHooks`: weights are averaged now and then. Whoever
looks at them gets their mean, and ranks with fewer batches than others begin their data anew. Both have the same
methods, in the order in which a fit calls them; a strategy never asks which one it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import AutoChoice
from lightning_lowbw.strategies.equality import agree_on_weights_, weights_of
from lightning_lowbw.strategies.shared_buffers import IGNORED, SharedBuffers
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.sync.checks import agree_on_end
from lightning_lowbw.sync.consensus import unseen_by_autograd
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer


class GradientHooks:
    """For methods that exchange gradients in every step.

    Args:
        workers: of the optimizers, at any time.
        signals: of this strategy, as are the following two.
        buffers: those of rank 0, for all.
        auto: chooses a method, where the user has left that open.

    Attributes:
        has_shown: whether a consensus has been put into the model; perhaps this rank's weights are the same.
        is_shown: whether they are not.
    """

    has_shown = is_shown = False

    def __init__(
        self, workers: Mapping[int, GradientSync], signals: Signals, buffers: SharedBuffers, auto: AutoChoice
    ) -> None:
        self._workers, self._signals, self._buffers, self._auto = workers, signals, buffers, auto
        self._has_equal_epochs = False  # whether it is known that all ranks end an epoch at the same batch

    def begin_training(self, trainer: pl.Trainer, method: Method, *, is_search: bool) -> None:
        """Begin the first step of a fit; where a tuner searches there are several first steps."""
        self._has_equal_epochs = checks.agree_on_length(trainer)
        self._auto.begin_training(method, list(self._workers.values()), trainer, is_search=is_search)

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Begin an epoch, whose data may have changed."""
        if self._has_equal_epochs:  # before a step: schedulers may have followed what an epoch's end has logged
            checks.agree_on_hyperparameters(trainer)

    def begin_batch(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Begin a batch, before its forward pass."""
        if self._buffers.is_check_due:
            self._buffers.compare(trainer.lightning_module, device)

    def end_step(self, worker: GradientSync, trainer: pl.Trainer) -> Method | None:
        """Read what other ranks request, and prepare the next step; return the method to go on with, if it is new."""
        self._signals.end_step(worker, trainer)
        method = self._auto.end_step(worker, list(self._workers.values()), trainer)
        if method is None and trainer.lightning_module.automatic_optimization:  # else Lightning's DDP broadcasts none
            self._buffers.note_step(worker.step, self._workers.values())
        return method

    def end_batch(self, trainer: pl.Trainer) -> None:
        """End a batch, before the callbacks do."""

    def end_epoch(self, trainer: pl.Trainer) -> bool:
        """End an epoch, before the callbacks do; return whether all ranks do so now: else some may be in a step."""
        return self._has_equal_epochs

    # What is looked at --------------------------------------------------------------------------------------------

    def check_equal(self, trainer: pl.Trainer) -> None:
        """Check what has to be equal on all ranks."""
        checks.agree_on_hyperparameters(trainer)

    def check_late_faults(self, check: Callable[[Synchronizer], None]) -> None:
        """Raise, on all ranks, what the last step has found after its message: it may be in the weights."""
        for worker in self._workers.values():
            check(worker)

    def share(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Give all ranks the buffers of rank 0, because somebody may look at them."""
        self._buffers.share_(trainer.lightning_module, peers.ledger, device)

    def show(
        self, trainer: pl.Trainer, peers: Peers, device: torch.device, *, is_over: bool, weights_only: bool
    ) -> None:
        """Put what is equal on all ranks into the model, until the next batch, or the end of a save.

        Args:
            trainer: of the fit.
            peers: the ranks with the same parameters.
            device: of messages.
            is_over: whether the fit is: other ranks may be elsewhere.
            weights_only: whether nobody looks at the buffers of other ranks than 0.
        """
        if not (is_over or weights_only):
            self.share(trainer, peers, device)

    def agree_on_weights(self, peers: Peers, device: torch.device, *, with_buffers: bool = False) -> None:
        """Make weights equal that the user's code has put in the place of those that were shown."""

    def hide(self, peers: Peers, device: torch.device, *, adopts: bool = False) -> None:
        """Give each rank its own weights back, where those that were shown are still in the model."""

    def finish(self) -> None:
        """Leave in the model what was shown: the training has ended."""

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state that does not change when the weights are hidden: it may be written to disk later."""
        return state

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those buffers, by name, that a rank keeps in its shard of a checkpoint."""
        return self._buffers.own(buffers)

    @property
    def apart(self) -> frozenset[str]:
        """The names of averaged buffers whose shapes differ between ranks."""
        return frozenset()

    # The end ------------------------------------------------------------------------------------------------------

    def end_training(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Compare what the last step has left on all ranks; leave the optimizers whole."""
        module = trainer.lightning_module
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for worker in self._workers.values():
            if not worker.peers.are_shards:  # else one shard would raise, and the ranks with the others go on
                compared = trained | worker.by_name()
                for name in getattr(module, IGNORED, ()):
                    compared.pop(name, None)
                agree_on_end(worker.step, compared, peers.group)
            for parameter, velocity in worker.whole_momentum().items():  # of which each rank of a node has had a part
                worker.optimizer.state[parameter][worker.correction.velocity_key] = velocity
        self.share(trainer, peers, device)
        self._auto.end_training(type(trainer.strategy).__name__)


class ReplicaHooks:
    """For methods that average weights; see `GradientHooks` for what the methods of both are called for.

    Ranks with different or unknown numbers of batches all take those of the longest epoch. A rank whose data have ended
    begins them anew, until those of all ranks have: then all end the epoch with the same batch, and nothing else
    (steps, schedulers, validation, checkpoints) need know that the data differ. With lengths that are known on all
    ranks that is the last batch of the longest epoch. Where `len()` of the data is not known (an `IterableDataset`), a
    rank finds out when it begins its last batch; it says so in the status of the next average, or of the next
    synchronous step, with which the epoch ends if it is the last rank to say so.

    Args:
        workers: of the optimizers, at any time.
        signals: of this strategy.
        buffers: of this strategy; warnings of buffers are given once.
    """

    def __init__(self, workers: Mapping[int, LocalSync], signals: Signals, buffers: SharedBuffers) -> None:
        self._by_optimizer, self._signals, self._buffers = workers, signals, buffers
        self._is_uneven = False  # whether numbers of batches differ; equal on all ranks

    @property
    def _workers(self) -> list[LocalSync]:
        return list(self._by_optimizer.values())

    def begin_training(self, trainer: pl.Trainer, method: Method, *, is_search: bool) -> None:
        self._find_lengths(trainer)
        for worker in self._workers:
            worker.buffers.layout.told = self._buffers.layout.told
            worker.begin_local()

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        is_new = trainer.fit_loop._last_train_dl_reload_epoch == trainer.current_epoch
        if is_new and trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:  # type: ignore[attr-defined]
            self._find_lengths(trainer)
        for worker in self._workers:
            worker.begin_epoch()

    def begin_batch(self, trainer: pl.Trainer, device: torch.device) -> None:
        progress = _progress(trainer)
        if self._is_uneven and progress.is_last_batch and progress.current.ready < trainer.num_training_batches:
            progress.is_last_batch = False  # Lightning ends the epoch when the data of all ranks have ended
            for worker in self._workers:
                worker.has_ended = True

    def end_step(self, worker: LocalSync, trainer: pl.Trainer) -> None:
        if worker.peers.num_ranks == 1:  # of a sharded model on one node: no peer is told anything
            self._signals.end_step(worker, trainer)
        elif trainer.world_size > 1:
            self._signals.read_requests(worker, trainer)
        if self._is_uneven and worker.has_communicated and worker.all_have_ended:
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

    def end_epoch(self, trainer: pl.Trainer) -> bool:
        """Return True: all ranks do so now.

        Raises:
            ConfigurationError: on this rank, if it had no batch: the others wait for it.
        """
        if self._is_uneven and not _progress(trainer).current.ready:
            raise ConfigurationError(
                "This rank has no batch in this epoch, and others have some. Divide the data anew."
            )
        return True

    def _find_lengths(self, trainer: pl.Trainer) -> None:
        """Find out whether the numbers of batches differ, and take the largest; for each loading of the data.

        Not of a sharded model, where the numbers are the same, and a node tells its ranks nothing of other nodes.

        Collective: all ranks, blocking.

        In place:
            Lightning's number of batches, where it validates, and the state of the schedulers, which may have been
            made for the number of steps of this rank.

        Raises:
            ConfigurationError: on all ranks; it would not be known when the data end.
        """
        if trainer.world_size == 1 or any(worker.peers.are_shards for worker in self._workers):
            return
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

    # What is looked at --------------------------------------------------------------------------------------------

    def check_equal(self, trainer: pl.Trainer) -> None:
        """Nothing is: each rank trains its own replica."""

    def check_late_faults(self, check: Callable[[Synchronizer], None]) -> None:
        """`show` does, before it shows anything."""

    def share(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Buffers are averaged with the weights."""

    @property
    def has_shown(self) -> bool:
        return any(worker.replica.view.is_shown for worker in self._workers)

    @property
    def is_shown(self) -> bool:
        return any(worker.replica.view.own is not None for worker in self._workers)

    def show(
        self, trainer: pl.Trainer, peers: Peers, device: torch.device, *, is_over: bool, weights_only: bool
    ) -> None:
        """Put the mean of the replicas into the model, until `hide`. It does not change the training.

        Collective: all ranks; if the replicas are equal, as `Synchronizer.check_late_faults`.
        """
        if is_over:  # each keeps its own weights
            if not all(worker.parameters_agree for worker in self._workers):
                rank_zero_warn("The training was interrupted between two averages: these are the weights of rank 0.")
            return
        for callback in checks.callbacks_of(trainer, *checks.AVERAGING):  # validated and saved, too
            average = getattr(callback, "_average_model", None)  # not before it begins
            if average is not None:
                agree_on_weights_(weights_of(average, peers), peers, device)
        for worker in self._workers:
            with unseen_by_autograd(worker.replica.tensors().values()):
                worker.show_consensus()

    def agree_on_weights(self, peers: Peers, device: torch.device, *, with_buffers: bool = False) -> None:
        """Make weights equal that the user's code has put in the place of the consensus; see `agree_on_weights_`.

        Args:
            peers: among which the weights should be equal; also after the fit, when the workers' own have ended.
            device: of messages.
            with_buffers: also floating buffers, where their consensus is shown. Not after a validation: what that
                has changed in them is each rank's own.
        """
        for worker in self._workers:
            tensors = [parameter.detach() for parameter in worker.params]
            replica = worker.replica
            shown = replica.averaged_buffers().values() if with_buffers and replica.view.own is not None else ()
            tensors += [buffer for buffer in shown if buffer.is_floating_point() or buffer.is_complex()]
            agree_on_weights_(tensors, peers, device)

    def hide(self, peers: Peers, device: torch.device, *, adopts: bool = False) -> None:
        """Give this rank its own weights back, where those that were shown are still in the model.

        Collective: all ranks, one number for each worker, if something is shown.

        Args:
            peers: as in `agree_on_weights`.
            device: of messages.
            adopts: whether to go on from those that the user's code has put in their place; else these stay for now.
        """
        shown = [worker for worker in self._workers if worker.replica.view.is_shown]
        flags = torch.tensor([worker.replica.view.is_changed for worker in shown], dtype=torch.int32, device=device)
        all_reduce_(flags, op=dist.ReduceOp.MAX)
        are_changed = flags.tolist()
        if adopts and any(are_changed):
            self.agree_on_weights(peers, device)
        for worker, is_changed in zip(shown, are_changed, strict=True):
            if not is_changed:
                with unseen_by_autograd(worker.replica.tensors().values()):
                    worker.replica.hide()
            elif adopts:
                worker.adopt_parameters()

    def finish(self) -> None:
        for worker in self._workers:
            worker.finish()

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        if not self.is_shown:
            return state
        return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all, also while the mean is shown."""
        kept = dict(buffers)
        for worker in self._workers:
            kept |= {name: tensor for name, tensor in worker.replica.own_tensors().items() if name in buffers}
        return kept

    @property
    def apart(self) -> frozenset[str]:
        return frozenset[str]().union(*(worker.buffers.layout.apart for worker in self._workers))

    # The end ------------------------------------------------------------------------------------------------------

    def end_training(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Make weights equal that callbacks have put in at the end."""
        agree_on_weights_(weights_of(trainer.lightning_module, peers), peers, device)


def _progress(trainer: pl.Trainer) -> Any:
    """Return Lightning's counts of batches in this epoch, and whether the present one is the last."""
    return trainer.fit_loop.epoch_loop.batch_progress


Hooks = GradientHooks | ReplicaHooks
