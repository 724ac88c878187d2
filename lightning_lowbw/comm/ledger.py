"""The traffic: what collectives send by formula, and the ledger of what this rank has exchanged and waited for.

Formulas are of the bytes that one rank sends (and receives), and of rounds: a round is a message that is sent after
another has arrived; it costs at least the latency of the link.

Source: the ring algorithms (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), which NCCL and gloo
use for large messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from lightning_lowbw.compress.quantization import QuantizedFormat
from lightning_lowbw.compress.sparse_sum import gather_capacity, scatter_capacity

Level = Literal["intra", "inter"]

# Pairs of CUDA events that have not been read yet; older ones are dropped rather than waited for.
MAX_PENDING = 256


@dataclass
class TrafficLedger:
    """Running totals since the start of the fit, of this rank alone; a reader takes differences.

    Attributes:
        steps: optimizer steps accounted for.
        sent_bytes: bytes sent, by the formulas below.
        received_bytes: bytes received; the same in the ring algorithms used here.
        intra_bytes: of the bytes sent, those inside a node, with a topology.
        inter_bytes: of the bytes sent, those between nodes, with a topology.
        dense_bytes: bytes plain DDP would have sent for the gradients of the same steps, and for buffers.
        dense_inter_bytes: bytes that "hierarchical" would have sent between nodes for them, with a topology.
        exposed_s: seconds in which the training waited for an exchange. On CUDA measured with events, a few steps
            late and without the dense phase, whose communication runs beside the backward pass.
    """

    steps: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    dense_bytes: int = 0
    dense_inter_bytes: int = 0
    exposed_s: float = 0.0
    _pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(
        default_factory=lambda: deque(maxlen=MAX_PENDING), repr=False, compare=False
    )

    def record(self, nbytes: int, level: Level | None = None) -> None:
        """Add one collective that moved `nbytes` in each direction, on a level of the topology if there is one."""
        self.sent_bytes += nbytes
        self.received_bytes += nbytes
        if level == "intra":
            self.intra_bytes += nbytes
        elif level == "inter":
            self.inter_bytes += nbytes

    def of_slow_network(self, has_levels: bool) -> tuple[int, int]:
        """Return the bytes sent there, and those of a dense exchange."""
        return (self.inter_bytes, self.dense_inter_bytes) if has_levels else (self.sent_bytes, self.dense_bytes)

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Add the time of a blocking collective on tensors of `device`. Does not synchronise the host with a GPU."""
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((start, end))
        else:
            started = time.perf_counter()
            yield
            self.exposed_s += time.perf_counter() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is exchanged meanwhile: it belongs to no step."""
        totals = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        pending, self._pending = self._pending, deque(maxlen=MAX_PENDING)
        try:
            yield
        finally:
            vars(self).update(totals, _pending=pending)

    def settle(self) -> None:
        """Add the CUDA waits that have ended by now to `exposed_s`."""
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self.exposed_s += start.elapsed_time(end) / 1e3


def all_reduce_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes a rank sends in a ring all-reduce of a message of `nbytes`: 2 (W - 1) / W * nbytes."""
    return 2 * (num_ranks - 1) * nbytes // num_ranks


def all_gather_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes a rank sends in a ring all-gather of `nbytes` from each rank: (W - 1) * nbytes."""
    return (num_ranks - 1) * nbytes


def reduce_scatter_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes a rank sends to reduce a message of `nbytes` in parts, one per rank: (W - 1) / W * nbytes.

    As many as it sends to gather the parts.
    """
    return (num_ranks - 1) * nbytes // num_ranks


def quantized_mean_bytes(numel: int, num_ranks: int, value_format: QuantizedFormat) -> int:
    """Return the bytes a rank sends for a mean of vectors in few bits: 2 (W - 1) parts of ceil(numel / W) values.

    On two levels that of a part of ceil(numel / ranks of a node) elements, between nodes; and in a node, to gather the
    parts of the mean, `all_gather_bytes` of a part in the vector's own dtype.
    """
    return 2 * (num_ranks - 1) * value_format.nbytes(-(-numel // num_ranks))


def all_reduce_rounds(num_ranks: int) -> int:
    """Return how many messages follow one another in a ring all-reduce: 2 (W - 1)."""
    return 2 * (num_ranks - 1)


def all_gather_rounds(num_ranks: int) -> int:
    """Return how many messages follow one another in a ring all-gather: W - 1."""
    return num_ranks - 1


def sparse_reduce_scatter_elements(num_selected: int, num_ranks: int) -> int:
    """Return how many (position, value) pairs a rank receives in both phases: below 6 k for k >= 16 W.

    Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", arXiv 2201.07598, whose
    bound counts positions and values apart.
    """
    return (num_ranks - 1) * (scatter_capacity(num_selected, num_ranks) + gather_capacity(num_selected, num_ranks))


def sparse_reduce_scatter_rounds(num_ranks: int) -> int:
    """Return how many messages follow one another in both phases: one to the owners, and those of an all-gather."""
    return min(1, num_ranks - 1) + all_gather_rounds(num_ranks)
