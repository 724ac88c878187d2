"""Run programs as a user does, in processes and a folder of their own.

`run_python` starts Python, for tests of how a program is started: each process then loads Lightning and torch for 6 s.
`run_script` forks from a server that has them loaded, as `run_ranks` does.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
# For `python -c`: parts of the package without the rest, which is Lightning for the most part and loads for seconds.
WITHOUT_LIGHTNING = f"""
import sys, types
package = sys.modules["lightning_lowbw"] = types.ModuleType("lightning_lowbw")
package.__path__ = [{str(ROOT / "lightning_lowbw")!r}]
"""
OF_NO_ONE = 16_384, 30_000  # below the ports that Linux gives to sockets without one
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")


def run_python(folder: Path, *arguments: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments; fails with what was printed if the program fails."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # the Trainer's own choice may be taken before its ranks listen
    }
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, timeout=timeout_s, capture_output=True, text=True)
    except subprocess.TimeoutExpired as late:
        said = "".join(each.decode(errors="replace") for each in (late.stdout, late.stderr) if each)
        raise AssertionError(f"not done within {timeout_s:g} s; it has printed:\n{said}") from late
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_script(
    folder: Path,
    script: str,
    *arguments: str,
    num_ranks: int = 1,
    timeout_s: float = 180.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script, or a module ("-m" and its name come first), to its end; return what rank 0 has printed.

    Args:
        num_ranks: processes, as torchrun starts them; one alone is not launched by anyone, and the processes that its
            Trainer would spawn are forked. tests/strategies/test_namespaces.py pickles what a spawned process gets.
    """
    options = str(folder), [script, *arguments], free_port(), environment or {}
    return run_ranks(_run_script, num_ranks, *options, timeout_s=timeout_s, fresh=True)[0]


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens, and that no socket is given by itself."""
    while True:
        port = random.SystemRandom().randrange(*OF_NO_ONE)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _run_script(folder: str, command: list[str], port: int, environment: Mapping[str, str]) -> str:
    os.environ.update(environment)
    if dist.get_world_size() == 1:
        forget_launcher()
        start = torch.multiprocessing.start_processes
        torch.multiprocessing.start_processes = lambda *args, **options: start(
            *args, **{**options, "start_method": "fork"}
        )
    else:
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
    os.chdir(folder)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name="__main__")
    return shown.getvalue()


def forget_packages(*names: str) -> None:
    """Let packages be imported anew in a process of `run_script`, as in one that has just been started."""
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] not in names]


def forget_launcher() -> None:
    """Make a rank of `run_ranks` look like a program that nobody has launched."""
    dist.destroy_process_group()
    for variable in [name for name in os.environ if "RANK" in name or name.startswith(("WORLD", "LOCAL_", "MASTER_"))]:
        del os.environ[variable]
    del os.environ["TORCHELASTIC_RUN_ID"]


def run_without_lightning(program: str, **environment: str) -> str:
    """Run a program in a process of its own: Triton reads its environment when it is first imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIGHTNING + program],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
