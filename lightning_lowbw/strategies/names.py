"""The strategies that have a name of their own, and the names for `Trainer(strategy="...")`.

A Trainer accepts only a name there. So a name includes arguments, and each name has forms for two levels, for each way
of starting processes and for models with unused parameters, with the endings of Lightning's own names for DDP.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec

from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_lowbw.arguments import arguments_of, shows
from lightning_lowbw.cost_model import CANDIDATES
from lightning_lowbw.method import Method
from lightning_lowbw.presets import DGC, DGC_SPARSITY, PRESETS, AdaptiveLocalSGD, Hierarchical, LocalSGD, preset
from lightning_lowbw.schedules.every_step import AUTO
from lightning_lowbw.strategies.elastic import ElasticShardedStrategy, ElasticStrategy
from lightning_lowbw.strategies.fsdp import ShardedStrategy
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS
from lightning_lowbw.strategies.strategy import Strategy

Arguments = ParamSpec("Arguments")


def made_by(preset: Callable[Arguments, Method], knobs: str) -> Callable[Concatenate[Any, Arguments], None]:
    """Return a constructor that takes knobs of a preset, which makes the method.

    Names, types and defaults are the preset's. The signature that `help` and LightningCLI read has these knobs and the
    keywords of all strategies; a static checker sees the arguments of the preset.

    Args:
        preset: the preset, such as `DGC`.
        knobs: the names of the knobs, separated by spaces; positional ones first.
    """
    names, known = knobs.split(), arguments_of(preset)

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in names if name in kwargs}
        Strategy.__init__(self, preset(*args, **given), **kwargs)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown = [this, *(known[name] for name in names), *STRATEGY_KEYWORDS.values()]
    __init__.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return __init__


@shows(arguments_of(DGC))
def _dgc(*, sparsity: Sequence[float] | str | None = None, **knobs: Any) -> Method:
    """Return the method of a `DGCStrategy`, which knows the length of the run: "auto" is the default."""
    if sparsity is None:
        # By value, not by presence: LightningCLI passes all defaults.
        has_phases = (knobs.get("rampup_begin_step", 0), knobs.get("rampup_step", 1)) != (0, 1)
        sparsity = DGC_SPARSITY if has_phases else AUTO
    return DGC(sparsity=sparsity, **knobs)


class DGCStrategy(Strategy):
    """Send the largest elements of the gradient, and keep the rest for later steps.

    `torch.optim.SGD` gets all corrections of the paper (momentum, masking, local clipping), and weight decay without
    delay; `Adam` and `AdamW` get a correction of their own (with a beta1 of at most 0.7 in sparse steps); other
    optimizers use error feedback, with a warning. Other knobs are fields of the method, as in
    `Strategy(DGC(momentum_masking=True))`.
    `Trainer(gradient_clip_val=...)` clips each rank's own gradient at ``gradient_clip_val * sqrt(ranks)``, before the
    exchange. See `lightning_lowbw.sync.gradient` for the equations.

    Args:
        rampup_begin_step: optimizer steps before the first sparse one; until then this is DDP, bit for bit.
        rampup_step: optimizer steps over which the stairs of `sparsity` are spread.
        sparsity: the fraction of elements kept back, one value per stair, each in [0, 1). "auto" takes a few dense
            steps, measures them and the link, and chooses the density: as high as possible with an exchange of at most
            5 % of a step, and high enough for the length of the run, after a warm-up. All steps are dense if dense
            steps are within that, and in a run of fewer than 125 steps (with Adam 242) or of an unknown number. One
            line logs the choice and the reason. A resume keeps it, unless all steps are dense. None is "auto"; if
            `rampup_begin_step` is given, it is 99.9 %.
        pretrained: with "auto", whether the weights are trained already: fine-tuning needs no warm-up.
        min_numel: tensors with fewer elements are sent dense. None: the smallest tensors, together 3 % of the trained
            elements; but all tensors below 1,024 elements, and none from 16,384.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; rounding
            errors are sent later.
        topology: "flat", or two levels: "auto" (by the launcher and the host names), a number of ranks per node, the
            ranks of each node, or a `Topology`, which treats each node as one worker: N counts nodes.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.
            Without `broadcast_buffers`: as DDP in the dense phase; in the sparse phase rank 0 sends only buffers that
            differed between ranks after its first two steps, and no running statistics of batch norm; validation, ends
            of epochs and the end of the fit have the buffers of rank 0. True: all are broadcast in every forward pass.
            False: never.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> DGCStrategy()
        DGCStrategy(Method(when=EveryStep(sparsity='auto'), what=TopK(), ...))
        >>> strategy = DGCStrategy(rampup_begin_step=500, rampup_step=1500, sparsity=[0.984375, 0.996, 0.999])
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    _reports = True

    __init__ = made_by(_dgc, "rampup_begin_step rampup_step sparsity pretrained min_numel exclude value_dtype topology")


