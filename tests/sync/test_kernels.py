"""Kernels are used by all ranks or by none: where one rank's fail, all are told, and rank 0 says so once."""

from __future__ import annotations

import importlib.util
import logging
import time

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.dispatch import Uses
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.sync import kernels
from tests.ranks import run_ranks
from tests.sync.problem import Said

CPU = torch.device("cpu")
REASON = "The kernels of numba do not work on cpu: OSError: no compiler."


def prepare(failing: tuple[int, ...], num_groups: int = 1) -> tuple[str | None, list[str], bool]:
    """Return what is returned, what is logged, and whether plain torch is used from then on."""
    rank, said, logger = dist.get_rank(), Said(), logging.getLogger(LOGGER)
    faults, of_rank = dispatch._faults, dispatch.prepare
    groups = [dist.new_group(list(range(first, 4, num_groups))) for first in range(num_groups)]
    dispatch._faults = {}
    dispatch.prepare = lambda device, uses=None: REASON if rank in failing else None
    logger.addHandler(said)
    try:
        sentence = kernels.prepare_kernels(CPU, Uses(), None if num_groups == 1 else groups[rank % num_groups])
        return sentence, said.messages, dispatch.kernels_for(torch.zeros(8)) is reference
    finally:
        logger.removeHandler(said)
        dispatch._faults, dispatch.prepare = faults, of_rank


def test_kernels_that_fail_on_one_rank_are_used_by_none() -> None:
    results = run_ranks(prepare, 4, (2, 3))
    sentence = f"All ranks compress in plain torch, which is slower. rank 2: {REASON}"
    assert [said for _, said, _ in results] == [[sentence], [], [], []]
    assert all(returned == sentence and is_plain for returned, _, is_plain in results)


def test_ranks_of_another_group_are_not_asked() -> None:
    """The groups are 0, 2, whose kernels work and are used, and 1, 3; the numbers are those in the group."""
    results = run_ranks(prepare, 4, (3,), 2)
    assert [bool(said) for _, said, _ in results] == [False, True, False, False]
    for returned, _, is_plain in results[::2]:
        assert (returned, is_plain) == (None, not dispatch.has_numba())
    for returned, _, is_plain in results[1::2]:
        assert str(returned).endswith(f". rank 1: {REASON}")
        assert is_plain


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = dispatch.prepare(torch.device("cuda", 77))
    assert reason == "Triton 3.2 or newer is not installed: pip install triton."


def test_who_compiles_for_long_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, logger = Said(), logging.getLogger(LOGGER)
    logger.addHandler(said)
    try:
        for patience_s, seconds in ((0.3, 0.0), (0.05, 0.4)):
            monkeypatch.setattr(kernels, "PATIENCE_S", patience_s)
            monkeypatch.setattr(dispatch, "prepare", lambda *_, seconds=seconds: time.sleep(seconds))
            assert kernels.prepare_kernels(CPU, Uses()) is None
            time.sleep(0.4)  # one that is not cancelled would speak now
    finally:
        logger.removeHandler(said)
    assert said.messages == [kernels.COMPILING]
