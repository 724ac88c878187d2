"""benchmarks/finetune.py: differences are of equal seeds and choices, and steps lie on a line between validations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import finetune
from lightning_lowbw import DGC
from lightning_lowbw.presets import preset

INT8 = preset("int8").describe()


def of_run(method: str, seed: int, ends_at: float, given: Any = None) -> dict[str, Any]:
    validated = [{"step": step, "val_acc": ends_at * step / 300, "val_loss": 2.0} for step in (0, 100, 200, 300)]
    same = {"what": "run", "task": "minilm", "link": "none", "num_trained": 9}
    return {**same, "method": method, "seed": seed, "given": given, "validated": validated}


def of_link(what: str, link: str, method: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "task": "minilm", "link": link, "method": method, "seed": 0, **more}


def test_a_choice_is_that_of_the_link_and_equal_choices_share_their_runs() -> None:
    slow, fast = finetune.LINKS
    rows = [
        of_run("ddp", 0, 0.60),
        of_run("ddp", 1, 0.62),
        of_run("lowbw", 0, 0.59, INT8),
        of_run("lowbw", 1, 0.62, INT8),
    ]
    rows += [of_link("choice", slow, name, chosen=INT8) for name in ("lowbw", "lowbw, pretrained")]
    rows += [
        of_link("time", link, name, step_s=s) for link in (slow, fast) for name, s in (("ddp", 8.0), ("lowbw", 2.0))
    ]
    results = {"rows": rows}
    assert [*finetune.runs_of(results, "minilm", "lowbw, pretrained")] == [0, 1]
    lines = finetune.accuracies(results, "minilm").splitlines()
    assert lines[3] == "| lowbw (int8; ) | 300 | 2 | 60.5% | -0.5 (-1.0 to +0.0) | 2.000 | +0.0% |"
    # 60.5 % of 60.5 % in 300 steps; ddp's 61 % less 0.5 points.
    lines = finetune.seconds(results, "minilm").splitlines()
    assert lines[2] == "| ddp | 298 | 8.00 | 1.00 | 2,380 | 8.00 | 1.00 | 2,380 |"
    assert lines[3] == "| lowbw (int8; ) | 300 | 2.00 | 4.00 | 600 | 2.00 | 4.00 | 600 |"


def test_a_dense_begin_counts_in_the_seconds_to_ddp_and_is_not_timed() -> None:
    begins = {**INT8, "when": {**INT8["when"], "rampup_begin_step": 7}}
    assert finetune.steady(begins).describe() == INT8
    dgc = DGC(rampup_begin_step=7, rampup_step=8, sparsity=[0.872, 0.968])
    dgc = replace(dgc, where=replace(dgc.where, inter_dtype="bfloat16"))
    assert finetune.steady(dgc.describe()) == DGC(sparsity=[0.968])
    slow, fast = finetune.LINKS
    rows = [of_run("ddp", 0, 0.60), of_run("lowbw", 0, 0.595, begins)]
    rows += [of_link("choice", link, "lowbw", chosen=begins) for link in (slow, fast)]
    rows += [
        of_link("time", link, name, step_s=s) for link in (slow, fast) for name, s in (("ddp", 8.0), ("lowbw", 2.0))
    ]
    line = finetune.seconds({"rows": rows}, "minilm").splitlines()[3]
    assert line == "| lowbw (int8; int8) | 300 | 2.00 | 4.00 | 642 | 2.00 | 4.00 | 642 |"  # 7 x 8 + 293 x 2


def test_what_is_not_reached_has_no_steps() -> None:
    curve = [(0, 0.1), (100, 0.3), (200, 0.2), (300, 0.5)]
    assert finetune.steps_to(curve, 0.4) == pytest.approx(200 + 100 * 2 / 3)
    assert finetune.steps_to(curve, 0.2) == pytest.approx(50)
    assert finetune.steps_to(curve, 0.51) is None
