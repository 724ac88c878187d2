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

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import as_real, flat
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.mean import NarrowMean


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
    """What is sent of the parameters, and what is kept of them to be sent later.

    Attributes:
        takes_tail: whether `begin` takes the numbers along that are summed beside an average.
    """

    takes_tail: bool

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter's change is sent here; its value is averaged whole otherwise."""
        ...

    def begin(self, changes: Mapping[str, Tensor], tail: Tensor | None = None) -> Arrival:
        """Begin to average changes of this rank's parameters: float32, all of them taken here.

        In place:
            What is kept.

        Collective: all ranks, with the same names.

        Args:
            changes: by name.
            tail: numbers to be summed over the ranks, float32, 1-d, for a `TailInFlight`; where `takes_tail`.
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

    takes_tail = False

    def takes(self, parameter: Tensor) -> bool:
        return False

    def begin(self, changes: Mapping[str, Tensor], tail: Tensor | None = None) -> Arrival:
        assert not changes
        assert tail is None
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

    takes_tail = False

    def __init__(self, numels: Mapping[str, int], value_dtype: torch.dtype, exchange: Exchange) -> None:
        self._numels, self._value_dtype, self._exchange = dict(numels), value_dtype, exchange
        self._mean: NarrowMean | None = None

    def takes(self, parameter: Tensor) -> bool:
        return as_real(parameter).dtype != torch.float64

    def begin(self, changes: Mapping[str, Tensor], tail: Tensor | None = None) -> Arrival:
        assert tail is None
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
    """The largest elements of the changes and of what was not sent before; see `what.top_k`.

    On two levels a node is what a rank is in the equations: its change is the mean of its ranks', which all keep the
    node's residual, and each sends a part of the node's message.

    Wire:
        An all-gather of `Compression.nbytes`, between ranks or between nodes, and behind it the tail in float32, if
        there is one; inside a node an all-reduce of the changes, and of the tail, in float32.

    Args:
        compression: what is sent.
        exchange: the process group and its ledger.

    Attributes:
        residuals: e of each parameter, by name; float32, flat.
    """

    takes_tail = True

    def __init__(self, compression: Compression, exchange: Exchange) -> None:
        self.compression = compression
        self.residuals: dict[str, Tensor] = {}
        self._exchange = exchange

    def takes(self, parameter: Tensor) -> bool:
        real = as_real(parameter)
        return real.dtype != torch.float64 and real.numel() >= self.compression.min_numel

    def begin(self, changes: Mapping[str, Tensor], tail: Tensor | None = None) -> Arrival:
        if not changes:
            assert tail is None
            return Arrived()
        device = next(iter(changes.values())).device
        self.to(device)
        flats = {name: flat(change) for name, change in changes.items()}
        tail = torch.empty(0, dtype=torch.float32, device=device) if tail is None else tail
        if self._exchange.levels is not None:
            flats, tail = self._reduce_in_node(flats, tail)
        for name, change in flats.items():
            if name not in self.residuals:
                self.residuals[name] = torch.zeros_like(change)
        message = self.compression.prepare_([self.residuals[name] for name in flats], list(flats.values()))
        gathering = self._exchange.begin_gather_from_senders(torch.cat([message, tail.view(torch.uint8)]))
        return _SparseArrival(self, {name: change.shape for name, change in changes.items()}, gathering, tail.nbytes)

    def combine(self, messages: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the mean changes that the messages of all senders make."""
        means = self.compression.combine(list(messages), [shape.numel() for shape in shapes.values()])
        return {name: mean.view(shape) for (name, shape), mean in zip(shapes.items(), means, strict=True)}

    def _reduce_in_node(self, flats: dict[str, Tensor], tail: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the mean of the changes and the sum of the tails over the ranks of the node."""
        levels = self._exchange.levels
        assert levels is not None
        everything = torch.cat([*flats.values(), tail])
        levels.node.all_reduce_(everything)  # not behind what is on its way between nodes
        *parts, tail = everything.split([*(each.numel() for each in flats.values()), tail.numel()])
        return {name: part.div_(levels.node.num_ranks) for name, part in zip(flats, parts, strict=True)}, tail

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
    tail_bytes: int
    messages: Tensor | None = None  # once they have been waited for

    def wait(self) -> dict[str, Tensor]:
        messages = self._messages()
        return self.owner.combine(messages[:, : messages.shape[1] - self.tail_bytes], self.shapes)

    def tails(self) -> Tensor:
        """Wait; return the tails of all senders: float32, shape (senders, numbers)."""
        messages = self._messages()
        return messages[:, messages.shape[1] - self.tail_bytes :].clone().view(torch.float32)  # aligned

    def _messages(self) -> Tensor:
        if self.messages is None:
            with self.owner._exchange.ledger.waiting(next(iter(self.owner.residuals.values())).device):
                self.messages = self.gathering.wait()
        return self.messages


@dataclass
class TailInFlight:
    """The sum of a tail that a payload has taken along: a `MeanInFlight` of nothing, with no collective of its own."""

    arrival: Arrival

    def wait(self) -> tuple[list[Tensor], Tensor]:
        """Return no means, and the sum of the tails, float32: in the order of the senders, the same on all ranks."""
        assert isinstance(self.arrival, _SparseArrival)
        first, *others = self.arrival.tails()
        return [], sum(others, first)
