"""benchmarks/results/reliability.md: what happens when something fails, as its tests show and have measured.

    @pytest.mark.fault  # of a test that a row of the page names; may record_property("seconds", ...)

`pytest tests -m fault --rewrite-reliability` runs them and writes the column of seconds anew, and the first rows into
docs/faults.md; all else of the page is written by hand, and tests/test_written_pages.py says where it names other tests
than those that are marked.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS, PAGE = ROOT / "tests", ROOT / "benchmarks" / "results" / "reliability.md"
GUIDE, NUM_SHOWN = "docs/faults.md", 6  # has the first rows
BEGIN = "| fault | what happens | s | stock ddp | test |\n|---|---|---|---|---|\n"
SECONDS, NAMES = 2, 4  # columns


class Recorder:
    """Collects the seconds of the tests; a plugin of pytest, not with pytest-xdist.

    Attributes:
        seconds: by test, as it has recorded them.
        durations: by test, of all of it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.durations: dict[str, list[float]] = {}
        self.has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "call" and item.get_closest_marker("fault") is not None:
            self.has_failed |= report.failed
            name = f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}"  # type: ignore[attr-defined]
            self.durations.setdefault(name, []).append(report.duration)
            recorded = [value for key, value in report.user_properties if key == "seconds"]
            self.seconds.setdefault(name, []).extend(recorded)
        return report

    def pytest_sessionfinish(self) -> None:
        if self.has_failed:
            raise pytest.UsageError(f"A test has failed: {PAGE} is left as it is.")
        lines = "".join(f"| {' | '.join(self._measured(cells))} |\n" for cells in rows())
        PAGE.write_text(PAGE.read_text().split(BEGIN)[0] + BEGIN + lines)
        from benchmarks.harness import replace_block  # loads Lightning

        replace_block(GUIDE, "faults", shown())

    def _measured(self, cells: list[str]) -> list[str]:
        """Return a row with the seconds of its tests; as it was where none has run."""
        seconds, durations = (
            [each for name in names_in(cells) for each in of_tests.get(name, ())]
            for of_tests in (self.seconds, self.durations)
        )
        found = f"{max(seconds):.1f}" if seconds else f"< {math.ceil(max(durations))}" if durations else cells[SECONDS]
        return [*cells[:SECONDS], found, *cells[SECONDS + 1 :]]


def rows() -> list[list[str]]:
    """Return the cells of each row of the page."""
    lines = PAGE.read_text().split(BEGIN)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def shown() -> str:
    """Return the table of the first rows, without tests and stock ddp."""
    head = "| fault | what happens | s |\n|---|---|---|\n"
    return head + "".join(f"| {' | '.join(cells[: SECONDS + 1])} |\n" for cells in rows()[:NUM_SHOWN])


def names_in(cells: list[str]) -> list[str]:
    """Return the tests that a row names: file and function."""
    return cells[NAMES].replace("`", "").split(", ")


def marked() -> Iterator[str]:
    """Yield the file and the function of each marked test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if "pytest.mark.fault" in map(ast.unparse, decorators):
                yield f"{path.relative_to(TESTS).as_posix()}::{node.name}"  # type: ignore[union-attr]
