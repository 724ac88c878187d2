"""Steps that bypass Lightning: refused, because their gradients have not been exchanged; allowed in dense steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.errors import ConfigurationError


class BypassGuard:
    """Tracks which optimizer Lightning is stepping, and checks the steps of others.

    Args:
        allow: returns what a step of an optimizer past Lightning is enclosed in; None where it is refused.

    Attributes:
        has_allowed: whether there has been such a step since `watch`.
    """

    def __init__(self, allow: Callable[[Optimizer], AbstractContextManager[None] | None]) -> None:
        self._allow, self.has_allowed = allow, False
        self._handles: list[RemovableHandle] = []
        self._stepping: Optimizer | None = None
        self._past: AbstractContextManager[None] | None = None  # around the step past Lightning in progress

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Check each step of some optimizers, until `release`."""
        self.has_allowed, self._past = False, None
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self.check))
            self._handles.append(optimizer.register_step_post_hook(self.end))

    def release(self) -> None:
        """Stop checking."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def allowing(self, optimizer: Optimizer) -> Iterator[None]:
        """Allow the steps of one optimizer in a `with` block."""
        outer, self._stepping = self._stepping, optimizer
        try:
            yield
        finally:
            self._stepping = outer

    def check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook before a step: refuse that of an optimizer that Lightning does not step, unless it is allowed."""
        if self._stepping is optimizer:
            return
        self._past = None if args[1:] or kwargs else self._allow(optimizer)  # a closure would come after this
        if self._past is None:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called directly, not by Lightning, so the gradients were not "
                "exchanged. Call step() on the optimizers that self.optimizers() returns. If the code is not yours, "
                "train with strategy='ddp'."
            )
        self._past.__enter__()
        self.has_allowed = True

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook after a step."""
        past, self._past = self._past, None
        if past is not None:
            past.__exit__(None, None, None)
