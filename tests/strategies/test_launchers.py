"""Every way of starting the ranks: popen, spawn, fork and torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import TORCHRUN, run_python

SCRIPT = Path(__file__).with_name("launched.py")
LAUNCHERS = {
    "popen": [str(SCRIPT), "dgc"],
    "spawn": [str(SCRIPT), "dgc_spawn"],
    "fork": [str(SCRIPT), "dgc_fork"],
    "torchrun": [*TORCHRUN, str(SCRIPT), "dgc"],
    "local popen": [str(SCRIPT), "local_sgd"],
    "local spawn": [str(SCRIPT), "local_sgd_spawn"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_launchers(launcher: str, tmp_path: Path) -> None:
    run_python(tmp_path, *LAUNCHERS[launcher], str(tmp_path))
    lines = [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)]
    assert lines[0] == lines[1]
    world_size, step, density, weights = lines[0].split()
    assert (world_size, step, density) == ("2", "8", "nan" if "local" in launcher else "0.0100")
    # The main process of spawn and fork gets rank 0's weights back.
    assert (tmp_path / "after0").read_text() == weights
