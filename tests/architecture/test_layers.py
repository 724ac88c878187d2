"""The rules of the package that a reader relies on: who imports whom, what is public, what is written once."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

import lightning_lowbw as lowbw
from lightning_lowbw import namespaces
from lightning_lowbw.presets import preset
from lightning_lowbw.strategies import register
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS

PACKAGE = "lightning_lowbw"
ROOT = Path(lowbw.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# What each folder may import beside itself:
# errors <- kernels, schedules <- comm <- payloads <- sync <- method <- cost_model, strategies, callbacks.
METHOD_PARTS = {"errors", "arguments", "namespaces", "schedules", "comm", "payloads", "sync"}
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"errors"},
    "namespaces": set(),
    "kernels": {"errors"},
    "muon": {"errors"},
    "schedules": {"errors", "arguments"},
    "comm": {"errors", "arguments", "kernels"},
    "payloads": {"errors", "arguments", "kernels", "schedules", "comm"},
    "sync": {"errors", "arguments", "namespaces", "kernels", "schedules", "comm", "payloads"},
    "method": METHOD_PARTS,
    "presets": {"method", *METHOD_PARTS},
    "cost_model": {"method", "presets", *METHOD_PARTS},
    "elastic": {"kernels", "method", *METHOD_PARTS},
    "strategies": {"kernels", "method", "presets", "cost_model", "elastic", *METHOD_PARTS},
    "callbacks": {"method", "presets", "strategies", *METHOD_PARTS},
    "mirror": {"namespaces", "strategies", "callbacks"},
    "tools": {"cli", "kernels", "method", "presets", "cost_model", "strategies", *METHOD_PARTS},
}
# What each folder may not import, of others' packages.
FOREIGN: dict[str, set[str]] = {
    "errors": {"torch", "lightning"},
    "arguments": {"lightning", "torch.distributed"},
    "namespaces": {"torch", "lightning"},
    "kernels": {"lightning", "torch.distributed"},
    "muon": {"lightning", "torch.distributed"},
    "schedules": {"lightning", "torch.distributed", "time", "datetime", "os", "random", "socket"},
    "comm": {"lightning"},
    "payloads": {"lightning", "torch.distributed", "time", "datetime", "os", "random", "socket"},
    "sync": {"lightning"},
    "method": {"lightning"},
    "cost_model": {"lightning"},
    "elastic": {"lightning"},
}


@functools.cache
def parse(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of all imports, also those inside of functions: `a.b` for `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imports_of(module: Path) -> list[str]:
    return [*imported_names(parse(module))]


def attribute_chains(tree: ast.AST) -> Iterator[str]:
    """Yield `torch.distributed.all_reduce` where it is written out, without an import of its own."""
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and names:
            yield ".".join([node.id, *reversed(names)])


def layer_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_a_layer_imports_only_what_lies_below() -> None:
    assert {layer_of(module) for module in MODULES} - {"__init__", "cli"} == set(BELOW) >= set(FOREIGN)
    for module in MODULES:
        layer = layer_of(module)
        for name in imports_of(module):
            if layer in BELOW and is_under(name, PACKAGE):
                assert name.split(".")[1] in BELOW[layer] | {layer}, f"{module} imports {name}"
        for name in (*imports_of(module), *attribute_chains(parse(module))):
            forbidden = [package for package in FOREIGN.get(layer, ()) if is_under(name, package)]
            assert not forbidden, f"{module} uses {name}"


def test_the_core_imports_no_tool() -> None:
    for module in MODULES:
        tools = [name for name in imports_of(module) if is_under(name, f"{PACKAGE}.tools")]
        assert layer_of(module) == "tools" or not tools, f"{module} imports {tools}"


def test_no_imports_form_a_cycle() -> None:
    """Nor those behind TYPE_CHECKING and inside functions: what is in a cycle can only be read together."""
    dotted = {".".join((PACKAGE, *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in MODULES}
    graph = {
        module: {name if name in dotted else name.rpartition(".")[0] for name in imports_of(path)} - {module}
        for module, path in dotted.items()
    }
    graphlib.TopologicalSorter({module: names & {*dotted} for module, names in graph.items()}).prepare()


def test_only_the_command_line_imports_hydra() -> None:
    for module in MODULES:
        uses = [name for name in imports_of(module) if name.split(".")[0] in ("hydra", "omegaconf")]
        is_command = module.as_posix() in ("cli.py", "tools/plan.py", "tools/check.py")
        assert bool(uses) == is_command, f"{module}: {uses}"


def test_lightning_is_imported_by_names_that_the_mirror_replaces() -> None:
    for module in MODULES:
        names = [name for name in imports_of(module) if "lightning" in name.partition(".")[0].split("_")]
        foreign = [name for name in names if not is_under(name, PACKAGE)]
        unknown = [name for name in foreign if not any(is_under(name, known) for known in namespaces.MODULES)]
        assert not unknown, (module, unknown)
        assert not foreign or f"{PACKAGE}.{layer_of(module)}" in namespaces.ADAPTERS, (module, foreign)


def test_triton_is_imported_where_it_is_launched() -> None:
    """Not when a module is loaded: it is not there on every machine. Device code is loaded when it is launched."""
    device_code = {module for module in MODULES if module.match("triton_*.py")}
    assert device_code
    for module in {*MODULES} - device_code:
        tree = ast.parse((ROOT / module).read_text())  # of its own: it is changed
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                node.body = [ast.Pass()]
        assert not [name for name in imported_names(tree) if "triton" in name], module


def test_names_and_docstrings() -> None:
    for module in MODULES:
        assert module.stem not in {"utils", "util", "helpers", "misc", "common"}
        tree, siblings = parse(module), {path.stem for path in (ROOT / module).parent.iterdir()}
        assert ast.get_docstring(tree), module
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{module}: {node.name}"
                assert node.name == "main" or node.name not in siblings, f"{module}: {node.name} is a module, too"


# The public surface ---------------------------------------------------------------------------------------------------


def test_what_is_exported() -> None:
    exported = """
        AdaptiveLocalSGD AdaptiveLocalSGDStrategy AutoStrategy AveragingSchedule Compression
        ConfigurationError DGC DGCStrategy DisagreementError ElasticShardedStrategy ElasticStrategy EveryK EveryStep
        Hierarchical HierarchicalStrategy LocalSGD LocalSGDStrategy LowRank Method MuonAdamW
        NonFiniteGradientError PowerSGD Quantized QuantizedGradients ShardedStrategy SparsityWarmup
        Strategy TopK Topology TrafficMonitor Where Whole merge_states names
    """
    assert sorted(lowbw.__all__) == exported.split()
    for name in lowbw.__all__:
        assert getattr(lowbw, name).__name__ == name


def knobs_of(function: Any) -> dict[str, Any]:
    """Return the arguments of a constructor that have a default, except those that all strategies have."""
    parameters = inspect.signature(function).parameters.values()
    has_default = [p for p in parameters if p.default is not inspect.Parameter.empty]
    return {p.name: p.default for p in has_default if p.name not in STRATEGY_KEYWORDS}


def test_a_constructor_without_arguments_is_its_preset() -> None:
    """Names, types and defaults are made from the preset's. Without others `sparsity` is "auto", as `preset` has it."""
    assert knobs_of(lowbw.DGCStrategy)["sparsity"] is None
    assert lowbw.DGCStrategy().method == lowbw.Strategy(lowbw.DGC(sparsity="auto")).method == preset("dgc")
    for name in ("LocalSGD", "AdaptiveLocalSGD"):
        make, strategy = getattr(lowbw, name), getattr(lowbw, f"{name}Strategy")
        assert knobs_of(strategy).items() <= knobs_of(make).items()
        assert strategy().method == make()
    assert lowbw.HierarchicalStrategy().method == lowbw.Hierarchical()


