"""The volume of collectives, by formula: the bytes that one rank sends (and receives), and the rounds.

A round is a message that is sent after another has arrived; it costs at least the latency of the link.

Source: the ring algorithms (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), which NCCL and gloo
use for large messages.
"""

from __future__ import annotations

from lightning_lowbw.what.narrow_values import NarrowFormat
from lightning_lowbw.what.sparse_sum import gather_capacity, scatter_capacity


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


def narrow_mean_bytes(numel: int, num_ranks: int, value_format: NarrowFormat) -> int:
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
