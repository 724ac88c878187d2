"""Searches on a CPU, by each module that selects; and what only numba's does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.reference import Segment
from tests.programs import run_without_lightning

CPU = dispatch.compiled_for()
MODULES = [reference, pytest.param(CPU, marks=pytest.mark.skipif(CPU is None, reason="needs numba"))]
KINDS = ("normal", "ties", "not finite", "denormal", "one magnitude", "all bits")
SIZES = [1, 64, 65, 1000, 70_001]
# One element; all sent; ending within the tensor; longer than it; SparseLoCo's.
CHUNKS = [(1, 1, 0), (7, 7, 3), (50, 2, 5), (1 << 20, 4096, 3), (4096, 64, 64)]


def make(kind: str, numel: int) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if kind == "ties":
        values = (2.0 * values).round()
    elif kind == "not finite":
        values[:: max(1, numel // 3)] = torch.inf
        values[-1] = torch.nan
    elif kind == "denormal":
        values *= 1e-39
    elif kind == "one magnitude":
        values = values.sign()
    elif kind == "all bits":  # a NaN than which nothing is larger
        values = torch.full((numel,), -1, dtype=torch.int32).view(torch.float32)
    return values


def by_sorting(values: Tensor, k: int) -> Tensor:
    """Sort; of equal ones take the first."""
    return values.abs().sort(descending=True, stable=True).indices[:k].sort().values


def by_sorting_chunks(values: Tensor, chunk: int, k: int, k_last: int) -> Tensor:
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, len(values), chunk):
        mine = values[start : start + chunk]
        found.append(by_sorting(mine, k if len(mine) == chunk else k_last) + start)
    return torch.cat(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", MODULES)
def test_the_largest_are_those_of_a_stable_sort(module: ModuleType, kind: str) -> None:
    for numel in SIZES:
        values = make(kind, numel)
        for k in {0, 1, max(1, numel // 100), numel // 2, numel - 1, numel}:
            assert module.largest(values, k).equal(by_sorting(values, k)), (numel, k)
        for chunk, k, k_last in CHUNKS:
            if numel <= 1000 * chunk:  # the slow twin goes from chunk to chunk
                sizes = chunk, k, min(k_last, numel % chunk)
                assert module.largest(values, k, chunk, sizes[2]).equal(by_sorting_chunks(values, *sizes)), sizes


@pytest.mark.parametrize("threshold", [0.7, float("nan"), 1e39, 1e-45, 1e-60])
@pytest.mark.parametrize("module", MODULES)
def test_what_reaches_a_threshold(module: ModuleType, threshold: float) -> None:
    """More candidates than are of use are not told."""
    for kind in KINDS:
        for numel in (64, 70_001):
            values = make(kind, numel)
            expected = (values.abs() >= torch.tensor(threshold)).nonzero().squeeze(1)
            for most in (numel, len(expected), max(0, len(expected) - 1), 1):
                step = Segment(residual=values.clone(), gradient=torch.zeros(numel), k=1)
                for found in (module.accumulate_(step, threshold, most), module.reach(values, threshold, most)):
                    assert found is None if len(expected) > most else found.equal(expected)


@pytest.mark.skipif(CPU is None, reason="needs numba")
@pytest.mark.parametrize("numel", [0, 199, 301, 10_001])
def test_several_threads(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread gets a part of a chunk; each thread sets the fault."""
    assert CPU is not None
    monkeypatch.setattr(CPU, "MIN_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    values = make("ties", max(1, numel))[:numel]
    for chunk in (1, 64, 301, 5000):
        k_last = min(1, numel % chunk)
        assert CPU.largest(values, 1, chunk, k_last).equal(by_sorting_chunks(values, chunk, 1, k_last))
    for where in {None, 0, numel - 1} if numel else {None}:
        v, gradient, fault = torch.zeros(numel), values.clone(), torch.zeros((), dtype=torch.bool)
        if where is not None:
            gradient[where] = torch.nan
        step = Segment(residual=v, gradient=gradient, k=1, fault=fault)
        assert CPU.accumulate_(step, 2.0).equal(reference.reach(gradient, 2.0))
        assert bool(fault) == (where is not None)
        assert CPU.accumulate_(step, 1e-45, 3) is None or numel < 10


@pytest.mark.skipif(CPU is None, reason="needs numba")
def test_what_is_compiled_is_kept_and_works_where_it_cannot_be(tmp_path: Path) -> None:
    assert CPU is not None
    assert CPU.take_kernel.stats.cache_path
    (tmp_path / "file").write_text("")
    program = "from lightning_lowbw.kernels import cpu; import torch; assert not cpu.largest(torch.ones(9), 1).any()"
    run_without_lightning(program, NUMBA_CACHE_DIR=str(tmp_path / "file" / "folder"))