def test_the_strategy_hands_every_argument_on() -> None:
    given = {"rampup_begin_step": 3, "rampup_step": 7, "sparsity": (0.5, 0.75), "min_numel": 11, "topology": 1}
    given |= {"exclude": ("*.bias",), "value_dtype": "float16"}
    other = {"sparsity": "auto", "pretrained": True}
    assert {*given, *other} == set(knobs_of(lowbw.DGCStrategy))
    for arguments in (given, other):
        assert lowbw.DGCStrategy(**arguments).method == lowbw.DGC(**{"sparsity": "auto", **arguments})  # type: ignore[arg-type]


LOCAL = "local_sgd", "post_local_sgd", "hidden_local_sgd", "diloco", "streaming_diloco", "muloco", "sparse_loco"
NAMES = {
    "dgc": lowbw.DGCStrategy,
    "adaptive_local_sgd": lowbw.AdaptiveLocalSGDStrategy,
    "lowbw": lowbw.AutoStrategy,
    **dict.fromkeys(LOCAL, lowbw.LocalSGDStrategy),
    "bfloat16": lowbw.HierarchicalStrategy,
    **dict.fromkeys(("float16", "int8", "int4", "powersgd"), lowbw.Strategy),
}
NAMES |= {f"{name}_hierarchical": cls for name, cls in NAMES.items()} | {"hierarchical": lowbw.HierarchicalStrategy}
OF_SHARDS = [f"{name}_fsdp" for name in ("dgc", "local_sgd", "diloco", "sparse_loco", "hierarchical", "int8", "int4")]
OF_GROUPS = [f"{name}_elastic" for name in ("local_sgd", "diloco", "sparse_loco")]
OF_SHARDED_GROUPS = [f"{name}_fsdp" for name in OF_GROUPS]
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
SEARCHES = {"": None, "_find_unused_parameters_true": True, "_find_unused_parameters_false": False}


