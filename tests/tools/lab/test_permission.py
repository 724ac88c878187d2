"""The lab as an ordinary user: it works, or says what forbids it and what to type."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import lightning_lowbw.tools.lab
from lightning_lowbw.tools.lab.namespaces import explain_refusal
from tests.programs import WITHOUT_LIGHTNING

NOBODY = 65534
# setpriv gives up root's privileges only when it has opened the program; sh opens what nobody may open.
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]
SYSTEM_PYTHON = "/usr/bin/python3"

PROGRAM = """
import os, pathlib, socket
interfaces = sorted(name for _, name in socket.if_nameindex())
pathlib.Path("written" + os.environ["RANK"]).write_text(f"uid {os.getuid()}, {' '.join(interfaces)}")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that belongs to the ordinary user, with a copy of the lab that this user can read."""
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "lightning_lowbw"
        shutil.copytree(Path(lightning_lowbw.tools.lab.__file__).parent, package / "tools/lab")
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(name, NOBODY, NOBODY)
        yield Path(name)


def runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.lab
def test_an_ordinary_user_has_the_lab(folder: Path) -> None:
    user = AS_NOBODY if os.geteuid() == 0 else []
    if user and shutil.which("setpriv") is None:
        pytest.skip("dropping root needs setpriv, of util-linux")
    pythons = [python for python in (sys.executable, SYSTEM_PYTHON) if runs([*user, python, "-c", "import ctypes"])]
    if not pythons:
        pytest.skip(f"an ordinary user can run neither {sys.executable} nor {SYSTEM_PYTHON} here")
    here, copied = str(Path(lightning_lowbw.__file__).parent), str(folder / "lightning_lowbw")
    main = "from lightning_lowbw.tools.lab.cli import main; sys.exit(main(sys.argv[1:]))"
    (folder / "lab.py").write_text(WITHOUT_LIGHTNING.replace(here, copied) + main)
    lab = [*user, pythons[0], "lab.py", "--inter", "1gbit", "--timeout", "30", "--"]
    command = [*lab, pythons[0], "-c", PROGRAM]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    if "The kernel refuses namespaces" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    for written in (folder / "written0", folder / "written1"):
        assert written.read_text() == "uid 0, eth0 lo"  # root inside ...
        assert written.stat().st_uid == (NOBODY if os.geteuid() == 0 else os.geteuid())  # ... and not outside


@pytest.mark.parametrize(
    ("setting", "number", "seccomp", "expected"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns=1", errno.EPERM, "0", "apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone=0", errno.EPERM, "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces=0", errno.ENOSPC, "0", "user.max_user_namespaces=15000"),
        ("user/max_user_namespaces=50", errno.ENOSPC, "0", "user.max_user_namespaces=100"),
        ("user/max_user_namespaces=50", errno.EINVAL, "0", "CONFIG_USER_NS"),
        ("user/max_user_namespaces=50", errno.EPERM, "2", "--security-opt seccomp=unconfined"),
        ("kernel/apparmor_restrict_unprivileged_userns=0", errno.EPERM, "0", "SYS_ADMIN and NET_ADMIN"),
    ],
)
def test_what_forbids_it(
    setting: str, number: int, seccomp: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    name, _, value = setting.partition("=")
    for path, text in (("self/status", f"Name:\tpython\nSeccomp:\t{seccomp}\n"), (f"sys/{name}", f"{value}\n")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    message = explain_refusal(number, tmp_path)
    assert expected in message
    assert "an ordinary user (uid 1000)" in message
    assert "sudo" in message.splitlines()[-1]
