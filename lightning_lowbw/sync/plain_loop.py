"""A plain loop: `attach` gives an optimizer a worker, and wraps its `step`, which then also communicates."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, cast
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_lowbw.arguments import names_of
from lightning_lowbw.comm.agreement import failing_together
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.checks import (
    agree_on_beginning,
    agree_on_model,
    agree_on_optimizers,
    warn_alone,
    warn_if_incomplete,
    warn_of_compression,
)
from lightning_lowbw.sync.kernels import prepare_kernels
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.status import any_of
from lightning_lowbw.sync.synchronizer import Loop, Synchronizer, has_step_hooks

_logger = logging.getLogger(LOGGER)


def check_beginning(when: Schedule) -> None:
    """Check, before anything is communicated, that a schedule can be run in a plain loop, and the ranks have met.

    Raises:
        ConfigurationError: on this rank.
    """
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group: each rank would train alone. "
            "Call torch.distributed.init_process_group first."
        )
    if when.is_auto:
        raise ConfigurationError(
            "sparsity='auto' in a plain loop: the length of the run and the time of a step are known to a Trainer "
            "only. Give the numbers, as in sparsity=[0.999], or train with strategy='dgc'."
        )


def attach(
    make: Callable[[list[tuple[str, Parameter]]], Synchronizer],
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]],
    process_group: dist.ProcessGroup | None,
) -> Synchronizer:
    """Return this rank's worker for an optimizer, whose steps become steps of the method; see `Method.attach`.

    Args:
        make: returns the worker for some named parameters.
        optimizer: the worker's optimizer.
        named_parameters: the parameters of the model.
        process_group: the group of the worker's peers.
    """
    with failing_together(process_group):
        names = names_of(named_parameters)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if names and not any(parameter in names for parameter in trained):
            raise ConfigurationError(
                "attach(optimizer, model.named_parameters()): none of the optimizer's parameters is among these. "
                "Give the named parameters of the model that the optimizer trains."
            )
        named = [(name, parameter) for parameter, name in names.items()]
        worker = make(named)
    agree_on_model(worker.params.by_name().items(), process_group)
    agree_on_optimizers([optimizer], named, process_group)
    if isinstance(worker, LocalSync):
        worker.replica.buffers.agree_on_shapes()
    _tell(worker)
    prepare_kernels([worker], process_group)
    _wrap_step(worker)
    return worker


def _tell(worker: Synchronizer) -> None:
    """Warn of settings that the user may not intend; called by `attach`."""
    method, peers, correction = worker.method, worker.peers, worker.correction
    if peers.topology.num_nodes == 1 < peers.num_ranks and peers.rank == 0:
        warnings.warn(
            f"topology={method.where.topology!r}: all ranks are on one node, between which nothing is compressed: "
            "this trains as DDP. To compress between all ranks, leave the topology out.",
            stacklevel=4,  # the caller of `Method.attach`
        )
    if peers.num_ranks == 1 and not method.acts_alone:
        warn_alone()
    if peers.rank == 0 and all(name.startswith("module.") for name in worker.params.names()):
        warnings.warn(
            "All names of the parameters begin with 'module.', as in DistributedDataParallel, which sends whole "
            "gradients during the backward pass: this would train as DDP. Attach to a model that is not wrapped.",
            stacklevel=4,  # the caller of `Method.attach`
        )
    warn_of_compression(method.what, method.when, worker.params, peers)
    if correction is not None and peers.rank == 0 and peers.num_participants > 1:
        if method.what.corrects and not correction.is_complete:
            warn_if_incomplete(worker.optimizer, method.when)
        if note := correction.note():
            _logger.info(note)


def _warn_if_apart(loop: Loop) -> None:
    if loop.differs_after is None or getattr(sys, "last_type", None) is not None:  # an exception has ended the program
        return
    # No warning: as an error it would be lost in a finalizer.
    _logger.warning(
        f"The loop has ended after step {loop.differs_after}, between two averages: each rank has weights of its own, "
        "and a model that was saved outside of worker.consensus() has the weights of one rank. Call worker.finish() "
        "after the last step, on all ranks, before you save the model."
    )


@functools.cache
def eagerly() -> Callable[..., Any]:
    """Return a function that calls its first argument with the other arguments, outside of torch.compile.

    A compiled `optimizer.step` is traced, with the closure and hooks that it calls; an exchange cannot be.
    """

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    compiler: Any = torch.compiler
    return cast("Callable[..., Any]", compiler.disable(call))  # not at import: it loads the compiler


# A step of a plain loop -----------------------------------------------------------------------------------------------

_wrapped: WeakSet[Optimizer] = WeakSet()


def _wrap_step(worker: Synchronizer) -> None:
    """Wrap the `step` of a worker's optimizer, on the optimizer itself, as torch's schedulers do.

    The wrapped step exchanges the gradients before the step, and counts it afterwards.

    Raises:
        ConfigurationError: the step has been wrapped for another worker.
    """
    optimizer, step = worker.optimizer, worker.optimizer.step
    if optimizer in _wrapped:
        raise ConfigurationError(
            f"A method is attached to this {type(optimizer).__name__} already, and each step would exchange "
            "twice. Attach once, or make a new optimizer."
        )
    _wrapped.add(optimizer)
    if worker.peers.rank == 0:  # the optimizer of a script often lives until Python exits
        finalize(worker, _warn_if_apart, worker.loop)

    @functools.wraps(getattr(step, "__func__", step))
    def exchanging_step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return eagerly()(_take_step, worker, step, args, kwargs)

    optimizer.step = MethodType(exchanging_step, optimizer)  # type: ignore[method-assign]
    if "grad_scaler" not in inspect.signature(step).parameters:
        # Otherwise a GradScaler that finds an inf on one rank skips that rank's `step`, and the other ranks wait for
        # it. With this flag it always calls `step`, which scales and skips, as with torch's fused optimizers.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _take_step(worker: Synchronizer, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Exchange, and call the optimizer's `step`; return its result, or None if the step is not taken."""
    if not worker.loop.is_compared:
        agree_on_beginning(
            worker.optimizer,
            worker.params.by_name(),
            worker.step,
            worker.peers.group,
            compares_weights=worker.parameters_agree,
            compares_state=worker.step == 0 and worker.is_taken is None,  # else the state has local gradients
        )
        worker.loop.is_compared = True

    def exchanging(closure: Callable[[], Any]) -> Callable[[], Any]:
        def exchanging_closure() -> Any:  # called any number of times
            worker.is_prepared, worker.is_taken = False, None  # an earlier call had other gradients
            result = closure()
            exchange_to_step()
            return result

        return functools.partial(eagerly(), exchanging_closure)

    def exchange_to_step() -> bool:
        is_taken = _exchange(worker, scaling)
        if is_taken:
            worker.step_exchanged()
        return is_taken

    with nullcontext() if worker.loop.is_stepping else worker.stepping():
        scaling = _unscale(worker)
        is_taken, late = True, cast("AbstractContextManager[Any]", nullcontext())
        if args and callable(args[0]):
            args = (exchanging(args[0]), *args[1:])
        elif kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": exchanging(kwargs["closure"])}
        elif worker.optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks:
            # Their changes of the param groups count in this step. They see the local gradient if that is clipped.
            if worker.plan.clips_before_exchange and scaling is None and worker.is_taken is None:
                late = last_pre_hook(worker.optimizer, exchange_to_step, must_call=True)
            else:
                is_taken = _exchange(worker, scaling)
                late = last_pre_hook(worker.optimizer, worker.step_exchanged, must_call=is_taken)
        else:
            is_taken = exchange_to_step()
        with late:
            result = step(*args, **kwargs) if is_taken else None
        if scaling is not None:
            vars(worker.optimizer).update(scaling)  # the scaler deletes them
    return result


