"""Whether the lab can be made here, and if not, the reason and the command that helps."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
# Settings that keep ordinary users from making namespaces: the value that does, and the one that does not.
SETTINGS = {
    "user.max_user_namespaces": ("0", "15000"),
    "user.max_net_namespaces": ("0", "15000"),
    "kernel.unprivileged_userns_clone": ("0", "1"),  # Debian's and Arch's kernels
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),  # Ubuntu from 23.10 on
}
SECCOMP_FILTER = "2"  # in /proc/self/status


class LabError(RuntimeError):
    """The lab cannot be set up here; the message says what is missing and what to do."""


def check_requirements() -> None:
    """Check that this is Linux and has the programs that the lab is made with.

    Raises:
        LabError: it says what is missing, and the command that helps.
    """
    if not sys.platform.startswith("linux"):
        raise LabError(f"The lab is made of Linux network namespaces; this is {sys.platform}.")
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            raise LabError(f"{program!r} is not installed: apt-get install {package} (or your system's package of it).")


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
        return f"user.max_user_namespaces is {limit}, and all of these are in use; raise it with: {raised}"
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