class LocalSGDStrategy(Strategy):
    """Step on this rank's own gradient; average parameters and buffers after every k-th step.

    Validation and checkpoints use the last average; this does not change the training. The fit ends with one average of
    the steps since then. A ``.ckpt`` holds the last average, the weights of each rank are beside it. Metrics that a
    `ModelCheckpoint`, an `EarlyStopping` or a `ReduceLROnPlateau` monitors are averaged over ranks after validation and
    at the end of an epoch; in between each rank has its own. Gradient clipping and AMP act on each rank alone.
    SIGTERM on any rank ends all ranks at the next average, in synchronous steps after that step or the next. Other
    knobs are fields of the method: `Strategy(LocalSGD(outer_lr=...))`.

    Args:
        k_steps: local steps between two averages. 1 is DDP.
        begin_step: synchronous steps (as DDP) before the first local one: a number of steps, or a fraction of the
            run (float between 0 and 1).
        outer: "none", "slowmo" or "nesterov" (DiLoCo): the optimizer that is applied to the mean.
        delay_steps: local steps that hide an average: it is applied that many steps after it was begun, and the steps
            in between are kept.
        num_fragments: the number of parts in which parameters are averaged, at different steps (streaming): the peak of
            the traffic is divided by it. "auto": 4, or as many as there are tensors.
        compression: None; "bfloat16", "float16", "int8" or "int4": the change by local steps is sent in few bits; or a
            `Compression` (or a mapping of its arguments): only its largest elements are sent, in few bits (SparseLoCo).
            With error feedback.
        topology: "flat", or two levels: "auto" (by the launcher and the host names), a number of ranks per node, the
            ranks of each node, or a `Topology`. The ranks of a node then step together, on the mean of their gradients,
            and nodes are averaged after every k-th step.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Source: as `lightning_lowbw.sync.local`.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> strategy = LocalSGDStrategy(k_steps=8, begin_step=0.5)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    __init__ = made_by(LocalSGD, "k_steps begin_step outer delay_steps num_fragments compression topology")


class AdaptiveLocalSGDStrategy(Strategy):
    """Local SGD whose period k follows the learning rate and the training loss.

    The loss is the mean over ranks and over the steps since the last average, and is sent with the average itself.

    Args:
        init_k_steps: the first k.
        max_k_steps: the largest k.
        begin_step: as in `LocalSGDStrategy`.
        rule: "fleet", "adacomm" or "qsr", as in `lightning_lowbw.schedules.every_k.EveryK`.
        qsr_alpha: for "qsr": k is the square of this over the learning rate.
        outer, delay_steps, compression, topology, resume: as in `LocalSGDStrategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Examples:
        >>> AdaptiveLocalSGDStrategy(init_k_steps=2, rule="adacomm").method.when.k_steps
        2
    """

    __init__ = made_by(
        AdaptiveLocalSGD, "init_k_steps max_k_steps begin_step rule qsr_alpha outer delay_steps compression topology"
    )


class HierarchicalStrategy(Strategy):
    """DDP whose all-reduce has two levels, overlapped with the backward pass; each node sends its gradient once.

    Every step, dense: the result is DDP's within the rounding of a sum in another order. The other strategies do the
    same in their dense steps if they are given a `topology`.

    Args:
        topology: "auto" (by the launcher and the host names), a number of ranks per node, the ranks of each node, or
            a `Topology`.
        algorithm: "sharded" (reduce-scatter, all-reduce of the shards, all-gather), "leader" (reduce, all-reduce
            among the first ranks, broadcast) or "flat" (one all-reduce over all ranks, as DDP's); the last two also
            work with nodes of different sizes. None: "sharded", and "leader" on nodes of different sizes.
        inter_dtype: "float32", or "bfloat16" for the messages between nodes; when flat, between all ranks.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range; at the start of the fit, on all ranks: the topology does not fit
            the world. With one node, or one rank on each, a warning says that this trains as DDP.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> strategy = HierarchicalStrategy(topology=2)
        >>> strategy
        HierarchicalStrategy(Method(where=Where(topology=2)))
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False, barebones=True)
    """

    __init__ = made_by(Hierarchical, "topology algorithm inter_dtype")


class AutoStrategy(Strategy):
    """Take a few dense steps, measure them and the link, and continue with the fastest method, or one nearly as fast.

    The choice is among DDP, DDP in bfloat16, int8 gradients, and deep gradient compression, for optimizers with which
    its accuracy has been measured; see `lightning_lowbw.cost_model`. One line logs the choice, the reason, and the code
    that selects it. All ranks make the same choice, once; a resume keeps it, unless it is DDP.

    Args:
        budget: the fraction by which a step may exceed the shortest, if the method changes the gradients less. Also the
            fraction of a step that the exchange of deep gradient compression may take.
        pretrained: whether the weights are trained already, as in `DGCStrategy`.
        topology: "flat", or two levels, as in `DGCStrategy`.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> strategy = AutoStrategy()
        >>> strategy
        AutoStrategy(Method(when=EveryStep(sparsity='auto'), what=TopK(), ...))
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    _candidates, _reports = tuple(CANDIDATES), True

    __init__ = made_by(partial(DGC, sparsity=AUTO), "budget pretrained topology")


STRATEGIES: dict[Any, type[Strategy]] = {
    DGC: DGCStrategy,
    LocalSGD: LocalSGDStrategy,
    AdaptiveLocalSGD: AdaptiveLocalSGDStrategy,
    Hierarchical: HierarchicalStrategy,
}
# A name stands for the general strategy with a method if no class has all of its knobs.
NAMES: dict[str, tuple[type[Strategy], Mapping[str, Any]]] = {
    name: (STRATEGIES[method.func], method.keywords)
    if method.func in STRATEGIES and method.keywords.keys() <= arguments_of(STRATEGIES[method.func]).keys()
    else (Strategy, {"method": method()})
    for name, method in PRESETS.items()
}
NAMES["lowbw"] = (AutoStrategy, {})  # becomes a method that communicates in every step
# Sharded inside each node; processes are started by a launcher, or as with popen. `sparsity="auto"` cannot measure
# shards: 1 % of the elements, once 100 dense steps have settled Adam's variance.
OF_SHARDS = {
    **{name: preset(name) for name in ("local_sgd", "diloco", "sparse_loco", "hierarchical", "int8", "int4")},
    "dgc": DGC(sparsity=[0.99], rampup_begin_step=100),
}
# Groups that come and go, each a Lightning run: `diloco_elastic` and so on.
OF_GROUPS = {name: preset(name).replace(begin_step=0) for name in ("local_sgd", "diloco", "sparse_loco")}
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
SEARCHES: dict[str, dict[str, Any]] = {"": {}}
SEARCHES |= {
    f"_find_unused_parameters_{searches}".lower(): {"find_unused_parameters": searches} for searches in (True, False)
}


def register(registry: _StrategyRegistry = StrategyRegistry) -> None:
    """Register the strategies with Lightning by name. May be called any number of times."""
    entries: dict[str, tuple[type, dict[str, Any]]] = {}  # by name: the class, its arguments
    for base, (strategy, arguments) in NAMES.items():
        levels = {"": {}, **({} if base == "hierarchical" else {"_hierarchical": {"topology": "auto"}})}
        for level, start, search in itertools.product(levels, START_METHODS, SEARCHES):
            options = {**arguments, **levels[level], **SEARCHES[search], "start_method": START_METHODS[start]}
            entries[base + level + start + search] = strategy, options
    entries |= {f"{base}_fsdp": (ShardedStrategy, {"method": method}) for base, method in OF_SHARDS.items()}
    for base, method in OF_GROUPS.items():
        entries[f"{base}_elastic"] = ElasticStrategy, {"method": method}
        entries[f"{base}_elastic_fsdp"] = ElasticShardedStrategy, {"method": method}
    for name, (strategy, options) in entries.items():
        if name not in registry.available_strategies():
            registry.register(name, strategy, description=f"{strategy.__name__} with {options}", **options)
