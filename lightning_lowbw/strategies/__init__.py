"""Thin Lightning adapters: one `DDPStrategy` subclass, one concern per file, and the named constructors."""

from lightning_lowbw.strategies.checks import steps_per_epoch_of
from lightning_lowbw.strategies.elastic import ElasticShardedStrategy, ElasticStrategy
from lightning_lowbw.strategies.fsdp import ShardedStrategy
from lightning_lowbw.strategies.names import (
    AdaptiveLocalSGDStrategy,
    AutoStrategy,
    DGCStrategy,
    HierarchicalStrategy,
    LocalSGDStrategy,
    register,
)
from lightning_lowbw.strategies.strategy import Strategy

__all__ = [
    "AdaptiveLocalSGDStrategy",
    "AutoStrategy",
    "DGCStrategy",
    "ElasticShardedStrategy",
    "ElasticStrategy",
    "HierarchicalStrategy",
    "LocalSGDStrategy",
    "ShardedStrategy",
    "Strategy",
    "register",
    "steps_per_epoch_of",
]
