"""The pages that runs write are whole, and what was measured; nothing fails that works with Lightning's own ddp."""

from __future__ import annotations

import importlib
import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks import bits_to_loss, finetune, gpu_lab, headline, plan_clock, reliability, surface
from clients import run


def test_the_page_of_faults_has_their_tests() -> None:
    named = [name for cells in reliability.rows() for name in reliability.names_in(cells)]
    assert sorted({*named}) == sorted(reliability.marked()), "a row of the page, or @pytest.mark.fault"
    assert all(fault and what for fault, what, *_ in reliability.rows())
    guide = (reliability.ROOT / reliability.GUIDE).read_text()
    assert guide.split("<!-- faults:begin -->\n")[1].split("<!-- faults:end -->")[0] == reliability.shown()


def test_the_page_of_lightning_has_every_row_and_nothing_fails_with_ours_alone() -> None:
    rows = (*surface.ROWS, surface.NOTEBOOK)
    cells = surface.read_table(surface.PAGE.read_text())
    assert [*cells] == [*product(rows, surface.COLUMNS)], "make surface writes benchmarks/results/lightning.md anew"
    works = [name for name in rows if cells[name, "ddp"] == surface.YES]
    others = {each: found for each, found in cells.items() if each[0] in works and found != surface.YES}
    averaging = [column for column in surface.COLUMNS if surface.averages_weights(column)]
    assert others == {
        **{(name, column): surface.REFUSED for name in surface.MOVING_AVERAGES for column in averaging},
        **{(surface.ON_EXCEPTION, column): surface.SKIPPED for column in surface.COLUMNS if column != "ddp"},
    }


def test_the_page_of_clients_is_what_the_runs_have_shown_and_nothing_fails_with_ours_alone() -> None:
    results = run.read()
    assert run.DOCUMENT.read_text() == run.document(results), "python -m clients.run writes it"
    assert run.ours_alone(results) == []
    trained = {name for name, ways in results["runs"].items() if all("loss" in ways.get(way, {}) for way in run.WAYS)}
    assert len({run.clients()[name]["project"] for name in trained}) >= 12


def test_each_method_that_is_measured_can_be_made() -> None:
    for methods in (bits_to_loss.METHODS, headline.METHODS, gpu_lab.METHODS):
        assert all(make() for make in methods.values())
    assert all(control.make(500) for control in headline.CONTROLS.values())
    assert all(plan_clock.strategy_of(name)() for name in plan_clock.METHODS)
    assert all(way.make(300) for way in finetune.WAYS.values())


def test_the_page_of_the_plan_is_what_was_measured() -> None:
    assert plan_clock.PATH.with_suffix(".md").read_text() == plan_clock.to_markdown(plan_clock.read())


@pytest.mark.parametrize("path", sorted((reliability.ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_each_benchmark_can_be_imported(path: Path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")


def test_the_page_of_fine_tuning_is_what_its_runs_have_shown() -> None:
    assert finetune.PATH.with_suffix(".md").read_text() == finetune.page(json.loads(finetune.PATH.read_text()))
