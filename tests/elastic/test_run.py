"""`python -m lightning_lowbw.elastic.run`: processes of a group are forked with all imports, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT

# What a process has, before it imports anything; then what has to work in it.
PROGRAM = """
import json, os, random, sys
import beside
import numpy
has = {"pid": os.getpid(), "loaded": {"lightning.pytorch", "torch._dynamo"} <= {*sys.modules}, "argv": sys.argv[1:]}
has["drawn"] = [random.random(), numpy.random.random()]
print(json.dumps({**has, "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}))
from torch.utils.data import DataLoader
"""
FAULTY = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), 9)  # the agent has all that was printed
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    raise RuntimeError("a fault of the script")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "2":
    raise KeyboardInterrupt  # without an error, torch's agent would wait for ever for a result
print(json.dumps([each for batch in DataLoader(range(4), num_workers=2) for each in batch.tolist()]))
sys.exit(3)
"""
STOPPED = """
import atexit, signal, time
signal.signal(signal.SIGTERM, lambda *_: (print('"stopped"'), sys.exit()))
atexit.register(print, '"at exit"')
print('"ready"')
time.sleep(100)
"""


def start(folder: Path, program: str, *command: str) -> subprocess.Popen[str]:
    (folder / "beside.py").touch()
    (folder / "program.py").write_text(PROGRAM + program)
    # Buffered: the lines of two processes stay whole.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    command = (sys.executable, "-m", "lightning_lowbw.elastic.run", *command)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def test_a_group_begins_again(tmp_path: Path) -> None:
    """After a kill, an error and an interrupt, with all modules; the group ends with the last error."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    group = start(folder, FAULTY, "--nproc-per-node=1", "--max-restarts=3", "../elsewhere/program.py", "--lr", "1")
    out, errors = group.communicate(timeout=120)
    *attempts, loaded = map(json.loads, out.splitlines())
    assert [each["attempt"] for each in attempts] == [0, 1, 2, 3]
    assert len({each["pid"] for each in attempts}) == 4
    assert len({number for each in attempts for number in each["drawn"]}) == 8
    assert all(each["loaded"] and each["argv"] == ["--lr", "1"] for each in attempts)
    assert loaded == [0, 1, 2, 3]
    assert group.returncode == 3
    assert all(what in errors for what in ("SIGKILL", "program.py", "RuntimeError: a fault of the script"))


def test_a_signal_reaches_all_processes_of_a_group(tmp_path: Path) -> None:
    """As systemd sends it: to torch's agent and to the server, too, with which its processes would end at once."""
    group = start(tmp_path, STOPPED, "--nproc-per-node=2", "-m", "program")
    assert group.stdout is not None
    said = [json.loads(group.stdout.readline()) for _ in range(4)]
    assert said.count("ready") == 2
    os.killpg(group.pid, signal.SIGTERM)
    assert sorted(group.communicate(timeout=60)[0].splitlines()) == ['"at exit"'] * 2 + ['"stopped"'] * 2


def test_processes_whose_agent_is_killed_are_asked_to_end(tmp_path: Path) -> None:
    """Also where Ctrl-C is ignored, as in the background of a shell."""
    group = start(tmp_path, STOPPED, "--nproc-per-node=2", "program.py")
    assert group.stdout is not None
    said = [json.loads(group.stdout.readline()) for _ in range(4)]
    assert said.count("ready") == 2
    group.kill()
    assert group.communicate(timeout=60)[0].count("at exit") == 2
