"""The page of what happens when something fails has a row for each test of it."""

from __future__ import annotations

from tests.reliability import BEGIN, PAGE, marked


def test_the_page_has_the_tests() -> None:
    found: dict[str, tuple[str, set[str]]] = {}
    for line in PAGE.read_text().split(BEGIN)[1].splitlines():
        fault, what, _, _, tests = (cell.strip() for cell in line.strip("|").split(" | "))
        found[fault] = what, set(tests.replace("`", "").split(", "))
    wanted: dict[str, tuple[str, set[str]]] = {}
    for words, path, name in marked():
        fault, _, what = words.partition("\n")
        before, tests = wanted.get(fault, ("", set()))
        wanted[fault] = before or what, {*tests, f"{path}::{name}"}
    assert found == wanted, "pytest tests -m fault --rewrite-reliability writes docs/reliability.md anew"
