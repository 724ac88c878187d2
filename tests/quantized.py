"""Messages of few bits per value, whole: what the tests of several layers write and read."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lowbw.payloads.quantized import QuantizedFormat


def encode(value_format: QuantizedFormat, vectors: Tensor) -> Tensor:
    """Return the messages of vectors, shape (vectors, numel); these stay as they are."""
    numel = vectors.shape[1]
    messages = torch.empty((len(vectors), value_format.nbytes(numel)), dtype=torch.uint8)
    value_format.write_(messages, numel, 0, vectors.clone())
    return messages


def decode(value_format: QuantizedFormat, messages: Tensor, numel: int) -> Tensor:
    """Return the vectors of messages."""
    return value_format.read(messages, numel, 0, numel)
