"""Averages of the buffers of replicas: the mean of changes; running variances include that between ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.collectives import broadcast_flat_
from lightning_lowbw.comm.peers import Peers, wide_dtype
from lightning_lowbw.kernels.reference import as_real
from lightning_lowbw.kernels.tensors import copy_all_, differences


class ReplicaBuffers:
    """The buffers of one replica.

    Args:
        named_buffers: a batch norm's ``X.running_var`` belongs to its ``X.running_mean``.

    Attributes:
        floating: those that are averaged, by name.
        counts: those of which the largest is taken, such as the number of batches a batch norm has seen, by name.
        start: of those that are averaged at the last average; empty before `begin`.
    """

    def __init__(self, named_buffers: Mapping[str, Tensor]) -> None:
        self.floating = {name: b for name, b in named_buffers.items() if b.is_floating_point() or b.is_complex()}
        self.counts = {name: b for name, b in named_buffers.items() if name not in self.floating}
        self.start: dict[str, Tensor] = {}
        means = {name: name.removesuffix("running_var") + "running_mean" for name in self.floating}
        # The running mean that belongs to a running variance, by its name.
        self._means = {
            name: mean for name, mean in means.items() if name.endswith("running_var") and mean in self.floating
        }

    def begin(self, peers: Peers) -> None:
        """Make the buffers from which the next changes are measured equal on all ranks.

        Collective: all ranks, the first time; a broadcast.
        """
        if self.floating and not self.start:
            self.start = self.snapshot()
            broadcast_flat_(self.start.values(), peers.broadcast_)

    def restart(self, names: Collection[str]) -> None:
        """Measure changes from 0 where a buffer was not finite and now is: a best loss that has been inf."""
        for name, start in self.start.items():
            if name in names:
                now = as_real(self.floating[name])
                start.masked_fill_(now.isfinite() & ~start.isfinite(), 0.0)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of those that are averaged."""
        return dict(zip(self.floating, wide_copies(list(self.floating.values())), strict=True))

    def changes(self) -> list[Tensor]:
        """Return the change of each floating buffer since the last average.

        For a running variance ``var + (mean - start of mean)^2``, so that the mean over ranks includes the variance
        between them. A buffer that has not changed adds exactly 0, even if it is infinite.
        """
        now = self.snapshot()
        changes = dict(zip(now, differences(list(now.values()), [self.start[name] for name in now]), strict=True))
        variances, squares = self._squares_of_means(changes)
        if variances:
            torch._foreach_add_(variances, squares)
        return list(changes.values())

    def apply(self, mean_changes: Sequence[Tensor], snapshots: Mapping[str, Tensor]) -> None:
        """Take over the mean over ranks of `changes`.

        In place:
            The buffers and their starts; `mean_changes`, which are used up.

        Args:
            snapshots: of the buffers when the average was begun, where they have changed since; else empty.
        """
        if not self.floating:
            return
        changes = dict(zip(self.floating, mean_changes, strict=True))
        variances, squares = self._squares_of_means(changes)
        if variances:
            torch._foreach_sub_(variances, squares)
        starts = [self.start[name] for name in changes]
        targets = here = list(torch._foreach_add(starts, list(changes.values())))
        buffers = [as_real(buffer) for buffer in self.floating.values()]
        if snapshots:
            here = wide_copies(buffers)
            torch._foreach_add_(here, differences(targets, [snapshots[name] for name in changes]))
            if self._means:
                by_name = dict(zip(changes, here, strict=True))
                torch._foreach_clamp_min_([by_name[name] for name in self._means], 0.0)
        copy_all_(buffers, here)
        copy_all_(starts, targets)

    def _squares_of_means(self, changes: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the changes of running variances, and the squares of those of their running means."""
        moves = [changes[mean] for mean in self._means.values()]
        return [changes[name] for name in self._means], list(torch._foreach_mul(moves, moves)) if moves else []

    def agree_counts(self, peers: Peers) -> None:
        """Take the largest of integer buffers.

        Collective: all ranks; one all-reduce, blocking, if there are any.
        """
        if not self.counts:
            return
        counts = list(self.counts.values())
        flat = torch.cat([count.reshape(-1).to(torch.int64) for count in counts])
        peers.all_reduce_(flat, dist.ReduceOp.MAX)
        parts = flat.split([count.numel() for count in counts])
        copy_all_(counts, [part.view(count.shape) for count, part in zip(counts, parts, strict=True)])


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
    return {name: each for name, each in own.items() if name not in shown or _is_same(tensors[name], shown[name])}


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values; NaN is the same as NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def wide_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each real view, in the dtype in which it is summed."""
    reals = [as_real(tensor.detach()) for tensor in tensors]
    copies = [torch.empty_like(real, dtype=wide_dtype(real)) for real in reals]
    copy_all_(copies, reals)
    return copies
