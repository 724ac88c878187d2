"""The throttled nodes: rates, counters, exit status, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lightning_lowbw.tools.lab import LabError, Network, launch, parse_rate, relay
from lightning_lowbw.tools.lab.cli import main
from tests.programs import WITHOUT_LIGHTNING
from tests.tools.lab.namespaces import needs_lab

ROOT = Path(__file__).resolve().parents[3]
HAS_TUN = os.access("/dev/net/tun", os.R_OK | os.W_OK)
needs_tun = pytest.mark.skipif(not HAS_TUN, reason="/dev/net/tun is not there, or closed to this user")

SENDER = """
import os, socket, struct, sys, time
size = int(float(sys.argv[1]) * 1e6)
if os.environ["RANK"] == "1":
    server = socket.create_server((os.environ["LAB_ADDRESS"], 5001))
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
elif os.environ["RANK"] == "0":
    for attempt in range(200):
        try:
            connection = socket.create_connection((os.environ["LAB_ADDRESS"], 5001))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    started = time.monotonic()
    connection.sendall(bytes(size))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    seconds = time.monotonic() - started
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
    print(8 * size / seconds, *struct.unpack_from("I", info, 148), flush=True)
"""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not merely waiting to be reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def children(pid: int) -> list[int]:
    """Return a lab's own processes, which own its namespaces and relay; other labs are none of our business."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and re.search(r"lab/(namespaces|relay)\.py", (folder / "cmdline").read_text()):
                found.append(int(folder.name))
    return found


def measure(network: Network, megabytes: float, *changes: tuple[float, float]) -> tuple[float, list[int]]:
    """Send from node 0 to node 1; return the rate in bit/s, the bytes that node 0 sent and node 1 received, and the
    shortest round trip in us (tcpi_min_rtt of Linux)."""
    with tempfile.TemporaryFile() as output:
        report = launch(
            network,
            [sys.executable, "-c", SENDER, str(megabytes)],
            environment={"LAB_ADDRESS": network.address(1)},
            changes=changes,
            timeout_s=60.0,
            output=output,
        )
        output.seek(0)
        text = output.read().decode()
    assert report.status == 0, text
    rate, *by_tcp = text.split()
    return float(rate), [report.traffic[0].sent_bytes, report.traffic[1].received_bytes, *map(int, by_tcp)]


