"""The GPU's kernels on a machine without one: run by Triton's interpreter, and compiled but not run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.programs import run_without_lightning

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_interpreted() -> None:
    program = "from tests.kernels.interpreter import main; sys.exit(main())"
    output = run_without_lightning(program, TRITON_INTERPRET="1")
    assert " passed" in output
    assert "skipped" not in output


@needs_triton
@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """For the oldest GPU and two recent ones; with loads of 16 bytes where tensors are aligned for them."""
    program = "from tests.kernels.compile_kernels import main; main()"
    output = run_without_lightning(program, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    of_correct = [line for line in output.splitlines() if " correct" in line]
    assert sum(" aligned, " in line for line in of_correct) == len(of_correct) / 2 == 6
    for line in of_correct:
        assert (" aligned, " in line) == ("ld.global.v4.b32" in line) == ("st.global.v4.b32" in line), line
