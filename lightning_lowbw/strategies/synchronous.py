"""Methods that exchange gradients in every step: weights are equal on all ranks; running statistics need not be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.late_faults import check_late_faults
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.advice import tell_notes, tell_what_stays_whole, warn_if_never_sparse
from lightning_lowbw.strategies.batch_norm import BatchNorm
from lightning_lowbw.strategies.facts import agree_on_length
from lightning_lowbw.strategies.regime import Regime
from lightning_lowbw.strategies.scaling import scaler_of
from lightning_lowbw.strategies.velocities import leave_whole_velocities_
from lightning_lowbw.when.every_step import EveryStep

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class Synchronous(Regime):
    """Copies the running statistics of rank 0 for validation, and makes velocities whole at the end."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self._batch_norm = BatchNorm(strategy)
        self._has_stepped = True  # since the last batch; what follows is not accumulated to it

    @override
    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._batch_norm.own_buffers(buffers)

    @override
    def end_save(self) -> None:
        self.strategy.auto.times.restart_clock()

    @override
    def begin_fit(self) -> None:
        super().begin_fit()
        self._batch_norm.begin_fit()
        self._has_stepped = True

    @override
    @contextmanager
    def loading(self) -> Iterator[None]:
        with self._batch_norm.loading():
            yield

    @override
    def begin_training(self, trainer: pl.Trainer) -> None:
        super().begin_training(trainer)
        agree_on_length(trainer)
        method = self.strategy.method
        if not isinstance(method.when, EveryStep) or not method.compresses_gradients or self.strategy.world_size == 1:
            return
        if method.when.overlap:
            self._check_overlap(trainer)
        self.strategy.auto.begin_training(trainer)
        if not method.when.is_auto and not self.is_search(trainer):
            warn_if_never_sparse(method.when, trainer, self.strategy.workers)
            tell_notes(self.strategy.workers)
            tell_what_stays_whole(self.strategy.workers)

    def _check_overlap(self, trainer: pl.Trainer) -> None:
        """Refuse settings that need whole gradients, or with which the step is not known during backward."""
        ddp = self.strategy._ddp_kwargs
        obstacles = {
            "gradient clipping": self.strategy.clipping.is_asked_for,
            "a GradScaler (precision='16-mixed')": scaler_of(self.strategy.precision_plugin) is not None,
            "manual optimization": not trainer.lightning_module.automatic_optimization,
            "find_unused_parameters=True": bool(ddp.get("find_unused_parameters")),  # buckets hold unused ones, too
            "static_graph=True": bool(ddp.get("static_graph")),
        }
        found = [name for name, is_there in obstacles.items() if is_there]
        if found:
            raise ConfigurationError(
                f"overlap=True sends gradients during backward, which cannot be combined with {', '.join(found)}: "
                "leave out one of them."
            )

    @override
    def begin_batch(self, batch: Any) -> None:
        self._batch_norm.hide()  # since a resume
        model = self._choose_backward_sync()
        if self.strategy.trainer.lightning_module.automatic_optimization and not model.require_backward_grad_sync:
            # DDP then also leaves out its broadcast of buffers in the next forward pass, as while accumulating. In
            # manual optimization Lightning's DDP broadcasts none.
            model.require_forward_param_sync = self._has_stepped
        self._has_stepped = False

    def _choose_backward_sync(self) -> DistributedDataParallel:
        """Let DDP fill no buckets and search for no unused parameters where it reduces nothing; return it."""
        model, when = self.strategy.model, self.strategy.method.when
        assert isinstance(model, DistributedDataParallel)
        needs_buckets = (isinstance(when, EveryStep) and when.overlap) or bool(model.static_graph)
        model.require_backward_grad_sync = needs_buckets or any(map(self.ddp_reduces, self.strategy.workers))
        return model

    @override
    def end_step(self, worker: Worker) -> None:
        self.strategy.signals.end_step(worker)
        self.strategy.auto.end_step(worker, self.strategy.trainer)
        if self.strategy.regime is self:  # in manual optimization the next backward pass is of the same batch
            self._choose_backward_sync()

    @override
    def end_backward(self, worker: Worker) -> None:
        self._has_stepped = True

    @override
    def buffers_to_broadcast(self, everything: list[Tensor]) -> list[Tensor]:
        return self._batch_norm.buffers_to_broadcast(everything)

    @override
    def show(self) -> None:
        self._batch_norm.show()

    @override
    def end_validation(self) -> None:
        if not self.strategy.trainer.sanity_checking:  # after which there may be nothing to train
            self._batch_norm.hide()
        self.strategy.auto.times.restart_clock()

    @override
    def state_dict(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._check_late_faults()  # an infinite message may be in the weights
        return take()

    def _check_late_faults(self) -> None:
        for worker in self.strategy.workers:
            if isinstance(worker, GradientWorker) and not (self.is_fit_over or self.strategy.is_interrupted):
                check_late_faults(worker)

    @override
    def end_training(self) -> None:
        self.strategy.signals.settle()
        self.strategy.lost_peers.come_to_end()
        self._check_late_faults()
        for worker in self.strategy.workers:
            leave_whole_velocities_(worker)
        self._batch_norm.keep()  # without a batch since a resume
        self._batch_norm.leave()

    @override
    def tear_down(self) -> None:
        self._batch_norm.keep()
        super().tear_down()