def test_rates() -> None:
    texts = {"1gbit": 1e9, "2.5Gbit": 2.5e9, "200mbit": 2e8, "9600bit": 9600, " Unlimited": None}
    assert {text: parse_rate(text) for text in texts} == texts
    for text in ("", "fast", "1", "0mbit", "-1gbit", "1gb", "1 gbit/s", "7bit", "9999999gbit"):
        with pytest.raises(LabError, match="1gbit, 200mbit"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--timeout", "nan"], "timeout nan: give a number of seconds, above 0"),
        (["--change", "nan:1gbit"], "--change nan:1gbit: give a time from 0 to"),
        (["--change", "1:quick"], "give SECONDS:RATE"),
        (["--nodes", "3", "--inter", "1gbit,1gbit"], "2 rates for 3 nodes; give one"),
        (["--report", "."], "--report .: this is a folder; give the name of a file"),
    ],
)
def test_flags_are_checked_first(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--", "true"]) == 2
    assert message in capsys.readouterr().err


def test_without_tc_or_with_too_many_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--nodes", "1000000000000", "--", "true"])
    assert "--nodes 1000000000000: give a number from 1 to 250" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--", "true"]) == 2
    message = capsys.readouterr().err
    assert "apt-get install iproute2" in message or "this is" in message


class TestTheLab:
    pytestmark = needs_lab

    @pytest.mark.slow
    @pytest.mark.alone
    def test_a_rate_can_change_during_the_run(self) -> None:
        with Network([5e7, 5e7]) as network:
            slow = measure(network, 12)[0]
        with Network([5e7, 5e7]) as network:
            assert measure(network, 12, (0.6, 1e9))[0] > 1.5 * slow

    @pytest.mark.slow
    @pytest.mark.alone
    def test_ranks_of_a_node_are_not_throttled(self) -> None:
        with Network([1e7]) as network, tempfile.TemporaryFile() as output:
            command = [sys.executable, "-c", SENDER, "40"]
            environment = {"LAB_ADDRESS": network.address(0)}
            report = launch(network, command, ranks_per_node=2, environment=environment, timeout_s=30.0, output=output)
            assert report.status == 0
            output.seek(0)
            assert float(output.read().split()[0]) > 1e8
            assert report.traffic[0].sent_bytes < 1e5

    def test_the_environment_is_that_of_torchrun(self) -> None:
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NCCL_HOSTID"  # the last as NCCL would know two machines
        script = f"import os; print(*(os.environ[n] for n in '{names}'.split()))"
        with Network([None, None]) as network, tempfile.TemporaryFile() as output:
            report = launch(network, [sys.executable, "-c", script], ranks_per_node=2, output=output)
            output.seek(0)
            assert output.read().split() == [b"0", b"4", b"0", b"2", b"node0"]
        assert report.exit_status == [0, 0, 0, 0]

    @pytest.mark.parametrize(("failing", "handler"), [(0, "signal.SIG_IGN"), (1, "lambda *_: sys.exit(77)")])
    def test_the_rank_that_failed_is_blamed(
        self, failing: int, handler: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lightning_lowbw.tools.lab.launcher.GRACE_S", 0.5)
        script = (
            "import os, signal, sys, time\n"
            f"if os.environ['RANK'] == '{failing}': time.sleep(1.0); sys.exit(3)\n"
            f"signal.signal(signal.SIGTERM, {handler}); print('I am well', flush=True); time.sleep(60)"
        )
        assert main(["--inter", "unlimited", "--", sys.executable, "-c", script]) == 3
        assert "rank 1, its last lines" not in capfd.readouterr().err or failing == 1
        assert children(os.getpid()) == []

    def test_a_timeout_ends_all_and_shows_them(self, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "report.json"
        script = "import os, time; print('waiting as', os.environ['RANK'], flush=True); time.sleep(60)"
        assert main(["--timeout", "2", "--report", str(path), "--", sys.executable, "-c", script]) == 124
        shown = capfd.readouterr()
        assert "within 2 s" in shown.err
        assert "waiting as 1" in shown.err
        assert '"timed_out": true' in path.read_text()
        assert children(os.getpid()) == []

    def test_a_change_that_fails_ends_the_run(self) -> None:
        with Network([1e6]) as network, pytest.raises(LabError, match="could not be changed"):
            launch(network, ["sleep", "60"], changes=[(0.1, 0.1)])

    @needs_tun
    def test_a_rate_and_a_round_trip_time(self) -> None:
        rate, rtt_ms = 1e8, 50.0
        with Network([rate] * 3, rtt_ms=rtt_ms) as network:
            measured, (sent, received, least_rtt_us) = measure(network, 4)
            third = network.traffic(2)
        assert rtt_ms - 0.15 < least_rtt_us / 1e3 < rtt_ms + 2.0  # the relay and the processor take part of it
        assert 0.3 * rate < measured < 1.05 * rate
        assert received == pytest.approx(sent, rel=0.02)
        assert third.received_bytes < 0.01 * sent

    def test_a_round_trip_time_without_tun(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        refusing = tmp_path / "relay.py"
        refusing.write_text(f"raise SystemExit({errno.EACCES})")
        monkeypatch.setattr(relay, "__file__", str(refusing))
        with pytest.raises(LabError, match=r"needs /dev/net/tun \(Permission denied\)"), Network([1e9], rtt_ms=5.0):
            pass
        assert children(os.getpid()) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_nothing_is_left_behind(self, number: signal.Signals, tmp_path: Path) -> None:
        marker = tmp_path / "rank"
        script = (
            "import os, subprocess, sys, time\n"
            "child = subprocess.Popen(['sleep', '60'], start_new_session=True, stderr=subprocess.DEVNULL)\n"
            "open(sys.argv[1] + os.environ['RANK'], 'w').write(f'{os.getpid()} {child.pid}'); time.sleep(60)"
        )
        program = WITHOUT_LIGHTNING + "from lightning_lowbw.tools.lab.cli import main; sys.exit(main(sys.argv[1:]))"
        flags = ["--rtt", "5"] if HAS_TUN else []
        lab = subprocess.Popen(
            [sys.executable, "-c", program, *flags, "--", sys.executable, "-c", script, str(marker)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        files = [Path(f"{marker}{rank}") for rank in (0, 1)]
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        helpers = children(lab.pid)
        assert len(helpers) == 1 + HAS_TUN
        lab.send_signal(number)
        _, message = lab.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while any(map(is_running, [*pids, *helpers])) and time.monotonic() < deadline:
            time.sleep(0.01)  # if it was killed, the owner of the namespaces cleans up after it
        assert not any(map(is_running, [*pids, *helpers]))
        if number != signal.SIGKILL:
            assert lab.returncode == 130
            assert "interrupted" in message
