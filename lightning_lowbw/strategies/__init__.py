"""Thin Lightning adapters: one `DDPStrategy` subclass with three seams, and one file per method."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_lowbw.strategies.base import LowBandwidthStrategy
from lightning_lowbw.strategies.dgc import DGCStrategy

__all__ = ["DGCStrategy", "LowBandwidthStrategy", "register"]


def register() -> None:
    """Make the strategies known to Lightning by name. May be called any number of times."""
    DGCStrategy.register_strategies(StrategyRegistry)
