"""The link between the ranks, measured once and briefly; the cost model predicts the time of each exchange from it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_lowbw.comm.collectives import (
    Collectives,
    all_gather_bytes,
    all_gather_rounds,
    all_reduce_rounds,
    is_gloo,
)

NUM_LATENCIES, MAX_TRANSFERS = 3, 32
BUDGET_S = 0.4  # after this time no new transfer begins
MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 26
# A transfer aims at this time, and half the time is enough. Short transfers are many, and some are not interrupted.
TARGET_S = 0.012
# A shorter message ends before a shaped link slows down, unless it takes LONG_S.
ENOUGH_BYTES, LONG_S = 1 << 20, 0.12
GROWTH = 8.0  # largest ratio of the sizes of two successive transfers
# Round trips in addition to these times: between sites TCP needs some round trips to reach the rate of the link.
TARGET_TRIPS, LONG_TRIPS, BUDGET_TRIPS = 2.0, 4.0, 8.0


@dataclass(frozen=True)
class Link:
    """A rank's connection to the other ranks, as measured by collectives.

    Args:
        latency_s: seconds of the smallest message, one way.
        bandwidth_bytes_per_s: bytes per second in each direction.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, nbytes: float, num_rounds: float = 0) -> float:
        """Return the seconds that some bytes take in successive rounds: a round begins after the last has arrived.

        Example:
            >>> Link(latency_s=0.001, bandwidth_bytes_per_s=1e6).seconds(5e5, num_rounds=2)
            0.502
        """
        return nbytes / self.bandwidth_bytes_per_s + num_rounds * self.latency_s


def measure_link(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Link:
    """Time collectives; return the latency and bandwidth that explain the times, the same on all ranks.

    The latency is that of the fastest tiny all-reduce, divided by the rounds of a ring. The bandwidth is that of the
    fastest of many short all-gathers, which do no arithmetic: other work on the machine only ever adds time. The first
    half of the all-gathers is left out, because a link may let some bytes pass at once after a pause. A measurement
    takes less than a second at 50 Mb/s, and about 20 round trips more: rank 0 times each transfer, and announces
    in the next transfer the size of the transfer after it.

    The time of the processor is included: on a fast link and a busy machine the bandwidth is below that of the wire.

    Collective: all ranks of the group, blocking. No ledger counts it.

    Args:
        group: the process group; None is the world. One rank alone has a link without latency or limit.
        device: the device of the gradients.
    """
    collectives = Collectives(group)
    num_ranks = collectives.num_ranks
    if num_ranks == 1:
        return Link(0.0, float("inf"))

    def tell(*values: float) -> tuple[list[float], float]:
        """Return rank 0's values, on all ranks, and the seconds it took."""
        # Elements for every rank: a ring passes on less of a shorter message, and some ranks need not wait.
        message = torch.zeros(2 * num_ranks, dtype=torch.float64, device=device)
        if collectives.rank == 0:
            message[: len(values)] = torch.tensor(values, dtype=torch.float64)
        started = time.perf_counter()
        collectives.all_reduce_(message)
        received = message[: len(values)].tolist()  # on CUDA, waits for it
        return received, time.perf_counter() - started

    # The first all-reduce also makes the connections.
    latency_s = min(tell(0.0)[1] for _ in range(NUM_LATENCIES)) / all_reduce_rounds(num_ranks)
    trip_s = all_gather_rounds(num_ranks, is_ring=not is_gloo(group, torch.device(device))) * latency_s
    target_s, long_s = max(TARGET_S, TARGET_TRIPS * trip_s), max(LONG_S, LONG_TRIPS * trip_s)
    budget_s = BUDGET_S + BUDGET_TRIPS * trip_s
    started, nbytes, following, bandwidths = time.perf_counter(), MIN_BYTES, MIN_BYTES, list[float]()
    while nbytes:
        took, told = _timed_all_gather(collectives, nbytes, following, device)
        received = all_gather_bytes(nbytes, num_ranks)
        is_over = time.perf_counter() - started > budget_s
        is_enough = took >= target_s / 2 and (received >= ENOUGH_BYTES // 2 or took >= long_s / 2)
        if is_enough or nbytes == MAX_BYTES or is_over:
            # If the clock is coarse or latency dominates, count at least half of the time for the bytes.
            seconds = max(took - trip_s, took / 2)
            bandwidths.append(received / seconds)
            following = 0 if is_over or len(bandwidths) == MAX_TRANSFERS else nbytes
        else:
            wanted = max(target_s / took, min(ENOUGH_BYTES / received, long_s / took))
            following = min(MAX_BYTES, int(nbytes * min(GROWTH, wanted)) // 4 * 4)
        nbytes = told
    fastest = max(bandwidths[len(bandwidths) // 2 :], default=0.0)
    return Link(*tell(latency_s, fastest)[0])  # the values of rank 0, which has at least one measurement


def _timed_all_gather(
    collectives: Collectives, nbytes: int, following: int, device: torch.device | str
) -> tuple[float, int]:
    """Return the seconds of an all-gather, and the size in bytes that rank 0 chose for the following one."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    message[:8] = torch.tensor([following]).view(torch.uint8)
    started = time.perf_counter()
    told = int(collectives.begin_all_gather(message).wait()[0, :8].view(torch.int64))  # on CUDA, waits for it
    return time.perf_counter() - started, told