def test_strategies_are_known_by_name() -> None:
    ours = [name for name, entry in StrategyRegistry.items() if entry["strategy"].__module__.startswith(PACKAGE)]
    named = map("".join, itertools.product(NAMES, START_METHODS, SEARCHES))
    assert sorted(ours) == sorted([*named, *OF_SHARDS, *OF_GROUPS, *OF_SHARDED_GROUPS])
    endings = ("_hierarchical", "_spawn", "_fork", "_notebook", "_true", "_false")
    assert lowbw.names() == sorted(name for name in ours if not name.endswith(endings))
    assert not [name for name in NAMES if "ddp" in name or name != name.lower()]  # Lightning has ways with "ddp"
    for name, start, search in itertools.product(NAMES, START_METHODS, SEARCHES):
        strategy = StrategyRegistry.get(name + start + search)
        assert type(strategy) is NAMES[name]
        assert (strategy.method.where.topology == "auto") == ("hierarchical" in name)
        assert strategy._start_method == START_METHODS[start]
        assert bool(strategy._ddp_kwargs.get("find_unused_parameters")) == bool(SEARCHES[search])
    assert {type(StrategyRegistry.get(name)) for name in OF_SHARDS} == {lowbw.ShardedStrategy}
    assert {type(StrategyRegistry.get(name)) for name in OF_GROUPS} == {lowbw.ElasticStrategy}
    assert {type(StrategyRegistry.get(name)) for name in OF_SHARDED_GROUPS} == {lowbw.ElasticShardedStrategy}


def test_registering_again_changes_nothing() -> None:
    before, cls = {name: dict(entry) for name, entry in StrategyRegistry.items()}, lowbw.DGCStrategy
    register()
    importlib.reload(lowbw.strategies)
    importlib.reload(lowbw)
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before
    assert lowbw.DGCStrategy is cls


# Who waits for a whole device or stream: the timers of `sparsity="auto"`, and gloo's thread, which reads from the host.
# And for one event: numbers that are read a step late. And for the copy of an anchor to the host, before it is shown.
SYNCHRONISING = {"strategies/auto_choice.py": 2, "strategies/communication_hook.py": 1, "kernels/tensors.py": 6}


def test_nothing_else_waits_for_a_device() -> None:
    found = {}
    for module in MODULES:
        calls = [each for each in ast.walk(parse(module)) if isinstance(each, ast.Call)]
        names = [each.func.attr for each in calls if isinstance(each.func, ast.Attribute)]
        if number := names.count("synchronize"):
            found[module.as_posix()] = number
    assert found == SYNCHRONISING
