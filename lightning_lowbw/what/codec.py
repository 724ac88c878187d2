"""How selected elements are laid out on the wire.

One message holds all sparse tensors of a step: the positions of all of them, then their values. How many elements
each tensor has is known to all ranks (`num_selected`), so it is not sent. `what/positions.py` and `what/values.py`
define how each part is coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_lowbw.ops import gpu
from lightning_lowbw.ops.tensors import allocate
from lightning_lowbw.what.positions import fields_of, layout_of, pack, unpack
from lightning_lowbw.what.values import FloatFormat, make_value_format

ALIGNMENT_BYTES = 4  # messages of all ranks are concatenated and are read as int32


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

    def encode(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        numels: Sequence[int],
        residuals: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Pack (positions int64, ascending; values float32) of each tensor into one message: uint8, shape (nbytes,).

        In place:
            `residuals`, to which the rounding errors of the value format are added: of each tensor, float32 or float64,
            flat; None: they are lost. The sent values are `decode_values`.
        """
        counts = [values.numel() for _, values in parts]
        positions, values = (joined(column) for column in zip(*parts, strict=True))
        words_bytes, data_bytes, padding_bytes = self._sections(counts, numels)
        value_format = make_value_format(self.value_dtype)
        is_wide = residuals is not None and any(residual.dtype != torch.float32 for residual in residuals)
        if gpu.is_available(values.device) and not is_wide:
            message = torch.zeros(words_bytes + data_bytes + padding_bytes, dtype=torch.uint8, device=values.device)
            data = message[words_bytes : words_bytes + data_bytes]
            is_float = isinstance(value_format, FloatFormat)
            if isinstance(value_format, FloatFormat):
                sent = data.view(value_format.dtype)
            else:
                data.copy_(value_format.encode(values, counts))
                sent = value_format.decode(data, counts)
            fields = fields_of(tuple(counts), tuple(numels), values.device)
            words = message.view(torch.int32)
            code = layout_of(tuple(counts), tuple(numels))[:2]
            gpu.pack(positions, values, fields, code, max(counts), words, sent, residuals, is_written=not is_float)
            return message
        words = pack(positions, counts, numels)
        data = value_format.encode(values, counts)
        assert data.numel() == data_bytes
        if residuals is not None and self.value_dtype != "float32":
            errors = (values - value_format.decode(data, counts)).split(counts)
            for residual, (at, _), error in zip(residuals, parts, errors, strict=True):
                residual.index_add_(0, at, error.to(residual.dtype))
        return torch.cat([words.view(torch.uint8), data, data.new_zeros(padding_bytes)])

    def decode(
        self, messages: Tensor, counts: Sequence[int], numels: Sequence[int], damaged: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Unpack messages: positions int64 and values float32, both of shape (messages, sum(counts)).

        Args:
            messages: uint8, shape (messages, nbytes), whose rows are contiguous and begin at multiples of four bytes.
            damaged: bool, a scalar on the device: set on a GPU where a CPU would raise an error, to be checked later;
                the positions are clamped into their tensors then. None: the host waits, and raises.

        Raises:
            ValueError: they are not `nbytes(counts, numels)` long, or one holds another number of positions, or one
                outside its tensor.
        """
        words_bytes, data_bytes, padding_bytes = self._sections(counts, numels)
        if messages.shape[1] != words_bytes + data_bytes + padding_bytes:
            raise ValueError(
                f"A message of {messages.shape[1]} bytes; {words_bytes + data_bytes + padding_bytes} were expected."
            )
        value_format, device = make_value_format(self.value_dtype), messages.device
        words, data = messages[:, :words_bytes], messages[:, words_bytes : words_bytes + data_bytes]
        if gpu.is_available(device):
            dtype = value_format.dtype if isinstance(value_format, FloatFormat) else None
            found = torch.zeros((), dtype=torch.bool, device=device) if damaged is None else damaged
            positions, values = gpu.unpack(
                messages.view(torch.int32),
                fields_of(tuple(counts), tuple(numels), device),
                layout_of(tuple(counts), tuple(numels))[:2],
                sum(counts),
                dtype,
                0 if dtype is None else words_bytes // dtype.itemsize,
                found,
            )
            if damaged is None and found:
                raise ValueError("A damaged message: its positions are too many, too few, or outside their tensors.")
            return positions, values if dtype is not None else value_format.decode(data, counts)
        positions = unpack(words.view(torch.int32), counts, numels)
        return positions, value_format.decode(data, counts)

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
        return (
            layout_of(tuple(counts), tuple(numels)).num_words * ALIGNMENT_BYTES,
            data_bytes,
            -data_bytes % ALIGNMENT_BYTES,
        )


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return flat tensors, concatenated; no copy where they are contiguous in memory, as the parts of a split do."""
    numel, first = sum(tensor.numel() for tensor in tensors), tensors[0]
    if _is_one_piece(tensors):
        return first.as_strided((numel,), (1,))
    return torch.cat(list(tensors), out=allocate(numel, first.dtype, first.device))


def _is_one_piece(tensors: Sequence[Tensor]) -> bool:
    storage, end = tensors[0].untyped_storage()._cdata, tensors[0].storage_offset()
    for tensor in tensors:
        if tensor.untyped_storage()._cdata != storage or tensor.storage_offset() != end or not tensor.is_contiguous():
            return False
        end += tensor.numel()
    return True
