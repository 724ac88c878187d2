"""The stairs, what is refused, and how many elements a density means."""

from __future__ import annotations

import pytest

from lightning_lowbw.payloads.top_k import num_selected
from lightning_lowbw.schedules.every_step import EveryStep


def test_without_stairs_the_density_is_the_payloads() -> None:
    schedule = EveryStep(rampup_begin_step=3)
    assert [schedule.density(step, otherwise=0.01) for step in range(6)] == [1.0, 1.0, 1.0, 0.01, 0.01, 0.01]
    assert schedule.density(10) == 1.0
    stairs = EveryStep(rampup_begin_step=3, rampup_step=4, sparsity=(0.5, 0.9))
    assert [stairs.density(step, otherwise=0.01) for step in range(9)] == [stairs.density(step) for step in range(9)]


@pytest.mark.parametrize(("num_stairs", "length"), [(1, 1), (2, 3), (3, 10), (5, 49), (5, 100), (7, 1000)])
def test_the_stairs_follow_the_formula(num_stairs: int, length: int) -> None:
    """The whole table against methods.md, and every stair is reached."""
    sparsity = tuple(1 - 2.0**-i for i in range(1, num_stairs + 1))
    schedule = EveryStep(rampup_begin_step=5, rampup_step=length, sparsity=sparsity)
    for step in range(5, 5 + 2 * length):
        i = min(int((step - 5) * num_stairs / length), num_stairs - 1)
        assert schedule.density(step) == 1 - sparsity[i], step
    assert schedule.density(5 + length) == 1 - sparsity[-1]
    reached = {schedule.density(step) for step in range(5, 5 + length + 1)}
    assert len(reached) == num_stairs


@pytest.mark.parametrize(
    ("numel", "density", "expected"),
    [
        (1_000_000, 1 - 0.999, 1000),  # 999 in float32 arithmetic, or if it were cut instead of rounded
        (2**31 - 1, 1 - 0.999, 2_147_484),
        *[(100, 1 - 0.999, 1), (0, 0.5, 0), (5, 0.3, 2)],  # the first one: k < 1
        (7, 1.5, 7),  # never more than there are
    ],
)
def test_num_selected(numel: int, density: float, expected: int) -> None:
    assert num_selected(numel, density) == expected
