"""The strategies and callbacks for a Trainer of `pytorch_lightning`.

`namespaces` loads this file, and the modules that it imports, with other names in their import statements: with
`pytorch_lightning` in place of `lightning`, and with `lightning_lowbw.mirror.strategies` for the copies.
"""

from lightning_lowbw import namespaces
from lightning_lowbw.callbacks.schedules import AveragingSchedule, SparsityWarmup
from lightning_lowbw.strategies import (
    AdaptiveLocalSGDStrategy,
    AutoStrategy,
    DGCStrategy,
    ElasticStrategy,
    HierarchicalStrategy,
    LocalSGDStrategy,
    ShardedStrategy,
    Strategy,
    register,
)
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.traffic_monitor import TrafficMonitor

__all__ = [
    "AdaptiveLocalSGDStrategy",
    "AutoStrategy",
    "AveragingSchedule",
    "DGCStrategy",
    "ElasticStrategy",
    "HierarchicalStrategy",
    "LocalSGDStrategy",
    "ShardedStrategy",
    "SparsityWarmup",
    "Strategy",
    "TrafficMonitor",
]

register()
namespaces.introduce(BaseStrategy)
