"""The two roles that a method plays, as the strategies see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.where.collectives import Exchange


class Worker(Protocol):
    """One rank's side of a method for one optimizer: what it does around the optimizer's step."""

    method: Any
    optimizer: Optimizer
    step: int

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are all-reduced during backward in the coming step, as DDP does."""
        ...

    @property
    def reduces_in_node(self) -> bool:
        """Whether the coming step's are all-reduced inside each node instead, and what follows is the node's."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the coming step communicates nothing before the optimizer has stepped."""
        ...

    @property
    def clip_factor(self) -> float:
        """What a norm threshold is multiplied with when this rank's own gradient is clipped before the exchange."""
        ...

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Begin the exchange of gradients that backward has completed, where the method can; returns at once."""
        ...

    def exchange(
        self,
        *,
        clip: Callable[[], None] | None = None,
        reduced: Collection[Parameter] = (),
        skip_nonfinite: bool = False,
        num_backwards: int = 0,
    ) -> bool:
        """Turn the gradients into those the optimizer steps with; whether the step is to be taken."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """Enclose `exchange` and the optimizer's own step."""
        ...

    def check_schedule(self) -> None:
        """Raise where the coming step does not go with the state; called when the training starts."""
        ...

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return what is worth logging after a step; what costs a pass over memory only where `is_due`."""
        ...

    def to(self, device: torch.device) -> None:
        """Move this rank's own state."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: tensors and primitives."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        ...


class Method(Protocol):
    """A configuration that makes workers."""

    def attach(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]], exchange: Exchange
    ) -> Worker:
        """Return the worker of this rank for an optimizer."""
        ...

    def describe(self) -> dict[str, object]:
        """Return the configuration as plain values, to be compared between ranks."""
        ...

    def merge_states(self, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state every rank of another world size starts with."""
        ...
