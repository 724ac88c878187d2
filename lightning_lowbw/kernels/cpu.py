"""Twins of `reference` for contiguous float32 on a CPU, compiled by numba: one pass over memory, the same bits.

numba is optional (``pip install lightning-lowbw[cpu]``); `dispatch` imports this file where it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.kernels import numba_kernels as kernels
from lightning_lowbw.kernels.reference import Arrival, Segment, sample_accumulated
from lightning_lowbw.kernels.tensors import allocate

__all__ = ["accumulate_", "average_many_", "decode_blocks", "encode_blocks_", "largest", "pack_", "reach",
           "sample_accumulated", "unpack"]  # fmt: skip

T = TypeVar("T")
MIN_PER_THREAD = 1 << 19  # elements: half a millisecond, against a tenth to start a thread
NOTHING = np.empty(0, dtype=np.float32)  # stands for a missing tensor


def accumulate_(segment: Segment, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Accumulate a gradient and return where the residual reaches a threshold; see `reference.accumulate_`.

    What it takes beside a copy: `benchmarks/results/ops_cpu.md`.
    """
    moment, residual = segment.second_moment, segment.residual
    square, largest = (None, None) if moment is None else (moment.square, moment.largest)
    adam = (0.0,) * 4 if moment is None else (moment.beta2, (1.0 - moment.beta2) * moment.share, *moment.line)
    tensors = (residual, segment.momentum_buffer, segment.gradient, segment.weight, square, largest)
    numbers = np.array([segment.momentum, 1.0 - segment.dampening, segment.weight_decay, -segment.ahead, segment.sign])
    momentum, gain, decay, less, sign = numbers.astype(np.float32)
    fault = np.empty(0, dtype=np.bool_) if segment.fault is None else segment.fault.view(1).numpy()
    least, most = _bits(threshold), min(most, residual.numel())

    def run(start: int, stop: int) -> Tensor | None:
        positions = _room(min(most, stop - start) if threshold > 0 else -kernels.CHUNK)
        count = kernels.accumulate(
            *(NOTHING if each is None else each.detach()[start:stop].numpy() for each in tensors),
            momentum, gain, segment.nesterov, decay, less, sign, tuple(map(np.float32, adam)), least,
            positions.numpy(), fault,
        )  # fmt: skip
        return positions[:count].add_(start) if count <= most else None

    pieces = _over_threads(run, residual.numel())
    found = [each for each in pieces if each is not None]
    if len(found) < len(pieces) or sum(map(len, found)) > most:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def reach(values: Tensor, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Return the positions of the elements whose magnitude reaches a threshold; see `reference.reach`."""
    positions = _room(min(most, values.numel()))
    count = kernels.reach(_bits_of(values), _bits(threshold), positions.numpy())
    return positions[:count] if count <= most else None


def largest(values: Tensor, k: int, chunk: int | None = None, k_last: int = 0) -> Tensor:
    """Return the positions of the k largest |values|, of all or of each chunk; see `reference.largest`."""
    numel, bits = values.numel(), _bits_of(values)
    chunk = max(1, numel) if chunk is None else chunk

    def run(start: int, stop: int) -> Tensor:
        num_full, rest = divmod(stop - start, chunk)
        num_found = num_full * k + (k_last if rest else 0)
        positions = _room(num_found)
        kernels.select_each(bits[start:stop], chunk, k, k_last, positions.numpy())
        return positions[:num_found].add_(start)

    pieces = _over_threads(run, numel, chunk)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def pack_(positions: Tensor, fields: Tensor, width: int, unary_bits: int, words: Tensor) -> None:
    """Write the positions of all tensors into `words`, zeros before; see `compress.codec.pack`."""
    kernels.pack(positions.numpy(), fields.numpy(), width, unary_bits, words.numpy().view(np.uint32))


def unpack(words: Tensor, fields: Tensor, width: int, unary_bits: int, positions: Tensor) -> tuple[int, int]:
    """Read positions; return how many there are, and how many of them lie outside their tensors.

    In place:
        `positions`, with room for one more than are expected; not to be used where either number is wrong.
    """
    found, outside = kernels.unpack(words.numpy().view(np.uint32), fields.numpy(), width, unary_bits, positions.numpy())
    return int(found), int(outside)


def average_many_(arrivals: Sequence[Arrival], positions: Tensor, values: Tensor) -> None:
    """Average the elements of all participants for several tensors; see `reference.average_many_`."""
    positions, values = positions.contiguous(), values.contiguous()
    for arrival in arrivals:
        out, weight = (arrival.out, None) if arrival.weight is None else (None, arrival.weight.detach())
        kernels.average(
            *(NOTHING if each is None else each.numpy() for each in (out, weight)), np.float32(-arrival.rate),
            positions[arrival.group].numpy(), values[arrival.group].numpy(), arrival.first, arrival.count,
        )  # fmt: skip


def encode_blocks_(values: Tensor, scales: Tensor, packed: Tensor, largest: int, limit: int, bits: int) -> None:
    """Write vectors as integers with scales, and replace them by their rounding errors: `compress.quantization`."""
    numbers = np.float32(largest), np.int32(limit), np.finfo(np.float32).tiny
    kernels.encode_blocks(values.numpy(), scales.view(torch.int16).numpy(), packed.numpy(), *numbers, bits)


def decode_blocks(scales: Tensor, packed: Tensor, numel: int, bits: int) -> Tensor:
    """Return what `encode_blocks_` has written: float32, shape (vectors, numel)."""
    values = torch.empty((len(packed), numel), dtype=torch.float32)
    kernels.decode_blocks(scales.view(torch.int16).numpy(), packed.numpy(), values.numpy(), bits)
    return values


def _bits_of(values: Tensor) -> Any:
    return values.detach().view(torch.int32).numpy()


def _bits(threshold: float) -> Any:
    """Return a bound for magnitudes as integers: that of the least float32 that reaches a threshold, of 0 for none."""
    if not threshold > 0:
        return kernels.MAGNITUDE
    return np.int32(torch.tensor(threshold, dtype=torch.float32, device="cpu").view(torch.int32))


def _room(count: int) -> Tensor:
    """Return room for so many positions, and what `numba_kernels.collect` writes behind them."""
    return allocate(count + kernels.CHUNK, torch.int64)


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
