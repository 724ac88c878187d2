"""Keyword arguments that go to Lightning's `DDPStrategy` and to torch's `DistributedDataParallel`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar, get_type_hints

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import TypedDict

from lightning_lowbw.arguments import is_number
from lightning_lowbw.errors import ConfigurationError

# The communication hook is this package's; the others would communicate outside of the hook.
OWNED = frozenset({"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"})
UNSUPPORTED = frozenset({"delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh"})
SET_BY_LIGHTNING = frozenset({"module", "device_ids", "output_device", "dim", "kwargs"})

Needs = Literal["exact", "weights and optimizer"]  # what a resume loads
Constructor = TypeVar("Constructor", bound=Callable[..., None])


class DDPKeywords(TypedDict, total=False):
    """Keywords that all strategies pass to DDP, for type checkers, editors and LightningCLI.

    Which of these there are depends on the installed torch: see `DDP_KEYWORDS`.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: found out by the Trainer.
        checkpoint_io: what writes and reads checkpoints.
        precision_plugin: made by the Trainer.
        process_group_backend: "nccl" or "gloo"; by default what suits the device.
        timeout: how long a collective may take: seconds, or a timedelta; also of the groups of two levels.
        start_method: "popen", "spawn", "fork" or "forkserver": how processes are started.
        broadcast_buffers: whether rank 0 sends its buffers in every forward pass; see the strategy.
        init_sync: whether rank 0 sends parameters and buffers at the start.
        process_group: the ranks, where they are not the world.
        bucket_cap_mb: the size of the buckets in which dense steps reduce gradients.
        find_unused_parameters: whether dense steps search for parameters that the loss does not depend on; sparse and
            local steps do not need to.
        check_reduction: without effect.
        gradient_as_bucket_view: whether gradients are views of the buckets, which saves memory.
        static_graph: whether all steps use the same parameters.
        skip_all_reduce_unused_params: as in `DistributedDataParallel`.
        bucket_cap_mb_list: as in `DistributedDataParallel`.
        batched_grad_copy: as in `DistributedDataParallel`.
        forward_sync_buffers: as in `DistributedDataParallel`.
    """

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None
    process_group_backend: str | None
    timeout: timedelta | float | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: ProcessGroup | None
    bucket_cap_mb: int | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class StrategyKeywords(DDPKeywords, total=False):
    """Keywords that a strategy with a class of its own passes to `Strategy`.

    Args:
        resume: see `Strategy`.
    """

    resume: Needs


TYPES = get_type_hints(DDPKeywords)


def _keywords_of(*classes: type) -> dict[str, inspect.Parameter]:
    return {
        name: parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=TYPES.get(name, parameter.annotation),
            # "As the method needs it" here, and none of DDP's own defaults, which depend on the release of torch.
            default=None if name == "broadcast_buffers" else parameter.default,
        )
        for cls in classes
        for name, parameter in inspect.signature(cls).parameters.items()
        if name not in SET_BY_LIGHTNING
    }


ALL_KEYWORDS = _keywords_of(DistributedDataParallel, DDPStrategy)
DDP_KEYWORDS = {name: each for name, each in ALL_KEYWORDS.items() if name not in OWNED | UNSUPPORTED}
STRATEGY_KEYWORDS = {
    "resume": inspect.Parameter("resume", inspect.Parameter.KEYWORD_ONLY, default="exact", annotation=Needs),
    **DDP_KEYWORDS,
}


def shows(passed_on: Mapping[str, inspect.Parameter]) -> Callable[[Constructor], Constructor]:
    """Decorate a constructor: its signature has the keywords that `**kwargs` stands for, and that are passed on.

    `help` and LightningCLI (for types, defaults and accepted names) read this signature.
    """

    def decorate(init: Constructor) -> Constructor:
        own = inspect.signature(init, eval_str=True)
        *named, _ = own.parameters.values()
        others = (parameter for name, parameter in passed_on.items() if name not in own.parameters)
        init.__signature__ = own.replace(parameters=[*named, *others])  # type: ignore[attr-defined]
        return init

    return decorate


def given_keywords(strategy: type, kwargs: Mapping[str, Any]) -> DDPKeywords:
    """Return the keywords to pass to DDP: those whose values are not the defaults.

    LightningCLI passes all defaults explicitly.

    Raises:
        ConfigurationError: a keyword is unknown, or cannot be combined with a communication hook.
    """
    given = {
        name: value for name, value in kwargs.items() if name not in ALL_KEYWORDS or value != ALL_KEYWORDS[name].default
    }
    for name, value in given.items():
        if name in OWNED | UNSUPPORTED:
            raise ConfigurationError(
                f"{strategy.__name__}({name}={value!r}): this strategy has a communication hook of its own, which "
                f"cannot be combined with {name}. Leave it out, or use strategy='ddp'."
            )
        if name not in DDP_KEYWORDS:
            allowed = ", ".join(sorted(inspect.signature(strategy).parameters))
            raise ConfigurationError(f"{strategy.__name__}({name}=...): unknown keyword. Allowed: {allowed}.")
    if given.get("timeout") is not None:
        given["timeout"] = as_timeout(given["timeout"])
    return given  # type: ignore[return-value]  # checked, and not all of them known to `DDPKeywords` of this release


def as_timeout(value: object) -> timedelta:
    """Return how long a collective may take, from seconds or a timedelta.

    Raises:
        ConfigurationError: it is neither, or not above 0.
    """
    try:
        timeout = timedelta(seconds=float(value)) if is_number(value) else value  # type: ignore[arg-type]
    except OverflowError:
        timeout = None
    if not isinstance(timeout, timedelta) or timeout <= timedelta():
        raise ConfigurationError(
            f"timeout={value!r}: give the seconds that a collective may take, as 600, or a timedelta; above 0."
        )
    return timeout


def asked_of_buffers(ddp_kwargs: Mapping[str, Any]) -> bool | None:
    """Return whether the user wants rank 0 to send its buffers in every forward pass; None if they have not said so."""
    asked = ddp_kwargs.get("forward_sync_buffers")  # since torch 2.13, where it goes before the other
    return ddp_kwargs.get("broadcast_buffers") if asked is None else asked
