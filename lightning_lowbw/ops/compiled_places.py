"""Where the ones are, eight at a time and without a branch: what the compiled passes that collect have in common.

A branch at each element would be mispredicted as often as there is a one. So eight elements make a byte, and a table
has the places of the ones in each byte: all eight are written, of which those that count are kept. The technique:
Lemire, Boytsov and Kurz, "SIMD compression and the intersection of sorted integers", arXiv 1401.6399, section 4.
"""

from __future__ import annotations

import numpy as np

from lightning_lowbw.ops.compiler import CHUNK

BYTE = 8  # elements
PLACES = np.array([sorted(range(BYTE), key=lambda bit: ~byte >> bit & 1) for byte in range(1 << BYTE)], dtype=np.uint8)
NUM_PLACES = np.array([byte.bit_count() for byte in range(1 << BYTE)], dtype=np.int64)
GATHER = np.uint64(0x0102040810204080)  # times eight bytes, each 0 or 1: the highest byte has a bit for each


# What numba compiles.


def write_places(byte, first, positions, count):  # type: ignore[no-untyped-def]
    """Write the places of the ones of a byte, counted from `first`; return how many there are with them.

    There must be room for eight more than `count`.
    """
    for i in range(BYTE):
        positions[count + i] = first + PLACES[byte, i]
    return count + NUM_PLACES[byte]


def write_places_of_chunk(flags, first, positions, count):  # type: ignore[no-untyped-def]
    """Write which of CHUNK flags are set, counted from `first`; return how many there are with them.

    Args:
        flags: 0 or 1: CHUNK bytes, read as uint64.
        positions: with room for CHUNK more than `count`.
    """
    has_any = np.uint64(0)
    for i in range(CHUNK // BYTE):
        has_any |= flags[i]
    if has_any != 0:
        for i in range(CHUNK // BYTE):
            byte = np.int64((flags[i] * GATHER) >> np.uint64(56))
            count = write_places(byte, first + BYTE * i, positions, count)
    return count
