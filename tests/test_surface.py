"""The page of what works with Lightning has every row and column; `make surface` writes it, from short runs."""

from __future__ import annotations

from itertools import product

from tests.surface import COLUMNS, NOTEBOOK, PAGE, ROWS, YES, read_table


def test_the_page_has_every_row_and_nothing_fails_with_ours_alone() -> None:
    cells = read_table(PAGE.read_text())
    assert [*cells] == [*product((*ROWS, NOTEBOOK), COLUMNS)], "make surface writes docs/lightning.md anew"
    works = [name for name in (*ROWS, NOTEBOOK) if cells[name, "ddp"] == YES]
    assert {cells[name, column] for name in works for column in COLUMNS} == {YES}
