"""Agreement between ranks outside of the exchange, and the first callback, which triggers it.

The metrics that callbacks monitor are made equal. The states of the optimizers are compared when a fit begins, the
weights when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_lowbw.comm.agreement import agree, digest
from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.strategies.checks import callbacks_of
from lightning_lowbw.sync.buffers import IGNORED
from lightning_lowbw.sync.checks import agree_on_end, plain_values
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.synchronizer import Synchronizer


def _strategy_of(trainer: pl.Trainer) -> Any:
    return trainer.strategy


class FirstCallback(Callback):
    """The first callback of the list, so that the other callbacks see the anchor, and metrics that agree."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).begin_epoch()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).end_batch()

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).begin_evaluation()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            _strategy_of(trainer).agree_on_metrics()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).end_epoch()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).finish()

    on_test_start = on_validation_start  # type: ignore[assignment]  # has no names of arguments


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
    all_reduce_(sums)
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
    names = {getattr(callback, "monitor", None) for callback in callbacks_of(trainer, Checkpoint, EarlyStopping)}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    return sorted(str(name) for name in names if name)


# The state of an optimizer that was trained before -------------------------------------------------------------------


def agree_on_states(workers: Sequence[Synchronizer]) -> None:
    """Check that each optimizer has one state on all ranks, unless the coming step is local.

    Sparse and local steps of an earlier fit leave each rank a state of its own. A synchronous step with such a state
    would move the weights of each rank differently, and nobody would notice.

    Collective: the peers of the workers, blocking; a digest.

    Raises:
        DisagreementError: on all ranks; names the entries that differ.
    """
    found: dict[str, object] = {}
    for number, worker in enumerate(workers):
        optimizer = worker.optimizer
        if worker.plan.is_local or hasattr(optimizer, "consolidate_state_dict"):  # as ZeRO, which shards its state
            continue
        for name, parameter in worker.by_name().items():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer {number}, {name}, {key}"] = _comparable(value)
    agree(
        "states of the optimizers at the start of the fit (sparse and local steps of an earlier fit leave each rank a "
        "state of its own: return a new optimizer from configure_optimizers, or load one state on all ranks)",
        found,
        workers[0].peers.group if workers else None,
    )


def _comparable(value: Any) -> object:
    """Return a value that ranks can compare: a digest of a tensor, a plain value, or the name of a class."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, Tensor):
        return digest([local if type(local) is Tensor else local.dequantize()])[:8]
    return plain_values({"": value}).get("", type(value).__name__)


def agree_on_weights(module: torch.nn.Module, workers: Iterable[Synchronizer]) -> None:
    """Check, after the last step, that all ranks have the same weights where they must.

    A worker that exchanges gradients compares all parameters that are trained, a replica the parameters of its
    optimizer. Shards are not compared: if one shard raised, the ranks with the other shards would go on.

    Collective: the peers of the workers, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    ignored = getattr(module, IGNORED, ())
    for worker in workers:
        if worker.parameters_agree and not worker.peers.are_shards:
            compared = worker.by_name()
            if isinstance(worker, GradientSync):
                compared |= {name: each for name, each in module.named_parameters() if each.requires_grad}
                compared = {name: each for name, each in compared.items() if name not in ignored}
            agree_on_end(worker.step, compared, worker.peers.group)
