"""The collectives of the methods, blocking and accounted for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.where.ledger import Level, TrafficLedger
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes

if TYPE_CHECKING:
    from lightning_lowbw.where.hierarchy import Hierarchy


@dataclass(frozen=True)
class Gathering:
    """An all-gather that has been begun."""

    work: Any  # has a wait()
    gathered: Tensor
    device: torch.device

    def wait(self) -> Tensor:
        """Return the messages of all ranks: uint8, shape (ranks, nbytes)."""
        self.work.wait()
        return self.gathered.to(self.device)


@dataclass
class Exchange:
    """A process group with a ledger, on one level or on two.

    Args:
        group: the process group; None is the world.
        ledger: where the traffic is written down.
        level: the level of the group itself, where it is a part of a topology.
        hierarchy: the two levels of the world; None where all ranks are alike.
    """

    group: dist.ProcessGroup | None = None
    ledger: TrafficLedger = field(default_factory=TrafficLedger)
    level: Level | None = None
    hierarchy: Hierarchy | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the group; 1 where torch.distributed is not initialised."""
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @property
    def num_senders(self) -> int:
        """Who talks on the slow network: nodes on two levels, else ranks. The N of the methods' equations."""
        return self.num_ranks if self.hierarchy is None else self.hierarchy.topology.num_nodes

    @property
    def node(self) -> Exchange | None:
        """The ranks of this node; None on one level."""
        return None if self.hierarchy is None else self.hierarchy.node

    @property
    def levels(self) -> Hierarchy | None:
        """The hierarchy where there is more than one node."""
        return self.hierarchy if self.num_senders > 1 else None

    def begin_all_reduce_(self, tensor: Tensor) -> Any:
        """Begin to sum a flat tensor over the ranks, in place; return what has a `wait()`.

        Collective: all ranks, in the same order of calls.
        """
        if self.levels is not None:
            return self.levels.all_reduce(tensor)
        self._record(all_reduce_bytes(tensor.nbytes, self.num_ranks))
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a flat tensor over the ranks, in place; the sum unless told otherwise.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        with self.ledger.waiting(tensor.device):
            if self.levels is not None and op == dist.ReduceOp.SUM:
                self.levels.all_reduce(tensor).wait()
                return
            dist.all_reduce(tensor, op=op, group=self.group)
        self._record(all_reduce_bytes(tensor.nbytes, self.num_ranks))

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the group's first rank.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        with self.ledger.waiting(tensor.device):
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=self.group)
        self._record(tensor.nbytes)

    def all_gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, in rank order: uint8, shape (ranks, nbytes).

        Collective: all ranks with messages of one size, blocking (on CUDA, for the stream).
        """
        with self.ledger.waiting(message.device):
            return self.begin_all_gather(message).wait()

    def begin_all_gather(self, message: Tensor) -> Gathering:
        """Begin `all_gather`.

        Collective: all ranks, in the same order of calls.
        """
        # gloo reduces CUDA tensors, but gathers only those of the CPU
        staged = message.cpu() if dist.get_backend(self.group) == "gloo" else message
        gathered = staged.new_empty((self.num_ranks, message.numel()))
        work = dist.all_gather(list(gathered), staged, group=self.group, async_op=True)
        self._record(all_gather_bytes(message.nbytes, self.num_ranks))
        return Gathering(work, gathered, message.device)

    def gather_from_senders(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, on two levels of all nodes, in their order: uint8, (senders, nbytes).

        Collective: all ranks with messages of one size, equal ones inside a node; blocking (on CUDA, for the stream).
        """
        return self.all_gather(message) if self.levels is None else self.levels.gather_from_nodes(message)

    def begin_gather_from_senders(self, message: Tensor) -> Any:
        """Begin `gather_from_senders`; return what has a `wait()`, which returns the messages.

        Collective: all ranks, in the same order of calls.
        """
        if self.levels is not None:
            return self.levels.begin_gather_from_nodes(message)
        return self.begin_all_gather(message)

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
        self._record((self.num_ranks - 1) * message.nbytes // self.num_ranks)
        return received

    def _record(self, nbytes: int) -> None:
        # What all ranks do together on two levels crosses the slow one.
        self.ledger.record(nbytes, self.level if self.levels is None else "inter")
