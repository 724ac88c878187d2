"""docs/reliability.md: what happens when something fails, as the tests of it say and have measured.

    @pytest.mark.fault("a rank has failed", "the others name it, and end")  # may record_property("seconds", ...)
    @pytest.mark.fault("a rank has failed")  # another test of it

`pytest tests -m fault --rewrite-reliability` runs them and writes the page anew, except the column of Lightning's own
ddp, which is written by hand.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS, PAGE = ROOT / "tests", ROOT / "docs" / "reliability.md"
BEGIN = "| fault | what happens | s | stock ddp | test |\n|---|---|---|---|---|\n"


class Recorder:
    """Collects what the tests record; a plugin of pytest, not with pytest-xdist."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "call":
            self.has_failed |= report.failed
            for marker in item.iter_markers("fault"):
                self._note(marker.args, item, dict(report.user_properties), report.duration)
        return report

    def _note(self, words: tuple[str, ...], item: pytest.Item, found: dict[str, Any], duration: float) -> None:
        row = self.rows.setdefault(words[0], {"what": "", "seconds": [], "whole": [], "tests": {}})
        row["what"] = row["what"] or "".join(words[1:])  # of one of its tests
        row["tests"][f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}"] = None  # type: ignore[attr-defined]
        row["seconds"] += [found["seconds"]] if "seconds" in found else []
        row["whole"].append(duration)

    def pytest_sessionfinish(self) -> None:
        if self.has_failed:
            raise pytest.UsageError("A test has failed: docs/reliability.md is left as it is.")
        head, table = PAGE.read_text().split(BEGIN)
        before = [line.strip("|").split(" | ") for line in table.splitlines()]
        ddp = {cells[0].strip(): cells[3].strip() for cells in before}
        PAGE.write_text(
            head + BEGIN + "".join(_line(fault, row, ddp.get(fault, "")) for fault, row in self.rows.items())
        )


def _line(fault: str, row: dict[str, Any], ddp: str) -> str:
    seconds = f"{max(row['seconds']):.1f}" if row["seconds"] else f"< {math.ceil(max(row['whole']))}"
    tests = ", ".join(f"`{each}`" for each in row["tests"])
    return f"| {fault} | {row['what']} | {seconds} | {ddp} | {tests} |\n"


def marked() -> Iterator[tuple[str, str, str]]:
    """Yield the words joined by a line end, the file and the function of each marked test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.fault":
                    words = [ast.literal_eval(argument) for argument in each.args]
                    yield "\n".join(words), path.relative_to(TESTS).as_posix(), node.name
