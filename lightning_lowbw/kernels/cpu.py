"""Twins of `reference` for contiguous float32 on a CPU, compiled by numba: one pass over memory, the same bits.

numba is optional (``pip install lightning-lowbw[cpu]``); `dispatch` imports this file if it is installed. A function is
compiled at its first call, in seconds, and numba keeps it in a folder. numba notices changes of this file alone: so all
compiled functions and their constants are here. A missing tensor is an empty one, so that there is one variant of each
function.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.kernels import reference
from lightning_lowbw.kernels.reference import Arrival, Segment, factors_of, largest_integer, largest_scale_bits

T = TypeVar("T")
MIN_PER_THREAD = 1 << 19  # elements: half a millisecond, against a tenth to start a thread
NOTHING = np.empty(0, dtype=np.float32)  # stands for a missing tensor

OPTIONS: Any = {"nogil": True, "error_model": "numpy"}  # a division by zero is no exception, which no vector can raise
try:
    kernel = numba.njit(cache=True, **OPTIONS)
    kernel(lambda: None)
except RuntimeError:  # there is no folder to keep it in
    kernel = numba.njit(**OPTIONS)
inner = numba.njit(**OPTIONS)

CACHED = 1024  # elements, 24 KiB of tensors: they stay in the first cache from one loop to the next
CHUNK = 64  # elements, four vectors of 512 bits; at two candidates in a thousand one chunk in eight has any
MAGNITUDE = np.int32(0x7FFFFFFF)  # masks the sign: as integers, the bits of floats are in the order of magnitudes
INFINITE = np.int32(0x7F800000)  # the bits of infinity; of NaN larger ones
SHORT, GROUP = 1 << 14, 16  # elements of a chunk, and of a group; of 64 in 4096 the bound lets about 74 through
LANES = 4  # counts kept apart: neighbours are often counted in one place, and each would wait for the one before
AVERAGED = 1 << 13  # elements: their means stay in the first cache
BYTE = 8  # elements
PLACES = np.array([sorted(range(BYTE), key=lambda bit: ~byte >> bit & 1) for byte in range(1 << BYTE)], dtype=np.uint8)
NUM_PLACES = np.array([byte.bit_count() for byte in range(1 << BYTE)], dtype=np.int64)
GATHER = np.uint64(0x0102040810204080)  # times eight bytes, each 0 or 1: the highest byte has a bit for each


@numba.njit(fastmath={"contract"}, **OPTIONS)
def multiply_add(a, b, c):
    """As `Tensor.add(other, alpha=...)` does it: rounded once, where the processor can."""
    return a * b + c


@inner
def largest_bits(bits, size):
    """Return the largest magnitude of float32 values, all as their bits: without a sign they compare as integers.

    If the size is a constant, the loop has a fixed number of vectors.
    """
    largest = np.int32(0)
    for i in range(size):
        magnitude = np.int32(bits[i] & MAGNITUDE)  # which numba has widened
        largest = magnitude if magnitude > largest else largest
    return largest


@inner
def collect(bits, first, least, most, positions, count, flags):
    """Write where magnitudes of a block lie between two bounds; from more than there is room for on only count.

    There must be room for CHUNK more than are to be found; `flags` has CHUNK bytes of any content. Eight elements make
    a byte, and a table has the places of the ones in each byte: all eight places are written, and the valid
    places are kept. A branch at each element would be foreseen wrongly as often as there is a one.

    Source: Lemire, Boytsov and Kurz, "SIMD compression and the intersection of sorted integers", arXiv 1401.6399,
    section 4.
    """
    if least > most:
        return count
    bytes_of_flags = flags.view(np.uint64)
    whole, span = bits.size // CHUNK * CHUNK, np.uint32(most - least)
    for start in range(0, whole, CHUNK):
        chunk = bits[start : start + CHUNK]
        if largest_bits(chunk, CHUNK) < least:
            continue
        if count + CHUNK > positions.size:
            return positions.size
        for i in range(CHUNK):
            flags[i] = np.uint32(np.int32(chunk[i] & MAGNITUDE) - least) <= span
        for i in range(CHUNK // BYTE):
            if bytes_of_flags[i] == 0:  # most are, also in a chunk that has one
                continue
            byte = np.int64((bytes_of_flags[i] * GATHER) >> np.uint64(56))
            for place in range(BYTE):
                positions[count + place] = first + start + BYTE * i + PLACES[byte, place]
            count += NUM_PLACES[byte]
    if whole < bits.size and count + CHUNK > positions.size:
        return positions.size
    for i in range(whole, bits.size):
        positions[count] = first + i
        count += np.uint32(np.int32(bits[i] & MAGNITUDE) - least) <= span
    return count


@kernel
def reach_kernel(bits, least, positions):
    """Write the positions of the magnitudes that reach a bound; return how many there are."""
    return collect(bits, 0, least, INFINITE, positions, 0, np.empty(CHUNK, dtype=np.uint8))


# The equations of `reference.accumulate_`. A loop is made of vector instructions only where it has no branch: so a
# block goes through several.


@inner
def clean(gradient, out, fault):
    """Copy a gradient, with zeros for inf and NaN."""
    for i in range(gradient.size):
        is_finite = abs(gradient[i]) < np.inf
        out[i] = gradient[i] if is_finite else np.float32(0)
        if not is_finite:
            fault[0] = True


@inner
def scale_add(factor, x, scale, y, out):
    """``out = factor x + scale y``, with one rounding of the sum."""
    for i in range(y.size):
        out[i] = multiply_add(factor, x[i], scale * y[i])


@inner
def take_square(g, square, largest, beta2, share, slope, least, s):
    """Update Adam's second moment; write the divisor of the velocity."""
    for i in range(g.size):
        square[i] = multiply_add(share * g[i], g[i], beta2 * square[i])
    root = square
    if largest.size:
        for i in range(g.size):
            largest[i] = max(largest[i], square[i])
        root = largest
    for i in range(g.size):
        s[i] = slope * np.sqrt(root[i]) + least


