"""Logs the traffic of the exchange to the logger and the progress bar, and in one line the traffic of a fit."""

from __future__ import annotations

from copy import copy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_lowbw.comm.collectives import TrafficLedger, all_reduce_bytes
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.checks import callbacks_of, check_package


class TrafficMonitor(Callback):
    """Log this rank's traffic of each training step, and that of rank 0 at the end in one line, without a collective.

    The monitor waits for a GPU only if it reads the norm of the residual. `lowbw` and `dgc` bring to rank 0 a monitor
    that logs the last line alone, unless the Trainer has a monitor, or `Trainer(enable_progress_bar=False)`.

    The line has the bytes of this fit, and its `exposed_s`.

    Logged, under ``traffic/``, for the batches that step an optimizer:

    - ``bytes_sent``, ``bytes_received``: of this step, by the volume formulas of the collectives that were issued; of
      methods that average weights the steps that are logged may all be local
    - ``compression_ratio``: bytes that DDP would have sent since the last exchange / bytes sent; above 1 is better;
      only after an exchange. On two levels both are bytes between nodes, compared with a dense exchange on two
      levels ("hierarchical")
    - ``exposed_s``: seconds in which the step waited for an exchange; on CUDA some steps late, and in dense steps only
      while `sparsity="auto"` times them
    - ``bytes_intra_node``, ``bytes_inter_node``: of the bytes sent, on two levels

    - ``skipped_steps``: with `skip_nonfinite` or `skip_norm`: steps skipped since the start of the fit; with methods
      that average weights the local steps of all ranks up to the last average, and of this rank since then

    and the metrics of the method, with a number behind the name if there are several optimizers. Methods that compress
    gradients ("dgc") report:

    - ``density``: fraction of all trained elements that was sent, with the elements of small tensors
    - ``residual_norm``: 2-norm of the unsent gradient, from the first sparse step on; read anew every
      `Trainer(log_every_n_steps=...)` steps

    Methods that average weights ("local_sgd" and the like) report:

    - ``k_steps``: the period in use
    - ``averages``: averages since the start
    - ``consensus_distance``: ``||x_i - mean|| / ||mean||`` of this rank before the last average

    With `ShardedStrategy` ("dgc_fsdp" and the like) only the bytes of this rank's shards between nodes are counted.

    With stock DDP only the bytes are logged, by the formula of its gradient all-reduce.

    Args:
        prog_bar: whether the bytes sent and the compression ratio are shown in the progress bar.

    Raises:
        ConfigurationError: the strategy exchanges no gradients (a single device), or not as DDP does.
    """

    def __init__(self, *, prog_bar: bool = True) -> None:
        self.prog_bar, self._logs = prog_bar, True
        self._begin(TrafficLedger())

    def _begin(self, ledger: TrafficLedger) -> None:
        self._first = self._last = self._at_last_send = ledger

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_package(self, trainer)
        if stage == "fit" and not isinstance(trainer.strategy, (BaseStrategy, DDPStrategy)):
            raise ConfigurationError(
                f"TrafficMonitor reads the traffic of strategy='ddp' or of a strategy of this package; the strategy is "
                f"{type(trainer.strategy).__name__}. Use such a strategy, or leave out the callback."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(_read(trainer))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, last = _read(trainer), self._last
        if now.steps == last.steps:  # accumulating
            return
        self._last = now
        strategy = trainer.strategy
        if not self._logs:
            return
        shown = {"traffic/bytes_sent": float(now.sent_bytes - last.sent_bytes)}
        # In the last step; validation may have sent something, too.
        replicas = strategy.replicas if isinstance(strategy, BaseStrategy) else []
        has_exchanged = not replicas or any(worker.has_communicated for worker in replicas)
        sent, dense = now.of_slow_network
        sent_before, dense_before = self._at_last_send.of_slow_network
        if sent > sent_before and has_exchanged:
            shown["traffic/compression_ratio"] = (dense - dense_before) / (sent - sent_before)
            self._at_last_send = now  # local steps in between count for the average that follows them
        silent: dict[str, float | Tensor] = {"traffic/bytes_received": float(now.received_bytes - last.received_bytes)}
        if isinstance(strategy, BaseStrategy):
            silent["traffic/exposed_s"] = now.exposed_s - last.exposed_s
            if now.intra_bytes or now.inter_bytes:
                silent["traffic/bytes_intra_node"] = float(now.intra_bytes - last.intra_bytes)
                silent["traffic/bytes_inter_node"] = float(now.inter_bytes - last.inter_bytes)
            every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
            is_due = bool(every) and now.steps // every != last.steps // every
            for number, worker in enumerate(strategy.workers):
                suffix = f"/{number}" if len(strategy.workers) > 1 else ""
                silent |= {f"traffic/{key}{suffix}": value for key, value in worker.metrics(is_due).items()}
        pl_module.log_dict(shown, prog_bar=self.prog_bar, on_step=True, on_epoch=False)
        pl_module.log_dict(silent, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        traffic = _read(trainer).since(self._first)
        if trainer.is_global_zero and traffic.steps:  # one rank prints; a fit without a step has no ratio
            rank_zero_info(summary(traffic))


def bring_monitor(trainer: pl.Trainer) -> None:
    """Give the Trainer a monitor, on rank 0, unless it has one or is to be quiet.

    It logs no metric: a metric that only rank 0 has would hang code that reduces all metrics over ranks. It is the last
    of the callbacks: a progress bar has ended its line by then.
    """
    if trainer.is_global_zero and trainer.progress_bar_callback and not callbacks_of(trainer, TrafficMonitor):
        monitor = TrafficMonitor()
        monitor._logs = False
        trainer.callbacks.append(monitor)  # type: ignore[attr-defined]  # set by a connector


def _read(trainer: pl.Trainer) -> TrafficLedger:
    strategy = trainer.strategy
    if isinstance(strategy, BaseStrategy):
        strategy.ledger.settle()  # CUDA's events of earlier steps are read, none is waited for
        return copy(strategy.ledger)  # the ledger goes on; a difference needs two values
    nbytes = sum(parameter.nbytes for parameter in trainer.lightning_module.parameters() if parameter.requires_grad)
    model, module = strategy.model, trainer.lightning_module
    broadcasts = getattr(model, "broadcast_buffers", False) and module.automatic_optimization and trainer.world_size > 1
    buffers = sum(buffer.nbytes for buffer in module.buffers()) if broadcasts else 0
    total = trainer.global_step * (all_reduce_bytes(nbytes, trainer.world_size) + buffers)
    return TrafficLedger(trainer.global_step, total, total, dense_bytes=total)


def summary(traffic: TrafficLedger) -> str:
    """Return in one sentence what a fit has saved.

    Args:
        traffic: of this rank; on two levels its bytes between nodes are compared with the bytes of "hierarchical".

    Example:
        >>> summary(TrafficLedger(steps=100, sent_bytes=3_100_000_000, dense_bytes=410_000_000_000, exposed_s=0.84))
        'Sent 3.1 GB instead of 410 GB, waited 0.84 s.'
    """
    sent, dense = map(size, traffic.of_slow_network)
    name = "hierarchical" if traffic.has_levels else "DDP"
    sentence = f"Sent {sent}, as {name} would" if sent == dense else f"Sent {sent} instead of {dense}"
    return f"{sentence}, waited {traffic.exposed_s:.3g} s." if traffic.exposed_s else f"{sentence}."


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit.

    Example:
        >>> size(0), size(999_600), size(3_140_000_000)
        ('0 bytes', '1 MB', '3.14 GB')
    """
    units = iter(("bytes", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while nbytes >= 999.5:  # from here on `.3g` would show 1e+03
        nbytes, unit = nbytes / 1000, next(units)
    return f"{nbytes:.3g} {unit}"
