"""What a strategy does around its steps, for methods of two kinds: chosen once, when the workers are made.

`GradientHooks`: gradients are exchanged in every step, so weights are equal on all ranks. Other state that must be
equal is compared; buffers are made equal before a validation or a save. `ReplicaHooks`: weights are averaged after some
steps. A validation or a save gets their mean. Both classes have the same methods, in the order in which a fit calls
them; a strategy never asks which class it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.method import Method
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import AutoChoice
from lightning_lowbw.strategies.shared_buffers import SharedBuffers
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.sync.buffers import IGNORED
from lightning_lowbw.sync.checks import agree_on_end
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer


class GradientHooks:
    """For methods that exchange gradients in every step.

    Args:
        workers: of the optimizers, at any time.
        signals: of this strategy, as are the following two.
        buffers: sends rank 0's buffers to all ranks.
        auto: chooses a method, where the user has left that open.

    Attributes:
        is_shown: whether the model has the anchor in the place of this rank's weights.
    """

    is_shown = False

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
        """Put tensors that are equal on all ranks into the model, for a validation or a save.

        Args:
            trainer: of the fit.
            peers: the ranks with the same parameters.
            device: of messages.
            is_over: whether the fit is: other ranks may be elsewhere.
            weights_only: whether nobody looks at the buffers of other ranks than 0.
        """
        if not (is_over or weights_only):
            self.share(trainer, peers, device)

    def hide(self, trainer: pl.Trainer) -> None:
        """Give each rank its own weights back, if the anchor is shown."""

    def finish(self) -> None:
        """Make the weights equal on all ranks: the training has ended."""

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those buffers, by name, that a rank keeps in its shard of a checkpoint."""
        return self._buffers.own(buffers)

    # The end ------------------------------------------------------------------------------------------------------

    def end_training(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Compare what the last step has left on all ranks; leave the optimizers whole."""
        module = trainer.lightning_module
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for worker in self._workers.values():
            if not worker.peers.are_shards:  # else one shard would raise, and the ranks with other shards go on
                compared = trained | worker.by_name()
                for name in getattr(module, IGNORED, ()):
                    compared.pop(name, None)
                agree_on_end(worker.step, compared, peers.group)
            for parameter, velocity in worker.whole_momentum().items():  # each rank of a node had a part
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
        self._has_warned = False  # of weights that were changed while the anchor was shown

    @property
    def _workers(self) -> list[LocalSync]:
        return list(self._by_optimizer.values())

    def begin_training(self, trainer: pl.Trainer, method: Method, *, is_search: bool) -> None:
        for worker in self._workers:
            worker.begin_local()
        if not is_search and any(worker.peers.num_ranks > 1 for worker in self._workers):
            fragments = max(len(worker.fragments) for worker in self._workers)
            checks.warn_if_seen_twice(trainer, max(1, method.when.k_steps // fragments))

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
        for worker in self._workers:
            check(worker)

    def share(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Buffers are averaged with the weights."""

    @property
    def is_shown(self) -> bool:
        return any(worker.replica.own is not None for worker in self._workers)

    def show(
        self, trainer: pl.Trainer, peers: Peers, device: torch.device, *, is_over: bool, weights_only: bool
    ) -> None:
        """Put the anchor into the model, until `hide`. It does not change the training; nothing is communicated."""
        if not is_over:
            for worker in self._workers:
                worker.replica.show()

    def hide(self, trainer: pl.Trainer) -> None:
        """Give this rank its own weights back; drop changes of the shown weights, with one warning."""
        are_changed = [worker.replica.hide() for worker in self._workers]
        if any(are_changed) and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(trainer.strategy).__name__}: the weights were changed while the model had the last average, in "
                "a validation or a save. These changes are dropped, and the training goes on from the weights before. "
                "That is right for a module that normalises its weights in forward; a moving average of the weights "
                "needs a method that exchanges gradients, such as 'dgc' or 'int8'."
            )

    def finish(self) -> None:
        for worker in self._workers:
            worker.finish()

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all, also while the anchor is shown."""
        kept = dict(buffers)
        for worker in self._workers:
            kept |= {name: tensor for name, tensor in worker.replica.own_tensors().items() if name in buffers}
        return kept

    # The end ------------------------------------------------------------------------------------------------------

    def end_training(self, trainer: pl.Trainer, peers: Peers, device: torch.device) -> None:
        """Compare the weights that callbacks have left on all ranks; a tuner's search ends without an average."""
        for worker in self._workers:
            if not worker.peers.are_shards and worker.replica.parameters_agree:
                agree_on_end(worker.step, worker.by_name(), peers.group)


Hooks = GradientHooks | ReplicaHooks
