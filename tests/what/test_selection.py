"""Both selectors return the k largest, on data of every shape; the sampled one without sorting everything."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, cpu, reference
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.what import selection
from lightning_lowbw.what.selection import SELECTIONS, ExactSelector, SampledSelector, exact_top_k, make_selector

NUMEL = 360 * 360  # above SampledSelector.SMALL
K = 130  # one in a thousand


def laplace(numel: int) -> Tensor:
    return torch.empty(numel).exponential_() * torch.randn(numel).sign()


def cauchy(numel: int) -> Tensor:
    return torch.empty(numel).cauchy_()


def row_scaled(numel: int) -> Tensor:
    """Rows of a weight matrix differ by six orders of magnitude; strided samples miss most of them."""
    side = int(numel**0.5)
    return (torch.randn(side, side) * torch.logspace(-3, 3, side)[:, None]).reshape(-1)


def column_scaled(numel: int) -> Tensor:
    side = int(numel**0.5)
    return (torch.randn(side, side) * torch.logspace(-3, 3, side)).reshape(-1)


def ascending(numel: int) -> Tensor:
    return torch.randn(numel).sort().values


def largest_at_the_end(numel: int) -> Tensor:
    return torch.randn(numel).abs().sort().values


def mostly_zero(numel: int) -> Tensor:
    """More candidates than k, fewer than a sample finds."""
    return torch.randn(numel) * (torch.rand(numel) < 0.003)


def one_huge(numel: int) -> Tensor:
    values = torch.randn(numel)
    values[numel // 3] = 1e30
    return values


def subnormal(numel: int) -> Tensor:
    return torch.randn(numel) * 1e-40


SPREAD = [torch.randn, laplace, cauchy, row_scaled, column_scaled, ascending, one_huge]
DISTINCT = [*SPREAD, largest_at_the_end, mostly_zero]


def constant(numel: int) -> Tensor:
    return torch.full((numel,), -0.5)


def all_zero(numel: int) -> Tensor:
    return torch.zeros(numel)


def nearly_dead(numel: int) -> Tensor:
    """Fewer elements than k are not zero."""
    values = torch.zeros(numel)
    values[torch.randperm(numel)[: K // 2]] = 1e-3
    return values


def few_levels(numel: int) -> Tensor:
    return torch.randint(-3, 4, (numel,)).float()


WITH_TIES = [constant, all_zero, nearly_dead, few_levels, subnormal]


def is_top_k(values: Tensor, k: int, positions: Tensor) -> bool:
    """Whether positions are k, distinct and ascending, and nothing that is left is larger than anything taken."""
    assert positions.dtype == torch.int64
    assert positions.shape == (k,)
    assert bool((positions[1:] > positions[:-1]).all())
    assert int(positions[0]) >= 0
    assert int(positions[-1]) < values.numel()
    left = torch.ones(values.numel(), dtype=torch.bool)
    left[positions] = False
    return k == values.numel() or bool(values[positions].abs().min() >= values[left].abs().max())


@pytest.mark.parametrize("make", DISTINCT)
def test_sampled_selects_the_same_set_as_exact(make: Callable[[int], Tensor]) -> None:
    """A recall of 100 % in every one of several calls with fresh data, not on the average."""
    sampled, exact = SampledSelector(), ExactSelector()
    for _ in range(6):
        values = make(NUMEL)
        positions = sampled(values, K)
        assert is_top_k(values, K, positions)
        assert positions.equal(exact(values, K))


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("make", WITH_TIES)
def test_ties_may_be_broken_either_way(name: str, make: Callable[[int], Tensor]) -> None:
    selector = make_selector(name)
    for _ in range(3):
        values = make(NUMEL)
        assert is_top_k(values, K, selector(values, K))


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e3, 1e20, 0.0])
def test_an_abrupt_change_of_scale(scale: float) -> None:
    """After a jump of the learning signal, or a death, and back: the old threshold is worth nothing."""
    sampled = SampledSelector()
    for factor in (1.0, 1.0, scale, scale, 1.0, 1.0):
        values = torch.randn(NUMEL) * factor
        positions = sampled(values, K)
        assert is_top_k(values, K, positions)
        assert scale == 0.0 or positions.equal(exact_top_k(values, K))


@pytest.mark.parametrize("k", [1, 2, 17, 1000, NUMEL // 8 - 1, NUMEL // 8, NUMEL // 2, NUMEL - 1, NUMEL])
def test_every_k(k: int) -> None:
    sampled = SampledSelector()
    for _ in range(2):
        values = torch.randn(NUMEL)
        positions = sampled(values, k)
        assert is_top_k(values, k, positions)
        assert positions.equal(exact_top_k(values, k))


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("numel", [1, 2, 17, 1000])
def test_small_tensors(name: str, numel: int) -> None:
    for k in {1, max(1, numel // 2), numel}:
        values = torch.randn(numel)
        assert is_top_k(values, k, make_selector(name)(values, k))


@pytest.mark.parametrize("numel", [SampledSelector.SMALL, SampledSelector.SMALL + 1])
def test_both_sides_of_the_size_limit(numel: int) -> None:
    sampled, values = SampledSelector(), torch.randn(numel)
    assert is_top_k(values, 65, sampled(values, 65))
    assert (sampled.threshold > 0) == (numel > SampledSelector.SMALL)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("make", [torch.randn, row_scaled, ascending])
def test_selection_commutes_with_a_permutation(name: str, make: Callable[[int], Tensor]) -> None:
    """No position is favoured, whatever order the elements lie in."""
    values, order = make(NUMEL), torch.randperm(NUMEL)
    for k in (K, 5000):
        positions = make_selector(name)(values, k)
        of_permuted = make_selector(name)(values[order], k)
        assert order[of_permuted].sort().values.equal(positions)


@pytest.mark.parametrize("threshold", [1e-45, 1e-10, 1.0, 3.2, 100.0, 1e30, float("inf"), float("nan"), -1.0])
def test_the_threshold_does_not_influence_the_result(threshold: float) -> None:
    """Whatever a checkpoint or another step left there."""
    sampled, values = SampledSelector(), torch.randn(NUMEL)
    sampled.threshold = threshold
    for _ in range(2):
        assert sampled(values, K).equal(exact_top_k(values, K))
    assert 0 < sampled.threshold < 10  # found its way back


@pytest.mark.parametrize("name", SELECTIONS)
def test_the_values_are_not_touched(name: str) -> None:
    values = torch.randn(NUMEL)
    before = values.clone()
    make_selector(name)(values, K)
    assert values.equal(before)


class Counted:
    """What the calls of a sampled selector cost: samples drawn, and full sorts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.selector = SampledSelector()
        self.num_estimates = self.num_sorts = 0
        estimate, sort = self.selector._estimate, selection.exact_top_k

        def counting_estimate(sample: Tensor, numel: int, k: int) -> float:
            self.num_estimates += 1
            return estimate(sample, numel, k)

        def counting_sort(values: Tensor, k: int) -> Tensor:
            self.num_sorts += 1
            return sort(values, k)

        monkeypatch.setattr(self.selector, "_estimate", counting_estimate)
        monkeypatch.setattr(selection, "exact_top_k", counting_sort)


