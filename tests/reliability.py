"""docs/reliability.md: what happens when something fails, as the tests of it say and have measured.

    @pytest.mark.fault("a rank has failed", "the others name it, and end")  # may record_property("seconds", ...)
    @pytest.mark.fault("a rank has failed")  # another test of it, further down
    @pytest.mark.stock("a rank has failed")  # under Lightning's ddp; to record_property("ddp", "in words")

`pytest tests -m "fault or stock" --rewrite-reliability` runs both and writes the page anew. Else those of ddp, of which
some hang, are left out.
"""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
BEGIN = "| fault | what happens | s | stock ddp | test |\n|---|---|---|---|---|\n"


def deselect_stock(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of Lightning's own strategy, unless the page is written."""
    if config.getoption("--rewrite-reliability"):
        return
    left_out = [item for item in items if item.get_closest_marker("stock")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("stock")]


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
            for name in ("fault", "stock"):
                for marker in item.iter_markers(name):
                    self._note(name, marker.args, item, dict(report.user_properties), report.duration)
        return report

    def _note(
        self, name: str, words: tuple[str, ...], item: pytest.Item, found: dict[str, Any], duration: float
    ) -> None:
        row = self.rows.setdefault(words[0], {"what": "", "seconds": [], "whole": [], "ddp": "", "tests": {}})
        if name == "stock":
            row["ddp"] = found["ddp"]
            return
        row["what"] = row["what"] or words[1]
        row["tests"][f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}"] = None  # type: ignore[attr-defined]
        row["seconds"] += [found["seconds"]] if "seconds" in found else []
        row["whole"].append(duration)

    def pytest_sessionfinish(self) -> None:
        if self.has_failed:
            raise pytest.UsageError("A test has failed: docs/reliability.md is left as it is.")
        head = PAGE.read_text().split(BEGIN)[0]
        PAGE.write_text(head + BEGIN + "".join(_line(fault, row) for fault, row in self.rows.items()))


def outcome_of(function: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> str:
    """Return in words how two ranks of Lightning's own strategy end."""
    begun = time.monotonic()
    try:
        run_ranks(function, 2, *args, fresh=True, timeout_s=timeout_s)
    except AssertionError as error:
        if "in time" in str(error):
            return f"goes on for {timeout_s:.0f} s, then killed"
        return without_places(str(error).strip().splitlines()[-1])
    return f"ends after {time.monotonic() - begun:.1f} s"


def without_places(message: str) -> str:
    """Return the beginning of an error of torch, without the addresses and files in it."""
    line = re.sub(r"\[[^]]*\]:?\d* ?", "", message.splitlines()[0]).replace("|", "/")
    return f"`{line[:100].strip()}`"


def _line(fault: str, row: dict[str, Any]) -> str:
    seconds = f"{max(row['seconds']):.1f}" if row["seconds"] else f"< {math.ceil(max(row['whole']))}"
    tests = ", ".join(f"`{each}`" for each in row["tests"])
    return f"| {fault} | {row['what']} | {seconds} | {row['ddp']} | {tests} |\n"


def marked() -> Iterator[tuple[str, str, str, str]]:
    """Yield the marker, its words joined by a line end, the file and the function of each marked test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func) in ("pytest.mark.fault", "pytest.mark.stock"):
                    words = [ast.literal_eval(argument) for argument in each.args]
                    kind = ast.unparse(each.func).rpartition(".")[2]
                    yield kind, "\n".join(words), path.relative_to(TESTS).as_posix(), node.name
