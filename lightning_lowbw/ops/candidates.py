"""The largest elements of a tensor: the specification of `compiled_selection`, and the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_PER_CANDIDATE = 4  # elements: where more than one in so many is a candidate, `top_k` of all takes no longer


def reach(values: Tensor, threshold: float) -> Tensor:
    """Return the positions of the elements whose magnitude reaches a threshold: int64, ascending.

    Args:
        values: flat.
        threshold: above 0.
    """
    return (values.abs() >= threshold).nonzero().squeeze(1)


def top_k(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest |values|, of equal ones the first: int64, shape (k,), ascending.

    A NaN is larger than all numbers. Sorts: 20 ns per element.
    """
    # As integers the bits of floats are in the order of magnitudes, NaN behind infinity.
    magnitudes = values.abs()
    if magnitudes.dtype == torch.float32:
        magnitudes = magnitudes.view(torch.int32)
    least = magnitudes.topk(k, sorted=False).values.amin() if k else 0
    larger = (magnitudes > least).nonzero().squeeze(1)[:k]
    equal = (magnitudes == least).nonzero().squeeze(1)[: k - larger.numel()]
    return torch.cat([larger, equal]).sort().values


def narrow(values: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, float]:
    """Return which candidates are the k largest, ascending, and the magnitude of the least of them; see `top_k`.

    Args:
        values: flat.
        candidates: positions, int64, ascending.
        k: at least 1, at most as many as there are candidates.
    """
    magnitudes = values[candidates].abs()
    found = top_k(magnitudes, k)
    return candidates[found], float(magnitudes[found].min())
