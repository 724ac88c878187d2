"""`Trainer(strategy="dgc")`: deep gradient compression as a Lightning strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_lowbw.methods.dgc import DGC
from lightning_lowbw.strategies.base import LowBandwidthStrategy


class DGCStrategy(LowBandwidthStrategy):
    """Send the 0.1 % largest elements of the gradient, and keep the rest for later steps.

    `torch.optim.SGD` gets all corrections of the paper (momentum, masking, local clipping, weight decay); other
    optimizers train by error feedback, with a warning. `Trainer(gradient_clip_val=...)` clips each rank's own gradient
    at ``gradient_clip_val * sqrt(ranks)``, before the exchange. See `lightning_lowbw.methods.dgc` for the equations.

    Args:
        rampup_begin_step: optimizer steps before the first sparse one; until then this is DDP, to the bit.
        rampup_step: optimizer steps over which the stairs of `sparsity` are spread.
        sparsity: the fraction of elements kept back, one value per stair, each in [0, 1).
        momentum_masking: whether the velocity of sent elements is cleared.
        min_numel: tensors with fewer elements are sent dense.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        selection: "sampled" or "exact"; both send the k largest, the first finds them faster.
        value_dtype: "float32", "bfloat16" or "float16", for the values on the wire.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = DGCStrategy(rampup_begin_step=500, rampup_step=1500, sparsity=[0.984375, 0.996, 0.999])
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    strategy_name = "dgc"
    method: DGC

    def __init__(
        self,
        *,
        rampup_begin_step: int = 0,
        rampup_step: int = 1,
        sparsity: Sequence[float] = (0.999,),
        momentum_masking: bool = True,
        min_numel: int = 16384,
        exclude: Sequence[str] = (),
        selection: str = "sampled",
        value_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        method = DGC(
            rampup_begin_step=rampup_begin_step,
            rampup_step=rampup_step,
            sparsity=sparsity,
            momentum_masking=momentum_masking,
            min_numel=min_numel,
            exclude=exclude,
            selection=selection,
            value_dtype=value_dtype,
        )
        super().__init__(method, **kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        with contextlib.suppress(MisconfigurationException):  # the number of steps cannot be known
            num_steps = self.lightning_module.trainer.estimated_stepping_batches
            if self.world_size > 1 and self.method.schedule.is_dense(int(min(num_steps, 2**62)) - 1):
                rank_zero_warn(
                    f"This run has {num_steps} optimizer steps, and the first sparse one would come after "
                    f"rampup_begin_step={self.method.rampup_begin_step}: nothing will be compressed. Let it begin "
                    "earlier, or train longer."
                )
