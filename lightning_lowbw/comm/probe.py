"""Measuring the link between the ranks, once and briefly, so that an exchange can be chosen by it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.collectives import Exchange
from lightning_lowbw.core.link import Link
from lightning_lowbw.core.volume import all_reduce_bytes, all_reduce_rounds

LATENCY_BUDGET_S, BANDWIDTH_BUDGET_S = 0.1, 0.4  # after which nothing new is begun
MAX_LATENCIES, MAX_TRANSFERS = 15, 3
MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 26
TARGET_S = 0.12  # of a transfer; half of it will do. What is shorter is over before a shaped link slows down.
GROWTH = 8.0  # of the size, at most, from one transfer to the next


def measure_link(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Link:
    """Measure what all-reduces take; return the latency and bandwidth that explain it, the same on all ranks.

    The latency is that of the fastest tiny one, divided by the rounds of a ring; the bandwidth that of the fastest of
    some transfers of about a tenth of a second: other work on the machine only ever adds time. Under a second on
    50 Mb/s: rank 0 looks at the clock, and tells the others how large the next transfer is.

    It is what an all-reduce gets, processor included: on a fast link and a busy machine less than the wire offers.

    Collective: all ranks of the group, blocking. Enters no ledger.

    Args:
        group: the process group; None is the world. One rank alone has a link without latency or limit.
        device: where the gradients are.
    """
    exchange = Exchange(group)
    num_ranks, rounds = exchange.num_ranks, all_reduce_rounds(exchange.num_ranks)
    if num_ranks == 1:
        return Link(0.0, float("inf"))

    def tell(*values: float) -> tuple[list[float], float]:
        """Return rank 0's values, on all ranks, and the seconds it took."""
        # Elements for every rank: of a shorter message a ring hands on less, and some ranks need not wait.
        message = torch.zeros(2 * num_ranks, dtype=torch.float64, device=device)
        if exchange.rank == 0:
            message[: len(values)] = torch.tensor(values, dtype=torch.float64)
        took = _timed_all_reduce_(exchange, message)
        return message[: len(values)].tolist(), took

    tell(0.0)  # makes the connections
    started, latencies, goes_on = time.perf_counter(), list[float](), True
    while goes_on:
        has_time = time.perf_counter() - started < LATENCY_BUDGET_S and len(latencies) < MAX_LATENCIES
        (told,), took = tell(has_time)
        latencies.append(took)
        goes_on = bool(told)
    latency_s = min(latencies) / rounds

    started, nbytes, bandwidths = time.perf_counter(), MIN_BYTES, list[float]()
    while nbytes:
        took = _timed_all_reduce_(exchange, torch.zeros(nbytes // 4, device=device))
        is_over = time.perf_counter() - started > BANDWIDTH_BUDGET_S
        if took >= TARGET_S / 2 or nbytes == MAX_BYTES or is_over:
            # Where the clock is coarse or the latency all there is, at least half of the time was for the bytes.
            seconds = max(took - rounds * latency_s, took / 2)
            bandwidths.append(all_reduce_bytes(nbytes, num_ranks) / seconds)
            following = 0 if is_over or len(bandwidths) == MAX_TRANSFERS else nbytes
        else:
            following = min(MAX_BYTES, int(nbytes * min(GROWTH, TARGET_S / took)) // 4 * 4)
        nbytes = int(tell(following)[0][0])
    return Link(*tell(latency_s, max(bandwidths, default=0.0))[0])  # rank 0's, which has measured at least one


def _timed_all_reduce_(exchange: Exchange, message: Tensor) -> float:
    started = time.perf_counter()
    exchange.all_reduce_(message)
    float(message[0])  # on CUDA, waits for it
    return time.perf_counter() - started
