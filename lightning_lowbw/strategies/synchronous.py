"""Methods that exchange gradients in every step: weights are equal on all ranks, and so are buffers where one looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.strategies.advice import tell_of_sparse_steps, warn_if_too_short
from lightning_lowbw.strategies.facts import agree_on_hyperparameters, agree_on_length
from lightning_lowbw.strategies.keywords import asked_of_buffers
from lightning_lowbw.strategies.regime import Regime
from lightning_lowbw.strategies.shared_buffers import buffers_of, is_check_due, share_, statistics_of, unequal
from lightning_lowbw.strategies.velocities import leave_whole_velocities_
from lightning_lowbw.when.every_step import EveryStep

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class Synchronous(Regime):
    """Shares the buffers of rank 0, and makes velocities whole at the end."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self._asked_of_buffers = asked_of_buffers(strategy._ddp_kwargs)
        self._statistics: frozenset[str] = frozenset()  # names of buffers that no training step reads
        self._compares_buffers = False  # before the next batch
        self._meets_at_epoch_end = False  # else the others may be in a step
        self._has_stepped = True  # since the last batch; what follows is not accumulated to it

    @override
    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in buffers.items() if name not in self._statistics}  # as in the .ckpt

    @override
    def end_save(self) -> None:
        self.strategy.auto.restart_clock(self.strategy.ledger)

    @override
    def begin_fit(self) -> None:
        super().begin_fit()
        self._compares_buffers, self._has_stepped = False, True
        module = self.strategy.lightning_module
        assert module is not None
        self._statistics = frozenset() if self._asked_of_buffers is False else statistics_of(module)

    @override
    def begin_training(self, trainer: pl.Trainer) -> None:
        super().begin_training(trainer)
        self._meets_at_epoch_end = agree_on_length(trainer)
        method = self.strategy.method
        workers, is_search = self.strategy.workers, self.is_search(trainer)
        self.strategy.auto.begin_training(workers, trainer, is_search=is_search)
        if not isinstance(method.when, EveryStep) or not method.compresses_gradients or self.strategy.world_size == 1:
            return
        if not method.when.is_auto and not is_search:
            warn_if_too_short(method.when, trainer, workers)
            tell_of_sparse_steps(workers)

    @override
    def begin_batch(self, batch: Any) -> None:
        if self._compares_buffers:
            self._compare_buffers()
        model = self._choose_backward_sync()
        if self.strategy.trainer.lightning_module.automatic_optimization and not model.require_backward_grad_sync:
            # DDP then also leaves out its broadcast of buffers in the next forward pass, as while accumulating. In
            # manual optimization Lightning's DDP broadcasts none.
            model.require_forward_param_sync = self._has_stepped
        self._has_stepped = False

    def _choose_backward_sync(self) -> DistributedDataParallel:
        """Let DDP fill no buckets and search for no unused parameters where it reduces nothing; return it."""
        model = self.strategy.model
        assert isinstance(model, DistributedDataParallel)
        needs_buckets = bool(model.static_graph)
        model.require_backward_grad_sync = needs_buckets or any(map(self.ddp_reduces, self.strategy.workers))
        return model

    def _compare_buffers(self) -> None:
        """Find buffers that the ranks change differently: from now on they are broadcast in compressed steps, too.

        Collective: all ranks, after the same steps.
        """
        self._compares_buffers, known = False, self.unequal_buffers or []
        buffers = buffers_of(self.strategy.trainer.lightning_module)
        unknown = {name: b for name, b in buffers.items() if name not in self._statistics and name not in known}
        new = unequal(unknown, self.strategy.root_device)
        self.unequal_buffers = [*known, *new]
        if new:
            nbytes = sum(buffers[name].nbytes for name in self.unequal_buffers if name in buffers)
            rank_zero_info(
                f"{type(self.strategy).__name__}: the ranks change these buffers differently: {', '.join(new)}. Before "
                f"each forward pass they get those of rank 0, as under DDP ({nbytes:,} bytes, all such buffers "
                "together). broadcast_buffers=False leaves this out: then each rank keeps its own."
            )

    @property
    def _is_compressed(self) -> bool:
        """Whether gradients of the coming step are not sent whole."""
        return any(not worker.reduces_in_backward for worker in self.strategy.workers)

    @override
    def end_step(self, worker: Worker) -> None:
        self.strategy.signals.end_step(worker)
        self._follow_choice(worker)
        # In manual optimization Lightning's DDP broadcasts none.
        is_automatic = self.strategy.trainer.lightning_module.automatic_optimization
        if is_automatic and self._asked_of_buffers is None and self._is_compressed:
            self._compares_buffers |= self.unequal_buffers is None or is_check_due(worker.step)
        if self.strategy.regime is self:  # in manual optimization the next backward pass is of the same batch
            self._choose_backward_sync()

    def _follow_choice(self, worker: Worker) -> None:
        strategy, trainer = self.strategy, self.strategy.trainer
        is_bypassed = strategy._guard.has_allowed
        method = strategy.auto.end_step(worker, strategy.workers, trainer, is_bypassed=is_bypassed)
        if method is not None:
            strategy.adopt(method)
            strategy.regime.begin_training(trainer)

    @override
    def end_backward(self, worker: Worker) -> None:
        self._has_stepped = True

    @override
    def buffers_to_broadcast(self, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        if self._asked_of_buffers is not None or not self._is_compressed:
            return list(buffers.values())
        chosen = buffers.keys() - self._statistics if self.unequal_buffers is None else self.unequal_buffers
        return [buffer for name, buffer in buffers.items() if name in chosen]

    def _share_buffers(self) -> None:
        """Take over the buffers of rank 0, because somebody may look at them.

        Collective: all ranks.
        """
        if self._asked_of_buffers is False or not self.strategy.workers or self.is_fit_over:
            return
        if self._compares_buffers:  # before they are made equal
            self._compare_buffers()
        module = self.strategy.trainer.lightning_module
        buffers = buffers_of(module)
        if not module.automatic_optimization:
            buffers = {name: buffer for name, buffer in buffers.items() if name in self._statistics}
        share_(buffers, self.strategy.ledger, self.strategy.root_device)

    @override
    def show(self) -> None:
        self._share_buffers()

    @override
    def end_validation(self) -> None:
        self.strategy.auto.restart_clock(self.strategy.ledger)

    @override
    def agree_on_metrics(self, trainer: pl.Trainer) -> None:
        super().agree_on_metrics(trainer)
        agree_on_hyperparameters(trainer)

    @override
    def begin_epoch(self, trainer: pl.Trainer) -> None:
        if self._meets_at_epoch_end:  # before a step: schedulers may have followed what an epoch's end has logged
            agree_on_hyperparameters(trainer)

    @override
    def end_epoch(self, trainer: pl.Trainer) -> None:
        if self._meets_at_epoch_end:
            super().end_epoch(trainer)
            self._share_buffers()

    @override
    def state_dict(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._check_late_faults()  # an infinite message may be in the weights
        return take()

    def _check_late_faults(self) -> None:
        for worker in self.strategy.workers:
            if isinstance(worker, GradientWorker) and not (self.is_fit_over or self.strategy.is_interrupted):
                worker.check_late_faults()

    @override
    def end_training(self) -> None:
        self.strategy.signals.settle()
        self.strategy.lost_peers.come_to_end()
        self.strategy.auto.end_training(type(self.strategy).__name__)
        self._check_late_faults()
        agree_on_hyperparameters(self.strategy.trainer)
        for worker in self.strategy.workers:
            leave_whole_velocities_(worker)
        self._share_buffers()
