"""The wrapped parts of a Lightning step besides DDP's hook: clipping, a GradScaler's scale, and the optimizers' steps.

If the exchange is sparse, each rank clips its own gradient before it: clipping the mean instead would shrink elements
that contain the gradients of hundreds of steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import norm_of
from lightning_lowbw.strategies.view import View
from lightning_lowbw.sync.buffers import IGNORED
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.plain_loop import gradients_of, last_pre_hook
from lightning_lowbw.sync.synchronizer import Synchronizer, has_step_hooks

READING_HOOK = "on_before_zero_grad"  # may read the gradients of the last step
# Hooks and methods that may change the gradients of the next step, or the parameters that are trained.
CHANGING_HOOKS = ("on_before_backward", "on_after_backward")
CHANGING_METHODS = (*CHANGING_HOOKS, "backward", "optimizer_step")


class StepHooks:
    """Wraps clipping, in two methods of the precision plugin, and the optimizers' steps.

    All clipping of Lightning ends in these two methods. The module's `configure_gradient_clipping` is called as always,
    once per step; norms are multiplied by the method's factor. Steps of the module's parameters that Lightning does not
    take are refused: their gradients have not been exchanged.

    Args:
        view: the model.
        trainer: of the fit.
        worker_of: returns the worker of an optimizer.

    Attributes:
        has_gradients: whether there are new gradients since the last exchange.
    """

    def __init__(self, view: View, trainer: Any, worker_of: Callable[[Any], Synchronizer]) -> None:
        self._view, self._trainer, self._worker_of = view, trainer, worker_of
        self._plugin, self._module, self.has_gradients = trainer.precision_plugin, trainer.lightning_module, False
        self._handle: RemovableHandle | None = None
        self._stepping: Optimizer | None = None  # by Lightning, now
        self._worker: Synchronizer | None = None  # the stepping optimizer's
        self._has_exchanged = False  # for the step in progress
        self._is_waiting = False  # whether its gradients are exchanged where Lightning would clip them, after its hooks
        # A compiled `optimizer.step` is traced, with the closure and hooks that it calls; an exchange cannot be.
        compiler: Any = torch.compiler
        self._end_closure, self._exchange_late = map(compiler.disable, (self._run_closure, self.exchange))
        self._original = self._plugin._clip_gradients
        clip_gradients = self._plugin.clip_gradients

        def clip_with_factor(
            optimizer: Any,
            clip_val: int | float = 0.0,
            gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
        ) -> None:
            worker = self._worker_of(optimizer)
            plan = worker.plan
            is_of_rank = plan.is_local or plan.clips_before_exchange
            if not (self._module.automatic_optimization or is_of_rank or self._view.has_mean(worker)):
                instead = "Call self.manual_backward(loss), or take" if worker.method.what.sends_all else "Take"
                raise ConfigurationError(
                    f"clip_gradients in manual optimization, step {worker.step}: here the mean over ranks is clipped, "
                    f"and optimizer.step() makes it. {instead} a method that clips before it sends, such as 'dgc'."
                )
            factor = plan.clip_factor if gradient_clip_algorithm == GradClipAlgorithmType.NORM else 1.0
            clip_gradients(optimizer, clip_val * factor, gradient_clip_algorithm)

        def clip_or_exchange(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            worker = self._worker
            if worker is None:  # Lightning's own optimizer for a module that returns none has no parameters
                return
            if worker.plan.clips_before_exchange:
                # The hooks get this rank's own gradient; the options that they write count in this step.
                if self._is_waiting:
                    self._is_waiting = False
                    self._exchange_late(worker, is_after_hooks=True)
            else:
                self._original(model, optimizer, *args, **kwargs)
                if is_overridden("configure_gradient_clipping", self._module):
                    self._skip_if_bad(worker)
            if worker.is_taken is False and scaler_of(self._plugin) is None:  # a scaler skips the step itself
                for parameter in _parameters_of(optimizer):
                    parameter.grad = None

        self._plugin.clip_gradients = clip_with_factor
        self._plugin._clip_gradients = clip_or_exchange

    def watch(self) -> None:
        """Check each step of any optimizer that has parameters of the module, until `release`."""
        if self._handle is None:  # else a tuner has begun the fit
            self._handle = register_optimizer_step_pre_hook(self._refuse_others)

    def release(self) -> None:
        """Give the plugin its own methods back, and stop checking."""
        del self._plugin.clip_gradients, self._plugin._clip_gradients
        if self._handle is not None:
            self._handle.remove()

    def step(
        self,
        worker: Synchronizer,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        take: Callable[[Callable[[], Any]], Any],
    ) -> Any:
        """Take a step, with the exchange at the end of the closure, or where Lightning clips; return what `take` does.

        Args:
            worker: of the optimizer.
            optimizer: the user's own.
            closure: makes the gradients.
            take: lets Lightning take the step, with a closure.
        """
        # With a GradScaler the hooks before a step run after the closure, and the gradients they write count, too.
        has_scaler = scaler_of(self._plugin) is not None
        late = last_pre_hook(optimizer, worker.step_exchanged) if has_scaler else nullcontext()
        with worker.stepping(), self.allowing(optimizer, worker), late:
            return take(functools.partial(self._end_closure, worker, closure))

    def _run_closure(self, worker: Synchronizer, closure: Callable[[], Any]) -> Any:
        result, plan = closure(), worker.plan
        has_gradients, self.has_gradients = self.has_gradients or plan.is_local, False
        if self._module.automatic_optimization and not has_gradients:
            # The batch norm epoch of StochasticWeightAveraging: sent again these gradients would count twice.
            if plan.reduce != "all":
                worker.optimizer.zero_grad(set_to_none=True)
        elif plan.clips_before_exchange:
            self._is_waiting = True
        else:
            self.exchange(worker)
        self._has_exchanged = True
        return result

    def sending_early(self) -> AbstractContextManager[None]:
        """Return a context for a backward pass: its gradients may be sent in it, if the optimizer steps with them."""
        worker = self._worker
        if not (isinstance(worker, GradientSync) and worker.method.what.can_be_early and takes_as_made(self._trainer)):
            return nullcontext()
        if worker.skip_norm is not None:  # the step agrees first
            return nullcontext()
        return worker.sending_early(begins=leaves_as_made(self._trainer))

    @torch.no_grad()
    def exchange(self, worker: Synchronizer, *, is_after_hooks: bool = False) -> None:
        """Check the gradients of a step for faults, clip and exchange them; without the scale of a GradScaler.

        Args:
            worker: of the optimizer.
            is_after_hooks: whether Lightning's hooks before a step have been called.
        """
        reduced = self._view.take(worker)
        if not _is_done(worker, reduced):
            exchange = functools.partial(self._exchange, worker, reduced)
            if worker.plan.is_local:  # Lightning alone clips and scales
                exchange(False)
            else:
                exchange_unscaled_(self._plugin, worker.optimizer, exchange, is_after_hooks=is_after_hooks)
        self._view.give(worker)
        if worker.skip_norm is not None and (worker.plan.is_local or worker.plan.reduce == "all"):
            self._skip_if_bad(worker)

    @torch.no_grad()
    def _skip_if_bad(self, worker: Synchronizer) -> None:
        """Skip the step if the gradients of a rank have an inf, a NaN or too large a norm.

        In place:
            One gradient is filled with inf for a GradScaler.

        Collective: all ranks, in a local step the ranks of a node; one number. If the model is sharded, the ranks of a
            node before that; one number.
        """
        if worker.skip_norm is None:
            return
        assert self._stepping is not None
        scaler, parameters = scaler_of(self._plugin), _parameters_of(self._stepping)
        square = norm_of(parameters, worker.params.device).square()
        self._view.sum_in_node_(square)
        norm = square.sqrt() / (1.0 if scaler is None else scaler.get_scale())
        is_bad = (~(norm.isfinite() & (norm <= worker.skip_norm))).view(1).float()
        # A hook may have changed the gradient of one rank.
        (worker.peers.node if worker.plan.is_local else worker.peers).all_reduce_(is_bad, dist.ReduceOp.MAX)
        if is_bad.item():
            worker.is_taken = False
            if scaler is not None:
                next(p.grad for p in parameters if p.grad is not None).fill_(math.inf)

    def _exchange(self, worker: Synchronizer, reduced: Collection[Any], skip_nonfinite: bool) -> bool:
        """Exchange; return whether the step is to be taken."""
        plan, module, clip_val = worker.plan, self._module, self._trainer.gradient_clip_val
        has_scaler, skip_nonfinite = skip_nonfinite, skip_nonfinite or worker.skip_norm is not None
        has_own = is_overridden("configure_gradient_clipping", module)
        clips = plan.clips_before_exchange and (clip_val or has_own)
        optimizer = self._stepping  # the user's; a worker of shards has a twin
        assert optimizer is not None
        algorithm = self._trainer.gradient_clip_algorithm
        clip = functools.partial(self._original, module, optimizer, clip_val, gradient_clip_algorithm=algorithm)
        # Clipping spreads a NaN, and a step that is skipped must leave the residuals as they are. In all other steps
        # `exchange` checks, in the pass that accumulates the gradients; a check here would be one more pass.
        if clips or skip_nonfinite:
            worker.prepare(reduced=reduced, clip=clip if clips and has_own else None)
        if clips and not has_own:
            clip()
        applies = not (
            plan.reduce == "all"  # then the optimizer steps
            or has_scaler
            or self._is_gradient_seen(optimizer)
        )
        is_taken = worker.exchange(reduced=reduced, skip_nonfinite=skip_nonfinite, applies=applies)
        if is_taken and not has_scaler:  # else before the optimizer's step, after all other hooks
            worker.step_exchanged()
        return is_taken

    @contextmanager
    def allowing(self, optimizer: Optimizer, worker: Synchronizer | None = None) -> Iterator[None]:
        """Allow the steps of an optimizer in a `with` block; after the exchange also the steps of its inner optimizers.

        Raises:
            ConfigurationError: the gradients were to be exchanged where Lightning clips, and that was not called.
        """
        outer = self._stepping, self._worker, self._has_exchanged, self._is_waiting
        self._stepping, self._worker, self._has_exchanged, self._is_waiting = optimizer, worker, False, False
        try:
            yield
            if self._is_waiting:
                raise ConfigurationError(
                    f"{type(self._plugin).__name__} has stepped {type(optimizer).__name__} without calling its "
                    "_after_closure, so the gradients were not exchanged. Let its optimizer_step end in that of "
                    "Lightning's Precision; or use strategy='ddp'."
                )
        finally:
            self._stepping, self._worker, self._has_exchanged, self._is_waiting = outer

    def _refuse_others(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook before a step: refuse that of an optimizer that Lightning does not step.

        A wrapper (SAM, Lookahead) steps another optimizer in its own step: after the closure, or with it.
        """
        if self._stepping is optimizer:
            return
        parameters = {p for p in _parameters_of(optimizer) if p.requires_grad or p.grad is not None}
        ignored = getattr(self._module, IGNORED, ())  # these parameters are the user's own, and so are their steps
        if parameters.isdisjoint(p for name, p in self._module.named_parameters() if name not in ignored):
            return
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        is_nested = self._stepping is not None and parameters.issubset(_parameters_of(self._stepping))
        if is_nested and (self._has_exchanged or has_closure):
            return
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() was called directly, not by Lightning, so the gradients were not "
            "exchanged. Return the optimizer from configure_optimizers, and call step() on what self.optimizers() "
            "returns. If the code is not yours, train with strategy='ddp', which takes such a step after a backward "
            "pass (in a hook of one the ranks would part there, too)."
        )

    def _is_gradient_seen(self, optimizer: Optimizer) -> bool:
        """Return whether a hook of Lightning or of the optimizer may read the gradients that an optimizer steps with.

        Only for them sparse means become dense gradients. In manual optimization the user's own code follows the step,
        and may read them as well.
        """
        module = self._module
        if not module.automatic_optimization or has_step_hooks(optimizer, but=[self._refuse_others]):
            return True
        callbacks: list[Any] = self._trainer.callbacks
        return is_overridden(READING_HOOK, module) or any(
            is_overridden(READING_HOOK, callback, parent=Callback) for callback in callbacks
        )


