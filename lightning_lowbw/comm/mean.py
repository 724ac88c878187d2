"""The mean of tensors over ranks: fused into flat buckets, in float32 or wider, blocking or in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.collectives import Collectives
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import as_real
from lightning_lowbw.kernels.table import upload
from lightning_lowbw.kernels.tensors import copy_all_

BUCKET_BYTES = 25 * 2**20  # as DDP's
Ranks = Collectives | Peers  # those of a group, or all


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed: float32, or float64 for itself; complex numbers as two of these."""
    return torch.promote_types(as_real(tensor).dtype, torch.float32)


@dataclass(frozen=True)
class _Bucket:
    members: list[int]  # indices into the tensors
    message: Tensor
    work: Any  # has a wait()


class MeanWork:
    """A mean over ranks that has been begun.

    Wire:
        Each tensor in `wide_dtype`, in buckets of about `BUCKET_BYTES`; the control message is in the first one;
        if the exchange is not exact, in a bucket of its own.

    Collective: all ranks, with tensors of the same shapes and dtypes in the same order; the constructor returns at
    once, `wait` blocks.

    Args:
        tensors: any floating or complex dtypes and layouts; read, not written. Copied now.
        control: numbers to be summed over the ranks beside it; float32, 1-d, at least one.
        weight: of this rank; the weights of all ranks add up to 1 (or, see `wait`, to what the control message says).
        peers: the ranks, all of them or those of a node.
        exact: whether the peers' `inter_dtype` is disregarded, as for tensors in which there are not only gradients.
    """

    def __init__(
        self, tensors: Sequence[Tensor], control: Tensor, weight: float, peers: Ranks, *, exact: bool = True
    ) -> None:
        self._peers = peers
        self._shapes = [as_real(tensor).shape for tensor in tensors]
        self._num_extra = control.numel()
        self._buckets: list[_Bucket] = []
        alone: list[list[int]] = [] if exact or not tensors else [[]]  # half types would round the control message
        for members in alone + _fill_buckets(tensors):
            parts = [as_real(tensors[index].detach()).reshape(-1) for index in members]
            dtype = wide_dtype(tensors[members[0]]) if members else torch.float32
            extra = 0 if self._buckets else control.numel()
            message = torch.empty(sum(part.numel() for part in parts) + extra, dtype=dtype, device=control.device)
            room, rest = message.split([message.numel() - extra, extra])
            _fill(room, parts, weight)
            if extra:
                rest.copy_(control)
            work = peers.begin_all_reduce_(message, exact=exact or not members)
            self._buckets.append(_Bucket(members, message, work))

    def wait(self) -> tuple[list[Tensor], Tensor]:
        """Wait for it (on CUDA the stream does).

        Returns:
            The weighted sums, in the shapes of the tensors (of their real views), `wide_dtype`, new memory; and the
            sum of the control messages, float32.
        """
        device = self._buckets[0].message.device
        with self._peers.ledger.waiting(device):
            for bucket in self._buckets:
                bucket.work.wait()
        means: list[Tensor] = [torch.empty(0)] * len(self._shapes)
        for bucket in self._buckets:
            offset = 0
            for index in bucket.members:
                numel = self._shapes[index].numel()
                means[index] = bucket.message[offset : offset + numel].view(self._shapes[index])
                offset += numel
        return means, self._buckets[0].message[-self._num_extra :].to(torch.float32)


def _fill(room: Tensor, parts: Sequence[Tensor], weight: float) -> None:
    """Concatenate tensors, times the weight; in the wide type, because they may be narrow."""
    views = room.split([part.numel() for part in parts])
    if room.is_cuda and parts:  # few launches, whatever their number; `torch.cat` has one each where a dtype differs
        copy_all_(views, parts)
        room.mul_(weight)
        return
    for view, part in zip(views, parts, strict=True):
        if part.dtype == view.dtype:
            torch.mul(part, weight, out=view)
        else:
            view.copy_(part).mul_(weight)


def mean_over(tensors: Sequence[Tensor], peers: Ranks, device: torch.device) -> list[Tensor]:
    """Return the mean of tensors over ranks, in `wide_dtype`; see `MeanWork`.

    Collective: all ranks, blocking.

    Args:
        device: of the message.
    """
    nothing = torch.zeros(1, dtype=torch.float32, device=device)
    return MeanWork(tensors, nothing, 1.0 / peers.num_ranks, peers).wait()[0]


def average_gradients_(
    parameters: Sequence[Parameter],
    flags: Sequence[float],
    peers: Ranks,
    device: torch.device,
    *,
    dense_only: bool = False,
) -> list[float]:
    """Replace the gradients of some parameters by their mean over ranks; one that no rank has stays None, as in DDP.

    In place:
        `.grad`; one that is not strided counts as zeros, and stays.

    Collective: all ranks, with the same parameters; blocking.

    Args:
        flags: numbers to be summed over the ranks beside it; returned.
        peers: the ranks, all of them or those of a node.
        device: of the message.
        dense_only: whether a gradient that is not strided is an error.

    Raises:
        ConfigurationError: on all of these ranks.
    """
    gradients = [
        torch.zeros_like(p) if p.grad is None or p.grad.layout != torch.strided else p.grad for p in parameters
    ]
    # A gradient that is not dense makes the sum over ranks negative.
    used = [
        0.0 if p.grad is None else 1.0 if p.grad.layout == torch.strided else -2.0 * peers.num_ranks for p in parameters
    ]
    control = upload([*flags, *used, 0.0], torch.float32, device)
    means, control = MeanWork(gradients, control, 1.0 / peers.num_ranks, peers).wait()
    sums: list[float] = control.tolist()
    sparse = [tuple(p.shape) for p, num_used in zip(parameters, sums[len(flags) : -1], strict=True) if num_used < 0]
    if dense_only and sparse:
        raise ConfigurationError(
            f"A rank has a sparse gradient, of a parameter of shape {sparse[0]}, and only dense ones are averaged. "
            "Build the layer with nn.Embedding(sparse=False)."
        )
    for parameter, mean, num_used in zip(parameters, means, sums[len(flags) : -1], strict=True):
        if num_used and (parameter.grad is None or parameter.grad.layout == torch.strided):
            parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            as_real(parameter.grad).copy_(mean)
    return sums[: len(flags)]


def _fill_buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return indices by bucket: one dtype each, in order of appearance; at least one bucket (the control message's)."""
    full: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        dtype = wide_dtype(tensor)
        members, nbytes = filling.get(dtype, ([], 0))
        if not members:
            full.append(members)
        members.append(index)
        nbytes += as_real(tensor).numel() * dtype.itemsize
        filling[dtype] = ([], 0) if nbytes >= BUCKET_BYTES else (members, nbytes)
    return full or [[]]
