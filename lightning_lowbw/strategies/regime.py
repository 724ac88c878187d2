"""The hooks of a fit that `ShardedStrategy` calls besides the exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_lowbw.strategies.callback_agreement import agree_on_monitored
from lightning_lowbw.strategies.consensus_view import ConsensusView

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy


class Viewing:
    """Connects the consensus view to the hooks of a fit; `show` is the subclass's.

    Attributes:
        view: of the consensus.
        is_fit_over: whether the last fit has ended. The model and the optimizers have then what is equal on all ranks,
            and are on the CPU, which NCCL does not reach: nothing is averaged or checked any more.
    """

    def __init__(self, strategy: ShardedStrategy) -> None:
        self.strategy = strategy
        self.is_fit_over = False
        self.view = ConsensusView()
        self._callback = FirstCallback(self)

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that a rank keeps in its shard of a checkpoint, by name."""
        return {**buffers, **self.view.own_buffers(buffers)}

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self.is_fit_over = False
        self.view.keep()

    def is_search(self, trainer: pl.Trainer) -> bool:
        """Return whether a tuner searches, with callbacks of its own: the fit comes after it."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return self.strategy.world_size > 1 and self._callback not in callbacks

    def set_up(self, trainer: pl.Trainer) -> None:
        """Let the first callback be the first; called at the end of `setup`."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self.strategy.workers and self.strategy.world_size > 1 and self._callback not in callbacks:
            callbacks.insert(0, self._callback)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Enclose the loading of a rank's own state: until the first batch the model keeps the checkpoint's weights."""
        module = self.strategy.lightning_module
        assert module is not None
        with self.view.loading(self.strategy.replicas, module):
            yield

    def show(self) -> None:
        """Put what is equal on all ranks into the model, until the next batch, the end of validation or of a save."""
        raise NotImplementedError

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Save after SLURM's signal; called after each batch, before the callbacks."""
        self.strategy.signals.save_if_due(trainer)

    def agree_on_metrics(self, trainer: pl.Trainer) -> None:
        """Average the metrics that callbacks and schedulers monitor; called after validation, and at epochs' ends."""
        agree_on_monitored(trainer, self.strategy.root_device)

    def end_validation(self) -> None:
        """Called after validation, after all other callbacks."""
        if not self.strategy.trainer.sanity_checking:  # after which there may be nothing to train
            self.view.hide()

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Called at the end of an epoch, before the callbacks."""
        self.agree_on_metrics(trainer)

    def end_save(self) -> None:
        """Called when a checkpoint has been written."""
        if not self.strategy.trainer.validating:
            self.view.hide()

    def leave_consensus(self) -> None:
        """Leave the consensus in the model; called at the end of the training, before the callbacks' `on_train_end`."""
        self.show()
        self.view.keep()
        for worker in self.strategy.replicas:
            worker.finish()

    def tear_down(self) -> None:
        """Restore Lightning's objects."""
        self.is_fit_over = True
        module = self.strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and self._callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._callback)  # type: ignore[attr-defined]


class FirstCallback(Callback):
    """The first in the list of callbacks, so that all others get the consensus, and metrics that agree."""

    def __init__(self, regime: Viewing) -> None:
        self._regime = regime

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
