"""Fragments: of nearly one size, begun one after another, hidden behind as many steps as it takes."""

from __future__ import annotations

import random

import pytest

from lightning_lowbw.when.fragments import balance, hiding_steps, steps_before


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 7])
def test_fragments_are_balanced(num_fragments: int) -> None:
    chance = random.Random(num_fragments)
    for _ in range(50):
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


@pytest.mark.parametrize(("num_fragments", "k_steps"), [(1, 7), (2, 5), (4, 100), (5, 5), (3, 10)])
def test_first_averages_are_spread_over_a_period(num_fragments: int, k_steps: int) -> None:
    first = [k_steps - steps_before(fragment, num_fragments, k_steps) for fragment in range(num_fragments)]
    assert first[-1] == k_steps
    assert first == sorted(set(first))
    assert first[0] >= 1
    gaps = [after - before for before, after in zip([0, *first], first, strict=False)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("average_s", "step_s", "k_steps", "expected"),
    [(1.0, 0.3, 10, 4), (0.3, 0.3, 10, 1), (0.0, 0.3, 10, 1), (1e9, 1e-9, 10, 9), (1.0, 0.0, 5, 4), (1.0, 0.1, 1, 0)],
)
def test_as_many_steps_as_an_average_takes(average_s: float, step_s: float, k_steps: int, expected: int) -> None:
    assert hiding_steps(average_s, step_s, k_steps) == expected
