"""When replicas are averaged: what does not go together is refused, with the reason."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from lightning_lowbw.schedules.every_k import EveryK, Period, balance


def test_a_k_of_1_is_ddp_unless_it_may_grow() -> None:
    assert EveryK(k_steps=1).is_always_synchronous
    assert not EveryK(k_steps=1, rule="adacomm", outer="slowmo").is_always_synchronous


def run(schedule: EveryK, lrs: list[float], losses: list[float]) -> list[int]:
    period, ks = Period(schedule.k_steps), []
    for lr, loss in zip(lrs, losses, strict=True):
        period = schedule.next_period(period, lr, loss)
        ks.append(period.k)
    return ks


def test_fleet_has_the_first_k_under_the_root() -> None:
    # sqrt(0.1 * 1 * 4 / (0.01 * 2)) = sqrt(20) = 4.47
    assert run(EveryK(k_steps=4, rule="fleet"), [0.1, 0.01], [2.0, 1.0]) == [4, 5]


def test_adacomm_has_it_outside() -> None:
    # sqrt(0.1 * 1 / (0.05 * 2)) * 4 = 4
    assert run(EveryK(k_steps=4, rule="adacomm"), [0.1, 0.05], [2.0, 1.0]) == [4, 4]
    # the loss falls slowly at one rate: ceil(sqrt(0.9) * 8) = 8, so half of it; then ceil(sqrt(0.2) * 8) = 4 is no less
    assert run(EveryK(k_steps=8, rule="adacomm"), [0.1] * 4, [1.0, 0.9, 0.2, 0.01]) == [8, 4, 2, 1]


def test_qsr_is_the_square_of_the_inverse_rate() -> None:
    schedule = EveryK(k_steps=2, rule="qsr", qsr_alpha=0.02, max_k_steps=50)
    assert run(schedule, [0.02, 0.01, 0.005, 1e-4, 1e-200], [math.nan] * 5) == [2, 4, 16, 50, 50]


def test_the_largest_k_is_16_unless_told_otherwise() -> None:
    assert run(EveryK(k_steps=1, rule="fleet"), [1.0, 1e-9], [1.0, 1.0])[-1] == 16
    assert run(EveryK(k_steps=1, rule="fleet", max_k_steps=20), [1.0, 1e-9], [1.0, 1.0])[-1] == 20


def test_the_reference_follows_the_rate_up() -> None:
    schedule = EveryK(k_steps=2, rule="fleet")
    period = Period(schedule.k_steps)
    for lr, loss in ((0.01, 4.0), (0.05, 3.0), (0.1, 2.0)):
        period = schedule.next_period(period, lr, loss)
        assert period == Period(2, lr, loss, lr)


@pytest.mark.parametrize("rule", ["fleet", "qsr"])
def test_rates_that_make_no_sense_change_nothing(rule: Any) -> None:
    schedule = EveryK(k_steps=3, rule=rule)
    period = schedule.next_period(Period(schedule.k_steps), 0.1, 1.0)
    for lr in (0.0, -1.0, math.nan, math.inf):
        assert schedule.next_period(period, lr, 1.0) == period


def test_slowmo_with_a_rate_of_0_takes_the_mean_over() -> None:
    start = torch.randn(3)
    mean, velocity = start.clone(), torch.ones(3)
    EveryK(outer="slowmo").outer_step_([start], [mean], [velocity], 0.0)
    assert torch.equal(mean, start)
    assert torch.equal(velocity, torch.ones(3))


@pytest.mark.parametrize("num_fragments", [1, 2, 7])
def test_fragments_are_balanced(num_fragments: int) -> None:
    chance = random.Random(num_fragments)
    for _ in range(25):
        numels = [int(2 ** chance.uniform(0, 16)) for _ in range(num_fragments + chance.randrange(30))]
        loads = [0] * num_fragments
        chosen = balance(numels, loads)
        assert loads == [0] * num_fragments, "an argument was changed"
        for numel, fragment in zip(numels, chosen, strict=True):
            loads[fragment] += numel
        assert all(loads), "a fragment without a tensor"
        assert max(loads) <= max(max(numels), 4 / 3 * sum(numels) / num_fragments + max(numels) / 3)


def test_new_tensors_go_where_the_least_is() -> None:
    assert balance([5, 5, 5], [100, 0, 8]) == [1, 1, 2]
    assert sorted(balance([0, 0, 0], [0, 0, 0])) == [0, 1, 2]
