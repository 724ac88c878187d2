"""The concatenation of flat tensors, read and written in ranges, without a copy of the whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Joined:
    """Flat tensors as one vector. Beyond its end are zeros, and what is written there is dropped.

    Args:
        tensors: at least one; 1-d, of any floating dtypes, on one device; what is written goes into them.

    Attributes:
        numel: elements of all of them together.
        device: where they are.

    Example:
        >>> tensors = [torch.ones(2), torch.ones(3)]
        >>> Joined(tensors).write_(1, torch.tensor([5.0, 6.0]))
        >>> tensors
        [tensor([1., 5.]), tensor([6., 1., 1.])]
        >>> Joined(tensors).read(3, 4, torch.float32)
        tensor([1., 1., 0., 0.])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self._ends = list(accumulate(tensor.numel() for tensor in self._tensors))
        self.numel = self._ends[-1] if self._ends else 0

    def read(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a range of values: a view where they lie in one tensor of this dtype, else a copy; see `write_`."""
        pieces = list(self._pieces(start, numel))
        if len(pieces) == 1 and pieces[0][0].numel() == numel and pieces[0][0].dtype == dtype:
            return pieces[0][0]
        out = torch.empty(numel, dtype=dtype, device=self.device)
        for piece, where in pieces:
            out[where].copy_(piece)
        out[max(0, self.numel - start) :].zero_()
        return out

    def add_to_(self, start: int, out: Tensor) -> None:
        """Add the values from `start` on to `out`, which is 1-d."""
        for piece, where in self._pieces(start, out.numel()):
            out[where].add_(piece)

    def write_(self, start: int, values: Tensor) -> None:
        """Replace the values from `start` on; `values` are 1-d."""
        for piece, where in self._pieces(start, values.numel()):
            if piece.data_ptr() != values[where].data_ptr():  # else it is the view that `read` has returned
                piece.copy_(values[where])

    def add_(self, start: int, values: Tensor) -> None:
        """Add to the values from `start` on; `values` are 1-d."""
        for piece, where in self._pieces(start, values.numel()):
            piece.add_(values[where])

    def _pieces(self, start: int, numel: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield, of each tensor that a range touches, the part inside of it, and where in the range that is."""
        number, done = bisect_right(self._ends, start), 0
        while done < numel and number < len(self._tensors):
            tensor = self._tensors[number]
            offset = start + done - (self._ends[number] - tensor.numel())
            size = min(numel - done, tensor.numel() - offset)
            yield tensor[offset : offset + size], slice(done, done + size)
            number, done = number + 1, done + size
