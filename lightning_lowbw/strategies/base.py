"""The common part of all strategies: a worker for each optimizer, and the calls around its steps.

A strategy is silent while an exception ends the fit.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.comm.agreement import agree, failing_together
from lightning_lowbw.comm.collectives import TrafficLedger
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import OF_AUTO, AutoChoice
from lightning_lowbw.strategies.equality import (
    FirstCallback,
    agree_on_monitored,
    agree_on_states,
)
from lightning_lowbw.strategies.hooks import GradientHooks, Hooks, ReplicaHooks
from lightning_lowbw.strategies.shared_buffers import SharedBuffers, buffers_by_optimizer
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.step_hooks import Reduction, StepHooks, parameters_of, scaler_of
from lightning_lowbw.sync.checks import warn_of_compression
from lightning_lowbw.sync.kernels import prepare_kernels
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.plain_loop import eagerly, last_pre_hook
from lightning_lowbw.sync.quantized import Quantized
from lightning_lowbw.sync.synchronizer import Synchronizer

T = TypeVar("T")
RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data
SETTLE_S = 0.02


class BaseStrategy(ParallelStrategy):
    """A strategy with a method and a worker for each optimizer.

    Its ranks are silent after an exception. Lightning communicates while it handles one: `trainer.save_checkpoint` ends
    with a barrier, and `ModelCheckpoint` broadcasts names. A callback that saves then would wait for ranks that never
    come, or meet them in the middle of an exchange, which aborts the process. When the user's code has caught the
    exception they communicate again.

    Attributes:
        method: the configuration; see `reconfigure`.
        ledger: the traffic of this rank since the start of the fit.
        signals: SIGTERM and SLURM's, deferred from before the sanity check on.
    """

    method: Method
    ledger: TrafficLedger
    buffers: SharedBuffers
    _is_torn_down = False  # the Trainer has handled what ended it
    _reduction: Reduction  # of gradients, as are the buffers by the engine
    _workers: dict[int, Any]  # by id of the optimizer
    _options: dict[str, Any]  # of the constructor; "resume" is one
    _candidates: Sequence[str] = OF_AUTO  # methods that may replace "auto"

    def _make_parts(self) -> None:
        """Make what touches Lightning."""
        self._given = self.method  # before this fit has chosen numbers for an "auto", or for a fraction of the run
        self._workers = {}
        self.signals = Signals(self._workers)
        self.auto = AutoChoice(self._candidates)
        self._choose_hooks()
        self._step_hooks = StepHooks(self._reduction)
        self._first_callback = FirstCallback()

    def _choose_hooks(self) -> None:
        """Choose the kind of hooks; without workers there is nothing to average."""
        if self._workers and self.method.averages_weights:
            self._hooks: Hooks = ReplicaHooks(self._workers, self.signals)
        else:
            self._hooks = GradientHooks(self._workers, self.signals, self.buffers, self.auto)

    def _begin_state(self) -> None:
        """Forget the last fit, or the steps with a method of another kind."""
        self._is_evaluated = False  # whether a validation is going on
        self._is_fit_over = False  # everything is whole then, and on the CPU: nothing is averaged or checked any more
        self._has_equal_epochs = False  # whether it is known that all ranks end an epoch at the same batch
        self._has_own_states = False  # whether the optimizers' states are of this rank's own shard of a checkpoint
        self.auto.begin_fit()

    def _begin_fit(self) -> None:
        """Forget the last fit, before the model and the optimizers are set up."""
        self.ledger = TrafficLedger()
        self._workers.clear()
        self.signals.begin_fit()
        self._begin_state()

    def _begin_workers(self, trainer: pl.Trainer) -> None:
        """Make the workers of the optimizers that have been set up, and the hooks that are called around steps.

        Collective: all ranks.
        """
        self._make_workers()
        self._choose_hooks()
        checks.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
        self._step_hooks.install(trainer, self.worker_of)

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the present fit."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _trainer(self) -> pl.Trainer | None:
        """The same, where there may be none yet, or none any more."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    @property
    def _is_fitting(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    @property
    def workers(self) -> list[Synchronizer]:
        """The method's workers, in the order of the optimizers, of the present fit or the last one."""
        return list(self._workers.values())

    @property
    def replicas(self) -> list[LocalSync]:
        """Those of methods that average weights."""
        return list(self._workers.values()) if self.method.averages_weights else []

    def worker_of(self, optimizer: Any) -> Synchronizer:
        """Return the worker of an optimizer.

        Raises:
            ConfigurationError: `configure_optimizers` has not returned it.
        """
        optimizer = _unwrapped(optimizer)
        if id(optimizer) not in self._workers:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not one that configure_optimizers returned; "
                f"{type(self).__name__} exchanges gradients for those only. Return it from configure_optimizers; an "
                "optimizer cannot be replaced in mid-fit, its param groups may be changed."
            )
        return self._workers[id(optimizer)]

    @property
    def _trained_optimizers(self) -> list[Optimizer]:
        """The optimizers that have parameters; an optimizer without parameters has no worker."""
        return [optimizer for optimizer in self.optimizers if any(True for _ in parameters_of(optimizer))]

    def reconfigure(self, method: Method) -> None:
        """Replace the method's configuration, for the next steps.

        Collective: all ranks.

        Raises:
            DisagreementError: on all ranks.
            ConfigurationError: on all ranks; a layer has sparse gradients, which the other method would exchange.
        """
        if self.workers and method.exchanges_gradients and self.lightning_module is not None:
            checks.refuse_sparse_gradients(self.lightning_module)
        agree(f"configuration of {type(self).__name__}", method.settings())
        self.method = self._given = method
        for worker in self.workers:
            worker.method = method

    def _agree_on_fit(self, others: Mapping[str, object]) -> None:
        """Check that all ranks begin the same fit: before callbacks are set up, which may communicate.

        Collective: all ranks.

        Raises:
            ConfigurationError: on each rank that has a callback of the other package of Lightning.
            DisagreementError: on all ranks.
        """
        trainer, name = self.trainer, type(self).__name__
        for callback in checks.callbacks_in(trainer):
            checks.check_package(callback, self)
        self.method = self._given
        agree("strategy", {"class": name})  # ranks with another class do other things from here on
        settings = checks.settings_of(trainer)
        agree(f"configuration of {name}", {**self.method.settings(), **self._options, **others, **settings})

    @property
    def _num_participants(self) -> int:
        """How many exchange something."""
        return self.world_size

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.signals.defer(self.trainer)
        self._has_equal_epochs = checks.agree_on_length(self.trainer)
        if not self._has_own_states:
            agree_on_states(self.workers, self._equals.group)
        self._start_workers()
        self._hooks.begin_training(self.trainer, self.method, is_search=self.is_search(self.trainer))

    def _start_workers(self) -> None:
        """Start the workers: the state of a resume has been loaded, and callbacks have set schedules.

        Collective: all ranks.
        """
        if self.workers:
            if (method := checks.resolved(self._given, self.trainer, self.workers)) is not None:
                self.method = method
                for worker in self.workers:
                    worker.method = method
            for worker in self.workers:
                worker.check_schedule()
                warn_of_compression(self.method.what, self.method.when, worker.params, worker.peers)
            # The choice of a schedule times the exchange of int8, too.
            prepare_kernels(self.workers, also=[Quantized()] if self.auto.is_open(self.method) else [])
            if self._num_participants > 1 and not self.is_search(self.trainer):
                checks.warn_of_schedule(self.method, self.trainer, self.workers)

    # Optimizers, and their workers --------------------------------------------------------------------------------

    @property
    def _equals(self) -> Peers:
        """The ranks with the same parameters as this rank: all ranks, or the ranks that have its shards."""
        raise NotImplementedError

    def _make_workers(self) -> None:
        """Make a worker for each optimizer that has parameters.

        Collective: all ranks.
        """
        module, optimizers = self.trainer.lightning_module, self._trained_optimizers
        with failing_together():
            buffers = buffers_by_optimizer(module, optimizers)
            for optimizer in optimizers:
                self._workers[id(optimizer)] = self._make_worker(optimizer, module, buffers[id(optimizer)])

    def _make_worker(self, optimizer: Optimizer, module: pl.LightningModule, buffers: Any) -> Synchronizer:
        raise NotImplementedError

    def _check_late_fault(self, worker: Synchronizer) -> None:
        """Raise, on all ranks, what the last step of a worker has found after its message."""
        worker.check_late_faults()

    def _check_late_faults(self) -> None:
        """Raise, on all ranks, what the last step has found after its message: it may be in the weights."""
        if not self._is_fit_over:
            self._hooks.check_late_faults(self._check_late_fault)

    def adopt(self, method: Method) -> None:
        """Continue with another method that exchanges gradients, after a step that has left no residuals.

        Collective: all ranks, which have chosen the same.
        """
        before = self.workers
        self.signals.settle()  # a rank repeats its request
        self.method = method
        self._workers.clear()
        self._make_workers()
        for worker, old in zip(self.workers, before, strict=True):
            worker.step, worker.batch, worker.requests = old.step, old.batch, old.requests

    def _refuse_replaced(self) -> None:
        """Refuse optimizers that a callback or a hook has put in the place of the optimizers of this fit.

        A tuner's search (lr_find) may replace the list by one of the same optimizers. Nothing is communicated, because
        hooks run on all ranks.

        Raises:
            ConfigurationError: on each rank that has other optimizers.
        """
        optimizers = self._trained_optimizers
        if [id(optimizer) for optimizer in optimizers] != list(self._workers):
            began = ", ".join(type(self._reduction.optimizer_of(worker)).__name__ for worker in self.workers)
            now = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ConfigurationError(
                f"The optimizers have been replaced in mid-fit: {now or 'none'} in place of {began or 'none'}. "
                f"{type(self).__name__} keeps state for the optimizers with which the fit began. Change their param "
                "groups instead; or save the weights, load them into the module, and begin a new fit, in which "
                "configure_optimizers returns the other optimizers."
            )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._refuse_replaced()
        self._hooks.begin_batch(self.trainer, self.root_device)

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._step_hooks.has_gradients = True
        for worker in self.workers:
            worker.observe_loss(closure_loss.detach())

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        user_optimizer = _unwrapped(optimizer)
        # Nothing to exchange; Lightning's own, where a module has none.
        if not any(True for _ in parameters_of(user_optimizer)):
            with self._step_hooks.allowing(user_optimizer):
                return super().optimizer_step(optimizer, closure, model, **kwargs)
        worker = self.worker_of(user_optimizer)

        def exchanging_closure() -> Any:
            worker.check_closure()
            result = closure()
            self._step_hooks.end_closure(worker, self.trainer)
            return result

        traceable = functools.partial(eagerly(), exchanging_closure)
        # With a GradScaler the hooks before a step run after the closure, and the gradients they write count, too.
        has_scaler = scaler_of(self.precision_plugin) is not None
        late = last_pre_hook(user_optimizer, worker.step_exchanged) if has_scaler else contextlib.nullcontext()
        with worker.stepping(), self._step_hooks.allowing(user_optimizer), late:
            result = super().optimizer_step(optimizer, traceable, model, **kwargs)
        self._end_step(worker)
        return result

    def _end_step(self, worker: Any) -> None:
        """Read what other ranks request, and prepare the next step."""
        method = self._hooks.end_step(worker, self.trainer)
        if method is not None:
            self.adopt(method)
            self._start_workers()

    # What the first callback calls ------------------------------------------------------------------------------

    def is_search(self, trainer: pl.Trainer) -> bool:
        """Return whether a tuner searches, with callbacks of its own: the fit comes after it."""
        return self.world_size > 1 and self._first_callback not in checks.callbacks_in(trainer)

    def _insert_first_callback(self, trainer: pl.Trainer) -> None:
        if (self._workers or self._is_fitting) and self.is_search(trainer):  # for validation and the like as well
            checks.callbacks_in(trainer).insert(0, self._first_callback)

    def begin_epoch(self) -> None:
        """Begin an epoch, whose data may have changed."""
        trainer = self.trainer
        is_new = trainer.fit_loop._last_train_dl_reload_epoch == trainer.current_epoch
        if is_new and trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:  # type: ignore[attr-defined]
            self._has_equal_epochs = checks.agree_on_length(trainer)
        if self._has_equal_epochs:  # before a step: schedulers may have followed what an epoch's end has logged
            self._hooks.check_equal(trainer)

    def end_batch(self) -> None:
        """Save if it was requested."""
        self.signals.save_if_due(self.trainer)

    def end_epoch(self) -> None:
        """Agree on monitored metrics, and on what else is looked at; not if other ranks may be in a step."""
        if self._has_equal_epochs:
            self.agree_on_metrics()
            self._hooks.share(self.trainer, self._equals, self.root_device)

    def agree_on_metrics(self) -> None:
        """Average the metrics that callbacks and schedulers monitor."""
        agree_on_monitored(self.trainer, self.root_device)
        self._hooks.check_equal(self.trainer)

    def begin_evaluation(self) -> None:
        """Begin a validation or a test: the anchor is shown up to its end."""
        self._is_evaluated = True
        self.show_anchor()

    def show_anchor(self, *, weights_only: bool = False) -> None:
        """Put tensors that are equal on all ranks into the model, up to the end of a validation or of a save.

        Args:
            weights_only: whether nobody looks at the buffers of other ranks than 0.
        """
        trainer = self._trainer
        if trainer is not None and (self._workers or self._is_fitting) and not self._hooks.is_shown:
            is_over = self.is_interrupted or self._is_fit_over  # other ranks may be elsewhere
            self._hooks.show(trainer, self._equals, self.root_device, is_over=is_over, weights_only=weights_only)

    def hide_anchor(self) -> None:
        """Give this rank its own weights back; not after a resume with no step left, which ends with the anchor."""
        if self._hooks.is_shown and not (self.is_interrupted or self._is_fit_over):
            self._hooks.hide(self.trainer)

    def finish(self) -> None:
        """Make the weights equal on all ranks, at the end of the training."""
        self._hooks.finish()

    # The end, validation and saves ------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self.signals.settle()
        self._check_late_faults()
        self._hooks.check_equal(self.trainer)
        self._hooks.end_training(self.trainer, self._equals, self.root_device)
        super().on_train_end()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.auto.restart_clock(self.ledger)
        self._is_evaluated = False
        self.hide_anchor()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_interrupted:  # nothing is saved
            return super().lightning_module_state_dict()
        if self._is_fitting and not self._is_fit_over:
            self._refuse_replaced()  # a save may come between a new optimizer and its first batch
        self._check_late_faults()
        if self._is_fitting:
            self.show_anchor(weights_only=True)
        return super().lightning_module_state_dict()

    @override
    def teardown(self) -> None:
        self._is_fit_over = True
        trainer = self._trainer
        if trainer is not None and self._first_callback in checks.callbacks_in(trainer):
            checks.callbacks_in(trainer).remove(self._first_callback)
        self.signals.restore()
        self._step_hooks.release()
        for worker in self.workers:
            worker.to(torch.device("cpu"))
        meets = trainer is not None and (self.signals.is_ending_all or not self.is_interrupted)
        super().teardown()
        self._is_torn_down = True
        if meets:
            # gloo must not release tensors during interpreter shutdown: its thread would wait for the GIL, and abort;
            # in stock DDP, too. A barrier holds no tensor, but the work before it does until it has been released.
            time.sleep(SETTLE_S)
            # No rank ends before all have saved: rank 0 may have the store, and a launcher may end the other ranks.
            self.barrier()

    # While an exception ends the fit ----------------------------------------------------------------------------

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is ending the fit of this rank; not a SIGTERM, which ends all ranks after one step."""
        is_unwinding = not self._is_torn_down and self._trainer is not None and self._trainer.interrupted
        return is_unwinding and not self.signals.is_ending_all

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._is_torn_down = False

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if name == RUN_STAGE and self._is_fitting:
            self.signals.defer(self.trainer)
        if not self.is_interrupted:
            super().barrier(name, *args, **kwargs)  # type: ignore[safe-super]

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj if self.is_interrupted else super().broadcast(obj, src)  # type: ignore[safe-super]

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self.is_interrupted else bool(super().reduce_boolean_decision(decision, all))

    # The two packages of Lightning ------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator of the Trainer, which sets it before anything else."""
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        """Set it.

        Raises:
            ConfigurationError: the Trainer belongs to the other package of Lightning.
        """
        checks.check_package(self, accelerator)
        self._accelerator = accelerator


def _unwrapped(optimizer: Any) -> Optimizer:
    """Return the user's optimizer, without Lightning's wrapper."""
    user_optimizer: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return user_optimizer
