"""Data-parallel training on slow networks, as PyTorch Lightning strategies.

Importing this package makes the strategies known to Lightning by name: `Trainer(strategy="dgc")`.
"""

from lightning_lowbw.callbacks.averaging_schedule import AveragingSchedule
from lightning_lowbw.callbacks.sparsity_warmup import SparsityWarmup
from lightning_lowbw.callbacks.traffic_monitor import TrafficMonitor
from lightning_lowbw.engine.gradients import DGC
from lightning_lowbw.engine.replicas import LocalSGD
from lightning_lowbw.errors import (
    ConfigurationError,
    DisagreementError,
    NonFiniteGradientError,
    UnexpectedCollectiveError,
)
from lightning_lowbw.strategies import (
    AdaptiveLocalSGDStrategy,
    DGCStrategy,
    HierarchicalStrategy,
    LocalSGDStrategy,
    register,
)
from lightning_lowbw.what.corrections import FrozenVariance
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.where.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "AdaptiveLocalSGDStrategy",
    "AveragingSchedule",
    "Compression",
    "ConfigurationError",
    "DGCStrategy",
    "DisagreementError",
    "FrozenVariance",
    "HierarchicalStrategy",
    "LocalSGD",
    "LocalSGDStrategy",
    "NonFiniteGradientError",
    "SparsityWarmup",
    "Topology",
    "TrafficMonitor",
    "UnexpectedCollectiveError",
]

register()
