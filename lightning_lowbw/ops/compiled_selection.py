"""Twins of `candidates`, and of what takes the found out of a residual, compiled by numba. See `compiler` for numba.

The k largest are found without sorting: as integers the bits of floats are in the order of their magnitudes, and the
bits of the k-th largest follow from three counts, of the upper 11, the next 10 and the last 10 bits. Radix selection:
Knuth, "The Art of Computer Programming" 3, section 5.2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.ops.compiler import CHUNK, MAGNITUDE, compile_kernel, register

__all__ = ["narrow", "reach", "take_out_", "top_k"]

LANES = 4  # counts kept apart: neighbours are often counted in one place, and each would wait for the one before
UPPER, LOWER, MIDDLE = 20, 10, 1023  # bits below the first count, below the second; and the mask of the last two


def num_reached(values: Tensor, threshold: float) -> int:
    """Return how many positions `reach` would return."""
    return int(_kernels()["count"](values.detach().numpy(), threshold))


def reach(values: Tensor, threshold: float) -> Tensor:
    """Return the positions of the elements whose magnitude reaches a threshold; see `candidates.reach`.

    For contiguous float32.
    """
    positions = torch.empty(num_reached(values, threshold), dtype=torch.int64)
    _kernels()["reach"](values.detach().numpy(), threshold, positions.numpy())
    return positions


def top_k(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest |values|; see `candidates.top_k`. For contiguous float32."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    positions = torch.empty(k + 1, dtype=torch.int64)
    _kernels()["top_k"](values.detach().view(torch.int32).numpy(), None, positions.numpy())
    return positions[:k]


def narrow(values: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, float]:
    """Return which candidates are the k largest, and the least of them; see `candidates.narrow`.

    For contiguous float32.
    """
    positions, bits = torch.empty(k + 1, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    of_values = values.detach().view(torch.int32).numpy()
    bits[0] = _kernels()["narrow"](of_values, candidates.numpy(), positions.numpy())
    return positions[:k], float(bits.view(torch.float32))


def take_out_(residual: Tensor, momentum_buffer: Tensor | None, positions: Tensor, *, masking: bool) -> Tensor:
    """Take elements out of a residual; return them. See `reference.take_out_`. For contiguous float32."""
    values = torch.empty(positions.numel(), dtype=torch.float32)
    masked = momentum_buffer if masking else None
    kernel = _kernels()["take" if masked is None else "take and mask"]
    kernel(residual.numpy(), None if masked is None else masked.numpy(), positions.numpy(), values.numpy())
    return values


@cache
def _kernels() -> dict[str, Callable[..., Any]]:
    register(_rank, _gather)
    return {
        "count": compile_kernel(_count, "int64(float32[::1], float32)"),
        "reach": compile_kernel(_reach, "void(float32[::1], float32, int64[::1])"),
        "top_k": compile_kernel(_select, "int32(int32[::1], none, int64[::1])"),
        "narrow": compile_kernel(_select, "int32(int32[::1], int64[::1], int64[::1])"),
        "take": compile_kernel(_take, "void(float32[::1], none, int64[::1], float32[::1])"),
        "take and mask": compile_kernel(_take, "void(float32[::1], float32[::1], int64[::1], float32[::1])"),
    }


# What numba compiles.


def _count(values, threshold):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(values.size):
        count += abs(values[i]) >= threshold
    return count


def _reach(values, threshold, positions):  # type: ignore[no-untyped-def]
    count = 0
    for start in range(0, values.size, CHUNK):
        stop = min(start + CHUNK, values.size)
        has_any = False
        for i in range(start, stop):
            has_any |= abs(values[i]) >= threshold
        if has_any:
            for i in range(start, stop):
                if abs(values[i]) >= threshold:
                    positions[count] = i
                    count += 1


def _gather(bits, candidates):  # type: ignore[no-untyped-def]
    """Return the bits of the candidates, next to one another: each pass over them would wait for memory."""
    gathered = np.empty(candidates.size, dtype=np.int32)
    for i in range(candidates.size):
        gathered[i] = bits[candidates[i]]
    return gathered


def _rank(counts, k):  # type: ignore[no-untyped-def]
    """Return the place in which the k-th largest is counted, and how many are counted above it."""
    above, place = 0, counts.shape[1] - 1
    while True:
        here = 0
        for lane in range(LANES):
            here += counts[lane, place]
        if above + here >= k or place == 0:
            return place, above
        above += here
        place -= 1


def _select(bits, candidates, positions):  # type: ignore[no-untyped-def]
    """Write the k largest, of equal ones the first, where `positions` has room for k + 1; return the k-th largest."""
    if candidates is not None:
        bits = _gather(bits, candidates)
    size, k = bits.size, positions.size - 1
    counts = np.zeros((LANES, 1 << 11), dtype=np.int64)
    for i in range(size):
        counts[i % LANES, (bits[i] & MAGNITUDE) >> UPPER] += 1
    upper, above = _rank(counts, k)
    counts[:] = 0
    for i in range(size):
        magnitude = bits[i] & MAGNITUDE
        if magnitude >> UPPER == upper:
            counts[i % LANES, (magnitude >> LOWER) & MIDDLE] += 1
    middle, more = _rank(counts, k - above)
    above += more
    upper = (upper << LOWER) | middle
    counts[:] = 0
    for i in range(size):
        magnitude = bits[i] & MAGNITUDE
        if magnitude >> LOWER == upper:
            counts[i % LANES, magnitude & MIDDLE] += 1
    lower, more = _rank(counts, k - above)
    least, num_equal, count = (upper << LOWER) | lower, k - above - more, 0
    for i in range(size):
        magnitude = bits[i] & MAGNITUDE
        is_equal = magnitude == least and num_equal > 0
        positions[count] = i if candidates is None else candidates[i]
        num_equal -= is_equal
        count += magnitude > least or is_equal
    return np.int32(least)


def _take(residual, momentum_buffer, positions, values):  # type: ignore[no-untyped-def]
    for i in range(positions.size):
        values[i] = residual[positions[i]]
        residual[positions[i]] -= values[i]
        if momentum_buffer is not None and values[i] != 0:
            momentum_buffer[positions[i]] = 0
