"""What an average sends of the parameters: their values whole, or their changes since the last one, narrow or sparse.

`begin` and `wait` enclose what is on its way. Changes are keyed by the name of the parameter and have the shape of its
real view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_lowbw.comm.averaging import NarrowMean
from lightning_lowbw.comm.collectives import Exchange
from lightning_lowbw.core.compression import Compression
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import as_real, flat


class Arrival(Protocol):
    """Mean changes that are on their way."""

    def wait(self) -> dict[str, Tensor]:
        """Return the mean over the senders of each change: float32, the same bits on all ranks."""
        ...


@dataclass
class Arrived:
    """Mean changes that are there."""

    changes: dict[str, Tensor] = field(default_factory=dict)

    def wait(self) -> dict[str, Tensor]:
        return self.changes


class Payload(Protocol):
    """What is sent of the parameters, and what is kept of them to be sent later."""

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter's change is sent here; its value is averaged whole otherwise."""
        ...

    def begin(self, changes: Mapping[str, Tensor]) -> Arrival:
        """Begin to average changes of this rank's parameters: float32, all of them taken here.

        In place:
            What is kept.

        Collective: all ranks, with the same names.
        """
        ...

    def to(self, device: torch.device) -> None:
        """Move what is kept."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, on the CPU."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        ...


class WholeValues:
    """Every parameter is averaged whole; nothing is kept."""

    def takes(self, parameter: Tensor) -> bool:
        return False

    def begin(self, changes: Mapping[str, Tensor]) -> Arrival:
        assert not changes
        return Arrived()

    def to(self, device: torch.device) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class NarrowChanges:
    """Changes in a half type, with error feedback: `NarrowMean` of all of them. Begun when it is waited for.

    Args:
        numels: the elements of each parameter that there is.
        value_dtype: bfloat16 or float16.
        exchange: the process group and its ledger.
    """

    def __init__(self, numels: Mapping[str, int], value_dtype: torch.dtype, exchange: Exchange) -> None:
        self._numels, self._value_dtype, self._exchange = dict(numels), value_dtype, exchange
        self._mean: NarrowMean | None = None

    def takes(self, parameter: Tensor) -> bool:
        return as_real(parameter).dtype != torch.float64

    def begin(self, changes: Mapping[str, Tensor]) -> Arrival:
        if not changes.keys() <= self._numels.keys():
            raise ConfigurationError(
                f"value_dtype={str(self._value_dtype).removeprefix('torch.')!r} needs a fixed set of parameters; leave "
                "it out where param groups are added during the training."
            )
        return _NarrowArrival(self, changes)

    def reduce(self, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of the changes; those that are missing are zeros.

        Collective: all ranks, blocking.
        """
        if not changes:
            return {}
        device = next(iter(changes.values())).device
        flats = [
            changes[name].reshape(-1) if name in changes else torch.zeros(numel, device=device)
            for name, numel in self._numels.items()
        ]
        vector = torch.cat(flats)
        if self._mean is None:
            self._mean = NarrowMean(vector.numel(), self._value_dtype, self._exchange, device)
        self.to(device)
        means = dict(zip(self._numels, self._mean.reduce(vector).split(list(self._numels.values())), strict=True))
        return {name: means[name].view(change.shape) for name, change in changes.items()}

    def to(self, device: torch.device) -> None:
        if self._mean is not None:
            for name in ("vector_error", "mean_error"):
                setattr(self._mean, name, getattr(self._mean, name).to(device))

    def state_dict(self) -> dict[str, Any]:
        if self._mean is None:
            return {}
        errors = {name: getattr(self._mean, name).cpu().clone() for name in ("vector_error", "mean_error")}
        return {"numel": self._mean.numel, **errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mean = None
        if "numel" in state:
            self._mean = NarrowMean(state["numel"], self._value_dtype, self._exchange, torch.device("cpu"))
            for name in ("vector_error", "mean_error"):
                getattr(self._mean, name).copy_(state[name])


@dataclass
class _NarrowArrival:
    owner: NarrowChanges
    changes: Mapping[str, Tensor]

    def wait(self) -> dict[str, Tensor]:
        return self.owner.reduce(self.changes)


class SparseChanges:
    """The largest elements of the changes and of what was not sent before; see `core.compression`.

    On two levels a node is what a rank is in the equations: its change is the mean of its ranks', which all keep the
    node's residual, and each sends a part of the node's message.

    Wire:
        An all-gather of `Compression.nbytes`, between ranks or between nodes; float32 changes inside a node.

    Args:
        compression: what is sent.
        exchange: the process group and its ledger.

    Attributes:
        residuals: e of each parameter, by name; float32, flat.
    """

    def __init__(self, compression: Compression, exchange: Exchange) -> None:
        self.compression = compression
        self.residuals: dict[str, Tensor] = {}
        self._exchange = exchange

    def takes(self, parameter: Tensor) -> bool:
        real = as_real(parameter)
        return real.dtype != torch.float64 and real.numel() >= self.compression.min_numel

    def begin(self, changes: Mapping[str, Tensor]) -> Arrival:
        if not changes:
            return Arrived()
        self.to(next(iter(changes.values())).device)
        flats = self._mean_of_node({name: flat(change) for name, change in changes.items()})
        for name, change in flats.items():
            if name not in self.residuals:
                self.residuals[name] = torch.zeros_like(change)
        message = self.compression.prepare_([self.residuals[name] for name in flats], list(flats.values()))
        shapes = {name: change.shape for name, change in changes.items()}
        return _SparseArrival(self, shapes, self._exchange.begin_gather_from_senders(message))

    def combine(self, messages: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the mean changes that the messages of all senders make."""
        means = self.compression.combine(list(messages), [shape.numel() for shape in shapes.values()])
        return {name: mean.view(shape) for (name, shape), mean in zip(shapes.items(), means, strict=True)}

    def _mean_of_node(self, flats: dict[str, Tensor]) -> dict[str, Tensor]:
        levels = self._exchange.levels
        if levels is None:
            return flats
        everything = torch.cat(list(flats.values()))
        levels.node.all_reduce_(everything)  # not behind what is on its way between nodes
        parts = everything.div_(levels.node.num_ranks).split([each.numel() for each in flats.values()])
        return dict(zip(flats, parts, strict=True))

    def to(self, device: torch.device) -> None:
        self.residuals = {name: residual.to(device) for name, residual in self.residuals.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {name: residual.cpu().clone() for name, residual in self.residuals.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.residuals = {name: residual.clone() for name, residual in state.get("residuals", {}).items()}


@dataclass
class _SparseArrival:
    owner: SparseChanges
    shapes: dict[str, torch.Size]
    gathering: Any  # has a wait()

    def wait(self) -> dict[str, Tensor]:
        with self.owner._exchange.ledger.waiting(next(iter(self.owner.residuals.values())).device):
            messages = self.gathering.wait()
        return self.owner.combine(messages, self.shapes)
