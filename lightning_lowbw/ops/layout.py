"""The order of a parameter's elements: their order in memory.

So a pass over a channels_last or transposed parameter, its gradient and its optimizer state needs no copy of them. All
ranks must have it laid out alike; DDP compares the strides when it starts.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Order = tuple[int, ...]


def order_of(tensor: Tensor) -> Order:
    """Return its dimensions, the slowest in memory first; as they are for a contiguous one, or one with gaps."""
    as_they_are = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return as_they_are
    order = _by_stride(tuple(tensor.shape), tensor.stride())
    return order if tensor.permute(order).is_contiguous() else as_they_are


@lru_cache(maxsize=4096)
def _by_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> Order:
    # A dimension of one element may have any stride.
    return tuple(sorted(range(len(shape)), key=lambda each: (shape[each] != 1, -strides[each])))


def in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of a tensor in the shape of a parameter that is contiguous where both are laid out alike."""
    return tensor if parameter.is_contiguous() else tensor.permute(order_of(parameter))


def flat_in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of a tensor in a parameter's order: a view where both are laid out alike, else a copy."""
    return in_order(tensor, parameter).reshape(-1)


def copy_in_order_(tensor: Tensor, parameter: Tensor, values: Tensor) -> None:
    """Write values, flat and in a parameter's order, into a tensor of its shape."""
    target = in_order(tensor, parameter)
    target.copy_(values.view(target.shape))


def reordered(values: Tensor, shape: tuple[int, ...], old: Order, new: Order) -> Tensor:
    """Return flat values of a whole tensor, in one order, in another."""
    if old == new:
        return values
    logical = torch.empty(shape, dtype=values.dtype, device=values.device)
    permuted = logical.permute(old)
    permuted.copy_(values.view(permuted.shape))
    return logical.permute(new).reshape(-1)
