"""A strategy as a guest of Lightning: silent while an exception ends the fit, and of the package of its Trainer."""

from __future__ import annotations

from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import PACKAGES, package_of, twins
from lightning_lowbw.strategies.lost_peers import LostPeers
from lightning_lowbw.strategies.signals import Signals

T = TypeVar("T")
RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data


class GuestStrategy(ParallelStrategy):
    """A strategy whose ranks are silent after an exception, and which becomes one of the Trainer's package.

    Lightning communicates while it handles an exception: `trainer.save_checkpoint` ends with a barrier, and
    `ModelCheckpoint` broadcasts names. A callback that saves then would wait for ranks that never come, or meet them in
    the middle of an exchange, which aborts the process. When the user's code has caught the exception they communicate
    again.

    Attributes:
        signals: SIGTERM and SLURM's, deferred from before the sanity check on.
        lost_peers: explains an exception that the loss of a rank has caused.
    """

    signals: Signals
    lost_peers: LostPeers
    _is_torn_down = False  # the Trainer has handled what ended it

    def _make_parts(self) -> None:
        """Make what touches Lightning; once more when this becomes a strategy of the other package."""
        raise NotImplementedError

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
    def on_exception(self, exception: BaseException) -> None:
        if not self.signals.is_ending_all:  # which no rank needs to hear of
            self.lost_peers.explain_(exception)
        super().on_exception(exception)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if name == RUN_STAGE and self._is_fitting:
            self.signals.defer(self.trainer)
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
        before, package = package_of(self), package_of(accelerator)
        if package not in (None, before):
            self.__class__ = _twin(type(self), f"{before}, and the Trainer is one of {package}")
            self._make_parts()
            stock = next(cls for cls in type(self).__mro__ if cls.__module__.partition(".")[0] in PACKAGES)()
            vars(self).update({key: value for key, value in vars(stock).items() if package_of(value) == package})
        self._accelerator = accelerator


def _twin(cls: type[T], packages: str) -> type[T]:
    if len(twins(cls)) == 1:
        base = next(parent for parent in cls.__mro__ if len(twins(parent)) > 1)
        twin: type = twins(base)[-1]
        raise ConfigurationError(
            f"{cls.__name__} derives from {base.__module__}.{base.__name__}, which is built on {packages}. Derive it "
            f"from {twin.__module__}.{twin.__name__}."
        )
    return twins(cls)[-1]
