"""All ranks use kernels or none does: if the kernels of one rank fail, all ranks are told, and rank 0 logs it once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.sync import kernels
from tests.kernels.workers import METHODS, OPTIMIZERS, make_worker
from tests.ranks import on_ranks
from tests.sync.problem import listening

CPU = torch.device("cpu")
REASON = "The compiled kernels do not work on cpu: OSError: libllvm: cannot open shared object file."


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_disabled", set())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_kernels_that_work_are_used(optimizer: str, name: str) -> None:
    worker = make_worker(METHODS[name], optimizer)
    assert kernels.what_fails([worker], [worker.method.what], CPU) is dispatch.what_is_missing(CPU)
    assert not any(state for state in worker.optimizer.state.values())


def break_kernel(patch: pytest.MonkeyPatch, *, raises: bool) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        if raises:
            raise OSError("libllvm: cannot open shared object file\nsecond line")
        return reference.take_(*arguments, **options) * 1.01

    patch.setattr(dispatch.compiled_for(), "take_", broken)


@pytest.mark.skipif(dispatch.compiled_for() is None, reason="needs numba")
@on_ranks(4)
def test_kernels_that_fail_on_one_rank_are_used_by_none() -> None:
    """Ranks are counted in the group: 1, 3. The kernels of the other group, 0, 2, work and are used."""
    rank, groups = dist.get_rank(), [dist.new_group([first, first + 2]) for first in range(2)]
    sentence = f"All ranks compress in plain torch, which is slower. rank 1: {REASON}"
    with pytest.MonkeyPatch.context() as patch, listening() as said:
        patch.setattr(dispatch, "_disabled", set())
        if rank == 3:
            break_kernel(patch, raises=True)
        found = kernels.prepare_kernels([make_worker()], groups[rank % 2])
        assert found == (sentence if rank % 2 else None)
        assert said == ([sentence] if rank == 1 else [])
        assert (dispatch.kernels_for(torch.zeros(8)) is reference) == bool(rank % 2)


@pytest.mark.skipif(dispatch.compiled_for() is None, reason="needs numba")
def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, raises=False)
    assert "something else than plain torch" in str(kernels.prepare_kernels([make_worker()]))


def test_a_rank_that_compiles_for_long_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as said:
        for patience_s, seconds in ((0.3, 0.0), (0.05, 0.4)):
            monkeypatch.setattr(kernels, "PATIENCE_S", patience_s)
            monkeypatch.setattr(kernels, "what_fails", lambda *_, seconds=seconds: time.sleep(seconds))
            assert kernels.prepare_kernels([make_worker()]) is None
            time.sleep(0.4)  # a timer that is not cancelled would speak now
    assert said == [kernels.COMPILING]
