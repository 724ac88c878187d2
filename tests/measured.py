"""What `sparsity="auto"` and `strategy="lowbw"` measure, given: with it a test knows what is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lowbw.engine.auto import Measured
from lightning_lowbw.strategies.auto_sparsity import AutoSparsity
from lightning_lowbw.strategies.step_times import StepTimes


def give_measured(monkeypatch: pytest.MonkeyPatch, measured: Measured) -> list[int]:
    """Let each fit find this; return a list that gets, per time that it is asked for, the step of the first worker."""
    steps: list[int] = []

    def measure(auto: AutoSparsity, *_: Any) -> Measured:
        steps.append(auto._strategy.workers[0].step)
        return measured

    monkeypatch.setattr(StepTimes, "medians", lambda _: (measured.step_s, measured.dense_s))
    monkeypatch.setattr(AutoSparsity, "_measure", measure)
    return steps
