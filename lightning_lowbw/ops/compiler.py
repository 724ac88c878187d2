"""numba: whether it is there, and how functions are compiled by it.

It is optional (``pip install lightning-lowbw[cpu]``) and imported at first use. It compiles for some seconds and keeps
the result: beside the file or, where that is read-only, in the user's cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

CHUNK = 64  # elements, four vectors of 512 bits; at two candidates in a thousand one chunk in eight has any
MAGNITUDE = np.int32(0x7FFFFFFF)  # masks the sign: as integers, the bits of floats are in the order of magnitudes
INFINITE = np.int32(0x7F800000)  # the bits of infinity; of NaN larger ones
MIN_PER_THREAD = 1 << 19  # elements: half a millisecond, against a tenth to start a thread

_faults: list[str] = []  # why they are not to be used in this process
_registered: set[Callable[..., Any]] = set()  # functions that others may call


def is_installed() -> bool:
    """Whether numba is installed, be it broken, and not disabled."""
    return not _faults and importlib.util.find_spec("numba") is not None


def is_available() -> bool:
    """Whether numba can be imported, and is not disabled; imports it."""
    return not _faults and _is_importable()


def disable(reason: str) -> None:
    """Use plain torch instead, in this process, from now on; see `dispatch.disable`."""
    _faults.append(reason)


@cache
def _is_importable() -> bool:
    try:
        import_numba()
    except ImportError:  # not installed, or not for this numpy
        return False
    return True


@cache
def import_numba() -> Any:
    """Return numba."""
    import numba

    return numba


def register(*functions: Callable[..., Any], **options: Any) -> None:
    """Let functions be called by those that are compiled; with options of numba's.

    numba keeps a compiled function until its own file changes. Where only the file of a registered one has changed,
    touch the files that call it, or the old code runs.
    """
    from numba.extending import register_jitable

    for function in set(functions) - _registered:
        _registered.add(function)
        (register_jitable(**options) if options else register_jitable)(function)


def compile_kernel(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a function for one signature, and keep the result for the next process where there is a place."""
    options = {"nogil": True, "error_model": "numpy"}  # a division by zero is no exception, which no vector can raise
    try:
        return import_numba().njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # no place to keep it, or no space there
        return import_numba().njit(signature, **options)(function)


def over_threads(run: Callable[[int, int], T], numel: int, unit: int = 1) -> list[T]:
    """Call a function with the borders of each thread's elements; return the results, in the order of the elements.

    Args:
        run: takes the first element, and the one behind the last; it runs without Python's lock, or threads are of no
            use.
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
