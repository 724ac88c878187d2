"""`Trainer(strategy="hierarchical")`: dense gradients, all-reduced inside the nodes and between them."""
# No `from __future__ import annotations` here: DDP checks the hook's annotations, which must be real objects.

from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_lowbw.comm.agreement import agree, failing_together
from lightning_lowbw.comm.hierarchy import Algorithm, Hierarchy, discover
from lightning_lowbw.core.codec import VALUE_DTYPES
from lightning_lowbw.core.topology import Topology
from lightning_lowbw.core.volume import all_reduce_bytes
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.methods.local_sgd import LocalSGD
from lightning_lowbw.strategies.base import LowBandwidthStrategy


class HierarchicalStrategy(LowBandwidthStrategy):
    """DDP whose all-reduce has two levels, overlapped with the backward pass; each node sends its gradient once.

    Every step, dense: the result is DDP's within the rounding of a sum in another order.

    Args:
        ranks_per_node: nodes of so many neighbouring ranks; None asks the launcher and the host names.
        algorithm: "sharded" (reduce-scatter, all-reduce of the shards, all-gather) or "leader" (reduce, all-reduce
            among the first ranks, broadcast), which also does with nodes of different sizes.
        inter_dtype: "float32", or "bfloat16" or "float16" for what is sent between nodes.
        topology: the nodes by their ranks, instead of `ranks_per_node`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or does not go with the world; at the start of the fit, on all
            ranks. With one node, or one rank on each, it says so and trains as DDP.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = HierarchicalStrategy(ranks_per_node=2)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False, barebones=True)
    """

    strategy_name = "hierarchical"

    def __init__(
        self,
        ranks_per_node: int | None = None,
        algorithm: Algorithm = "sharded",
        *,
        inter_dtype: str = "float32",
        topology: Topology | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value, allowed in (
            ("algorithm", algorithm, get_args(Algorithm)),
            ("inter_dtype", inter_dtype, VALUE_DTYPES),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(allowed)}.")
        if ranks_per_node is not None:
            if topology is not None:
                raise ConfigurationError("ranks_per_node and topology: give one of the two.")
            Topology.blocks(ranks_per_node, ranks_per_node)  # a number of ranks at all
        super().__init__(LocalSGD(k_steps=1), **kwargs)
        self._ranks_per_node, self._topology = ranks_per_node, topology
        self._algorithm: Algorithm = algorithm
        self._inter_dtype = inter_dtype
        self._hierarchy: Hierarchy | None = None
        self._lane: ThreadPoolExecutor | None = None

    @override
    def configure_ddp(self) -> None:
        given = {"ranks_per_node": self._ranks_per_node, "topology": self._topology and self._topology.nodes}
        agree("topology", {**given, "algorithm": self._algorithm, "inter_dtype": self._inter_dtype})
        self._hierarchy = self._make_hierarchy()
        super().configure_ddp()
        if self._hierarchy is not None and self.root_device.type == "cpu":
            # One thread: the stages of all buckets in one order, which is the same on all ranks.
            self._lane = ThreadPoolExecutor(1, "lightning_lowbw hierarchical all-reduce")

    def _make_hierarchy(self) -> Hierarchy | None:
        with failing_together():
            topology = self._topology
            if self._ranks_per_node is not None:
                topology = Topology.blocks(self.world_size, self._ranks_per_node)
            if topology is not None and topology.world_size != self.world_size:
                raise ConfigurationError(
                    f"The topology {topology.nodes} has {topology.world_size} ranks, the world {self.world_size}."
                )
        topology = topology or discover()
        with failing_together():
            if self._algorithm == "sharded":
                _ = topology.ranks_per_node  # they must be equal
        if topology.num_nodes == 1 or topology.num_nodes == self.world_size:
            what = "all ranks on one node" if topology.num_nodes == 1 else "one rank on each node"
            rank_zero_warn(f"strategy='hierarchical' with {what}: there is one level only, so this is DDP.")
            return None
        rank_zero_info(f"hierarchical: nodes {', '.join(str(list(node)) for node in topology.nodes)}.")
        inter_dtype = None if self._inter_dtype == "float32" else getattr(torch, self._inter_dtype)
        return Hierarchy(topology, self._algorithm, inter_dtype, self.ledger)

    @override
    def _all_reduce(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        hierarchy = self._hierarchy
        if hierarchy is None:
            return super()._all_reduce(buffer)
        self.ledger.dense_bytes += all_reduce_bytes(buffer.nbytes, dist.get_world_size())
        buffer.mul_(1.0 / dist.get_world_size())
        if self._lane is not None:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            self._lane.submit(_reduce, hierarchy, buffer, future)
            self._note_launch()
            return future
        # On NCCL the stages are queued on a stream of their own; the host goes on with the backward pass.
        future = torch.futures.Future(devices=[buffer.device])
        stream = _side_stream(buffer.device)
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            buffer.record_stream(stream)
            _reduce(hierarchy, buffer, future)
        return future

    @override
    def teardown(self) -> None:
        if self._lane is not None:
            self._lane.shutdown(wait=False)
            self._lane = None
        super().teardown()


def _reduce(hierarchy: Hierarchy, buffer: Tensor, future: torch.futures.Future) -> None:
    try:
        hierarchy.all_reduce_(buffer)
    except Exception as error:  # noqa: BLE001 - handed to the backward pass, which waits for it
        future.set_exception(error)
    else:
        future.set_result(buffer)


_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
