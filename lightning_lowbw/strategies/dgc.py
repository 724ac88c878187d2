"""`Trainer(strategy="dgc")`: deep gradient compression as a Lightning strategy."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Unpack

from lightning_lowbw.comm.topology import TopologyChoice
from lightning_lowbw.presets import DGC, DGC_SPARSITY
from lightning_lowbw.schedules.every_step import AUTO
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS, StrategyKeywords, shows
from lightning_lowbw.strategies.strategy import Strategy


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
            line logs the choice and the reason. A resume keeps it. None is "auto"; if `rampup_begin_step` is given, it
            is 99.9 %.
        pretrained: with "auto", whether the weights are trained already: fine-tuning needs no warm-up. With
            ``fit(ckpt_path=...)`` and a checkpoint of another strategy this is assumed.
        min_numel: tensors with fewer elements are sent dense. None: the smallest, together 3 % of what is trained; but
            all below 1,024, and none from 16,384.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; rounding
            errors are sent later.
        topology: "flat", or two levels: "auto" (by the launcher and the host names), a number of ranks per node, the
            ranks of each node, or a `Topology`, which treats each node as one worker: N counts nodes.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.
            Without `broadcast_buffers`: as DDP in the dense phase; in the sparse phase only buffers are broadcast which
            the ranks change differently, and no running statistics of batch norm; validation, ends of epochs and the
            end of the fit have those of rank 0. True: all are broadcast in every forward pass. False: never.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> DGCStrategy()
        DGCStrategy(Method(when=EveryStep(sparsity='auto'), what=TopK(), ...))
        >>> strategy = DGCStrategy(rampup_begin_step=500, rampup_step=1500, sparsity=[0.984375, 0.996, 0.999])
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    @shows(STRATEGY_KEYWORDS)
    def __init__(
        self,
        *,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: Sequence[float] | str | None = None,
        pretrained: bool = False,
        min_numel: int | None = None,
        exclude: Sequence[str] = (),
        value_dtype: str = "bfloat16",
        topology: TopologyChoice = "flat",
        **kwargs: Unpack[StrategyKeywords],
    ) -> None:
        if sparsity is None:
            sparsity = AUTO if (rampup_begin_step, rampup_step) == (0, 1) else DGC_SPARSITY
        method = DGC(
            rampup_begin_step=rampup_begin_step,
            rampup_step=rampup_step,
            sparsity=sparsity,
            pretrained=pretrained,
            min_numel=min_numel,
            exclude=exclude,
            value_dtype=value_dtype,
            topology=topology,
        )
        super().__init__(method, **kwargs)
