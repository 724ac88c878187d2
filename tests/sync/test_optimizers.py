"""benchmarks/results/optimizers.md is what the optimizers of torch do with each method; none fails."""

from __future__ import annotations

import pytest

from benchmarks import optimizers
from benchmarks.optimizers import ABSENT, COLUMNS, ROWS
from tests.ranks import run_ranks


@pytest.mark.slow  # the goldens have the usual optimizers
@pytest.mark.parametrize("column", COLUMNS)
def test_optimizers(column: str, request: pytest.FixtureRequest) -> None:
    by_rank = run_ranks(optimizers.column_of, 2, column)
    assert all(of_rank == by_rank[0] for of_rank in by_rank), "all ranks are told"
    here = {row: what for row, what in by_rank[0].items() if what != ABSENT}
    assert [f"{row}: {what}" for row, what in here.items() if what.startswith("fails")] == []
    written = optimizers.read()
    if request.config.getoption("--rewrite-golden"):
        for row, what in here.items():
            written[row] = {**written.get(row, {}), column: what}
        optimizers.write(written)
    assert {row: written[row][column] for row in here} == here, "pytest tests/sync/test_optimizers.py --rewrite-golden"
    assert list(written) == list(ROWS)
