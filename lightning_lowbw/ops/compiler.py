"""numba: whether it is there, and how functions are compiled by it.

It is optional (``pip install lightning-lowbw[cpu]``) and imported at first use. It compiles for some seconds and keeps
the result: beside the file or, where that is read-only, in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
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


def is_disabled() -> bool:
    """Whether `disable` has been called."""
    return bool(_faults)


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
    """Let functions be called by those that are compiled; with options of numba's."""
    from numba.extending import register_jitable

    for function in set(functions) - _registered:
        _registered.add(function)
        (register_jitable(**options) if options else register_jitable)(function)


def compile_kernel(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile a function for one signature, and keep the result for the next process where there is a place."""
    numba, folder = import_numba(), _cache_folder()
    options = {"nogil": True, "error_model": "numpy"}  # a division by zero is no exception, which no vector can raise
    before = numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)  # read when a function is decorated
    try:
        return numba.njit(signature, cache=folder is not None, **options)(function)
    except (RuntimeError, OSError):  # no source that numba could look at, or no space there
        return numba.njit(signature, **options)(function)
    finally:
        numba.config.CACHE_DIR = before


@cache
def _cache_folder() -> Path | None:
    """Return where what is compiled is kept, or None if there is no place.

    numba keeps a compiled function until the function's own file changes. It does not notice that a function it calls,
    or a constant, has changed in another file. So each version of the files of `ops` has a folder of its own.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    version = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "lightning_lowbw"
    chosen = import_numba().config.CACHE_DIR  # NUMBA_CACHE_DIR
    for parent in (chosen,) if chosen else (Path(__file__).parent / "__pycache__", of_user):
        folder = Path(parent) / f"numba-{version}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


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
