"""No collective while an exception ends the fit: other ranks may be elsewhere, or in another collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_lowbw.strategies.regime import Regime
    from lightning_lowbw.strategies.signals import Signals

T = TypeVar("T")

RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data


class Interruptible(ParallelStrategy):
    """A strategy whose ranks do not communicate while the Trainer handles an exception.

    Lightning does communicate: `trainer.save_checkpoint` ends with a barrier, and `ModelCheckpoint` broadcasts names. A
    callback that saves on an exception would wait there for ranks that never come, or meet them in the middle
    of an exchange, which aborts the process. When the user's code has caught the exception they communicate again.

    Attributes:
        regime: knows whether all ranks are at the same batch.
        signals: deferred from before the sanity check on.
    """

    regime: Regime
    signals: Signals
    _is_torn_down = False  # the Trainer has handled what ended it

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception is ending the fit of this rank; not a SIGTERM, which ends all ranks after one step."""
        module = self.lightning_module
        if self._is_torn_down or module is None or module._trainer is None or not module._trainer.interrupted:
            return False
        return not (self.signals.is_ending_all and self.regime.all_are_here)

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
