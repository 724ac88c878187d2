"""The names for `Trainer(strategy="...")`: a table, and their registration with Lightning.

A name is all that can be said there; so each has its arguments, and a form for two levels and for each way of starting
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_lowbw.engine.presets import PRESETS, preset
from lightning_lowbw.strategies.auto import AutoStrategy
from lightning_lowbw.strategies.dgc import DGCStrategy
from lightning_lowbw.strategies.hierarchical import HierarchicalStrategy
from lightning_lowbw.strategies.local_sgd import AdaptiveLocalSGDStrategy, LocalSGDStrategy
from lightning_lowbw.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "dgc": DGCStrategy,
    "local_sgd": LocalSGDStrategy,
    "adaptive_local_sgd": AdaptiveLocalSGDStrategy,
    "hierarchical": HierarchicalStrategy,
}
# Without a class of its own a name is the general one with its method.
NAMES: dict[str, tuple[type[Strategy], Mapping[str, Any]]] = {
    name: (STRATEGIES[each.family], each.arguments)
    if each.family in STRATEGIES
    else (Strategy, {"method": preset(name)})
    for name, each in PRESETS.items()
}
NAMES["lowbw"] = (AutoStrategy, {})  # may become any of them
ON_TWO_LEVELS = "_hierarchical"
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register(registry: _StrategyRegistry = StrategyRegistry) -> None:
    """Make the strategies known to Lightning by name. May be called any number of times."""
    entries = dict(NAMES)
    entries |= {
        name + ON_TWO_LEVELS: (strategy, {**arguments, "topology": "auto"})
        for name, (strategy, arguments) in NAMES.items()
        if name != "hierarchical"
    }
    for name, (strategy, arguments) in entries.items():
        for suffix, start_method in START_METHODS.items():
            if name + suffix not in registry.available_strategies():
                description = f"{strategy.__name__} with {dict(arguments) or 'defaults'}, started by {start_method!r}"
                registry.register(
                    name + suffix, strategy, description=description, start_method=start_method, **arguments
                )
