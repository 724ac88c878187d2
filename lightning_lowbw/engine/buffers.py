"""Averages of the buffers of replicas: the mean of changes; running variances include that between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.where.mean import wide_dtype
from lightning_lowbw.where.peers import Peers


class ReplicaBuffers:
    """The buffers of one replica.

    Args:
        named_buffers: a batch norm's ``X.running_var`` belongs to its ``X.running_mean``.

    Attributes:
        floating: those that are averaged, by name.
        counts: those of which the largest is taken, such as the number of batches a batch norm has seen.
        start: of those that are averaged at the last average; empty before `begin`.
    """

    def __init__(self, named_buffers: Mapping[str, Tensor]) -> None:
        self.floating = {name: b for name, b in named_buffers.items() if b.is_floating_point() or b.is_complex()}
        self.counts = [b for b in named_buffers.values() if not (b.is_floating_point() or b.is_complex())]
        self.start: dict[str, Tensor] = {}

    def begin(self, peers: Peers) -> None:
        """Make the buffers from which the next changes are measured equal on all ranks.

        Collective: all ranks, the first time; a broadcast of each.
        """
        if self.floating and not self.start:
            self.start = self.snapshot()
            for start in self.start.values():
                peers.broadcast_(start)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of those that are averaged."""
        return {name: wide(buffer) for name, buffer in self.floating.items()}

    def changes(self) -> list[Tensor]:
        """Return the change of each floating buffer since the last average.

        For a running variance ``var + (mean - start of mean)^2``, so that the mean over ranks includes the variance
        between them. A buffer that has not changed adds exactly 0, even if it is infinite.
        """
        changes = []
        for name, buffer in self.floating.items():
            change = _difference(wide(buffer), self.start[name])
            of_mean = self._mean_of(name)
            if of_mean is not None:
                change = change + _difference(wide(self.floating[of_mean]), self.start[of_mean]) ** 2
            changes.append(change)
        return changes

    def apply(self, mean_changes: Sequence[Tensor], snapshots: Mapping[str, Tensor]) -> None:
        """Take over the mean over ranks of `changes`.

        In place:
            The buffers and their starts.

        Args:
            snapshots: of the buffers when the average was begun, where they have changed since; else empty.
        """
        by_name = dict(zip(self.floating, mean_changes, strict=True))
        for name, buffer in self.floating.items():
            change, of_mean = by_name[name], self._mean_of(name)
            if of_mean is not None:
                change = change - by_name[of_mean] ** 2
            start = self.start[name]
            target = start + change
            if snapshots:
                target_here = wide(buffer) + _difference(target, snapshots[name])
                as_real(buffer).copy_(target_here.clamp_min(0) if of_mean is not None else target_here)
            else:
                as_real(buffer).copy_(target)
            start.copy_(target)

    def agree_counts(self, peers: Peers) -> None:
        """Take the largest of integer buffers.

        Collective: all ranks; one all-reduce, blocking, if there are any.
        """
        if not self.counts:
            return
        flat = torch.cat([count.reshape(-1).to(torch.int64) for count in self.counts])
        peers.all_reduce_(flat, dist.ReduceOp.MAX)
        for count, largest in zip(self.counts, flat.split([count.numel() for count in self.counts]), strict=True):
            count.copy_(largest.view(count.shape))

    def _mean_of(self, name: str) -> str | None:
        """Return the name of the running mean that a running variance belongs to; None for other buffers."""
        other = name.removesuffix("running_var") + "running_mean"
        return other if name.endswith("running_var") and other in self.floating else None


def wide(tensor: Tensor) -> Tensor:
    """Return a copy of the real view in the dtype that is summed."""
    return as_real(tensor.detach()).to(wide_dtype(tensor), copy=True)


def wide_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what `wide` returns of each; all together, a few launches on a GPU."""
    reals = [as_real(tensor.detach()) for tensor in tensors]
    copies = [torch.empty_like(real, dtype=wide_dtype(real)) for real in reals]
    if copies:
        torch._foreach_copy_(copies, reals)
    return copies


def _difference(now: Tensor, before: Tensor) -> Tensor:
    return torch.where(now == before, 0.0, now - before)
