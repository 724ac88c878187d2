"""What a strategy does around its steps, for methods of two kinds: chosen once, when the workers are made.

`GradientHooks`: gradients are exchanged in every step, so weights are equal on all ranks. What else has to be equal is
compared; buffers are made equal for whoever looks at them. `ReplicaHooks`: weights are averaged now and then. Whoever
looks at them gets their mean. Both have the same methods, in the order in which a fit calls them; a strategy never
asks which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.method import Method
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import AutoChoice
from lightning_lowbw.strategies.equality import agree_on_weights_, weights_of
from lightning_lowbw.strategies.shared_buffers import SharedBuffers
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.sync.buffers import IGNORED
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

    def begin_training(self, trainer: pl.Trainer, method: Method, *, is_search: bool) -> None:
        """Begin the first step of a fit; where a tuner searches there are several first steps."""
        self._auto.begin_training(method, list(self._workers.values()), trainer, is_search=is_search)

    def begin_batch(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Begin a batch, before its forward pass."""
        if self._buffers.is_check_due:
            self._buffers.compare(trainer.lightning_module, device)

    def end_step(self, worker: GradientSync, trainer: pl.Trainer) -> Method | None:
        """Read what other ranks request, and prepare the next step; return the method to go on with, if it is new."""
        self._signals.end_step(worker, trainer)
        method = self._auto.end_step(worker, list(self._workers.values()), trainer)
        if method is None and trainer.lightning_module.automatic_optimization:  # else Lightning's DDP broadcasts none
            self._buffers.note_step(self._workers.values())
        return method

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


class ReplicaHooks:
    """For methods that average weights; see `GradientHooks` for what the methods of both are called for.

    Args:
        workers: of the optimizers, at any time.
        signals: of this strategy.
    """

    def __init__(self, workers: Mapping[int, LocalSync], signals: Signals) -> None:
        self._by_optimizer, self._signals = workers, signals

    @property
    def _workers(self) -> list[LocalSync]:
        return list(self._by_optimizer.values())

    def begin_training(self, trainer: pl.Trainer, method: Method, *, is_search: bool) -> None:
        for worker in self._workers:
            worker.begin_local()

    def begin_batch(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Begin a batch, before its forward pass."""

    def end_step(self, worker: LocalSync, trainer: pl.Trainer) -> None:
        if worker.peers.num_ranks == 1:  # of a sharded model on one node: no peer is told anything
            self._signals.end_step(worker, trainer)
        elif trainer.world_size > 1:
            self._signals.read_requests(worker, trainer)

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

    # The end ------------------------------------------------------------------------------------------------------

    def end_training(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Make weights equal that callbacks have put in at the end."""
        agree_on_weights_(weights_of(trainer.lightning_module, peers), peers, device)


Hooks = GradientHooks | ReplicaHooks
