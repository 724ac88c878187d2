"""What callbacks put into the weights, keep of them and monitor: made equal on all ranks, where replicas differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor

from lightning_lowbw.comm.agreement import differ
from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.comm.mean import mean_over
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.kernels.reference import as_real
from lightning_lowbw.strategies.advice import callbacks_of

# Callbacks that keep an average of the weights over steps, in `_average_model`.
AVERAGING: tuple[type[pl.Callback], ...] = (
    StochasticWeightAveraging,
    *([pl.callbacks.WeightAveraging] if hasattr(pl.callbacks, "WeightAveraging") else []),  # not before Lightning 2.6
)


def averaging_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the trainer's `AVERAGING` callbacks, of either package of Lightning."""
    return callbacks_of(trainer, *AVERAGING)


def weights_of(module: torch.nn.Module) -> list[Tensor]:
    """Return the tensors of a module that are averaged: parameters and floating buffers."""
    buffers = [b for b in module.buffers() if b.is_floating_point() or b.is_complex()]
    return [*(p.detach() for p in module.parameters()), *buffers]


def agree_on_weights_(tensors: Sequence[Tensor], peers: Peers, device: torch.device) -> None:
    """Average weights that differ after the last average: a callback (weight averaging) may have put in its own.

    In place:
        The tensors that differ.

    Collective: all peers, blocking; two numbers, and where these differ two for each tensor, and those that differ.

    Args:
        tensors: of the same shapes on all peers.
        peers: among which the weights should be equal.
        device: of the messages.
    """
    if peers.num_ranks == 1 or not tensors or not any(differ([tensors], peers.group, device)):
        return
    are_unequal = differ([[tensor] for tensor in tensors], peers.group, device)
    unequal = [tensor for tensor, is_unequal in zip(tensors, are_unequal, strict=True) if is_unequal]
    there = [tensor.to(device) for tensor in unequal]  # a callback may keep its average on the CPU
    for tensor, value in zip(unequal, mean_over(there, peers, device), strict=True):
        as_real(tensor).copy_(value)


def agree_on_averages_(trainer: pl.Trainer, ledger: TrafficLedger, device: torch.device) -> None:
    """Average over ranks what callbacks have averaged over steps: it is validated and saved as that of all ranks.

    An average over steps is linear in the weights, so it equals that of the replicas' mean. Where all steps were
    synchronous, the averages differ in their buffers alone, if at all: they stay as they are with DDP.

    In place:
        The averages of `AVERAGING` callbacks.

    Collective: all ranks, blocking; for each callback two numbers, and if they differ as `agree_on_weights_`.
    """
    peers = Peers(None, ledger)
    for callback in averaging_callbacks(trainer):
        average = getattr(callback, "_average_model", None)
        if average is None or peers.num_ranks == 1:
            continue
        if any(differ([[parameter.detach() for parameter in average.parameters()]], peers.group, device)):
            agree_on_weights_(weights_of(average), peers, device)


def agree_on_monitored(trainer: pl.Trainer, device: torch.device) -> None:
    """Replace the metrics that callbacks and schedulers monitor by their mean over ranks: all ranks then decide alike.

    Collective: all ranks, blocking.
    """
    names = _monitored(trainer)
    if not names:
        return
    metrics = trainer.callback_metrics
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for index, name in enumerate(names):
        if name in metrics:
            sums[index] = torch.tensor([float(metrics[name]), 1.0], dtype=torch.float32)
    sums = sums.to(device)
    dist.all_reduce(sums)
    results = trainer._results
    for name, (total, count) in zip(names, sums.tolist(), strict=True):
        if not count:
            continue
        mean = torch.tensor(total / count, device=device)
        for _, metric in () if results is None else results.valid_items():
            assert results is not None
            if name in results._forked_name(metric, on_step=False) and metric._computed is not None:
                metric._computed = mean.to(metric._computed.dtype) if isinstance(metric._computed, Tensor) else mean
        trainer._logger_connector._callback_metrics[name] = mean.to(torch.float32)


def _monitored(trainer: pl.Trainer) -> list[str]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    names = {getattr(each, "monitor", None) for each in callbacks if isinstance(each, (Checkpoint, EarlyStopping))}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    return sorted(str(name) for name in names if name)


class Timers:
    """Lets callbacks that broadcast the time of rank 0 after every batch do so only where the ranks communicate anyway.

    Attributes:
        may_run: whether they are called after this batch.
    """

    def __init__(self) -> None:
        self.may_run = True
        self._deferred: list[Callback] = []

    def defer(self, trainer: pl.Trainer) -> None:
        """Replace their hooks until `restore`."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for callback in callbacks:
            saves_by_time = isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None
            if isinstance(callback, Timer) or saves_by_time:
                hook = functools.partial(self._run, callback.on_train_batch_end)
                callback.on_train_batch_end = hook  # type: ignore[method-assign]
                self._deferred.append(callback)

    def restore(self) -> None:
        """Give them their own hooks back; a tuner in a callback starts the training twice."""
        while self._deferred:
            vars(self._deferred.pop()).pop("on_train_batch_end", None)

    def _run(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.may_run:
            hook(*args, **kwargs)
