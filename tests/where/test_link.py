"""The time model and the choice, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from lightning_lowbw.where.link import EXCHANGES, Link, choose

GIGABIT = Link(latency_s=50e-6, bandwidth_bytes_per_s=125e6)
NUMELS = [25_000_000]


def test_time_is_rounds_times_latency_plus_bytes_over_bandwidth() -> None:
    assert Link(0.025, 1e6).time_s(rounds=4, nbytes=500_000) == pytest.approx(0.1 + 0.5)
    assert Link(0.0, float("inf")).time_s(rounds=10, nbytes=1e12) == 0.0


def test_the_times_of_all_three() -> None:
    choice = choose(NUMELS, 25_000, 4, 64, GIGABIT)
    assert choice.times_s["dense"] == pytest.approx(6 * 50e-6 + 1.5 * 100e6 / 125e6)
    assert choice.times_s["all_gather"] == pytest.approx(3 * 50e-6 + 3 * 25_000 * 8 / 125e6)
    room, offer = 6250 + 1562 + 2 * 79 + 1, 25_000  # a quarter and two square roots above k / 4; 4 k / 4
    assert choice.times_s["reduce_scatter"] == pytest.approx(4 * 50e-6 + 3 * (room + offer) * 8 / 125e6)


@pytest.mark.parametrize(
    ("num_ranks", "density", "expected"),
    [
        (2, 0.001, "all_gather"),
        (4, 0.001, "all_gather"),
        (8, 0.001, "reduce_scatter"),
        (64, 0.001, "reduce_scatter"),
        (2, 0.25, "all_gather"),  # a quarter of the elements, each of twice the bits: half
        (8, 0.25, "dense"),
        (32, 0.25, "dense"),
        (8, 0.0625, "reduce_scatter"),
    ],
)
def test_what_is_cheapest(num_ranks: int, density: float, expected: str) -> None:
    choice = choose(NUMELS, round(density * NUMELS[0]), num_ranks, 64, GIGABIT)
    assert choice.name == expected
    assert choice.times_s[expected] == min(choice.times_s.values())
    assert tuple(choice.times_s) == EXCHANGES


def test_narrow_elements_make_sparse_pay_sooner() -> None:
    assert choose(NUMELS, 6_250_000, 8, 64, GIGABIT).name == "dense"
    assert choose(NUMELS, 6_250_000, 8, 28, GIGABIT).name == "reduce_scatter"


def test_latency_decides_where_little_is_sent() -> None:
    """One round fewer is worth more than some bytes."""
    far, near = Link(0.025, 1e9), Link(0.0, 1e9)
    assert choose([100_000], 100, 8, 64, near).name == "reduce_scatter"
    assert choose([100_000], 100, 8, 64, far).name == "all_gather"


def test_one_rank_and_equal_times() -> None:
    choice = choose(NUMELS, 25_000, 1, 64, GIGABIT)
    assert set(choice.times_s.values()) == {0.0}
    assert choice.name == "all_gather"  # which gives up nothing


def test_the_explanation() -> None:
    line = str(choose(NUMELS, 25_000, 8, 64, GIGABIT))
    assert line == "dense 1,401 ms, all-gather 11.5 ms, reduce-scatter 7.8 ms: reduce-scatter"


@pytest.mark.parametrize("density", [0.001, 1 / 64])
@pytest.mark.parametrize("numel", [1_000_000, 25_000_000])
def test_from_six_ranks_on_the_reduce_scatter_moves_less(numel: int, density: float) -> None:
    """The README says so; where latency counts for more, the all-gather stays."""
    endless, far = Link(0.0, 1e9 / 8), Link(0.025, 1e8 / 8)
    names = [choose([numel], round(density * numel), num_ranks, 28, endless).name for num_ranks in range(2, 9)]
    assert names == 4 * ["all_gather"] + 3 * ["reduce_scatter"]
    assert choose([1_000_000], 1000, 8, 28, far).name == "all_gather"