@inner
def correct(v, u, g, s, gain, momentum, nesterov, is_adam):
    """Accumulate g: ``u = momentum u + gain g; v = v + u``, as `reference.correct_`; in units of s with Adam."""
    if u.size == 0:
        for i in range(v.size):
            v[i] += g[i]
        return
    if is_adam:
        for i in range(v.size):
            u[i] = multiply_add(gain, g[i], momentum * u[i])
            v[i] += u[i] / s[i]
    elif nesterov:
        for i in range(v.size):
            u[i] = multiply_add(gain, g[i], momentum * u[i])
            v[i] = multiply_add(momentum, u[i], v[i] + g[i])
    else:
        for i in range(v.size):
            u[i] = multiply_add(gain, g[i], momentum * u[i])
            v[i] += u[i]


@kernel
def accumulate_kernel(v, u, gradient, w, square, largest, factors, nesterov, least, positions, fault):
    """Correct and accumulate a gradient, and collect where the sum reaches a bound; see `cpu.accumulate_`."""
    momentum, decay, ahead, sign, gain, beta2, share, slope, floor = factors  # `reference.Factors`
    count, bits, bits_of_gradient = 0, v.view(np.int32), gradient.view(np.int32)
    room = np.empty((3, CACHED), dtype=np.float32)
    g, s = room[0], room[1]
    one, flags = np.float32(1), np.empty(CHUNK, dtype=np.uint8)
    for start in range(0, v.size, CACHED):
        stop = min(start + CACHED, v.size)
        own, own_v, own_g = gradient[start:stop], v[start:stop], g[: stop - start]
        if fault.size and largest_bits(bits_of_gradient[start:stop], stop - start) >= INFINITE:
            clean(own, room[2], fault)
            own = room[2, : stop - start]
        if w.size:
            scale_add(decay, w[start:stop], sign, own, own_g)
        elif sign == one and ahead == 0:
            own_g = own
        else:
            for i in range(own.size):
                own_g[i] = sign * own[i]
        if square.size:
            take_square(own_g, square[start:stop], largest[start:stop], beta2, share, slope, floor, s)
        if ahead != 0:
            scale_add(-ahead, own_v, one, own_g, own_g)
        correct(own_v, u[start:stop], own_g, s, gain, momentum, nesterov, square.size > 0)
        if fault.size and largest_bits(bits[start:stop], stop - start) >= INFINITE:
            fault[0] = True
        if count < positions.size:
            count = collect(bits[start:stop], start, least, INFINITE, positions, count, flags)
    return count


