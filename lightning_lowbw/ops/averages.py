"""The mean of sparse vectors, in plain torch: the specification of `gpu.average_many_`. Source as of `reference`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def scatter_mean_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Average sparse vectors, one per rank, into a dense one: ``out = 1/N sum_k sparse_k`` (eq. 7).

    The sum runs in rank order, so that all replicas get the same bits; equal indices of two ranks add up; N counts
    all ranks, also those that sent nothing here.

    In place:
        `out`, which is overwritten.

    Args:
        out: flat, contiguous.
        parts: (indices int64, values) of each rank, in rank order; indices are distinct within a rank.
    """
    out.zero_()
    add_mean_(out, parts)


def add_mean_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add what `scatter_mean_` writes."""
    for indices, values in parts:
        # As DDP does, each addend is divided first: the same bits for one sender, and no overflow in the sum.
        out.index_add_(0, indices, values.to(out.dtype) * (1.0 / len(parts)))


@dataclass(frozen=True)
class Arrival:
    """A tensor, or a part of one, for which messages have been received.

    Args:
        out: where the mean goes: float32, flat, contiguous.
        group: row of the messages that are about it.
        first: its first element in each of these.
        count: its elements there.
        weight: the weight to step by the mean, with the same number of elements: float32, flat, contiguous; None: no
            step.
        rate: of the step.
    """

    out: Tensor
    group: int
    first: int
    count: int
    weight: Tensor | None = None
    rate: float = 0.0


def average_many_(arrivals: Sequence[Arrival], positions: Tensor, values: Tensor) -> None:
    """Average the elements that all participants have sent for several tensors; see `scatter_mean_`. Or step weights by
    the mean.

    In place:
        `out` of all, which is overwritten. With a weight: the weight where anything has been sent,
        ``w = w - rate mean``; `out` is a workspace, whose content is undefined afterwards.

    Args:
        arrivals: with weights or without, all alike.
        positions: in `out`: int64, ascending for each tensor, shape (groups, participants, elements).
        values: float32, of the same shape; summed in the order of the participants.
    """
    for arrival in arrivals:
        mine = slice(arrival.first, arrival.first + arrival.count)
        parts = list(zip(positions[arrival.group, :, mine], values[arrival.group, :, mine], strict=True))
        if arrival.weight is None:
            scatter_mean_(arrival.out, parts)
            continue
        touched = positions[arrival.group, :, mine].flatten()
        arrival.out[touched] = 0.0
        add_mean_(arrival.out, parts)
        arrival.weight[touched] = arrival.weight[touched].add_(arrival.out[touched], alpha=-arrival.rate)