def _is_done(worker: Synchronizer, reduced: Collection[Any]) -> bool:
    """Return whether DDP has reduced all gradients of a step that sends them whole: nothing is left to exchange.

    In place:
        `.grad` of frozen parameters is dropped.
    """
    method = worker.method
    is_whole = method.what.sends_all and worker.compressed is None and not method.when.averages_weights
    return is_whole and worker.peers.num_ranks > 1 and not worker.params.trained(frozenset(reduced))


def takes_as_made(trainer: pl.Trainer) -> bool:
    """Return whether Lightning's own backward pass makes a step's gradients, unscaled; equal on all ranks.

    False if layers synchronise their statistics: they communicate in that pass.
    """
    has_layer_sync = trainer.strategy._layer_sync is not None  # type: ignore[attr-defined]
    has_scaler = scaler_of(trainer.precision_plugin) is not None
    return trainer.lightning_module.automatic_optimization and not (has_layer_sync or has_scaler)


def leaves_as_made(trainer: pl.Trainer) -> bool:
    """Return whether no hook on this rank may change gradients, or freeze layers, between backward and the step."""
    of_module = (is_overridden(name, trainer.lightning_module) for name in CHANGING_METHODS)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    of_callbacks = (is_overridden(name, each, parent=Callback) for each in callbacks for name in CHANGING_HOOKS)
    return not (any(of_module) or any(of_callbacks))


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
        parameter = next(p for p in _parameters_of(optimizer) if p.requires_grad)
        found_inf = torch.full((), float(not is_taken), device=parameter.device)  # by all ranks, instead of by this one
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {parameter.device: found_inf}
        return
    scale = scaler._get_scale_async()  # `get_scale` waits for a GPU
    _apply_(torch._foreach_div_, optimizer, scale)
    if exchange(True):
        _apply_(torch._foreach_mul_, optimizer, scale)  # which the plugin takes out again
        return
    # On all ranks: the scaler finds the inf, skips the step and lowers its scale.
    parameter = next(p for p in _parameters_of(optimizer) if p.requires_grad)
    parameter.grad = torch.full_like(parameter, float("inf"))


def _apply_(function: Callable[[list[Tensor], Tensor], None], optimizer: Optimizer, scale: Tensor) -> None:
    """Multiply or divide the gradients of an optimizer, if there are any."""
    if gradients := gradients_of(_parameters_of(optimizer)):
        function(gradients, scale)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
