"""DDP's communication hook: how a bucket is reduced, on gloo as well as on NCCL.

In a dense step the bucket is all-reduced during backward; in a sparse or local one inside the node, or not at all.
"""
# No `from __future__ import annotations` here: DDP checks the hook's annotations, which must be real objects.

import time
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.side_queue import new_future

Reduction = Literal["all", "node"]  # over which ranks


class GradientHook:
    """Reduces DDP's buckets.

    Attributes:
        reduction: how, in the coming step; None: not at all.
        is_timing: whether steps are timed; then the host waits for a CUDA device after backward.
    """

    def __init__(self) -> None:
        self._model: DistributedDataParallel | None = None
        self._peers: Peers | None = None
        self.reduction: Reduction | None = "all"
        self.is_timing = False
        self._last_launch_s: float | None = None  # when the last bucket of a backward pass was sent
        self._handles: list[RemovableHandle] = []
        self._reduced: set[Tensor] = set()  # where the user calls backward: parameters whose gradients are means

    def register(self, model: DistributedDataParallel, peers: Peers, *, is_manual: bool) -> None:
        """Let DDP call `reduce` with each bucket. Stock Lightning registers hooks on CUDA only, silently.

        Args:
            model: whose buckets they are.
            peers: the ranks that reduce them.
            is_manual: whether the user's code calls backward.
        """
        self._model, self._peers = model, peers
        self._reduced.clear()
        # A plain `loss.backward()` passes by DDP, which Lightning prepares in `manual_backward`.
        for parameter in model.parameters() if is_manual else ():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._reduced.discard))
        model.register_comm_hook(state=None, hook=self.reduce)

    def release(self) -> None:
        """Leave the parameters as they were before `register`."""
        self._model = self._peers = None
        while self._handles:
            self._handles.pop().remove()

    def have_reduced(self, parameters: Iterable[Parameter]) -> bool:
        """Return whether DDP has reduced all these gradients since `forget`, and since they were last accumulated.

        Known with `is_manual` only.
        """
        return self._reduced.issuperset(parameters)

    def forget(self, parameters: Iterable[Parameter]) -> None:
        """Note that an optimizer has stepped with the gradients."""
        if self._reduced:
            self._reduced.difference_update(parameters)

    def reduce(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return the bucket's future: all-reduced as DDP does, all-reduced inside the node, or as it is.

        Collective: all ranks (inside the node: those of the node), in the same order of buckets; waits for none.
        """
        buffer, peers = bucket.buffer(), self._peers
        if self.reduction is None:
            future = new_future(buffer.device)  # done after the work that is queued on the current stream
            future.set_result(buffer)
            return future
        assert peers is not None
        if self._handles:
            self._reduced.update(bucket.parameters())
        # Multiplied, as the reducer does: a division has other bits unless N is a power of two.
        buffer.mul_(1.0 / (peers.node.num_ranks if self.reduction == "node" else peers.num_ranks))
        self._waits_for(buffer.device)
        self._last_launch_s = time.perf_counter()
        if self.reduction == "node":
            return peers.begin_all_reduce_in_node_(buffer).get_future()
        peers.count_dense(buffer.nbytes)
        return peers.begin_all_reduce_(buffer, exact=False).get_future()

    def wait_s(self) -> float:
        """Return how long the training has waited since the last bucket was sent; 0 where that is not known.

        On a CUDA device the host does not wait: only while steps are timed.
        """
        last, self._last_launch_s = self._last_launch_s, None
        if last is None or self._model is None or not self._waits_for(self._model.device):
            return 0.0
        return time.perf_counter() - last

    def _waits_for(self, device: torch.device) -> bool:
        """Wait for queued work, while steps are timed; return whether the host's clock is valid for the device now."""
        if device.type == "cuda" and self.is_timing:
            torch.cuda.current_stream(device).synchronize()
            return True
        return device.type == "cpu"
