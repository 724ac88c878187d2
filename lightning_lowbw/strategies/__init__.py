"""Thin Lightning adapters: one `DDPStrategy` subclass with three seams, and one file per method."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_lowbw.strategies.base import LowBandwidthStrategy
from lightning_lowbw.strategies.dgc import DGCStrategy
from lightning_lowbw.strategies.hierarchical import HierarchicalStrategy
from lightning_lowbw.strategies.local_sgd import AdaptiveLocalSGDStrategy, LocalSGDStrategy

__all__ = [
    "AdaptiveLocalSGDStrategy",
    "DGCStrategy",
    "HierarchicalStrategy",
    "LocalSGDStrategy",
    "LowBandwidthStrategy",
    "register",
]


def register() -> None:
    """Make the strategies known to Lightning by name. May be called any number of times."""
    for strategy in (DGCStrategy, LocalSGDStrategy, AdaptiveLocalSGDStrategy, HierarchicalStrategy):
        strategy.register_strategies(StrategyRegistry)
