"""What of a Lightning step is wrapped besides DDP's hook: the clipping of the precision plugin, and optimizers' steps.

Where the exchange is sparse, clipping comes before it, on this rank's own gradient: clipping the mean instead would
shrink elements that contain the gradients of hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.sync.synchronizer import Synchronizer, has_step_hooks

# In which gradients may be read after the exchange: those of this step, and of the last one before they are forgotten.
READING_HOOKS = ("on_before_optimizer_step", "on_before_zero_grad")


class Clipping:
    """Replaces two methods of the precision plugin, in which all clipping of Lightning ends.

    The module's `configure_gradient_clipping` is called as always, once per step; norms are multiplied by the method's
    factor.
    """

    def __init__(self) -> None:
        self._plugin: Precision | None = None
        self._original: Callable[..., None] | None = None  # the plugin's own

    def install(
        self, plugin: Precision, worker_of: Callable[[Any], Synchronizer], make_mean: Callable[[Synchronizer], bool]
    ) -> None:
        """Replace the methods until `restore`.

        Args:
            plugin: the Trainer's.
            worker_of: returns the worker of an optimizer.
            make_mean: makes the mean that is clipped, where it is not there yet; returns whether the step is taken.
        """
        clip_gradients, original = plugin.clip_gradients, plugin._clip_gradients

        def clip_with_factor(
            optimizer: Any,
            clip_val: int | float = 0.0,
            gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
        ) -> None:
            worker = worker_of(optimizer)
            if not make_mean(worker):
                return  # a GradScaler skips the step because of an inf, which clipping by value would remove
            factor = worker.clip_factor if gradient_clip_algorithm == GradClipAlgorithmType.NORM else 1.0
            clip_gradients(optimizer, clip_val * factor, gradient_clip_algorithm)

        def clip_unless_done(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if not worker_of(optimizer).clips_before_exchange:
                original(model, optimizer, *args, **kwargs)

        self._plugin, self._original = plugin, original
        plugin.clip_gradients = clip_with_factor  # type: ignore[method-assign]
        plugin._clip_gradients = clip_unless_done  # type: ignore[method-assign]

    def clip(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Clip the gradients of an optimizer, the user's own, before they are exchanged.

        In place:
            `.grad` of its parameters.
        """
        assert self._original is not None
        self._original(
            trainer.lightning_module,
            optimizer,
            trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    def restore(self) -> None:
        """Give the plugin its own methods back."""
        if self._plugin is not None:
            del self._plugin.clip_gradients, self._plugin._clip_gradients
            self._plugin = self._original = None


def clips_before_exchange(worker: Synchronizer, trainer: pl.Trainer) -> bool:
    """Return whether the coming step clips, by an argument or an overridden hook, before the exchange."""
    module = trainer.lightning_module
    is_asked_for = bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", module)
    return worker.clips_before_exchange and is_asked_for


class StepGuard:
    """Refuses steps that Lightning does not take: their gradients have not been exchanged."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._stepping: Optimizer | None = None  # by Lightning, now

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Check each step of some optimizers, until `release`."""
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self.check))

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
        """The hook before a step: refuse that of an optimizer that Lightning does not step."""
        if self._stepping is not optimizer:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called directly, not by Lightning, so the gradients were not "
                "exchanged. Call step() on the optimizers that self.optimizers() returns. If the code is not yours, "
                "train with strategy='ddp'."
            )

    def is_gradient_seen(self, trainer: pl.Trainer, optimizer: Optimizer) -> bool:
        """Return whether a hook of Lightning or of the optimizer may read the gradients that an optimizer steps with.

        Only for them sparse means become dense gradients. In manual optimization the user's own code follows the step,
        and may read them as well.
        """
        module = trainer.lightning_module
        if not module.automatic_optimization or has_step_hooks(optimizer, but=[self.check]):
            return True
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return any(
            is_overridden(hook, module) or any(is_overridden(hook, each, parent=Callback) for each in callbacks)
            for hook in READING_HOOKS
        )
