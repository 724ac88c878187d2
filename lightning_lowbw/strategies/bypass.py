"""Refuses steps that bypass Lightning, because their gradients have not been exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.errors import ConfigurationError


class BypassGuard:
    """Tracks which optimizer Lightning is stepping, and refuses steps of the others."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._stepping: Optimizer | None = None

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Check each step of some optimizers, until `release`."""
        self._handles += [optimizer.register_step_pre_hook(self.check) for optimizer in optimizers]

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
        """The hook: refuse the step of an optimizer that Lightning does not step."""
        if self._stepping is not optimizer:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called directly, not by Lightning, so the gradients were not "
                "exchanged. Call step() on the optimizers that self.optimizers() returns."
            )