# The k largest without sorting: the bits of the k-th largest follow from three counts, of the upper 11, the next 10 and
# the last 10 bits. Radix selection: Knuth, "The Art of Computer Programming" 3, section 5.2.5.


@inner
def count_digits(bits, known, shift, width, counts):
    """Count digits of magnitudes: in the lower half if the higher bits are the known ones, else in the upper half.

    So there is no branch.
    """
    mask, above = (1 << width) - 1, shift + width
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE
        is_other = np.int64((magnitude >> above) != (known >> above))
        counts[i % LANES, ((magnitude >> shift) & mask) | (is_other << width)] += 1


@inner
def rank(counts, digit, left):
    """Return the digit of the k-th largest, and how many with it are to be taken, and are there."""
    while True:
        here = 0
        for lane in range(LANES):
            here += counts[lane, digit]
        if here >= left or digit == 0:
            return digit, left, here
        left -= here
        digit -= 1


@inner
def select(bits, first, k, counts, positions, flags):
    """Write the positions of the k largest, of equal ones the first, where there is room for CHUNK more."""
    known, left, here, highest = 0, k, 0, largest_bits(bits, bits.size) >> 20
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        counts[:] = 0
        count_digits(bits, known, shift, width, counts)
        digit, left, here = rank(counts, highest, left)
        known |= digit << shift
        highest = 1023
    least, end = np.int32(known), bits.size
    if here > left:  # of equal magnitudes the first
        end = 0
        while left:
            left -= (bits[end] & MAGNITUDE) == least
            end += 1
    count = collect(bits[:end], first, least, MAGNITUDE, positions, 0, flags)
    if end < bits.size and least < MAGNITUDE:
        collect(bits[end:], first + end, np.int32(least + 1), MAGNITUDE, positions, count, flags)


# Chunks are too short for 2048 counts each.


@inner
def separate(magnitudes, k):
    """Return what the k largest reach, and no other unless equal to the k-th: bit by bit, from the highest."""
    bound = np.int32(0)
    for bit in range(30, -1, -1):
        trial, count = np.int32(bound | np.int32(1 << bit)), np.int32(0)
        for i in range(magnitudes.size):
            count = np.int32(count + (magnitudes[i] >= trial))
        if count >= k:
            bound = trial
        if count == k:
            break
    return bound


@inner
def select_few(bits, first, k, maxima, found, magnitudes, positions, flags):
    """As `select`. The k-th of the largest of each group is a bound that at least k reach, and seldom many more."""
    maxima[:] = 0
    for start in range(0, bits.size, maxima.size):  # a group is every `maxima.size`-th: so these are vectors
        for i in range(min(maxima.size, bits.size - start)):
            magnitude = np.int32(bits[start + i] & MAGNITUDE)
            maxima[i] = magnitude if magnitude > maxima[i] else maxima[i]
    num_found = collect(bits, 0, separate(maxima, k), MAGNITUDE, found, 0, flags)
    for i in range(num_found):
        magnitudes[i] = bits[found[i]] & MAGNITUDE
    bound, num_equal, count = separate(magnitudes[:num_found], k), k, 0
    for i in range(num_found):
        num_equal -= magnitudes[i] > bound
    for i in range(num_found):
        is_equal = magnitudes[i] == bound and num_equal > 0
        positions[count] = first + found[i]
        num_equal -= is_equal
        count += magnitudes[i] > bound or is_equal


