"""Vectors in few bits per value, for a mean with error feedback: half types, or integers with a scale per block.

A linear format ("int8", "int4") cuts a vector into blocks of BLOCK values and sends of each block one scale and of each
value the nearest integer in units of it, see `ops.blocks`. For dense values, mostly near zero, that is closer than the
logarithmic levels of `what.values`, which are made for the elements that top-k selects.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_lowbw.ops.blocks import BLOCK
from lightning_lowbw.ops.dispatch import blocks_for
from lightning_lowbw.what.values import FloatFormat

NarrowName = Literal["bfloat16", "float16", "int8", "int4"]
NARROW_NAMES: tuple[str, ...] = get_args(NarrowName)

SCALE_BYTES = 2  # a bfloat16


class NarrowFormat(Protocol):
    """How the values of vectors are written in few bits; several vectors of one length at once, each by itself.

    A message is written and read in ranges, so that on a CPU what belongs to a range stays in the cache. A range begins
    at a multiple of BLOCK, and ends at one or with the vector; the message is the same however it is divided.

    Zero stays zero. Values that are too large for the format are written as its largest value.
    """

    def nbytes(self, numel: int) -> int:
        """Return the size of a vector of `numel` values, in bytes."""
        ...

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        """Write a range of vectors into their messages.

        In place:
            The messages; the values, which become their rounding errors.

        Args:
            messages: uint8, shape (vectors, nbytes(numel)).
            numel: values of a whole vector.
            start: of the range.
            values: float32 or wider, shape (vectors, values of the range).
        """
        ...

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        """Return a range of what `write_` has written: float32, shape (vectors, stop - start).

        Raises:
            ValueError: the messages are not `nbytes(numel)` long.
        """
        ...


@dataclass(frozen=True)
class HalfFormat:
    """Values as floats of a half type: 16 bits each.

    Args:
        dtype: bfloat16 or float16. Float16 ends at 65504.
    """

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return FloatFormat(self.dtype).nbytes([numel])

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        data = FloatFormat(self.dtype).encode(values, [values.numel()])
        messages[:, self.nbytes(start) : self.nbytes(start + values.shape[1])] = data
        values.sub_(FloatFormat(self.dtype).decode(data, [values.numel()]))

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        data = messages[:, self.nbytes(start) : self.nbytes(stop)].flatten()
        return FloatFormat(self.dtype).decode(data, [data.numel()]).view(len(messages), stop - start)


@dataclass(frozen=True)
class LinearFormat:
    """Integers from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1 in units of a scale, [scales of all blocks | integers].

    A value that is not finite in float32 makes its whole block not finite.

    Args:
        bits: 8 or 4.
    """

    bits: int

    def nbytes(self, numel: int) -> int:
        return self._scales_end(numel) + self._integers_end(numel)

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        scales, integers = (messages[:, each] for each in self._sections(numel, start, start + values.shape[1]))
        scales.copy_(blocks_for(integers, values).encode_(values, self.bits, integers).view(torch.uint8))

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        scales, integers = (messages[:, section].contiguous() for section in self._sections(numel, start, stop))
        aligned = scales.flatten().clone().view(torch.bfloat16).view(len(messages), -(-(stop - start) // BLOCK))
        return blocks_for(integers).decode(aligned, integers, stop - start, self.bits)

    def _sections(self, numel: int, start: int, stop: int) -> tuple[slice, slice]:
        """Return where in a message the scales and the integers of a range are."""
        split = self._scales_end(numel)
        integers = slice(split + self._integers_end(start), split + self._integers_end(stop))
        return slice(self._scales_end(start), self._scales_end(stop)), integers

    def _scales_end(self, numel: int) -> int:
        return -(-numel // BLOCK) * SCALE_BYTES

    def _integers_end(self, numel: int) -> int:
        return -(-numel * self.bits // 8)


def _check_size(messages: Tensor, nbytes: int) -> None:
    if messages.shape[1] != nbytes:
        raise ValueError(f"A message of {messages.shape[1]} bytes; {nbytes} were expected.")


@cache
def make_narrow_format(name: str) -> NarrowFormat:
    """Return a format by its public name, one of `NARROW_NAMES`."""
    formats: dict[str, NarrowFormat] = {f"int{bits}": LinearFormat(bits) for bits in (8, 4)}
    for dtype in (torch.bfloat16, torch.float16):
        formats[str(dtype).removeprefix("torch.")] = HalfFormat(dtype)
    return formats[name]
