"""Keyword arguments that go to Lightning's `DDPStrategy` and to torch's `DistributedDataParallel`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.errors import ConfigurationError

# The communication hook is this package's; and what DDP would do beside the hook, without its knowledge.
OWNED = frozenset({"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"})
UNSUPPORTED = frozenset({"delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh"})
OF_ALL = frozenset({"resume"})  # of `Strategy`, and so of all strategies of this package
SET_BY_LIGHTNING = frozenset({"self", "module", "device_ids", "output_device", "dim", "kwargs"})


def check_keywords(strategy: type, kwargs: Mapping[str, Any]) -> None:
    """Check what a strategy is to hand on to DDP.

    Raises:
        ConfigurationError: a keyword is unknown, or cannot be combined with a communication hook.
    """
    classes = (strategy, DDPStrategy, DistributedDataParallel)
    known = {name for cls in classes for name in inspect.signature(cls).parameters}
    allowed = (known - OWNED - UNSUPPORTED - SET_BY_LIGHTNING) | OF_ALL
    for name in kwargs:
        if name in OWNED | UNSUPPORTED:
            raise ConfigurationError(
                f"{strategy.__name__}({name}=...): this strategy has a communication hook of its own, which cannot be "
                f"combined with {name}. Leave it out, or use strategy='ddp'."
            )
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"{strategy.__name__}({name}=...): unknown keyword.{hint} Allowed: {', '.join(sorted(allowed))}."
            )