@kernel
def select_kernel(bits, chunk, k, k_last, positions):
    """Write the k largest of each chunk, and `k_last` of the rest."""
    counts, flags, end = np.empty((LANES, 1 << 11), dtype=np.int32), np.empty(CHUNK, dtype=np.uint8), 0
    num_groups = min(chunk, bits.size) // GROUP
    maxima, room = np.empty(num_groups, dtype=np.int32), min(chunk, bits.size) + CHUNK if chunk <= SHORT else 0
    found, magnitudes = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int32)
    for start in range(0, bits.size, chunk):
        mine = bits[start : start + chunk]
        wanted = k if mine.size == chunk else k_last
        if 0 < 2 * wanted <= num_groups and chunk <= SHORT:
            select_few(mine, start, wanted, maxima, found, magnitudes, positions[end:], flags)
        elif wanted:
            select(mine, start, wanted, counts, positions[end:], flags)
        end += wanted


@kernel
def take_kernel(residual, masked, positions, limit, values):
    """Take elements out of a residual, and clear the velocity there; see `reference.take_`."""
    for i in range(positions.size):
        place = positions[i]
        value = residual[place]
        value = limit if value > limit else -limit if value < -limit else value
        values[i] = value
        residual[place] -= value
        if masked.size and value != 0:
            masked[place] = 0


# The code of positions, see `payloads.codec`: `fields` has a row per tensor, of `table.Field`.


@kernel
def pack_kernel(positions, fields, width, unary_bits, words):
    """Write positions in Elias-Fano code; see `cpu.pack_`."""
    mask, place, num_held, held = (np.int64(1) << width) - 1, unary_bits >> 5, unary_bits & 31, np.uint64(0)
    for tensor in range(fields.shape[0]):
        count, first, start = fields[tensor, 0], fields[tensor, 1], fields[tensor, 2]
        for i in range(first, first + count):
            position = positions[i] + start
            one = i + (position >> width)
            words[one >> 5] |= np.uint32(1) << np.uint32(one & 31)
            held |= np.uint64(position & mask) << np.uint64(num_held)
            num_held += width
            if num_held >= 32:  # a word is written when it is full; the first one has bits of the unary part, too
                words[place] |= np.uint32(held & np.uint64(0xFFFFFFFF))
                held >>= np.uint64(32)
                num_held -= 32
                place += 1
    if num_held:
        words[place] |= np.uint32(held)


