"""The k largest of a tensor are selected, on data of every shape, without looking through everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.reference import Segment
from lightning_lowbw.payloads.exchange import ALIGNMENT, Residuals
from lightning_lowbw.payloads.top_k import SampledSelector, Selection
from tests.kernels.bits import equal_bits
from tests.kernels.segments import tensors_of

NUMEL = 360 * 360  # above SampledSelector.SMALL
K = 130  # one in a thousand
CONSTANTS: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 1e-2, "sign": 1.0}


def cauchy(numel: int) -> Tensor:
    return torch.empty(numel).cauchy_()


def row_scaled(numel: int) -> Tensor:
    """Rows of a weight matrix differ by six orders of magnitude; strided samples miss most rows."""
    side = int(numel**0.5)
    return (torch.randn(side, side) * torch.logspace(-3, 3, side)[:, None]).reshape(-1)


def nearly_dead(numel: int) -> Tensor:
    """Fewer elements than k are not zero."""
    values = torch.zeros(numel)
    values[torch.randperm(numel)[: K // 2]] = 1e-3
    return values


KINDS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "cauchy": cauchy,
    "rows of other scales": row_scaled,
    "mostly zero": lambda numel: torch.randn(numel) * (torch.rand(numel) < 0.003),  # few candidates
    "constant": lambda numel: torch.full((numel,), -0.5),
    "all zero": torch.zeros,
    "nearly dead": nearly_dead,
}


def step_on(v: Tensor, gradient: Tensor, u: Tensor | None = None, weight: Tensor | None = None, k: int = K) -> Segment:
    return Segment(residual=v, momentum_buffer=u, gradient=gradient, weight=weight, k=k, **CONSTANTS)


EACH_BACKEND = pytest.mark.usefixtures("each_backend")


@pytest.fixture(params=["torch", "numba"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in turn, whatever would be chosen."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "_disabled", {"cpu"})
    elif dispatch.compiled_for() is None:
        pytest.skip("needs numba")


class Counting(SampledSelector):
    """Counts samples that are drawn, and candidates."""

    def __init__(self, threshold: float = 0.0) -> None:
        super().__init__(threshold)
        self.num_estimates, self.counts = 0, list[int]()

    def _estimate(self, sample: Tensor, numel: int, k: int) -> float:
        self.num_estimates += 1
        return super()._estimate(sample, numel, k)

    def _choose(self, values: Tensor, candidates: Tensor | None, k: int) -> Tensor | None:
        self.counts.append(0 if candidates is None else candidates.numel())
        return super()._choose(values, candidates, k)


@EACH_BACKEND
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_is_taken_is_what_sorting_would_take(make: Callable[[int], Tensor]) -> None:
    """In every step of an error feedback, not on the average; of equal ones the first; zeros mask nothing."""
    chosen = Selection()
    segment = step_on(torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL), torch.randn(NUMEL))
    (twin,) = copy.deepcopy([segment])
    for step in range(4):
        segment.gradient.copy_(make(NUMEL))
        twin.gradient.copy_(segment.gradient)
        masking = step % 3 != 2
        ((positions, values),) = chosen.compress_({"weight": segment}, masking=masking)
        expected = reference.compress_many_([twin], masking=masking)
        assert positions.equal(expected[0])
        assert equal_bits(values, expected[1])
        for one, other in zip(tensors_of(segment), tensors_of(twin), strict=True):
            assert equal_bits(one, other)


# The threshold --------------------------------------------------------------------------------------------------------


@EACH_BACKEND
@pytest.mark.parametrize("k", [1, NUMEL // 8 - 1, NUMEL // 8, NUMEL])
def test_every_k(k: int) -> None:
    selector = SampledSelector()
    for numel in (NUMEL, NUMEL, SampledSelector.SMALL, SampledSelector.SMALL + 1):
        v, some = torch.zeros(numel), min(k, numel)
        assert selector.accumulate_(step_on(v, torch.randn(numel), k=some)).equal(reference.largest(v, some))


@EACH_BACKEND
@pytest.mark.parametrize("threshold", [1e-45, 3.2, 100.0, float("nan"), -1.0])
def test_the_threshold_does_not_influence_the_result(threshold: float) -> None:
    """Whatever a checkpoint or another step left there. A wrong one is found out after the pass, which is done once."""
    selector, v, gradient = SampledSelector(threshold), torch.zeros(NUMEL), torch.randn(NUMEL)
    for _ in range(2):
        expected = v + gradient
        positions = selector.accumulate_(step_on(v, gradient))
        assert v.equal(expected)
        assert positions.equal(reference.largest(expected, K))
    assert 0 < selector.threshold < 20  # found its way back


@pytest.mark.parametrize("make", [cauchy, row_scaled])
def test_a_steady_step_is_one_pass(make: Callable[[int], Tensor]) -> None:
    """No sample and no second search, once the threshold follows a residual that grows and levels off."""
    selector, v = Counting(), torch.zeros(NUMEL)
    for step in range(50):
        v[selector.accumulate_(step_on(v, make(NUMEL)))] = 0
        if step == 20:
            selector.num_estimates = 0
    assert selector.num_estimates <= 1
    assert all(K <= count <= 16 * K for count in selector.counts[-25:] if count)


def test_the_threshold_follows_residuals_that_grow() -> None:
    """A signal that stays accumulates for 1 / density steps: two to four times k candidates, not fifteen."""
    selector, signal = Counting(), torch.randn(NUMEL)
    v, u = torch.zeros(2, NUMEL).unbind(0)
    for _ in range(60):
        positions = selector.accumulate_(step_on(v, signal + 0.1 * torch.randn(NUMEL), u))
        v[positions] = u[positions] = 0
    assert all(K <= count <= 5 * K for count in selector.counts[-40:])


def test_thresholds_are_kept_by_name() -> None:
    chosen = Selection()
    segments = {name: step_on(torch.randn(NUMEL), torch.randn(NUMEL)) for name in ("a", "b")}
    chosen.compress_({**segments, "small": step_on(torch.randn(9), torch.randn(9), k=1)}, masking=True)
    thresholds = chosen.thresholds
    assert list(thresholds) == ["a", "b", "small"]
    assert thresholds["a"] > 0
    assert thresholds["small"] == 0
    other = Selection()
    other.thresholds = thresholds
    assert other.thresholds == thresholds


# The store of residuals -------------------------------------------------------------------------------------------

CPU, META = torch.device("cpu"), torch.device("meta")
NUMELS = {"a": 5, "empty": 0, "scalar": 1, "b": 200}


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_all_lie_in_one_aligned_buffer_and_stay_until_all_are_moved() -> None:
    residuals = Residuals()
    residuals.ensure(NUMELS, CPU)
    assert len({storage(residuals[name]) for name in NUMELS}) == 1
    assert all(residuals[name].storage_offset() % ALIGNMENT == 0 for name in NUMELS)
    before = residuals["a"].normal_()
    residuals.ensure({"a": 5, "late": 7}, CPU)
    assert residuals["a"] is before
    assert list(residuals) == [*NUMELS, "late"]
    with pytest.raises(ValueError, match=r"'b' has 200 elements, and 199"):
        residuals.ensure({"new": 3, "b": 199}, CPU)
    assert "new" not in residuals
    residuals.to(META)
    assert all(residuals[name].device == META for name in residuals)
    assert residuals["late"].storage_offset() > 0
