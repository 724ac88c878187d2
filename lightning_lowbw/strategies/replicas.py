"""Methods that average weights periodically: between two averages each rank trains alone, and sends nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.advice import num_steps_of_fit, warn_if_too_short
from lightning_lowbw.strategies.callback_agreement import agree_on_averages_, agree_on_weights_, weights_of
from lightning_lowbw.strategies.keywords import asked_of_buffers
from lightning_lowbw.strategies.progress import is_over
from lightning_lowbw.strategies.quiet import Quiet
from lightning_lowbw.strategies.uneven import Policy, Uneven
from lightning_lowbw.strategies.viewing import Viewing
from lightning_lowbw.when.every_k import EveryK
from lightning_lowbw.where.agreement import gather
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class Replicas(Viewing):
    """Connects the consensus view, the absence of communication between averages, and uneven data to the hooks of a
    fit.

    Args:
        strategy: the strategy.
        uneven: as in `Strategy`.

    Attributes:
        quiet: keeps the steps between averages free of communication.
        uneven: ends the epochs of ranks with different or unknown numbers of batches.

    Raises:
        ConfigurationError: a value is out of range, or does not go together with averages.
    """

    def __init__(self, strategy: Strategy, uneven: Policy) -> None:
        super().__init__(strategy)
        when = strategy.method.when
        assert isinstance(when, EveryK)
        if asked_of_buffers(strategy._ddp_kwargs):
            raise ConfigurationError(
                "broadcast_buffers=True (or forward_sync_buffers=True) sends the buffers of rank 0 in every forward "
                "pass; local SGD averages them with the parameters. Leave it out."
            )
        self.quiet = Quiet(strategy)
        self.uneven = Uneven(strategy, uneven)
        self._losses: list[Tensor] = []  # for the next optimizer that steps
        self._is_observed = False  # by an optimizer; others may step, too, until the next backward

    @property
    @override
    def all_are_here(self) -> bool:
        return self.uneven.all_are_here or self.uneven.has_ended

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def check(self, trainer: pl.Trainer) -> None:
        if self.strategy._layer_sync is not None:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True) communicates in every forward pass, and local SGD must send nothing "
                "between averages, which include batch norm's statistics. Leave it out."
            )
        if getattr(trainer, "_val_check_time_interval", None) is not None:  # since Lightning 2.6
            raise ConfigurationError(
                "Trainer(val_check_interval=...) is a time, and each rank has a clock of its own: between averages one "
                "would validate while others train on. Give a number of batches."
            )

    @override
    def begin_fit(self) -> None:
        super().begin_fit()
        self._losses.clear()
        self._is_observed = False
        self.uneven.begin_fit()

    @override
    def buffers_of(self, optimizer: Optimizer) -> dict[str, Tensor]:
        module = self.strategy.lightning_module
        assert module is not None
        return buffers_by_optimizer(module, self.strategy.optimizers)[id(optimizer)]

    @override
    def begin_training(self, trainer: pl.Trainer) -> None:
        resolve_begin(self.strategy, trainer)
        super().begin_training(trainer)
        if self.strategy.world_size == 1:
            return
        self.quiet.restore()
        assert isinstance(self.strategy.method.when, EveryK)
        if not self.is_search(trainer):
            warn_if_too_short(self.strategy.method.when, trainer, self.strategy.workers)
        self.uneven.begin_training(trainer)
        self.quiet.defer(trainer)
        for worker in self.strategy.replicas:
            worker.begin_local()
        self.quiet.choose_backward_sync()
        model = self.strategy.model
        assert isinstance(model, DistributedDataParallel)
        if model.static_graph and not model.require_backward_grad_sync:
            raise ConfigurationError(
                "static_graph=True, and the first step is local: DDP learns the graph in a first step that it reduces. "
                "Leave it out, or begin with a synchronous step (begin_step=1; a resume in the local phase has none)."
            )

    @override
    def tear_down(self) -> None:
        self.quiet.restore()
        if self.view.is_shown and not self.strategy.is_interrupted:  # a resume with no batch left to train
            self.keep_consensus()
        super().tear_down()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def begin_batch(self, batch: Any) -> None:
        self.view.hide()  # the last consensus view may not have ended
        if self.strategy.world_size > 1:
            self.uneven.count(batch)
            self.uneven.begin_batch(self.strategy.trainer)
            self.quiet.begin_batch()

    @override
    def buffers_to_broadcast(self, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        is_synchronous = any(worker.reduces_in_backward for worker in self.strategy.replicas)
        return list(buffers.values()) if is_synchronous else []

    @override
    def begin_backward(self, loss: Tensor) -> None:
        if self._is_observed:
            self._losses.clear()
        self._is_observed = False
        self._losses.append(loss.detach())

    @override
    def end_step(self, worker: Worker) -> None:
        assert isinstance(worker, ReplicaWorker)
        if self.strategy.world_size > 1:
            self.quiet.end_step(worker.has_met)
            if worker.has_met:
                self.strategy.signals.read_requests(worker)

    @override
    def end_backward(self, worker: Worker) -> None:
        assert isinstance(worker, ReplicaWorker)
        for loss in self._losses:
            worker.observe_loss(loss)
        self._is_observed = True

    @override
    def end_batch(self, trainer: pl.Trainer) -> None:
        """Wait for ranks with more batches, and save if it was requested and all ranks are there."""
        self.uneven.end_batch(trainer)
        if not self.uneven.all_are_here:
            self.quiet.forbid()
        if self.all_are_here:
            super().end_batch(trainer)

    # The consensus view -----------------------------------------------------------------------------------------

    @override
    def show(self) -> None:
        module = self.strategy.lightning_module
        if module is None or module._trainer is None or self.view.is_shown:
            return
        trainer = module.trainer
        is_interrupted = self.strategy.is_interrupted or self.is_fit_over  # after an exception replicas differ
        if not is_interrupted:
            self.uneven.check_view(trainer)
            if trainer.state.fn == TrainerFn.FITTING and self.strategy.world_size > 1:
                agree_on_averages_(trainer, self.strategy.ledger, self.strategy.root_device)
        self.view.show(self.strategy.replicas, module, is_interrupted=is_interrupted)

    @override
    def state_dict(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        module = self.strategy.lightning_module
        trainer = None if module is None else module._trainer
        if self.strategy.replicas and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.show()
        return self.view.copied(take())

    @override
    def begin_epoch(self, trainer: pl.Trainer) -> None:
        self.uneven.begin_epoch(trainer)

    @override
    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Agree on monitored metrics; the epoch may have ended without a last batch."""
        self.uneven.finish_epoch(is_over(trainer))
        super().end_epoch(trainer)

    @override
    def leave_consensus(self) -> None:
        self.uneven.finish_epoch(is_over=True)  # a callback may have stopped the training in mid-epoch
        super().leave_consensus()

    @override
    def end_training(self) -> None:
        module = self.strategy.lightning_module
        assert module is not None
        everyone = Peers(None, self.strategy.ledger)
        agree_on_weights_(weights_of(module), everyone, self.strategy.root_device)


