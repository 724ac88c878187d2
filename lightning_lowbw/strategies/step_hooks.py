"""What of a Lightning step is wrapped besides DDP's hook: clipping, the scale of a GradScaler, and optimizers' steps.

Where the exchange is sparse, clipping comes before it, on this rank's own gradient: clipping the mean instead would
shrink elements that contain the gradients of hundreds of steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.comm.agreement import differ, gather
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError, DisagreementError
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
            if not any(True for _ in parameters_of(optimizer)):
                return
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
        is_after_hooks: whether the plugin has unscaled the gradients already, if not the optimizer does.
    """
    scaler = scaler_of(precision_plugin)
    if scaler is None:
        exchange(False)
        return
    if is_after_hooks:
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # a fused one, which would unscale in its step
            scaler.unscale_(optimizer)
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


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer; Lightning's own one for a module that returns none has none."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class StepGuard:
    """Refuses steps of a module's parameters that Lightning does not take: their gradients have not been exchanged."""

    def __init__(self) -> None:
        self._module: torch.nn.Module | None = None
        self._handle: RemovableHandle | None = None
        self._stepping: Optimizer | None = None  # by Lightning, now
        self._has_exchanged = False  # for that step

    def watch(self, module: torch.nn.Module) -> None:
        """Check each step of any optimizer that has parameters of a module, until `release`."""
        self.release()
        self._module, self._handle = module, register_optimizer_step_pre_hook(self.check)

    def release(self) -> None:
        """Stop checking."""
        if self._handle is not None:
            self._handle.remove()
        self._module = self._handle = None

    @contextmanager
    def allowing(self, optimizer: Optimizer) -> Iterator[None]:
        """Allow the steps of one optimizer in a `with` block; after `note_exchange` also of those that it contains."""
        outer = self._stepping, self._has_exchanged
        self._stepping, self._has_exchanged = optimizer, False
        try:
            yield
        finally:
            self._stepping, self._has_exchanged = outer

    def note_exchange(self) -> None:
        """Note that the gradients of the step in progress have been exchanged."""
        self._has_exchanged = True

    def check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook before a step: refuse that of an optimizer that Lightning does not step.

        A wrapper (SAM, Lookahead) steps another optimizer in its own step: after the closure, or with it.
        """
        if self._stepping is optimizer or self._module is None:
            return
        parameters = {p for p in parameters_of(optimizer) if p.requires_grad or p.grad is not None}
        if parameters.isdisjoint(self._module.parameters()):
            return
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        is_nested = self._stepping is not None and parameters.issubset(parameters_of(self._stepping))
        if is_nested and (self._has_exchanged or has_closure):
            return
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() was called directly, not by Lightning, so the gradients were not "
            "exchanged. Return the optimizer from configure_optimizers, and call step() on what self.optimizers() "
            "returns. If the code is not yours, train with strategy='ddp', which takes such a step after a backward "
            "pass (in a hook of one the ranks would part there, too)."
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


class Unowned:
    """Finds parameters that are trained, and are in no optimizer of the strategy: nothing exchanges their gradients."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self._with_gradient: set[str] | None = None  # names; None: not known, and all are compared

    def watch(self, parameters: Mapping[str, Tensor]) -> None:
        """Note which parameters get a gradient until `check`, which compares only these: under local SGD a target
        network, which gets none, is each rank's own.
        """
        self._with_gradient = set()
        for name, parameter in parameters.items():
            hook = functools.partial(self._note, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _note(self, name: str, _: Tensor) -> None:
        if self._with_gradient is not None:
            self._with_gradient.add(name)

    def release(self) -> None:
        """Note no more gradients."""
        while self._handles:
            self._handles.pop().remove()

    def check(self, tensors: Mapping[str, Tensor], peers: Peers, device: torch.device) -> None:
        """Compare parameters between ranks.

        Collective: all peers, blocking; two numbers for each, if there are any.

        Raises:
            DisagreementError: on all peers; one differs.
        """
        self.release()
        if peers.num_ranks == 1 or not tensors:
            return
        are_unequal = differ([[tensor] for tensor in tensors.values()], peers.group, device)
        names = list(compress(tensors, are_unequal))
        if names and self._with_gradient is not None:
            seen = set[str]().union(*gather(self._with_gradient, "parameters with a gradient", peers.group))
            names = [name for name in names if name in seen]
        if names:
            raise DisagreementError(
                f"{names[0]!r} is in no optimizer that configure_optimizers has returned, and differs between the "
                f"ranks ({len(names)} such parameters): what trains it does not exchange its gradient. Return an "
                "optimizer for it; if it is not to be trained, set requires_grad=False; if each rank is to have its "
                "own, name it in the module's _ddp_params_and_buffers_to_ignore."
            )
