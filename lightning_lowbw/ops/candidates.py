"""The largest elements of a tensor: the specification of `compiled_selection`, and the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_PER_CANDIDATE = 4  # elements: where more than one in this many is a candidate, `top_k` of all takes no longer
AT_ONCE_ON_CPU = 1 << 16  # elements, with keys of 8 bytes, which stay in the cache
AT_ONCE = 1 << 24  # elsewhere: few launches, and the keys take 128 MiB


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


def top_k_of_chunks(values: Tensor, chunk: int, k: int, k_last: int) -> Tensor:
    """Return the positions of the k largest |values| of each chunk, of equal ones the first: int64, ascending.

    As `top_k` of each, but together, and without waiting for a GPU.

    Args:
        values: flat; float32 or float64.
        chunk: this many consecutive elements.
        k: of each whole chunk, in [0, chunk].
        k_last: of the rest behind the last whole one, in [0, rest].
    """
    at_once = AT_ONCE_ON_CPU if values.device.type == "cpu" else AT_ONCE
    size = max(1, at_once // chunk) * chunk
    split = values.numel() // chunk * chunk
    positions = [_top_k_of_rows(values[i : min(i + size, split)].view(-1, chunk), k) + i for i in range(0, split, size)]
    return torch.cat([*positions, _top_k_of_rows(values[split:].unsqueeze(0), k_last) + split])


def _top_k_of_rows(rows: Tensor, k: int) -> Tensor:
    magnitudes, length = rows.abs(), rows.shape[1]
    if magnitudes.dtype == torch.float32:
        # `topk` takes any of equal ones. So no two keys are equal: magnitude first, then how far it is from the end.
        from_end = torch.arange(length - 1, -1, -1, device=rows.device)
        keys = magnitudes.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).add_(from_end)
        found = keys.topk(k, sorted=False).indices
    else:  # no room for both in 64 bits
        found = magnitudes.sort(descending=True, stable=True).indices[:, :k]
    firsts = torch.arange(len(rows), device=rows.device).mul_(length).unsqueeze(1)
    return found.sort().values.add_(firsts).view(-1)


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
