"""Run a user's own script on the nodes of a lab, one process per rank, with the environment torchrun would give."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from lightning_lowbw.lab.network import INTERFACE, LabError, Network, Traffic

MASTER_PORT = 29500  # free in a namespace of our own
POLL_S = 0.02
GRACE_S = 5.0  # between asking the ranks to end and ending them
TAIL_LINES = 30  # of a failed rank's output
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Report:
    """What a run cost.

    Attributes:
        seconds: from the start of the first rank to the end of the last.
        exit_status: of each rank; negative is a signal.
        traffic: of each node's interface, by the kernel.
    """

    seconds: float
    exit_status: list[int]
    traffic: list[Traffic]

    @property
    def status(self) -> int:
        """The exit status of the rank that failed, 128 + signal as a shell has it; 0 if none did."""
        failed = [status for status in self.exit_status if status != 0]
        # The others were ended because of it.
        first = next((status for status in failed if status != -signal.SIGTERM), failed[0] if failed else 0)
        return 128 - first if first < 0 else first

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def launch(
    network: Network,
    command: Sequence[str],
    *,
    ranks_per_node: int = 1,
    pin: bool = True,
    environment: Mapping[str, str] | None = None,
    changes: Sequence[tuple[float, float | None]] = (),
    timeout_s: float | None = None,
    output: IO[bytes] | int | None = None,
) -> Report:
    """Start a command once per rank, stream rank 0's output, wait for all; if one fails, end the others.

    Args:
        network: entered already.
        command: the user's own, unchanged: it finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest.
        ranks_per_node: ranks that share a node's link; among themselves they talk unthrottled.
        pin: divide the cores among the ranks; OMP_NUM_THREADS, unless it is set, becomes a rank's share.
        environment: added to that of this process.
        changes: (seconds after the start, rate in bit/s of all links), in order.
        timeout_s: all ranks are ended after so many seconds.
        output: where rank 0's output goes; by default to this process's own.

    Raises:
        LabError: the time is over.
        KeyboardInterrupt: handed on, after the ranks have ended.
    """
    num_ranks = network.num_nodes * ranks_per_node
    before = [network.traffic(node) for node in range(network.num_nodes)]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(num_ranks)]
        stack.enter_context(_changing(network, changes))
        ranks = stack.enter_context(_started())
        for rank in range(num_ranks):
            node, local_rank = divmod(rank, ranks_per_node)
            cores = _cores(rank, num_ranks) if pin else sorted(os.sched_getaffinity(0))
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", network.namespace(node), *command],
                    env={
                        "OMP_NUM_THREADS": str(len(cores) if pin else max(1, len(cores) // num_ranks)),
                        **os.environ,
                        **_torchrun_environment(network, node, local_rank, ranks_per_node),
                        **(environment or {}),
                    },
                    stdout=output if rank == 0 else logs[rank],
                    stderr=output if rank == 0 else subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda cores=cores: _prepare_child(cores),
                )
            )
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if timeout_s is not None and time.monotonic() - started > timeout_s:
                raise LabError(f"The ranks did not end within {timeout_s:g} s; they have been ended.")
            time.sleep(POLL_S)
        _end(ranks, GRACE_S)
        for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
            if process.returncode not in (0, -signal.SIGTERM) and rank > 0:
                _show_tail(rank, log)
    seconds = time.monotonic() - started
    after = [network.traffic(node) for node in range(network.num_nodes)]
    traffic = [late - early for early, late in zip(before, after, strict=True)]
    return Report(seconds, [process.returncode for process in ranks], traffic)


def _torchrun_environment(network: Network, node: int, local_rank: int, ranks_per_node: int) -> dict[str, str]:
    return {
        "RANK": str(node * ranks_per_node + local_rank),
        "WORLD_SIZE": str(network.num_nodes * ranks_per_node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(network.num_nodes),
        "NODE_RANK": str(node),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": "lowbw-lab",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
    }


def _cores(rank: int, num_ranks: int) -> list[int]:
    """Divide the cores of this process evenly; with more ranks than cores, one each in turn."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_ranks)
    first = (rank * share) % len(cores)
    return cores[first : first + share]


def _prepare_child(cores: Sequence[int]) -> None:
    """In the child: end with the lab, however it ends, and stay on the given cores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def _started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Hold the ranks; end those that still run when the block is left, on errors and on Ctrl-C too."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        yield ranks
    finally:
        _end(ranks, GRACE_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Ask the ranks that still run to end, with their own children; then end them."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = None if patience_s is None else time.monotonic() + patience_s
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _changing(network: Network, changes: Sequence[tuple[float, float | None]]) -> Iterator[None]:
    """Change the rates of all links at the given times, beside the run."""
    over = threading.Event()
    started = time.monotonic()

    def change() -> None:
        for seconds, rate in changes:
            if over.wait(max(0.0, started + seconds - time.monotonic())):
                return
            for node in range(network.num_nodes):
                network.set_rate(node, rate)

    thread = threading.Thread(target=change, name="lowbw-lab rates", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show_tail(rank: int, log: IO[bytes]) -> None:
    log.seek(0)
    tail = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    sys.stderr.write("\n".join([f"rank {rank} failed; its last lines:", *(f"  {line}" for line in tail), ""]))
