"""The script of `make gpu` without a GPU: what it writes, and that a part which hangs is ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import PARTS, ROOT, Part, run


def test_each_part_is_written_down(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--parts", "streams", "--out", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("streams: passed in ")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["name"] for each in written["parts"]] == ["streams"]
    assert written["environment"]["torch"]
    assert 'skipped="' in (tmp_path / "streams.xml").read_text()


def test_a_part_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(tmp_path / 'alive')!r}).touch()"
    program = tmp_path / "hangs.py"
    lines = "import subprocess, sys", "print('begun', flush=True)", f"subprocess.run([sys.executable, '-c', {child!r}])"
    program.write_text("\n".join(lines))
    outcome = run(Part("hangs", 2, program=(str(program),)), tmp_path, "cpu")
    assert outcome.status is None
    assert str(outcome).startswith("hangs: ended at its limit in 2 s; begun")
    assert not (tmp_path / "alive").exists()


def test_all_parts_fit_into_the_time_of_a_machine_that_is_lent() -> None:
    assert sum(part.limit_s for part in PARTS) <= 480
    assert len({part.name for part in PARTS}) == len(PARTS)
