"""Keyword arguments that go to Lightning's `DDPStrategy` and to torch's `DistributedDataParallel`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.arguments import code_of, is_number
from lightning_lowbw.errors import ConfigurationError

# This package sets the communication hook; the other options would communicate outside of the hook.
OWNED = frozenset({"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"})
UNSUPPORTED = frozenset({"delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh"})
SET_BY_LIGHTNING = frozenset({"module", "device_ids", "output_device", "dim", "kwargs"})

Needs = Literal["exact", "weights and optimizer"]  # the state that a resume must load


def _keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of DDP as signatures show it: torch has no types for most."""
    kind: Any = parameter.annotation
    if parameter.name == "timeout":  # also in seconds
        kind = timedelta | float | None
    elif kind is parameter.empty:
        kind = bool if isinstance(parameter.default, bool) else Any
    if parameter.name == "broadcast_buffers":
        # None stands for "as the method needs it"; DDP's own defaults depend on the release of torch.
        return parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=bool | None, default=None)
    return parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=kind)


ALL_KEYWORDS = {
    name: _keyword(parameter)
    for cls in (DistributedDataParallel, DDPStrategy)
    for name, parameter in inspect.signature(cls).parameters.items()
    if name not in SET_BY_LIGHTNING
}
DDP_KEYWORDS = {name: parameter for name, parameter in ALL_KEYWORDS.items() if name not in OWNED | UNSUPPORTED}
STRATEGY_KEYWORDS = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("resume", "exact", Needs),
        ("skip_nonfinite", False, bool),
        ("skip_norm", None, float | None),
    )
} | DDP_KEYWORDS


def given_keywords(strategy: type, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords to pass to DDP: keywords whose values are not the defaults.

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
    return given


def as_timeout(value: object) -> timedelta:
    """Return how long a collective may take, from seconds or a timedelta.

    Raises:
        ConfigurationError: the value is neither, or not above 0.
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
    asked = ddp_kwargs.get("forward_sync_buffers")  # torch 2.13 and later, where it overrides `broadcast_buffers`
    return ddp_kwargs.get("broadcast_buffers") if asked is None else asked


def written(strategy: Any, options: Mapping[str, Any]) -> str:
    """Return the call that makes a strategy, with its method and the options that are not the defaults."""
    known = inspect.signature(type(strategy)).parameters
    given = [
        f"{name}={value!r}" for name, value in options.items() if name not in known or value != known[name].default
    ]
    return f"{type(strategy).__name__}({', '.join([code_of(strategy.method), *given])})"
