"""The names for `Trainer(strategy="...")`: a table, and their registration with Lightning.

A Trainer accepts only a name there; so each has its arguments, and a form for two levels, for each way of starting
processes, and for models with parameters that no loss depends on, with the endings of Lightning's own names for DDP.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.presets import DGC, FAMILIES, PRESETS, preset
from lightning_lowbw.strategies.auto import AutoStrategy
from lightning_lowbw.strategies.dgc import DGCStrategy
from lightning_lowbw.strategies.fsdp import ShardedStrategy
from lightning_lowbw.strategies.hierarchical import HierarchicalStrategy
from lightning_lowbw.strategies.local_sgd import AdaptiveLocalSGDStrategy, LocalSGDStrategy
from lightning_lowbw.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "dgc": DGCStrategy,
    "local_sgd": LocalSGDStrategy,
    "adaptive_local_sgd": AdaptiveLocalSGDStrategy,
    "hierarchical": HierarchicalStrategy,
}
# A name is the general strategy with its method, where no class has all of its knobs.
NAMES: dict[str, tuple[type[Strategy], Mapping[str, Any]]] = {
    name: (STRATEGIES[each.family], each.arguments)
    if each.family in STRATEGIES
    and each.arguments.keys() <= inspect.signature(STRATEGIES[each.family]).parameters.keys()
    else (Strategy, {"method": preset(name)})
    for name, each in PRESETS.items()
}
NAMES["lowbw"] = (AutoStrategy, {})  # may become any of them
ON_TWO_LEVELS = "_hierarchical"
SHARDED = "_fsdp"  # inside each node; processes are started by a launcher, or as with popen
# `sparsity="auto"` cannot measure shards: 1 % of the elements, once 100 dense steps have settled Adam's variance.
OF_SHARDS = {
    **{name: preset(name) for name in ("local_sgd", "diloco", "sparse_loco", "hierarchical", "int8", "int4")},
    "dgc": DGC(sparsity=[0.99], rampup_begin_step=100),
}
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
SEARCHES: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}


def register(registry: _StrategyRegistry = StrategyRegistry) -> None:
    """Register the strategies with Lightning by name. May be called any number of times.

    Fabric gets the names, too, only to refuse them with a reason.
    """
    entries = dict(NAMES)
    entries |= {
        name + ON_TWO_LEVELS: (strategy, {**arguments, "topology": "auto"})
        for name, (strategy, arguments) in NAMES.items()
        if name != "hierarchical"
    }
    for base, (strategy, arguments) in entries.items():
        for (start, start_method), (search, found) in itertools.product(START_METHODS.items(), SEARCHES.items()):
            name, options = base + start + search, {**arguments, **found}
            if name not in registry.available_strategies():
                description = f"{strategy.__name__} with {options or 'defaults'}, started by {start_method!r}"
                registry.register(name, strategy, description=description, start_method=start_method, **options)
            if name not in FABRIC_REGISTRY.available_strategies():
                refuse = functools.partial(_refuse_fabric, name, base.removesuffix(ON_TWO_LEVELS))
                FABRIC_REGISTRY.register(name, refuse)
    for base, method in OF_SHARDS.items():
        name = base + SHARDED
        if name not in registry.available_strategies():
            description = f"{ShardedStrategy.__name__}, {method}"
            registry.register(name, ShardedStrategy, description=description, method=method)
        if name not in FABRIC_REGISTRY.available_strategies():
            FABRIC_REGISTRY.register(name, functools.partial(_refuse_fabric, name, base))


def _refuse_fabric(name: str, base: str) -> NoReturn:
    method = FAMILIES[PRESETS[base].family].__name__ if base in PRESETS else "DGC"
    raise ConfigurationError(
        f"Fabric(strategy={name!r}): the strategies are for Lightning's Trainer. In a loop of your own a method is "
        f"attached to the optimizer: lightning_lowbw.{method}(...).attach(optimizer, model.named_parameters()), after "
        "Fabric(strategy='ddp').launch(). Leave out Fabric.setup of the model and of the optimizer: its DDP would send "
        "all gradients, too."
    )
