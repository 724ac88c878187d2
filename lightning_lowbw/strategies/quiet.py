"""Between two averages no rank sends anything: neither DDP nor Lightning's timers. For signals see `signals`.

DDP's reductions, broadcasts of buffers and bitmaps of unused parameters are off. Timers broadcast the time of rank 0
after every batch; here they do so only after an average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


def is_timed(callback: Callback) -> bool:
    """Return whether a callback broadcasts the time of rank 0 after every batch."""
    saves_by_time = isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None
    return isinstance(callback, Timer) or saves_by_time


class Quiet:
    """Turns off or defers all communication in local steps."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._may_communicate = True  # whether callbacks may communicate in this batch
        self._replaced: list[Callback] = []

    # The fit ----------------------------------------------------------------------------------------------------

    def defer(self, trainer: pl.Trainer) -> None:
        """Defer timers until the next average."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            if is_timed(callback):
                hook = functools.partial(self._call_if_communicating, callback.on_train_batch_end)
                callback.on_train_batch_end = hook
                self._replaced.append(callback)

    def restore(self) -> None:
        """Undo all replacements; a tuner in a callback starts the training twice."""
        while self._replaced:
            vars(self._replaced.pop()).pop("on_train_batch_end", None)

    def _call_if_communicating(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._may_communicate:
            hook(*args, **kwargs)

    # The step ---------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Let callbacks communicate unless all optimizers are to step locally."""
        self._may_communicate = not all(worker.is_local for worker in self._strategy.workers)
        self.choose_backward_sync()  # Lightning turns it on after each training_step of manual optimization

    def forbid(self) -> None:
        """Do not let callbacks communicate until the next batch, because some ranks have ended."""
        self._may_communicate = False

    def end_step(self, has_communicated: bool) -> None:
        """Let callbacks communicate until the next batch, if the step has communicated."""
        self._may_communicate |= has_communicated
        self.choose_backward_sync()

    def choose_backward_sync(self) -> None:
        """Let DDP reduce in synchronous steps, and on two levels inside the node in local steps; else not at all."""
        model, workers = self._strategy.model, self._strategy.workers
        assert isinstance(model, DistributedDataParallel)
        if model.require_backward_grad_sync and not all(worker.reduces_in_backward for worker in workers):
            # DDP would rebuild its buckets, with a broadcast, in the next forward pass; now all ranks are here.
            model.reducer._rebuild_buckets()
        model.require_backward_grad_sync = any(self._strategy.regime.ddp_reduces(worker) for worker in workers)
