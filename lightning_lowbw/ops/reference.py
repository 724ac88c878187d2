"""The arithmetic of deep gradient compression on one tensor, in plain torch: the specification of every faster twin.

Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887. The numbers of equations below are those of the
PaddlePaddle Fleet document, which follows the paper. Nothing here communicates; selection under a threshold lives in
`core/selection.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real, with a last dimension of 2; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat(tensor: Tensor) -> Tensor:
    """View a tensor as one dimension, in logical (row-major) order; a copy if its memory is laid out otherwise."""
    return tensor.reshape(-1)


def correct_(
    residual: Tensor, momentum_buffer: Tensor | None, gradient: Tensor, *, momentum: float, nesterov: bool
) -> None:
    """Accumulate a corrected gradient locally: momentum correction.

    Plain: ``u = m u + g; v = v + u`` (eq. 7). Nesterov: ``u = m u + g; v = v + g + m u``.
    Without a buffer: ``v = v + g``, which is error feedback.

    Deviation: the paper's Nesterov form is ``u = m (u + g); v = v + u + g``. Its velocity is m times torch's
    `momentum_buffer`; keeping torch's leaves the buffer valid for the dense phase, for checkpoints and for plain DDP.

    In place:
        `residual` and `momentum_buffer`.

    Args:
        residual: v, the unsent gradient; float32, the parameter's shape.
        momentum_buffer: u, the optimizer's own velocity, the parameter's shape and dtype; None without momentum.
        gradient: g, this rank's mean gradient, clipped, weight decay already added; the parameter's shape.
        momentum: m, in [0, 1).
        nesterov: whether the optimizer takes the look-ahead form.

    Source: arXiv 1712.01887, section 3.2 and appendix B.
    """
    if momentum_buffer is None:
        residual.add_(gradient)
        return
    momentum_buffer.mul_(momentum).add_(gradient)
    if nesterov:
        residual.add_(gradient).add_(momentum_buffer, alpha=momentum)
    else:
        residual.add_(momentum_buffer)


def reach(values: Tensor, threshold: float) -> Tensor:
    """Return the positions of the elements whose magnitude reaches a threshold: int64, ascending.

    Args:
        values: flat.
        threshold: above 0.
    """
    return (values.abs() >= threshold).nonzero().squeeze(1)


def accumulate_(
    residual: Tensor,
    momentum_buffer: Tensor | None,
    gradient: Tensor,
    weight: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    sign: float,
    threshold: float,
) -> Tensor:
    """Accumulate a gradient locally, and return where the residual reaches a threshold.

    ``g = sign G + c w`` (eq. 12), then `correct_`, then `reach`. Whoever knows the threshold beforehand needs a single
    pass over memory.

    In place:
        `residual` and `momentum_buffer`.

    Args:
        residual: v; float32, flat, contiguous, as are all of them.
        momentum_buffer: u, or None without momentum; float32, bfloat16 or float16, as are the following.
        gradient: G, this rank's mean gradient, clipped.
        weight: w, or None without decay.
        momentum: m, in [0, 1).
        nesterov: whether the optimizer takes the look-ahead form; nothing without a buffer.
        weight_decay: c.
        sign: -1 where the optimizer climbs, else 1.
        threshold: at or below 0 nothing is compared, and nothing is returned.

    Returns:
        The positions where |v| reaches the threshold: int64, ascending.

    Source: arXiv 1712.01887, section 3.2; the decay as in PaddlePaddle Fleet.
    """
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # c w is lost in a narrow G
    if sign < 0:
        gradient = -gradient
    if weight is not None:
        gradient = gradient.add(weight, alpha=weight_decay)
    correct_(residual, momentum_buffer, gradient, momentum=momentum, nesterov=nesterov)
    return reach(residual, threshold) if threshold > 0 else torch.empty(0, dtype=torch.int64, device=residual.device)


def sample_accumulated(
    residual: Tensor,
    momentum_buffer: Tensor | None,
    gradient: Tensor,
    weight: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    sign: float,
    stride: int,
) -> Tensor:
    """Return |v| as `accumulate_` will leave it, of every `stride`-th element; nothing is written.

    Args as there, and:
        stride: 1 or more.

    Returns:
        float32, shape (ceil(numel / stride),).
    """
    sample = residual[::stride].clone()
    accumulate_(
        sample,
        None if momentum_buffer is None else momentum_buffer[::stride].clone(),
        gradient[::stride],
        None if weight is None else weight[::stride],
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        sign=sign,
        threshold=0.0,
    )
    return sample.abs_()


def take_(
    residual: Tensor, momentum_buffer: Tensor | None, indices: Tensor, *, value_dtype: torch.dtype, masking: bool
) -> Tensor:
    """Remove the selected elements from the residual and return them: momentum factor masking.

    ``v = v * not Mask; u = u * not Mask`` (eq. 9). What a narrow `value_dtype` rounds away stays in v, so
    sent + residual is the corrected gradient to the bit (float16: up to 2^29, of which 65504 is sent at a time).

    In place:
        `residual` and, when `masking`, `momentum_buffer`.

    Args:
        residual: v; float32, contiguous.
        momentum_buffer: u, the same shape; None without momentum.
        indices: distinct positions into the flattened tensor; int64, shape (k,).
        value_dtype: float32, bfloat16 or float16.
        masking: whether the velocity of sent elements is cleared.

    Returns:
        The sent values, `value_dtype`, shape (k,).

    Source: arXiv 1712.01887, section 3.3.
    """
    unsent = residual.view(-1)
    exact = unsent[indices]
    limit = torch.finfo(value_dtype).max
    values = exact.clamp(-limit, limit).to(value_dtype)  # float16 would turn a late burst into inf
    unsent[indices] = exact - values.to(exact.dtype)
    if masking and momentum_buffer is not None:
        # A zero is padding (a dead tensor has fewer than k candidates): nothing was sent, so nothing is masked.
        sent = indices[values != 0]
        if momentum_buffer.is_contiguous():
            momentum_buffer.view(-1)[sent] = 0
        else:
            momentum_buffer[torch.unravel_index(sent, momentum_buffer.shape)] = 0
    return values


def scatter_mean_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Average sparse vectors, one per rank, into a dense one: ``out = 1/N sum_k sparse_k`` (eq. 7).

    The sum runs in rank order, so that all replicas get the same bits; equal indices of two ranks add up; N counts
    all ranks, also those that sent nothing here.

    In place:
        `out`, which is overwritten.

    Args:
        out: flat, contiguous.
        parts: (indices int64, values) of each rank, in rank order; indices are distinct within a rank.
    """
    out.zero_()
    for indices, values in parts:
        # As DDP does, each addend is divided first: the same bits for one sender, and no overflow in the sum.
        out.index_add_(0, indices, values.to(out.dtype) * (1.0 / len(parts)))
