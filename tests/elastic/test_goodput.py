"""Groups in the lab, each a program of its own, under faults: a short form of benchmarks/elastic.py."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.elastic import LONG, run, summarise
from tests.tools.lab.namespaces import needs_lab

pytestmark = [
    pytest.mark.slow,  # waits in real time for minutes
    pytest.mark.alone,
    *needs_lab,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft, of the extra [elastic]"),
]


def test_goodput_under_a_kill_and_a_stop(tmp_path: Path) -> None:
    """Nearly three times as many faults as the 30 per hour of the benchmark, on a machine that may be busy."""
    events = [(2.0, "kill", "c"), (2.0, "start", "c"), (28.0, "stop", "b"), (36.0, "continue", "b")]
    case = replace(LONG["alone"], groups="abc", minutes=1.0, events=events)
    row = summarise(run("alone", case, tmp_path / "run"), case)
    assert row["differ"] == {}, "weights, steps, tokens, members and learning rates after each round"
    assert row["num_compared"] > 5
    assert len(row["back_s"]) == 1, "the killed one has averaged again"
    # Three groups train for 180 s. A kill costs its group 10 to 20 s, a stop 8 s, and each fault the other groups 5 s.
    assert row["goodput"][-1][1] > 0.5
