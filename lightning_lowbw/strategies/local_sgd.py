"""`Trainer(strategy="local_sgd")` and similar names: ranks train alone, and average their weights periodically."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from typing_extensions import Unpack

from lightning_lowbw.comm.topology import TopologyChoice
from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.presets import AdaptiveLocalSGD, LocalSGD
from lightning_lowbw.schedules.every_k import OuterName, Rule
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS, StrategyKeywords, shows
from lightning_lowbw.strategies.strategy import Strategy
from lightning_lowbw.strategies.uneven import Policy

# Of the method, beside what `AdaptiveLocalSGDStrategy` names itself.
OTHER_KNOBS = {"outer", "delay_steps", "compression", "topology"}


class LocalSGDStrategy(Strategy):
    """Step on this rank's own gradient; average parameters and buffers after every k-th step.

    Validation, checkpoints and the end of the fit use the consensus, the mean of the replicas; this does not change the
    training. A ``.ckpt`` holds the consensus, the weights of each rank are beside it. Metrics that a
    `ModelCheckpoint`, an `EarlyStopping` or a `ReduceLROnPlateau` monitors are averaged over ranks after validation and
    at the end of an epoch; in between each rank has its own. Gradient clipping and AMP act on each rank alone.
    SIGTERM on any rank ends all of them at the next average, in synchronous steps after that step or the next. Other
    knobs are fields of the method: `Strategy(LocalSGD(outer_lr=...))`.

    Args:
        k_steps: local steps between two averages. 1 is DDP.
        begin_step: synchronous steps (as DDP) before the first local one: a number of steps, a fraction of the run
            (float between 0 and 1), or "first_lr_decay".
        outer: "none", "slowmo" or "nesterov" (DiLoCo): the optimizer that is applied to the mean.
        delay_steps: local steps that hide an average: it is applied that many steps after it was begun, and the steps
            in between are kept. "auto" measures how many steps an average takes.
        num_fragments: the number of parts in which parameters are averaged, at different steps (streaming): the peak of
            the traffic is divided by it. "auto": 4, or as many as there are tensors.
        compression: None; "bfloat16", "float16", "int8" or "int4": the change by local steps is sent in few bits; or a
            `Compression` (or a mapping of its arguments): only its largest elements are sent, in few bits (SparseLoCo).
            With error feedback.
        uneven: for ranks with more batches than others in an epoch: "finish" them, or "stop" at the next
            average. Replicas are weighted by samples once a rank has ended.
        topology: "flat", or two levels: "auto" (by the launcher and the host names), a number of ranks per node, the
            ranks of each node, or a `Topology`. The ranks of a node then step together, on the mean of their gradients,
            and nodes are averaged after every k-th step.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Source: as `lightning_lowbw.sync.local`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = LocalSGDStrategy(k_steps=8, begin_step="first_lr_decay")
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    @shows(STRATEGY_KEYWORDS)
    def __init__(
        self,
        k_steps: int = 8,
        begin_step: int | float | str = 1,
        *,
        outer: OuterName = "none",
        delay_steps: int = 0,
        num_fragments: int | str = 1,
        compression: Mapping[str, Any] | TopK | str | None = None,
        uneven: Policy = "finish",
        topology: TopologyChoice = "flat",
        **kwargs: Unpack[StrategyKeywords],
    ) -> None:
        method = LocalSGD(
            k_steps=k_steps,
            begin_step=begin_step,
            outer=outer,
            delay_steps=delay_steps,
            num_fragments=num_fragments,
            compression=compression,
            topology=topology,
        )
        super().__init__(method, uneven=uneven, **kwargs)


class AdaptiveLocalSGDStrategy(Strategy):
    """Local SGD whose period k follows the learning rate and the training loss.

    The loss is the mean over ranks and over the steps since the last average, and is sent with the average itself.

    Args:
        init_k_steps: the first k.
        max_k_steps: the largest k.
        begin_step: as in `LocalSGDStrategy`.
        rule: "fleet", "adacomm" or "qsr", as in `lightning_lowbw.schedules.every_k.EveryK`.
        qsr_alpha: for "qsr": k is the square of this over the learning rate.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: all other arguments of `LocalSGDStrategy`, except `k_steps` and `num_fragments`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Example:
        >>> AdaptiveLocalSGDStrategy(init_k_steps=2, rule="adacomm").method.when.k_steps
        2
    """

    @shows(inspect.signature(LocalSGDStrategy).parameters, but=("k_steps", "num_fragments"))
    def __init__(
        self,
        init_k_steps: int = 1,
        max_k_steps: int = 16,
        begin_step: int | float | str = 1,
        *,
        rule: Rule = "fleet",
        qsr_alpha: float = 0.01,
        **kwargs: Any,
    ) -> None:
        of_method = {name: kwargs.pop(name) for name in OTHER_KNOBS if name in kwargs}
        method = AdaptiveLocalSGD(
            init_k_steps,
            max_k_steps,
            begin_step,
            rule=rule,
            qsr_alpha=qsr_alpha,
            **of_method,
        )
        super().__init__(method, **kwargs)