@pytest.mark.parametrize("gradient", [torch.randn, laplace, row_scaled])
def test_the_threshold_follows_a_drifting_residual(
    gradient: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error feedback from zero: the residual grows with the root of the step, then levels off."""
    counted = Counted(monkeypatch)
    residual = torch.zeros(NUMEL)
    candidates = []
    for _ in range(50):
        residual += gradient(NUMEL)
        positions = counted.selector(residual, K)
        if counted.num_estimates:
            candidates.append(int((residual.abs() >= counted.selector.threshold).sum()))
        residual[positions] = 0
    assert counted.num_sorts == 0
    assert counted.num_estimates <= 5
    assert all(K / 2 <= count <= 16 * K for count in candidates[10:])  # what the selector accepts


@pytest.mark.parametrize("make", SPREAD)
def test_sorting_everything_is_the_exception(make: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    for _ in range(10):
        counted.selector(make(NUMEL), K)
    assert counted.num_sorts <= 1
    assert counted.num_estimates <= 3


def test_the_specification_sorts() -> None:
    values = torch.tensor([3.0, -5.0, 0.0, 4.0, -1.0])
    assert exact_top_k(values, 3).tolist() == [0, 1, 3]
    exact = ExactSelector()
    assert exact(values, 2).tolist() == [1, 3]
    assert exact.threshold == 0.0


# Accumulate and select ------------------------------------------------------------------------------------------------

KERNELS = [
    reference,
    cpu,
    pytest.param(compiled, marks=pytest.mark.skipif(not compiled.is_available(), reason="needs numba")),
]
CONSTANTS: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 1e-2, "sign": 1.0}


def step_on(
    v: Tensor, gradient: Tensor, u: Tensor | None = None, weight: Tensor | None = None, k: int = K, **constants: Any
) -> Segment:
    return Segment(residual=v, momentum_buffer=u, gradient=gradient, weight=weight, k=k, **{**CONSTANTS, **constants})


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Each twin in turn, whatever would be chosen."""
    module: ModuleType = request.param
    monkeypatch.setattr(selection, "kernels_for", lambda *tensors: module)
    return module


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("make", [torch.randn, laplace, row_scaled, mostly_zero, largest_at_the_end])
@pytest.mark.parametrize("nesterov", [False, True])
def test_accumulating_selects_what_sorting_would(name: str, make: Callable[[int], Tensor], nesterov: bool) -> None:
    """The exact top-k of the residual in every step of an error feedback, and the same residual and velocity."""
    selector = make_selector(name)
    weight = torch.randn(NUMEL)
    v, u, expected_v, expected_u = (torch.zeros(NUMEL) for _ in range(4))
    for _ in range(6):
        gradient = make(NUMEL)
        positions = selector.accumulate_(step_on(v, gradient, u, weight, nesterov=nesterov))
        reference.accumulate_(step_on(expected_v, gradient, expected_u, weight, nesterov=nesterov), 0.0)
        assert v.equal(expected_v)
        assert u.equal(expected_u)
        assert positions.equal(exact_top_k(expected_v, K))
        for tensor in (v, u, expected_v, expected_u):
            tensor[positions] = 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("make", [constant, all_zero, nearly_dead, few_levels, subnormal])
def test_accumulating_ties_and_dead_tensors(name: str, make: Callable[[int], Tensor]) -> None:
    selector, v = make_selector(name), torch.zeros(NUMEL)
    for _ in range(3):
        positions = selector.accumulate_(step_on(v, make(NUMEL)))
        assert is_top_k(v, K, positions)
        v[positions] = 0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("numel", [1, 17, SampledSelector.SMALL, SampledSelector.SMALL + 1])
def test_accumulating_in_small_tensors(name: str, numel: int) -> None:
    for k in {1, max(1, numel // 2), numel}:
        v, gradient = torch.randn(2, numel).unbind(0)
        expected = exact_top_k(v + gradient, k)
        assert make_selector(name).accumulate_(step_on(v, gradient, k=k)).equal(expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("threshold", [1e-45, 1e-10, 1.0, 3.2, 100.0, 1e30, float("inf"), float("nan"), -1.0])
def test_the_threshold_does_not_influence_what_is_accumulated(threshold: float) -> None:
    """A wrong one is found out after the pass, which is not repeated."""
    selector, v, gradient = SampledSelector(), torch.zeros(NUMEL), torch.randn(NUMEL)
    selector.threshold = threshold
    for _ in range(2):
        expected = v + gradient
        positions = selector.accumulate_(step_on(v, gradient))
        assert v.equal(expected)
        assert positions.equal(exact_top_k(expected, K))
    assert 0 < selector.threshold < 10


def test_a_steady_step_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample, no search of its own, no sort, once the threshold follows."""
    counted = Counted(monkeypatch)
    v, u = torch.zeros(2, NUMEL).unbind(0)
    for step in range(60):
        if step == 20:
            counted.num_estimates = 0
        positions = counted.selector.accumulate_(step_on(v, torch.randn(NUMEL), u))
        v[positions] = u[positions] = 0
    assert counted.num_sorts == 0
    assert counted.num_estimates == 0