@kernel
def unpack_kernel(words, fields, width, unary_bits, first_bit, end_bit, positions):
    """Read positions where there is room for BYTE more; return how many there are, and how many outside a tensor.

    Before a position is finished, only its lowest 32 bits are kept: a valid position needs no more.
    """
    count, outside, most, octets = 0, 0, positions.size - BYTE, words.view(np.uint8)
    for start in range(first_bit // BYTE * BYTE, end_bit, BYTE):
        octet = np.int64(octets[start // BYTE])
        if end_bit - start < BYTE:
            octet &= (1 << (end_bit - start)) - 1
        if start < first_bit:
            octet &= 255 << (first_bit - start)
        if count <= most:  # where there are too many, they are only counted
            for place in range(BYTE):
                positions[count + place] = start + PLACES[octet, place]
        count += NUM_PLACES[octet]
    if count != most:
        return count, outside
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    before = fields[0, 1]
    low = unary_bits + before * width
    place, num_held, held = low >> 5, 0, np.uint64(0)
    if width and low & 31:
        held, num_held, place = np.uint64(words[place]) >> np.uint64(low & 31), 32 - (low & 31), place + 1
    for tensor in range(fields.shape[0]):
        first, start, numel = fields[tensor, 1], fields[tensor, 2], fields[tensor, 3]
        for i in range(first, first + fields[tensor, 0]):
            if num_held < width:  # no word is read twice
                held |= np.uint64(words[place]) << np.uint64(num_held)
                place, num_held = place + 1, num_held + 32
            position = np.int32((((positions[i - before] - i) << width) | np.int64(held & mask)) - start)
            held, num_held = held >> np.uint64(width), num_held - width
            positions[i - before] = position
            outside += np.uint64(position) >= np.uint64(numel)  # a negative one is a very large one
    return count, outside


# The mean of what participants have sent, see `reference.average_many_`.


@inner
def add_below(end, mean, start, positions, values, reached, last):
    """Add the elements of all participants that lie below `end`, to means whose first is at `start`; in their order.

    Positions ascend. A damaged message may have positions below `start`: these count as `start`, so that no write is
    outside of the means.
    """
    share = np.float32(1.0 / positions.shape[0])
    for participant in range(positions.shape[0]):
        i = reached[participant]
        while i < last and positions[participant, i] < end:
            mean[max(positions[participant, i] - start, 0)] += values[participant, i] * share
            i += 1
        reached[participant] = i


@kernel
def average_kernel(out, weight, rate, positions, values, first, count):
    """Write the mean; or, with a weight, step it where anything has been sent, and leave `out` alone."""
    before, reached = np.full(positions.shape[0], first), np.full(positions.shape[0], first)
    room = np.zeros(AVERAGED, dtype=np.float32)
    for start in range(0, max(out.size, weight.size), AVERAGED):
        before[:] = reached
        mean = room if weight.size else out[start : start + AVERAGED]
        if not weight.size:
            mean[:] = 0
        add_below(start + mean.size, mean, start, positions, values, reached, first + count)
        for participant in range(positions.shape[0] if weight.size else 0):
            for i in range(before[participant], reached[participant]):
                place = max(positions[participant, i] - start, 0)
                if mean[place] != 0:  # once for all that have sent it; a mean of zero changes nothing
                    weight[start + place] = multiply_add(rate, mean[place], weight[start + place])
                    mean[place] = 0


# Integers with a scale per block, see `payloads.quantized`.

SCALED, HALF = 128, 16  # values of a block; bits between bfloat16 and float32


@inner
def scales_of(values, largest, limit, scale):
    """Write the scale of each block, rounded upwards to bfloat16."""
    bits, scale_bits = values.view(np.int32), scale.view(np.int32)
    for block in range(scale.size):
        scale_bits[block] = largest_bits(bits[block * SCALED :], min(SCALED, bits.size - block * SCALED))
    for block in range(scale.size):
        scale[block] /= largest
    for block in range(scale.size):
        if scale_bits[block] < INFINITE:
            scale_bits[block] = min((scale_bits[block] + 0xFFFF) >> HALF, limit) << HALF


@kernel
def encode_kernel(values, scales, packed, largest, limit, tiny, bits):
    """Write vectors as integers with scales; see `reference.encode_blocks_`."""
    scale = np.empty(scales.shape[1], dtype=np.float32)
    scale_bits = scale.view(np.int32)
    integers = np.empty(SCALED, dtype=np.int8)
    pairs = integers.view(np.uint16)  # the first of two is in the lower byte
    for row in range(values.shape[0]):
        scales_of(values[row], largest, limit, scale)
        for block in range(scale.size):
            scales[row, block] = scale_bits[block] >> HALF
            start = block * SCALED
            v, own = values[row, start : start + SCALED], scale[block]
            integers[:] = 0
            if scale_bits[block] < INFINITE:
                unit = max(own, tiny)
                for i in range(v.size):
                    integers[i] = np.int8(min(max(np.rint(v[i] / unit), -largest), largest))
            for i in range(v.size):
                v[i] -= np.float32(integers[i]) * own
            if bits == 8:
                for i in range(v.size):
                    packed[row, start + i] = np.uint8(integers[i])
            else:
                for i in range((v.size + 1) // 2):
                    packed[row, start // 2 + i] = np.uint8((pairs[i] & 0xF) | ((pairs[i] >> 4) & 0xF0))


@kernel
def decode_kernel(scales, packed, values, bits):
    """Read what `encode_blocks` has written."""
    scale = np.empty(1, dtype=np.float32)
    integers = np.empty(SCALED, dtype=np.int8)
    for row in range(values.shape[0]):
        for block in range(scales.shape[1]):
            scale.view(np.int32)[0] = np.int32(scales[row, block]) << HALF
            start, own = block * SCALED, scale[0]
            v = values[row, start : start + SCALED]
            if bits == 8:
                for i in range(v.size):
                    integers[i] = np.int8(packed[row, start + i])
            else:
                for i in range((v.size + 1) // 2):
                    both = packed[row, start // 2 + i]
                    integers[2 * i] = np.int8(np.int8(both << 4) >> 4)
                    integers[2 * i + 1] = np.int8(np.int8(both) >> 4)
            for i in range(v.size):
                v[i] = np.float32(integers[i]) * own


# What calls it --------------------------------------------------------------------------------------------------------


def accumulate_(segment: Segment, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Accumulate a gradient and return where the residual reaches a threshold; see `reference.accumulate_`.

    Its time compared with a copy: `benchmarks/results/ops_cpu.md`.
    """
    moment, residual = segment.second_moment, segment.residual
    square, largest = (None, None) if moment is None else (moment.square, moment.largest)
    tensors = (residual, segment.momentum_buffer, segment.gradient, segment.weight, square, largest)
    factors = tuple(map(np.float32, factors_of(segment)))
    fault = np.empty(0, dtype=np.bool_) if segment.fault is None else segment.fault.view(1).numpy()
    least, most = _bits(threshold), min(most, residual.numel())

    def run(start: int, stop: int) -> Tensor | None:
        positions = _room(min(most, stop - start) if threshold > 0 else -CHUNK)
        count = accumulate_kernel(
            *[NOTHING if each is None else each.detach().view(-1)[start:stop].numpy() for each in tensors],
            factors, segment.nesterov, least, positions, fault,
        )  # fmt: skip
        return torch.from_numpy(positions[:count]).add_(start) if count <= most else None

    pieces = _over_threads(run, residual.numel())
    found = [each for each in pieces if each is not None]
    if len(found) < len(pieces) or sum(map(len, found)) > most:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def reach(values: Tensor, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Return the positions of the elements whose magnitude reaches a threshold; see `reference.reach`."""
    positions = _room(min(most, values.numel()))
    count = reach_kernel(_bits_of(values), _bits(threshold), positions)
    return torch.from_numpy(positions[:count]) if count <= most else None


def largest(values: Tensor, k: int, chunk: int | None = None, k_last: int = 0) -> Tensor:
    """Return the positions of the k largest |values|, of all or of each chunk; see `reference.largest`."""
    numel, bits = values.numel(), _bits_of(values)
    chunk = max(1, numel) if chunk is None else chunk

    def run(start: int, stop: int) -> Tensor:
        num_full, rest = divmod(stop - start, chunk)
        num_found = num_full * k + (k_last if rest else 0)
        positions = _room(num_found)
        select_kernel(bits[start:stop], chunk, k, k_last, positions)
        return torch.from_numpy(positions[:num_found]).add_(start)

    pieces = _over_threads(run, numel, chunk)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def take_(residual: Tensor, masked: Tensor | None, positions: Tensor) -> Tensor:
    """Take elements out of a residual, and clear the velocity there; see `reference.take_`."""
    values = np.empty(positions.numel(), dtype=np.float32)
    velocity = NOTHING if masked is None else masked.numpy()
    take_kernel(residual.numpy(), velocity, positions.numpy(), np.finfo(np.float32).max, values)
    return torch.from_numpy(values)


def pack_(positions: Tensor, fields: Tensor, width: int, unary_bits: int, words: Tensor) -> None:
    """Write the positions of all tensors into `words`, zeros before; see `payloads.codec.pack`."""
    pack_kernel(positions.numpy(), fields.numpy(), width, unary_bits, words.numpy().view(np.uint32))


def unpack(
    words: Tensor, fields: Tensor, code: tuple[int, int], window: tuple[int, int], positions: Tensor
) -> tuple[int, int]:
    """Read positions of some tensors; return the number of positions, and the number outside their tensors.

    In place:
        `positions`, int32, with room for BYTE more than are expected; not to be used where either number is wrong.
    """
    found, outside = unpack_kernel(words.numpy().view(np.uint32), fields.numpy(), *code, *window, positions.numpy())
    return int(found), int(outside)


def average_many_(
    arrivals: Sequence[Arrival], positions: Tensor, values: Tensor, *, over_senders: bool = False
) -> None:
    """Average the elements of all participants for several tensors; see `reference.average_many_`."""
    if over_senders:
        reference.average_many_(arrivals, positions, values, over_senders=True)
        return
    positions, values = positions.contiguous(), values.contiguous()
    for arrival in arrivals:
        mean = arrival.out.float()
        out, weight = (mean, None) if arrival.weight is None else (None, arrival.weight.detach())
        average_kernel(
            *[NOTHING if each is None else each.view(-1).numpy() for each in (out, weight)], np.float32(-arrival.rate),
            positions[arrival.group].numpy(), values[arrival.group].numpy(), arrival.first, arrival.num_sent,
        )  # fmt: skip
        if mean is not arrival.out:
            arrival.out.copy_(mean)


def encode_blocks_(values: Tensor, scales: Tensor, packed: Tensor, bits: int) -> None:
    """Write vectors as integers with scales; see `reference.encode_blocks_`."""
    numbers = np.float32(largest_integer(bits)), np.int32(largest_scale_bits(bits)), np.finfo(np.float32).tiny
    encode_kernel(values.numpy(), scales.view(torch.int16).numpy(), packed.numpy(), *numbers, bits)


def decode_blocks(scales: Tensor, packed: Tensor, numel: int, bits: int) -> Tensor:
    """Return what `encode_blocks_` has written; see `reference.decode_blocks`."""
    values = torch.empty((len(packed), numel), dtype=torch.float32)
    decode_kernel(scales.view(torch.int16).numpy(), packed.contiguous().numpy(), values.numpy(), bits)
    return values


def _bits_of(values: Tensor) -> Any:
    return values.detach().view(torch.int32).numpy()


def _bits(threshold: float) -> Any:
    """Return a bound for magnitudes as integers: that of the least float32 that reaches a threshold, of 0 for none."""
    if not threshold > 0:
        return MAGNITUDE
    return np.int32(torch.tensor(threshold, dtype=torch.float32, device="cpu").view(torch.int32))


def _room(count: int) -> Any:
    """Return room for so many positions, and what `collect` writes behind them."""
    return np.empty(count + CHUNK, dtype=np.int64)


def _over_threads(run: Callable[[int, int], T], numel: int, unit: int = 1) -> list[T]:
    """Call a function with the borders of each thread's elements; return the results, in the order of the elements.

    Args:
        run: takes the first element, and the one behind the last; it runs without Python's lock.
        numel: elements, altogether.
        unit: so many consecutive elements are not torn apart.
    """
    num_units = -(-numel // unit)
    num_threads = min(torch.get_num_threads(), numel // MIN_PER_THREAD, num_units)
    if num_threads <= 1:
        return [run(0, numel)]
    borders = [min(numel, num_units * number // num_threads * unit) for number in range(num_threads + 1)]
    with ThreadPoolExecutor(num_threads) as pool:  # for this call alone: no thread is there when somebody forks
        return list(pool.map(run, borders[:-1], borders[1:]))
