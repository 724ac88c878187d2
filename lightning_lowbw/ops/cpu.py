"""Twins of `reference` that are fast on a CPU: same results, no temporaries of the tensor's size."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lowbw.ops import reference
from lightning_lowbw.ops.reference import sample_accumulated

__all__ = ["accumulate_", "reach", "sample_accumulated"]

CHUNK = 1 << 18  # elements; what belongs to a chunk stays in the cache, and is large beside the cost of a call
LANES = 8  # booleans in an int64


def reach(values: Tensor, threshold: float) -> Tensor:
    """Return the positions of the elements whose magnitude reaches a threshold; see `reference.reach`.

    At one in a thousand a mask is nearly all zeros: `nonzero` reads it eight at a time. 0.7 instead of 2.8 ns per
    element on one core, 0.2 of which is the memory.
    """
    size = min(CHUNK, -(-values.numel() // LANES) * LANES)
    magnitudes = torch.empty(size, dtype=values.dtype)
    mask = torch.zeros(size, dtype=torch.bool)
    lanes = torch.arange(LANES)
    found = []
    for start in range(0, values.numel(), CHUNK):
        chunk = values[start : start + CHUNK]
        torch.abs(chunk, out=magnitudes[: chunk.numel()])
        torch.ge(magnitudes[: chunk.numel()], threshold, out=mask[: chunk.numel()])
        mask[chunk.numel() :] = False  # of the chunk before
        words = mask.view(torch.int64).nonzero()
        positions = (words * LANES + lanes).view(-1)
        found.append(positions[mask[positions]] + start)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def accumulate_(
    residual: Tensor,
    momentum_buffer: Tensor | None,
    gradient: Tensor,
    weight: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    sign: float,
    threshold: float,
) -> Tensor:
    """Accumulate a gradient and return where the residual reaches a threshold; see `reference.accumulate_`.

    Chunk by chunk: only the first of its operations waits for the memory.
    """
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, residual.numel(), CHUNK):
        chunk = slice(start, start + CHUNK)
        reference.accumulate_(
            residual[chunk],
            None if momentum_buffer is None else momentum_buffer[chunk],
            gradient[chunk],
            None if weight is None else weight[chunk],
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            sign=sign,
            threshold=0.0,
        )
        if threshold > 0:
            found.append(reach(residual[chunk], threshold) + start)
    return torch.cat(found)
