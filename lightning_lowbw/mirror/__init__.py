"""The strategies and callbacks for a Trainer of `pytorch_lightning`.

`namespaces` loads this file, and the modules that it imports, with other names in their import statements: with
`pytorch_lightning` in place of `lightning`, and with `lightning_lowbw.mirror.strategies` for the copies.
"""

from lightning_lowbw import namespaces
from lightning_lowbw.callbacks.schedules import AveragingSchedule, SparsityWarmup
from lightning_lowbw.strategies import *  # noqa: F403 - one list of the strategies is enough
from lightning_lowbw.strategies import __all__ as STRATEGIES
from lightning_lowbw.strategies import register
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.traffic_monitor import TrafficMonitor

__all__ = [*STRATEGIES, "AveragingSchedule", "SparsityWarmup", "TrafficMonitor"]

register()
namespaces.introduce(BaseStrategy)
