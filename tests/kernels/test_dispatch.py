"""Which twin runs, found out before the training starts."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.dispatch import compiled_for, kernels_for

CPU = torch.device("cpu")
needs_numba = pytest.mark.skipif(compiled_for() is None, reason="needs numba")


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_faults", {})


@needs_numba
def test_which_one_runs() -> None:
    v, narrow = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    assert kernels_for(v) is kernels_for(v, v) is compiled_for(v, narrow) is compiled_for()
    for others in ((v, narrow), (v, v[::2]), (torch.zeros(8, device="meta"),)):
        assert kernels_for(*others) is reference
    dispatch.disable(CPU, "no compiler")
    assert kernels_for(v) is reference
    assert dispatch.prepare(CPU) is None  # nothing to be tried any more
    assert dispatch.prepare(torch.device("meta")) is None  # for which there are no kernels


@needs_numba
def test_one_variant_of_each_kernel_is_compiled_before_the_training_whatever_the_default_dtype() -> None:
    """Otherwise ranks compile for seconds in their first step, or at each start in float64."""

    def variants() -> dict[str, int]:
        kernels = {name: each for name, each in vars(compiled_for()).items() if name.endswith("_kernel")}
        return {name: len(kernel.signatures) for name, kernel in kernels.items()}

    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert dispatch.prepare(CPU) is None
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(variants())
    assert all(found[0].values())
    assert found[0] == found[1]


@needs_numba
def test_a_numba_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, but not for this numpy, say; or not installed."""
    monkeypatch.setattr(dispatch, "_import_cpu", dispatch._import_cpu.__wrapped__)
    monkeypatch.setitem(sys.modules, "lightning_lowbw.kernels.cpu", None)  # as an import that fails
    assert kernels_for(torch.zeros(8)) is reference
    assert "Error" in str(dispatch.prepare(CPU))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.prepare(CPU) == "numba is not installed: pip install numba."


def test_a_kernel_that_leaves_its_device_unusable_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch instead would fail as well, at the first step, and the other ranks would wait."""

    def fault(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    monkeypatch.setattr(dispatch, "_try_triton", fault)
    reason = "do not work on {}: RuntimeError: CUDA error: an illegal memory access was encountered."
    assert str(dispatch.prepare(CPU)).endswith(reason.format("cpu"))  # which works still: all ranks use plain torch
    missing = torch.device("cuda", 77)
    with pytest.raises(RuntimeError, match=reason.format(missing) + r".*Start all ranks again without Triton"):
        dispatch.prepare(missing)
