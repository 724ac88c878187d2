"""How selected elements are laid out on the wire.

One message holds all sparse tensors of a step: the positions of all of them, then their values. How many elements
each tensor has is known to all ranks (`num_selected`), so it is not sent. `what/positions.py` and `what/values.py`
tell how each part is coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbw.what.positions import num_words, pack, unpack
from lightning_lowbw.what.values import make_value_format

ALIGNMENT_BYTES = 4  # messages of all ranks lie behind one another and are read as int32


@dataclass(frozen=True)
class SparseCodec:
    """[positions in Elias-Fano code | values in one of `VALUE_NAMES`], padded to four bytes.

    The size follows from the number of elements alone, so it is the same on all ranks. At one in a thousand an element
    takes 12.0 bits and those of its value: 32, 16, 8.25 or 4.25.

    Args:
        value_dtype: one of `VALUE_NAMES`.
    """

    value_dtype: str = "bfloat16"

    def nbytes(self, counts: Sequence[int], numels: Sequence[int]) -> int:
        """Return the size of a message with `counts[i]` of the `numels[i]` elements of tensor i, in bytes.

        Raises:
            ValueError: a tensor has more than MAX_NUMEL elements, or fewer than are to be sent of it.
        """
        return sum(self._sections(counts, numels))

    def encode(self, parts: Sequence[tuple[Tensor, Tensor]], numels: Sequence[int]) -> Tensor:
        """Pack (positions int64, ascending; values float32) of each tensor into one message: uint8, shape (nbytes,).

        A value format may round: what goes out is `decode_values`.
        """
        counts = [values.numel() for _, values in parts]
        positions, values = (torch.cat(column) for column in zip(*parts, strict=True))
        _, data_bytes, padding_bytes = self._sections(counts, numels)
        words = pack(positions, counts, numels)
        data = make_value_format(self.value_dtype).encode(values, counts)
        assert data.numel() == data_bytes
        return torch.cat([words.view(torch.uint8), data, data.new_zeros(padding_bytes)])

    def decode(self, message: Tensor, counts: Sequence[int], numels: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Unpack a message into (positions int64, values float32) of each tensor.

        Raises:
            ValueError: the message is not `nbytes(counts, numels)` long, or holds another number of positions.
        """
        values = self.decode_values(message, counts, numels)
        words = message[: self._sections(counts, numels)[0]].view(torch.int32)
        return list(zip(unpack(words, counts, numels).split(list(counts)), values, strict=True))

    def decode_values(self, message: Tensor, counts: Sequence[int], numels: Sequence[int]) -> list[Tensor]:
        """Unpack only the values of each tensor: to a sender, what it has sent.

        Raises:
            ValueError: the message is not `nbytes(counts, numels)` long.
        """
        sections = self._sections(counts, numels)
        if message.numel() != sum(sections):
            raise ValueError(f"A message of {message.numel()} bytes; {sum(sections)} were expected.")
        data = message[sections[0] : sections[0] + sections[1]]
        return list(make_value_format(self.value_dtype).decode(data, counts).split(list(counts)))

    def _sections(self, counts: Sequence[int], numels: Sequence[int]) -> tuple[int, int, int]:
        """Return the bytes of positions, values and padding."""
        data_bytes = make_value_format(self.value_dtype).nbytes(counts)
        return num_words(counts, numels) * ALIGNMENT_BYTES, data_bytes, -data_bytes % ALIGNMENT_BYTES
