"""The common part of all strategies: a worker for each optimizer, and the calls around its steps.

A strategy is silent while an exception ends the fit.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import check_one_of
from lightning_lowbw.comm.agreement import agree, failing_together
from lightning_lowbw.comm.collectives import TrafficLedger
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.quantized import Quantized
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import OF_AUTO, AutoChoice
from lightning_lowbw.strategies.keywords import Needs
from lightning_lowbw.strategies.shared_buffers import SharedBuffers, buffers_by_optimizer
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.step_hooks import Reduction, StepHooks, parameters_of, scaler_of
from lightning_lowbw.sync.checks import warn_of_compression
from lightning_lowbw.sync.kernels import prepare_kernels
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.plain_loop import eagerly, last_pre_hook
from lightning_lowbw.sync.state import whole_momentum
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

    buffers: SharedBuffers  # of a fit, as is the reduction
    _is_torn_down = False  # the Trainer has handled the exception that ended the fit
    _reduction: Reduction  # of gradients
    _candidates: Sequence[str] = OF_AUTO  # methods that may replace "auto"
    _all_ranks_save = False  # whether each rank writes weights and buffers; else rank 0 alone

    def _hold(self, method: Method, options: dict[str, Any]) -> None:
        """Keep the arguments of the constructor; "resume" is one of the options."""
        check_one_of("resume", options["resume"], get_args(Needs))
        self.method, self._options = method, options
        self._given = method  # before this fit has chosen numbers for an "auto", or for a fraction of the run
        self._first_callback = FirstCallback(self)
        self._ends = contextlib.ExitStack()  # what the parts of a fit do at its end
        self._begin_fit()

    def _begin_fit(self) -> None:
        """Forget the last fit, before the model and the optimizers are set up."""
        self.ledger, self._workers = TrafficLedger(), dict[int, Any]()  # by id of the optimizer
        self.signals, self.auto = Signals(self._workers, self._ends), AutoChoice(self._candidates)
        self._is_evaluated = False  # whether a validation is going on
        self._is_fit_over = False  # everything is whole then, and on the CPU: nothing is averaged or checked any more
        self._has_equal_epochs = False  # whether it is known that all ranks end an epoch at the same batch
        self._has_own_states = False  # whether the optimizers' states are of this rank's own shard of a checkpoint
        self._has_warned = False  # that weights were changed while the anchor was shown

    def _begin_workers(self, trainer: pl.Trainer) -> None:
        """Make the workers of the optimizers that have been set up, and the hooks that are called around steps.

        Collective: all ranks.
        """
        self._make_workers()
        checks.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
        self._step_hooks = StepHooks(self._reduction, trainer, self.worker_of)
        self._ends.callback(self._step_hooks.release)

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
        """The same workers if the method averages weights; no workers if it exchanges gradients in every step."""
        return list(self._workers.values()) if self.method.when.averages_weights else []

    def worker_of(self, optimizer: Any) -> Synchronizer:
        """Return the worker of an optimizer.

        Raises:
            ConfigurationError: `configure_optimizers` has not returned it.
        """
        optimizer = unwrapped(optimizer)
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
        self._given = method
        self._use(method)
        for worker in self.workers:
            worker.method = method

    def _use(self, method: Method) -> None:
        """Begin the next step with a method."""
        self.method = method

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
    def _acts_alone(self) -> bool:
        """Whether a world of one rank is trained otherwise than without the strategy."""
        return self.method.acts_alone

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.world_size > 1 or self._acts_alone:  # not before: FSDP loads states by an empty step of the optimizer
            self._step_hooks.watch()
        self._look()
        self.signals.defer(self.trainer)
        self._has_equal_epochs = checks.agree_on_length(self.trainer)
        if not self._has_own_states:
            checks.agree_on_states(self.workers)
        self._start_workers()
        is_search = self.is_search(self.trainer)
        if self.replicas and not is_search:
            checks.warn_if_seen_twice(self.trainer, self.replicas)
        self.auto.begin_training(self.method, self.workers, self.trainer, is_search=is_search)

    def _start_workers(self) -> None:
        """Start the workers: the state of a resume has been loaded, and callbacks have set schedules.

        Collective: all ranks.
        """
        if self.workers:
            # The given method: a tuner's search has had another number of steps.
            self.method = checks.resolved(self._given, self.trainer, self.workers) or self.method
            for worker in self.workers:
                worker.method = self.method
                worker.begin()
                warn_of_compression(self.method.what, self.method.when, worker.params, worker.peers)
            # The choice of a schedule times the exchange of int8, too.
            prepare_kernels(self.workers, also=[Quantized()] if self.auto.is_open(self.method) else [])
            if not self.is_search(self.trainer):
                checks.warn_of_schedule(self.method, self.trainer, self.workers)

    # Optimizers, and their workers --------------------------------------------------------------------------------

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

    def _check_late_faults(self) -> None:
        """Raise, on all ranks, the faults that the last step has found after its message."""
        if not self._is_fit_over:
            for worker in self.workers:
                worker.check_late_faults()

    def _check_equal(self) -> None:
        """Check what has to be equal on all ranks if gradients are exchanged; each replica trains alone."""
        if not self.replicas:
            checks.agree_on_hyperparameters(self.trainer)

    def _share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, which a validation or a save may read; averages include buffers."""
        if not self.replicas:
            self.buffers.share_(self.trainer.lightning_module, self.ledger, self.root_device)

    def adopt(self, method: Method) -> None:
        """Continue with another method that exchanges gradients, after a step that has left no residuals.

        Collective: all ranks, which have chosen the same.
        """
        before = self.workers
        self.signals.settle()  # a rank repeats its request
        self._use(method)
        self._workers.clear()
        self._make_workers()
        for worker, old in zip(self.workers, before, strict=True):
            worker.step, worker.batch, worker.requests = old.step, old.batch, old.requests

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        checks.refuse_replaced(self._trained_optimizers, self._workers)
        if self.buffers.is_check_due:
            self.buffers.compare(self.trainer.lightning_module, self.root_device)

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._step_hooks.has_gradients = True
        for worker in self.replicas:
            worker.observe_loss(closure_loss.detach())

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        user_optimizer = unwrapped(optimizer)
        # Nothing to exchange; Lightning's own optimizer for a module that returns none has no parameters.
        if not any(True for _ in parameters_of(user_optimizer)):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        worker = self.worker_of(user_optimizer)

        def exchanging_closure() -> Any:
            result = closure()
            self._step_hooks.end_closure(worker)
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
        """Read the requests of the other ranks, and prepare the next step."""
        if self.replicas and worker.peers.num_ranks > 1:  # its averages have brought the requests
            if self.world_size > 1:
                self.signals.read_requests(worker, self.trainer)
            return
        self.signals.end_step(worker, self.trainer)
        method = self.auto.end_step(worker, list(self._workers.values()), self.trainer)
        if method is not None:
            self.adopt(method)
            self._start_workers()
        elif self.trainer.lightning_module.automatic_optimization:  # else Lightning's DDP broadcasts none
            self.buffers.note_step(self.workers)

    # What the first callback calls ------------------------------------------------------------------------------

    def is_search(self, trainer: pl.Trainer) -> bool:
        """Return whether a tuner searches, with callbacks of its own: the fit comes after it."""
        is_needed = self.world_size > 1 or self._acts_alone
        return is_needed and self._first_callback not in checks.callbacks_in(trainer)

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
            self._check_equal()

    def end_batch(self) -> None:
        """Save if it was requested."""
        self.signals.save_if_due(self.trainer)

    def end_epoch(self) -> None:
        """Agree on monitored metrics and on buffers; not if other ranks may be in a step."""
        if self._has_equal_epochs:
            self.agree_on_metrics()
            self._share_buffers()

    def agree_on_metrics(self) -> None:
        """Average the metrics that callbacks and schedulers monitor."""
        self._look()
        checks.agree_on_monitored(self.trainer, self.root_device)
        self._check_equal()

    def begin_evaluation(self) -> None:
        """Begin a validation or a test: the anchor is shown up to its end."""
        self._is_evaluated = True
        self.show_anchor()

    def _look(self) -> None:
        """Take in the weights as other code has left them: nothing to do, unless the model is sharded."""

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
        if self._trainer is None or not (self._workers or self._is_fitting) or self._is_shown:
            return
        if self.is_interrupted or self._is_fit_over:  # other ranks may be elsewhere
            return
        self._look()
        for worker in self.replicas:
            worker.replica.show()
        if not weights_only:
            self._share_buffers()

    def hide_anchor(self) -> None:
        """Give this rank its own weights back; not after a resume with no step left, which ends with the anchor."""
        if not self._is_shown or self.is_interrupted or self._is_fit_over:
            return
        self._look()
        are_changed = [worker.replica.hide() for worker in self.replicas]
        if any(are_changed) and not self._has_warned:
            self._has_warned = True
            checks.warn_of_dropped_changes(self.trainer)

    def finish(self) -> None:
        """Make the weights equal on all ranks, at the end of the training."""
        self._look()
        for worker in self.replicas:
            worker.finish()

    # The end, validation and saves ------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self.signals.settle()
        self._check_late_faults()
        self._check_equal()
        checks.agree_on_weights(self.trainer.lightning_module, self.workers)
        for worker in self._workers.values():
            whole = whole_momentum(worker.correction, worker.peers)  # each rank of a node had a part
            for parameter, velocity in whole.items():
                worker.optimizer.state[parameter][worker.correction.velocity_key] = velocity
        self._share_buffers()
        super().on_train_end()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.auto.restart_clock(self.ledger)
        self._is_evaluated = False
        self._look()
        self.hide_anchor()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_interrupted:  # nothing is saved, and nothing communicated
            return self.trainer.lightning_module.state_dict()
        if self._is_fitting and not self._is_fit_over:
            # A save may come between a new optimizer and its first batch.
            checks.refuse_replaced(self._trained_optimizers, self._workers)
            self._check_late_faults()
            self.show_anchor(weights_only=not self._all_ranks_save)
        return super().lightning_module_state_dict()

    @override
    def teardown(self) -> None:
        self._is_fit_over = True
        trainer = self._trainer
        if trainer is not None and self._first_callback in checks.callbacks_in(trainer):
            checks.callbacks_in(trainer).remove(self._first_callback)
        self._ends.close()
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
        """Set it; a Trainer of the other package of Lightning is refused."""
        checks.check_package(self, accelerator)
        self._accelerator = accelerator


class FirstCallback(Callback):
    """The first callback of the list, so that the other callbacks see the anchor, and metrics that agree.

    Args:
        strategy: the strategy that it calls.
    """

    def __init__(self, strategy: BaseStrategy) -> None:
        self._strategy = strategy

    def on_train_epoch_start(self, *_: Any) -> None:
        self._strategy.begin_epoch()

    def on_train_batch_end(self, *_: Any) -> None:
        self._strategy.end_batch()

    def on_validation_start(self, *_: Any) -> None:
        self._strategy.begin_evaluation()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._strategy.agree_on_metrics()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._strategy.end_epoch()

    def on_train_end(self, *_: Any) -> None:
        self._strategy.finish()

    on_test_start = on_validation_start  # type: ignore[assignment]  # has no names of arguments


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the user's optimizer, without Lightning's wrapper."""
    user_optimizer: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return user_optimizer
