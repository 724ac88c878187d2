"""Data-parallel training on slow networks, as PyTorch Lightning strategies.

Importing this package makes the strategies known to Lightning by name, `Trainer(strategy="dgc")`: to `lightning` and to
`pytorch_lightning`, whichever is installed.
"""

from lightning_lowbw import namespaces  # first: it may change what the next ones are built on
from lightning_lowbw.callbacks.schedules import AveragingSchedule, SparsityWarmup
from lightning_lowbw.comm.topology import Topology, Where
from lightning_lowbw.errors import (
    ConfigurationError,
    DisagreementError,
    NonFiniteGradientError,
)
from lightning_lowbw.method import Method
from lightning_lowbw.muon import MuonAdamW
from lightning_lowbw.payloads.low_rank import LowRank
from lightning_lowbw.payloads.quantized import Quantized
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.presets import (
    DGC,
    AdaptiveLocalSGD,
    Compression,
    Hierarchical,
    LocalSGD,
    PowerSGD,
    QuantizedGradients,
)
from lightning_lowbw.schedules.every_k import EveryK
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies import (
    AdaptiveLocalSGDStrategy,
    AutoStrategy,
    DGCStrategy,
    ElasticShardedStrategy,
    ElasticStrategy,
    HierarchicalStrategy,
    LocalSGDStrategy,
    ShardedStrategy,
    Strategy,
    register,
)
from lightning_lowbw.strategies.names import NAMES, OF_GROUPS, OF_SHARDS
from lightning_lowbw.strategies.traffic_monitor import TrafficMonitor
from lightning_lowbw.sync.state import merge_states

__version__ = "0.2.0"

__all__ = [
    "DGC",
    "AdaptiveLocalSGD",
    "AdaptiveLocalSGDStrategy",
    "AutoStrategy",
    "AveragingSchedule",
    "Compression",
    "ConfigurationError",
    "DGCStrategy",
    "DisagreementError",
    "ElasticShardedStrategy",
    "ElasticStrategy",
    "EveryK",
    "EveryStep",
    "Hierarchical",
    "HierarchicalStrategy",
    "LocalSGD",
    "LocalSGDStrategy",
    "LowRank",
    "Method",
    "MuonAdamW",
    "NonFiniteGradientError",
    "PowerSGD",
    "Quantized",
    "QuantizedGradients",
    "ShardedStrategy",
    "SparsityWarmup",
    "Strategy",
    "TopK",
    "Topology",
    "TrafficMonitor",
    "Where",
    "Whole",
    "merge_states",
    "names",
]


def names() -> list[str]:
    """Return the names for `Trainer(strategy=...)`, without endings.

    Those without `_fsdp` and `_elastic` take `_hierarchical`, for two levels ("hierarchical" has them), and then the
    endings of Lightning's "ddp", such as `_spawn`.
    """
    elastic = [f"{base}_elastic{inside}" for base in OF_GROUPS for inside in ("", "_fsdp")]
    return sorted([*NAMES, *(f"{base}_fsdp" for base in OF_SHARDS), *elastic])


register()
namespaces.connect()
