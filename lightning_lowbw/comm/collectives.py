"""The collectives of the methods, blocking and accounted for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.core.volume import all_gather_bytes, all_reduce_bytes


@dataclass
class Exchange:
    """A process group with a ledger.

    Args:
        group: the process group; None is the world.
        ledger: where the traffic is written down.
    """

    group: dist.ProcessGroup | None = None
    ledger: TrafficLedger = field(default_factory=TrafficLedger)

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the group; 1 where torch.distributed is not initialised."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks, in place; the sum unless told otherwise.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        with self.ledger.waiting(tensor.device):
            dist.all_reduce(tensor, op=op, group=self.group)
        self.ledger.record(all_reduce_bytes(tensor.nbytes, self.num_ranks))

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the group's first rank.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        with self.ledger.waiting(tensor.device):
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=self.group)
        self.ledger.record(tensor.nbytes)

    def all_gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, in rank order: uint8, shape (ranks, nbytes).

        Collective: all ranks with messages of one size, blocking (on CUDA, for the stream).
        """
        with self.ledger.waiting(message.device):
            # gloo reduces CUDA tensors, but gathers only those of the CPU
            staged = message.cpu() if dist.get_backend(self.group) == "gloo" else message
            gathered = staged.new_empty((self.num_ranks, message.numel()))
            dist.all_gather(list(gathered), staged, group=self.group)
            gathered = gathered.to(message.device)
        self.ledger.record(all_gather_bytes(message.nbytes, self.num_ranks))
        return gathered

    def all_to_all(self, message: Tensor) -> Tensor:
        """Send the r-th of equal parts of a message to rank r; return the parts received, in rank order.

        Collective: all ranks with messages of one size, a multiple of the number of ranks; uint8, 1-d; blocking (on
        CUDA, for the stream).
        """
        with self.ledger.waiting(message.device):
            staged = message.cpu() if dist.get_backend(self.group) == "gloo" else message
            received = torch.empty_like(staged)
            dist.all_to_all_single(received, staged, group=self.group)
            received = received.to(message.device)
        self.ledger.record((self.num_ranks - 1) * message.nbytes // self.num_ranks)
        return received
