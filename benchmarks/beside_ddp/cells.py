"""The runs of a task, a length and a schedule, and their differences to ddp over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.beside_ddp.accuracy import CONTROL, FIXED
from benchmarks.beside_ddp.tasks import LINKS, STEPS, TASKS, Row, is_same

LATER_SEEDS = 10  # the first of those that were added to judge the others by
NUM_SEEDS = 5  # of most rows


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of the difference to ddp with the same seed, and its standard error.

    Attributes:
        mean: positive is worse.
        error: the standard deviation of the differences, divided by the root of their number; NaN for one seed.
    """

    mean: float
    error: float

    @property
    def in_errors(self) -> float:
        """The mean in standard errors; 0 where no run differs."""
        return self.mean / self.error if self.error else 0.0

    @property
    def verdict(self) -> str:
        """Whether this is within one standard error."""
        if math.isnan(self.error):
            return "one seed"
        return "within" if abs(self.in_errors) <= 1 else "worse" if self.mean > 0 else "better"


@dataclass(frozen=True)
class Cell:
    """A task, a length and a schedule of auto, on all links for which it is chosen: rows of each method by seed."""

    task: str
    steps: int
    links: tuple[str, ...]
    schedule: Row | None
    rows: dict[str, dict[int, Row]]

    @property
    def seeds(self) -> list[int]:
        """Those with which ddp and what is compared with it have been trained; dgc 99.9 % may have fewer."""
        of_methods = [set(rows) for method, rows in self.rows.items() if rows and method != "dgc 99.9 %"]
        return sorted(set.intersection(*of_methods)) if of_methods else []

    def values(self, method: str, key: str) -> list[float]:
        """Return the values of a method by seed; none if it has not been trained."""
        return [self.rows[method][seed][key] for seed in self.seeds if seed in self.rows[method]]

    def of_seeds(self, seeds: Sequence[int]) -> Cell:
        """Return the same with these seeds only."""
        rows = {name: {each: of[each] for each in seeds if each in of} for name, of in self.rows.items()}
        return replace(self, rows=rows)

    def difference(self, key: str, method: str = "auto") -> Difference:
        sign = -1.0 if key == "test_accuracy" else 1.0
        own, dense = self.rows[method], self.rows["ddp"]
        differences = [sign * (own[seed][key] - dense[seed][key]) for seed in self.seeds if seed in own]
        if not differences:
            return Difference(math.nan, math.nan)
        return Difference(statistics.mean(differences), error_of(differences))


def error_of(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def cells_of(results: dict[str, Any], constants: dict[str, float]) -> list[Cell]:
    """Return the cells for which there are rows of ddp and auto."""
    cells = []
    for task in TASKS:
        for num_steps in STEPS:
            same = [row for row in results["rows"] if is_same(row, task=task, steps=num_steps)]
            choices = [
                each for each in results["choices"] if is_same(each, task=task, steps=num_steps, constants=constants)
            ]
            choices.sort(key=lambda each: list(LINKS).index(each["link"]))
            schedules: list[Row | None] = []
            for each in choices:
                if each["schedule"] not in schedules:
                    schedules.append(each["schedule"])
            for schedule in schedules:
                links = tuple(each["link"] for each in choices if each["schedule"] == schedule)
                rows = {}
                for method, sent in (("ddp", None), ("dgc 99.9 %", FIXED), ("auto", schedule)):
                    name = "ddp" if sent is None else method  # to the bit
                    key = {"method": name, "schedule": sent}
                    rows[method] = {row["seed"]: row for row in same if is_same(row, **key)}
                cell = Cell(task, num_steps, links, schedule, rows)
                if rows["ddp"] and rows["auto"] and cell.seeds:
                    cells.append(cell)
    return cells


def former_of(results: dict[str, Any], cells: list[Cell], *, are_trials: bool) -> list[Cell]:
    """Return cells with schedules that auto does not choose now, of two seeds at least.

    Args:
        results: with their runs.
        cells: what auto chooses.
        are_trials: whether these schedules are of constants that were given, or of former ones of the package.
    """
    found: list[Cell] = []
    for cell in {(cell.task, cell.steps): cell for cell in cells}.values():
        key = {"task": cell.task, "steps": cell.steps, "method": "auto"}
        rows = [row for row in results["rows"] if is_same(row, **key) and row["schedule"] is not None]
        known = [each.schedule for each in cells if (each.task, each.steps) == (cell.task, cell.steps)]
        former: list[Row] = []
        for row in rows:
            if row["schedule"] not in [*known, *former]:
                former.append(row["schedule"])
        for schedule in former:
            of = {row["seed"]: row for row in rows if row["schedule"] == schedule}
            links = tuple(dict.fromkeys(row["link"] for row in of.values()))
            old = replace(cell, links=links, schedule=schedule, rows={"ddp": cell.rows["ddp"], "auto": of})
            is_trial = all(row.get("constants") for row in of.values())
            found += [old] * (len(old.seeds) > 1 and is_trial == are_trials)
    return found


def later_of(cells: list[Cell]) -> list[Cell]:
    """Return the sparse cells of many seeds, with those alone that were added to judge the others."""
    found = []
    for cell in cells:
        rows = {
            method: {seed: row for seed, row in cell.rows[method].items() if seed >= LATER_SEEDS}
            for method in ("ddp", "auto")
        }
        later = replace(cell, rows=rows)
        found += [later] * (cell.schedule is not None and len(later.seeds) > 1)
    return found


def beside_perturbed(results: dict[str, Any], cell: Cell) -> Cell:
    """Return the rows of ddp, and of ddp after a change of a millionth."""
    key = {"task": cell.task, "steps": cell.steps, "method": CONTROL}
    perturbed = {row["seed"]: row for row in results["rows"] if is_same(row, **key)}
    return replace(cell, rows={"ddp": cell.rows["ddp"], CONTROL: perturbed})


def is_beyond_ddp(cell: Cell, key: str, method: str = "auto") -> bool:
    """Whether a method is worse than ddp by more than the standard error that ddp's mean has over `NUM_SEEDS` seeds."""
    return cell.difference(key, method).mean > statistics.stdev(cell.values("ddp", key)) / math.sqrt(NUM_SEEDS)
