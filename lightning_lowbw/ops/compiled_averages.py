"""A twin of `averages.average_many_` compiled by numba, to the same bits. See `compiler` for numba itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from lightning_lowbw.ops.averages import Arrival
from lightning_lowbw.ops.compiled import _multiply_add
from lightning_lowbw.ops.compiler import compile_kernel, import_numba, register

BLOCK = 1 << 13  # elements: their means stay in the first cache

__all__ = ["average_many_"]


def average_many_(arrivals: Sequence[Arrival], positions: Tensor, values: Tensor) -> None:
    """Average the elements of all participants for several tensors; see `averages.average_many_`. For the CPU."""
    positions, values = positions.contiguous(), values.contiguous()
    for arrival in arrivals:
        where = positions[arrival.group].numpy(), values[arrival.group].numpy(), arrival.first, arrival.count
        if arrival.weight is None:
            _kernels()["add"](arrival.out.numpy(), *where)
        else:
            _kernels()["step"](arrival.weight.detach().numpy(), -arrival.rate, *where)


@cache
def _kernels() -> dict[str, Callable[..., Any]]:
    register(_multiply_add, fastmath={"contract"})
    register(_add_below)
    numba = import_numba()
    vector, number, size = numba.float32[::1], numba.float32, numba.int64
    where = (numba.int64[:, ::1], numba.float32[:, ::1], size, size)
    return {
        "add": compile_kernel(_add, numba.void(vector, *where)),
        "step": compile_kernel(_step, numba.void(vector, number, *where)),
    }


# What numba compiles.


def _add_below(end, mean, start, positions, values, following, last):  # type: ignore[no-untyped-def]
    """Add the elements of all participants that lie below `end`, to means whose first is at `start`; in their order.

    Positions ascend. Where a damaged message has others, they are taken for `start`, so that nothing is written beside
    the means.
    """
    share = np.float32(1.0 / positions.shape[0])
    for participant in range(positions.shape[0]):
        i = following[participant]
        while i < last and positions[participant, i] < end:
            mean[max(positions[participant, i] - start, 0)] += values[participant, i] * share
            i += 1
        following[participant] = i


def _add(out, positions, values, first, count):  # type: ignore[no-untyped-def]
    following = np.full(positions.shape[0], first)
    for start in range(0, out.size, BLOCK):
        mean = out[start : start + BLOCK]
        mean[:] = 0
        _add_below(start + mean.size, mean, start, positions, values, following, first + count)


def _step(weight, rate, positions, values, first, count):  # type: ignore[no-untyped-def]
    begun, following = np.full(positions.shape[0], first), np.full(positions.shape[0], first)
    mean = np.zeros(BLOCK, dtype=np.float32)
    for start in range(0, weight.size, BLOCK):
        begun[:] = following
        _add_below(start + BLOCK, mean, start, positions, values, following, first + count)
        for participant in range(positions.shape[0]):
            for i in range(begun[participant], following[participant]):
                place = max(positions[participant, i] - start, 0)
                if mean[place] != 0:  # once for all that have sent it; a mean of zero changes nothing
                    weight[start + place] = _multiply_add(rate, mean[place], weight[start + place])
                    mean[place] = 0
