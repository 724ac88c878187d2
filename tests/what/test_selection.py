"""Both selections take the k largest, on data of every shape; the sampled one without sorting everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, compiler, cpu, reference
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.what import selection
from lightning_lowbw.what.selection import SELECTIONS, SampledSelector, Selection, exact_top_k, exact_top_k_of
from tests.ops.bits import equal_bits

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


def select(kind: Selection | str, values: Tensor, k: int) -> Tensor:
    """What is selected where nothing comes in; the values stay."""
    selection = Selection(kind) if isinstance(kind, str) else kind
    segment = Segment(
        residual=values.clone(), momentum_buffer=None, gradient=torch.zeros_like(values), weight=None, k=k
    )
    ((positions, _),) = selection.compress_({"weight": segment}, masking=True)
    return positions


@pytest.mark.parametrize("make", DISTINCT)
def test_sampled_selects_the_same_set_as_exact(make: Callable[[int], Tensor]) -> None:
    """A recall of 100 % in every one of several calls with fresh data, not on the average."""
    sampled = SampledSelector()
    for _ in range(6):
        values = make(NUMEL)
        positions = sampled(values, K)
        assert is_top_k(values, K, positions)
        assert positions.equal(exact_top_k(values, K))


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("make", WITH_TIES)
def test_of_equal_ones_the_first_are_selected(name: str, make: Callable[[int], Tensor]) -> None:
    chosen = Selection(name)
    for _ in range(3):
        values = make(NUMEL)
        segment = step_on(values, torch.zeros(NUMEL))
        assert select(chosen, values, K).equal(reference.largest(segment))


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
        assert is_top_k(values, k, select(name, values, k))


@pytest.mark.parametrize("numel", [SampledSelector.SMALL, SampledSelector.SMALL + 1])
def test_both_sides_of_the_size_limit(numel: int) -> None:
    sampled, values = SampledSelector(), torch.randn(numel)
    assert is_top_k(values, 65, sampled(values, 65))
    assert (sampled.threshold > 0) == (numel > SampledSelector.SMALL)


@pytest.mark.parametrize("threshold", [1e-45, 1e-10, 1.0, 3.2, 100.0, 1e30, float("inf"), float("nan"), -1.0])
def test_the_threshold_does_not_influence_the_result(threshold: float) -> None:
    """Whatever a checkpoint or another step left there."""
    sampled, values = SampledSelector(), torch.randn(NUMEL)
    sampled.threshold = threshold
    for _ in range(2):
        assert sampled(values, K).equal(exact_top_k(values, K))
    assert 0 < sampled.threshold < 10  # found its way back


def test_the_values_are_not_touched() -> None:
    values = torch.randn(NUMEL)
    before = values.clone()
    SampledSelector()(values, K)
    exact_top_k(values, K)
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
    exact = Selection("exact")
    assert select(exact, values, 2).tolist() == [1, 3]
    assert exact.thresholds == {}


# Correct, select and take ---------------------------------------------------------------------------------------------

KERNELS = [
    reference,
    cpu,
    pytest.param(compiled, marks=pytest.mark.skipif(not compiler.is_available(), reason="needs numba")),
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
def test_what_is_taken_is_what_sorting_would_take(name: str, make: Callable[[int], Tensor], nesterov: bool) -> None:
    """In every step of an error feedback: positions, values, residual and velocity are the reference's."""
    chosen = Selection(name)
    segment = step_on(torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL), torch.randn(NUMEL), nesterov=nesterov)
    (twin,) = copy.deepcopy([segment])
    for step in range(6):
        segment.gradient.copy_(make(NUMEL))
        twin.gradient.copy_(segment.gradient)
        masking = step % 3 != 2
        ((positions, values),) = chosen.compress_({"weight": segment}, masking=masking)
        expected = reference.compress_many_([twin], masking=masking)
        assert positions.equal(expected[0])
        assert equal_bits(values, expected[1])
        assert equal_bits(segment.residual, twin.residual)
        assert segment.momentum_buffer is not None
        assert twin.momentum_buffer is not None
        assert equal_bits(segment.momentum_buffer, twin.momentum_buffer)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("make", [constant, all_zero, nearly_dead, few_levels, subnormal])
def test_ties_and_dead_tensors(name: str, make: Callable[[int], Tensor]) -> None:
    """A dead tensor sends zeros for padding, which mask nothing."""
    chosen, segment = Selection(name), step_on(torch.zeros(NUMEL), torch.zeros(NUMEL), torch.full((NUMEL,), 1e-9))
    assert segment.momentum_buffer is not None
    for _ in range(3):
        segment.gradient.copy_(make(NUMEL))
        (before,) = copy.deepcopy([segment])
        reference.accumulate_(before, 0.0)
        ((positions, values),) = chosen.compress_({"weight": segment}, masking=True)
        assert is_top_k(before.residual, K, positions)
        assert values.equal(before.residual[positions])
        assert before.momentum_buffer is not None
        before.momentum_buffer[positions[values != 0]] = 0
        assert segment.momentum_buffer.equal(before.momentum_buffer)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("masking", [False, True])
