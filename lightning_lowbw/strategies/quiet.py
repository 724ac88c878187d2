"""Between two averages no rank sends anything: neither DDP nor Lightning's timers. For signals see `signals`.

DDP's reductions, broadcasts of buffers and bitmaps of unused parameters are off. Timers broadcast the time of rank 0
after every batch; here they do so only after an average.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, Timer
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.where.audit import CollectiveAudit

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


def is_timed(callback: Callback) -> bool:
    """Return whether a callback broadcasts the time of rank 0 after every batch."""
    saves_by_time = isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None
    return isinstance(callback, Timer) or saves_by_time


class Quiet:
    """Turns off or defers all communication in local steps; with `audit` checks that there is none."""

    def __init__(self, strategy: Strategy, audit: bool) -> None:
        self._strategy = strategy
        self._audit = CollectiveAudit() if audit else None
        self._may_communicate = True  # whether callbacks may communicate in this batch
        self._replaced: list[tuple[Any, str]] = []  # attributes of Lightning's objects, to be restored

    # The fit ----------------------------------------------------------------------------------------------------

    def defer(self, trainer: pl.Trainer) -> None:
        """Defer timers until the next average."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            if self._audit is not None and isinstance(callback, Checkpoint):
                hook = functools.partial(self._allow, callback.on_train_batch_end)
                self._replace(callback, "on_train_batch_end", hook)
            if is_timed(callback):
                hook = functools.partial(self._call_if_communicating, callback.on_train_batch_end)
                self._replace(callback, "on_train_batch_end", hook)

    def begin_audit(self) -> None:
        """Audit the collectives of the world from now on, except those inside nodes and between peers."""
        if self._audit is not None:
            self._audit.install(ignoring=self._strategy.groups.process_groups)

    def restore(self) -> None:
        """Undo all replacements; a tuner in a callback starts the training twice."""
        if self._audit is not None:
            self._audit.uninstall()
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)

    def _replace(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        setattr(owner, name, value)
        self._replaced.append((owner, name))

    def _allow(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        assert self._audit is not None
        with self._audit.allowing():
            hook(*args, **kwargs)

    def _call_if_communicating(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._may_communicate:
            hook(*args, **kwargs)

    # The step ---------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Begin to check for collectives, if all optimizers are to step locally."""
        all_local = all(worker.is_local for worker in self._strategy.workers)
        self._may_communicate = not all_local
        self.choose_backward_sync()  # Lightning turns it on after each training_step of manual optimization
        if self._audit is not None and all_local:
            self._audit.check()
            self._audit.begin()

    def forbid(self) -> None:
        """Do not let callbacks communicate until the next batch, because some ranks have ended."""
        self._may_communicate = False

    def end_backward(self, worker: Worker) -> None:
        """Check that a local step's backward pass has sent nothing."""
        if self._audit is not None and worker.is_local:
            self._audit.check()

    def end_step(self, has_communicated: bool) -> None:
        """Let callbacks communicate until the next batch, if the step has communicated."""
        if has_communicated:
            self._may_communicate = True
            if self._audit is not None:
                self._audit.pause()
        self.choose_backward_sync()

    def choose_backward_sync(self) -> None:
        """Let DDP reduce in synchronous steps, and on two levels inside the node in local steps; else not at all."""
        model, workers = self._strategy.model, self._strategy.workers
        assert isinstance(model, DistributedDataParallel)
        if model.require_backward_grad_sync and not all(worker.reduces_in_backward for worker in workers):
            # DDP would rebuild its buckets, with a broadcast, in the next forward pass; now all ranks are here.
            with contextlib.nullcontext() if self._audit is None else self._audit.allowing():
                model.reducer._rebuild_buckets()
        model.require_backward_grad_sync = any(self._strategy.regime.ddp_reduces(worker) for worker in workers)

    def pause_audit(self) -> None:
        """Allow collectives up to the next local batch, and none before."""
        if self._audit is not None:
            self._audit.check()
            self._audit.pause()
