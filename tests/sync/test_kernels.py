"""Kernels are used by all ranks or by none: where one rank's fail, all are told, and rank 0 says so once."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.dispatch import Uses
from lightning_lowbw.sync import kernels
from tests.ranks import on_ranks
from tests.sync.problem import listening

CPU = torch.device("cpu")
REASON = "The kernels of numba do not work on cpu: OSError: no compiler."


def prepare(failing: tuple[int, ...], group: Any = None) -> tuple[str | None, list[str], bool]:
    """Return what is returned, what is logged, and whether plain torch is used from then on."""
    fault = REASON if dist.get_rank() in failing else None
    with pytest.MonkeyPatch.context() as patch, listening() as said:
        patch.setattr(dispatch, "_faults", {})
        patch.setattr(dispatch, "prepare", lambda *_: fault)
        sentence = kernels.prepare_kernels(CPU, Uses(), group)
        return sentence, said, dispatch.kernels_for(torch.zeros(8)) is reference


@on_ranks(4)
def test_kernels_that_fail_on_one_rank_are_used_by_none() -> None:
    sentence = f"All ranks compress in plain torch, which is slower. rank 2: {REASON}"
    assert prepare((2, 3)) == (sentence, [sentence] if dist.get_rank() == 0 else [], True)


@on_ranks(4)
def test_ranks_of_another_group_are_not_asked() -> None:
    """The groups are 0, 2, whose kernels work and are used, and 1, 3; the numbers are those in the group."""
    rank, groups = dist.get_rank(), [dist.new_group([first, first + 2]) for first in range(2)]
    returned, said, is_plain = prepare((3,), groups[rank % 2])
    assert bool(said) == (rank == 1)
    if rank % 2:
        assert str(returned).endswith(f". rank 1: {REASON}")
        assert is_plain
    else:
        assert (returned, is_plain) == (None, not dispatch.has_numba())


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = dispatch.prepare(torch.device("cuda", 77))
    assert reason == "Triton is not installed: pip install triton."


def test_who_compiles_for_long_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as said:
        for patience_s, seconds in ((0.3, 0.0), (0.05, 0.4)):
            monkeypatch.setattr(kernels, "PATIENCE_S", patience_s)
            monkeypatch.setattr(dispatch, "prepare", lambda *_, seconds=seconds: time.sleep(seconds))
            assert kernels.prepare_kernels(CPU, Uses()) is None
            time.sleep(0.4)  # one that is not cancelled would speak now
    assert said == [kernels.COMPILING]
