"""Predicts the time of each exchange on a link, and chooses the fastest: latency per round, bandwidth for the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_lowbw.where.ledger import (
    all_gather_bytes,
    all_gather_rounds,
    all_reduce_bytes,
    all_reduce_rounds,
    sparse_reduce_scatter_elements,
    sparse_reduce_scatter_rounds,
)

DENSE_BITS = 32  # per element of a dense all-reduce
# In the order of preference where two take equally long: the all-gather keeps nothing back that was selected.
EXCHANGES = ("all_gather", "reduce_scatter", "dense")


@dataclass(frozen=True)
class Link:
    """A rank's connection to the others, as measured by collectives.

    Args:
        latency_s: seconds of the smallest message, one way.
        bandwidth_bytes_per_s: in each direction.

    Example:
        >>> Link(latency_s=0.025, bandwidth_bytes_per_s=12.5e6).time_s(rounds=2, nbytes=125_000)
        0.060000000000000005
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def time_s(self, rounds: int, nbytes: float) -> float:
        """Return the seconds of messages: rounds * latency + bytes / bandwidth."""
        return rounds * self.latency_s + nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Choice:
    """The fastest exchange, and the predictions.

    Attributes:
        name: one of `EXCHANGES`.
        times_s: predicted seconds of each.
    """

    name: str
    times_s: dict[str, float]

    def __str__(self) -> str:
        """Return "dense 41 ms, all-gather 12 ms, reduce-scatter 7 ms: reduce-scatter"."""
        times = [(name, self.times_s[name] * 1e3) for name in ("dense", "all_gather", "reduce_scatter")]
        shown = [f"{name} {ms:,.0f} ms" if ms >= 100 else f"{name} {ms:.3g} ms" for name, ms in times]
        return f"{', '.join(shown)}: {self.name}".replace("_", "-")


def choose(numels: Sequence[int], k: int, num_ranks: int, element_bits: float, link: Link) -> Choice:
    """Return the fastest exchange to average a step's sparse tensors.

    All three apply what each rank has selected; only the reduce-scatter keeps some of it back where the selections of
    many ranks differ. The time to select, encode and decode is left out.

    Args:
        numels: elements of each sparse tensor.
        k: elements that a rank selects of all of them together.
        num_ranks: the number of ranks.
        element_bits: of a selected element on the wire, position and value.
        link: of the slowest rank; the same on all of them.

    Example:
        >>> print(choose([25_000_000], 25_000, 8, 64, Link(50e-6, 125e6)))
        dense 1,401 ms, all-gather 11.5 ms, reduce-scatter 7.8 ms: reduce-scatter
    """
    cost = {
        "dense": (all_reduce_rounds(num_ranks), all_reduce_bytes(sum(numels) * DENSE_BITS // 8, num_ranks)),
        "all_gather": (all_gather_rounds(num_ranks), all_gather_bytes(round(k * element_bits / 8), num_ranks)),
        "reduce_scatter": (
            sparse_reduce_scatter_rounds(num_ranks),
            round(sparse_reduce_scatter_elements(k, num_ranks) * element_bits / 8),
        ),
    }
    times_s = {name: link.time_s(*cost[name]) for name in EXCHANGES}
    return Choice(min(times_s, key=times_s.__getitem__), times_s)
