"""The mean in few bits in one process, written from the definition; nothing of the package is used.

Tang et al., arXiv 1905.05957, with N servers, each for its part: all numbers are float32, as on the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

BLOCK = 128


def encode(values: np.ndarray, bits: int) -> np.ndarray:
    """Return what the other side reads of a vector."""
    largest, read = 2 ** (bits - 1) - 1, np.zeros_like(values)
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = round_up(np.float32(np.abs(block).max() / np.float32(largest)))
        if scale > 0:
            integers = np.rint(block / scale)  # to the nearest, ties to even
            read[start : start + BLOCK] = integers.clip(-largest, largest) * scale
    return read


def round_up(value: np.float32) -> np.float32:
    """Return the smallest number of eight significant bits, those of a bfloat16, that is not below a magnitude."""
    mantissa, exponent = math.frexp(value)
    return np.float32(math.ldexp(math.ceil(mantissa * 256), exponent - 8))


@dataclass
class OracleQuantized:
    """The mean over ranks, with what each of them keeps.

    On two levels a rank is a node, the vector one local rank's part of all tensors, and there is an oracle for each.

    Attributes:
        residuals: of each rank, of the whole vector.
    """

    num_ranks: int
    bits: int
    residuals: list[np.ndarray] = field(default_factory=list)

    def mean(self, signals: list[np.ndarray]) -> np.ndarray:
        """Return the mean that all ranks get."""
        num_ranks, numel = self.num_ranks, len(signals[0])
        if not self.residuals:
            self.residuals = [np.zeros(numel, dtype=np.float32) for _ in range(num_ranks)]
        size = math.ceil(numel / num_ranks)
        received = np.zeros((num_ranks, num_ranks, size), dtype=np.float32)  # by sender and owner
        unsent = np.zeros_like(received)
        for rank, signal in enumerate(signals):
            wanted = np.zeros(num_ranks * size, dtype=np.float32)
            wanted[:numel] = signal + self.residuals[rank]
            for owner, part in enumerate(wanted.reshape(num_ranks, size)):
                received[rank, owner] = encode(part, self.bits)
                unsent[rank, owner] = part - received[rank, owner]
        answers = []
        for owner in range(num_ranks):
            mean = received[0, owner].copy()
            for rank in range(1, num_ranks):
                mean += received[rank, owner]
            mean /= np.float32(num_ranks)
            answers.append(encode(mean, self.bits))
            unsent[owner, owner] += np.float32(num_ranks) * (mean - answers[-1])
        self.residuals = [own.reshape(-1)[:numel] for own in unsent]
        return np.concatenate(answers)[:numel]
