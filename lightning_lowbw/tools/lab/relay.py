"""A round-trip time for the lab's links: a process that holds back every frame that the nodes send.

The kernel's own way, netem, is missing from many kernels. `Network` starts this file by its path in the switch's
namespace, so it imports nothing of the package. It makes a TAP device, whose other end it holds: a frame that the
switch redirects into the device is read here, and written back when its time has come. Segments that the kernel has not
cut yet (up to 64 kB) pass as one frame, so that Python can carry gigabits; their headers are as if they had been.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

DEVICE = "relay"
OWN_S = 75e-6  # from the arrival of a frame to its delivery, without any delay
MAX_FRAME_BYTES = 66_000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
PR_SET_TIMERSLACK = 29  # linux/prctl.h


def make_device() -> int:
    """Make the TAP device in this process's network namespace; return its file descriptor.

    Raises:
        OSError: /dev/net/tun is not there, or closed to this user.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR  # in front of a frame: how the kernel is to cut it
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return descriptor


def forward(descriptor: int, delay_s: float) -> None:
    """Write back every frame after the delay, in the order in which they came; never returns."""
    waiting: deque[tuple[float, bytes]] = deque()  # when a frame is due
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([descriptor], [], [], timeout_s)[0]:
            with contextlib.suppress(BlockingIOError):  # all are read
                while len(waiting) == 0 or waiting[0][0] > time.monotonic():
                    waiting.append((time.monotonic() + delay_s, os.read(descriptor, MAX_FRAME_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(descriptor, waiting.popleft()[1])


def main() -> int:
    """Relay with the delay of the command line, in seconds; the exit status is the error number if it cannot."""
    try:
        descriptor = make_device()
    except OSError as error:
        return error.errno or 1
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # otherwise it sleeps 50 us too long
    with contextlib.suppress(PermissionError):  # ranks that compute on all cores would hold it up for milliseconds
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    forward(descriptor, float(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
