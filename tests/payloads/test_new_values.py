"""A payload and a schedule that the package does not know: what CONTRIBUTING.md says is all that they need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw import EveryK, EveryStep, Method, TopK
from lightning_lowbw.comm.link import Link
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.cost_model import Cluster, cost_of
from lightning_lowbw.payloads.corrections import Fields
from lightning_lowbw.payloads.exchange import Exchange, Pending, Prepared, Residuals, Signal
from lightning_lowbw.payloads.payload import PAYLOADS, Message, Payload, Shapes
from lightning_lowbw.payloads.whole import WholeExchange
from lightning_lowbw.presets import PRESETS, preset
from lightning_lowbw.schedules.schedule import SCHEDULES, Schedule
from tests.ranks import run_ranks
from tests.sync import problem

TWO_NODES = Cluster(2, 1, Link(latency_s=0.0, bandwidth_bytes_per_s=1e6))


@dataclass(frozen=True, kw_only=True)
class Rounded(Payload, key="rounded"):
    """Multiples of a unit, with error feedback."""

    unit: float = 2.0**-12

    keeps_parts = False

    def exchange(self, peers: Peers, when: Schedule) -> RoundedExchange:
        return RoundedExchange(self, peers)

    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        return [Message("all_reduce", 4 * sum(map(math.prod, shapes)))]


class RoundedExchange(Exchange):
    def __init__(self, payload: Rounded, peers: Peers) -> None:
        self.payload, self._whole = payload, WholeExchange(peers)
        self.residuals = Residuals()

    def prepare(self, signal: Signal, fields: Fields | None = None) -> Prepared:
        self.residuals.ensure({name: each.numel() for name, each in signal.items()}, torch.device("cpu"))
        sent = {}
        for name, each in signal.items():
            kept = self.residuals[name].add_(each.reshape(-1))
            sent[name] = (kept / self.payload.unit).round() * self.payload.unit
            kept.sub_(sent[name])

        def send(status: Tensor | None = None, whole: Signal | None = None) -> Pending:
            return self._whole.prepare(sent).send(torch.zeros(1) if status is None else status, whole)

        return Prepared(send)


@dataclass(frozen=True, kw_only=True)
class Falling(Schedule, key="falling"):
    """A density that falls with each step, after one dense step."""

    begin_step: int = 1

    def density(self, step: int, otherwise: float = 1.0) -> float:
        return 1.0 if step < self.begin_step else 0.5**step


for _registry, _key in ((PAYLOADS, "rounded"), (SCHEDULES, "falling")):  # not for the other tests of this process
    del _registry[_key]  # type: ignore[attr-defined]


def density(worker: Any, _: Any) -> float:
    return worker.plan.density


def train(method: Method) -> list[dict[str, Any]]:
    return run_ranks(partial(problem.train, method, steps=5, look=density), 2)


@pytest.mark.parametrize("when", [EveryStep(), EveryStep(rampup_begin_step=2), EveryK(k_steps=2)])
def test_a_new_payload_is_one_file(when: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAYLOADS, "rounded", Rounded)
    method = Method(when=when, what=Rounded())
    assert Method(**method.describe()) == method
    ours, theirs = train(method)
    dense, _ = train(Method(when=when) if when.averages_weights else Method())
    assert ours["digests"][-1] == theirs["digests"][-1] != dense["digests"][-1]
    torch.testing.assert_close(ours["weights"], dense["weights"], rtol=0.0, atol=1e-3)
    assert cost_of(method, [(1000, 1000)], TWO_NODES, step_s=0.1).node_bytes > 0


@dataclass(frozen=True, kw_only=True)
class Largest(TopK):
    """A user's own payload."""


def test_a_subclass_of_a_payload_is_exchanged_as_that() -> None:
    subclass, expected = (train(Method(what=kind(min_numel=1))) for kind in (Largest, TopK))
    assert [result["digests"] for result in subclass] == [result["digests"] for result in expected]


def test_a_new_schedule_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "falling", Falling)
    method = Method(when=Falling(), what=TopK(min_numel=1))
    assert Method(**method.describe()) == method
    ours, theirs = train(method)
    assert ours["seen"] == [0.5, 0.25, 0.125, 0.0625, 0.03125]  # of the coming step
    assert ours["digests"] == theirs["digests"]


def test_every_payload_has_a_name() -> None:
    """What would be forgotten; `presets` is where a new one is imported."""
    in_package = {kind for kind in Payload.__subclasses__() if kind.__module__.startswith("lightning_lowbw.")}
    assert in_package == {*PAYLOADS.values()}
    assert {type(preset(name).what) for name in PRESETS} == in_package
    assert {*SCHEDULES} == {"step", "k"}
