"""`Trainer(strategy="hierarchical")`: dense gradients, all-reduced inside the nodes and between them."""

from __future__ import annotations

from typing_extensions import Unpack

from lightning_lowbw.comm.peers import Algorithm
from lightning_lowbw.comm.topology import TopologyChoice
from lightning_lowbw.presets import Hierarchical
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS, StrategyKeywords, shows
from lightning_lowbw.strategies.strategy import Strategy


class HierarchicalStrategy(Strategy):
    """DDP whose all-reduce has two levels, overlapped with the backward pass; each node sends its gradient once.

    Every step, dense: the result is DDP's within the rounding of a sum in another order. The other strategies do the
    same in their dense steps if they are given a `topology`.

    Args:
        topology: "auto" (by the launcher and the host names), a number of ranks per node, the ranks of each node, or
            a `Topology`.
        algorithm: "sharded" (reduce-scatter, all-reduce of the shards, all-gather) or "leader" (reduce, all-reduce
            among the first ranks, broadcast), which also works with nodes of different sizes. None: "sharded", and
            "leader" on nodes of different sizes.
        inter_dtype: "float32", or "bfloat16" for what is sent between nodes.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range; at the start of the fit, on all ranks: the topology does not fit
            the world. With one node, or one rank on each, a warning says that this trains as DDP.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = HierarchicalStrategy(topology=2)
        >>> strategy
        HierarchicalStrategy(Method(where=Where(topology=2)))
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False, barebones=True)
    """

    @shows(STRATEGY_KEYWORDS)
    def __init__(
        self,
        topology: TopologyChoice = "auto",
        algorithm: Algorithm | None = None,
        *,
        inter_dtype: str = "float32",
        **kwargs: Unpack[StrategyKeywords],
    ) -> None:
        method = Hierarchical(topology, algorithm, inter_dtype=inter_dtype)
        super().__init__(method, **kwargs)
