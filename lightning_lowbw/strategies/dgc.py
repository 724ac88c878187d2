"""`Trainer(strategy="dgc")`: deep gradient compression as a Lightning strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.engine.gradients import DGC, DGCWorker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.base import LowBandwidthStrategy
from lightning_lowbw.what.corrections import FrozenVariance, as_correction
from lightning_lowbw.where.hierarchy import TopologyChoice


class DGCStrategy(LowBandwidthStrategy):
    """Send the 0.1 % largest elements of the gradient, and keep the rest for later steps.

    `torch.optim.SGD` gets all corrections of the paper (momentum, masking, local clipping, weight decay), `Adam` and
    `AdamW` one of their own; other optimizers train by error feedback, with a warning.
    `Trainer(gradient_clip_val=...)` clips each rank's own gradient at ``gradient_clip_val * sqrt(ranks)``, before the
    exchange. See `lightning_lowbw.engine.gradients` for the equations.

    Args:
        rampup_begin_step: optimizer steps before the first sparse one; until then this is DDP, to the bit.
        rampup_step: optimizer steps over which the stairs of `sparsity` are spread.
        sparsity: the fraction of elements kept back, one value per stair, each in [0, 1).
        momentum_masking: whether the velocity of sent elements is cleared; None: for SGD, and for Adam with a frozen
            variance.
        min_numel: tensors with fewer elements are sent dense.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        selection: "sampled" or "exact"; both send the k largest, the first finds them faster.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; what is
            rounded away is sent later.
        exchange: "auto", "all_gather", "reduce_scatter" or "dense": how the selected elements are summed, see
            `lightning_lowbw.DGC`.
        dense_dtype: "float32", or "bfloat16" or "float16": what the small tensors are sent in while the large ones are
            sparse; what is rounded away is sent later.
        overlap: whether sparse tensors are selected and sent during backward. Not with clipping, a GradScaler, manual
            optimization, `find_unused_parameters`, `static_graph` or two levels. What changes `.grad` after it is sent,
            such as a module's `on_after_backward`, comes too late for these tensors.
        correction: "auto", "frozen_variance" (Adam, AdamW) or "error_feedback" (any optimizer), or a `FrozenVariance`
            or a mapping of its arguments; see `lightning_lowbw.DGC`.
        topology: "flat", or two levels: "auto" (asks the launcher and the host names), a number of ranks per node, the
            ranks of each node, or a `Topology`. A node then compresses as a rank does: N counts nodes.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.
            `broadcast_buffers` left out: as DDP in the dense phase; in the sparse phase the running statistics of
            batch norm stay with each rank, and those of rank 0 are shown when somebody looks (validation, end of
            fit). True: all buffers in every forward pass. False: never.

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
        momentum_masking: bool | None = None,
        min_numel: int = 16384,
        exclude: Sequence[str] = (),
        selection: str = "sampled",
        value_dtype: str = "bfloat16",
        exchange: str = "auto",
        dense_dtype: str = "float32",
        overlap: bool = False,
        correction: str | FrozenVariance | Mapping[str, Any] = "auto",
        topology: TopologyChoice = "flat",
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
            exchange=exchange,
            dense_dtype=dense_dtype,
            overlap=overlap,
            correction=as_correction(correction),
        )
        super().__init__(method, topology=topology, algorithm="sharded", **kwargs)
        self._broadcast_buffers = kwargs.get("broadcast_buffers")
        self._other_buffers: list[Tensor] = []  # than the running statistics

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        if self.method.overlap and self.world_size > 1:
            self._check_overlap(self.lightning_module)
        with contextlib.suppress(MisconfigurationException):  # the number of steps cannot be known
            num_steps = self.lightning_module.trainer.estimated_stepping_batches
            begin = min((each.earliest_step for each in self.workers if isinstance(each, DGCWorker)), default=0)
            if self.world_size > 1 and self.method.schedule.density(int(min(num_steps, 2**62)) - 1, begin) == 1.0:
                rank_zero_warn(
                    f"This run has {num_steps} optimizer steps, and the first sparse one would come after {begin} or "
                    f"more (rampup_begin_step={self.method.rampup_begin_step}, correction={self.method.correction!r}): "
                    "nothing will be compressed. Let it begin earlier, or train longer."
                )

    def _check_overlap(self, module: LightningModule) -> None:
        """Refuse what needs whole gradients, or does not say during backward which step they are for."""
        obstacles = {
            "gradient clipping": self._clips(),
            "a GradScaler (precision='16-mixed')": self._scaler() is not None,
            "manual optimization": not module.automatic_optimization,
            # Buckets hold unused parameters, too.
            "find_unused_parameters=True": bool(self._ddp_kwargs.get("find_unused_parameters")),
            "static_graph=True": bool(self._ddp_kwargs.get("static_graph")),
        }
        found = [name for name, is_there in obstacles.items() if is_there]
        if found:
            raise ConfigurationError(
                f"overlap=True sends gradients during backward, which does not go together with {', '.join(found)}: "
                "leave out one of them."
            )

    # The velocities that a node keeps in parts -------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with whole velocities, so that the checkpoint goes on under any strategy.

        Collective: the ranks of a node; not while an exception unwinds, where they need not all be here.
        """
        state: dict[str, Any] = super().optimizer_state(optimizer)
        assert self.lightning_module is not None
        worker = self._workers.get(id(getattr(optimizer, "optimizer", optimizer)))
        if isinstance(worker, DGCWorker) and not self.lightning_module.trainer.interrupted:
            whole = worker.whole_momentum()
            parameters = (p for group in worker.optimizer.param_groups for p in group["params"])
            # New dictionaries: those of the state are the optimizer's own.
            state["state"] = dict(state["state"])
            for index, parameter in enumerate(parameters):
                if parameter in whole:
                    entry = state["state"].get(index, {})
                    state["state"][index] = {**entry, worker.velocity_key: whole[parameter]}
        return state

    # The running statistics of batch norm -----------------------------------------------------------------------

    @override
    def _choose_buffers(self, model: DistributedDataParallel) -> None:
        statistics = {id(buffer) for buffer in self._statistics().values()}
        self._other_buffers = [buffer for buffer in model.modules_buffers if id(buffer) not in statistics]
        super()._choose_buffers(model)

    @override
    def _buffers_to_broadcast(self, everything: list[Tensor]) -> list[Tensor]:
        """Return all buffers in the dense phase, and in the sparse phase all but the running statistics.

        Those of ResNet-50 are 213 KB per forward pass, more than its sparse gradients, and no training step reads them.
        """
        return self._other_buffers if self._owns_statistics() else everything

    def _statistics(self) -> dict[str, Tensor]:
        """Return the buffers of the layers that keep running statistics, by name."""
        assert self.lightning_module is not None
        return {
            f"{name}.{key}": buffer
            for name, layer in self.lightning_module.named_modules()
            if isinstance(layer, _NormBase)
            for key, buffer in layer.named_buffers(recurse=False)
        }

    def _owns_statistics(self) -> bool:
        """Whether each rank keeps its own running statistics in the coming step."""
        return self._broadcast_buffers is None and any(not worker.reduces_in_backward for worker in self.workers)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._owns_statistics():
            self._own_buffers = {name: buffer.clone() for name, buffer in self._statistics().items()}
            self._show_statistics_of_rank_zero()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        for name, buffer in self._statistics().items():
            if name in self._own_buffers:
                buffer.copy_(self._own_buffers[name])
        self._own_buffers = {}

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        for worker in self.workers:
            assert isinstance(worker, DGCWorker)
            for parameter, velocity in worker.whole_momentum().items():
                worker.optimizer.state[parameter][worker.velocity_key] = velocity
        if self._owns_statistics():
            self._show_statistics_of_rank_zero()

    def _show_statistics_of_rank_zero(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._statistics().values():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            self.ledger.record(flat.nbytes)
            for buffer, shown in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(shown.view(buffer.shape))
