"""The page of what works with Lightning is what short runs find: of two strategies here, of all where it is written."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.surface import COLUMNS, NOTEBOOK, PAGE, ROWS, YES, read_table, run_survey, table

QUICK = ("dgc", "local_sgd")
WRITTEN_BY = "make surface writes docs/lightning.md anew"


def test_the_page_has_every_row_and_column() -> None:
    assert [*read_table(PAGE.read_text())] == [*product((*ROWS, NOTEBOOK), COLUMNS)], WRITTEN_BY


def test_nothing_fails_with_ours_alone() -> None:
    cells = read_table(PAGE.read_text())
    works = [name for name in (*ROWS, NOTEBOOK) if cells[name, "ddp"] == YES]
    assert {cells[name, column] for name in works for column in COLUMNS} == {YES}


@pytest.mark.slow
def test_the_page_says_what_runs_find(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    is_written = request.config.getoption("--rewrite-surface")
    found = run_survey(COLUMNS if is_written else QUICK, tmp_path)
    text = PAGE.read_text()
    if is_written:
        PAGE.write_text(text[: text.index("| |")] + table(found))
        return
    cells = read_table(text)
    assert found == {place: cells.get(place) for place in found}, WRITTEN_BY
