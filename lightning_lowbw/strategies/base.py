"""The methods of Lightning that the strategies for DDP and for FSDP have in common; most forward to a `Fit`.

A strategy is silent while an exception ends the fit.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import check_one_of, is_number
from lightning_lowbw.comm.agreement import agree
from lightning_lowbw.comm.collectives import TrafficLedger
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.strategies import checkpoint as files
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import OF_AUTO
from lightning_lowbw.strategies.fit import Fit
from lightning_lowbw.strategies.keywords import Needs
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer

T = TypeVar("T")
RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data
SETTLE_S = 0.02


class BaseStrategy(ParallelStrategy):
    """A strategy with a method and a `Fit`.

    Its ranks are silent after an exception. Lightning communicates while it handles one: `trainer.save_checkpoint` ends
    with a barrier, and `ModelCheckpoint` broadcasts names. A callback that saves then would wait for ranks that never
    come, or meet them in the middle of an exchange, which aborts the process. When the user's code has caught the
    exception they communicate again.

    Attributes:
        fit: the present fit, or the last one; a new one begins with `trainer.fit`.
    """

    fit: Fit
    _is_torn_down = False  # the Trainer has handled the exception that ended the fit
    _candidates: Sequence[str] = OF_AUTO  # methods that may replace "auto"
    _all_ranks_save = False  # whether each rank writes weights and buffers; else rank 0 alone

    def _hold(self, method: Method, options: dict[str, Any]) -> None:
        """Keep the arguments of the constructor; the keywords of every strategy are among the options."""
        check_one_of("resume", options["resume"], get_args(Needs))
        norm = options["skip_norm"]
        if not (norm is None or (is_number(norm) and norm > 0)):
            raise ConfigurationError(f"skip_norm={norm!r}: give the largest norm of a gradient, a number above 0.")
        self._options, self.fit = options, Fit(method, self._candidates)

    @property
    def method(self) -> Method:
        """The configuration; see `reconfigure`."""
        return self.fit.method

    @property
    def ledger(self) -> TrafficLedger:
        """The traffic of this rank since the start of the fit."""
        return self.fit.ledger

    @property
    def workers(self) -> list[Synchronizer]:
        """The method's workers, in the order of the optimizers, of the present fit or the last one."""
        return self.fit.workers

    @property
    def replicas(self) -> list[LocalSync]:
        """The same workers if the method averages weights; no workers if it exchanges gradients in every step."""
        return self.fit.replicas

    @property
    def skip_norm(self) -> float | None:
        """The norm above which a step is skipped; infinity: steps with an inf or NaN are skipped. None: no step."""
        norm: float | None = self._options["skip_norm"]
        return math.inf if norm is None and self._options["skip_nonfinite"] else norm

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
        self.fit.given = method
        self.fit.use(method)

    # Setting up -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the present fit."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._is_torn_down = False

    def _begin_fit(self, others: Mapping[str, object]) -> None:
        """Begin a fit, the same on all ranks: before callbacks are set up, which may communicate.

        Collective: all ranks.

        Raises:
            ConfigurationError: on each rank that has a callback of the other package of Lightning.
            DisagreementError: on all ranks.
        """
        trainer, name = self.trainer, type(self).__name__
        for callback in checks.callbacks_in(trainer):
            checks.check_package(callback, self)
        saved = self.fit.saved
        self.fit = Fit(self.fit.given, self._candidates)
        self.fit.saved = saved
        agree("strategy", {"class": name})  # ranks with another class do other things from here on
        settings = checks.settings_of(trainer)
        agree(f"configuration of {name}", {**self.method.settings(), **self._options, **others, **settings})

    def _make_worker(self, optimizer: Optimizer, module: pl.LightningModule, buffers: Any) -> Synchronizer:
        raise NotImplementedError

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.fit.start()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.fit.begin_batch()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self.fit.step_hooks.has_gradients = True
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
        take = functools.partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self.fit.step(optimizer, closure, take)

    # The end, validation and saves ------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self.fit.end()
        super().on_train_end()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.fit.is_running:
            self.fit.end_validation()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_interrupted:  # nothing is saved, and nothing communicated
            return self.trainer.lightning_module.state_dict()
        if self.fit.is_running:
            self.fit.begin_save(weights_only=not self._all_ranks_save)
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self.is_interrupted:
            rank_zero_warn(
                f"{filepath} is not written: an exception is ending the fit, and the other ranks may be elsewhere. Go "
                "on from the last checkpoint."
            )
            return
        write = functools.partial(super().save_checkpoint, storage_options=storage_options)
        files.save(self.fit, self._layout, checkpoint, filepath, storage_options, write)
        self.fit.end_save()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.fit.removed.append(str(filepath))  # the other ranks may have other disks: they delete at the next save
            files.delete(self.fit, self.checkpoint_io, str(filepath))

    @property
    def _layout(self) -> files.Layout:
        """How the state of this fit lies in the files beside a checkpoint."""
        raise NotImplementedError

    @override
    def teardown(self) -> None:
        self.fit.close()
        is_ending_all = self.fit.signals.is_ending_all
        meets = self.lightning_module is not None and (is_ending_all or not self.is_interrupted)
        super().teardown()
        self._is_torn_down = True
        if meets:
            # gloo must not release tensors during interpreter shutdown: its thread would wait for the GIL, and abort;
            # in stock DDP, too. A barrier holds no tensor, but the work before it does until it has been released.
            time.sleep(SETTLE_S)
            # No rank ends before all have saved: rank 0 may have the store, and a launcher may end the other ranks.
            self.barrier()
            files.delete_unneeded(self.fit, self)  # a plugin that writes in the background has ended on all ranks

    # While an exception ends the fit ----------------------------------------------------------------------------

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is ending the fit of this rank; not a SIGTERM, which ends all ranks after one step."""
        if self._is_torn_down or self.lightning_module is None or self.lightning_module._trainer is None:
            return False
        return self.trainer.interrupted and not self.fit.signals.is_ending_all

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if name == RUN_STAGE and self.fit.is_running:
            self.fit.signals.defer(self.fit.trainer)
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
