"""Twins of `reference` that are fast on a CPU: same results, no temporaries of the tensor's size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_lowbw.ops import reference
from lightning_lowbw.ops.candidates import narrow, top_k, top_k_of_chunks
from lightning_lowbw.ops.reference import Segment, sample_accumulated, take_out_

__all__ = [
    "accumulate_",
    "narrow",
    "reach",
    "sample_accumulated",
    "take_out_",
    "top_k",
    "top_k_of_chunks",
]

CHUNK = 1 << 18  # elements; a chunk stays in the cache, and takes much longer than a call
ROW = 64  # elements; at two candidates in a thousand one row in eight has any


def reach(values: Tensor, threshold: float) -> Tensor:
    """Return the positions of the elements whose magnitude reaches a threshold; see `candidates.reach`."""
    positions = _reach_after(lambda chunk: None, values, threshold, sys.maxsize)
    assert positions is not None
    return positions


def accumulate_(segment: Segment, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Accumulate a gradient and return where the residual reaches a threshold; see `reference.accumulate_`.

    Chunk by chunk: only the first of its operations waits for the memory.
    """

    def accumulate_chunk(chunk: slice) -> None:
        part = segment.map(lambda tensor: tensor[chunk])
        by_element = part.fault is None or not reference.is_finite(part.gradient)  # the reference, at each element
        reference.accumulate_(part if by_element else replace(part, fault=None), 0.0)
        if part.fault is not None and not by_element:
            part.fault.logical_or_(reference.is_finite(part.residual).logical_not_())

    return _reach_after(accumulate_chunk, segment.residual, threshold, most)


def _reach_after(prepare: Callable[[slice], None], values: Tensor, threshold: float, most: int) -> Tensor | None:
    """Prepare the values chunk by chunk, and return where they reach a threshold.

    Rows are compared by their largest magnitude, and searched only if it reaches the threshold. At or below 0 nothing
    is compared.
    """
    end = values.numel() // ROW * ROW
    magnitudes = torch.empty((CHUNK // ROW, ROW), dtype=values.dtype)
    largest = torch.empty(end // ROW, dtype=values.dtype)
    for start in range(0, values.numel(), CHUNK):
        prepare(slice(start, start + CHUNK))
        if not threshold > 0:
            continue
        rows = values[start : min(start + CHUNK, end)].reshape(-1, ROW)
        torch.abs(rows, out=magnitudes[: len(rows)])
        torch.amax(magnitudes[: len(rows)], 1, out=largest[start // ROW : start // ROW + len(rows)])
    if not threshold > 0:
        return torch.empty(0, dtype=torch.int64)
    if int((largest >= threshold).sum()) > most:  # rows, each with one at least
        return None
    # Not `largest >= threshold`: a row with a NaN may have a candidate beside it.
    numbers = (largest < threshold).logical_not_().nonzero().squeeze(1)
    within = reference.reach(values[:end].view(-1, ROW).index_select(0, numbers).view(-1), threshold)
    positions = numbers[within // ROW] * ROW + within % ROW
    positions = torch.cat([positions, reference.reach(values[end:], threshold) + end])
    return positions if positions.numel() <= most else None
