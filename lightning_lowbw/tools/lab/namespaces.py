"""Network namespaces: made and removed by a process of its own; and why the kernel may refuse them.

`Network` starts this file by its path, so it imports nothing of the package, which takes seconds to load. The process
makes as many namespaces as asked for, prints their file descriptors, and waits. When the lab sends a line or is gone,
it ends every process in these namespaces and then itself; so the lab leaves nothing behind, even if it is killed. The
kernel removes a namespace that no process has open.

A process that may not make network namespaces makes a user namespace first, where it is root and may.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
POLL_S = 0.01
PATIENCE_S = 10.0  # for processes that are ended; one in a system call that cannot be interrupted may take for ever
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nsenter": "util-linux"}
# Settings that keep ordinary users from making namespaces: the value that forbids it, and the value that allows it.
SETTINGS = {
    "user.max_user_namespaces": ("0", "15000"),
    "user.max_net_namespaces": ("0", "15000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),  # Debian's and Arch's kernels
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),  # Ubuntu from 23.10 on
}
SECCOMP_FILTER = "2"  # in /proc/self/status


class LabError(RuntimeError):
    """The lab cannot be set up here; the message names the missing part and the way out."""


def check_requirements() -> None:
    """Check that this is Linux and has the programs that the lab is made with.

    Raises:
        LabError: it names the missing part, and the command that helps.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"The lab is made of Linux network namespaces; this is {sys.platform}.")
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise LabError(f"{program!r} is not installed: apt-get install {package} (or your system's package of it).")


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
    """End all other processes in network namespaces, and the processes that these start meanwhile.

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


def explain_refusal(number: int, proc: Path = Path("/proc")) -> str:
    """Return why namespaces are not allowed, and the command that helps.

    Args:
        number: the error that the kernel has given.
        proc: where the kernel shows its settings.
    """
    reasons = [
        f"{name} is {bad}; allow them with: sudo sysctl -w {name}={good}"
        for name, (bad, good) in SETTINGS.items()
        if _setting(name, proc) == bad
    ]
    lines = [
        f"The kernel refuses namespaces to {_user()} ({os.strerror(number)}).",
        *(reasons or [_explain_otherwise(number, proc)]),
    ]
    if os.geteuid() != 0:
        lines.append(f"Or run it as root: sudo {shlex.join(sys.argv)}")
    return "\n".join(lines)


def _explain_otherwise(number: int, proc: Path) -> str:
    """Explain a refusal that no setting explains."""
    if number == errno.ENOSPC:
        limit = int(_setting("user.max_user_namespaces", proc) or 0)
        raised = f"sudo sysctl -w user.max_user_namespaces={2 * limit}"
        return f"user.max_user_namespaces is {limit}, and all are in use; raise it with: {raised}"
    if number in (errno.EINVAL, errno.ENOSYS):
        return "It was built without namespaces; use one with CONFIG_NET_NS and CONFIG_USER_NS."
    container = "In a container, start it with --privileged, or with the capabilities SYS_ADMIN and NET_ADMIN"
    if _seccomp_mode(proc) == SECCOMP_FILTER:
        return f"A seccomp filter is active. {container}, or with --security-opt seccomp=unconfined."
    return f"No setting known to this package forbids them. {container}."


def _user() -> str:
    return "root" if os.geteuid() == 0 else f"an ordinary user (uid {os.geteuid()})"


def _setting(name: str, proc: Path) -> str | None:
    path = proc / "sys" / name.replace(".", "/")
    return path.read_text().strip() if path.exists() else None


def _seccomp_mode(proc: Path) -> str | None:
    lines = (proc / "self" / "status").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith("Seccomp:")), None)


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
