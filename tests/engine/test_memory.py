"""What a sparse step takes in memory beyond momentum SGD: the residual, and little else."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbw import DGC
from tests.ranks import run_ranks

SHAPE, NUM_TENSORS, STEPS = (4096, 1024), 4, 4
M_MMAP_THRESHOLD = -3  # of malloc.h
RESIDUAL_BYTES = NUM_TENSORS * SHAPE[0] * SHAPE[1] * 4


def peak_bytes() -> int:
    """Return the most memory that this process has had, its own pages only."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def train(is_compressed: bool) -> int:
    """Return what training has taken, at most, beyond what was there before."""
    gc.collect()
    forget_peak()
    before = peak_bytes()
    torch.manual_seed(0)
    parameters = {str(number): Parameter(torch.randn(SHAPE)) for number in range(NUM_TENSORS)}
    optimizer = SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if is_compressed:
        DGC(sparsity=[0.999]).attach(optimizer, parameters.items())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for parameter in parameters.values():
            parameter.grad = torch.randn(SHAPE)
        optimizer.step()
    return peak_bytes() - before


def measure() -> float:
    """Return what a sparse step takes beyond momentum SGD, in units of the residual."""
    # Each tensor gets pages of its own, which are given back with it.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    train(is_compressed=True)  # loads and compiles
    plain, compressed = train(is_compressed=False), train(is_compressed=True)
    return (compressed - plain) / RESIDUAL_BYTES


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_residual_is_all_that_is_added() -> None:
    for ratio in run_ranks(measure, 2, fresh=True):
        assert 0.5 < ratio < 1.02  # below 1, for SGD adds the decay to a copy of each gradient