@contextmanager
def last_pre_hook(optimizer: Optimizer, function: Callable[[], Any], *, must_call: bool = False) -> Iterator[None]:
    """Call a function after all other hooks before a step, for the steps in a `with` block.

    Raises:
        ConfigurationError: the function was not called, and must be.
    """
    calls = list[None]()

    def hook(*_: Any) -> None:
        calls.append(function() and None)

    handle = optimizer.register_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
    if must_call and not calls:
        raise ConfigurationError(
            f"The step of this {type(optimizer).__name__} has been replaced by one that calls no hooks before a step, "
            "so the gradients were not exchanged. Replace it after attach, or leave out the hooks."
        )


def _exchange(worker: Synchronizer, scaling: Mapping[str, Any] | None) -> bool:
    """Exchange, unless that has been done by hand; return whether the step is to be taken.

    Under a GradScaler the step is taken only if the means are finite.
    """
    has_scaler = scaling is not None
    if worker.is_taken is None:
        applies = not (has_scaler or has_step_hooks(worker.optimizer))  # hooks may read the gradients
        worker.exchange(skip_nonfinite=has_scaler, applies=applies)
    are_finite = not (has_scaler and any_of(are_not_finite(gradients_of(worker.params)), worker.params.device))
    return bool(worker.is_taken) and are_finite


@torch.no_grad()
def _unscale(worker: Synchronizer) -> dict[str, Any] | None:
    """Unscale and find the inf for a GradScaler that calls `step`; None if none is calling.

    In place:
        `.grad`. If the scaler has found an inf, the first gradient is filled with inf, so that the exchange reports
        it: clipping by value may have removed it.
    """
    optimizer = worker.optimizer
    if not (hasattr(optimizer, "grad_scale") and hasattr(optimizer, "found_inf")):
        return None
    scaling = {name: vars(optimizer).pop(name) for name in ("grad_scale", "found_inf")}
    gradients = gradients_of(worker.params)
    if gradients and scaling["grad_scale"] is not None:
        torch._foreach_div_(gradients, scaling["grad_scale"])
    if gradients and (worker.plan.is_local or worker.is_taken is None):
        gradients[0].masked_fill_(scaling["found_inf"].bool(), torch.inf)  # without a wait for a GPU
    return scaling


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one; for a sparse gradient its values."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