def resolve_begin(strategy: Strategy, trainer: pl.Trainer) -> None:
    """Turn a `begin_step` that is a fraction of the run into a number of steps; for each run anew.

    Collective: all ranks.

    Raises:
        ConfigurationError: on all ranks; the length of the run is not known.
    """
    when = strategy.method.when
    assert isinstance(when, EveryK)
    fraction, step = strategy._resolved_begin or (None, None)  # of the last fit, or of a tuner's search
    begin = fraction if step is not None and step == when.begin_step else when.begin_step
    if not isinstance(begin, float):
        return
    lengths = gather(num_steps_of_fit(trainer, strategy.workers), "number of steps")
    num_steps = max(lengths)
    if not all(map(math.isfinite, lengths)):
        raise ConfigurationError(
            f"begin_step={begin} of a run whose number of steps is not known: give a number of steps."
        )
    step = round(begin * num_steps)
    strategy.reconfigure(strategy.method.replace(begin_step=step))
    strategy._resolved_begin = begin, step
    rank_zero_info(f"{type(strategy).__name__}: synchronous up to step {step} of {num_steps:.0f}.")


def buffers_by_optimizer(module: torch.nn.Module, optimizers: list[Optimizer]) -> dict[int, dict[str, Tensor]]:
    """Return, by id of the optimizer, the buffers of layers whose parameters it trains; all others with the first."""
    owner = {p: id(optimizer) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    shares: dict[int, dict[str, Tensor]] = {id(optimizer): {} for optimizer in optimizers}
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        owners = [owner[p] for p in layer.parameters(recurse=False) if p in owner]
        for name, buffer in layer.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                share = shares[owners[0] if owners else id(optimizers[0])]
                share[f"{prefix}.{name}" if prefix else name] = buffer
    return shares
