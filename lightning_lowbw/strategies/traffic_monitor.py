"""Logs the traffic of the exchange, to the logger and the progress bar, and reports it at the end of a fit."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_lowbw.arguments import names_arguments
from lightning_lowbw.comm.collectives import TrafficLedger, all_reduce_bytes
from lightning_lowbw.cost_model import number
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.checks import callbacks_of, check_package

PICTURES = (".png", ".pdf", ".svg")


@names_arguments
class TrafficMonitor(Callback):
    """Log this rank's traffic of each training step, and report that of rank 0 at the end, without a collective.

    It waits for a GPU only where the norm of the residual is read. `lowbw` and `dgc` bring one to rank 0 that reports
    and logs nothing, unless there is one already, or `Trainer(enable_progress_bar=False)` asks for quiet.

    The report is a table and a sentence, of the steps of this fit. What is not known is left out: the time of DDP if
    "auto" has not measured dense steps in this fit; waits of stock DDP, and of dense steps on CUDA. Seconds per step
    are the mean of those with no validation, checkpoint or choice of a method before their end.

    Logged, under ``traffic/``, for the batches that step an optimizer:

    - ``bytes_sent``, ``bytes_received``: of this step, by the volume formulas of the collectives that were issued; of
      methods that average weights the steps that are logged may all be local
    - ``compression_ratio``: bytes that DDP would have sent since the last exchange / bytes sent; above 1 is better;
      only after an exchange. On two levels both are bytes between nodes, compared with a dense exchange on two
      levels ("hierarchical")
    - ``exposed_s``: seconds in which the step waited for an exchange; on CUDA some steps late, and not in dense steps,
      except those that `sparsity="auto"` times
    - ``bytes_intra_node``, ``bytes_inter_node``: of the bytes sent, on two levels

    and what the method reports, with a number behind it where there are several optimizers. Of methods that compress
    gradients ("dgc"):

    - ``density``: fraction of all trained elements that was sent, those of small tensors included
    - ``residual_norm``: 2-norm of the unsent gradient, from the first sparse step on; read anew every
      `Trainer(log_every_n_steps=...)` steps

    Of methods that average weights ("local_sgd" and the like):

    - ``k_steps``: the period in use
    - ``averages``: averages since the start
    - ``consensus_distance``: ``||x_i - mean|| / ||mean||`` of this rank before the last average

    With `ShardedStrategy` ("dgc_fsdp" and the like) all bytes are those between nodes, of this rank's shards.

    With stock DDP the bytes are those of its gradient all-reduce, by formula, and the rest is left out.

    Args:
        prog_bar: whether the bytes sent and the compression ratio are shown in the progress bar.
        report: a file, such as "traffic.png", for a picture of the bytes and seconds of each step; needs matplotlib.

    Raises:
        ConfigurationError: the strategy exchanges no gradients (a single device), or not as DDP does; the picture
            cannot be drawn.
    """

    def __init__(self, *, prog_bar: bool = True, report: str | None = None) -> None:
        if report is not None and Path(str(report)).suffix not in PICTURES:
            raise ConfigurationError(f"report={report!r}: give a file that ends in {', '.join(PICTURES)}.")
        if report is not None and find_spec("matplotlib") is None:
            raise ConfigurationError(
                f"report={report!r} is drawn with matplotlib, which is not installed: pip install "
                "'lightning-lowbw[demo]', or leave out report; the table and the sentence do not need it."
            )
        self.prog_bar, self.report, self._logs = prog_bar, report, True
        self._begin(TrafficLedger())

    def _begin(self, ledger: TrafficLedger) -> None:
        self._first = self._last = self._at_last_send = ledger
        self._clock = _Clock()
        self._bytes, self._seconds = array("d"), array("d")  # of each step, for the picture

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_package(self, trainer)
        if stage == "fit" and not isinstance(trainer.strategy, (BaseStrategy, DDPStrategy)):
            raise ConfigurationError(
                f"TrafficMonitor reads the traffic of strategy='ddp' or of a strategy of this package; the strategy is "
                f"{type(trainer.strategy).__name__}. Use one of these, or leave out the callback."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(_read(trainer))

    def on_validation_end(self, *_: Any) -> None:
        self._clock.stop()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._clock.stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, last = _read(trainer), self._last
        if now.steps == last.steps:  # accumulating
            return
        self._last = now
        strategy = trainer.strategy
        seconds = self._clock.note(now.steps - last.steps, now.exposed_s - last.exposed_s, strategy)
        if self.report is not None:
            self._bytes.append(now.sent_bytes - last.sent_bytes)
            self._seconds.append(seconds)
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
        clock, traffic, strategy = self._clock, _read(trainer).since(self._first), trainer.strategy
        if not trainer.is_global_zero or not traffic.steps:  # one rank prints; a fit without a step has no ratio
            return
        report = Report(traffic, clock.step_s, clock.waited)
        auto = getattr(strategy, "auto", None)
        if isinstance(strategy, BaseStrategy) and auto is not None and auto.chosen is not None:
            # Of several optimizers "auto" has timed the steps of all together.
            is_compared = auto.chosen.method.kind != "whole" and len(strategy.workers) == 1
            dense_s = auto.dense_s if is_compared else None
            report = replace(report, dense_s=dense_s, predicted_s=auto.chosen.last_s, last_s=auto.mean_s)
        show(report)
        if self.report is not None:
            draw(Path(self.report), self._bytes, self._seconds)


def bring_monitor(trainer: pl.Trainer) -> None:
    """Give the Trainer a monitor, on rank 0, unless it has one or is to be quiet.

    It logs nothing: a metric that only rank 0 has would hang code that reduces all of them over ranks. It is the last
    of the callbacks: a progress bar has ended its line when the report is printed.
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


