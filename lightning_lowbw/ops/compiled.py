"""Twins of `reference` compiled by numba: one pass over memory, the same bits. See `compiler` for numba itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from math import nan

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.ops.compiled_places import BYTE, write_places, write_places_of_chunk
from lightning_lowbw.ops.compiled_selection import narrow, num_reached, reach, take_out_, top_k, top_k_of_chunks
from lightning_lowbw.ops.compiler import (
    CHUNK,
    INFINITE,
    MAGNITUDE,
    compile_kernel,
    import_numba,
    over_threads,
    register,
)
from lightning_lowbw.ops.cpu import sample_accumulated
from lightning_lowbw.ops.memory import allocate
from lightning_lowbw.ops.reference import Segment

__all__ = [
    "accumulate_",
    "narrow",
    "reach",
    "sample_accumulated",
    "take_out_",
    "top_k",
    "top_k_of_chunks",
]

BLOCK = 1024  # elements, 24 KiB of tensors: they stay in the first cache from one loop to the next
# Of the candidates that are of use there is room for one in this many, twice what is aimed at: each has 8 bytes, and at
# one in a thousand all that are of use would take 3 % of the residual. Where there are more, mostly in the second step,
# another pass looks.
ROOM = 4


def accumulate_(segment: Segment, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Accumulate a gradient and return where the residual reaches a threshold; see `reference.accumulate_`.

    For contiguous float32. What it takes beside a copy: `benchmarks/results/ops_cpu.md`.
    """
    residual, has_buffer = segment.residual, segment.momentum_buffer is not None
    numel = residual.numel()
    look_ahead = segment.momentum if segment.nesterov and has_buffer else None
    second = segment.second_moment
    square, largest = (None, None) if second is None else (second.square, second.largest)
    adam = None if second is None else (second.beta2, (1.0 - second.beta2) * second.share, *second.line)
    decay = (segment.weight_decay, -segment.ahead)
    tensors = (residual, segment.momentum_buffer, segment.gradient, segment.weight, square, largest)
    choices = (segment.momentum_buffer, segment.weight, square, largest, look_ahead, segment.fault)
    kernel = _kernel(*(each is not None for each in choices))
    fault = None if segment.fault is None else segment.fault.view(1).numpy()
    bound = threshold if threshold > 0 else nan  # which nothing reaches

    def run(start: int, stop: int) -> Tensor | None:
        piece = residual[start:stop]
        most_here = min(most // ROOM * piece.numel() // max(1, numel) + CHUNK, piece.numel()) if threshold > 0 else 0
        positions = allocate(most_here, torch.int64)
        pieces = (None if each is None else each.detach()[start:stop].numpy() for each in tensors)
        constants = (segment.momentum, 1.0 - segment.dampening, look_ahead, *decay, segment.sign, adam)
        count = kernel(*pieces, *constants, bound, positions.numpy(), fault)
        if count <= most_here:
            return positions[:count].add_(start) if count <= most else None
        del positions  # before others are made; the candidates have not been counted to the end
        return reach(piece, threshold).add_(start) if num_reached(piece, threshold) <= most else None

    pieces = over_threads(run, numel)
    if len(pieces) == 1:
        return pieces[0]
    found = [each for each in pieces if each is not None]
    return torch.cat(found) if len(found) == len(pieces) and sum(map(len, found)) <= most else None


@cache
def _kernel(
    has_buffer: bool, has_weight: bool, has_square: bool, has_largest: bool, nesterov: bool, has_fault: bool
) -> Callable[..., int]:
    """Compile `_accumulate` for float32; missing tensors have the type of None, and their branches are not compiled."""
    # As `Tensor.add(other, alpha=...)` does it: rounded once, where the processor can.
    register(_multiply_add, fastmath={"contract"})
    register(write_places, write_places_of_chunk)
    register(_finite, _decay, _decay_ahead, _take_square, _correct, _largest, _flag, _collect)
    numba = import_numba()
    number, vector, nothing = numba.float32, numba.float32[::1], numba.none
    signature = numba.int64(
        vector,
        vector if has_buffer else nothing,
        vector,
        vector if has_weight else nothing,
        vector if has_square else nothing,
        vector if has_largest else nothing,
        number,
        number,
        number if nesterov else nothing,
        number,
        number,
        number,
        numba.types.UniTuple(number, 4) if has_square else nothing,
        number,
        numba.int64[::1],
        numba.boolean[::1] if has_fault else nothing,
    )
    return compile_kernel(_accumulate, signature)


# What numba compiles: the equations of `reference.accumulate_`, where all tensors but v and the gradient may be None.
# A loop is made of vector instructions only where it does one thing: so a block goes through several.


def _multiply_add(a: float, b: float, c: float) -> float:
    return a * b + c


def _finite(gradient, clean, fault):  # type: ignore[no-untyped-def]
    """Copy a gradient, with zeros for inf and NaN."""
    for i in range(gradient.size):
        is_finite = abs(gradient[i]) < np.inf
        clean[i] = gradient[i] if is_finite else np.float32(0)
        if not is_finite:
            fault[0] = True


def _decay(gradient, w, sign, c, decayed, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        decayed[i] = _multiply_add(c, w[i], sign * gradient[i])


def _decay_ahead(decayed, v, less, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        decayed[i] = _multiply_add(less, v[i], decayed[i])


def _take_square(g, square, largest, adam, s, size):  # type: ignore[no-untyped-def]
    """Update Adam's second moment; write the divisor of the velocity."""
    beta2, share, slope, least = adam
    for i in range(size):
        square[i] = _multiply_add(share * g[i], g[i], beta2 * square[i])
    root = square
    if largest is not None:
        for i in range(size):
            largest[i] = max(largest[i], square[i])
        root = largest
    for i in range(size):
        s[i] = slope * np.sqrt(root[i]) + least


def _correct(v, u, gradient, s, m, gain, look_ahead, sign, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        g = sign * gradient[i]
        if u is None:
            v[i] += g
        else:
            u[i] = _multiply_add(gain, g, m * u[i])
            if s is not None:
                v[i] += u[i] / s[i]
            elif look_ahead is None:
                v[i] += u[i]
            else:
                v[i] = _multiply_add(look_ahead, u[i], v[i] + g)


def _largest(bits, size):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude."""
    largest = np.int32(0)
    for i in range(size):
        magnitude = np.int32(bits[i] & MAGNITUDE)  # which numba has widened
        largest = magnitude if magnitude > largest else largest
    return largest


def _flag(v, threshold, flags, size):  # type: ignore[no-untyped-def]
    for i in range(size):
        flags[i] = abs(v[i]) >= threshold


def _collect(v, start, stop, threshold, positions, count):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        if abs(v[i]) >= threshold:
            if count < positions.size:
                positions[count] = i
            count += 1
    return count


def _accumulate(  # type: ignore[no-untyped-def]
    v, u, gradient, w, square, largest, m, gain, look_ahead, c, less, sign, adam, threshold, positions, fault
):
    count, bits, least = 0, v.view(np.int32), np.array([threshold]).view(np.int32)[0]
    are_many = CHUNK * positions.size > v.size  # so that hardly any chunk would be passed over
    bits_of_gradient = gradient.view(np.int32)
    clean = np.empty(BLOCK, dtype=np.float32)
    decayed, divisor = np.empty_like(clean), np.empty_like(clean)
    flags = np.empty(BLOCK, dtype=np.uint8)
    flags_together = flags.view(np.uint64)
    left_sign = sign if w is None else np.float32(1)
    for start in range(0, v.size, BLOCK):
        size = min(BLOCK, v.size - start)
        stop = start + size
        g = gradient[start:stop]
        if fault is not None and _largest(bits_of_gradient[start:stop], size) >= INFINITE:
            _finite(g, clean, fault)
            g = clean
        if w is not None:
            _decay(g, w[start:stop], sign, c, decayed, size)
            g = decayed
        if square is not None:
            _take_square(g, square[start:stop], None if largest is None else largest[start:stop], adam, divisor, size)
        if w is not None and less != 0:
            _decay_ahead(decayed, v[start:stop], less, size)
        own_u, own_divisor = None if u is None else u[start:stop], None if square is None else divisor
        _correct(v[start:stop], own_u, g, own_divisor, m, gain, look_ahead, left_sign, size)
        if fault is not None and _largest(bits[start:stop], size) >= INFINITE:
            fault[0] = True
        if are_many:
            _flag(v[start:stop], threshold, flags, size)
        for at in range(0, size - CHUNK + 1, CHUNK):
            first = start + at
            if not are_many:
                if _largest(bits[first : first + CHUNK], CHUNK) < least:
                    continue
                _flag(v[first : first + CHUNK], threshold, flags[at:], CHUNK)
            if count + CHUNK <= positions.size:
                count = write_places_of_chunk(flags_together[at // BYTE :], first, positions, count)
            elif count <= positions.size:
                count = _collect(v, first, first + CHUNK, threshold, positions, count)
        count = _collect(v, start + size // CHUNK * CHUNK, stop, threshold, positions, count)
    return count
