"""The ranks that communicate: flat, or on two levels. `make_peers` chooses; a method need not distinguish the two.

A method keeps an equal part of every flat tensor on each rank of a node, exchanges messages about its part with the
ranks that keep the same part in other nodes, and gathers the received messages in its node. When flat, each rank is a
node of its own: its part is the whole tensor, and operations inside the node do nothing.

All operations are collective: all ranks call them, in the same order. Operations named `begin_` return at once; all
other operations block (on CUDA, the stream).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.agreement import agree
from lightning_lowbw.comm.collectives import (
    Collectives,
    Level,
    SideQueue,
    TensorWork,
    TrafficLedger,
    all_reduce_bytes,
    group_of,
    is_gloo,
)
from lightning_lowbw.comm.topology import Algorithm, Topology, Where, resolve
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import (
    allocate,
    as_real,
    copy_all_,
    flat_in_order,
    in_order,
    laid_out,
    split_front,
    strides_of,
    upload,
)

STAGES = "first in the node", "between nodes", "last in the node"  # stages of an operation on two levels
BUCKET_BYTES = 25 * 2**20  # as DDP's
BESIDE_BYTES = 1 << 17  # bandwidth times latency, 100 Mb/s x 10 ms; constant, because all ranks must decide alike


@lru_cache(maxsize=4096)
def part_of(numel: int, local_rank: int, num_local_ranks: int) -> slice:
    """Return the part of a flat tensor that one of a node's ranks keeps; the last parts may be shorter, or empty."""
    size = -(-numel // num_local_ranks)
    return slice(min(local_rank * size, numel), min((local_rank + 1) * size, numel))


def is_apart(nbytes: int, num_participants: int) -> bool:
    """Return whether tensors that are sent whole are all-reduced while a message is gathered, and not in it.

    For B bytes of such tensors, a message to all carries (N - 1) B over the link of a participant, and needs no further
    round; an all-reduce carries 2 (N - 1) / N B, in N - 1 further rounds. So they are a part of the message if
    (N - 2) B <= N * bandwidth * latency, and if they are no larger than a bucket, for the memory.

    Examples:
        >>> is_apart(1 << 24, 2), is_apart(1 << 30, 2), is_apart(1 << 17, 64), is_apart(1 << 18, 64)
        (False, True, False, True)
    """
    return (num_participants - 2) * nbytes > num_participants * BESIDE_BYTES or nbytes > BUCKET_BYTES


class Peers:
    """The ranks of a training, as a method on one rank uses them: flat, all ranks of a group equally.

    Args:
        group: the process group; None is the world, or one rank if torch.distributed is not initialised.
        ledger: counts the traffic, by level if there are two.
        nodes: if the model is sharded inside nodes, the ranks of each node; one rank of each is in the group. Used
            in error messages.

    Attributes:
        num_ranks: the number of all ranks; 1 where torch.distributed is not initialised.
        rank: this rank among all; 0 where torch.distributed is not initialised.
        num_participants: N of the equations, the participants in the exchange on the slow network: ranks when flat,
            else nodes.
        are_shards: whether each rank has a shard of the model; the other ranks of its node have the rest, and are no
            peers.
        topology: which ranks share a node; when flat each rank is a node.
        node: the collectives of this node's ranks; when flat there is this rank alone, and they do nothing.
        local_rank: the index of this rank in its node; the launcher may count in another order.
        num_local_ranks: how many ranks of this node keep parts.
        is_two_level: whether gradients are summed inside the node before the method sees them, and each rank keeps and
            exchanges its part of the node's sum.
        may_grow: whether there may be more participants than there are now.
        weights: the weights of the participants, with the sum 1; empty if they are equal.
        inter_dtype: the dtype in which dense steps send gradients of a wider dtype between participants; None: their
            own.
        between: the collectives of the ranks that keep this rank's part in all nodes; when flat, of all ranks.
        is_summed_flat: whether a sum over all ranks is one all-reduce, as DDP's, also on two levels.
    """

    is_two_level = may_grow = is_summed_flat = False
    local_rank, num_local_ranks = 0, 1
    weights: Sequence[float] = ()
    inter_dtype: torch.dtype | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ledger: TrafficLedger | None = None,
        nodes: Sequence[Sequence[int]] = (),
    ) -> None:
        self.nodes = nodes
        self.ledger = TrafficLedger() if ledger is None else ledger
        self._all = self.between = Collectives(group, self.ledger)
        self.node = Collectives(group, self.ledger, is_alone=True)
        self.rank, self.num_ranks = self._all.rank, self._all.num_ranks
        self.num_participants, self.are_shards = self.num_ranks, bool(nodes)
        self.topology = Topology.blocks(self.num_ranks, 1)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None is the world."""
        return self._all.group

    @property
    def weight(self) -> float:
        """The weight of this rank's tensors in a mean."""
        return 1.0 / self.num_ranks

    def check_parts(self) -> None:
        """Check that the ranks of a node can keep parts of a tensor, and exchange them with ranks of other nodes.

        Raises:
            ConfigurationError: on all ranks; the nodes are of different sizes.
        """
        _ = self.topology.ranks_per_node  # raises if they differ

    def part(self, numel: int, local_rank: int | None = None) -> slice:
        """Return the part of a flat tensor that this or the given rank of a node keeps: the whole tensor when flat.

        Every part has ceil(numel / ranks of the node) elements, except the last ones, which may be shorter or empty.
        """
        return part_of(numel, self.local_rank if local_rank is None else local_rank, self.num_local_ranks)

    def count_dense(self, nbytes: int) -> None:
        """Add to the ledger the traffic of a dense exchange of gradients of this size; communicates nothing."""
        self.ledger.dense_bytes += all_reduce_bytes(nbytes, self.num_ranks)

    def count_all_reduce(self, nbytes: int) -> None:
        """Add to the ledger an all-reduce of this size that DDP has run by itself."""
        self.count_dense(nbytes)
        self.ledger.record(all_reduce_bytes(nbytes, self.num_ranks), self._all.level)

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        """Begin to sum a flat tensor over all ranks, in place. All ranks get the same bits.

        Args:
            dtype: the dtype in which a wider tensor is sent between participants; None is the tensor's own.
        """
        return self._all.begin_all_reduce_(tensor, dtype=dtype)

    def begin_sum_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        """Begin the sum of `begin_all_reduce_` for a caller that needs no future of DDP."""
        return self._all.begin_sum_(tensor, dtype=dtype)

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a flat tensor over all ranks, in place: a sum by `begin_all_reduce_`, else one all-reduce."""
        self._all.all_reduce_(tensor, op)

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the tensor of the first rank."""
        self._all.broadcast_(tensor)

    def begin_all_reduce_in_node_(self, tensor: Tensor) -> TensorWork:
        """Begin to sum a flat tensor over the ranks of this node, in place; when flat the tensor is the sum already."""
        return self.node.begin_all_reduce_(tensor)

    def begin_gather(self, message: Tensor) -> TensorWork:
        """Begin to gather the messages of all ranks of all nodes, each about the part of its rank.

        The caller that waits also counts the time.

        Wire:
            An all-gather between nodes; on two levels, then an all-gather of the received messages in the node.

        Args:
            message: uint8, 1-d, the same size on all ranks; do not write to it before the wait.

        Returns:
            Work on a tensor: uint8, shape (local ranks, participants, bytes of a message). The first index is the
            part, by the local rank that keeps it; the second the node, in the order of the topology. When flat the
            shape is (1, ranks, bytes), in rank order. The same on all ranks.
        """
        return self.between.begin_all_gather(message, self._room_for(message))

    def _room_for(self, message: Tensor) -> Tensor:
        # By part first: all messages about a part are contiguous, and are decoded together.
        shape = self.num_local_ranks, self.num_participants, message.numel()
        return allocate(shape, message.dtype, message.device)

    def gather_parts_in_node(self, part: Tensor, numel: int) -> Tensor:
        """Gather a flat tensor from the parts of the node's ranks (see `part`): shape (numel,).

        When flat the result is the part itself, no copy.
        """
        with self.ledger.waiting(part.device):
            return self.node.gather_parts(part, numel)

    def close(self) -> None:
        """End the threads, after the work that has begun."""


