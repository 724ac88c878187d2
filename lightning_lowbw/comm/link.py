"""The link between the ranks, measured once and briefly, by which the time of each exchange is predicted."""

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
BUDGET_S = 0.4  # after which no new transfer is begun
MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 26
TARGET_S = 0.012  # of a transfer; half of it will do. The shorter, the more, and the likelier one is not interrupted.
ENOUGH_BYTES = 1 << 20  # What is less is over before a shaped link slows down, unless it takes
LONG_S = 0.12
GROWTH = 8.0  # of the size, at most, from one transfer to the next
# Beside what a transfer takes without a byte: between sites TCP needs some round trips to reach the rate of the link.
TARGET_TRIPS, LONG_TRIPS, BUDGET_TRIPS = 2.0, 4.0, 8.0


@dataclass(frozen=True)
class Link:
    """A rank's connection to the others, as measured by collectives.

    Args:
        latency_s: seconds of the smallest message, one way.
        bandwidth_bytes_per_s: in each direction.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, nbytes: float, num_rounds: float = 0) -> float:
        """Return what bytes take that are sent in some rounds, each after the last one has arrived.

        Example:
            >>> Link(latency_s=0.001, bandwidth_bytes_per_s=1e6).seconds(5e5, num_rounds=2)
            0.502
        """
        return nbytes / self.bandwidth_bytes_per_s + num_rounds * self.latency_s


def measure_link(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Link:
    """Time collectives; return the latency and bandwidth that explain the times, the same on all ranks.

    The latency is that of the fastest tiny all-reduce, divided by the rounds of a ring; the bandwidth that of the
    fastest of many short all-gathers, which do no arithmetic: other work on the machine only ever adds time. Of these
    the first half is left out, because a link may let some bytes pass at once after a pause. Under a second on 50 Mb/s,
    and some 20 round trips more: rank 0 times each transfer, and says in the next one how long that after it is.

    The time of the processor is included: on a fast link and a busy machine the bandwidth is below that of the wire.

    Collective: all ranks of the group, blocking. Enters no ledger.

    Args:
        group: the process group; None is the world. One rank alone has a link without latency or limit.
        device: where the gradients are.
    """
    collectives = Collectives(group)
    num_ranks = collectives.num_ranks
    if num_ranks == 1:
        return Link(0.0, float("inf"))

    def tell(*values: float) -> tuple[list[float], float]:
        """Return rank 0's values, on all ranks, and the seconds it took."""
        # Elements for every rank: of a shorter message a ring hands on less, and some ranks need not wait.
        message = torch.zeros(2 * num_ranks, dtype=torch.float64, device=device)
        if collectives.rank == 0:
            message[: len(values)] = torch.tensor(values, dtype=torch.float64)
        started = time.perf_counter()
        collectives.all_reduce_(message)
        received = message[: len(values)].tolist()  # on CUDA, waits for it
        return received, time.perf_counter() - started

    # Of the first one the connections are made.
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
            # Where the clock is coarse or the latency all there is, at least half of the time was for the bytes.
            seconds = max(took - trip_s, took / 2)
            bandwidths.append(received / seconds)
            following = 0 if is_over or len(bandwidths) == MAX_TRANSFERS else nbytes
        else:
            wanted = max(target_s / took, min(ENOUGH_BYTES / received, long_s / took))
            following = min(MAX_BYTES, int(nbytes * min(GROWTH, wanted)) // 4 * 4)
        nbytes = told
    fastest = max(bandwidths[len(bandwidths) // 2 :], default=0.0)
    return Link(*tell(latency_s, fastest)[0])  # rank 0's, which has measured at least one


def _timed_all_gather(
    collectives: Collectives, nbytes: int, following: int, device: torch.device | str
) -> tuple[float, int]:
    """Return the seconds of an all-gather, and rank 0's number of bytes of the following one."""
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    message[:8] = torch.tensor([following]).view(torch.uint8)
    started = time.perf_counter()
    told = int(collectives.begin_all_gather(message).wait()[0, :8].view(torch.int64))  # on CUDA, waits for it
    return time.perf_counter() - started, told
