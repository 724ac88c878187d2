"""benchmarks/plan_clock.py: what it compares is what `lowbw-plan` prints, and its sentence names the wrong rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import plan_clock
from benchmarks.contestants import ALONE
from lightning_lowbw.cost_model import Run
from lightning_lowbw.tools.plan import Plan, make_cluster

LINK, MODEL, STEP_S = "100 Mb/s, 50 ms", "mlp-25M", 0.1
# As `lowbw-plan --help` has it for the cores of a CPU; four ranks share two.
NUMBERS = {"nodes": 4, "ranks_per_node": 1, "gbit_per_s": 0.1, "latency_ms": 50.0, "inside_gbit_per_s": 200.0}
NUMBERS |= {"memory_gbyte_per_s": 4.0, "overlap": 0.0}


@pytest.mark.parametrize("name", ["ddp", "bfloat16", "int8", "sparse_loco", "hidden_local_sgd"])
def test_its_seconds_are_those_of_the_plan(name: str) -> None:
    plan = Plan(plan_clock.shapes_of(MODEL), make_cluster(NUMBERS), STEP_S, Run(0, 1000))
    found = plan.predicted(name)
    assert found is not None
    added = plan_clock.cost(name, MODEL, LINK, 4, STEP_S)
    assert (added, STEP_S + added.seconds) == found


def test_a_sentence_names_what_the_plan_misses_and_what_was_left_out() -> None:
    def row(model: str, method: str, step_s: float) -> dict[str, Any]:
        same = {"ranks": 4, "link": LINK, "model": model, "method": method, "steps": 2, "step_s": step_s}
        return {**same, "interface_bytes": 1e6, "environment": {"cpu": "of a test"}}

    ddp_s, int8_s = (STEP_S + plan_clock.cost(name, MODEL, LINK, 4, STEP_S).seconds for name in ("ddp", "int8"))
    rows = [row(MODEL, ALONE.name, STEP_S), row(MODEL, "ddp", 1.19 * ddp_s), row(MODEL, "int8", 2 * int8_s)]
    page = plan_clock.to_markdown([*rows, row("mlp-100M", ALONE.name, STEP_S)])
    assert "1 of 2 predictions are within 20 % of the clock (4 ranks: 1 of 2)" in page
    assert f"of the other rows: 0.50 (4 ranks, {LINK}, {MODEL}, int8). Left out" in page
    assert f"120 s: 4 ranks, {LINK}, mlp-100M, ddp.\n" in page
