"""Every element of each tensor, by an all-reduce over all ranks: the payload of dense steps, and of small tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightning_lowbw.comm.peers import MeanWork, Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.payloads.exchange import Arrived, DenseMean, Pending, Prepared, Signal
from lightning_lowbw.payloads.payload import Message, Payload, Shapes
from lightning_lowbw.schedules.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Whole(Payload, key="whole"):
    """Every element, in float32 (or wider, if the tensor is); nothing is kept back."""

    sends_all = can_be_hidden = takes_weights = True

    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        return []

    def exchange(self, peers: Peers, when: Schedule) -> None:
        return None

    def compresses(self, name: str, numel: int, small_numel: int) -> bool:
        return False

    def check(self, when: Schedule) -> None:
        super().check(when)
        if when.begin_step and not when.averages_weights:
            raise ConfigurationError(
                f"rampup_begin_step={when.begin_step} with {self}: every step is dense. Leave it out."
            )


class WholeExchange:
    """Averages whole tensors, and a status beside them. Keeps nothing back.

    Args:
        peers: the participants.
        options: of `MeanWork`.
    """

    def __init__(self, peers: Peers, **options: Any) -> None:
        self._pending = partial(PendingWhole, peers, options)

    def prepare(self, signal: Signal) -> Prepared:
        return Prepared(partial(self._pending, signal))


class PendingWhole(Pending):
    """All-reduces in progress: of the signal, and of other tensors that are sent whole. See `WholeExchange`."""

    def __init__(
        self, peers: Peers, options: dict[str, Any], signal: Signal, status: Tensor, whole: Signal | None = None
    ) -> None:
        self._names, self._others = list(signal), dict(whole or {})
        self._work = MeanWork([*signal.values(), *self._others.values()], status, peers, **options)

    def _receive(self) -> Arrived:
        means, status = self._work.wait()
        num = len(self._names)
        mean = DenseMean(dict(zip(self._names, means[:num], strict=True)))
        return Arrived(mean, status, dict(zip(self._others, means[num:], strict=True)))
