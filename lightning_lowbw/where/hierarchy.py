"""Two levels: inside the nodes, where it is fast, and between them, where it is not."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.where.agreement import failing_together
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.topology import Topology
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes, reduce_scatter_bytes

Algorithm = Literal["sharded", "leader"]
# "flat", "auto", ranks per node, the ranks of each node, or these as a value
TopologyChoice = str | int | Sequence[Sequence[int]] | Topology
# What tells nodes apart that share a host name (containers, the lab), in the words of torchrun, Lightning and SLURM.
NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")

_groups: dict[tuple[object, ...], dist.ProcessGroup | None] = {}


def check_choice(choice: object) -> Topology | None:
    """Return the topology that a choice spells out; None for "flat", "auto" and numbers, which need a world.

    Raises:
        ConfigurationError: it is none of `TopologyChoice`.
    """
    if isinstance(choice, Topology):
        return choice
    if isinstance(choice, int) and not isinstance(choice, bool):
        Topology.blocks(choice, choice)  # a number of ranks at all
        return None
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        nodes = [tuple(node) if isinstance(node, Sequence) else () for node in choice]
        if all(isinstance(rank, int) and not isinstance(rank, bool) for node in nodes for rank in node) and all(nodes):
            return Topology(tuple(nodes))
    elif choice in ("flat", "auto"):
        return None
    raise ConfigurationError(
        f"topology={choice!r}: give 'flat', 'auto' (asks the launcher and the host names), a number of ranks per node, "
        "the ranks of each node such as [[0, 1], [2, 3]], or a Topology."
    )


def resolve(choice: TopologyChoice, world_size: int) -> Topology | None:
    """Return the topology of the world; None where it is to be flat.

    Collective: all ranks, blocking.

    Raises:
        ConfigurationError: on all ranks; the choice does not go with the world.
    """
    with failing_together():
        topology = check_choice(choice)
        if isinstance(choice, int):
            topology = Topology.blocks(world_size, choice)
        if topology is not None and topology.world_size != world_size:
            raise ConfigurationError(
                f"The topology {topology} has {topology.world_size} ranks, the world {world_size}."
            )
    return discover() if choice == "auto" else topology


def discover() -> Topology:
    """Return which ranks share a node, by host name and by the launcher's number of the node.

    Collective: all ranks, blocking.
    """
    number = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), "")
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, f"{socket.gethostname()}/{number}")
    return Topology.of_hosts(hosts)


class Hierarchy:
    """The process groups of a topology, as seen from this rank, and what is done on two of them in turn.

    On gloo all of it runs on one thread, on NCCL on one stream: the collectives come in the order in which they were
    asked for, which is the same on all ranks.

    Args:
        topology: of the world.
        algorithm: "sharded": reduce-scatter inside the node, all-reduce of each shard among the ranks with one place
            in all nodes, all-gather inside the node; every rank of a node uses its lane. "leader": reduce to the first
            rank of the node, all-reduce among these, broadcast inside the node.
        inter_dtype: what the stage between nodes sends of gradients; None is their own dtype.
        ledger: where the traffic is written down, by level.
        purpose: hierarchies that are in use at the same time need groups of their own.

    Attributes:
        node: the ranks of this node.
        place: of this rank in its node.
        peers: the ranks that have this one's place in the other nodes; with "leader" None.
        groups: all process groups that this rank uses.

    Raises:
        ConfigurationError: the nodes are of different sizes, and the algorithm is "sharded".

    Collective: all ranks, at the first use of a topology: groups are made once, in one order.
    """

    def __init__(
        self,
        topology: Topology,
        algorithm: Algorithm,
        inter_dtype: torch.dtype | None,
        ledger: TrafficLedger,
        purpose: str = "gradients",
    ) -> None:
        self.topology, self.algorithm, self.inter_dtype, self.ledger = topology, algorithm, inter_dtype, ledger
        self._ranks = topology.nodes[topology.node_of(dist.get_rank())]
        self.place = self._ranks.index(dist.get_rank())
        self._lane: ThreadPoolExecutor | None = None
        for ranks in topology.nodes:
            _group(ranks, purpose), _group(ranks, f"{purpose}, in turn")
        self.node = Exchange(_group(self._ranks, purpose), ledger, "intra")
        # Of the thread: what is done on `node` may come at any time.
        self._intra = _group(self._ranks, f"{purpose}, in turn")
        self.groups = [self.node.group, self._intra]
        self.peers: Exchange | None = None
        if algorithm == "leader":
            self._leaders = _group(topology.leaders, purpose)
            self.groups.append(self._leaders)
        else:
            for place in range(topology.ranks_per_node):
                _group(topology.peers(place), purpose)
            self.peers = Exchange(_group(topology.peers(self.place), purpose), ledger, "inter")
            self.groups.append(self.peers.group)

    def all_reduce(self, buffer: Tensor, *, exact: bool = True) -> torch.futures.Future[Tensor]:
        """Begin to sum a flat tensor over all ranks, in place; all ranks get the same bits.

        Collective: all ranks, in the same order of calls.

        Args:
            exact: whether `inter_dtype` is disregarded; where there are not only gradients in it.
        """
        inter_dtype = None if exact else self.inter_dtype
        return self._begin(functools.partial(self._all_reduce_, inter_dtype=inter_dtype), buffer)

    def all_reduce_in_node(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to sum a flat tensor over the ranks of the node, in place.

        Collective: all ranks of the node, in the same order of calls as `all_reduce`.
        """
        return self._begin(self._all_reduce_in_node_, buffer)

    def gather_from_nodes(self, message: Tensor) -> Tensor:
        """Return the messages of all nodes, of which each of a node's ranks sends a part: uint8, (nodes, nbytes).

        Collective: all ranks, with the same message on the ranks of a node and messages of one size; blocking.
        """
        with self.ledger.waiting(message.device):
            return self._gather_from_nodes(message, self.node)

    def begin_gather_from_nodes(self, message: Tensor) -> torch.futures.Future[Tensor]:
        """Begin `gather_from_nodes`.

        Collective: all ranks, in the same order of calls as `all_reduce`.
        """
        node = Exchange(self._intra, self.ledger, "intra")
        gathered = message.new_empty((self.topology.num_nodes, message.numel()))
        return self._begin(lambda out: out.copy_(self._gather_from_nodes(message, node)), gathered)

    def _gather_from_nodes(self, message: Tensor, node: Exchange) -> Tensor:
        assert self.peers is not None
        num_places, nbytes = len(self._ranks), message.numel()
        if message.is_cuda:  # its maker lets go of it while this is queued on a side stream
            message.record_stream(torch.cuda.current_stream(message.device))
        size = -(-nbytes // num_places)
        padded = torch.nn.functional.pad(message, (0, num_places * size - nbytes))
        mine = self.peers.begin_all_gather(padded[self.place * size : (self.place + 1) * size]).wait()
        # A group has its ranks in ascending order; nodes need not be in the same order at all places.
        peers = self.topology.peers(self.place)
        mine = mine[[sorted(peers).index(rank) for rank in peers]]
        parts = node.begin_all_gather(mine.view(-1)).wait().view(num_places, self.topology.num_nodes, size)
        return parts.transpose(0, 1).reshape(self.topology.num_nodes, -1)[:, :nbytes].contiguous()

    def reduce_scatter(self, buffer: Tensor) -> Tensor:
        """Return this place's part of the sum over the node; the last parts are padded with zeros.

        Collective: all ranks of the node, blocking.
        """
        num_places, group = len(self._ranks), self._intra
        padded = torch.nn.functional.pad(buffer, (0, -buffer.numel() % num_places))
        self.ledger.record(reduce_scatter_bytes(padded.nbytes, num_places), "intra")
        if dist.get_backend(group) == "gloo":  # older ones have no reduce-scatter; takes the CPU's tensors only
            staged = padded.cpu()
            received = torch.empty_like(staged)
            dist.all_to_all_single(received, staged, group=group)
            return received.to(buffer.device).view(num_places, -1).sum(0)
        part = padded.new_empty(padded.numel() // num_places)
        dist.reduce_scatter_tensor(part, padded, group=group)
        return part

    def all_gather_parts(self, part: Tensor, numel: int) -> Tensor:
        """Return the parts of all places behind one another, of which `numel` elements are no padding.

        Collective: all ranks of the node, blocking.
        """
        num_places, group = len(self._ranks), self._intra
        staged = part.cpu() if dist.get_backend(group) == "gloo" else part
        gathered = staged.new_empty((num_places, part.numel()))
        dist.all_gather(list(gathered), staged, group=group)
        self.ledger.record(all_gather_bytes(part.nbytes, num_places), "intra")
        return gathered.to(part.device).view(-1)[:numel]

    def close(self) -> None:
        """End the thread; what has been begun is finished."""
        if self._lane is not None:
            self._lane.shutdown(wait=False)
            self._lane = None

    def _begin(self, collective: Callable[[Tensor], object], buffer: Tensor) -> torch.futures.Future[Tensor]:
        if dist.get_backend() == "gloo":
            if self._lane is None:
                self._lane = ThreadPoolExecutor(1, "lightning_lowbw hierarchy")
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            self._lane.submit(_finish, collective, buffer, future)
            return future
        # The stages are queued on a stream of their own; the host goes on.
        future = torch.futures.Future(devices=[buffer.device])
        stream = _side_stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            buffer.record_stream(stream)
            _finish(collective, buffer, future)
        return future

    def _all_reduce_in_node_(self, buffer: Tensor) -> None:
        dist.all_reduce(buffer, group=self._intra)
        self.ledger.record(all_reduce_bytes(buffer.nbytes, len(self._ranks)), "intra")

    def _all_reduce_(self, buffer: Tensor, inter_dtype: torch.dtype | None) -> None:
        if self.algorithm == "leader":
            self._through_leaders(buffer, inter_dtype)
            return
        assert self.peers is not None
        shard = self.reduce_scatter(buffer)
        self._between(shard, self.peers.group, inter_dtype)
        buffer.copy_(self.all_gather_parts(shard, buffer.numel()))

    def _through_leaders(self, buffer: Tensor, inter_dtype: torch.dtype | None) -> None:
        leader, intra = self._ranks[0], self._intra
        staged = buffer.cpu() if dist.get_backend(intra) == "gloo" else buffer  # whose reduce takes the CPU's only
        if len(self._ranks) > 1:
            dist.reduce(staged, dst=leader, group=intra)
        if self.place == 0:
            self._between(staged, self._leaders, inter_dtype)
        if len(self._ranks) > 1:
            dist.broadcast(staged, src=leader, group=intra)
            self.ledger.record(buffer.nbytes, "intra")
        if staged is not buffer:
            buffer.copy_(staged)

    def _between(self, tensor: Tensor, group: dist.ProcessGroup | None, inter_dtype: torch.dtype | None) -> None:
        wire = tensor if inter_dtype is None else tensor.to(inter_dtype)
        dist.all_reduce(wire, group=group)
        self.ledger.record(all_reduce_bytes(wire.nbytes, self.topology.num_nodes), "inter")
        if wire is not tensor:
            tensor.copy_(wire)


def _finish(collective: Callable[[Tensor], object], buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
    try:
        with torch.no_grad():
            collective(buffer)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for it
        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
    else:
        future.set_result(buffer)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _group(ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup | None:
    """Return the group of some ranks, made at the first call; all ranks call this in one order."""
    key = (dist.group.WORLD, ranks, purpose)  # a world that was made anew has groups of its own
    if key not in _groups:
        _groups[key] = dist.new_group(list(ranks))
    return _groups[key]
