"""The part that `Strategy` and `ShardedStrategy` share: the method's worker of each optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override

from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import facts
from lightning_lowbw.strategies.following import set_accelerator

if TYPE_CHECKING:
    from lightning_lowbw.strategies.checkpoint import Checkpoints
    from lightning_lowbw.strategies.regime import Regime


class OptimizerWorkers(ParallelStrategy):
    """A strategy that has a worker for each optimizer.

    Attributes:
        method: the configuration; see `reconfigure`.
    """

    method: Method
    regime: Regime
    _workers: dict[int, Worker]  # by id of the optimizer
    _resolved_begin: tuple[float, int] | None = None  # a `begin_step` that is a fraction, and the steps it was last
    _checkpoints: Checkpoints

    accelerator = property(ParallelStrategy.accelerator.fget, set_accelerator)  # type: ignore[attr-defined]

    @property
    def workers(self) -> list[Worker]:
        """The method's workers, in the order of the optimizers, of the present fit or the last one."""
        return list(self._workers.values())

    @property
    def replicas(self) -> list[ReplicaWorker]:
        """Those of methods that average weights."""
        return [worker for worker in self.workers if isinstance(worker, ReplicaWorker)]

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the present fit."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def worker_of(self, optimizer: Any) -> Worker:
        """Return the worker of an optimizer.

        Raises:
            ConfigurationError: `configure_optimizers` has not returned it.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if id(optimizer) not in self._workers:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not one that configure_optimizers returned; "
                f"{type(self).__name__} exchanges gradients for those only."
            )
        return self._workers[id(optimizer)]

    def note_batch(self) -> None:
        """Number the batch, by which ranks are found that have left out a step."""
        for worker in self.workers:
            worker.batch = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def reconfigure(self, method: Method) -> None:
        """Replace the method's configuration, for the next steps.

        Collective: all ranks.

        Raises:
            DisagreementError: on all ranks.
            ConfigurationError: on all ranks; a layer has sparse gradients, which the other method would exchange.
        """
        if self.workers and method.exchanges_gradients and self.lightning_module is not None:
            facts.refuse_sparse_gradients(self.lightning_module)
        facts.agree_on_configuration(type(self).__name__, method.facts())
        self.method = method
        for worker in self.workers:
            worker.method = method

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.regime.end_training()
        self._checkpoints.end_fit()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.regime.end_validation()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        self._checkpoints.remove_shards(filepath)
