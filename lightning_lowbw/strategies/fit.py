"""One fit: a worker for each optimizer, and the calls around its steps, by the strategy and by the Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbw.comm.agreement import failing_together
from lightning_lowbw.comm.collectives import TrafficLedger
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import CPU
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.quantized import Quantized
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import AutoChoice
from lightning_lowbw.strategies.shared_buffers import SharedBuffers, buffers_by_optimizer
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.step_hooks import StepHooks
from lightning_lowbw.strategies.view import View
from lightning_lowbw.sync.checks import warn_of_compression
from lightning_lowbw.sync.kernels import prepare_kernels
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.state import whole_momentum
from lightning_lowbw.sync.synchronizer import Synchronizer

MakeWorker = Callable[[Optimizer, pl.LightningModule, Callable[[], Mapping[str, Tensor]]], Synchronizer]


class Fit(Callback):
    """The state of one fit, and what a strategy does with it.

    It is the first callback of the Trainer, so that the other callbacks see the anchor, and metrics that agree.

    Args:
        method: the configuration to begin with.
        candidates: names of the methods that may replace "auto".

    Attributes:
        given: the configuration to begin with, before a choice of numbers for an "auto", or for a fraction of the run.
        method: the configuration of the coming step.
        ledger: the traffic of this rank.
        ends: what the parts of the fit do at its end.
        workers: the method's workers, in the order of the optimizers; an optimizer without parameters has none.
        replicas: the same workers if the method averages weights; no workers if it exchanges gradients in every step.
        signals: SIGTERM and SLURM's, deferred from before the sanity check on.
        auto: the choice of a method, if there is one to make.
        buffers: the buffers that rank 0 sends; there when the model is set up, as are the following.
        trainer: the Trainer; None until `begin`.
        view: the model.
        step_hooks: the calls in an optimizer's step.
        settle: an elastic group applies a hidden round here, before the anchor is shown, and at the end.
        is_over: whether the fit has ended: everything is whole then, and on the CPU, and nothing is communicated.
        is_evaluated: whether a validation is going on.
        has_own_states: whether the optimizers' states are of this rank's own shard of a checkpoint.
        restore: loads random numbers and a GradScaler's state of a checkpoint, in the first batch.
        saved: the shards of each checkpoint, by the path of rank 0.
        removed: paths of checkpoints that rank 0 has removed; the other ranks may still have their shards.
        unneeded: shards of this rank that no checkpoint needs any more.
    """

    buffers: SharedBuffers
    view: View
    step_hooks: StepHooks
    _make_worker: MakeWorker

    def __init__(self, method: Method, candidates: Sequence[str]) -> None:
        self.given = self.method = method
        self.ledger, self.ends = TrafficLedger(), contextlib.ExitStack()
        self._workers = dict[int, Any]()  # by id of the optimizer
        self.workers, self.replicas = list[Any](), list[LocalSync]()
        self.signals, self.auto = Signals(self._workers, self.ends), AutoChoice(candidates)
        self.trainer: Any = None
        self.settle: Callable[[], None] | None = None
        self.is_over = self.is_evaluated = self.has_own_states = False
        self.restore: Callable[[], None] | None = None
        self.saved, self.removed, self.unneeded = dict[str, dict[str, Any]](), list[str](), list[dict[str, Any]]()
        self._has_equal_epochs = False  # whether it is known that all ranks end an epoch at the same batch
        self._has_warned = False  # that weights were changed while the anchor was shown

    # The beginning --------------------------------------------------------------------------------------------------

    def begin(self, trainer: pl.Trainer, view: View, make_worker: MakeWorker) -> None:
        """Make the workers of the optimizers that have been set up, and the hooks that are called around steps.

        Collective: all ranks.

        Args:
            trainer: of the fit.
            view: the model.
            make_worker: returns the worker of an optimizer of the module, which has these buffers.
        """
        self.trainer, self.view, self._make_worker = trainer, view, make_worker
        self._make_workers()
        checks.check_optimizers(trainer.optimizers, trainer.lightning_module)
        self.step_hooks = StepHooks(view, trainer, self.worker_of)
        self.ends.callback(self.step_hooks.release)
        if self.is_search:
            self.trainer.callbacks.insert(0, self)
            self.ends.callback(self._remove_callback)

    def _make_workers(self) -> None:
        module, optimizers = self.trainer.lightning_module, self._trained_optimizers
        self._workers.clear()
        with failing_together():
            buffers = buffers_by_optimizer(module, optimizers)
            for optimizer in optimizers:
                self._workers[id(optimizer)] = self._make_worker(optimizer, module, buffers[id(optimizer)])
        self.workers = list(self._workers.values())
        for worker in self.workers:
            worker.skip_norm = self.trainer.strategy.skip_norm
        self.replicas = [worker for worker in self.workers if isinstance(worker, LocalSync)]

    def _remove_callback(self) -> None:
        if self in self.trainer.callbacks:  # else a tuner has put its own callbacks there
            self.trainer.callbacks.remove(self)

    @property
    def _trained_optimizers(self) -> list[Optimizer]:
        return [each for each in self.trainer.optimizers if any(group["params"] for group in each.param_groups)]

    @property
    def is_running(self) -> bool:
        """Whether the fit has begun, and has not ended."""
        return self.trainer is not None and not self.is_over

    @property
    def is_needed(self) -> bool:
        """Whether the strategy changes the training; with one rank most methods do not."""
        may_grow = any(worker.peers.may_grow for worker in self.workers)
        return self.trainer.world_size > 1 or self.method.acts_alone or may_grow

    @property
    def is_search(self) -> bool:
        """Whether a tuner searches, with callbacks of its own: the fit comes after it."""
        return self.is_needed and self not in self.trainer.callbacks

    def start(self) -> None:
        """Start the training: the state of a resume has been loaded, and callbacks have set schedules.

        Collective: all ranks.
        """
        if self.is_needed:  # not before: FSDP loads states by an empty step of the optimizer
            self.step_hooks.watch()
        self.view.look()
        self.signals.defer(self.trainer)
        self._has_equal_epochs = checks.agree_on_length(self.trainer)
        if not self.has_own_states:
            checks.agree_on_states(self.workers)
        self._start_workers()
        if self.replicas and not self.is_search:
            checks.warn_if_seen_twice(self.trainer, self.replicas)
        self.auto.begin_training(self.method, self.workers, self.trainer, is_search=self.is_search)

    def _start_workers(self) -> None:
        if not self.workers:
            return
        # A tuner's search has had another number of steps, and has resolved its own method.
        self.use(checks.resolved(self.given, self.trainer, self.workers) or self.method)
        for worker in self.workers:
            worker.begin()
            warn_of_compression(self.method.what, self.method.when, worker.params, worker.peers)
        # The choice of a schedule times the exchange of int8, too.
        prepare_kernels(self.workers, also=[Quantized()] if self.auto.is_open(self.method) else [])
        if not self.is_search:
            checks.warn_of_schedule(self.method, self.trainer, self.workers)

    # Optimizers and their workers -----------------------------------------------------------------------------------

    def worker_of(self, optimizer: Any) -> Synchronizer:
        """Return the worker of an optimizer.

        Raises:
            ConfigurationError: `configure_optimizers` has not returned it.
        """
        optimizer = unwrapped(optimizer)
        if id(optimizer) not in self._workers:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not one that configure_optimizers returned; "
                f"{type(self.trainer.strategy).__name__} exchanges gradients for those only. Return it from "
                "configure_optimizers; an optimizer cannot be replaced in mid-fit, its param groups may be changed."
            )
        worker: Synchronizer = self._workers[id(optimizer)]
        return worker

    def _refuse_replaced(self) -> None:
        """Refuse optimizers that a callback or a hook has put in the place of the optimizers of this fit.

        A tuner's search (lr_find) may replace the list by a list of the same optimizers. Nothing is communicated,
        because hooks run on all ranks.

        Raises:
            ConfigurationError: on each rank that has other optimizers.
        """
        optimizers = self._trained_optimizers
        if [id(optimizer) for optimizer in optimizers] != list(self._workers):
            now = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            began = ", ".join(type(worker.optimizer).__name__ for worker in self.workers) or "none"
            raise ConfigurationError(
                f"The optimizers have been replaced in mid-fit: {now} in place of {began}. The strategy keeps state "
                "for the optimizers with which the fit began. Change their param groups instead; or save the weights, "
                "load them into the module, and begin a new fit, in which configure_optimizers returns the other "
                "optimizers."
            )

    def use(self, method: Method) -> None:
        """Take a method with other values for the next steps; on all ranks alike."""
        for worker in self.workers:
            worker.use(method)
        self.method = method
        if self.trainer is not None:
            self.view.use(method)

    def adopt(self, method: Method) -> None:
        """Continue with another method that exchanges gradients, after a step that has left no residuals.

        Collective: all ranks, which have chosen the same.
        """
        before, self.method = self.workers, method
        self.signals.settle()  # a rank repeats its request
        self.view.use(method)
        self._make_workers()
        for worker, old in zip(self.workers, before, strict=True):
            worker.step, worker.batch, worker.requests = old.step, old.batch, old.requests
            worker.skipped_steps = old.skipped_steps

    # A batch, and a step --------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Prepare for the steps of a batch.

        Collective: all ranks, if buffers are compared.
        """
        trainer = self.trainer
        self._refuse_replaced()
        if self.buffers.is_check_due:
            self.buffers.compare(trainer.lightning_module, trainer.strategy.root_device)
        for worker in self.workers:  # the number of the batch, by which ranks are found that have left out a step
            worker.batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if self.restore is not None:  # not before the first batch, because Lightning draws some numbers before it
            self.restore()
            self.restore = None
        self.hide_anchor()  # that of a resume, or of code that has asked for the state of the model
        self.view.begin_batch(self.workers, is_timing=self.auto.is_timing)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], take: Callable[[Callable[[], Any]], Any]) -> Any:
        """Take a step of an optimizer, and return what Lightning returns.

        Collective: all ranks, as the method says.

        Args:
            optimizer: the optimizer of the user, or Lightning's wrapper.
            closure: makes the gradients.
            take: lets Lightning take the step, with a closure.
        """
        user_optimizer = unwrapped(optimizer)
        # Nothing to exchange; Lightning's own optimizer for a module that returns none has no parameters.
        if not any(group["params"] for group in user_optimizer.param_groups):
            return take(closure)
        worker = self.worker_of(user_optimizer)
        result = self.step_hooks.step(worker, user_optimizer, closure, take)
        self._end_step(worker)
        return result

    def _end_step(self, worker: Any) -> None:
        """Read the requests of the other ranks, and prepare the next step."""
        if self.replicas and worker.peers.num_ranks > 1:  # its averages have brought the requests
            if self.trainer.world_size > 1:
                self.signals.read_requests(worker, self.trainer)
        else:
            self.signals.end_step(worker, self.trainer)
            method = self.auto.end_step(worker, self.workers, self.trainer) if self.auto.is_timing else None
            if method is not None:
                self.adopt(method)
                self._start_workers()
            elif self.buffers.may_compare and self.trainer.lightning_module.automatic_optimization:
                self.buffers.note_step(self.workers)  # in manual optimization Lightning's DDP broadcasts no buffers
        self.view.end_step(worker, self.workers)

    def on_train_batch_end(self, *_: Any) -> None:
        """End a batch, before the other callbacks, which may change weights; save if it was requested."""
        self.view.end_batch()
        if self.signals.save_is_due:
            self.signals.save(self.trainer)

    # An epoch, and a validation -------------------------------------------------------------------------------------

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin an epoch, whose data may have changed."""
        trainer = self.trainer
        is_new = trainer.fit_loop._last_train_dl_reload_epoch == trainer.current_epoch
        if is_new and trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:
            self._has_equal_epochs = checks.agree_on_length(trainer)
        if self._has_equal_epochs:  # before a step: schedulers may have followed what an epoch's end has logged
            self._check_equal()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Agree on monitored metrics and on buffers; not if other ranks may be in a step."""
        if self._has_equal_epochs:
            checks.refuse_early_end(self.trainer)
            self._agree_on_metrics()
            self._share_buffers()

    def on_validation_end(self, *_: Any) -> None:
        """Agree on monitored metrics, before the other callbacks read them."""
        if not self.trainer.sanity_checking:
            self._agree_on_metrics()

    def _agree_on_metrics(self) -> None:
        """Average the metrics that callbacks and schedulers monitor."""
        self.view.look()
        checks.agree_on_monitored(self.trainer, self.trainer.strategy.root_device)
        self._check_equal()

    def _check_equal(self) -> None:
        """Check what has to be equal on all ranks if gradients are exchanged; each replica trains alone."""
        if not self.replicas:
            checks.agree_on_hyperparameters(self.trainer)

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, which a validation or a save may read; averages include buffers."""
        if not self.replicas:
            self.buffers.share_(self.trainer.lightning_module, self.ledger, self.trainer.strategy.root_device)

    def _check_late_faults(self) -> None:
        """Raise, on all ranks, the faults that the last step has found after its message."""
        for worker in self.workers:
            worker.check_late_faults()

    @property
    def _is_shown(self) -> bool:
        """Whether the model has the anchor in the place of this rank's weights."""
        return any(worker.replica.own is not None for worker in self.replicas)

    def show_anchor(self, *, weights_only: bool = False) -> None:
        """Put tensors that are equal on all ranks into the model, up to the end of a validation or of a save.

        The anchor, without communication, if the method averages weights; else the buffers of rank 0.

        Args:
            weights_only: whether only rank 0 reads the buffers.
        """
        if self.is_over:  # other ranks may be elsewhere
            return
        if self.settle is not None:
            self.settle()
        if self._is_shown:
            return
        self.view.look()
        for worker in self.replicas:
            worker.replica.show()
        if self._is_shown:
            self.view.share_in_node(self.replicas)
        if not weights_only:
            self._share_buffers()

    def hide_anchor(self) -> None:
        """Give this rank its own weights back; not after a resume with no step left, which ends with the anchor."""
        if not self._is_shown or self.is_over:
            return
        self.view.look()
        are_changed = [worker.replica.hide() for worker in self.replicas]
        if any(are_changed) and not self._has_warned:
            self._has_warned = True
            checks.warn_of_dropped_changes(self.trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Begin a validation: the anchor is shown up to its end."""
        self.is_evaluated = True
        self.show_anchor()

    def end_validation(self) -> None:
        """End a validation, after all callbacks."""
        self.auto.restart_clock(self.ledger)
        self.is_evaluated = False
        self.view.look()
        self.hide_anchor()

    def begin_save(self, *, weights_only: bool) -> None:
        """Begin a save of the model: the anchor is shown up to its end, or up to the next batch.

        Args:
            weights_only: as for `show_anchor`.
        """
        self._refuse_replaced()  # a save may come between a new optimizer and its first batch
        self._check_late_faults()
        self.show_anchor(weights_only=weights_only)

    def end_save(self) -> None:
        """End a save."""
        self.auto.restart_clock(self.ledger)
        if not self.is_evaluated:
            self.hide_anchor()

    # The end --------------------------------------------------------------------------------------------------------

    def on_train_end(self, *_: Any) -> None:
        """Make the weights equal on all ranks, at the end of the training, before other callbacks see them."""
        if self.settle is not None:
            self.settle()
        self.view.look()
        for worker in self.replicas:
            worker.finish()
        self.view.share_in_node(self.replicas)

    def end(self) -> None:
        """Check what the ranks must have in common after the last step, and let optimizers and buffers be whole."""
        self.signals.settle()
        self._check_late_faults()
        self._check_equal()
        checks.agree_on_weights(self.trainer.lightning_module, self.workers)
        for worker in self.workers:
            whole = whole_momentum(worker.correction, worker.peers)  # each rank of a node had a part
            for parameter, velocity in whole.items():
                worker.optimizer.state[parameter][worker.correction.velocity_key] = velocity
        self._share_buffers()

    def close(self) -> None:
        """Undo what the parts of the fit have changed, and move all state to the CPU; may be called again."""
        self.is_over = True
        self.ends.close()
        for worker in self.workers:
            worker.to(CPU)


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the user's optimizer, without Lightning's wrapper."""
    user_optimizer: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return user_optimizer
