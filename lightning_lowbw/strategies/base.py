"""What both strategies have in common: a worker for each optimizer, and no collective while an exception ends a fit."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import PACKAGES, package_of, twins
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.advice import num_steps_of_fit
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.when.every_k import EveryK
from lightning_lowbw.where.agreement import gather

T = TypeVar("T")

RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data


class BaseStrategy(ParallelStrategy):
    """A strategy with a method and a worker for each optimizer, whose ranks are silent after an exception.

    Lightning communicates while it handles an exception: `trainer.save_checkpoint` ends with a barrier, and
    `ModelCheckpoint` broadcasts names. A callback that saves then would wait for ranks that never come, or meet them in
    the middle of an exchange, which aborts the process. When the user's code has caught the exception they communicate
    again.

    Attributes:
        method: the configuration; see `reconfigure`.
        signals: SIGTERM and SLURM's, deferred from before the sanity check on.
    """

    method: Method
    signals: Signals
    _workers: dict[int, Worker]  # by id of the optimizer
    _resolved_begin: tuple[float, int] | None = None  # a `begin_step` that is a fraction, and the steps it was last
    _is_torn_down = False  # the Trainer has handled what ended it

    def _make_parts(self) -> None:
        """Make what touches Lightning; once more when this becomes a strategy of the other package."""
        raise NotImplementedError

    @property
    def workers(self) -> list[Worker]:
        """The method's workers, in the order of the optimizers, of the present fit or the last one."""
        return list(self._workers.values())

    @property
    def replicas(self) -> list[ReplicaWorker]:
        """Those of methods that average weights."""
        return [worker for worker in self.workers if isinstance(worker, ReplicaWorker)]

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the present fit."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def worker_of(self, optimizer: Any) -> Worker:
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

    def note_batch(self) -> None:
        """Number the batch, by which ranks are found that have left out a step."""
        for worker in self.workers:
            worker.batch = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def reconfigure(self, method: Method) -> None:
        """Replace the method's configuration, for the next steps.

        Collective: all ranks.

        Raises:
            DisagreementError: on all ranks.
            ConfigurationError: on all ranks; a layer has sparse gradients, which the other method would exchange.
        """
        if self.workers and method.exchanges_gradients and self.lightning_module is not None:
            checks.refuse_sparse_gradients(self.lightning_module)
        checks.agree_on_configuration(type(self).__name__, method.facts())
        self.method = method
        for worker in self.workers:
            worker.method = method

    def _resolve_begin(self) -> None:
        """Turn a `begin_step` that is a fraction of the run into a number of steps; for each run anew.

        Collective: all ranks.

        Raises:
            ConfigurationError: on all ranks; the length of the run is not known.
        """
        when = self.method.when
        assert isinstance(when, EveryK)
        fraction, step = self._resolved_begin or (None, None)  # of the last fit, or of a tuner's search
        begin = fraction if step is not None and step == when.begin_step else when.begin_step
        if not isinstance(begin, float):
            return
        lengths = gather(num_steps_of_fit(self.trainer, self.workers), "number of steps")
        num_steps = max(lengths)
        if not all(map(math.isfinite, lengths)):
            raise ConfigurationError(
                f"begin_step={begin} of a run whose number of steps is not known: give a number of steps."
            )
        step = round(begin * num_steps)
        self.reconfigure(self.method.replace(begin_step=step))
        self._resolved_begin = begin, step
        rank_zero_info(f"{type(self).__name__}: synchronous up to step {step} of {num_steps:.0f}.")

    # While an exception ends the fit ----------------------------------------------------------------------------

    @property
    def all_are_here(self) -> bool:
        """Whether all ranks are at this batch; not if some have ended the epoch before it."""
        return True

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is ending the fit of this rank; not a SIGTERM, which ends all ranks after one step."""
        module = self.lightning_module
        if self._is_torn_down or module is None or module._trainer is None or not module._trainer.interrupted:
            return False
        return not (self.signals.is_ending_all and self.all_are_here)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._is_torn_down = False

    @override
    def teardown(self) -> None:
        super().teardown()
        self._is_torn_down = True

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
