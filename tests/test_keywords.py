"""The table of keywords in docs/api.md has the defaults and the docstrings of the strategies: --rewrite-golden."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import lightning_lowbw as lowbw
from tests.programs import ROOT

PAGE = ROOT / "docs/api.md"
BEGIN, END = "<!-- keywords:begin -->\n", "<!-- keywords:end -->"
NAMES = ("", "Auto", "DGC", "LocalSGD", "AdaptiveLocalSGD", "Hierarchical", "Elastic", "Sharded")


def table() -> str:
    """Return a row for each keyword of this package: the classes that take it, their defaults, and the meaning."""
    takes: dict[str, dict[str, list[str]]] = {}
    means: dict[str, str] = {}
    for name in NAMES:
        made: Any = getattr(lowbw, f"{name}Strategy")
        means = {**arguments_of(inspect.getdoc(made) or ""), **means}
        for keyword, parameter in inspect.signature(made).parameters.items():
            default = "" if parameter.default is parameter.empty else f"{parameter.default!r}"
            takes.setdefault(keyword, {}).setdefault(default, []).append(name or "Strategy")
    lines = ["| keyword | default | strategies | meaning |", "|---|---|---|---|"]
    for keyword, found in takes.items():
        if keyword in means:  # not DDP's
            defaults, classes = " or ".join(f"`{each}`" for each in found if each), "; ".join(map(told, found.values()))
            lines.append(f"| `{keyword}` | {defaults} | {classes} | {means[keyword]} |")
    return "\n".join([*lines, ""])


def told(classes: list[str]) -> str:
    missing = [name for name in NAMES if (name or "Strategy") not in classes]
    return "all" if not missing else f"all but {missing[0]}" if len(missing) == 1 else ", ".join(classes)


def arguments_of(doc: str) -> dict[str, str]:
    """Return the first sentence about each argument of a docstring."""
    (section,) = re.findall(r"^Args:\n((?:    .*\n|\n)+)", doc, re.MULTILINE)
    found = re.findall(r"^    (\w[\w, ]*): (.*\n(?:^     .*\n)*)", section, re.MULTILINE)
    # "None; ..." is no meaning.
    sentences = {names: re.split(r"\. |(?<!None); |\.$", " ".join(text.split()))[0] for names, text in found}
    return {name: text for names, text in sentences.items() for name in names.split(", ") if "as in" not in text[:6]}


def test_the_table_is_that_of_the_docstrings(request: pytest.FixtureRequest) -> None:
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    shown, end, after = rest.partition(END)
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(f"{before}{begin}{table()}{end}{after}")
    else:
        assert shown == table(), "pytest tests/test_keywords.py --rewrite-golden"
