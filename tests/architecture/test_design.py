"""walk.md names the files and functions that a step goes through: a step is traced."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lightning_lowbw
from lightning_lowbw import DGC, Method
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.presets import preset
from tests.ranks import run_ranks

ROOT = Path(lightning_lowbw.__file__).parent
PAGE = Path(__file__).with_name("walk.md")
STEPS: dict[str, tuple[Method, int]] = {  # and how many steps there are before
    "One step of `dgc`": (DGC(min_numel=10_000), 2),
    "One round of `sparse_loco`": (preset("sparse_loco").replace(k_steps=2), 3),
}


def trace(method: Method, num_before: int) -> dict[str, set[str]]:
    """Return the functions that a step of a plain loop calls, by the file of the package."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 8))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    method.attach(sgd, model.named_parameters())
    calls: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            names = calls.setdefault(path.relative_to(ROOT).as_posix(), set())
            names.add(frame.f_code.co_name)
            if (own := frame.f_locals.get("self")) is not None:
                names.add(type(own).__name__)

    for step in range(num_before + 1):
        sgd.zero_grad()
        model(torch.randn(4, 256)).square().sum().backward()
        if step == num_before:
            sys.setprofile(note)
            threading.setprofile(note)
        try:
            sgd.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return calls


@pytest.mark.skipif(dispatch.compiled_for() is None, reason="needs numba")
@pytest.mark.parametrize("heading", STEPS)
def test_the_page_names_what_a_step_goes_through(heading: str) -> None:
    """What is in parentheses, and the strategies, is about other steps."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [row.strip("|").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    calls = run_ranks(trace, 2, *STEPS[heading])[0]
    named: set[str] = set()
    for files, functions in rows:
        paths = re.findall(r"`([\w/]+\.py)`", files)
        assert all((ROOT / path).exists() for path in paths), paths
        if not paths[0].startswith("strategies/"):
            named |= {*paths}
            called = {name for path in paths for name in calls.get(path, ())}
            told = re.findall(r"`([\w.]+)`", re.sub(r"\([^)]*\)", "", functions))
            assert {part for name in told for part in name.split(".")} <= called, paths
    assert named == {*calls}
