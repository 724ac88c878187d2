"""Run a user's own script on the nodes of a lab, one process per rank, with the environment torchrun would give."""

from __future__ import annotations

import contextlib
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

from lightning_lowbw.tools.lab.namespaces import LabError
from lightning_lowbw.tools.lab.network import INTERFACE, Network, Traffic, uninterrupted

MASTER_PORT = 29500  # free in a namespace of our own
POLL_S = 0.02
GRACE_S = 5.0  # between asking the ranks to end and ending them
TAIL_LINES, TAIL_BYTES = 30, 1 << 16  # of a failed rank's output
MAX_RANKS_PER_NODE, MAX_S = 1000, 1e8  # more is a mistake
TIMED_OUT = 124  # as the command `timeout` has it


@dataclass(frozen=True)
class Report:
    """The result of a run.

    Attributes:
        seconds: from the start of the first rank to the end of the last.
        exit_status: of each rank; negative is a signal.
        traffic: of each node's interface, by the kernel.
        failed: the ranks that failed first, for which the lab ended the other ranks.
        timed_out: whether all were ended because the time was over.
    """

    seconds: float
    exit_status: list[int]
    traffic: list[Traffic]
    failed: list[int]
    timed_out: bool = False

    @property
    def status(self) -> int:
        """The exit status of the first rank that failed, 128 + signal as a shell has it; 124 if the time was over."""
        if self.timed_out:
            return TIMED_OUT
        status = self.exit_status[self.failed[0]] if self.failed else 0
        return 128 - status if status < 0 else status

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def check_run(ranks_per_node: int, timeout_s: float | None) -> None:
    """Check what a run is to be like, before anything is started.

    Raises:
        LabError: a value is out of range.
    """
    if not 1 <= ranks_per_node <= MAX_RANKS_PER_NODE:
        raise LabError(f"ranks per node {ranks_per_node}: give a number from 1 to {MAX_RANKS_PER_NODE}.")
    if timeout_s is not None and not 0 < timeout_s <= MAX_S:
        raise LabError(f"timeout {timeout_s:g}: give a number of seconds, above 0 and up to {MAX_S:g}.")


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
    """Start a command once per rank, stream rank 0's output, wait for all ranks; if one fails, end the other ranks.

    Args:
        network: entered already.
        command: the user's own, unchanged: it finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest.
        ranks_per_node: ranks that share a node's link; traffic between them is not throttled.
        pin: divide the cores among the ranks; OMP_NUM_THREADS, unless it is set, becomes a rank's share.
        environment: added to that of this process.
        changes: (seconds after the start, rate in bit/s of all links).
        timeout_s: all ranks are ended after this number of seconds; see `timed_out` in the report.
        output: where rank 0's output goes; by default to this process's own.

    Raises:
        LabError: a value is out of range, or a rate could not be changed.
        KeyboardInterrupt: handed on, after the ranks have ended.
    """
    check_run(ranks_per_node, timeout_s)
    num_ranks = network.num_nodes * ranks_per_node
    before = [network.traffic(node) for node in range(network.num_nodes)]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(num_ranks)]
        failures = stack.enter_context(_changing(network, changes))
        ranks = stack.enter_context(_started())
        for rank in range(num_ranks):
            node, local_rank = divmod(rank, ranks_per_node)
            cores = _cores(rank, num_ranks) if pin else sorted(os.sched_getaffinity(0))
            ranks.append(
                subprocess.Popen(
                    [*network.enter(node), *command],
                    env={
                        "OMP_NUM_THREADS": str(len(cores) if pin else max(1, len(cores) // num_ranks)),
                        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
                        **_torchrun_environment(network, node, local_rank, ranks_per_node),
                        **(environment or {}),
                    },
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=output if rank == 0 else logs[rank],
                    stderr=output if rank == 0 else subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
                )
            )
        timed_out = False
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if failures:
                raise LabError(f"The rate could not be changed: {failures[0]}") from failures[0]
            timed_out = timeout_s is not None and time.monotonic() - started > timeout_s
            if timed_out:
                break
            time.sleep(POLL_S)
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        _end(ranks, GRACE_S)
        network.end_processes()
        for rank in range(1, num_ranks) if timed_out else failed:
            if rank > 0:
                _show_tail(rank, logs[rank])
    seconds = time.monotonic() - started
    after = [network.traffic(node) for node in range(network.num_nodes)]
    traffic = [late - early for early, late in zip(before, after, strict=True)]
    return Report(seconds, [process.returncode for process in ranks], traffic, failed, timed_out)


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
        "NCCL_HOSTID": f"node{node}",  # else NCCL takes the nodes for one host: shared memory, and no GPU for two ranks
    }


def _cores(rank: int, num_ranks: int) -> list[int]:
    """Divide the cores of this process evenly; with more ranks than cores, one each in turn."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_ranks)
    first = (rank * share) % len(cores)
    return cores[first : first + share]


@contextlib.contextmanager
def _started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Hold the ranks; at the end of the block, also after an error or Ctrl-C, end all ranks that still run."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        yield ranks
    finally:
        _end(ranks, GRACE_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Ask the ranks that still run to end, with their own children; then end them. A Ctrl-C shortens the first."""
    interrupted = None
    try:
        _signal(ranks, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt as error:
        interrupted = error
    with uninterrupted():
        _signal(ranks, signal.SIGKILL)
        for process in ranks:
            process.wait()
    if interrupted is not None:
        raise interrupted


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in ranks:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


@contextlib.contextmanager
def _changing(network: Network, changes: Sequence[tuple[float, float | None]]) -> Iterator[list[LabError]]:
    """Change the rates of all links at the given times, beside the run; yield the errors."""
    over = threading.Event()
    failures: list[LabError] = []
    started = time.monotonic()

    def change() -> None:
        for seconds, rate in sorted(changes, key=lambda change: change[0]):
            if over.wait(max(0.0, started + seconds - time.monotonic())):
                return
            try:
                for node in range(network.num_nodes):
                    network.set_rate(node, rate)
            except LabError as error:
                failures.append(error)
                return

    thread = threading.Thread(target=change, name="lowbw-lab rates", daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        over.set()
        thread.join()


def _show_tail(rank: int, log: IO[bytes]) -> None:
    log.seek(-min(TAIL_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
    tail = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    sys.stderr.write("\n".join([f"rank {rank}, its last lines:", *(f"  {line}" for line in tail), ""]))
