"""The page of what happens when something fails has a row for each test of it."""

from __future__ import annotations

from tests.reliability import BEGIN, PAGE, marked


def test_the_page_has_the_tests() -> None:
    found: dict[str, tuple[str, bool, set[str]]] = {}
    for line in PAGE.read_text().split(BEGIN)[1].splitlines():
        fault, what, _, ddp, tests = (cell.strip() for cell in line.strip("|").split(" | "))
        found[fault] = what, bool(ddp), set(tests.replace("`", "").split(", "))
    marks = list(marked())
    stock = {words for kind, words, *_ in marks if kind == "stock"}
    wanted: dict[str, tuple[str, bool, set[str]]] = {}
    for kind, words, path, name in marks:
        if kind == "fault":
            fault, _, what = words.partition("\n")
            before, _, tests = wanted.get(fault, ("", False, set()))
            wanted[fault] = before or what, fault in stock, {*tests, f"{path}::{name}"}
    assert found == wanted, 'pytest tests -m "fault or stock" --rewrite-reliability writes docs/reliability.md anew'
