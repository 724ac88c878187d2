"""The process that holds a lab's namespaces. It ends with the lab and removes everything, even if the lab is killed.

`Network` starts this file by its path, so it imports nothing of the package, which takes seconds to load. It makes as
many network namespaces as asked for, prints the file descriptors that hold them, and waits. When the lab sends a line
or is gone, it ends every process in these namespaces and then itself. The kernel removes a namespace that nobody holds.

A process that may not make network namespaces makes a user namespace first, where it is root and may.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Collection

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
POLL_S = 0.01
PATIENCE_S = 10.0  # for processes that are ended; one in a system call that cannot be interrupted may take for ever


def make_namespaces(count: int) -> list[int]:
    """Make network namespaces and return the file descriptors that hold them. This process is then in the last one.

    Raises:
        OSError: the kernel forbids it.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(CLONE_NEWNET)
    except PermissionError:
        _unshare(CLONE_NEWUSER)
        # Without this an ordinary user may not map its group: dropping groups could open files that are closed to them.
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {user} 1")
        _write("/proc/self/gid_map", f"0 {group} 1")
    descriptors = []
    for _ in range(count):
        _unshare(CLONE_NEWNET)
        descriptors.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    return descriptors


def end_processes(namespaces: Collection[int]) -> None:
    """End all other processes in network namespaces, and what they start meanwhile.

    Args:
        namespaces: inodes of the namespaces.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (found := find_processes(namespaces)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def find_processes(namespaces: Collection[int]) -> list[int]:
    """Return the other processes in network namespaces, given by their inodes."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if pid != os.getpid() and os.stat(f"/proc/{pid}/ns/net").st_ino in namespaces:
                found.append(pid)
    return found


def _unshare(flag: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare came with Python 3.12
    if libc.unshare(flag) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def main() -> int:
    """Hold as many namespaces as the command line says; the exit status is the error number where they are refused."""
    try:
        descriptors = make_namespaces(int(sys.argv[1]))
    except OSError as error:
        return error.errno or errno.EPERM
    sys.stdout.write(" ".join(map(str, descriptors)) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    end_processes({os.fstat(descriptor).st_ino for descriptor in descriptors})
    return 0


if __name__ == "__main__":
    sys.exit(main())