class _Clock:
    """Times the steps of a fit, from the end of one to the end of the next.

    Attributes:
        num_steps, seconds: of those that were timed.
        waited_s, waiting_s: seconds waited for the network, and of the steps for which that is known.
    """

    def __init__(self) -> None:
        self.num_steps, self.seconds, self.waited_s, self.waiting_s = 0, 0.0, 0.0, 0.0
        self._last_s: float | None = None  # the end of the last step; None if something else has been done since
        self._method: object = None
        self._knows_waits = False

    def stop(self) -> None:
        """Do not time the coming step: something else is being done before its end."""
        self._last_s = None

    def note(self, num_steps: int, waited_s: float, strategy: object) -> float:
        """Note the end of optimizer steps that were taken together; return their seconds, NaN if they are not timed."""
        now_s, method, seconds = time.perf_counter(), getattr(strategy, "method", None), math.nan
        if self._last_s is not None and method is self._method:  # else one was measured and chosen
            seconds = now_s - self._last_s
            self.num_steps += num_steps
            self.seconds += seconds
            if self._knows_waits:
                self.waited_s += waited_s
                self.waiting_s += seconds
        self._last_s, self._method = now_s, method
        self._knows_waits = isinstance(strategy, BaseStrategy) and (
            strategy.root_device.type == "cpu" or not any(worker.reduces_in_backward for worker in strategy.workers)
        )
        return seconds

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step."""
        return self.seconds / self.num_steps if self.num_steps else None

    @property
    def waited(self) -> float | None:
        """The share of the time in which the training waited for the network."""
        return self.waited_s / self.waiting_s if self.waiting_s else None


# The report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a rank has sent in a fit, and how long its steps took; None is what is not known.

    Attributes:
        traffic: of the fit.
        step_s: seconds of a step.
        waited: the share of the time in which it waited for the network.
        dense_s: seconds of a step of DDP, as measured in this fit before the choice.
        predicted_s: seconds of a step after the warm-up, as predicted when the method was chosen.
        last_s: the same, measured.
    """

    traffic: TrafficLedger
    step_s: float | None = None
    waited: float | None = None
    dense_s: float | None = None
    predicted_s: float | None = None
    last_s: float | None = None

    @property
    def dense(self) -> str:
        """The name of what its bytes are compared with; with levels what is sent between nodes."""
        return "hierarchical" if self.traffic.has_levels else "DDP"

    def rows(self) -> list[tuple[str, str]]:
        """Return the table: names and values."""
        traffic, times = self.traffic, {"a step took": self.step_s, "a step of DDP took": self.dense_s}
        times |= {"a step after the warm-up took": self.last_s, "predicted for after it": self.predicted_s}
        sent, dense = traffic.of_slow_network
        rows = [("steps", f"{traffic.steps:,}")]
        rows += [(name, f"{number(seconds)} s") for name, seconds in times.items() if seconds is not None]
        rows += [] if self.waited is None else [("waited for the network", f"{100 * self.waited:.1f} % of the time")]
        levels = {"sent inside nodes": traffic.intra_bytes, "sent between nodes": traffic.inter_bytes}
        levels = levels if traffic.has_levels else {"sent": traffic.sent_bytes}
        rows += [(name, size(nbytes)) for name, nbytes in {**levels, f"{self.dense} would send": dense}.items()]
        return [*rows, *([("compression ratio", number(dense / sent))] if sent else [])]

    def sentence(self) -> str:
        """Return what was saved, in one sentence.

        Example:
            >>> ledger = TrafficLedger(steps=100, sent_bytes=3_100_000_000, dense_bytes=410_000_000_000)
            >>> Report(ledger, step_s=0.2, waited=0.04, dense_s=0.46).sentence()
            'Sent 3.1 GB instead of 410 GB, waited 4 % of the time, about 2.3 times as fast as DDP on this link.'
        """
        sent, dense = map(size, self.traffic.of_slow_network)
        parts = [f"Sent {sent}, as {self.dense} would" if sent == dense else f"Sent {sent} instead of {dense}"]
        if self.waited is not None:
            parts.append(f"waited {100 * self.waited:.0f} % of the time")
        if self.dense_s and self.step_s:
            parts.append(f"about {self.dense_s / self.step_s:.1f} times as fast as DDP on this link")
        return f"{', '.join(parts)}."


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


def show(report: Report) -> None:
    """Print a report: a table where rich is installed, else lines in the log."""
    title = "What rank 0 sent"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        rank_zero_info("\n".join([title, *map(": ".join, report.rows()), report.sentence()]))
        return
    table = Table(title=title, show_header=False)
    for row in report.rows():
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(report.sentence(), soft_wrap=True)


def draw(path: Path, sent_bytes: Sequence[float], seconds: Sequence[float]) -> None:
    """Draw the bytes and the seconds of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")  # without pyplot: needs no display
    above, below = figure.subplots(2, 1, sharex=True)
    for panel, values, name in ((above, sent_bytes, "bytes sent"), (below, seconds, "seconds")):
        panel.plot(range(1, len(values) + 1), values, ".", markersize=3)
        panel.set(ylabel=name)
        panel.grid(alpha=0.3)
    above.set(title="each optimizer step of rank 0", yscale="log")  # local steps, with 0 bytes, are not in it
    below.set(xlabel="optimizer step of this fit", ylim=(0, None))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
