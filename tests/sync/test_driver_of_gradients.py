"""What the driver of gradients owes those around it: errors in the middle of a step, users' own payloads, memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from lightning_lowbw import DGC, EveryStep, Method, NonFiniteGradientError, TopK
from lightning_lowbw.compress.selection import Selection
from lightning_lowbw.presets import preset
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from tests.ranks import run_ranks

NUMEL = 4096


def attached(method: Method, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, SGD]:
    parameter = nn.Parameter(torch.ones(NUMEL, dtype=dtype))
    return parameter, SGD([parameter], lr=0.1, momentum=0.9)


def take_step(parameter: nn.Parameter, optimizer: SGD) -> None:
    parameter.grad = torch.arange(NUMEL, dtype=torch.float32).to(parameter.dtype)
    optimizer.step()


def out_of_memory_while_accumulating() -> str:
    parameter, optimizer = attached(method := DGC(sparsity=[0.99]))
    worker = method.attach(optimizer, [("w", parameter)])
    take_step(parameter, optimizer)
    whole = Selection.compress_

    def failing(*args: object, **kwargs: object) -> None:
        whole(*args, **kwargs)  # type: ignore[arg-type]
        raise MemoryError

    Selection.compress_ = failing  # type: ignore[assignment,method-assign]
    try:
        with pytest.raises(MemoryError):
            take_step(parameter, optimizer)
    finally:
        Selection.compress_ = whole  # type: ignore[method-assign]
    return str(worker.state_dict()["torn"])


def test_a_step_that_fails_in_the_middle_is_named_in_the_state() -> None:
    assert run_ranks(out_of_memory_while_accumulating, 2) == ["the exchange of gradients after step 1"] * 2


def a_fault_elsewhere() -> str:
    """Rank 0 has a NaN, rank 1 no gradient: nothing of it has changed."""
    parameter, optimizer = attached(method := DGC(sparsity=[0.99]))
    worker = method.attach(optimizer, [("w", parameter)])
    take_step(parameter, optimizer)
    parameter.grad = torch.full((NUMEL,), torch.nan) if dist.get_rank() == 0 else None
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    return str(worker.state_dict()["torn"])


def test_a_rank_that_has_accumulated_nothing_is_not_named_for_a_fault_elsewhere() -> None:
    assert run_ranks(a_fault_elsewhere, 2) == ["the exchange of gradients after step 1", ""]


def worker_that_nobody_keeps() -> bool:
    gc.disable()
    try:
        parameter, optimizer = attached(method := DGC(sparsity=[0.99]))
        worker = method.make_synchronizer(optimizer, [("w", parameter)], method.make_peers())
        for _ in range(2):
            parameter.grad = torch.ones(NUMEL)
            with worker.stepping():
                worker.exchange()
                optimizer.step()
        alive = weakref.ref(worker)
        del worker
        return alive() is None
    finally:
        gc.enable()


def test_a_worker_is_free_when_nobody_keeps_it() -> None:
    """Its memory is that of the residuals: it must not wait for the collector of cycles."""
    assert run_ranks(worker_that_nobody_keeps, 2) == [True, True]


@dataclass(frozen=True, kw_only=True)
class Largest(TopK):
    """A user's own payload."""


def train_with_own_payload() -> bool:
    parameter, optimizer = attached(method := Method(when=EveryStep(), what=Largest(density=0.01)))
    worker = method.attach(optimizer, [("w", parameter)])
    take_step(parameter, optimizer)
    assert isinstance(worker, GradientSync)
    return bool(worker.residuals)


def test_a_subclass_of_a_payload_is_exchanged_as_that() -> None:
    assert run_ranks(train_with_own_payload, 2) == [True, True]
    assert Largest.key == "top_k"


def what_is_sent_of_complex_changes() -> bool:
    parameter, optimizer = attached(method := preset("sparse_loco").replace(k_steps=2), torch.complex64)
    worker = method.attach(optimizer, [("w", parameter)])
    assert isinstance(worker, LocalSync)
    return worker.params.is_compressed(method.what, parameter)


def test_changes_of_complex_weights_are_compressed() -> None:
    """Their gradients are sent whole, as there is a momentum to be corrected; a change is two real numbers."""
    assert run_ranks(what_is_sent_of_complex_changes, 2) == [True, True]