class OneNode(Peers):
    """The ranks of a world that is a single node: one participant, without a slow network, and nothing to compress.

    Args:
        topology: the topology of the world.
        ledger: counts the traffic, by level.
    """

    def __init__(self, topology: Topology, ledger: TrafficLedger | None) -> None:
        super().__init__(None, ledger)
        self._all = self.node = Collectives(None, self.ledger, "intra")
        self.between = Collectives(None, self.ledger, "inter", is_alone=True)  # there is no other node
        self.topology, self.num_participants = topology, 1

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        return super().begin_all_reduce_(tensor)  # a narrower dtype is for the slow network

    begin_sum_ = begin_all_reduce_


class TwoLevelPeers(Peers):
    """The ranks of the world on nodes, with a fast network inside and a slow one between.

    A node is one participant. Operations of several collectives have three stages: in the node, between nodes, and in
    the node again. Each stage has a group of its own, and with gloo a thread, with NCCL a stream: the next bucket is
    summed in the node while this one is between nodes, and each group sees the same order of collectives, whatever the
    timing. Collectives of `node` and `between` may be issued at any time.

    Wire:
        A sum over all ranks. "sharded": reduce-scatter in the node, all-reduce of each part between nodes, all-gather
        in the node. "leader": reduce to the first rank of the node, all-reduce among the first ranks, broadcast in the
        node. With `is_summed_flat`, one all-reduce.

    Args:
        topology: the topology of the world: several nodes, at least one with several ranks.
        algorithm: how tensors are summed over all ranks. "sharded": every rank of a node exchanges its part of the sum
            with the ranks that have its local rank in the other nodes. "leader": the first rank of each node exchanges
            the whole sum, for nodes of different sizes; there are no parts then. None, and "flat", which sets
            `is_summed_flat`: "sharded" if all nodes have the same number of ranks, else "leader".
        ledger: counts the traffic, by level.
        timeout: the timeout of the groups that are made here; None is the world's.
        is_hidden: see `make_peers`.

    Raises:
        ConfigurationError: on all ranks; the nodes are of different sizes, and the algorithm is "sharded".
    """

    is_two_level = True

    def __init__(
        self,
        topology: Topology,
        *,
        algorithm: Algorithm | None,
        ledger: TrafficLedger | None,
        timeout: timedelta | None,
        is_hidden: bool = False,
    ) -> None:
        super().__init__(None, ledger)
        ledger = self.ledger
        ledger.has_levels = True
        self.topology, self.num_participants = topology, topology.num_nodes
        self.is_summed_flat = algorithm == "flat"
        self._is_led = algorithm == "leader" or (algorithm != "sharded" and not topology.has_equal_nodes)
        purpose = "averages" if is_hidden else "gradients"
        first, middle, last = stages = [f"{purpose}, {stage}" for stage in STAGES]
        equal_parts = [] if self._is_led else [topology.peers(each) for each in range(topology.ranks_per_node)]

        def collectives(groups: Sequence[tuple[int, ...]], level: Level, *stages: str) -> list[Collectives]:
            """Make the groups of each stage, on all ranks in one order; return the collectives of this rank."""
            of_rank = [Collectives(None, ledger, level, is_alone=True) for _ in stages]
            # `new_group` is collective: ranks outside of these groups make them, too.
            for ranks, (index, stage) in itertools.product(groups, enumerate(stages)):
                if len(ranks) > 1:  # one rank sends nothing, and needs no group
                    group = group_of(ranks, stage, timeout, is_hidden=is_hidden and level == "inter")
                    if self.rank in ranks:
                        of_rank[index] = Collectives(group, ledger, level)
            return of_rank

        self.node, self._node_first, self._node_last = collectives(topology.nodes, "intra", purpose, first, last)
        if self._is_led:
            (self._between_in_turn,) = collectives([topology.leaders], "inter", middle)
        else:
            self.between, self._between_in_turn = collectives(equal_parts, "inter", purpose, middle)
        self.local_rank, self.num_local_ranks = topology.local_rank_of(self.rank), self.node.num_ranks
        self._all = Collectives(None, ledger, "inter")  # collectives of all ranks cross the slow network
        self._queues = [SideQueue(stage) for stage in stages]

    def count_dense(self, nbytes: int) -> None:
        super().count_dense(nbytes)
        part = -(-nbytes // self.num_local_ranks)
        if self._is_led:
            part = nbytes if self.local_rank == 0 else 0
        self.ledger.dense_inter_bytes += all_reduce_bytes(part, self.num_participants)

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        if self.is_summed_flat:
            return super().begin_all_reduce_(tensor, dtype=dtype)
        # The three stages, in order; each gets the result of the stage before.
        between = partial(self._sum_between_, dtype=dtype)
        if self._is_led:
            return self._begin(tensor, self._reduce_to_leader, between, partial(self._broadcast_from_leader, tensor))
        return self._begin(tensor, self._node_first.reduce_scatter, between, partial(self._gather_parts_into, tensor))

    begin_sum_ = begin_all_reduce_

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if op != dist.ReduceOp.SUM:
            super().all_reduce_(tensor, op)
            return
        with self.ledger.waiting(tensor.device):
            self.begin_all_reduce_(tensor).wait()

    def begin_all_reduce_in_node_(self, tensor: Tensor) -> TensorWork:
        return self._begin(tensor, lambda tensor: self._node_first.begin_all_reduce_(tensor).wait())

    def begin_gather(self, message: Tensor) -> TensorWork:
        out = self._room_for(message)
        return self._begin(out, None, self._gather_between, partial(self._gather_in_node, out), of=message)

    def close(self) -> None:
        for queue in self._queues:
            queue.close()

    def _begin(self, out: Tensor, *stages: Callable[[Tensor], Tensor] | None, of: Tensor | None = None) -> TensorWork:
        """Begin the first stages of an operation; return the work on its result.

        Args:
            out: the tensor to fill.
            stages: the first stage gets `of`, each later stage the result of the stage before.
            of: the input; None is `out`.
        """
        tensors, future = (out,) if of is None else (of, out), None
        # Each stage has a queue of its own: bucket n + 1 is in the node while bucket n is between nodes.
        for queue, stage in zip(self._queues, stages, strict=False):
            if stage is not None:
                future = queue.begin(stage, tensors, future, in_thread=is_gloo(None, out.device))
        return TensorWork(out, future)

    def _gather_parts_into(self, tensor: Tensor, part: Tensor) -> Tensor:
        if part.numel() * self._node_last.num_ranks == tensor.numel():
            return self._node_last.begin_all_gather(part, tensor).wait()
        return tensor.copy_(self._node_last.gather_parts(part, tensor.numel()))

    def _reduce_to_leader(self, tensor: Tensor) -> Tensor:
        group = self._node_first.group
        staged = tensor.cpu() if is_gloo(group, tensor.device) else tensor  # gloo reduces only CPU tensors
        if self.num_local_ranks > 1:
            dist.reduce(staged, group=group, group_dst=0)
        return staged

    def _broadcast_from_leader(self, tensor: Tensor, staged: Tensor) -> Tensor:
        if self.num_local_ranks > 1:
            dist.broadcast(staged, group=self._node_last.group, group_src=0)
            self.ledger.record(tensor.nbytes, "intra")
        return tensor if staged is tensor else tensor.copy_(staged)

    def _sum_between_(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if self._is_led and self.local_rank != 0:
            return tensor
        return self._between_in_turn.begin_all_reduce_(tensor, dtype=dtype).wait()

    def _gather_between(self, message: Tensor) -> Tensor:
        received = self._between_in_turn.begin_all_gather(message).wait()
        # A group has its ranks in ascending order, which need not be the order of the nodes.
        peers = self.topology.peers(self.local_rank)
        if list(peers) != sorted(peers):
            rows = received.unbind(0)
            received = torch.stack([rows[sorted(peers).index(rank)] for rank in peers])
        return received

    def _gather_in_node(self, out: Tensor, received: Tensor) -> Tensor:
        return self._node_last.begin_all_gather(received.view(-1), out).wait()


def make_peers(
    where: Where,
    process_group: dist.ProcessGroup | None = None,
    ledger: TrafficLedger | None = None,
    timeout: timedelta | None = None,
    is_hidden: bool = False,
) -> Peers:
    """Return the ranks of a training as the user describes them: flat, or on two levels.

    A topology with one rank on each node is flat. A topology with a single node has one participant: there is no slow
    network, and nothing to compress.

    Collective: all ranks of the group, blocking; with a topology the world, which makes groups in one order.

    Args:
        where: the topology, and how dense gradients are summed.
        process_group: the group of a flat training; None is the world.
        ledger: counts the traffic; a new ledger if left out.
        timeout: the timeout of the groups that are made for a topology; None is the world's.
        is_hidden: whether the ranks exchange averages that are hidden behind steps: these have groups of their own, so
            that the gradients of the steps do not wait for them, and few thread blocks of NCCL between nodes.

    Raises:
        ConfigurationError: on all ranks; the topology does not fit the world or the algorithm, or comes with a process
            group other than the world.
        DisagreementError: on all ranks; the arguments differ between ranks.
    """
    is_world = process_group is None or (dist.is_initialized() and process_group is dist.group.WORLD)
    if not is_world and where.topology != "flat":
        raise ConfigurationError(
            f"topology={where.topology!r} together with a process group other than the world: a topology is of all "
            "ranks of the world. Leave process_group out, or take topology='flat'."
        )
    agree("topology", {**vars(where), "timeout": timeout}, process_group)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    topology = resolve(where.topology, num_ranks) if is_world else None
    if topology is None or topology.is_flat:
        if is_hidden and is_world and num_ranks > 1 and dist.get_backend() == "nccl":  # gloo takes no multiprocessors
            process_group = group_of(tuple(range(num_ranks)), "averages", timeout, is_hidden=True)
        peers = Peers(process_group, ledger)
    elif topology.num_nodes == 1:
        peers = OneNode(topology, ledger)
    else:
        peers = TwoLevelPeers(topology, algorithm=where.algorithm, ledger=ledger, timeout=timeout, is_hidden=is_hidden)
    peers.inter_dtype = where.narrow_dtype
    return peers


# The mean of tensors over ranks: fused into flat buckets, in float32 or wider, blocking or in the background. ---------

Ranks = Collectives | Peers  # the ranks of a group, or all ranks


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed: float64 for float64, else float32; complex numbers as two reals."""
    return torch.float64 if as_real(tensor).dtype == torch.float64 else torch.float32


class _Bucket(NamedTuple):
    dtype: torch.dtype  # in which its tensors are summed
    members: list[int]  # indices into the tensors
    sizes: list[int]


class MeanWork:
    """The work on a mean over ranks.

    Wire:
        Each tensor in `wide_dtype`, in buckets of about `BUCKET_BYTES`. The control message is in the first bucket, or
        in a bucket of its own if there is a `dtype`.

    Collective: all ranks, with tensors of the same shapes and dtypes in the same order; the constructor returns at
    once, `wait` blocks.

    Args:
        tensors: any floating or complex dtypes and layouts; read, not written, and copied at once.
        control: numbers to be summed over the ranks as well; float32, 1-d, at least one.
        peers: all ranks, or the ranks of a node.
        dtype: the dtype in which wider tensors are sent between participants; None: only in `wide_dtype`.
        in_memory_order: whether elements are sent as they lie in memory, on all ranks alike; else in logical order.
    """

    @torch.no_grad()
    def __init__(
        self,
        tensors: Sequence[Tensor],
        control: Tensor,
        peers: Ranks,
        *,
        dtype: torch.dtype | None = None,
        in_memory_order: bool = False,
    ) -> None:
        self._peers = peers
        reals = list(map(as_real, tensors))
        self._layouts = [(real.shape, strides_of(real) if in_memory_order else None) for real in reals]
        if in_memory_order:
            reals = [flat_in_order(real, real) for real in reals]
        self._num_extra = control.numel()
        self._buckets: list[tuple[_Bucket, Tensor, Any]] = []  # each with its message and work
        alone = [] if dtype is None or not tensors else [_NOTHING]  # half types would round the control message
        for bucket in [*alone, *fill_buckets(tuple((real.dtype, real.numel()) for real in reals))]:
            parts = [reals[index] for index in bucket.members]
            extra = 0 if self._buckets else control.numel()
            numel = sum(bucket.sizes)
            message = torch.empty(numel + extra, dtype=bucket.dtype, device=control.device)
            fill_(message[:numel], bucket.sizes, parts, peers.weight)
            if extra:
                message[numel:].copy_(control)
            work = peers.begin_sum_(message, dtype=dtype if parts else None)
            self._buckets.append((bucket, message, work))

    def wait(self) -> tuple[list[Tensor], Tensor]:
        """Wait for the mean (on CUDA, the stream does).

        Returns:
            The means, in the shapes of the tensors (of their real views), in `wide_dtype`, in new memory, with elements
            in the order in which they were sent; and the sum of the control messages, float32.
        """
        _, first, _ = self._buckets[0]
        with self._peers.ledger.waiting(first.device):
            for _, _, work in self._buckets:
                work.wait()
        # Back in the order of the tensors: a bucket has tensors of one dtype.
        means: list[Tensor] = [torch.empty(0)] * len(self._layouts)
        for bucket, message, _ in self._buckets:
            for index, mean in zip(bucket.members, split_front(message, bucket.sizes), strict=True):
                means[index] = laid_out(mean, *self._layouts[index])
        return means, first[-self._num_extra :].to(torch.float32)


def fill_(room: Tensor, sizes: list[int], tensors: Sequence[Tensor], weight: float) -> None:
    """Concatenate tensors, times the weight; multiply in the wide dtype of the room, because tensors may be narrow."""
    parts = [each if each.dim() == 1 else each.reshape(-1) for each in tensors]
    if room.device.type != "cpu" and parts:  # few launches, whatever their number
        if len(parts) == 1:
            torch.mul(parts[0], weight, out=room)
            return
        if all(part.dtype == room.dtype for part in parts):
            torch.cat(parts, out=room)
        else:  # `torch.cat` would copy these one by one
            copy_all_(room.split(sizes), parts)
        room.mul_(weight)
        return
    views = room.split(sizes)
    for view, part in zip(views, parts, strict=True):
        if part.dtype == view.dtype:
            torch.mul(part, weight, out=view)
        else:
            view.copy_(part).mul_(weight)


def average_gradients_(
    parameters: Sequence[Parameter],
    peers: Ranks,
    device: torch.device,
    message_of: Callable[[list[float]], Tensor] | None = None,
) -> Tensor:
    """Replace the gradients of parameters by their mean over ranks; a gradient that no rank has stays None, as in DDP.

    In place:
        `.grad`; a gradient that is not strided counts as zeros, and stays.

    Collective: all ranks, with the same parameters; blocking.

    Args:
        peers: all ranks, or the ranks of a node.
        device: the device of the message.
        message_of: makes the control message, which is summed over the ranks as well: float32, 1-d. It begins with the
            numbers that it gets: whether this rank has each gradient. None: only these numbers.

    Returns:
        The sum of the message. This waits for the device only if a gradient is None on this rank.
    """
    gradients = [
        torch.zeros_like(p) if p.grad is None or p.grad.layout != torch.strided else p.grad for p in parameters
    ]
    gradients = [in_order(*map(as_real, pair)) for pair in zip(gradients, parameters, strict=True)]
    # How many ranks have each gradient: the mean of a gradient that no rank has stays None, as in DDP.
    used = [float(p.grad is not None) for p in parameters]
    message = upload([*used, 0.0], torch.float32, device) if message_of is None else message_of(used)
    means, sums = MeanWork(gradients, message, peers).wait()
    if not all(used):  # another rank may have these gradients
        used = sums[: len(used)].tolist()
    targets, sources = [], []
    for parameter, mean, num_used in zip(parameters, means, used, strict=True):
        if num_used and (parameter.grad is None or parameter.grad.layout == torch.strided):
            parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            targets.append(in_order(as_real(parameter.grad), as_real(parameter)))
            sources.append(mean)
    copy_all_(targets, sources)
    return sums


@lru_cache(maxsize=64)
def fill_buckets(tensors: tuple[tuple[torch.dtype, int], ...]) -> list[_Bucket]:
    """Return buckets of tensors, given their dtypes and sizes; at least one bucket, for the control message.

    A bucket has one dtype, and tensors in the order of appearance. Cached: each step asks for the same buckets.
    """
    full: list[_Bucket] = []
    filling: dict[torch.dtype, _Bucket] = {}
    for index, (own, numel) in enumerate(tensors):
        dtype = torch.promote_types(own, torch.float32)
        if dtype not in filling:
            filling[dtype] = _Bucket(dtype, [], [])
            full.append(filling[dtype])
        filling[dtype].members.append(index)
        filling[dtype].sizes.append(numel)
        if sum(filling[dtype].sizes) * dtype.itemsize >= BUCKET_BYTES:
            del filling[dtype]
    return full or [_NOTHING]


_NOTHING = _Bucket(torch.float32, [], [])
