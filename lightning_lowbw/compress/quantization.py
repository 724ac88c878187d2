"""Vectors in few bits per value, for a mean with error feedback: half types, or integers with a scale per block.

A linear format ("int8", "int4") cuts a vector into blocks of SCALED values and sends of each block one scale and of
each value the nearest integer in units of it. For dense values, mostly near zero, that is closer than the logarithmic
levels of `compress.codec`, which are made for the elements that top-k selects.

Source: a scale per small block as in Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep
Learning", arXiv 2111.08617. Deviation: rounds to nearest, not at random, because the error is fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_lowbw.kernels.dispatch import blocks_for
from lightning_lowbw.kernels.reference import SCALED
from lightning_lowbw.kernels.tensors import allocate

SCALE_BYTES = 2  # a bfloat16, an eighth of a bit per value


class QuantizedFormat(Protocol):
    """How the values of vectors are written in few bits; several vectors of one length at once, each by itself.

    A vector has at least one value. A message is written and read in ranges, so that on a CPU what belongs to a range
    stays in the cache. A range begins at a multiple of SCALED, and ends at one or with the vector; the message is the
    same however it is divided.

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
        return numel * self.dtype.itemsize

    def write_(self, messages: Tensor, numel: int, start: int, values: Tensor) -> None:
        sent, limit = messages.view(self.dtype)[:, start : start + values.shape[1]], torch.finfo(self.dtype).max
        sent.copy_(values.clamp(-limit, limit))  # a late burst would become inf
        values.sub_(sent)  # what is left is the rounding error, which error feedback sends later

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        sent = messages.view(self.dtype)[:, start:stop]
        return allocate(sent.shape, torch.float32, sent.device).copy_(sent)


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
        sent, integers = (messages[:, each] for each in self._sections(numel, start, start + values.shape[1]))
        scales = sent.new_empty((len(values), sent.shape[1] // SCALE_BYTES), dtype=torch.bfloat16)
        blocks_for(values, integers).encode_blocks_(values, scales, integers, self.bits)
        sent.copy_(scales.view(torch.uint8))  # a copy: a range may begin at an odd byte

    def read(self, messages: Tensor, numel: int, start: int, stop: int) -> Tensor:
        _check_size(messages, self.nbytes(numel))
        received, integers = (messages[:, section] for section in self._sections(numel, start, stop))
        scales = received.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)  # aligned for its dtype
        values: Tensor = blocks_for(scales).decode_blocks(scales, integers, stop - start, self.bits)
        return values

    def _sections(self, numel: int, start: int, stop: int) -> tuple[slice, slice]:
        """Return where in a message the scales and the integers of a range are."""
        split = self._scales_end(numel)
        integers = slice(split + self._integers_end(start), split + self._integers_end(stop))
        return slice(self._scales_end(start), self._scales_end(stop)), integers

    def _scales_end(self, numel: int) -> int:
        return -(-numel // SCALED) * SCALE_BYTES

    def _integers_end(self, numel: int) -> int:
        return -(-numel * self.bits // 8)  # rounded up: the last byte of int4 may hold one value


def _check_size(messages: Tensor, nbytes: int) -> None:
    if messages.shape[1] != nbytes:
        raise ValueError(f"A message of {messages.shape[1]} bytes; {nbytes} were expected.")


FORMATS: dict[str, QuantizedFormat] = {  # by their public names; a file with another one adds it here
    "bfloat16": HalfFormat(torch.bfloat16),
    "float16": HalfFormat(torch.float16),
    "int8": LinearFormat(8),
    "int4": LinearFormat(4),
}


def quantized_mean_bytes(numel: int, num_ranks: int, value_format: QuantizedFormat) -> int:
    """Return the bytes a rank sends for a mean of vectors in few bits: 2 (W - 1) parts of ceil(numel / W) values.

    On two levels that of a part of ceil(numel / ranks of a node) elements, between nodes; and in a node, to gather the
    parts of the mean, `all_gather_bytes` of a part in the vector's own dtype.
    """
    return 2 * (num_ranks - 1) * value_format.nbytes(-(-numel // num_ranks))
