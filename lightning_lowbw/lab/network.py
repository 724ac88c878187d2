"""Nodes as network namespaces, joined by a switch, with a token bucket on both directions of every node's link.

Nothing of the host's own network is touched: the switch has a namespace of its own, and the addresses (10.213.0.0/24)
exist only in there. The names carry the process that made them, so that what a killed run leaves behind is found and
removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"  # of each node, inside its namespace
SUBNET = "10.213.0"
MAX_NODES = 250
MIN_RATE, MAX_RATE = 1e3, 1e12
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# The bucket: what may pass at once after a pause. A large one would let a whole sparse message through for free; one
# smaller than the 64 kB that the kernel hands over in one piece, or at 10 Gb/s than 0.4 ms of data, does not reach the
# rate.
MIN_BURST_BYTES = 64 * 1024
BURST_S = 0.4e-3
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
QUEUE_S = 0.1  # what waits longer is dropped, which TCP takes as the sign to slow down


_numbers = itertools.count()  # of the networks of this process


class LabError(RuntimeError):
    """The lab cannot be set up here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that crossed a node's interface, by the kernel's counters, headers included."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


def parse_rate(text: str) -> float | None:
    """Return a rate in bit/s, or None for "unlimited".

    Raises:
        LabError: it is not a number with one of the units bit, kbit, mbit, gbit, or out of range.

    Example:
        >>> parse_rate("2.5gbit"), parse_rate("unlimited")
        (2500000000.0, None)
    """
    text = text.strip().lower()
    if text == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", text)
    rate = 0.0 if match is None else float(match[1]) * UNITS[f"{match[2] or ''}bit"]
    if not MIN_RATE <= rate <= MAX_RATE:
        raise LabError(
            f"rate {text!r}: give a number with a unit, such as 1gbit, 200mbit or 512kbit (from 1kbit to 1000gbit), or "
            "'unlimited'."
        )
    return rate


class Network:
    """Nodes that reach each other over links of a given rate. A context manager: made on entry, gone on exit.

    Args:
        rates: of each node's link, in bit/s, both directions; None is unlimited.
        delay_ms: added to every packet that a node sends; needs the kernel's netem.

    Raises:
        LabError: on entry, where namespaces or tc cannot be had (not Linux, not root, no iproute2, no netem).
    """

    def __init__(self, rates: Sequence[float | None], *, delay_ms: float = 0.0) -> None:
        if not 1 <= len(rates) <= MAX_NODES:
            raise LabError(f"{len(rates)} nodes: give 1 to {MAX_NODES}.")
        if not 0 <= delay_ms < math.inf:
            raise LabError(f"delay of {delay_ms} ms: give a number >= 0.")
        self.rates = list(rates)
        self.delay_ms = delay_ms
        self._prefix = f"lowbw-lab-{_identity(os.getpid())}-{next(_numbers)}"

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.rates)

    def namespace(self, node: int) -> str:
        """Return the name of a node's network namespace, for `ip netns exec`."""
        return f"{self._prefix}-node{node}"

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"{SUBNET}.{node + 1}"

    def __enter__(self) -> Network:
        check_requirements()
        remove_leftovers()
        try:
            self._set_up()
        except BaseException as error:
            self._tear_down()
            if isinstance(error, LabError) and "not permitted" in str(error):
                raise LabError(
                    f"Root may not make network namespaces here ({error}). In a container start it with --privileged, "
                    "or with the capabilities SYS_ADMIN and NET_ADMIN."
                ) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tear_down()

    def set_rate(self, node: int, rate: float | None) -> None:
        """Change the rate of a node's link, both directions; takes effect at once."""
        self.rates[node] = rate
        for namespace, interface in ((self.namespace(node), INTERFACE), (self._switch, f"node{node}")):
            delays = self.delay_ms > 0 and interface == INTERFACE
            parent = ["parent", "1:1"] if delays else ["root"]
            if rate is None:
                # There may be none to delete.
                subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, *parent], capture_output=True)
                continue
            burst = max(MIN_BURST_BYTES, int(rate / 8 * BURST_S))
            bucket = ["tbf", "rate", f"{int(rate)}bit", "burst", f"{burst}b", "latency", f"{QUEUE_S * 1e3:.0f}ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, *parent, *bucket)

    def traffic(self, node: int) -> Traffic:
        """Return what has crossed a node's interface so far."""
        shown = json.loads(_run("ip", "-n", self.namespace(node), "-s", "-j", "link", "show", INTERFACE))
        counters = shown[0]["stats64"]
        return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"])

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _set_up(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, rate in enumerate(self.rates):
            inside, port = self.namespace(node), f"node{node}"
            _run("ip", "netns", "add", inside)
            peer = ["peer", "name", port, "netns", self._switch]
            _run("ip", "link", "add", INTERFACE, "netns", inside, "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", inside, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
            _run("ip", "-n", inside, "link", "set", INTERFACE, "up")
            _run("ip", "-n", inside, "link", "set", "lo", "up")
            if self.delay_ms > 0:
                self._add_delay(inside)
            self.set_rate(node, rate)

    def _add_delay(self, namespace: str) -> None:
        try:
            netem = ["netem", "delay", f"{self.delay_ms}ms", "limit", "100000"]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", *netem)
        except LabError as error:
            raise LabError(
                f"A delay needs the kernel's network emulator, which this one does not offer ({error}). Load it with "
                "'modprobe sch_netem', or leave the delay out."
            ) from error

    def end_processes(self) -> None:
        """End what still runs on the nodes: children that a script has left behind."""
        for node in range(self.num_nodes):
            _end_processes(self.namespace(node))

    def _tear_down(self) -> None:
        with uninterrupted():
            for name in _namespaces():
                if name.startswith(f"{self._prefix}-"):
                    _remove(name)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals that would end the lab wait until the block is left; for its children, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_requirements() -> None:
    """Check that namespaces can be made here.

    Raises:
        LabError: it says what is missing, and the command that helps.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"The lab is made of Linux network namespaces; this is {sys.platform}.")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise LabError(f"{program!r} is not installed: apt-get install iproute2 (or your system's package of it).")
    if os.geteuid() != 0:
        raise LabError(f"Network namespaces need root: sudo {shlex.join(sys.argv) or 'lowbw-lab'}")


def remove_leftovers() -> list[str]:
    """End and remove what runs left behind that are no longer alive; return the names of the namespaces."""
    removed = []
    for name in _namespaces():
        match = re.match(r"lowbw-lab-((\d+)x\d+)-", name)
        if match is not None and _identity(int(match[2])) != match[1]:
            _remove(name)
            removed.append(name)
    return removed


def _identity(pid: int) -> str:
    """Return a name for a process that no later process of the same number has; empty if there is none."""
    with contextlib.suppress(OSError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if after_name[0] != "Z":
            return f"{pid}x{after_name[19]}"  # field 22: start time, in clock ticks since boot
    return ""


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove(namespace: str) -> None:
    """End the processes in a namespace of ours, then delete it; its interfaces go with it."""
    _end_processes(namespace)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _end_processes(namespace: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
