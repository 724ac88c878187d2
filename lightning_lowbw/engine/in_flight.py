"""Averages on their way, and the fragments of the parameters that they are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.payload import Arrival, Arrived, Payload, TailInFlight
from lightning_lowbw.where.mean import MeanInFlight


@dataclass
class LandedMean:
    """A mean that has arrived."""

    means: list[Tensor]
    tail: Tensor

    def wait(self) -> tuple[list[Tensor], Tensor]:
        """Return the means and the sum of the tails, as `MeanInFlight` does."""
        return self.means, self.tail


@dataclass(eq=False)
class Flight:
    """An average that has been begun.

    Attributes:
        parameters: it is of.
        mean: of all but what the payload has taken.
        changes: what the payload has taken.
        moments: of the inner optimizer.
        snapshots: of the parameters when it was begun, where local steps go on meanwhile.
        buffer_snapshots: of the buffers, by name; as `snapshots`.
    """

    parameters: list[Parameter]
    mean: MeanInFlight | TailInFlight | LandedMean
    changes: Arrival = field(default_factory=Arrived)
    moments: list[Tensor] = field(default_factory=list)
    snapshots: list[Tensor] | None = None
    buffer_snapshots: dict[str, Tensor] = field(default_factory=dict)

    def state_dict(self, name_of: Callable[[Parameter], str]) -> dict[str, Any]:
        """Wait for it, and return it on the CPU; it may be waited for again."""
        means, tail = self.mean.wait()
        arrived = Arrived(self.changes.wait())
        self.mean, self.changes = LandedMean(means, tail), arrived
        return {
            "parameters": [name_of(parameter) for parameter in self.parameters],
            "means": [mean.cpu().clone() for mean in means],
            "changes": {name: change.cpu().clone() for name, change in arrived.changes.items()},
            "tail": tail.cpu().clone(),
            "snapshots": [snapshot.cpu().clone() for snapshot in self.snapshots or []],
            "buffer_snapshots": {name: buffer.cpu().clone() for name, buffer in self.buffer_snapshots.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], parameters: Mapping[str, Parameter], device: torch.device) -> Flight:
        """Return the flight that `state_dict` has described."""
        return cls(
            [parameters[name] for name in state["parameters"]],
            LandedMean([mean.to(device) for mean in state["means"]], state["tail"].to(device)),
            Arrived({name: change.to(device) for name, change in state["changes"].items()}),
            snapshots=[snapshot.to(device) for snapshot in state["snapshots"]],
            buffer_snapshots={name: buffer.to(device) for name, buffer in state["buffer_snapshots"].items()},
        )


@dataclass(eq=False)
class Fragment:
    """Parameters that are averaged together.

    Attributes:
        parameters: in order.
        payload: what is sent of them.
        takes_buffers: whether the buffers ride with them; of one fragment of a model only.
        steps: local steps since its last average was begun; before the first, as if one had been. None before the
            first local step.
        moved: those of the parameters that were trained since then, in order.
        flight: its average on the way.
    """

    parameters: list[Parameter]
    payload: Payload
    takes_buffers: bool
    steps: int | None = None
    moved: dict[Parameter, None] = field(default_factory=dict)
    flight: Flight | None = None
