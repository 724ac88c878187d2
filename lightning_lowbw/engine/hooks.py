"""Hooks of an optimizer's step, which can read the gradients that it steps with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


def has_step_hooks(optimizer: Optimizer, but: Collection[Callable[..., Any]] = ()) -> bool:
    """Return whether anything is called before or after each step of an optimizer, or of all optimizers.

    Args:
        optimizer: a user's.
        but: this package's own hooks, which do not read gradients.
    """
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    return any(hook not in but for hook in hooks)
