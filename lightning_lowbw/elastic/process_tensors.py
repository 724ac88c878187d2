"""The tensors of one process of a group: as the training has them, and on the host, where the leader exchanges them.

If the model is sharded, each process has its shard. The leader has whole tensors, which contain its shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.comm.peers import part_of
from lightning_lowbw.elastic.group import Orders, Places
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import as_real, device_of
from lightning_lowbw.sync.buffers import BUFFER, VARIANCE
from lightning_lowbw.sync.fragments import apply_means_
from lightning_lowbw.sync.replica import COPY, Replica
from lightning_lowbw.sync.state import Named


class ProcessTensors:
    """The tensors of one process that rounds average, and the part of this process in a round; all by name.

    Args:
        replica: the replica of this process: its parameters, buffers, and their anchor, on the host.
        shapes: the shapes of the whole parameters, if the processes have shards.
        num_ranks: the number of processes of the group.
        site: the state of the group; None beside the leader.
    """

    def __init__(self, replica: Replica, shapes: Mapping[str, Sequence[int]], num_ranks: int, site: Any) -> None:
        self._replica, self._shapes, self._num_ranks, self._site = replica, shapes, num_ranks, site
        self._now: Named = {}  # on the host: the weights of this process when the round began

    def starts(self) -> Named:
        """Return the anchor of each tensor that is averaged; on the host."""
        buffers = {f"{BUFFER}{name}": start for name, start in self._replica.buffers.start.items()}
        return {self._replica.params.name_of(p): start for p, start in self._replica.start.items()} | buffers

    def live(self) -> Named:
        """Return the tensors that are averaged, as the training has them."""
        now, replica = self._replica.buffers.now(), self._replica
        buffers = {f"{BUFFER}{name}": as_real(now[name]) for name in replica.buffers.start}
        return {replica.params.name_of(p): as_real(p.detach()) for p in replica.start} | buffers

    def _places(self, name: str) -> Places:
        """Return the part of a tensor that each process of the group has, in the flat tensor."""
        if name not in self._shapes:
            return None
        rows, *others = self._shapes[name]
        size = math.prod(others)
        parts = [part_of(rows, rank, self._num_ranks) for rank in range(self._num_ranks)]
        return [slice(part.start * size, part.stop * size) for part in parts]

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Return the leader's part of a whole tensor."""
        places = self._places(name)
        return whole if places is None else whole.view(-1)[places[0]].view(-1, *whole.shape[1:])

    # The part of this process in a round; collective: all processes of the group, if it takes `orders` --------------

    def measure(self) -> float:
        """Return the squared norm of the change of the weights, of each tensor once; NaN if there is an inf or NaN."""
        live, starts, site = self.live(), self.starts(), self._site
        # A buffer may be infinite from the start, as a mask.
        checked = [t for n, t in live.items() if not n.startswith(BUFFER) or bool(starts[n].isfinite().all())]
        if (site is not None and site.has_late_faults()) or bool(are_not_finite(checked).any()):
            return math.nan
        names = [n for n in live if not n.startswith(BUFFER) and (site is not None or n in self._shapes)]
        return sum(float((live[name] - starts[name].to(live[name].device)).norm()) ** 2 for name in names)

    def begin(self, names: Sequence[str], from_anchor: bool) -> None:
        """Copy the weights of this process, or its anchor, to the host: steps from there on are kept by `apply`."""
        live, device = self.live(), device_of(self._replica.params.device)
        for name in (name for name in names if name not in self._now):
            is_part = self._site is not None and not name.startswith(BUFFER)
            room = None if is_part else torch.empty_like(live[name], device="cpu", pin_memory=live[name].is_cuda)
            self._now[name] = self.part_of(name, self._site.weights()[name]) if room is None else room
        given = self.starts() if from_anchor else live
        values = [given[name] for name in names]
        with device.fork(COPY)(() if from_anchor else tuple(values), False):
            torch._foreach_copy_([self._now[name] for name in names], values, non_blocking=True)
        device.join(COPY, on_host=True)

    def bring(self, orders: Orders, names: Sequence[str]) -> None:
        """Bring the weights with which the round began to the leader."""
        tensors = self._now if self._site is None else self._site.weights()
        for name in names:
            if name in self._shapes:
                orders.bring(tensors[name], self._places(name))

    def hand_out(self, orders: Orders, names: Sequence[str]) -> None:
        """Take the anchor of the leader."""
        anchors = self.starts() if self._site is None else self._site.anchors()
        for name in names:
            orders.hand_out(anchors[name], self._places(name))
        if self._site is not None:
            by_name = self._replica.params.by_name()
            self._replica.start = {by_name[n]: self.part_of(n, t) for n, t in anchors.items() if n in by_name}
            self._replica.buffers.start = dict(self._site.replica.buffers.start)

    def apply(self, names: Sequence[str], keeps: bool) -> None:
        """Set the weights to the anchor; `keeps`: plus their changes since `begin`."""
        live, starts, params, (fragment,) = self.live(), self.starts(), self._replica.params, self._replica.fragments
        for name in names:
            x = starts[name].to(params.device, copy=True)
            before = self._now[name].to(params.device, x.dtype, copy=True) if keeps else x
            apply_means_([live[name]], [before], [x], [keeps], None)
            if name.startswith(BUFFER) and name.endswith(VARIANCE):
                live[name].clamp_min_(0.0)
        by_name = params.by_name()
        fragment.moved = dict.fromkeys(by_name[name] for name in names if name in by_name) if keeps else {}
