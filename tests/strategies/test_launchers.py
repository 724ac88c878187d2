"""Every way of starting the ranks: popen, spawn, fork and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = SCRIPT.parents[2]
LAUNCHERS = {
    "popen": [sys.executable, str(SCRIPT), "dgc"],
    "spawn": [sys.executable, str(SCRIPT), "dgc_spawn"],
    "fork": [sys.executable, str(SCRIPT), "dgc_fork"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", str(SCRIPT), "dgc"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_launchers(launcher: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        timeout=180,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)]
    assert lines[0] == lines[1]
    world_size, step, density, weights = lines[0].split()
    assert (world_size, step, density) == ("2", "8", "0.0100")
    # The main process of spawn and fork gets rank 0's weights back.
    assert (tmp_path / "after0").read_text() == weights
