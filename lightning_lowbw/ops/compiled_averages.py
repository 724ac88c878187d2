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

__all__ = ["average_many_"]


def average_many_(arrivals: Sequence[Arrival], positions: Tensor, values: Tensor) -> None:
    """Average the elements of all participants for several tensors; see `averages.average_many_`. For the CPU."""
    positions, values = positions.contiguous(), values.contiguous()
    for arrival in arrivals:
        where = positions[arrival.group].numpy(), values[arrival.group].numpy(), arrival.first, arrival.count
        out = arrival.out.numpy()
        if arrival.weight is None:
            arrival.out.zero_()
            _kernels()["add"](out, *where)
        else:
            _kernels()["step"](out, arrival.weight.detach().numpy(), -arrival.rate, *where)


@cache
def _kernels() -> dict[str, Callable[..., Any]]:
    register(_multiply_add, fastmath={"contract"})
    register(_add)
    numba = import_numba()
    vector, number, size = numba.float32[::1], numba.float32, numba.int64
    where = (numba.int64[:, ::1], numba.float32[:, ::1], size, size)
    return {
        "add": compile_kernel(_add, numba.void(vector, *where)),
        "step": compile_kernel(_step, numba.void(vector, vector, number, *where)),
    }


# What numba compiles.


def _add(out, positions, values, first, count):  # type: ignore[no-untyped-def]
    share = np.float32(1.0 / positions.shape[0])
    for participant in range(positions.shape[0]):
        for i in range(first, first + count):
            out[positions[participant, i]] += values[participant, i] * share


def _step(out, weight, rate, positions, values, first, count):  # type: ignore[no-untyped-def]
    for participant in range(positions.shape[0]):
        for i in range(first, first + count):
            out[positions[participant, i]] = 0
    _add(out, positions, values, first, count)
    for participant in range(positions.shape[0]):
        for i in range(first, first + count):
            at = positions[participant, i]
            if out[at] != 0:  # once for all that have sent it; a mean of zero changes nothing
                weight[at] = _multiply_add(rate, out[at], weight[at])
                out[at] = 0
