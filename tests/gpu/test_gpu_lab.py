"""`make gpu-lab` without a GPU: a row, and the bucket before the sockets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_lab

NBYTES, RATE = 3_000_000, 2e6  # bytes, and bytes per second
SENDS = f"""
import ctypes, socket, threading, time
with socket.create_server(("127.0.0.1", 0)) as server:
    client = socket.create_connection(server.getsockname())
    connection, _ = server.accept()
client.settimeout(60.0)  # a send does not block then, as those of NCCL
started, received = time.monotonic(), 0
threading.Thread(target=client.sendall, args=(bytes({NBYTES}),)).start()
while received < {NBYTES}:
    received += len(connection.recv(1 << 16))
print(time.monotonic() - started, ctypes.CDLL(None).token_bucket_sent())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_bucket_holds_a_rate_and_counts(tmp_path: Path) -> None:
    bucket = {"LD_PRELOAD": str(gpu_lab.build_bucket(tmp_path)), gpu_lab.RATE: str(RATE)}
    said = subprocess.check_output([sys.executable, "-c", SENDS], env={**os.environ, **bucket}, text=True)
    took_s, counted = map(float, said.split())
    assert NBYTES / RATE * 0.9 < took_s < NBYTES / RATE * 2
    assert counted == NBYTES


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_row_is_written_without_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a row; start again, and measure nothing."""
    monkeypatch.setattr(gpu_lab, "has_namespaces", lambda: "as the test wants")
    monkeypatch.setattr(gpu_lab, "rows_of", lambda: [["step", "1 Gb/s, 0.5 ms", "int8"]])
    monkeypatch.setattr(sys, "argv", ["gpu_lab.py", "--device", "cpu", "--out", str(tmp_path), "--limit-s", "100"])
    gpu_lab.main()
    (row,) = json.loads((tmp_path / "gpu_lab.json").read_text())["rows"]
    assert row["parameters"] * 1.0 < row["bytes_per_step"] < row["parameters"] * 1.3  # a byte of each, and headers
    assert "| 1 Gb/s, 0.5 ms | int8 |" in (tmp_path / "gpu_lab.md").read_text()
    started = time.monotonic()
    gpu_lab.main()
    assert time.monotonic() - started < 2
