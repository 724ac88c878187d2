"""What a sparse step takes in memory beyond momentum SGD: the residual, and little else."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbw import DGC
from tests.ranks import on_ranks, run_ranks
from tests.sync.problem import make_parameters, take_step

STEPS = 3  # in the second most elements are candidates, because what is kept has doubled
SHAPES = {"four tensors": [(2048, 1024)] * 4, "one tensor": [(8192, 1024)]}
SMALL = [(1024, 1024)]
M_MMAP_THRESHOLD = -3  # of malloc.h
RESIDUAL_BYTES = 8192 * 1024 * 4


def peak_bytes() -> int:
    """Return the most memory that this process has had, its own pages only."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def train(noise: Tensor, shapes: list[tuple[int, int]], *, is_compressed: bool) -> int:
    """Return what training has taken, at most, beyond what was there before.

    Weights and gradients are copies of parts of the noise: drawing them took most of the time.
    """

    def copied(shape: tuple[int, int], place: int) -> Tensor:
        return noise[place:][: shape[0] * shape[1]].view(shape).clone()

    gc.collect()
    forget_peak()
    before = peak_bytes()
    parameters = {str(number): Parameter(copied(shape, number)) for number, shape in enumerate(shapes)}
    optimizer = SGD(parameters.values(), lr=0.1, momentum=0.9)  # with a weight decay it would copy a gradient
    if is_compressed:
        DGC(sparsity=[0.999]).attach(optimizer, parameters.items())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = copied(shapes[number], 10 * (step + 1) + number)
        optimizer.step()
    return peak_bytes() - before


def measure() -> dict[str, list[float]]:
    """Return what a sparse step takes beyond momentum SGD, in units of the residual, of pairs of runs."""
    # Each tensor gets pages of its own, which are given back with it.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    noise = torch.randn(RESIDUAL_BYTES // 4 + 100)
    train(noise, SMALL, is_compressed=True)  # loads and compiles
    ratios = dict[str, list[float]]()
    for name, shapes in SHAPES.items():
        for _ in range(9):
            plain, compressed = (train(noise, shapes, is_compressed=each) for each in (False, True))
            ratios.setdefault(name, []).append((compressed - plain) / RESIDUAL_BYTES)
    return ratios


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_one_residual_and_two_percent_are_all_that_is_added() -> None:
    # The median of both ranks' pairs: now and then a thread has pages of its own at the peak, or gives some back.
    ranks = run_ranks(measure, 2, fresh=True)
    for name in SHAPES:
        ratios = [ratio for each in ranks for ratio in each[name]]
        assert 0.98 < median(ratios) < 1.02, (name, ratios)


@on_ranks()
def test_a_worker_is_free_when_nobody_keeps_it() -> None:
    """Its memory is that of the residuals: it must not wait for the collector of cycles."""
    method, parameters = DGC(sparsity=[0.99]), make_parameters({"w": (64, 64)})
    optimizer = SGD(parameters.values(), lr=0.1, momentum=0.9)
    gc.disable()
    try:
        worker = method.make_synchronizer(optimizer, parameters.items(), method.make_peers())
        for step in range(2):
            take_step(worker, parameters, step)
        alive = weakref.ref(worker)
        del worker
        assert alive() is None
    finally:
        gc.enable()
