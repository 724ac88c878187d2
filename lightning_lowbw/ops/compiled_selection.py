"""Twins of `candidates`, and of what takes the found out of a residual, compiled by numba. See `compiler` for numba.

The k largest are found without sorting: as integers the bits of floats are in the order of their magnitudes, and the
bits of the k-th largest follow from three counts, of the upper 11, the next 10 and the last 10 bits. Radix selection:
Knuth, "The Art of Computer Programming" 3, section 5.2.5.

Chunks are too short for 2048 counts each. Of a chunk, the k-th largest among the maxima of its groups of 16 is a bound
that at least k elements reach, and seldom many more. Only groups that reach it are looked through. Among what is found
there, the bits of the k-th largest follow one by one, from the highest, as in a binary search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.ops.compiled_places import write_places, write_places_of_chunk
from lightning_lowbw.ops.compiler import CHUNK, INFINITE, MAGNITUDE, compile_kernel, over_threads, register
from lightning_lowbw.ops.memory import allocate

__all__ = ["narrow", "reach", "take_out_", "top_k", "top_k_of_chunks"]

LANES = 4  # counts kept apart: neighbours are often counted in one place, and each would wait for the one before
UPPER, LOWER, MIDDLE = 20, 10, 1023  # bits below the first count, below the second; and the mask of the last two
GROUP = 16  # elements, a power of two; of 64 in 4096 the bound lets 74 through, and 300 with groups of 64


def num_reached(values: Tensor, threshold: float) -> int:
    """Return how many positions `reach` would return."""
    if math.isnan(threshold):
        return 0
    return int(_kernels()["count"](values.detach().view(torch.int32).numpy(), _bits(threshold), INFINITE))


def reach(values: Tensor, threshold: float) -> Tensor:
    """Return the positions of the elements whose magnitude reaches a threshold; see `candidates.reach`.

    For contiguous float32.
    """
    count = num_reached(values, threshold)
    positions = allocate(count + CHUNK, torch.int64)
    if count:
        bits = values.detach().view(torch.int32).numpy()
        _kernels()["reach"](bits, _bits(threshold), INFINITE, 0, positions.numpy(), 0)
    return positions[:count]


def _bits(threshold: float) -> int:
    return int(torch.tensor(threshold, dtype=torch.float32, device="cpu").view(torch.int32))


def top_k(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest |values|; see `candidates.top_k`. For contiguous float32."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    positions = allocate(k + CHUNK, torch.int64)
    _kernels()["top_k"](values.detach().view(torch.int32).numpy(), positions.numpy())
    return positions[:k]


def top_k_of_chunks(values: Tensor, chunk: int, k: int, k_last: int) -> Tensor:
    """Return the positions of the k largest |values| of each chunk; see `candidates.top_k_of_chunks`.

    For contiguous float32.
    """
    bits = values.detach().view(torch.int32).numpy()
    kernel = _kernels()["top_k_of_chunks"]

    def run(start: int, stop: int) -> Tensor:
        num_full, rest = divmod(stop - start, chunk)
        positions = torch.empty(num_full * k + (k_last if rest else 0), dtype=torch.int64)
        kernel(bits[start:stop], chunk, k, k_last, positions.numpy())
        return positions.add_(start)

    parts = over_threads(run, values.numel(), chunk)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def narrow(values: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, float]:
    """Return which candidates are the k largest, and the least of them; see `candidates.narrow`.

    For contiguous float32.
    """
    magnitudes, positions = allocate(candidates.numel(), torch.int32), allocate(k + CHUNK, torch.int64)
    least = torch.empty(1, dtype=torch.int32)
    # Next to one another: each pass over them would wait for memory.
    _kernels()["gather"](values.detach().view(torch.int32).numpy(), candidates.numpy(), magnitudes.numpy())
    least[0] = _kernels()["top_k"](magnitudes.numpy(), positions.numpy())
    positions = positions[:k]
    _kernels()["gather positions"](candidates.numpy(), positions.numpy(), positions.numpy())
    return positions, float(least.view(torch.float32))


def take_out_(residual: Tensor, momentum_buffer: Tensor | None, positions: Tensor, *, masking: bool) -> Tensor:
    """Take elements out of a residual; return them. See `reference.take_out_`. For contiguous float32."""
    values = allocate(positions.numel(), torch.float32)
    masked = momentum_buffer if masking else None
    kernel = _kernels()["take" if masked is None else "take and mask"]
    kernel(residual.numpy(), None if masked is None else masked.numpy(), positions.numpy(), values.numpy())
    return values


@cache
def _kernels() -> dict[str, Callable[..., Any]]:
    register(write_places, write_places_of_chunk)
    register(_rank, _write_between, _count_within, _end_of_equal, _find_maxima, _bound, _collect)
    return {
        "count": compile_kernel(_count_between, "int64(int32[::1], int32, int32)"),
        "reach": compile_kernel(_write_between, "int64(int32[::1], int32, int32, int64, int64[::1], int64)"),
        "top_k": compile_kernel(_select, "int32(int32[::1], int64[::1])"),
        "top_k_of_chunks": compile_kernel(_select_of_chunks, "void(int32[::1], int64, int64, int64, int64[::1])"),
        "gather": compile_kernel(_gather, "void(int32[::1], int64[::1], int32[::1])"),
        "gather positions": compile_kernel(_gather, "void(int64[::1], int64[::1], int64[::1])"),
        "take": compile_kernel(_take, "void(float32[::1], none, int64[::1], float32[::1])"),
        "take and mask": compile_kernel(_take, "void(float32[::1], float32[::1], int64[::1], float32[::1])"),
    }


# What numba compiles.


def _count_between(bits, least, most):  # type: ignore[no-untyped-def]
    """Return how many magnitudes lie between two, or are one of them."""
    count, span = 0, np.uint32(most - least)
    for i in range(bits.size):
        count += np.uint32(np.int32(bits[i] & MAGNITUDE) - least) <= span
    return count


def _write_between(bits, least, most, first, positions, count):  # type: ignore[no-untyped-def]
    """Write where a magnitude lies between two, or is one of them, counted from `first`; return how many there are.

    There must be room for CHUNK more.
    """
    rest, span = bits.size // CHUNK * CHUNK, np.uint32(most - least)
    flags = np.empty(CHUNK, dtype=np.uint8)
    flags_together = flags.view(np.uint64)
    for start in range(0, rest, CHUNK):
        for i in range(CHUNK):
            flags[i] = np.uint32(np.int32(bits[start + i] & MAGNITUDE) - least) <= span
        count = write_places_of_chunk(flags_together, first + start, positions, count)
    for i in range(rest, bits.size):
        positions[count] = first + i
        count += np.uint32(np.int32(bits[i] & MAGNITUDE) - least) <= span
    return count


def _gather(source, positions, out):  # type: ignore[no-untyped-def]
    for i in range(positions.size):
        out[i] = source[positions[i]]


def _rank(counts, k):  # type: ignore[no-untyped-def]
    """Return the place in which the k-th largest is counted, how many are counted above it, and how many in it."""
    above, place = 0, counts.shape[1] - 1
    while True:
        here = 0
        for lane in range(LANES):
            here += counts[lane, place]
        if above + here >= k or place == 0:
            return place, above, here
        above += here
        place -= 1


def _count_within(bits, counts, shift, value, low):  # type: ignore[no-untyped-def]
    """Count the ten bits above `low` where those above `shift` have a value; all others in the upper half."""
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE
        # Neither a branch, nor one place in which each would wait for the one before.
        elsewhere = np.int64((magnitude >> shift) != value)
        counts[i % LANES, ((magnitude >> low) & MIDDLE) | (elsewhere << LOWER)] += 1


def _end_of_equal(bits, least, num_equal):  # type: ignore[no-untyped-def]
    """Return the place behind the first `num_equal` that are equal to a magnitude."""
    for i in range(bits.size):
        num_equal -= np.int32(bits[i] & MAGNITUDE) == least
        if num_equal == 0:
            return i + 1
    return bits.size


def _select(bits, positions):  # type: ignore[no-untyped-def]
    """Write the k largest, of equal ones the first, where `positions` has room for CHUNK more; return the k-th."""
    k = positions.size - CHUNK
    counts = np.zeros((LANES, 1 << 11), dtype=np.int32)
    for i in range(bits.size):
        counts[i % LANES, (bits[i] & MAGNITUDE) >> UPPER] += 1
    least, above, num_equal = _rank(counts, k)
    for shift, low in ((UPPER, LOWER), (LOWER, 0)):
        counts[:] = 0
        _count_within(bits, counts, shift, least, low)
        place, more, num_equal = _rank(counts[:, : MIDDLE + 1], k - above)
        least, above = (least << LOWER) | place, above + more
    end = bits.size if num_equal == k - above else _end_of_equal(bits, least, k - above)
    count = _write_between(bits[:end], np.int32(least), MAGNITUDE, 0, positions, 0)
    if end < bits.size and least < MAGNITUDE:
        _write_between(bits[end:], np.int32(least + 1), MAGNITUDE, end, positions, count)
    return np.int32(least)


def _find_maxima(bits, halves, maxima):  # type: ignore[no-untyped-def]
    """Write the largest magnitude of each group; the last may be shorter.

    The larger of two neighbours, of these again, and so on: a loop over one group would not become vector instructions.
    """
    num_full = bits.size // GROUP
    size = num_full * GROUP // 2
    for i in range(size):
        one, other = np.int32(bits[2 * i] & MAGNITUDE), np.int32(bits[2 * i + 1] & MAGNITUDE)
        halves[i] = one if one > other else other
    while size > num_full:
        size //= 2
        for i in range(size):
            one, other = halves[2 * i], halves[2 * i + 1]
            halves[i] = one if one > other else other
    for i in range(num_full):
        maxima[i] = halves[i]
    if num_full < maxima.size:
        maxima[num_full] = 0
        for i in range(num_full * GROUP, bits.size):
            maxima[num_full] = max(maxima[num_full], np.int32(bits[i] & MAGNITUDE))


def _bound(magnitudes, k):  # type: ignore[no-untyped-def]
    """Return what the k largest reach, and of the others only those that are equal to the k-th largest."""
    bound = largest = np.int32(0)
    for i in range(magnitudes.size):
        largest = magnitudes[i] if magnitudes[i] > largest else largest
    for bit in range(30, -1, -1):
        trial = np.int32(bound | np.int32(1 << bit))
        if trial > largest:
            continue
        count = np.int32(0)
        for i in range(magnitudes.size):
            count = np.int32(count + (magnitudes[i] >= trial))
        if count >= k:
            bound = trial
        if count == k:
            break
    return bound


def _collect(bits, maxima, bound, groups, positions, magnitudes):  # type: ignore[no-untyped-def]
    """Write what reaches a bound, where there is room for one more; return how many. Without branches, which would be
    foreseen wrongly."""
    num_groups, count = 0, 0
    for i in range(maxima.size):
        groups[num_groups] = i
        num_groups += maxima[i] >= bound
    for number in range(num_groups):
        first = groups[number] * GROUP
        group = bits[first : first + GROUP]
        for i in range(group.size):
            magnitudes[count] = np.int32(group[i] & MAGNITUDE)
            positions[count] = first + i
            count += magnitudes[count] >= bound
    return count


def _select_of_chunks(bits, chunk, k, k_last, positions):  # type: ignore[no-untyped-def]
    """Write the k largest of each chunk, of equal ones the first."""
    numel = min(chunk, bits.size)
    num_groups = -(-numel // GROUP)
    maxima, halves = np.empty(num_groups, dtype=np.int32), np.empty(num_groups * GROUP // 2, dtype=np.int32)
    groups, within = np.empty(num_groups + 1, dtype=np.int64), np.empty(numel + 1, dtype=np.int64)
    found = np.empty(numel + 1, dtype=np.int32)
    end = 0
    for start in range(0, bits.size, chunk):
        of_chunk = bits[start : start + chunk]
        num_wanted = k if of_chunk.size == chunk else k_last
        of_groups = maxima[: -(-of_chunk.size // GROUP)]
        bound = np.int32(0)  # where more than every other group has one of the k largest, all are looked through
        if 2 * num_wanted <= of_groups.size:
            _find_maxima(of_chunk, halves, of_groups)
            bound = _bound(of_groups, num_wanted)
        else:
            of_groups[:] = 0
        magnitudes = found[: _collect(of_chunk, of_groups, bound, groups, within, found)]
        bound, num_equal = _bound(magnitudes, num_wanted), num_wanted
        for i in range(magnitudes.size):
            num_equal -= magnitudes[i] > bound
        count, end = end, end + num_wanted
        for i in range(magnitudes.size):
            if count == end:
                break
            is_equal = magnitudes[i] == bound and num_equal > 0
            positions[count] = start + within[i]
            num_equal -= is_equal
            count += magnitudes[i] > bound or is_equal


def _take(residual, momentum_buffer, positions, values):  # type: ignore[no-untyped-def]
    for i in range(positions.size):
        values[i] = residual[positions[i]]
        residual[positions[i]] -= values[i]
        if momentum_buffer is not None and values[i] != 0:
            momentum_buffer[positions[i]] = 0
