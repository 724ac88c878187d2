"""What the driver of gradients owes those around it: memory, and payloads that users derive from ours."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD

from lightning_lowbw import DGC, EveryStep, Method, TopK
from lightning_lowbw.sync.gradient import GradientSync
from tests.ranks import on_ranks

NUMEL, SPARSE = 4096, DGC(sparsity=[0.99])


@on_ranks()
def test_a_worker_is_free_when_nobody_keeps_it() -> None:
    """Its memory is that of the residuals: it must not wait for the collector of cycles."""
    gc.disable()
    try:
        parameter = nn.Parameter(torch.ones(NUMEL))
        optimizer = SGD([parameter], lr=0.1, momentum=0.9)
        worker = SPARSE.make_synchronizer(optimizer, [("w", parameter)], SPARSE.make_peers())
        for _ in range(2):
            parameter.grad = torch.ones(NUMEL)
            with worker.stepping():
                worker.exchange()
                optimizer.step()
        alive = weakref.ref(worker)
        del worker
        assert alive() is None
    finally:
        gc.enable()


@dataclass(frozen=True, kw_only=True)
class Largest(TopK):
    """A user's own payload."""


@on_ranks()
def test_a_subclass_of_a_payload_is_exchanged_as_that() -> None:
    parameter = nn.Parameter(torch.ones(NUMEL))
    optimizer = SGD([parameter], lr=0.1)
    worker = Method(when=EveryStep(), what=Largest(density=0.01)).attach(optimizer, [("w", parameter)])
    parameter.grad = torch.arange(NUMEL, dtype=torch.float32)
    optimizer.step()
    assert isinstance(worker, GradientSync)
    assert worker.residuals
    assert Largest.key == "top_k"
