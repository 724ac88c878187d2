"""How selected elements are laid out on the wire.

One message holds all sparse tensors of a step: the positions of all of them, then their values. How many elements
each tensor has is known to all ranks (`num_selected`), so it is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

ValueDtype = Literal["float32", "bfloat16", "float16"]
VALUE_DTYPES: tuple[str, ...] = get_args(ValueDtype)

INDEX_BYTES = 4  # int32: a position inside one tensor
MAX_NUMEL = 2**31 - 1  # the largest tensor whose positions fit
ALIGNMENT_BYTES = 4  # messages of all ranks lie behind one another and are read as int32


@dataclass(frozen=True)
class IndexValueCodec:
    """Positions as int32, then values in `value_dtype`, padded to four bytes.

    Args:
        value_dtype: one of `VALUE_DTYPES`.
    """

    value_dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the values on the wire."""
        dtype = getattr(torch, self.value_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def nbytes(self, counts: Sequence[int]) -> int:
        """Return the size of a message with `counts[i]` elements of tensor i, in bytes."""
        exact = sum(counts) * (INDEX_BYTES + self.torch_dtype.itemsize)
        return -(-exact // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def encode(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Pack (positions, values) of each tensor into one message: uint8, shape (nbytes,)."""
        indices = torch.cat([indices for indices, _ in parts]).to(torch.int32)
        values = torch.cat([values for _, values in parts])
        message = torch.zeros(
            self.nbytes([values.numel() for _, values in parts]), dtype=torch.uint8, device=values.device
        )
        split = indices.numel() * INDEX_BYTES
        message[:split].view(torch.int32).copy_(indices)
        message[split : split + values.numel() * values.itemsize].view(values.dtype).copy_(values)
        return message

    def decode(self, message: Tensor, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Unpack a message into (positions int64, values) of each tensor.

        Raises:
            ValueError: the message is not `nbytes(counts)` long.
        """
        if message.numel() != self.nbytes(counts):
            raise ValueError(f"A message of {message.numel()} bytes; {self.nbytes(counts)} were expected.")
        total = sum(counts)
        split = total * INDEX_BYTES
        indices = message[:split].view(torch.int32).to(torch.int64)
        values = message[split : split + total * self.torch_dtype.itemsize].view(self.torch_dtype)
        return list(zip(indices.split(list(counts)), values.split(list(counts)), strict=True))
