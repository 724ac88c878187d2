"""Periods by the formulas of the papers, and outer optimizers against torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_lowbw import ConfigurationError
from lightning_lowbw.when.adaptive import Period, PeriodSchedule
from lightning_lowbw.when.outer import OuterOptimizer


def run(schedule: PeriodSchedule, lrs: list[float], losses: list[float]) -> list[int]:
    period, ks = schedule.first(), []
    for lr, loss in zip(lrs, losses, strict=True):
        period = schedule.next(period, lr, loss)
        ks.append(period.k)
    return ks


def test_fixed_stays() -> None:
    assert run(PeriodSchedule(5), [0.1, 0.01], [2.0, 1.0]) == [5, 5]


def test_fleet_has_the_first_k_under_the_root() -> None:
    # sqrt(0.1 * 1 * 4 / (0.01 * 2)) = sqrt(20) = 4.47
    assert run(PeriodSchedule(4, rule="fleet"), [0.1, 0.01], [2.0, 1.0]) == [4, 5]


def test_adacomm_has_it_outside() -> None:
    # sqrt(0.1 * 1 / (0.05 * 2)) * 4 = 4
    assert run(PeriodSchedule(4, rule="adacomm"), [0.1, 0.05], [2.0, 1.0]) == [4, 4]
    # the loss falls slowly at one rate: ceil(sqrt(0.9) * 8) = 8, so half of it; then ceil(sqrt(0.2) * 8) = 4 is no less
    assert run(PeriodSchedule(8, rule="adacomm"), [0.1] * 4, [1.0, 0.9, 0.2, 0.01]) == [8, 4, 2, 1]


def test_qsr_is_the_square_of_the_inverse_rate() -> None:
    schedule = PeriodSchedule(2, rule="qsr", qsr_alpha=0.02, max_k_steps=50)
    assert run(schedule, [0.02, 0.01, 0.005, 1e-4, 1e-200], [math.nan] * 5) == [2, 4, 16, 50, 50]


def test_the_largest_k_is_16_unless_told_otherwise() -> None:
    assert run(PeriodSchedule(1, rule="fleet"), [1.0, 1e-9], [1.0, 1.0])[-1] == 16
    assert run(PeriodSchedule(1, rule="fleet", max_k_steps=20), [1.0, 1e-9], [1.0, 1.0])[-1] == 20


@pytest.mark.parametrize("rule", ["fleet", "adacomm"])
def test_the_reference_follows_the_rate_up(rule: Any) -> None:
    schedule = PeriodSchedule(2, rule=rule)
    period = schedule.first()
    for lr, loss in ((0.01, 4.0), (0.05, 3.0), (0.1, 2.0)):
        period = schedule.next(period, lr, loss)
        assert period == Period(2, lr, loss, lr)


@pytest.mark.parametrize("rule", ["fleet", "adacomm", "qsr"])
@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_make_no_sense_change_nothing(rule: Any, lr: float) -> None:
    schedule = PeriodSchedule(3, rule=rule)
    period = schedule.next(schedule.first(), 0.1, 1.0)
    assert schedule.next(period, lr, 1.0) == period


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_nesterov_is_torchs_on_the_pseudo_gradient(momentum: float) -> None:
    x = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    reference = torch.optim.SGD([x], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    start, velocity = x.detach().clone(), torch.zeros(5, dtype=torch.float64)
    outer = OuterOptimizer("nesterov", 0.7, momentum)
    for _ in range(4):
        moved = start + torch.randn(5, dtype=torch.float64)
        x.grad = start - moved
        reference.step()
        outer.step_([start], [moved], [velocity], 0.1)
        assert torch.equal(start, moved)
        torch.testing.assert_close(start, x.detach())


def test_slowmo_without_momentum_takes_the_mean_over() -> None:
    start, mean, velocity = torch.randn(3, 4), torch.randn(3, 4), torch.zeros(3, 4)
    expected = mean.clone()
    OuterOptimizer("slowmo", 1.0, 0.0).step_([start], [mean], [velocity], 0.3)
    torch.testing.assert_close(mean, expected)
    assert torch.equal(start, mean)


def test_slowmo_with_a_rate_of_0_takes_the_mean_over() -> None:
    start = torch.randn(3)
    mean, velocity = start.clone(), torch.ones(3)
    OuterOptimizer("slowmo").step_([start], [mean], [velocity], 0.0)
    assert torch.equal(mean, start)
    assert torch.equal(velocity, torch.ones(3))


@pytest.mark.parametrize("choices", [("adam",), ("none", 0.5), ("slowmo", 0.0), ("nesterov", 0.7, 1.0)])
def test_outer_optimizers_that_cannot_be(choices: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError):
        OuterOptimizer(*choices)
