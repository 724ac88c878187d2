"""What of a Lightning step is wrapped besides DDP's hook: clipping, the scale of a GradScaler, and optimizers' steps.

Where the exchange is sparse, clipping comes before it, on this rank's own gradient: clipping the mean instead would
shrink elements that contain the gradients of hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.sync.synchronizer import Synchronizer, eagerly, has_step_hooks

READING_HOOK = "on_before_zero_grad"  # in which the gradients of the last step may be read


class Clipping:
    """Replaces two methods of the precision plugin, in which all clipping of Lightning ends.

    The module's `configure_gradient_clipping` is called as always, once per step; norms are multiplied by the method's
    factor.
    """

    def __init__(self) -> None:
        self._plugin: Precision | None = None
        self._original: Callable[..., None] | None = None  # the plugin's own

    def install(
        self,
        plugin: Precision,
        worker_of: Callable[[Any], Synchronizer],
        check: Callable[[Synchronizer], None],
        exchange: Callable[[Synchronizer], None],
    ) -> None:
        """Replace the methods until `restore`.

        Args:
            plugin: the Trainer's.
            worker_of: returns the worker of an optimizer.
            check: raises if what a worker's method clips is not there yet.
            exchange: clips the gradients of a worker and exchanges them, where they are clipped before.
        """
        clip_gradients, original = plugin.clip_gradients, plugin._clip_gradients

        def clip_with_factor(
            optimizer: Any,
            clip_val: int | float = 0.0,
            gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
        ) -> None:
            worker = worker_of(optimizer)
            check(worker)
            factor = worker.clip_factor if gradient_clip_algorithm == GradClipAlgorithmType.NORM else 1.0
            clip_gradients(optimizer, clip_val * factor, gradient_clip_algorithm)

        def clip_or_exchange(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            worker = worker_of(optimizer)
            if worker.clips_before_exchange:
                eagerly()(exchange, worker)
            else:
                original(model, optimizer, *args, **kwargs)

        self._plugin, self._original = plugin, original
        plugin.clip_gradients = clip_with_factor  # type: ignore[method-assign]
        plugin._clip_gradients = clip_or_exchange  # type: ignore[method-assign]

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


def scaler_of(precision_plugin: Any) -> Any:
    """Return the GradScaler that is in use; None if there is none."""
    scaler = getattr(precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def exchange_unscaled_(
    precision_plugin: Any, optimizer: Optimizer, exchange: Callable[[bool], bool], *, is_after_hooks: bool = False
) -> None:
    """Exchange gradients without the scale of a GradScaler, if there is one: a residual outlives the scale of its step.

    In place:
        `.grad` of its parameters. If the step is not to be taken, the scaler will find an inf, and skip it.

    Args:
        precision_plugin: Lightning's.
        optimizer: the user's own.
        exchange: whether to skip steps with inf or NaN -> whether the step is to be taken.
        is_after_hooks: whether the plugin has unscaled the gradients already, if it is the one that does.
    """
    scaler = scaler_of(precision_plugin)
    if scaler is None:
        exchange(False)
        return
    if is_after_hooks and not getattr(optimizer, "_step_supports_amp_scaling", False):
        is_taken = exchange(True)
        (parameter, *_) = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        found = torch.full((), float(not is_taken), device=parameter.device)  # by all ranks, instead of by this one
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {parameter.device: found}
        return
    scale = scaler._get_scale_async()  # `get_scale` waits for a GPU
    _apply_(torch._foreach_div_, optimizer, scale)
    if exchange(True):
        _apply_(torch._foreach_mul_, optimizer, scale)  # which the plugin takes out again
        return
    # On all ranks: the scaler finds the inf, skips the step and lowers its scale.
    parameter = next(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    parameter.grad = torch.full_like(parameter, float("inf"))


def _apply_(function: Callable[[list[Tensor], Tensor], None], optimizer: Optimizer, scale: Tensor) -> None:
    """Multiply or divide the gradients of an optimizer, if there are any."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if gradients:
        function([gradient._values() if gradient.is_sparse else gradient for gradient in gradients], scale)


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
        return is_overridden(READING_HOOK, module) or any(
            is_overridden(READING_HOOK, each, parent=Callback) for each in callbacks
        )
