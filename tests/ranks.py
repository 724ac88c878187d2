"""Run a function on several real gloo ranks, from a server with torch and Lightning loaded: 0.1 s instead of 4 s."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch", "lightning.pytorch", "torchmetrics", "lightning_lowbw"]


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Return what `function(*args)` returns on each rank.

    The ranks look to Lightning as if torchrun had started them; the process group is there already.

    Raises:
        AssertionError: a rank failed, with its traceback, or the time is over; all ranks have ended then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes, connections = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(sender, f"{folder}/store", rank, num_ranks, function, args))
            process.start()
            sender.close()
            processes.append(process)
            connections.append(receiver)
        try:
            return _collect(connections, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = {connection: rank for rank, connection in enumerate(connections) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"Ranks {sorted(waiting.values())} did not end in time.")
        for connection in ready:
            rank = waiting[connection]
            try:
                succeeded, payload = connection.recv()
            except EOFError as error:
                raise AssertionError(f"Rank {rank} died without a word.") from error
            if not succeeded:
                raise AssertionError(f"Rank {rank} failed:\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [results[rank] for rank in range(len(connections))]


def _run(
    sender: Connection, store: str, rank: int, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="tests",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        dist.barrier()
        sender.send((True, buffer.getvalue()))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
    # Without a word of goodbye: a peer that failed would be waited for.
    os._exit(0)
