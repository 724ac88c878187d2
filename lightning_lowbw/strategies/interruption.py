"""No collective during the handling of an exception: other ranks may be elsewhere, or in another collective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_lowbw.strategies.signals import Signals

T = TypeVar("T")

RUN_STAGE = "run-stage"  # Lightning's barrier after its handlers of signals are there, and before it loads any data


class Interruptible(ParallelStrategy):
    """A strategy whose ranks do not communicate once the training is interrupted.

    Lightning does communicate: `trainer.save_checkpoint` ends with a barrier, and `ModelCheckpoint` broadcasts names. A
    callback that saves on an exception would wait there for ranks that never come, or meet them in the middle
    of an exchange, which aborts the process.

    Attributes:
        signals: deferred from before the sanity check on.
    """

    signals: Signals

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception has ended the training of this rank."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module._trainer.interrupted

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
