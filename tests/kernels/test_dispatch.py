"""Which twin runs, found out before the training starts."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.dispatch import compiled_for, kernels_for, what_is_missing

CPU = torch.device("cpu")
needs_numba = pytest.mark.skipif(compiled_for() is None, reason="needs numba")


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_disabled", set())


@needs_numba
def test_which_one_runs() -> None:
    v, narrow = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    assert kernels_for(v) is kernels_for(v, v) is compiled_for(v, narrow) is compiled_for()
    for others in ((v, narrow), (v, v[::2]), (torch.zeros(8, device="meta"),)):
        assert kernels_for(*others) is reference
    with dispatch.plain_torch(CPU):
        assert kernels_for(v) is reference
    assert kernels_for(v) is compiled_for()
    dispatch.disable(CPU)
    assert kernels_for(v) is reference
    assert what_is_missing(CPU) is None
    assert what_is_missing(torch.device("meta")) is None  # for which there are no kernels


@needs_numba
def test_numba_and_triton_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba is also named if it cannot be imported, because it is not for this numpy."""
    monkeypatch.setattr(dispatch, "_import_cpu", dispatch._import_cpu.__wrapped__)
    monkeypatch.setitem(sys.modules, "lightning_lowbw.kernels.cpu", None)  # as an import that fails
    assert kernels_for(torch.zeros(8)) is reference
    assert what_is_missing(CPU) == "numba is not installed, or cannot be imported: pip install numba."
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert what_is_missing(torch.device("cuda", 77)) == "Triton is not installed: pip install triton."
