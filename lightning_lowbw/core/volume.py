"""What the collectives move, by formula: bytes that one rank sends, which is also what it receives.

Source: the ring algorithms (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), which NCCL and gloo
use for large messages.
"""

from __future__ import annotations


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
