"""The consensus view: the mean of the replicas is put into the model, to be looked at, and taken out again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each tensor, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def unchanged(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], shown: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what tensors had before others were shown, of those that the user's code has not changed meanwhile.

    Args:
        tensors: by name.
        own: what they had.
        shown: copies of what was put into them; of those that the user's code may change.
    """
    return {
        name: each
        for name, each in own.items()
        if name not in shown or (name in tensors and _is_same(tensors[name], shown[name]))
    }


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
