"""`optimizer.step()` in a plain loop, wrapped: it exchanges the gradients before the step, and counts it afterwards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbw.engine.checks import check_not_in_ddp
from lightning_lowbw.engine.hooks import has_step_hooks
from lightning_lowbw.engine.same_training import agree_on_beginning
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import is_finite

if TYPE_CHECKING:
    from lightning_lowbw.engine.worker import Worker

_wrapped: WeakSet[Optimizer] = WeakSet()


def wrap_step(worker: Worker) -> None:
    """Wrap the `step` of a worker's optimizer, on the optimizer itself, as torch's schedulers do.

    Raises:
        ConfigurationError: it has been wrapped for another worker.
    """
    optimizer, step = worker.optimizer, worker.optimizer.step
    if optimizer in _wrapped:
        raise ConfigurationError(
            f"A method is attached to this {type(optimizer).__name__} already, and each step would exchange "
            "twice. Attach once, or make a new optimizer."
        )
    _wrapped.add(optimizer)
    worker.ending.watch(worker)
    wrapped = _WrappedStep(worker, step)

    @functools.wraps(getattr(step, "__func__", step))
    def exchanging_step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return wrapped.take(args, kwargs)

    optimizer.step = MethodType(exchanging_step, optimizer)  # type: ignore[method-assign]
    if "grad_scaler" not in inspect.signature(step).parameters:
        # Otherwise a GradScaler that finds an inf on one rank skips that rank's `step`, and the others wait for it.
        # With this it always calls `step`, which does scaling and skipping, as with torch's fused optimizers.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


class _WrappedStep:
    """The step of a worker's optimizer, with the gradients that the method returns.

    Args:
        worker: whose method it is.
        step: the optimizer's own.
    """

    def __init__(self, worker: Worker, step: Callable[..., Any]) -> None:
        self._worker, self._step = worker, step

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what `step` does; return what it returns, or None if the step is not taken."""
        worker = self._worker
        if not worker.is_compared:
            check_not_in_ddp(worker.parameters(), worker.peers.group)  # which may be new
            agree_on_beginning(worker)
            worker.is_compared = True
        with nullcontext() if worker.is_stepping else worker.stepping():
            scaling = self._unscale()
            is_taken = True
            if args and callable(args[0]):
                args = (self._exchanging(args[0]), *args[1:])
            elif kwargs.get("closure") is not None:
                kwargs = {**kwargs, "closure": self._exchanging(kwargs["closure"])}
            else:
                is_taken = self._exchange_once(skip_nonfinite=scaling is not None)
                is_taken = is_taken and (scaling is None or _are_finite(self._gradients()))
            result = self._step(*args, **kwargs) if is_taken else None
            if scaling is not None:
                vars(worker.optimizer).update(scaling)  # the scaler deletes them
        return result

    @torch.no_grad()
    def _unscale(self) -> dict[str, Any] | None:
        """Unscale and find the inf for a GradScaler that calls `step`; None if none is calling.

        In place:
            `.grad`. If the scaler has found an inf, the first gradient is filled with inf, so that the exchange reports
            it: clipping by value may have removed it.
        """
        worker, optimizer = self._worker, self._worker.optimizer
        if not (hasattr(optimizer, "grad_scale") and hasattr(optimizer, "found_inf")):
            return None
        scaling = {name: vars(optimizer).pop(name) for name in ("grad_scale", "found_inf")}
        gradients = self._gradients()
        if gradients and scaling["grad_scale"] is not None:
            torch._foreach_div_(gradients, scaling["grad_scale"])
        if gradients and (worker.is_local or not worker.is_exchanged):
            gradients[0].masked_fill_(scaling["found_inf"].bool(), torch.inf)  # without a wait for a GPU
        return scaling

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of the optimizer's parameters, of sparse ones the values."""
        gradients = [parameter.grad for parameter in self._worker.parameters() if parameter.grad is not None]
        return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that exchanges the gradients it computes, each time it is called."""

        def exchanging_closure() -> Any:
            self._worker.is_prepared = self._worker.is_exchanged = False  # those were other gradients
            result = closure()
            self._exchange_once()
            return result

        return exchanging_closure

    def _exchange_once(self, *, skip_nonfinite: bool = False) -> bool:
        worker = self._worker
        if worker.is_exchanged:  # by hand
            return worker.is_taken
        applies = not (skip_nonfinite or has_step_hooks(worker.optimizer))  # which may read the gradients
        return worker.exchange(skip_nonfinite=skip_nonfinite, applies=applies)


def _are_finite(gradients: Iterable[Tensor]) -> bool:
    are_finite = [is_finite(gradient) for gradient in gradients]
    return not are_finite or bool(torch.stack(are_finite).all())
