"""The kernel's count of what a network interface has sent, on a node of the lab and outside of it."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/proc/net/dev")  # of the network namespace that reads it; /sys is that of the machine
SENT_BYTES_COLUMN = 8  # behind the name: eight columns of what was received


def read_sent_bytes(interface: str) -> int | None:
    """Return the bytes that an interface has sent so far, headers included; None where the kernel does not count."""
    if not DEVICES.exists():
        return None
    for line in DEVICES.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[SENT_BYTES_COLUMN])
    return None
