"""What `sparsity="auto"` and `strategy="lowbw"` measure, given: with it a test knows what is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_lowbw.comm.link import Link
from lightning_lowbw.cost_model import DENSITIES, Measured
from lightning_lowbw.strategies import auto_choice


def make_measured(step_s: float, dense_s: float, by_density: dict[float, float] | float, **others: float) -> Measured:
    """Return times on a link of 80 Mb/s; one of `by_density` is of all densities."""
    narrow = {"bfloat16": dense_s - step_s}
    sparse = by_density if isinstance(by_density, dict) else dict.fromkeys(DENSITIES, by_density)
    return Measured(step_s, dense_s, {**sparse, **narrow, **others}, Link(1e-4, 1e7))


def give_measured(monkeypatch: pytest.MonkeyPatch, measured: Measured) -> tuple[list[bool], list[str]]:
    """Let each fit find this; return lists of what is said, and, of each measuring, whether few bits begin early."""
    asked, said = list[bool](), list[str]()

    def give(*_: object, begins_early: bool) -> Measured:
        asked.append(begins_early)
        return measured

    monkeypatch.setattr(auto_choice, "medians", lambda _: replace(measured, exchange_s={}))
    monkeypatch.setattr(auto_choice, "measure", give)
    monkeypatch.setattr(auto_choice, "rank_zero_info", said.append)
    return asked, said
