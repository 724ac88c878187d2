"""What both strategies have in common: a worker for each optimizer, and no collective while an exception ends a fit."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.comm.agreement import agree, gather
from lightning_lowbw.comm.collectives import TrafficLedger
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import PACKAGES, package_of, twins
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.callback_agreement import agree_on_monitored
from lightning_lowbw.strategies.lost_peers import LostPeers
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.step_hooks import Clipping, StepGuard, exchange_unscaled_
from lightning_lowbw.sync.checks import warn_if_mostly_sent
from lightning_lowbw.sync.kernels import prepare_kernels, uses_of
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer, eagerly

T = TypeVar("T")

SETTLE_S = 0.02

RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data


class FirstCallback(Callback):
    """The first in the list of callbacks, so that all others get the consensus, and metrics that agree."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).begin_epoch()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).end_batch()

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).show_consensus()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            _of(trainer).agree_on_metrics()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).end_epoch()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).leave_consensus()


def _of(trainer: pl.Trainer) -> BaseStrategy:
    assert isinstance(trainer.strategy, BaseStrategy)
    return trainer.strategy


class BaseStrategy(ParallelStrategy):
    """A strategy with a method and a worker for each optimizer, whose ranks are silent after an exception.

    Lightning communicates while it handles an exception: `trainer.save_checkpoint` ends with a barrier, and
    `ModelCheckpoint` broadcasts names. A callback that saves then would wait for ranks that never come, or meet them in
    the middle of an exchange, which aborts the process. When the user's code has caught the exception they communicate
    again.

    Attributes:
        method: the configuration; see `reconfigure`.
        ledger: the traffic of this rank since the start of the fit.
        signals: SIGTERM and SLURM's, deferred from before the sanity check on.
    """

    method: Method
    ledger: TrafficLedger
    _workers: dict[int, Synchronizer]  # by id of the optimizer
    _options: dict[str, Any]  # of the constructor; "resume" is one
    _is_torn_down = False  # the Trainer has handled what ended it

    def _make_parts(self) -> None:
        """Make what touches Lightning; once more when this becomes a strategy of the other package."""
        self._given = self.method  # before this fit has chosen numbers for an "auto", or for a fraction of the run
        self.signals = Signals(self._workers)
        self.lost_peers = LostPeers()
        self._clipping = Clipping()
        self._guard = StepGuard()
        self._first_callback = FirstCallback()

    def _begin_state(self) -> None:
        """Forget the last fit, or the steps with a method of another kind."""
        self._is_fit_over = False  # everything is whole then, and on the CPU: nothing is averaged or checked any more
        self._has_new_gradients = False  # since the last exchange
        self._waits_for_hooks = False  # whether the gradients of this step are exchanged after Lightning's hooks
        self._has_warned_of_buffers = False

    @property
    def workers(self) -> list[Synchronizer]:
        """The method's workers, in the order of the optimizers, of the present fit or the last one."""
        return list(self._workers.values())

    @property
    def replicas(self) -> list[LocalSync]:
        """Those of methods that average weights."""
        return [worker for worker in self.workers if isinstance(worker, LocalSync)]

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the present fit."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def worker_of(self, optimizer: Any) -> Synchronizer:
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
            DisagreementError: on all ranks.
        """
        trainer, name = self.trainer, type(self).__name__
        self.method = self._given
        self.lost_peers.begin_fit(lambda: trainer.global_step)
        agree("strategy", {"class": name})  # others do other things from here on
        settings = checks.settings_of(trainer)
        agree(f"configuration of {name}", {**self.method.settings(), **self._options, **others, **settings})

    def _start_workers(self, num_participants: int, *, measures: bool = False) -> None:
        """Start the workers: the state of a resume has been loaded, and callbacks have set schedules.

        Collective: all ranks.

        Args:
            num_participants: that exchange something.
            measures: whether sparse steps are timed, to choose a schedule.
        """
        self._resolve_begin()
        for worker in self.workers:
            worker.check_schedule()
            warn_if_mostly_sent(self.method.what, self.method.when, worker.peers)
        if num_participants == 1:
            return
        if self.method.uses_kernels:
            prepare_kernels(self.root_device, uses_of(self.workers, measures=measures))
        if not self.is_search(self.trainer):
            checks.warn_of_schedule(self.method, self.trainer, self.workers)

    def _resolve_begin(self) -> None:
        """Turn a `begin_step` that is a fraction of the run into a number of steps; for each run anew.

        Collective: all ranks, if it is one.

        Raises:
            ConfigurationError: on all ranks; the length of the run is not known.
        """
        begin = getattr(self._given.when, "begin_step", 0)
        if not isinstance(begin, float):
            return
        num_steps = max(gather(checks.num_steps_of_fit(self.trainer, self.workers), "number of steps"))
        if num_steps == math.inf:
            raise ConfigurationError(
                f"begin_step={begin} of a run whose number of steps is not known: give a number of steps."
            )
        step = round(begin * num_steps)
        self.method = self._given.replace(begin_step=step)
        for worker in self.workers:
            worker.method = self.method
        rank_zero_info(f"{type(self).__name__}: synchronous up to step {step} of {num_steps:.0f}.")

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._has_new_gradients = True

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        worker = self.worker_of(optimizer)
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

        def exchanging_closure() -> Any:
            worker.check_closure()
            result = closure()
            self._end_closure(worker)
            return result

        with self._guard.allowing(own), worker.stepping():
            result = super().optimizer_step(
                optimizer, functools.partial(eagerly(), exchanging_closure), model, **kwargs
            )
            self._check_exchanged(worker)
        self._end_step(worker)
        return result

    @torch.no_grad()
    def _end_closure(self, worker: Synchronizer) -> None:
        """Replace the gradients of the optimizer that steps by those it steps with; or let `_end_hooks` do it."""
        if worker.is_local:  # Lightning alone clips and scales
            self._exchange(worker)
            return
        has_new, self._has_new_gradients = self._has_new_gradients, False
        if self.trainer.lightning_module.automatic_optimization and not has_new:
            # The batch norm epoch of StochasticWeightAveraging: sent again these gradients would count twice.
            if not worker.reduces_in_backward:
                worker.optimizer.zero_grad(set_to_none=True)
            return
        if worker.clips_before_exchange:
            self._waits_for_hooks = True
        else:
            self._exchange_unscaled(worker)

    def _end_hooks(self, worker: Synchronizer) -> None:
        """Exchange a gradient that is clipped before, where Lightning would clip: after `on_before_optimizer_step`.

        The hook gets this rank's own gradient, as clipping does. What it writes into param groups counts in this step.
        """
        if self._waits_for_hooks:
            self._waits_for_hooks = False
            self._exchange_unscaled(worker, is_after_hooks=True)

    def _check_exchanged(self, worker: Synchronizer) -> None:
        """Raise ConfigurationError if `_end_hooks` has not been called."""
        if self._waits_for_hooks:
            self._waits_for_hooks = False
            raise ConfigurationError(
                f"{type(self.precision_plugin).__name__} has stepped {type(worker.optimizer).__name__} without calling "
                "its _after_closure, so the gradients were not exchanged. Let its optimizer_step end in that of "
                "Lightning's Precision; or use strategy='ddp'."
            )

    @torch.no_grad()
    def _exchange_unscaled(self, worker: Synchronizer, *, is_after_hooks: bool = False) -> None:
        exchange = functools.partial(self._exchange, worker)
        exchange_unscaled_(self.precision_plugin, worker.optimizer, exchange, is_after_hooks=is_after_hooks)

    def _exchange(self, worker: Synchronizer, skip_nonfinite: bool = False) -> bool:
        """Check for faults, clip, exchange; return whether the step is to be taken."""
        raise NotImplementedError

    def _has_mean(self, worker: Synchronizer) -> bool:
        """Return whether the gradients of the coming step are means already."""
        return False

    def _check_clipping(self, worker: Synchronizer) -> None:
        """Raise ConfigurationError where gradients are clipped by hand, and are not what the method clips."""
        is_of_rank = worker.is_local or worker.clips_before_exchange
        if not (self.trainer.lightning_module.automatic_optimization or is_of_rank or self._has_mean(worker)):
            raise ConfigurationError(
                f"clip_gradients in manual optimization, step {worker.step}: here the mean over ranks is clipped, and "
                "optimizer.step() makes it. Call self.manual_backward(loss), and take a method that sends whole "
                "gradients, or clips before it sends, such as 'dgc'; or use automatic optimization."
            )

    def _end_step(self, worker: Synchronizer) -> None:
        """Read what other ranks request, and prepare the next step."""
        raise NotImplementedError

    # What the first callback calls ------------------------------------------------------------------------------

    def is_search(self, trainer: pl.Trainer) -> bool:
        """Return whether a tuner searches, with callbacks of its own: the fit comes after it."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return self.world_size > 1 and self._first_callback not in callbacks

    def _insert_first_callback(self, trainer: pl.Trainer) -> None:
        if self._workers and self.is_search(trainer):  # for validation and the like as well
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
            callbacks.insert(0, self._first_callback)

    def begin_epoch(self) -> None:
        """Begin an epoch, whose data may have changed."""

    def end_batch(self) -> None:
        """End a batch, before the callbacks do."""

    def show_consensus(self) -> None:
        """Put what is equal on all ranks into the model, until the next batch, the end of validation or of a save."""

    def agree_on_metrics(self) -> None:
        """Average the metrics that callbacks and schedulers monitor."""
        agree_on_monitored(self.trainer, self.root_device)
        if not self.method.averages_weights:
            checks.agree_on_hyperparameters(self.trainer)

    def end_epoch(self) -> None:
        """End an epoch, before the callbacks do."""

    def leave_consensus(self) -> None:
        """Leave the consensus in the model, at the end of the training."""
        self.show_consensus()
        self._keep_consensus()

    def _keep_consensus(self) -> None:
        for worker in self.replicas:
            worker.finish()

    @property
    def is_consensus_shown(self) -> bool:
        """Whether the model holds the consensus of replicas that differ."""
        return any(worker.own is not None for worker in self.replicas)

    def _show_mean(self) -> None:
        """Put the mean of the replicas into the model, until `_hide_mean`. It does not change the training.

        Collective: all ranks; if the replicas are equal, as `Synchronizer.check_late_faults`.
        """
        module = self.lightning_module
        assert module is not None
        if not self._has_warned_of_buffers:
            self._has_warned_of_buffers = checks.warn_if_replaced(module, self.replicas)
        for worker in self.replicas:
            worker.show_consensus()

    def _hide_mean(self) -> None:
        """Give this rank its own weights back."""
        for worker in self.replicas:
            worker.hide_consensus()

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a model's state that does not change when the mean is hidden: it may be written to disk later."""
        if not self.is_consensus_shown:
            return state
        return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in state.items()}

    # While an exception ends the fit ----------------------------------------------------------------------------

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is ending the fit of this rank; not a SIGTERM, which ends all ranks after one step."""
        module = self.lightning_module
        if self._is_torn_down or module is None or module._trainer is None or not module._trainer.interrupted:
            return False
        return not self.signals.is_ending_all

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._is_torn_down = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        if not self.signals.is_ending_all:  # which no rank needs to hear of
            self.lost_peers.explain_(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._is_fit_over = True
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and self._first_callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._first_callback)  # type: ignore[attr-defined]
        self.signals.restore()
        self._clipping.restore()
        self._guard.release()
        self.lost_peers.close()
        for worker in self.workers:
            worker.to(torch.device("cpu"))
        meets = trainer is not None and (self.signals.is_ending_all or not self.is_interrupted)
        super().teardown()
        self._is_torn_down = True
        if meets:
            # gloo must not release tensors during interpreter shutdown: its thread would wait for the GIL, and abort;
            # in stock DDP, too. A barrier holds no tensor, but the work before it does until it has been released.
            time.sleep(SETTLE_S)
            # And no rank ends before all have saved: rank 0 may have the store, and a launcher may end the others.
            self.barrier()

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        module = self.lightning_module
        if name == RUN_STAGE and module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self.signals.defer(module.trainer)
        if not self.is_interrupted:
            super().barrier(name, *args, **kwargs)  # type: ignore[safe-super]

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self.is_interrupted:
            return obj
        received: T = super().broadcast(obj, src)  # type: ignore[safe-super]
        return received

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self.is_interrupted else bool(super().reduce_boolean_decision(decision, all))

    # The two packages of Lightning ------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator | None:
        """Where the ranks run; the first thing that a Trainer sets, before the strategy has done anything."""
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        """Set it; if that is one of the other package, become a strategy of that package first.

        Raises:
            ConfigurationError: the strategy's class is the user's own, and derives from one for the other package.
        """
        own, package = package_of(self), package_of(accelerator)
        if package not in (None, own):
            self.__class__ = _twin(type(self), f"{own}, and the Trainer is one of {package}")
            self._make_parts()
            stock = next(each for each in type(self).__mro__ if each.__module__.partition(".")[0] in PACKAGES)()
            vars(self).update({key: value for key, value in vars(stock).items() if package_of(value) == package})
        self._accelerator = accelerator


def _twin(cls: type[BaseStrategy], packages: str) -> type[BaseStrategy]:
    if len(twins(cls)) == 1:
        base = next(each for each in cls.__mro__ if len(twins(each)) > 1)
        twin: type = twins(base)[-1]
        raise ConfigurationError(
            f"{cls.__name__} derives from {base.__module__}.{base.__name__}, which is built on {packages}. Derive it "
            f"from {twin.__module__}.{twin.__name__}."
        )
    return twins(cls)[-1]


def buffers_by_optimizer(module: torch.nn.Module, optimizers: list[Optimizer]) -> dict[int, dict[str, Tensor]]:
    """Return, by id of the optimizer, the buffers of layers whose parameters it trains; all others with the first."""
    owner = {p: id(optimizer) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    shares: dict[int, dict[str, Tensor]] = {id(optimizer): {} for optimizer in optimizers}
    if not optimizers:
        return shares
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        owners = [owner[p] for p in layer.parameters(recurse=False) if p in owner]
        for name, buffer in layer.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                share = shares[owners[0] if owners else id(optimizers[0])]
                share[f"{prefix}.{name}" if prefix else name] = buffer
    return shares
