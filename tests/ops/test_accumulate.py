"""Every twin of `accumulate_` against its specification: the same results to the bit."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, compiler, cpu, reference
from lightning_lowbw.ops.dispatch import kernels_for
from lightning_lowbw.ops.reference import SecondMoment, Segment, accumulate_, correct_, reach, sample_accumulated
from tests.ops.bits import equal_bits

needs_numba = pytest.mark.skipif(not compiler.is_available(), reason="needs numba")
TWINS = [cpu, pytest.param(compiled, marks=needs_numba)]
SIZES = [0, 1, 7]
SIZES += [size + more for size in (compiler.CHUNK, compiled.BLOCK, cpu.CHUNK) for more in (-1, 0, 1)]
SIZES += [5 * compiled.BLOCK + 3 * compiler.CHUNK + 3, 2 * cpu.CHUNK + 12345]
PLAIN: dict[str, Any] = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "sign": 1.0}


def make(
    numel: int, *, has_buffer: bool = True, has_weight: bool = True, narrow: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """v, u, G, w; the last three in `narrow`."""
    v, u, gradient, w = torch.randn(4, numel).unbind(0)
    return v.clone(), u.to(narrow) if has_buffer else None, gradient.to(narrow), w.to(narrow) if has_weight else None


def copies(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple(None if tensor is None else tensor.clone() for tensor in tensors)


def step_on(tensors: tuple[Any, ...], **constants: Any) -> Segment:
    names = ("residual", "momentum_buffer", "gradient", "weight")
    return Segment(**dict(zip(names, tensors, strict=False)), k=1, **constants)


def check(twin: ModuleType, tensors: tuple[Tensor | None, ...], threshold: float, **constants: Any) -> Tensor:
    """Run a twin and the specification; nothing but v and u may change."""
    actual, expected = copies(tensors), copies(tensors)
    positions: Tensor = twin.accumulate_(step_on(actual, **constants), threshold)
    assert positions.dtype == torch.int64
    assert positions.equal(accumulate_(step_on(expected, **constants), threshold))
    for one, other in zip(actual, expected, strict=True):
        assert one is other is None or equal_bits(one, other)
    for one, before in zip(actual[2:], tensors[2:], strict=True):
        assert one is before is None or equal_bits(one, before)  # type: ignore[arg-type]
    return positions


# The specification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("ahead", [0.0, 0.02])
def test_the_specification_is_decay_then_correction_then_comparison(
    ahead: float, nesterov: bool, has_buffer: bool
) -> None:
    v, u, gradient, w = make(1000, has_buffer=has_buffer)
    assert w is not None
    expected_v, expected_u = copies((v, u))
    correct_(expected_v, expected_u, -gradient + 0.1 * (w - ahead / 0.1 * v), momentum=0.9, nesterov=nesterov)
    constants: dict[str, Any] = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "sign": -1.0}
    if ahead:
        constants["ahead"] = ahead
    positions = accumulate_(step_on((v, u, gradient, w), **constants), threshold=1.0)
    torch.testing.assert_close(v, expected_v)
    assert (u is None) == (not has_buffer)
    if u is not None:
        torch.testing.assert_close(u, expected_u)
    assert positions.equal(reach(v, 1.0))
    assert 0 < positions.numel() < 1000


def test_the_decay_is_not_lost_in_a_narrow_gradient() -> None:
    v, gradient, w = torch.zeros(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    accumulate_(step_on((v, None, gradient, w), weight_decay=1e-4), threshold=0.0)
    torch.testing.assert_close(v, torch.full((3,), 1.0001))


@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize("stride", [1, 3, 7, 2000])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_a_sample_is_what_will_be_there(numel: int, stride: int, nesterov: bool, narrow: torch.dtype) -> None:
    tensors = make(numel, narrow=narrow)
    before = copies(tensors)
    segment = step_on(tensors, momentum=0.9, nesterov=nesterov, weight_decay=0.1, sign=-1.0)
    sample = sample_accumulated(segment, stride)
    for tensor, copy in zip(tensors, before, strict=True):
        assert equal_bits(tensor, copy)  # type: ignore[arg-type]
    accumulate_(segment, threshold=0.0)
    assert sample.equal(tensors[0][::stride].abs())


# The twins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sizes(twin: ModuleType, numel: int, has_buffer: bool, has_weight: bool, nesterov: bool) -> None:
    tensors = make(numel, has_buffer=has_buffer, has_weight=has_weight)
    for sign in (1.0, -1.0):
        decay = {"weight_decay": 0.37, "ahead": 0.05 if has_weight and sign > 0 else 0.0}
        positions = check(twin, tensors, momentum=0.9, nesterov=nesterov, sign=sign, threshold=3.0, **decay)
        assert positions.numel() < max(numel / 2, 2)


@pytest.mark.parametrize("twin", [reference, *TWINS])
@pytest.mark.parametrize("numel", [1, 7, compiler.CHUNK + 1, compiled.BLOCK, compiled.BLOCK + 1, cpu.CHUNK + 1])
@pytest.mark.parametrize("value", [None, float("nan"), -float("inf")])
@pytest.mark.parametrize("has_weight", [False, True])
def test_what_is_not_finite_counts_as_zero_and_is_told(
    twin: ModuleType, numel: int, value: float | None, has_weight: bool
) -> None:
    for where in {0, numel // 2, numel - 1}:
        v, u, gradient, w = make(numel, has_weight=has_weight)
        clean = gradient.clone()
        if value is not None:
            gradient[where], clean[where] = value, 0.0
        fault = torch.zeros((), dtype=torch.bool)
        expected, actual = copies((v, u, clean, w)), copies((v, u, gradient, w))
        found = twin.accumulate_(step_on(actual, momentum=0.9, weight_decay=0.37, fault=fault), 3.0)
        assert found.equal(accumulate_(step_on(expected, momentum=0.9, weight_decay=0.37), 3.0))
        assert bool(fault) == (value is not None)
        assert equal_bits(actual[0], expected[0])
        assert equal_bits(actual[1], expected[1])
        assert equal_bits(actual[2], gradient), "the gradient is read only"


@needs_numba
def test_a_fault_is_told_from_each_thread() -> None:
    numel, before = 2 * compiler.MIN_PER_THREAD, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for where in (None, 0, numel - 1):
            v, u, gradient, _ = make(numel)
            fault = torch.zeros((), dtype=torch.bool)
            if where is not None:
                gradient[where] = float("nan")
            compiled.accumulate_(step_on((v, u, gradient, None), momentum=0.9, fault=fault), 3.0)
            assert bool(fault) == (where is not None)
            assert v.isfinite().all()
    finally:
        torch.set_num_threads(before)


def second_moment(numel: int, amsgrad: bool) -> SecondMoment:
    square = torch.rand(numel) * 1e-2
    largest = square + torch.randn(numel).clamp_(min=0.0) * 1e-3 if amsgrad else None
    return SecondMoment(square=square, largest=largest, beta2=0.99, share=0.5, eps=1e-8, corrections=(0.7, 0.3))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("has_weight", "amsgrad"), [(False, False), (True, True)])
def test_adam(twin: ModuleType, numel: int, has_weight: bool, amsgrad: bool) -> None:
    """A dampened velocity, divided on its way into the residual. Not all roots of torch are rounded to the nearest."""
    tensors, moment = make(numel, has_weight=has_weight), second_moment(numel, amsgrad)
    constants = {"momentum": 0.9, "dampening": 0.9, "weight_decay": 0.37, "sign": -1.0}
    constants["ahead"] = 0.05 if has_weight else 0.0
    expected = replace(step_on(copies(tensors), **constants), second_moment=moment.map(Tensor.clone))
    actual = expected.map(Tensor.clone)
    threshold = 2.0
    sent, found = accumulate_(expected, threshold), twin.accumulate_(actual, threshold)
    for one, other in zip(actual.tensors[1:], expected.tensors[1:], strict=True):
        assert equal_bits(one, other)
    torch.testing.assert_close(actual.residual, expected.residual, rtol=1e-6, atol=1e-6)
    assert found.equal(reach(actual.residual, threshold))
    assert abs(found.numel() - sent.numel()) <= 1


@pytest.mark.parametrize("twin", [reference, *TWINS])
@pytest.mark.parametrize("numel", [7, compiled.BLOCK + 1, cpu.CHUNK + 12345])
def test_more_candidates_than_are_of_use_are_not_told(twin: ModuleType, numel: int) -> None:
    tensors = make(numel)
    expected = accumulate_(step_on(copies(tensors), momentum=0.9), 1.0)
    assert expected is not None
    count = expected.numel()
    for most in (count, count - 1, 1):
        actual = copies(tensors)
        found = twin.accumulate_(step_on(actual, momentum=0.9), 1.0, most)
        if count <= most:
            assert found is not None
            assert found.equal(expected)
        else:
            assert found is None
        assert equal_bits(actual[0], check_residual(tensors))


def check_residual(tensors: tuple[Tensor | None, ...]) -> Tensor:
    """Return the residual as the specification leaves it."""
    expected = copies(tensors)
    accumulate_(step_on(expected, momentum=0.9), 0.0)
    return expected[0]


def test_the_specification_of_adam() -> None:
    v, u, gradient, _ = make(1000)
    assert u is not None
    moment = second_moment(1000, amsgrad=False)
    square = 0.99 * moment.square + 0.5 * (1 - 0.99) * gradient**2
    expected_u = 0.9 * u + (1 - 0.9) * gradient
    expected_v = v + expected_u / 0.7 / ((square / 0.3).sqrt() + 1e-8)
    segment = step_on((v, u, gradient, None), momentum=0.9, dampening=0.9)
    accumulate_(replace(segment, second_moment=moment), 0.0)
    torch.testing.assert_close(moment.square, square)
    torch.testing.assert_close(u, expected_u)
    torch.testing.assert_close(v, expected_v)


def test_the_largest_takes_the_place_of_the_second_moment() -> None:
    moment = second_moment(1000, amsgrad=True)
    before = moment.map(Tensor.clone)
    gradient = torch.randn(1000)
    divisor = moment.take_(gradient)
    assert moment.largest is not None
    assert before.largest is not None
    assert moment.largest.equal(torch.maximum(before.largest, moment.square))
    assert divisor.equal(replace(before, square=moment.largest.clone(), largest=None, beta2=1.0).take_(gradient))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 1e-45, 0.5, 3.3, 1e30, float("inf"), float("nan")])
def test_thresholds(twin: ModuleType, threshold: float) -> None:
    """From everything over nothing to no comparison at all; more candidates than there is room for at first."""
    numel = 3 * cpu.CHUNK + 5
    positions = check(twin, make(numel), threshold=threshold, **PLAIN)
    assert positions.numel() == 0 if not 0 < threshold < 1e30 else positions.numel() > 0
    assert threshold != 1e-45 or positions.numel() == numel


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_narrow_dtypes(narrow: torch.dtype, nesterov: bool) -> None:
    numel = cpu.CHUNK + 17
    v, u, gradient, w = make(numel, narrow=narrow)
    constants: dict[str, Any] = {**PLAIN, "nesterov": nesterov, "weight_decay": 0.1}
    assert kernels_for(*step_on((v, u, gradient, w)).tensors) is cpu
    check(cpu, (v, u, gradient, w), threshold=3.0, **constants)
    check(cpu, (v, u.float(), gradient, None), threshold=3.0, **constants)  # type: ignore[union-attr]


@pytest.mark.parametrize("twin", TWINS)
def test_at_the_borders(twin: ModuleType) -> None:
    """The first and last element of each chunk, values equal to the threshold, and what cannot be compared."""
    numel = 2 * cpu.CHUNK + compiler.CHUNK + 3
    borders = [0, compiler.CHUNK - 1, compiler.CHUNK, cpu.CHUNK - 1, cpu.CHUNK, 2 * cpu.CHUNK, numel - 3, numel - 1]
    gradient = torch.zeros(numel)
    gradient[borders] = torch.tensor([2.0, -2.0, 3.0, -3.0] * 2)
    gradient[[5, 6, 7]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    tensors = (torch.zeros(numel), torch.zeros(numel), gradient, None)
    assert check(twin, tensors, threshold=2.0, **PLAIN).tolist() == sorted([*borders, 6, 7])


@pytest.mark.parametrize("twin", TWINS)
def test_many_steps_stay_the_same(twin: ModuleType) -> None:
    v, u, _, w = make(5000)
    actual_v, actual_u = copies((v, u))
    constants: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2, "sign": 1.0}
    for _ in range(20):
        gradient = torch.randn(5000)
        positions = twin.accumulate_(step_on((actual_v, actual_u, gradient, w), **constants), 4.0)
        assert positions.equal(accumulate_(step_on((v, u, gradient, w), **constants), 4.0))
        actual_v[positions] = v[positions] = 0
    assert u is not None
    assert equal_bits(actual_v, v)
    assert equal_bits(actual_u, u)


# The compiled one -----------------------------------------------------------------------------------------------------


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiler, "MIN_PER_THREAD", 100)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_numba
@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("numel", [0, 99, 199, 200, 301, 10_001])
@pytest.mark.parametrize("threshold", [0.0, 1e-45, 2.0])
def test_several_threads(numel: int, threshold: float) -> None:
    check(compiled, make(numel), threshold=threshold, **PLAIN)


@needs_numba
def test_a_kernel_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    njit = numba.njit

    def without_space(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise OSError(28, "No space left on device")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", without_space)
    monkeypatch.setattr(compiled, "_kernel", compiled._kernel.__wrapped__)
    check(compiled, make(100), threshold=1.0, **PLAIN)


# Which one runs -------------------------------------------------------------------------------------------------------


def test_numba_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # as an import that fails
    for cached in (compiler.import_numba, compiler._is_importable):
        monkeypatch.setattr(compiler, cached.__name__, cached.__wrapped__)
    assert kernels_for(torch.zeros(8)) is cpu


def test_numba_is_imported_at_first_use() -> None:
    """It takes part of a second, and is not there on every machine."""
    assert "numba" not in vars(compiled)
    sources = [path.read_text(encoding="utf-8") for path in Path(compiled.__file__).parents[1].rglob("*.py")]
    imports = [line for source in sources for line in source.splitlines() if re.match(r"\s*(import|from) numba", line)]
    assert imports
    assert all(line.startswith("    ") for line in imports)
