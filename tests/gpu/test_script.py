"""The script of `make gpu` without a GPU: what it writes, and that a part which hangs is ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu, steps_gpu
from benchmarks.gpu import PARTS, ROOT, Part


def test_a_part_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not let itself be interrupted."""
    monkeypatch.setattr(gpu, "GRACE_S", 0.2)
    child = f"import time, pathlib; time.sleep(2.5); pathlib.Path({str(tmp_path / 'alive')!r}).touch()"
    program = tmp_path / "hangs.py"
    program.write_text(
        "import signal, subprocess, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])"
    )
    outcome = gpu.run(Part("hangs", 1, program=(str(program),)), tmp_path, "cpu", 1.5)
    assert outcome.statuses == [None]
    assert str(outcome).startswith("hangs: ended at its limit in 2 s; begun")
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in steps_gpu.KINDS if kind != "profile"]


@pytest.mark.parametrize("kind", ["profile", *OTHERS])
def test_steps_of_all_methods(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/steps_gpu.py", kind, "--device", "cpu", "--out", str(tmp_path / kind)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / f"{kind}.json").read_text())["rows"]
    assert rows
    assert not any(row["failed"] for row in rows)
    if kind == "profile":
        parts = rows[0]["us of the host per step by part, one in another"]
        assert {"exchange", "prepare", "wait", "apply"} <= {*parts}


def test_all_parts_but_the_last_fit_into_their_time() -> None:
    """Those that are at their limit leave the last ones what the others do not need."""
    assert sum(part.limit_s for part in PARTS if "lightning" not in part.name) <= gpu.TOTAL_S
    assert len({part.name for part in PARTS}) == len(PARTS)
