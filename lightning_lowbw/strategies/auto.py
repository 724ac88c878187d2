"""`Trainer(strategy="lowbw")`: the method is chosen after a few steps, by predicted times."""

from __future__ import annotations

from typing_extensions import Unpack, override

from lightning_lowbw.arguments import check_flag
from lightning_lowbw.comm.topology import TopologyChoice
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.plan import CANDIDATES
from lightning_lowbw.presets import DGC
from lightning_lowbw.strategies.auto_choice import AutoChoice
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS, StrategyKeywords, asked_of_buffers, shows
from lightning_lowbw.strategies.strategy import Strategy


class AutoStrategy(Strategy):
    """Take a few dense steps, measure them and the link, and continue with the fastest method, or one nearly as fast.

    The choice is among DDP, float16 and int8 gradients, and deep gradient compression, for optimizers with which its
    accuracy has been measured; see `lightning_lowbw.plan`. One line logs the choice, the reason, and the
    code that selects it. All ranks make the same choice, once; a resume keeps it.

    Args:
        allow_local: whether local SGD may be chosen, which costs accuracy (docs/methods/local_sgd.md), and hides the
            latency of the link.
        budget: the fraction by which a step may exceed the shortest, if the method changes the gradients less. Also the
            fraction of a step that the exchange of deep gradient compression may take.
        pretrained: whether the weights are trained already, as in `DGCStrategy`.
        topology: "flat", or two levels, as in `DGCStrategy`.
        resume: "exact", or "weights and optimizer" where the folder beside the ``.ckpt`` is lost or does not fit; see
            `Strategy`.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = AutoStrategy(allow_local=True)
        >>> strategy
        AutoStrategy(Method(when=EveryStep(sparsity='auto'), what=TopK(), ...), allow_local=True)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    @shows(STRATEGY_KEYWORDS)
    def __init__(
        self,
        *,
        allow_local: bool = False,
        budget: float = 0.05,
        pretrained: bool = False,
        topology: TopologyChoice = "flat",
        **kwargs: Unpack[StrategyKeywords],
    ) -> None:
        check_flag("allow_local", allow_local)
        if allow_local and asked_of_buffers(kwargs):
            raise ConfigurationError(
                "allow_local=True with broadcast_buffers=True (or forward_sync_buffers=True): local SGD averages "
                "buffers with the parameters, and sends nothing in a forward pass. Leave one of them out."
            )
        self._allow_local = allow_local
        super().__init__(DGC(sparsity="auto", budget=budget, pretrained=pretrained, topology=topology), **kwargs)
        self._options["allow_local"] = allow_local

    @override
    def _make_parts(self) -> None:
        super()._make_parts()
        self.auto = AutoChoice([name for name in CANDIDATES if name != "local_sgd" or self._allow_local])
