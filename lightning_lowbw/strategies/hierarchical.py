"""`Trainer(strategy="hierarchical")`: dense gradients, all-reduced inside the nodes and between them."""

from __future__ import annotations

from typing import Any, get_args

import torch

from lightning_lowbw.engine.replicas import LocalSGD
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.base import LowBandwidthStrategy
from lightning_lowbw.what.values import FLOAT_NAMES
from lightning_lowbw.where.hierarchy import Algorithm, TopologyChoice


class HierarchicalStrategy(LowBandwidthStrategy):
    """DDP whose all-reduce has two levels, overlapped with the backward pass; each node sends its gradient once.

    Every step, dense: the result is DDP's within the rounding of a sum in another order. The other strategies do the
    same in their dense steps if they are given a `topology`.

    Args:
        ranks_per_node: nodes of so many neighbouring ranks, instead of `topology`.
        algorithm: "sharded" (reduce-scatter, all-reduce of the shards, all-gather) or "leader" (reduce, all-reduce
            among the first ranks, broadcast), which also does with nodes of different sizes.
        inter_dtype: "float32", or "bfloat16" or "float16" for what is sent between nodes.
        topology: "auto" (asks the launcher and the host names), a number of ranks per node, the ranks of each node, or
            a `Topology`.
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
        topology: TopologyChoice = "auto",
        **kwargs: Any,
    ) -> None:
        for name, value, allowed in (
            ("algorithm", algorithm, get_args(Algorithm)),
            ("inter_dtype", inter_dtype, FLOAT_NAMES),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(allowed)}.")
        if ranks_per_node is not None:
            if topology != "auto":
                raise ConfigurationError("ranks_per_node and topology: give one of the two.")
            topology = ranks_per_node
        super().__init__(
            LocalSGD(k_steps=1),
            topology=topology,
            algorithm=algorithm,
            inter_dtype=None if inter_dtype == "float32" else getattr(torch, inter_dtype),
            **kwargs,
        )
