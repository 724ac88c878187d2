"""The stairs, what is refused, and how many elements a density means."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.every_step import EveryStep

PAPER = (0.75, 0.9375, 0.984375, 0.996, 0.999)


@pytest.mark.parametrize("begin", [0, 7])
def test_five_values_over_a_hundred_steps_change_at_20_40_60_80(begin: int) -> None:
    schedule = EveryStep(rampup_begin_step=begin, rampup_step=100, sparsity=PAPER)
    densities = [schedule.density(step) for step in range(begin, begin + 300)]
    changes = [step for step, (before, after) in enumerate(pairwise(densities), start=1) if before != after]
    assert changes == [20, 40, 60, 80]
    assert [densities[step] for step in (0, 20, 40, 60, 80, 299)] == [1 - s for s in (*PAPER, PAPER[-1])]


def test_it_is_dense_before_the_first_stair() -> None:
    schedule = EveryStep(rampup_begin_step=3, rampup_step=4, sparsity=(0.5, 0.9))
    assert [schedule.density(step) for step in range(8)] == [1.0, 1.0, 1.0, 0.5, 0.5, 1 - 0.9, 1 - 0.9, 1 - 0.9]


def test_without_stairs_the_density_is_the_payloads() -> None:
    schedule = EveryStep(rampup_begin_step=3)
    assert [schedule.density(step, otherwise=0.01) for step in range(6)] == [1.0, 1.0, 1.0, 0.01, 0.01, 0.01]
    assert schedule.density(10) == 1.0
    stairs = EveryStep(rampup_begin_step=3, rampup_step=4, sparsity=(0.5, 0.9))
    assert [stairs.density(step, otherwise=0.01) for step in range(9)] == [stairs.density(step) for step in range(9)]


def test_a_leading_zero_is_a_dense_stair() -> None:
    schedule = EveryStep(rampup_begin_step=1, rampup_step=6, sparsity=(0.0, 0.0, 0.9))
    assert [schedule.density(step) == 1.0 for step in range(7)] == [True, True, True, True, True, False, False]


@pytest.mark.parametrize("num_stairs", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 49, 100, 1000])
def test_the_stairs_follow_the_formula(num_stairs: int, length: int) -> None:
    """The whole table against methods.md, and every stair is reached; it is refused if there are too few steps."""
    sparsity = tuple(1 - 2.0**-i for i in range(1, num_stairs + 1))
    if length < num_stairs:
        with pytest.raises(ConfigurationError, match="there is no step for each"):
            EveryStep(rampup_begin_step=5, rampup_step=length, sparsity=sparsity)
        return
    if length > 1 and num_stairs == 1:
        with pytest.raises(ConfigurationError, match="a warm-up needs several values"):
            EveryStep(rampup_begin_step=5, rampup_step=length, sparsity=sparsity)
        return
    schedule = EveryStep(rampup_begin_step=5, rampup_step=length, sparsity=sparsity)
    for step in range(5, 5 + 2 * length):
        i = min(int((step - 5) * num_stairs / length), num_stairs - 1)
        assert schedule.density(step) == 1 - sparsity[i], step
    assert schedule.density(5 + length) == 1 - sparsity[-1]
    reached = {schedule.density(step) for step in range(5, 5 + length + 1)}
    assert len(reached) == num_stairs


def test_a_list_is_taken_and_compares_equal() -> None:
    schedule = EveryStep(rampup_step=2, sparsity=[0.5, 0.9])
    assert schedule == EveryStep(rampup_step=2, sparsity=(0.5, 0.9))
    assert hash(schedule) == hash(EveryStep(rampup_step=2, sparsity=(0.5, 0.9)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rampup_begin_step": -1}, r"rampup_begin_step=-1: .* integer >= 0"),
        ({"rampup_begin_step": 1.0}, r"rampup_begin_step=1\.0: .* integer >= 0"),
        ({"rampup_begin_step": True}, r"rampup_begin_step=True: .* integer >= 0"),
        ({"rampup_begin_step": None}, r"rampup_begin_step=None: .* integer >= 0"),
        ({"rampup_step": 0}, r"rampup_step=0: .* integer >= 1"),
        ({"rampup_step": 3}, r"rampup_step=3 with sparsity=None: .*several values"),
        ({"rampup_step": -5}, r"rampup_step=-5: .* integer >= 1"),
        ({"rampup_step": 2.5}, r"rampup_step=2\.5: .* integer >= 1"),
        ({"rampup_step": "10"}, r"rampup_step='10': .* integer >= 1"),
        ({"sparsity": 0.999}, r"sparsity=0\.999: give a list of numbers in \[0, 1\), for instance \[0\.999\]"),
        ({"sparsity": 1}, r"sparsity=1: give a list of numbers"),
        ({"sparsity": ()}, r"sparsity=\[\]: give at least one value"),
        ({"sparsity": ("a",)}, r"give a list of numbers in \[0, 1\)"),
        ({"sparsity": "0.9"}, r"give a list of numbers in \[0, 1\)"),
        ({"sparsity": ((0.5,),)}, r"give a list of numbers in \[0, 1\)"),
        ({"sparsity": (0.5, 1.0)}, r"sparsity=\[0\.5, 1\.0\]: 1\.0 is outside \[0, 1\)"),
        ({"sparsity": (-0.1,)}, r"-0\.1 is outside \[0, 1\)"),
        ({"sparsity": (99.9,)}, r"99\.9 is outside \[0, 1\).* 0\.999 sends 0\.1 %"),
        ({"sparsity": (math.nan,)}, r"nan is outside \[0, 1\)"),
        ({"sparsity": (math.inf,)}, r"inf is outside \[0, 1\)"),
        ({"sparsity": (0.5, 0.0)}, r"sparsity=\[0\.5, 0\.0\]: 0\.0 follows 0\.5"),
        ({"sparsity": (0.5, 0.999, 0.9)}, r"0\.9 follows 0\.999, so more would be sent after the warm-up than in it"),
        ({"sparsity": (0.0, 0.5, 0.0, 0.9)}, r"0\.0 follows 0\.5"),
    ],
)
def test_it_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EveryStep(**arguments)


@pytest.mark.parametrize(
    ("numel", "density", "expected"),
    [
        (1_000_000, 1 - 0.999, 1000),  # 999 in float32 arithmetic, or if it were cut instead of rounded
        (1_000_000, 0.001, 1000),
        (2**31 - 1, 1 - 0.999, 2_147_484),
        (10**9, 1 - 0.984375, 15_625_000),
        (1024, 1 - 0.75, 256),
        (999, 1 - 0.999, 1),
        (100, 1 - 0.999, 1),  # k < 1
        (1, 1 - 0.999, 1),
        (1, 1.0, 1),
        (17, 1.0, 17),
        (3, 1 - 1e-12, 3),  # never more than there are
        (7, 1.5, 7),
        (5, 0.3, 2),
    ],
)
def test_num_selected(numel: int, density: float, expected: int) -> None:
    assert num_selected(numel, density) == expected


def test_num_selected_grows_with_the_density_and_stays_in_range() -> None:
    for numel in (1, 2, 3, 10, 1000, 16384):
        selected = [num_selected(numel, percent / 100) for percent in range(101)]
        assert selected == sorted(selected)
        assert selected[0] == 1
        assert selected[-1] == numel
