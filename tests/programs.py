"""Run a program as a user does: in a process and a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# For `python -c`: parts of the package without the rest, which is Lightning for the most part and loads for seconds.
WITHOUT_LIGHTNING = f"""
import sys, types
package = sys.modules["lightning_lowbw"] = types.ModuleType("lightning_lowbw")
package.__path__ = [{str(ROOT / "lightning_lowbw")!r}]
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")


def run_python(folder: Path, *arguments: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; fails with what was printed if the program fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, timeout=timeout_s, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
