"""Which twin runs, found out before the training starts: what `prepare` says, and what `disable` does."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from lightning_lowbw.ops import compiled, compiler, cpu, dispatch, gpu, reference
from lightning_lowbw.ops.dispatch import kernels_for

CPU = torch.device("cpu")
needs_numba = pytest.mark.skipif(not compiler.is_available(), reason="needs numba")


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_faults", [])
    monkeypatch.setattr(gpu, "_faults", [])


def test_which_one_runs() -> None:
    v, narrow = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    fastest = compiled if compiler.is_available() else cpu
    assert kernels_for(v) is kernels_for(v, v) is fastest
    assert kernels_for(v, narrow) is cpu
    assert kernels_for(v, v[::2]) is cpu
    assert kernels_for(torch.zeros(8, device="meta")) is reference


@needs_numba
def test_a_machine_in_order_has_nothing_to_say() -> None:
    assert dispatch.prepare(CPU) is None


def test_a_device_without_kernels_has_nothing_to_say() -> None:
    assert dispatch.prepare(torch.device("meta")) is None


@needs_numba
def test_a_pass_that_does_not_compile_is_told_and_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Any:
        raise OSError("libllvm: cannot open shared object file\nsecond line")

    monkeypatch.setattr(compiled, "_kernel", broken)
    reason = dispatch.prepare(CPU)
    assert reason == "The kernels of numba do not work on cpu: OSError: libllvm: cannot open shared object file."
    assert kernels_for(torch.zeros(8)) is compiled  # the ranks agree first
    dispatch.disable(CPU, reason)
    assert kernels_for(torch.zeros(8)) is cpu
    assert dispatch.prepare(CPU) is None  # nothing to be tried any more


@needs_numba
def test_a_pass_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "accumulate_", lambda segment, threshold: torch.zeros(3, dtype=torch.int64))
    assert "ArithmeticError" in str(dispatch.prepare(CPU))


@needs_numba
def test_a_numba_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, but not for this numpy, say; or not installed."""
    broken = types.ModuleType("numba")
    broken.__spec__ = sys.modules["numba"].__spec__
    monkeypatch.setitem(sys.modules, "numba", broken)
    monkeypatch.delitem(sys.modules, "numba.extending", raising=False)
    for module, cached in ((compiler, compiler.import_numba), (compiled, compiled._kernel)):
        monkeypatch.setattr(module, cached.__name__, cached.__wrapped__)
    assert "ImportError" in str(dispatch.prepare(CPU)) or "ModuleNotFoundError" in str(dispatch.prepare(CPU))
    monkeypatch.setitem(sys.modules, "numba", None)  # as an import that fails
    assert dispatch.prepare(CPU) == "numba is not installed: pip install numba."


def test_disabling_one_device_leaves_the_other() -> None:
    dispatch.disable(torch.device("cuda"), "no compiler")
    assert gpu._faults == ["no compiler"]
    assert compiler._faults == []
