"""`make gpu-lab` without a GPU: a row, and the bucket before the sockets."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_lab

RATE = 2e6  # bytes per second
SENDS = """
import os, socket, time
rank, port, nbytes = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"]), 3_000_000
if rank == 0:
    with socket.create_server(("127.0.0.1", port)) as server:
        connection, _ = server.accept()
    started, received = time.monotonic(), 0
    while received < nbytes:
        received += len(connection.recv(1 << 16))
    print(f"took {time.monotonic() - started:.2f}", flush=True)
else:
    end = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
    data = bytes(nbytes)
    connection.setblocking(False)
    while data:  # as NCCL does, which asks again
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            time.sleep(0.001)
    import ctypes
    print("counted", ctypes.CDLL(None).token_bucket_sent(), flush=True)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_bucket_holds_a_rate_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_lab.LINKS, "a link", (f"{8 * RATE:.0f}bit", 0.0))
    log = tmp_path / "log"
    with log.open("wb") as file, gpu_lab.network_of("a link", gpu_lab.build_bucket(tmp_path)) as (prefixes, place):
        assert gpu_lab.run([sys.executable, "-c", SENDS], prefixes, place, file, 20.0) == 0
    said = dict(line.split() for line in log.read_text().splitlines())
    assert 3e6 / RATE * 0.9 < float(said["took"]) < 3e6 / RATE * 2
    assert int(said["counted"]) == 3_000_000


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
