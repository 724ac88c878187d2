"""The end of a closure of `ShardedStrategy`: check for faults, clip, exchange; as in `strategy`, on shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_lowbw.engine.local_view import LocalView
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.strategies.backwards import Backwards
from lightning_lowbw.strategies.bypass import BypassGuard
from lightning_lowbw.strategies.onlookers import is_gradient_seen
from lightning_lowbw.strategies.scaling import let_scaler_skip_, scale_gradients_, scaler_of

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy


class ShardedStep:
    """Replaces the gradients of an optimizer that steps by those it steps with.

    Attributes:
        backwards: of the fit.
        guard: refuses steps that bypass Lightning.
    """

    def __init__(self, strategy: ShardedStrategy) -> None:
        self._strategy = strategy
        self.backwards = Backwards()
        self.guard = BypassGuard()

    @torch.no_grad()
    def end_closure(self, worker: Worker, view: LocalView) -> None:
        """Exchange, where the step communicates before the optimizer has stepped.

        In place:
            `.grad` of the optimizer's parameters.

        Collective: all ranks, in such steps.
        """
        strategy = self._strategy
        if worker.is_local:  # Lightning alone clips and scales, by the norm of all shards together
            worker.exchange()
            return
        if strategy.trainer.lightning_module.automatic_optimization and not self.backwards.has_new(worker):
            view.optimizer.zero_grad(set_to_none=True)  # sent already
            return
        scaler = scaler_of(strategy.precision_plugin)
        if scaler is None:
            self._exchange(worker, view)
            return
        scale = scaler.get_scale()
        scale_gradients_(view.optimizer, 1.0 / scale)
        if self._exchange(worker, view, skip_nonfinite=True):
            scale_gradients_(view.optimizer, scale)  # which the plugin takes out again
        else:
            let_scaler_skip_(view.optimizer)

    def _exchange(self, worker: Worker, view: LocalView, skip_nonfinite: bool = False) -> bool:
        """Check for faults, clip, exchange; return whether the step is to be taken."""
        strategy = self._strategy
        view.refresh()
        view.take_gradients()
        clips = worker.clips_before_exchange and strategy.clipping.is_asked_for
        worker.prepare(num_backwards=self.backwards.num)
        strategy.regime.agree_in_node(worker)
        if clips:
            strategy.clipping.clip(view.optimizer)  # by the norm of the node's gradient, all shards together
        applies = not (skip_nonfinite or is_gradient_seen(strategy.trainer, view.optimizer, self.guard))
        is_taken = worker.exchange(skip_nonfinite=skip_nonfinite, applies=applies)
        view.give_gradients()
        return is_taken
