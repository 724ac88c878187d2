"""Nodes as network namespaces, joined by a switch, with a token bucket on both directions of every node's link.

Nothing of the host's own network is touched: the switch has a namespace of its own, and the addresses (10.213.0.0/24)
exist only in there. The namespaces have no names: they belong to a process (`namespaces`), which removes everything
when the lab ends. Root is not needed where the kernel has user namespaces. With a round-trip time the switch sends what
comes from a node through a process that holds it back (`relay`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lightning_lowbw.tools.lab import namespaces, relay
from lightning_lowbw.tools.lab.namespaces import LabError

INTERFACE = "eth0"  # of each node, inside its namespace
SUBNET = "10.213.0"
MAX_NODES = 250
MIN_RATE, MAX_RATE = 1e3, 1e12
# The devices of the network namespace that reads it; /sys has the devices of the machine.
DEVICES = Path("/proc/net/dev")
SENT_BYTES_COLUMN = 8  # after the name there are eight columns of received traffic
UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

# The bucket: what may pass at once after a pause. A large one would let a whole sparse message through for free; one
# smaller than what the kernel hands over in one piece, 64 kB and 45 headers, has it cut into packets, with which a busy
# machine reaches 50 to 75 % of 1 Gb/s; and at 10 Gb/s one smaller than 0.4 ms of data does not reach the rate.
MIN_BURST_BYTES = 72 * 1024
BURST_S = 0.4e-3
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
QUEUE_S = 0.1  # packets that wait longer are dropped, so that TCP slows down
OWN_RTT_MS = 0.1  # at most, of the links without a relay, on an idle machine
RELAY_QUEUE = 10_000  # frames that wait to be read by the relay; the kernel's 500 overflow at 10 Gb/s


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

    Examples:
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


def read_sent_bytes(interface: str) -> int | None:
    """Return the bytes that an interface has sent so far, headers included; None where the kernel does not count."""
    if not DEVICES.exists():
        return None
    for line in DEVICES.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[SENT_BYTES_COLUMN])
    return None


class Network:
    """Nodes that reach each other over links of a given rate. A context manager: made on entry, gone on exit.

    Args:
        rates: of each node's link, in bit/s, both directions; None is unlimited.
        rtt_ms: round-trip time between two nodes. The links alone take up to `OWN_RTT_MS`; above, a relay is started.

    Raises:
        LabError: on entry, where namespaces or tc cannot be had (not Linux, forbidden, no iproute2, no /dev/net/tun).
    """

    def __init__(self, rates: Sequence[float | None], *, rtt_ms: float = 0.0) -> None:
        if not 1 <= len(rates) <= MAX_NODES:
            raise LabError(f"{len(rates)} nodes: give 1 to {MAX_NODES}.")
        if not 0 <= rtt_ms < math.inf:
            raise LabError(f"round-trip time of {rtt_ms} ms: give a number >= 0.")
        self.rates = list(rates)
        self.rtt_ms = rtt_ms
        self._owner: subprocess.Popen[str] | None = None
        self._namespaces: list[str] = []  # of the nodes and of the switch
        self._relay: subprocess.Popen[str] | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return len(self.rates)

    def enter(self, node: int) -> list[str]:
        """Return the words to put before a command that is to run on a node."""
        return self._enter(self._namespaces[node])

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"{SUBNET}.{node + 1}"

    def __enter__(self) -> Network:
        namespaces.check_requirements()
        try:
            self._make_namespaces()
            self._set_up()
        except BaseException as error:
            self._tear_down()
            if isinstance(error, LabError) and "not permitted" in str(error):
                raise LabError(
                    f"The kernel allows network namespaces here, but no interfaces in them ({error}). In a container, "
                    "start it with --privileged, or with the capabilities SYS_ADMIN and NET_ADMIN."
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
        for inside, interface in ((self.enter(node), INTERFACE), (self._enter(self._switch), f"node{node}")):
            if rate is None:
                # There may be none to delete.
                subprocess.run([*inside, "tc", "qdisc", "del", "dev", interface, "root"], capture_output=True)
                continue
            burst = max(MIN_BURST_BYTES, int(rate / 8 * BURST_S))
            bucket = ["tbf", "rate", f"{int(rate)}bit", "burst", f"{burst}b", "latency", f"{QUEUE_S * 1e3:.0f}ms"]
            _run(*inside, "tc", "qdisc", "replace", "dev", interface, "root", *bucket)

    def traffic(self, node: int) -> Traffic:
        """Return what has crossed a node's interface so far."""
        shown = json.loads(_run(*self.enter(node), "ip", "-s", "-j", "link", "show", INTERFACE))
        counters = shown[0]["stats64"]
        return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"])

    def end_processes(self) -> None:
        """End what still runs on the nodes: children that a script has left behind."""
        namespaces.end_processes({os.stat(namespace).st_ino for namespace in self._namespaces[: self.num_nodes]})

    @property
    def _switch(self) -> str:
        return self._namespaces[self.num_nodes]

    def _enter(self, namespace: str) -> list[str]:
        assert self._owner is not None
        theirs, ours = f"/proc/{self._owner.pid}/ns/user", "/proc/self/ns/user"
        is_same = os.stat(theirs).st_ino == os.stat(ours).st_ino  # root's; to enter one's own is an error
        return ["nsenter", *([] if is_same else [f"--user={theirs}", "--preserve-credentials"]), f"--net={namespace}"]

    def _make_namespaces(self) -> None:
        self._owner = subprocess.Popen(
            [sys.executable, "-I", "-S", namespaces.__file__, str(self.num_nodes + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # out of reach of Ctrl-C: it has to outlive this process
        )
        assert self._owner.stdout is not None
        descriptors = self._owner.stdout.readline().split()
        if not descriptors:
            raise LabError(namespaces.explain_refusal(self._owner.wait()))
        self._namespaces = [f"/proc/{self._owner.pid}/fd/{descriptor}" for descriptor in descriptors]

    def _set_up(self) -> None:
        switch = self._enter(self._switch)
        _run(*switch, "ip", "link", "add", "bridge", "type", "bridge")
        _run(*switch, "ip", "link", "set", "bridge", "up")
        if self.rtt_ms > OWN_RTT_MS:
            self._start_relay(switch)
        for node, rate in enumerate(self.rates):
            inside, port = self.enter(node), f"node{node}"
            peer = ["peer", "name", INTERFACE, "netns", self._namespaces[node]]
            _run(*switch, "ip", "link", "add", port, "type", "veth", *peer)
            _run(*switch, "ip", "link", "set", port, "master", "bridge", "up")
            if self._relay is not None:
                self._redirect(switch, port, inside)
            _run(*inside, "ip", "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
            _run(*inside, "ip", "link", "set", INTERFACE, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            self.set_rate(node, rate)

    def _start_relay(self, switch: Sequence[str]) -> None:
        delay_s = max(0.0, self.rtt_ms / 2e3 - relay.OWN_S)
        self._relay = subprocess.Popen(
            [*switch, sys.executable, "-I", "-S", relay.__file__, str(delay_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            reason = os.strerror(self._relay.wait())
            raise LabError(
                f"A round-trip time needs /dev/net/tun ({reason}). Load it with 'sudo modprobe tun', open it to users "
                "with 'sudo chmod 666 /dev/net/tun', or leave the round-trip time out."
            )
        queue = ["txqueuelen", str(RELAY_QUEUE)]
        _run(*switch, "ip", "link", "set", relay.DEVICE, *queue, "master", "bridge", "up")
        # A frame that comes back from the relay says nothing about where its sender is.
        _run(*switch, "ip", "link", "set", relay.DEVICE, "type", "bridge_slave", "learning", "off")

    def _redirect(self, switch: Sequence[str], port: str, inside: Sequence[str]) -> None:
        """Send frames of a node into the relay, and frames that return from it for the node to the node alone."""
        address = json.loads(_run(*inside, "ip", "-j", "link", "show", INTERFACE))[0]["address"]
        _run(*switch, "bridge", "fdb", "replace", address, "dev", port, "master", "static")
        _run(*switch, "tc", "qdisc", "add", "dev", port, "ingress")
        all_frames = ["parent", "ffff:", "u32", "match", "u32", "0", "0"]
        redirect = ["action", "mirred", "egress", "redirect", "dev", relay.DEVICE]
        _run(*switch, "tc", "filter", "add", "dev", port, *all_frames, *redirect)

    def _tear_down(self) -> None:
        if self._owner is None:
            return
        with uninterrupted():
            self._owner.communicate("end\n")
            if self._relay is not None:  # which the owner has ended
                self._relay.communicate()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals that would end the lab wait until the block is left; for its children, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
