"""What both strategies have in common: a worker for each optimizer, and no collective while an exception ends a fit."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
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
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import PACKAGES, package_of, twins
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.callback_agreement import agree_on_monitored, agree_on_weights_
from lightning_lowbw.strategies.lost_peers import LostPeers
from lightning_lowbw.strategies.optimizer_states import agree_on_states_, leave_own_state, take_over
from lightning_lowbw.strategies.shared_buffers import buffers_of
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.step_hooks import (
    Clipping,
    StepGuard,
    Unowned,
    exchange_unscaled_,
    parameters_of,
    scaler_of,
)
from lightning_lowbw.sync.checks import warn_if_mostly_sent
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.kernels import prepare_kernels, uses_of
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer, eagerly, last_pre_hook

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
        _of(trainer).begin_evaluation()

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).agree_on_evaluated()

    def on_validation_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).agree_on_evaluated()  # of a rank without batches

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).begin_evaluation()

    def on_test_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).agree_on_evaluated()

    def on_test_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _of(trainer).agree_on_evaluated()

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
        self._unowned = Unowned()
        self._first_callback = FirstCallback()

    def _begin_state(self) -> None:
        """Forget the last fit, or the steps with a method of another kind."""
        self._is_evaluated = False  # the consensus view is that of a validation
        self._has_agreed = False  # in this validation
        self._is_fit_over = False  # everything is whole then, and on the CPU: nothing is averaged or checked any more
        self._has_new_gradients = False  # since the last exchange
        self._waits_for_hooks = False  # whether the gradients of this step are exchanged after Lightning's hooks
        self._has_own_states = False  # whether the optimizers' states are of this rank's own shard of a checkpoint
        self._unowned.begin_fit()
        self._num_batches = 0

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
            ConfigurationError: `configure_optimizers` has not returned it, nor has it replaced one before this batch.
        """
        optimizer = _own(optimizer)
        if id(optimizer) not in self._workers:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not one that configure_optimizers returned; "
                f"{type(self).__name__} exchanges gradients for those only. Put another in its place "
                "(trainer.strategy.optimizers = [...]) before a batch begins, in on_train_epoch_start, "
                "on_train_batch_start or a hook at the end of a batch, not between its training_step and its step."
            )
        return self._workers[id(optimizer)]

    @property
    def _trained_optimizers(self) -> list[Optimizer]:
        """Those that have something to train: others have no worker."""
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
        if not self.workers:
            return
        self._resolve_begin()
        self._prepare_workers(num_participants, measures=measures)
        if num_participants > 1 and not self.is_search(self.trainer):
            checks.warn_of_schedule(self.method, self.trainer, self.workers)

    def _prepare_workers(self, num_participants: int, *, measures: bool = False) -> None:
        """Check the schedule of the workers, and prepare what they need; see `_start_workers`."""
        for worker in self.workers:
            worker.check_schedule()
            warn_if_mostly_sent(self.method.what, self.method.when, worker.peers)
        if num_participants > 1 and self.method.uses_kernels:
            prepare_kernels(self.root_device, uses_of(self.workers, measures=measures))

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

    # Optimizers that outlive a fit, or are replaced in it ---------------------------------------------------------

    @property
    def _equals(self) -> Peers:
        """The ranks with the same parameters as this one: all, or those that have its shards."""
        raise NotImplementedError

    def _optimizer_of(self, worker: Synchronizer) -> Optimizer:
        """Return the user's optimizer."""
        return worker.optimizer

    def _agree_on_states(self, workers: Iterable[Synchronizer]) -> None:
        """Average what the optimizers keep from an earlier fit, where it differs and the coming steps are not local.

        Collective: all ranks.

        Raises:
            DisagreementError: on all ranks; they keep different things.
        """
        if not self._has_own_states:
            agree_on_states_([worker for worker in workers if not worker.is_local], self._equals, self.root_device)
        for optimizer in self.optimizers:
            take_over(optimizer)

    def _leave_states(self, workers: Iterable[Synchronizer]) -> None:
        for worker in workers:
            if isinstance(worker, GradientSync):
                worker.correction.leave_(worker.peers.part, worker.peers.num_local_ranks)
            if worker.has_own_state:
                leave_own_state(self._optimizer_of(worker))

    def _make_workers(self, kept: Mapping[int, Synchronizer]) -> None:
        """Make a worker for each optimizer that has parameters, except for those that are kept, by id of the optimizer.

        Collective: all ranks.
        """
        raise NotImplementedError

    def _check_late_faults(self) -> None:
        """Raise, on all ranks, what the last step has found after its message: it may be in the weights."""
        raise NotImplementedError

    def _begin_renewed(self) -> None:
        """Prepare the coming step, of workers that have been made in mid-fit."""
        raise NotImplementedError

    @torch.no_grad()
    def _renew_workers(self) -> None:
        """Make new workers if other optimizers have taken the place of those of the last batch.

        What has not been sent is applied with the old optimizer's rate, or goes on with the parameters (gradients);
        weights are averaged.

        Collective: all ranks, where optimizers have been replaced.

        Raises:
            ConfigurationError, DisagreementError: on all ranks; as at the start of a fit.
        """
        optimizers = [id(optimizer) for optimizer in self._trained_optimizers]
        if optimizers == list(self._workers):
            return
        checks.check_optimizers(self.optimizers, list(self.trainer.lightning_module.named_parameters()))
        self.signals.settle()  # a rank repeats its request
        self._check_late_faults()
        if self.replicas:
            self._hide_mean(adopts=True)
            self.leave_consensus()
        before = dict(self._workers)
        # Of a replica nothing is in the optimizer alone, and its buffers may belong to another one now.
        kept = {} if self.replicas else {key: worker for key, worker in before.items() if key in optimizers}
        replaced = [worker for key, worker in before.items() if key not in kept]
        self._leave_states(worker for key, worker in before.items() if key not in optimizers)
        for worker in replaced:
            if isinstance(worker, GradientSync):
                worker.flush_()
        self._workers.clear()
        self._make_workers(kept)
        new = {number: worker for number, worker in enumerate(self.workers) if worker not in kept.values()}
        for number, worker in new.items() if before else ():
            worker.inherit(list(before.values())[min(number, len(before) - 1)], replaced)
        if not before:  # whom a signal would have been told
            self.signals.defer(self.trainer)
        lost = {name for each in replaced if isinstance(each, GradientSync) for name in each.residuals}
        lost -= {name for each in new.values() if isinstance(each, GradientSync) for name in each.residuals}
        if lost:
            rank_zero_info(f"What was not sent of the gradients of {len(lost)} tensors in no optimizer is lost.")
        self._has_own_states = False
        self._agree_on_states(new.values())
        self._begin_renewed()

    def _renew_before_save(self) -> None:
        """Make new workers before a save, which may come between a new optimizer and its first batch.

        Collective: all ranks.
        """
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        is_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING and self._num_batches
        if is_fit and not (self._is_fit_over or self.is_interrupted):
            self._renew_workers()

    # Parameters without an optimizer ------------------------------------------------------------------------------

    def _unowned_parameters(self) -> dict[str, Tensor]:
        """Return those that are trained and in no optimizer, by name; not what the user leaves to each rank."""
        module = self.trainer.lightning_module
        owned = {parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)}
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
        return {name: parameter for name, parameter in trained.items() if parameter not in owned}

    def _own_part(self, parameter: Tensor) -> Tensor:
        """Return what this rank has of a parameter."""
        return parameter

    def _check_unowned(self) -> None:
        """Raise DisagreementError, on all ranks, if a parameter without an optimizer is trained on each rank alone.

        Collective: all ranks, if there is one.
        """
        parts = {name: self._own_part(parameter).detach() for name, parameter in self._unowned_parameters().items()}
        self._unowned.check(parts, self._equals, self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._renew_workers()
        self._num_batches += 1
        if self._num_batches == 1 and self.method.averages_weights:
            self._unowned.watch(self._unowned_parameters())
        elif self._num_batches == 2:  # what hooks of a backward pass do is done, and what follows the step
            self._check_unowned()

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
        own = _own(optimizer)
        if not any(True for _ in parameters_of(own)):  # nothing to exchange; Lightning's own, where a module has none
            with self._guard.allowing(own):
                return super().optimizer_step(optimizer, closure, model, **kwargs)
        worker = self.worker_of(own)

        def exchanging_closure() -> Any:
            worker.check_closure()
            result = closure()
            self._end_closure(worker)
            self._guard.note_exchange()
            return result

        traceable = functools.partial(eagerly(), exchanging_closure)
        # With a GradScaler the hooks before a step come after the closure, and what they write counts, too.
        has_scaler = scaler_of(self.precision_plugin) is not None
        late = last_pre_hook(own, worker.step_exchanged) if has_scaler else contextlib.nullcontext()
        try:
            with self._guard.allowing(own), worker.stepping(), late:
                result = super().optimizer_step(optimizer, traceable, model, **kwargs)
                self._check_exchanged(worker)
        finally:
            self._waits_for_hooks = False
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
        is_needed = self._workers or trainer.state.fn == TrainerFn.FITTING
        if is_needed and self.is_search(trainer):  # for validation and the like as well
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
            callbacks.insert(0, self._first_callback)

    def begin_epoch(self) -> None:
        """Begin an epoch, whose data may have changed."""

    def end_batch(self) -> None:
        """End a batch, before the callbacks do."""

    def show_consensus(self) -> None:
        """Put what is equal on all ranks into the model, until the next batch, or the end of a save."""

    def begin_evaluation(self) -> None:
        """Begin a validation or a test: what is seen in it stays up to the next batch."""
        self._is_evaluated, self._has_agreed = True, False
        self.show_consensus()

    def agree_on_evaluated(self) -> None:
        """Make weights equal that hooks have put in since `begin_evaluation`: a moving average is each rank's own.

        Collective: all ranks, the first time in each evaluation.
        """
        if not self._has_agreed:
            self._has_agreed = True
            self._agree_on_weights(with_buffers=True)

    def _agree_on_weights(self, *, with_buffers: bool = False) -> None:
        """Make weights equal that the user's code has put in the place of the consensus; see `agree_on_weights_`.

        Args:
            with_buffers: also floating buffers, where their consensus is shown. Not after a validation: what that
                has changed in them is each rank's own.
        """
        for worker in () if self.is_interrupted else self.replicas:
            tensors = [parameter.detach() for parameter in worker.params]
            shown = worker.averaged_buffers().values() if with_buffers and worker.own is not None else ()
            tensors += [buffer for buffer in shown if buffer.is_floating_point() or buffer.is_complex()]
            agree_on_weights_(tensors, self._peers_of(worker), self.root_device)

    def _peers_of(self, worker: LocalSync) -> Peers:
        """Return those among which a worker's weights should be equal; also after the fit, when its own have ended."""
        return Peers(None, self.ledger)

    def agree_on_metrics(self) -> None:
        """Average the metrics that callbacks and schedulers monitor."""
        agree_on_monitored(self.trainer, self.root_device)
        if not self.method.averages_weights:
            checks.agree_on_hyperparameters(self.trainer)
            self._check_unowned()

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
        for worker in self.replicas:
            worker.show_consensus()

    def _hide_mean(self, *, adopts: bool = False) -> None:
        """Give this rank its own weights back, where those that were shown are still in the model.

        Collective: all ranks, one number for each worker, if something is shown.

        Args:
            adopts: whether to go on from those that the user's code has put in their place; else these stay for now.
        """
        shown = [worker for worker in self.replicas if worker.is_shown]
        if not shown or self.is_interrupted:
            return
        flags = torch.tensor([worker.is_changed for worker in shown], dtype=torch.int32, device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        are_changed = flags.tolist()
        if adopts and any(are_changed):
            self._agree_on_weights()
        for worker, is_changed in zip(shown, are_changed, strict=True):
            if not is_changed:
                worker.hide_consensus()
            elif adopts:
                worker.adopt_parameters()

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
        was_fit, self._is_fit_over = not self._is_fit_over, True
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and self._first_callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._first_callback)  # type: ignore[attr-defined]
        self.signals.restore()
        self._clipping.restore()
        self._guard.release()
        self._unowned.release()
        if was_fit and self.world_size > 1:
            self._leave_states(self.workers)
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


def _own(optimizer: Any) -> Optimizer:
    """Return the user's optimizer, without Lightning's wrapper."""
    own: Optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    return own


def _twin(cls: type[BaseStrategy], packages: str) -> type[BaseStrategy]:
    if len(twins(cls)) == 1:
        base = next(each for each in cls.__mro__ if len(twins(each)) > 1)
        twin: type = twins(base)[-1]
        raise ConfigurationError(
            f"{cls.__name__} derives from {base.__module__}.{base.__name__}, which is built on {packages}. Derive it "
            f"from {twin.__module__}.{twin.__name__}."
        )
    return twins(cls)[-1]


class LayerBuffers(Mapping[str, Tensor]):
    """The buffers of some layers of a module by name, as they are when they are looked up.

    Args:
        module: that is trained.
        has: whether the layer with a name is one of these.
    """

    def __init__(self, module: torch.nn.Module, has: Callable[[str], bool]) -> None:
        self._module, self._has = module, has

    def _now(self) -> dict[str, Tensor]:
        return {name: each for name, each in buffers_of(self._module).items() if self._has(name.rpartition(".")[0])}

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    @override
    def items(self) -> ItemsView[str, Tensor]:  # in one pass over the module
        return self._now().items()


def buffers_by_optimizer(module: torch.nn.Module, optimizers: list[Optimizer]) -> dict[int, Mapping[str, Tensor]]:
    """Return, by id of the optimizer, the buffers of layers whose parameters it trains; all others with the first."""
    owner = {
        p: number for number, each in enumerate(optimizers) for group in each.param_groups for p in group["params"]
    }
    owners = {
        prefix: next((owner[p] for p in layer.parameters(recurse=False) if p in owner), 0)
        for prefix, layer in module.named_modules()
    }

    def of(number: int) -> LayerBuffers:
        return LayerBuffers(module, lambda prefix: owners.get(prefix, 0) == number)

    return {id(optimizer): of(number) for number, optimizer in enumerate(optimizers)}
