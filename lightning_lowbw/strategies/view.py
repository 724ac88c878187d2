"""How a fit reaches the gradients and the weights of the model: whole under DDP, or sharded by FSDP."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.method import Method
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer


class View(Protocol):
    """The model of a fit: `CommunicationHook` for DDP, `ShardedView` for FSDP."""

    def use(self, method: Method) -> None:
        """Take the method of the coming steps."""

    def begin_batch(self, workers: Collection[Synchronizer], *, is_timing: bool) -> None:
        """Prepare for the forward and backward pass of a batch; `is_timing`: the host waits for the backward pass."""

    def take(self, worker: Synchronizer) -> Collection[Parameter]:
        """Let a worker have the gradients; return the parameters whose gradients are means already."""

    def has_mean(self, worker: Synchronizer) -> bool:
        """Return whether the gradients of the coming step are means over all ranks already."""

    def give(self, worker: Synchronizer) -> None:
        """Let the user's optimizer have the gradients and the state that a worker has made."""

    def sum_in_node_(self, number: Tensor) -> None:
        """Sum a number over the shards of this rank's node; without shards nothing is to do."""

    def end_step(self, worker: Synchronizer, workers: Collection[Synchronizer]) -> None:
        """End a step of the worker's optimizer; the next step has the plans of `workers`."""

    def end_batch(self) -> None:
        """End a batch: callbacks may change weights, or unfreeze layers."""

    def look(self) -> None:
        """Take in the weights as other code has left them."""

    def share_in_node(self, replicas: Collection[LocalSync]) -> None:
        """Give all ranks of a node the buffers of its first rank; without this each rank has its own buffers."""
