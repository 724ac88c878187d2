"""Groups of a plain loop, which averages one tensor in rounds, as processes that a test can kill, stop and add."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_lowbw.elastic import torchft_membership, transfer
from lightning_lowbw.elastic.membership import Row, settings_text
from lightning_lowbw.elastic.torchft_membership import TorchftMembership, _import_torchft
from lightning_lowbw.elastic.transfer import StateClient
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.tools.lab.network import INTERFACE, Network

SIZE = 300_000  # more than the buffers of a socket hold: a member that waits does not get ahead of the awaited member
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Event:
    """What a group has come to: joined, healed, lost, committed or failed (a round), said, ended, raised."""

    group: int
    kind: str
    step: int
    members: tuple[str, ...]
    value: Any
    at_s: float


def average(total: torch.Tensor, group: dist.ProcessGroup) -> Any:
    return group.allreduce([total])


def die_in_the_middle(total: torch.Tensor, group: dist.ProcessGroup) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_in_the_middle(total: torch.Tensor, group: dist.ProcessGroup) -> Any:
    time.sleep(PATIENCE_S)


def stop_in_the_middle(total: torch.Tensor, group: dist.ProcessGroup) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return average(total, group)


class LateClient(StateClient):
    """Receives a state that is a round old when it arrives, the first time."""

    is_late = True

    def fetch(self, address: str, name: str, row: Row) -> dict[str, Any]:
        late = super().fetch(address, name, row)
        while self.is_late and super().fetch(address, name, row)["num_averages"] == late["num_averages"]:
            time.sleep(0.05)
        self.is_late = False
        return late


def send_slowly(connection: Any, tensor: torch.Tensor) -> None:
    """`transfer._send` on a link on which the state takes a second."""
    time.sleep(tensor.nbytes / (4 * SIZE))
    connection.sendall(tensor.view(torch.uint8).numpy())


def run_member(connection: Any, folder: str, group: int, options: dict[str, Any]) -> None:
    """Take part in rounds.

    Args:
        options: options of the membership, and of this loop: `rounds` to commit; `pause_s` between two rounds; `act`,
            the collective of round number `act_in`, counted from 0; `size` of the tensor; `value` of its elements;
            `num_sent` elements that are averaged, by default all; `late_s`, by which the member comes late to the first
            collective; `settings`; `constants` of the modules.
    """
    rounds, pause_s = options.pop("rounds", 10**6), options.pop("pause_s", 0.05)
    act, act_in, late_s = options.pop("act", None), options.pop("act_in", 0), options.pop("late_s", 0.0)
    step, members, num_sent = 0, (), options.pop("num_sent", None)
    weights = torch.full((options.pop("size", SIZE),), float(options.pop("value", 0.0)))

    settings, is_new = options.pop("settings", {"method": "as here"}), True

    def tell(kind: str, value: Any = None) -> None:
        connection.send(Event(group, kind, step, members, value, time.monotonic()))

    keep_stderr_in(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
    os.environ["TORCHFT_USE_OTEL"] = "true"  # which ends in an error where torchft is imported
    os.environ["GLOO_SOCKET_IFNAME"] = options.pop("interface")
    for name, value in options.pop("constants", {}).items():
        for module in (torchft_membership, transfer):
            if hasattr(module, name):
                setattr(module, name, value)
    said = logging.Handler(logging.WARNING)
    said.emit = lambda record: tell("said", record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER).addHandler(said)
    usual = {"name": f"group{group}", "gbit_per_s": 1.0}
    membership = TorchftMembership(**{**usual, **options})
    tell("joined")

    def row_of() -> Row:
        told = {"settings": settings_text(settings), "state_bytes": float(weights.nbytes)}
        return Row(step, tokens=0.1 * group, is_new=is_new, **told)

    def shared() -> dict[str, Any]:
        return {"tensors": {"weights": weights}, "num_averages": step, "run": "", "name": "plain"}

    def heal(state: Mapping[str, Any]) -> None:
        nonlocal weights, step
        assert state["name"] == "plain"
        membership.serve(None)
        weights.copy_(state["tensors"]["weights"])
        step = state["num_averages"]
        membership.serve(shared)

    try:
        membership.serve(shared)
        began_s = time.monotonic()
        if (state := membership.state_of_others(row_of(), bool)) is not None:
            heal(state)
            tell("healed", time.monotonic() - began_s)
        while step < rounds:
            time.sleep(pause_s)
            began_s, row = time.monotonic(), row_of()
            quorum = membership.quorum(row, bool)
            assert quorum is not None
            took_s, members = time.monotonic() - began_s, quorum.members
            if quorum.healed is not None:
                heal(quorum.healed)
                tell("healed", took_s)
                continue
            assert quorum.rows[quorum.rank][:-1] == row[:-1]
            in_it, act_in = act if act and not act_in else average, act_in - 1
            time.sleep(late_s)
            total, late_s = weights[:num_sent] + quorum.rank, 0.0
            try:
                membership.collective(partial(in_it, total))
            except RuntimeError as error:
                tell("lost", str(error)[:80])
            if membership.commit():
                membership.serve(None)
                weights = torch.cat([total / len(members), weights[len(total) :]])
                step, is_new = step + 1, False
                membership.serve(shared)
                tell("committed", (weights.double().sum().item(), took_s))
            else:
                tell("failed")
        tell("ended", listening_addresses())
    except Exception as error:  # noqa: BLE001 - the test raises it
        tell("raised", repr(error))
    finally:
        membership.close()


def listening_addresses() -> set[str]:
    """Return the addresses at which this process listens, as the kernel writes them."""
    own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                found.add(columns[1].partition(":")[0])
    return found


def run_on_node(words: Sequence[str], function: Callable[..., None], *arguments: Any) -> None:
    """Enter the namespaces that `nsenter` would with these words, and call a function."""
    libc = ctypes.CDLL(None, use_errno=True)
    for word in words:
        name, _, path = word.partition("=")
        if name in ("--user", "--net"):
            with open(path) as file:
                assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    function(*arguments)


def run_lighthouse(connection: Any, folder: str, options: dict[str, Any]) -> None:
    """Serve until killed; tell the port."""
    keep_stderr_in(folder)
    lighthouse = _import_torchft().LighthouseServer(quorum_tick_ms=50, **options)
    connection.send(int(lighthouse.address().rpartition(":")[2]))
    signal.pause()


def keep_stderr_in(folder: str) -> None:
    """Write the standard error to a file, including messages of native code."""
    with open(Path(folder) / "stderr", "ab") as file:
        os.dup2(file.fileno(), 2)


class Groups:
    """Groups of processes with one lighthouse."""

    def __init__(self, folder: str, network: Network | None, **lighthouse: Any) -> None:
        self.folder, self.network, self.port = folder, network, 0
        self.host = "127.0.0.1" if network is None else network.address(0)
        self.events: list[Event] = []
        self.processes: dict[int, Any] = {}
        self.connections: list[Any] = []
        self.lighthouse_options = {
            "min_replicas": 2,
            "join_timeout_ms": 2000,
            "heartbeat_timeout_ms": 1000,
        } | lighthouse
        self.lighthouse: Any = None
        self.start_lighthouse()

    def _start(self, node: int, function: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        ours, theirs = context.Pipe(duplex=False)
        words = [] if self.network is None else self.network.enter(node)
        process = context.Process(target=run_on_node, args=(words, function, theirs, self.folder, *arguments))
        process.start()
        theirs.close()
        return process, ours

    def start_lighthouse(self) -> None:
        """Start it, the second time at the same address."""
        options = {"bind": f"{self.host}:{self.port}", **self.lighthouse_options}
        self.lighthouse, connection = self._start(0, run_lighthouse, options)
        self.port = connection.recv()
        connection.close()

    def end_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.join()

    def start(self, group: int, **options: Any) -> None:
        options = {"lighthouse": f"{self.host}:{self.port}", "timeout_s": 5.0, **options}
        options["interface"] = "lo" if self.network is None else INTERFACE
        self.processes[group], connection = self._start(group + 1, run_member, group, options)
        self.connections.append(connection)

    def signal(self, group: int, number: signal.Signals) -> float:
        """Send a group a signal; return when."""
        now_s = time.monotonic()
        os.kill(self.processes[group].pid, number)
        return now_s

    def until(self, is_it: Callable[[Event], bool], after_s: float = 0.0) -> Event:
        """Return the first event of this kind, after a time; wait for it."""
        deadline_s, seen = time.monotonic() + PATIENCE_S, 0
        while True:
            for event in self.events[seen:]:
                assert event.kind != "raised", event
                if event.at_s > after_s and is_it(event):
                    return event
            seen = len(self.events)
            assert time.monotonic() < deadline_s, self.events[-20:]
            for connection in wait(self.connections, 1.0):
                try:
                    self.events.append(connection.recv())
                except (EOFError, ConnectionError):
                    self.connections.remove(connection)

    def first(self, group: int, kind: str, after_s: float = 0.0) -> Event:
        """Wait for the first event of a kind of a group."""
        return self.until(lambda event: (event.group, event.kind) == (group, kind), after_s)

    def committed(self, group: int, step: int = 0, size: int = 0, after_s: float = 0.0) -> Event:
        """Wait for a round of a group that is committed: at least this step, and of this many members."""

        def is_it(event: Event) -> bool:
            is_of = (event.group, event.kind) == (group, "committed")
            return is_of and event.step >= step and size in (0, len(event.members))

        return self.until(is_it, after_s)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        self.end_lighthouse()


@contextlib.contextmanager
def groups(network: Network | None = None, **lighthouse: Any) -> Iterator[Groups]:
    """Give groups, and end all their processes.

    Args:
        network: the lighthouse is on its node 0, group n on node n + 1; None is the loopback.
        **lighthouse: its options.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Groups(folder, network, **lighthouse)
        try:
            yield made
        finally:
            made.end()
