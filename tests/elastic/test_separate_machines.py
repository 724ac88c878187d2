"""Groups as separate programs on machines of their own (network namespaces), and a network that is cut in two."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_lowbw.elastic import transfer
from lightning_lowbw.tools.lab import Network
from lightning_lowbw.tools.lab.network import INTERFACE
from tests.elastic import members
from tests.programs import ROOT
from tests.tools.lab.namespaces import needs_lab

pytestmark = [
    pytest.mark.slow,  # waits in real time: heartbeats, leases, transfers
    *needs_lab,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None, reason='needs torchft: pip install "lightning-lowbw[elastic]"'
    ),
]
CUT_S = 4.0
NOWHERE = "02:00:00:00:00:01"  # no host has this hardware address


def commands_of_the_docs() -> list[str]:
    (block,) = re.findall(r"## Three commands\n+```bash\n(.*?)```", (ROOT / "docs/elastic.md").read_text(), re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("#")]


class Programs:
    """Programs on the nodes of a network, and what they have written."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder, self.started = network, folder, list[subprocess.Popen[str]]()
        # Neither a launcher's environment, nor what the tests have set.
        self.environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.environment |= {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn", "GLOO_SOCKET_IFNAME": INTERFACE}
        self.environment["TORCHFT_LIGHTHOUSE"] = f"http://{network.address(0)}:29510"

    def start(self, node: int, *words: str) -> subprocess.Popen[str]:
        with (self.folder / f"node{node}").open("w") as file:
            options: dict[str, Any] = {"cwd": ROOT, "env": self.environment, "stdout": file, "stderr": file}
            self.started.append(subprocess.Popen([*self.network.enter(node), *words], text=True, **options))
        return self.started[-1]

    def until(self, node: int, words: str, count: int = 1, limit_s: float = 200.0) -> float:
        """Wait until a node has written words as often as told, and return the seconds."""
        began_s = time.monotonic()
        while len(re.findall(words, text := (self.folder / f"node{node}").read_text())) < count:
            assert time.monotonic() - began_s < limit_s, f"node {node} has not written {words!r}: {text[-2000:]}"
            time.sleep(0.05)
        return time.monotonic() - began_s

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self.network.end_processes()
        for program in self.started:
            program.wait()


def test_the_three_commands_of_the_documentation(tmp_path: Path) -> None:
    """With the example; only addresses and names of files are replaced."""
    lighthouse, variables, training = commands_of_the_docs()
    with Network([1e9] * 3) as network, Programs(network, tmp_path) as programs:

        def start(node: int, command: str) -> subprocess.Popen[str]:
            for old, new in (("10.8.0.1", network.address(0)), ("=wg0", f"={INTERFACE}")):
                command = command.replace(old, new)
            return programs.start(node, "bash", "-c", command)

        service, groups = start(0, lighthouse), []
        for node in (1, 2):
            example = f"{ROOT}/examples/elastic.py --group site_{node} --round-s 0.5 --max-steps 40"
            groups.append(start(node, f"{variables}\n{training}".replace("train.py", example)))
        statuses = [group.wait(300) for group in groups]
        assert service.poll() is None
    said = [(tmp_path / f"node{node}").read_text() for node in range(3)]
    assert statuses == [0, 0], said
    lines = [re.findall(r"^site_\d: (.*)$", each, re.MULTILINE) for each in said[1:]]
    assert lines[0] == lines[1]
    assert re.fullmatch(r"40 steps, \d+ rounds, accuracy 0\.\d+, checksum of the weights [0-9a-f]{8}", lines[0][0])


def test_a_group_of_two_hosts_loses_one_and_comes_back(tmp_path: Path) -> None:
    """Two processes on each, under FSDP, beside a group of one process."""
    timeout_s, together, alone = 20.0, r"Round \d+: groups (a, b|b, a);", r"Round \d+: groups b;"
    with Network([1e9] * 4) as network, Programs(network, tmp_path) as programs:

        def start(node: int, *options: str) -> subprocess.Popen[str]:
            run, script = (sys.executable, "-m", "lightning_lowbw.elastic.run"), f"{ROOT}/tests/elastic/hosts.py"
            return programs.start(node, *run, *options[:-2], script, *options[-2:], f"{timeout_s}")

        def start_a(node: int) -> subprocess.Popen[str]:
            meeting = f"--rdzv-endpoint={network.address(1)}:29400", f"--rdzv-conf=is_host={node == 1:d}"
            where = f"--local-addr={network.address(node)}", *meeting, "--rdzv-id=a"
            return start(node, "--nnodes=2", "--nproc-per-node=2", *where, "ElasticShardedStrategy", "a")

        times = "--join_timeout_ms", "10000", "--heartbeat_timeout_ms", "5000"
        programs.start(0, "torchft_lighthouse", "--bind", f"{network.address(0)}:29510", "--min_replicas", "1", *times)
        hosts = [start_a(1), start_a(2)]
        start(3, "ElasticStrategy", "b")
        programs.until(3, together, 3)
        cut(network, (2,), (0, 1, 3), "replace")
        cut(network, (0, 1, 3), (2,), "replace")
        began_s = time.monotonic()
        waited_s = programs.until(3, alone, len(re.findall(alone, (tmp_path / "node3").read_text())) + 1)
        assert waited_s < 15.0, "10 s, on a machine that is not busy"
        for node in (1, 2):
            programs.until(node, "a process has ended with (LostProcessError|RuntimeError)", 2)  # in a wait, or a step
        assert time.monotonic() - began_s < timeout_s + 10.0
        for host in hosts:
            host.kill()  # torchrun waits for the lost one
        cut(network, (2,), (0, 1, 3), "del")
        cut(network, (0, 1, 3), (2,), "del")
        start_a(1), start_a(2)
        programs.until(1, together, 3)


def cut(network: Network, nodes: Sequence[int], others: Sequence[int], what: str) -> None:
    """Drop the packets from some nodes to other nodes ("replace"), or send them again ("del")."""
    for node in nodes:
        for other in others:
            where = ["lladdr", NOWHERE, "nud", "permanent"] if what == "replace" else []
            words = ["ip", "neigh", what, network.address(other), *where, "dev", INTERFACE]
            subprocess.run([*network.enter(node), *words], check=True)


@pytest.mark.parametrize("reach_the_lighthouse", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_a_network_that_is_cut_in_two_has_no_two_trainings(size: int, reach_the_lighthouse: bool) -> None:
    """The half that reaches the lighthouse goes on, or the half with the lowest name; the other one takes its state."""
    half = size // 2
    nodes, others = range(1, half + 1), range(half + 1, size + 1)
    with Network([1e9] * (size + 1)) as network, members.groups(network, min_replicas=1) as made:
        for group in range(size):
            made.start(group, timeout_s=2.0, constants={"CONNECT_S": 1.0, "SILENT_S": 2})
        made.committed(0, size=size)
        cut(network, others, [*nodes, *([] if reach_the_lighthouse else [0])], "replace")
        began_s = time.monotonic() + 1.0  # a round may have been nearly over
        for group in range(half):
            made.committed(group, size=half, after_s=began_s)
        ended_s = time.monotonic() + CUT_S
        made.committed(0, after_s=ended_s)
        ended_s = time.monotonic()
        cut(network, others, [*nodes, *([] if reach_the_lighthouse else [0])], "del")
        together = [made.committed(group, size=size, after_s=ended_s) for group in range(size)]
        latest = max(event.step for event in together)
        assert len({made.committed(group, latest, size=size).value[0] for group in range(size)}) == 1
    between = [each for each in made.events if each.kind == "committed" and began_s < each.at_s < ended_s]
    assert {each.group for each in between} == {*range(half)}
    assert {len(each.members) for each in between} == {half}
    assert {each.group for each in made.events if each.kind == "healed"} == {*range(half, size)}
    said = [each for each in made.events if each.kind == "said" and "Training goes on with" in each.value]
    assert len(said) == half * (reach_the_lighthouse or half == 1), "once, not in each round"


@pytest.mark.parametrize(
    ("size", "bits_per_s", "constants"),
    [
        (members.SIZE, 4e6, {"CONNECT_S": 1.0, "STALL_S": 1.0, "CHUNK_BYTES": 1 << 13}),
        (50_000_000, 1e8, {}),
    ],
)
def test_a_state_arrives_that_takes_longer_than_any_timeout_while_the_others_have_rounds(
    size: int, bits_per_s: float, constants: dict[str, float]
) -> None:
    needs_s = size * 4 * 8 / bits_per_s
    patient = {"join_timeout_ms": 30_000, "heartbeat_timeout_ms": 10_000}
    with Network([1e9] * 3 + [bits_per_s], rtt_ms=100.0) as network, members.groups(network, **patient) as made:
        options = {"size": size, "gbit_per_s": bits_per_s / 1e9, "constants": constants, "num_sent": 1000}
        for group in range(2):
            made.start(group, pause_s=0.5, **options)
        made.committed(0, size=2)
        made.start(2, **options)
        healed = made.first(2, "healed")
        assert healed.value > needs_s > 2 * constants.get("CONNECT_S", transfer.CONNECT_S)
        assert healed.value < 2 * needs_s + 5.0
        new = made.committed(2, size=3)
        assert made.committed(0, new.step).value[0] == new.value[0]
    lost = [event for event in made.events if event.kind in ("lost", "failed") and event.group != 2]
    assert not lost
    rounds = [event for event in made.events if event.kind == "committed" and event.group == 0]
    meanwhile = [event for event in rounds if healed.at_s - healed.value < event.at_s < healed.at_s]
    assert len(meanwhile) > needs_s / 6, "which nobody has delayed"
    assert max(event.value[1] for event in meanwhile) < 0.5 * needs_s


def test_a_group_that_does_not_reach_all_groups_says_so_and_they_go_on() -> None:
    """It takes states of the group that it reaches, and is in no round until it reaches all groups."""
    options = {"constants": {"CONNECT_S": 1.0, "SILENT_S": 2}, "timeout_s": 5.0}
    with Network([1e9] * 4) as network, members.groups(network) as made:
        for group in range(3):
            made.start(group, **options)
        made.committed(2, size=3)
        cut(network, (3,), (2,), "replace")
        made.until(lambda event: event.group == 2 and event.kind == "said" and "is left out of a round" in event.value)
        for group in (0, 1):
            made.committed(group, size=2, after_s=time.monotonic())
        cut(network, (3,), (2,), "del")
        together = made.committed(2, size=3, after_s=time.monotonic())
        assert made.committed(0, together.step, size=3).value[0] == together.value[0]
