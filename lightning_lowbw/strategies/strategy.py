"""`DDPStrategy` with a method that is called at three points of a Lightning step.

1. a DDP communication hook, on gloo as well as NCCL: all-reduce during backward, or pass the gradients through;
2. the end of the wrapped closure: check for faults, clip, exchange;
3. after the step: the method's counters and averages, and the user's values back in the param groups.

Automatic and manual optimization, accumulation, several optimizers and every precision plugin go through these.
Everything else is in one file per concern.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_lowbw.arguments import code_of
from lightning_lowbw.engine.checks import plain_values
from lightning_lowbw.engine.method import Method, as_method
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import facts
from lightning_lowbw.strategies.advice import warn_if_alone
from lightning_lowbw.strategies.auto_choice import AutoChoice
from lightning_lowbw.strategies.backwards import Backwards, reaches
from lightning_lowbw.strategies.by_name import explain_, warn_if_not_distributed
from lightning_lowbw.strategies.bypass import BypassGuard
from lightning_lowbw.strategies.checkpoint import Checkpoints, Needs
from lightning_lowbw.strategies.clipping import Clipping
from lightning_lowbw.strategies.gradient_hook import GradientHook
from lightning_lowbw.strategies.groups import Groups
from lightning_lowbw.strategies.interruption import Interruptible
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS, DDPKeywords, given_keywords, shows
from lightning_lowbw.strategies.launcher import Launcher
from lightning_lowbw.strategies.lost_peers import LostPeers
from lightning_lowbw.strategies.onlookers import is_gradient_seen
from lightning_lowbw.strategies.optimizers import OptimizerWorkers
from lightning_lowbw.strategies.regime import Regime
from lightning_lowbw.strategies.replicas import Replicas
from lightning_lowbw.strategies.scaling import exchange_unscaled_
from lightning_lowbw.strategies.shared_buffers import choose_buffers
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.synchronous import Synchronous
from lightning_lowbw.strategies.uneven import Policy
from lightning_lowbw.strategies.velocities import with_whole_velocities
from lightning_lowbw.where.agreement import agree, failing_together
from lightning_lowbw.where.ledger import Level, TrafficLedger
from lightning_lowbw.where.topology import TopologyChoice

SETTLE_S = 0.02


class Strategy(OptimizerWorkers, Interruptible, DDPStrategy):
    """DDP in which a method does the communication.

    Args:
        method: when the ranks communicate, what they send, and to whom; a `Method`, such as `DGC(...)` or
            `LocalSGD(...)` return, or a mapping, as `Method.describe` does.
        topology: instead of the method's own: "flat" or, for two levels, "auto" (by the launcher and the host names), a
            number of ranks per node, the ranks of each node, or a `Topology`.
        uneven: for averages of weights, and ranks with more batches than others in an epoch: "finish" them, or
            "stop" at the next average. They are weighted by samples once a rank has ended.
        resume: what ``fit(ckpt_path=...)`` loads: "exact" also the folder beside the ``.ckpt``, which has each rank's
            own state; "weights and optimizer" the ``.ckpt`` alone, as when the folder is lost, or residuals do not fit
            another method.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`, checked
            against their signatures.

    Attributes:
        method: the configuration; see `reconfigure`.
        ledger: the traffic of this rank since the start of the fit.

    Raises:
        ConfigurationError: a value is out of range, or a keyword is unknown or cannot be combined with a communication
            hook.

    Example:
        >>> from lightning_lowbw import LocalSGD
        >>> Strategy(LocalSGD(k_steps=4), topology=2)
        Strategy(Method(when=EveryK(k_steps=4), where=Where(topology=2)))
    """

    @shows(DDP_KEYWORDS)
    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        topology: TopologyChoice | None = None,
        uneven: Policy = "finish",
        resume: Needs = "exact",
        **kwargs: Unpack[DDPKeywords],
    ) -> None:
        super().__init__(**given_keywords(type(self), kwargs))  # type: ignore[arg-type]  # the timeout is a timedelta
        self.method = as_method(method, topology)
        self.ledger = TrafficLedger()
        self._options: dict[str, Any] = {"uneven": uneven, "resume": resume}
        self._workers = {}
        self._graph: Any = None  # of the last loss, until the gradients are exchanged
        self._reduced_by_ddp: frozenset[torch.nn.Parameter] = frozenset()
        self._make_parts()

    def _make_parts(self) -> None:
        """Make what touches Lightning; once more when this becomes a strategy of the other package."""
        self.groups = Groups()
        self.clipping = Clipping(self, self._exchange_unscaled, self._has_reduced)
        self.regime = self._make_regime()
        self.auto = AutoChoice()
        self.signals = Signals(self)
        self._hook = GradientHook(self)
        self._guard = BypassGuard(self._stepping_past_lightning)
        self._backwards = Backwards()
        self.lost_peers = LostPeers(self)
        self._checkpoints = Checkpoints(self, self._options["resume"])

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters | inspect.signature(Strategy).parameters
        chosen = {name: value for name, value in self._options.items() if value != defaults[name].default}
        options = [f"{name}={value!r}" for name, value in {**chosen, **plain_values(self._ddp_kwargs)}.items()]
        return f"{type(self).__name__}({', '.join([code_of(self.method), *options])})"

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = Launcher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.trainer.state.fn == TrainerFn.FITTING:  # before callbacks are set up, which may communicate
            self.lost_peers.begin_fit()
            agree("strategy", {"class": type(self).__name__})  # others do other things from here on
            settings = facts.settings_of(self.trainer, takes_uneven=self.method.averages_weights)
            others = {**plain_values(self._ddp_kwargs), **settings}
            facts.agree_on_configuration(type(self).__name__, {**self.method.facts(), **self._options}, others)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            self.regime.set_up(trainer)
            return
        facts.agree_on_resume(trainer)
        self._set_method(self.auto.begin_fit(self.method))
        self.regime.check(trainer)
        self.ledger = TrafficLedger()
        self._workers.clear()
        self._backwards.begin_fit()
        self.signals.begin_fit()
        self.regime.begin_fit()
        super().setup(trainer)
        assert isinstance(self.model, DistributedDataParallel)
        self._make_workers()
        facts.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
        self._guard.watch(self.optimizers)
        self._checkpoints.begin_fit()
        self.clipping.install()
        self.regime.set_up(trainer)
        warn_if_alone(type(self).__name__, self.world_size)

    def _make_workers(self) -> None:
        """Make a worker for each optimizer.

        Collective: all ranks.
        """
        assert self.lightning_module is not None
        named_parameters = list(self.lightning_module.named_parameters())
        with failing_together():
            for optimizer in self.optimizers:
                buffers = self.regime.buffers_of(optimizer)
                worker = self.method.make_worker(optimizer, named_parameters, self.groups.workers, buffers)
                self._workers[id(optimizer)] = worker

    def _make_regime(self) -> Regime:
        """Return what this does apart from the exchange.

        Raises:
            ConfigurationError: `uneven` is out of range, or has no meaning for the method.
        """
        uneven = self._options["uneven"]
        if self.method.averages_weights:
            return Replicas(self, uneven)
        if uneven != "finish":
            raise ConfigurationError(
                f"uneven={uneven!r}: for methods that average weights after some steps; the method given communicates "
                f"in every step ({code_of(self.method)}). Leave it out."
            )
        return Synchronous(self)

    def _set_method(self, method: Method) -> None:
        is_other, self.method = method.averages_weights != self.method.averages_weights, method
        if is_other:
            self.regime.tear_down()
            self.regime = self._make_regime()

    def adopt(self, method: Method) -> None:
        """Continue with another method, after a step at which all ranks have the same weights and no residuals.

        Collective: all ranks.

        Raises:
            ConfigurationError, DisagreementError: on all ranks.
        """
        facts.agree_on_configuration(type(self).__name__, method.facts())
        before, regime = self.workers, self.regime
        self.signals.settle()  # a rank repeats its request
        self._set_method(method)
        if self.regime is not regime:
            with failing_together():
                self.regime.check(self.trainer)
            self.regime.begin_fit()
            self.groups.make_for_averages(method, self._timeout)
        self._make_workers()
        for worker, old in zip(self.workers, before, strict=True):
            worker.step, worker.batch = old.step, old.batch
            worker.requests = old.requests
        if self.regime is not regime:
            self.regime.set_up(self.trainer)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        facts.check_model(
            self.model,
            compares_weights=self._ddp_kwargs.get("init_sync") is False,
            takes_sparse=self.world_size > 1 and not self.method.exchanges_gradients,
        )
        group = self._ddp_kwargs.get("process_group")
        self.groups.make(type(self).__name__, self.method, group, self.ledger, self._timeout)
        # Parameters that are frozen now and unfrozen later are not DDP's; the exchange takes care of them.
        self._reduced_by_ddp = frozenset(p for p in self.model.parameters() if p.requires_grad)
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        level: Level | None = None if self.groups.topology is None else "inter"
        if self.world_size > 1:
            choose_buffers(self.model, lambda buffers: self.regime.buffers_to_broadcast(buffers), self.ledger, level)

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        assert self.lightning_module is not None
        self._hook.register(self.model, is_manual=not self.lightning_module.automatic_optimization)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        warn_if_not_distributed(self.trainer, self)
        self.signals.defer(self.trainer)
        self.regime.begin_training(self.trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self._launcher, Launcher):
            self._launcher.end_exception()
        explain_(exception, self)  # before Lightning would do so
        self.lost_peers.explain_(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self.regime.tear_down()
        self.signals.restore()
        self.clipping.restore()
        self.groups.close()
        self._guard.release()
        self._hook.release()
        self.lost_peers.close()
        for worker in self.workers:
            worker.to(torch.device("cpu"))
        module = self.lightning_module
        has_trained = module is not None and module._trainer is not None
        meets = has_trained and (self.signals.is_ending_all or not self.is_interrupted)
        super().teardown()
        if meets:
            # gloo must not release tensors during interpreter shutdown: its thread would wait for the GIL, and abort;
            # in stock DDP, too. A barrier holds no tensor, but the work before it does until it has been released.
            time.sleep(SETTLE_S)
            # And no rank ends before all have saved: rank 0 may have the store, and a launcher may end the others.
            self.barrier()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.note_batch()
        self._checkpoints.begin_batch()
        self.regime.begin_batch(batch)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._backwards.num += 1
        self.clipping.begin_backward()
        if self.trainer.lightning_module.automatic_optimization:  # else the user's code may want to keep graphs
            self._graph = closure_loss.grad_fn
        self.regime.begin_backward(closure_loss)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        worker = self.worker_of(optimizer)

        def exchanging_closure() -> Any:
            result = closure()
            self._end_closure(worker)
            return result

        with self._guard.allowing(worker.optimizer), worker.stepping():
            result = super().optimizer_step(optimizer, exchanging_closure, model, **kwargs)
        self.regime.end_step(worker)
        return result

    def _stepping_past_lightning(self, optimizer: Optimizer) -> AbstractContextManager[None] | None:
        """Return what encloses a dense step that the user's code takes by itself; in no other can it be taken so."""
        worker = self.worker_of(optimizer)
        return self._dense_step(worker) if worker.reduces_in_backward else None

    @contextmanager
    def _dense_step(self, worker: Worker) -> Iterator[None]:
        with worker.stepping():
            with torch.no_grad():
                self._exchange(worker)
            yield
        self.regime.end_step(worker)

    @torch.no_grad()
    def _end_closure(self, worker: Worker) -> None:
        """Replace the gradients of the optimizer that steps by those it steps with."""
        self.regime.end_backward(worker)
        if worker.is_local:  # Lightning alone clips and scales
            self._exchange(worker)
            return
        if self.clipping.take_exchanged(worker):
            return
        if self.trainer.lightning_module.automatic_optimization and not self._backwards.take_new(worker):
            if not worker.reduces_in_backward:
                worker.optimizer.zero_grad(set_to_none=True)
            return
        self._exchange_unscaled(worker)

    @torch.no_grad()
    def _exchange_unscaled(self, worker: Worker) -> None:
        self._hook.count_wait()
        exchange_unscaled_(self.precision_plugin, worker.optimizer, functools.partial(self._exchange, worker))

    def _has_reduced(self, worker: Worker) -> bool:
        """Return whether the gradients of the coming step are means already: not after a plain `loss.backward()`.

        Raises:
            ConfigurationError: on this rank, which the others then name; it has not taken part in DDP's reduction.
        """
        graph, self._graph = self._graph, None
        if not self.regime.ddp_reduces(worker):
            return False
        is_automatic = self.trainer.lightning_module.automatic_optimization
        parameters = self._reduced_by_ddp.intersection(worker.parameters())
        trained, reduced = {p for p in parameters if p.requires_grad}, self._hook.reduced_of(parameters)
        if is_automatic and worker.reduces_in_backward and trained and not reduced and not reaches(graph, trained):
            raise ConfigurationError(
                f"Step {worker.step}: the loss that training_step returned on this rank depends on no parameter that "
                "is trained, and in a dense step the others wait for its gradients, as under DDP. Return a loss that "
                "depends on them: where there is nothing to learn, the output of the model times 0."
            )
        return is_automatic or reduced == parameters

    def _exchange(self, worker: Worker, skip_nonfinite: bool = False) -> bool:
        """Check for faults, clip, exchange; return whether the step is to be taken."""
        reduced = self._reduced_by_ddp if self._has_reduced(worker) else frozenset()
        self._hook.forget(worker.parameters())
        worker.list_gradients(reduced=reduced, by_clipping=self.clipping.is_exchanging)
        clips = self.clipping.comes_before_exchange(worker)
        # Clipping spreads a NaN, and a step that is skipped must leave the residuals as they are. In all other steps
        # `exchange` checks, in the pass that accumulates the gradients; here it would read all of them once more.
        if clips or skip_nonfinite:
            worker.check_gradients()
        if clips:
            self.clipping.clip(worker.optimizer)
        applies = not (skip_nonfinite or is_gradient_seen(self.trainer, worker.optimizer, self._guard))
        return worker.exchange(skip_nonfinite=skip_nonfinite, applies=applies)

    # Validation and checkpoints ---------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.regime.state_dict(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self.is_interrupted or self.regime.is_fit_over:  # not all ranks are here, or all is whole
            return state
        return with_whole_velocities(state, self.worker_of(optimizer))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        write = functools.partial(super().save_checkpoint, storage_options=storage_options)
        self._checkpoints.save(checkpoint, filepath, write)
        self.regime.end_save()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._checkpoints.load_shards(checkpoint, self.trainer.ckpt_path)
