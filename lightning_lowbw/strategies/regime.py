"""What a strategy does apart from the exchange, by when the ranks communicate: hooks of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_lowbw.engine.checks import warn_if_mostly_sent
from lightning_lowbw.engine.kernels import prepare_kernels, uses_of
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.strategies.callback_agreement import agree_on_monitored

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class Regime:
    """The hooks of a fit, in their order; most do nothing here. See `Synchronous` and `Replicas`.

    Attributes:
        is_fit_over: whether the last fit has ended. The model and the optimizers have then what is equal on all ranks,
            and are on the CPU, which NCCL does not reach: nothing is averaged or checked any more.
        unequal_buffers: the names of the buffers that the ranks have been found to change differently; None: not known.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.is_fit_over = False
        self.unequal_buffers: list[str] | None = None
        self._callback = FirstCallback(self)

    @property
    def all_are_here(self) -> bool:
        """Whether all ranks are at this batch; not if some have ended the epoch before it."""
        return True

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that a rank keeps in its shard of a checkpoint, by name."""
        return dict(buffers)

    def check(self, trainer: pl.Trainer) -> None:
        """Raise ConfigurationError if a setting of the Trainer is not supported."""

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self.is_fit_over, self.unequal_buffers = False, None

    def is_search(self, trainer: pl.Trainer) -> bool:
        """Return whether a tuner searches, with callbacks of its own: the fit comes after it."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return self.strategy.world_size > 1 and self._callback not in callbacks

    def buffers_of(self, optimizer: Optimizer) -> dict[str, Tensor] | None:
        """Return the buffers that are averaged with an optimizer's parameters."""
        return None

    def set_up(self, trainer: pl.Trainer) -> None:
        """Let the regime's callback be the first; called at the end of `setup`, for validation and the like as well."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self.strategy.workers and self.strategy.world_size > 1 and self._callback not in callbacks:
            callbacks.insert(0, self._callback)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Enclose the loading of a rank's own state: until the first batch the model keeps the checkpoint's weights."""
        yield

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Called when the state of a resume has been loaded, and callbacks have set schedules."""
        for worker in self.strategy.workers:
            worker.check_schedule()
            warn_if_mostly_sent(worker.method.what, worker.method.when, worker.peers)
        device = self.strategy.root_device
        if self.strategy.method.uses_kernels(device) and self.strategy.world_size > 1:
            prepare_kernels(device, uses_of(self.strategy.workers, measures=self.strategy.auto.is_open))

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Called before each epoch, whose data may have changed."""

    def begin_batch(self, batch: Any) -> None:
        """Called before each batch."""

    def buffers_to_broadcast(self, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the buffers that rank 0 sends to all before the coming forward pass."""
        return list(buffers.values())

    def begin_backward(self, loss: Tensor) -> None:
        """Called before each backward pass."""

    def end_backward(self, worker: Worker) -> None:
        """Called at the end of the closure, before gradients are exchanged."""

    def end_step(self, worker: Worker) -> None:
        """Called when an optimizer has stepped, and its worker has done what comes after that."""

    def ddp_reduces(self, worker: Worker) -> bool:
        """Return whether DDP reduces gradients in the coming step: over all ranks, or inside the node.

        Not inside the node if it would search for unused parameters, which communicates with all ranks; then the worker
        takes the mean of the node.
        """
        model = self.strategy.model
        assert isinstance(model, DistributedDataParallel)
        return worker.reduces_in_backward or (worker.reduces_in_node and not model.find_unused_parameters)

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Save after SLURM's signal; called after each batch, before the callbacks."""
        if self.strategy.signals.save_is_due:
            self.strategy.signals.save(trainer)

    def show(self) -> None:
        """Put what is equal on all ranks into the model, until the next batch, the end of validation or of a save."""

    def agree_on_metrics(self, trainer: pl.Trainer) -> None:
        """Average the metrics that callbacks and schedulers monitor; called after validation, and at epochs' ends."""
        agree_on_monitored(trainer, self.strategy.root_device)

    def end_validation(self) -> None:
        """Called after validation, after all other callbacks."""

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Called at the end of an epoch, before the callbacks."""
        self.agree_on_metrics(trainer)

    def state_dict(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the weights for a checkpoint."""
        return take()

    def end_save(self) -> None:
        """Called when a checkpoint has been written."""

    def leave_consensus(self) -> None:
        """Leave the consensus in the model; called at the end of the training, before the callbacks' `on_train_end`."""

    def end_training(self) -> None:
        """Called after all callbacks at the end of the training."""

    def tear_down(self) -> None:
        """Restore Lightning's objects."""
        self.is_fit_over = True
        module = self.strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and self._callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._callback)  # type: ignore[attr-defined]


class FirstCallback(Callback):
    """The first in the list of callbacks, so that all others get the consensus, and metrics that agree."""

    def __init__(self, regime: Regime) -> None:
        self._regime = regime

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._regime.begin_epoch(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._regime.end_batch(trainer)

    def on_validation_start(self, *_: Any) -> None:
        self._regime.show()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._regime.agree_on_metrics(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._regime.end_epoch(trainer)

    def on_train_end(self, *_: Any) -> None:
        self._regime.leave_consensus()