def test_nothing_is_lost(name: str, masking: bool) -> None:
    """Sent + residual is the corrected gradient to the bit; only what is sent is masked. Awkward sizes, all at once."""
    chosen = Selection(name)
    sizes = {"scalar": (1, 1), "none": (0, 0), "all": (17, 17), "small": (1000, 1), "large": (NUMEL, K)}
    chunks = {"chunks": (1000, 3, 64, 5), "a chunk": (640, 64, 64, 0), "less than a chunk": (50, 3, 64, 7)}
    layouts: dict[str, Any] = {key: {"numel": n, "k": k} for key, (n, k) in sizes.items()}
    layouts |= {key: dict(zip(("numel", "k", "chunk", "k_last"), each, strict=True)) for key, each in chunks.items()}
    segments = {
        key: step_on(torch.randn(n := layout.pop("numel")), torch.randn(n), torch.randn(n), torch.randn(n), **layout)
        for key, layout in layouts.items()
    }
    for _ in range(3):
        before = copy.deepcopy(segments)
        for each in before.values():
            reference.accumulate_(each, 0.0)
        for (key, segment), (positions, values) in zip(
            segments.items(), chosen.compress_(segments, masking=masking), strict=True
        ):
            assert positions.dtype == torch.int64
            assert positions.shape == values.shape == (segment.num_sent,)
            sent = torch.zeros_like(segment.residual).index_put((positions,), values)
            assert equal_bits(sent + segment.residual, before[key].residual), key
            expected = before[key].momentum_buffer
            assert expected is not None
            if masking:
                expected[positions] = 0
            assert segment.momentum_buffer is not None
            assert equal_bits(segment.momentum_buffer, expected), key


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("numel", [1000, NUMEL])
def test_what_is_not_a_number_does_not_vanish(name: str, numel: int) -> None:
    """Nor does it keep others from being sent. The engine looks for faults before: this is what happens without."""
    chosen, v = Selection(name), torch.zeros(numel)
    for step in range(3):
        gradient = torch.randn(numel)
        gradient[5] = float("nan") if step == 1 else 0.0
        ((positions, _),) = chosen.compress_({"weight": step_on(v, gradient, k=K)}, masking=True)
        assert positions.shape == (K,)
        assert bool(v.isnan()[5]) == (step > 0)
        assert int(v.isnan().sum()) == (step > 0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "layout", [(64, 4, 1), (64, 1, 1), (64, 64, 3), (1 << 20, 4096, 16), (1, 1, 0), (100, 100, 100)]
)
@pytest.mark.parametrize("numel", [1, 7, 64, 65, 127, 128, 1000])
@pytest.mark.parametrize("make", [torch.randn, few_levels])
def test_chunks(layout: tuple[int, int, int], numel: int, make: Callable[[int], Tensor]) -> None:
    """Of each whole chunk its k largest, and the k_last of the rest, without a rest none; of equal ones the first."""
    chunk, k, k_last = layout
    segment = step_on(make(numel), torch.zeros(numel), k=k, chunk=chunk, k_last=min(k_last, numel % chunk))
    before = segment.residual.clone()
    expected = exact_top_k_of(segment)
    assert expected.equal(reference.largest(segment))
    ((positions, values),) = Selection().compress_({"weight": segment}, masking=True)
    assert positions.equal(expected)
    assert values.equal(before[positions])
    assert bool((positions.diff() > 0).all())
    for start in range(0, numel, chunk):
        inside = positions[(positions >= start) & (positions < start + chunk)] - start
        of_chunk = before[start : start + chunk]
        assert inside.numel() == (k if of_chunk.numel() == chunk else segment.k_last)
        assert inside.numel() == 0 or is_top_k(of_chunk, inside.numel(), inside)


def test_thresholds_are_kept_by_name() -> None:
    chosen = Selection()
    segments = {name: step_on(torch.randn(NUMEL), torch.randn(NUMEL)) for name in ("a", "b")}
    chosen.compress_({**segments, "small": step_on(torch.randn(9), torch.randn(9), k=1)}, masking=True)
    thresholds = chosen.thresholds
    assert list(thresholds) == ["a", "b", "small"]
    assert thresholds["a"] > 0
    assert thresholds["small"] == 0
    other, twins = Selection(), copy.deepcopy(segments)
    other.thresholds = thresholds
    assert other.thresholds == thresholds
    found, again = chosen.compress_(segments, masking=True), other.compress_(twins, masking=True)
    assert all(one[0].equal(two[0]) for one, two in zip(found, again, strict=True))
    assert other.thresholds.keys() == chosen.thresholds.keys()


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
    assert 0 < selector.threshold < 20


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


def test_the_threshold_goes_along_with_residuals_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that stays accumulates for 1 / density steps: two to four times k candidates, not fifteen."""
    counted = Counted(monkeypatch)
    narrow, counts = counted.selector._narrow, []

    def counting_narrow(values: Tensor, candidates: Tensor | None, k: int) -> Tensor | None:
        counts.append(0 if candidates is None else candidates.numel())
        return narrow(values, candidates, k)

    monkeypatch.setattr(counted.selector, "_narrow", counting_narrow)
    signal = torch.randn(NUMEL)
    v, u = torch.zeros(2, NUMEL).unbind(0)
    for _ in range(60):
        positions = counted.selector.accumulate_(step_on(v, signal + 0.1 * torch.randn(NUMEL), u))
        v[positions] = u[positions] = 0
    assert max(counts[-40:]) <= 5 * K
    assert min(counts[-40:]) >= K
