"""Golden trajectories: each case trains as it did when it was recorded.

`pytest tests/golden --rewrite-golden` records the selected cases anew, where a change of the numbers is meant.

A record has, after each optimizer step and once more after the fit, digests of the weights', buffers' and optimizer
states' bits, the bytes sent and the squared norm of the weights. Where torch, the instruction set, the processor and
numba's presence are those of the recording, digests and bytes have to be equal. Elsewhere sums are ordered otherwise:
there norms have to agree to `RTOL`, and bytes exactly.
"""

from __future__ import annotations

import importlib.util
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.cases import CASES
from tests.golden.record import END, FIELDS, merge_ranks, record_all
from tests.ranks import run_ranks

FOLDER = Path(__file__).parent / "trajectories"
RTOL = 5e-3
TIMEOUT_S = 300.0


def environment() -> dict[str, Any]:
    """Return what the bits depend on, besides the code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": models[0] if models else platform.processor(),
        "numba": importlib.util.find_spec("numba") is not None,
    }


# Files ------------------------------------------------------------------------------------------------------------


def group_of(name: str) -> str:
    return name.partition("/")[0]


def load(group: str) -> dict[str, Any]:
    path = FOLDER / f"{group}.json"
    return json.loads(path.read_text()) if path.exists() else {"environment": environment(), "cases": {}}


def save(group: str, content: dict[str, Any]) -> None:
    """Write one line per step, so that a difference between two versions says where it begins."""
    cases = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"
        for name, rows in sorted(content["cases"].items())
    ]
    text = f'{{"environment": {json.dumps(content["environment"])},\n"cases": {{\n' + ",\n".join(cases) + "\n}}\n"
    (FOLDER / f"{group}.json").write_text(text)


def rewrite(records: dict[str, Any]) -> None:
    """Replace the records of these cases, and drop those of cases that are no more."""
    here = environment()
    for group in sorted({group_of(name) for name in records}):
        content = load(group)
        kept = {name: rows for name, rows in content["cases"].items() if name in CASES and name not in records}
        if kept and content["environment"] != here:
            pytest.fail(f"{group}.json is of {content['environment']}, and this is {here}: rewrite all of its cases.")
        new = {name: rows for name, rows in records.items() if group_of(name) == group and not isinstance(rows, str)}
        save(group, {"environment": here, "cases": {**kept, **new}})


# Running ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return what the ranks have now recorded of a case; all selected ones with its number of ranks in one start."""
    selected = [item for item in request.session.items if item.parent is request.node and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in selected]
    by_ranks: dict[int, dict[str, Any]] = {}

    def get(name: str) -> Any:
        num_ranks = CASES[name].ranks
        if num_ranks not in by_ranks:
            together = [each for each in names if CASES[each].ranks == num_ranks]
            by_ranks[num_ranks] = run(together, num_ranks, tmp_path_factory.mktemp(f"{num_ranks}-ranks"))
            if request.config.getoption("--rewrite-golden"):
                rewrite(by_ranks[num_ranks])
        return by_ranks[num_ranks][name]

    return get


def run(names: list[str], num_ranks: int, folder: Path) -> dict[str, Any]:
    try:
        of_ranks = run_ranks(record_all, num_ranks, names, str(folder), timeout_s=TIMEOUT_S)
    except AssertionError as error:
        where = {path.name: path.read_text() for path in sorted(folder.glob("rank-*"))}
        return dict.fromkeys(names, f"No record of any case; the ranks were in {where}. {error}")
    return {name: merge_ranks([records[name] for records in of_ranks]) for name in names}


# Comparing --------------------------------------------------------------------------------------------------------


def numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list) else [value]
    return [float("nan") if each is None else each for each in values]


def agree(name: str, field: str, value: Any, golden: Any, is_same: bool) -> bool:
    if is_same or field in ("step", "bytes"):
        return value == golden
    if field != "norm":
        return True
    here, there = (torch.tensor(numbers(each), dtype=torch.float64) for each in (value, golden))
    size = max(len(here), len(there))  # one number where the ranks are equal, which need not be so elsewhere
    return torch.allclose(here.expand(size), there.expand(size), rtol=RTOL, atol=0.0, equal_nan=True)


def compared(name: str, rows: list[list[Any]]) -> list[list[Any]]:
    """Return what is compared of the rows of a case; see `Case.end`."""
    end, place = CASES[name].end, FIELDS.index("bytes")
    if end == "all":
        return rows
    kept = [row for row in rows if row[0] != END or end == "state"]
    return [[*row[:place], None, *row[place + 1 :]] if row[0] == END else row for row in kept]


def first_difference(name: str, rows: list[list[Any]], golden: list[list[Any]], is_same: bool) -> str | None:
    """Say in which step which fields differ first. A resumed case has two ends of a fit."""
    for row, expected in zip(rows, golden, strict=False):
        fields = [
            f"{field} ({value} instead of {before})"
            for field, value, before in zip(FIELDS, row, expected, strict=True)
            if not agree(name, field, value, before, is_same)
        ]
        if fields:
            return f"step {expected[0]}: {', '.join(fields)}"
    return None if len(rows) == len(golden) else f"{len(rows)} rows instead of {len(golden)}"


@pytest.mark.parametrize("name", list(CASES))
def test_golden(name: str, recorded: Callable[[str], Any]) -> None:
    rows = recorded(name)
    assert not isinstance(rows, str), f"{name} failed.\n{rows}"
    content = load(group_of(name))
    golden = content["cases"].get(name)
    assert golden is not None, f"{name} has no record: pytest tests/golden --rewrite-golden -k '{name}'."
    is_same = content["environment"] == environment()
    difference = first_difference(name, compared(name, rows), compared(name, golden), is_same)
    how = (
        "This is the environment of the recording: every bit has to be equal."
        if is_same
        else f"Recorded in {content['environment']}, this is {environment()}: bytes have to be equal, norms to {RTOL}."
    )
    assert difference is None, f"{name} differs first in {difference}. {how}"


def test_no_record_without_a_case() -> None:
    names = {name for path in FOLDER.glob("*.json") for name in load(path.stem)["cases"]}
    assert names == set(CASES)
