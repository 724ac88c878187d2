"""Train two small real tasks on two ranks, with DDP and with deep gradient compression, and compare what they sent.

Run it:  python examples/demo.py          on every GPU if there are two or more, else on two CPU processes

Prints a table and writes demo_results/demo.json, demo.md and demo.png (loss against bytes sent). With --readme FILE the
table also replaces the text between the markers of that file, so that no number in it is typed by hand.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import platform
import shutil
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank; read when torch is imported

import lightning
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich import box
from rich.console import Console
from rich.table import Table

import lightning_lowbw as lowbw
from lightning_lowbw.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*does not have many workers")  # the data is in memory
warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning 2.6 and torch 2.13

SEED = 1
NUM_UNTIMED_STEPS = 20  # DDP rebuilds its buckets, caches warm up
NUM_LAST_STEPS = 10  # what "at the end" means
SMOOTHING_STEPS = 20  # running mean of the plotted loss
LOOPBACK_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")  # Linux: bytes sent between processes of one machine
README_BEGIN, README_END = "<!-- demo:begin -->", "<!-- demo:end -->"
KB, MB = 1000, 1_000_000
# Bytes are those of one rank. They follow from the volume formulas; "measured" is the kernel's count of the loopback
# interface, to which whatever else runs on this machine adds.
COLUMNS = {
    "task": "{task}",
    "strategy": "{strategy}",
    "test accuracy": "{test_accuracy:.2%}",
    "kB sent per step": "{sent_kb:,.1f}",
    "kB measured": "{measured}",
    "compression ratio": "{compression_ratio:.1f}",
    "kB sent at the end": "{last_sent_kb:,.1f}",
    "ratio at the end": "{last_compression_ratio:.1f}",
    "seconds per step": "{step_s:.4f}",
}


@dataclass(frozen=True)
class Task:
    """A model, its data, and how long it trains; equal for both strategies but for the warm-up of DGC."""

    name: str
    model: type[LightningModule]
    data: LightningDataModule
    trainer_options: dict[str, Any]
    warmup: lowbw.SparsityWarmup


# An element waits about 1 / density steps until it is sent: 99.9 % is for runs of many thousand steps. The digits are
# easy enough for it; the text, a few hundred steps long, stops at 99 %.
TASKS = [
    Task("digits", DigitsClassifier, DigitsData(), {"max_epochs": 15}, lowbw.SparsityWarmup(begin_epoch=2, epochs=3)),
    Task(
        "text",
        ByteLanguageModel,
        StdlibText(batch_size=8),
        {"max_steps": 800, "gradient_clip_val": 1.0},
        lowbw.SparsityWarmup(begin_step=100, steps=100, sparsity=[0.96, 0.99]),
    ),
]


class Recorder(Callback):
    """Log the seconds of each step, and what the loopback interface carried during all of them; on rank zero only."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bytes_at_start = read_loopback_bytes()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.started_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trainer.logger.log_metrics({"step_s": time.perf_counter() - self.started_s}, trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        used = read_loopback_bytes() - self.bytes_at_start
        trainer.logger.log_metrics({"loopback_bytes": used}, trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # gloo sometimes aborts at exit if a reduction came last; the strategies of this package do this themselves
        trainer.strategy.barrier()


def read_loopback_bytes() -> int:
    """Return the kernel's count of bytes sent over the loopback interface; 0 where there is no such counter."""
    return int(LOOPBACK_COUNTER.read_text()) if LOOPBACK_COUNTER.exists() else 0


def train(task: Task, strategy: str, ranks: dict[str, Any], folder: Path) -> tuple[float, dict[str, list[float]]]:
    """Train one task with one strategy; return the test accuracy and the logged columns."""
    seed_everything(SEED, workers=True, verbose=False)
    model = task.model()
    # With a version of its own choosing, the logger would look for the next free one in this process as well.
    logger = CSVLogger(folder, name="", version=f"{task.name}-{strategy}")
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy=f"{strategy}_spawn",
        callbacks=[lowbw.TrafficMonitor(), Recorder(), *([task.warmup] if strategy == "dgc" else [])],
        logger=logger,
        log_every_n_steps=1,
        **ranks,
        **task.trainer_options,
        **quiet,
    )
    trainer.fit(model, datamodule=task.data)
    # The spawned ranks have handed their weights back: one process now judges each test sample once.
    judge = Trainer(accelerator=ranks["accelerator"], devices=1, logger=False, **quiet)
    test_accuracy = judge.test(model, datamodule=task.data, verbose=False)[0]["test_acc"]
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    return test_accuracy, {title: [float(line[title]) for line in lines if line[title]] for title in lines[0]}


def summarize(logged: dict[str, list[float]], ranks: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one row of the table."""
    sent = logged["traffic/bytes_sent"]
    dense = [count * ratio for count, ratio in zip(sent, logged["traffic/compression_ratio"], strict=True)]
    measured_kb = logged["loopback_bytes"][-1] / len(sent) / ranks["devices"] / KB
    return {
        "sent_kb": statistics.fmean(sent) / KB,
        # GPUs of one machine do not talk over its loopback interface.
        "measured_kb": measured_kb if measured_kb and ranks["accelerator"] == "cpu" else None,
        "compression_ratio": sum(dense) / sum(sent),
        "last_sent_kb": statistics.fmean(sent[-NUM_LAST_STEPS:]) / KB,
        "last_compression_ratio": sum(dense[-NUM_LAST_STEPS:]) / sum(sent[-NUM_LAST_STEPS:]),
        "step_s": statistics.median(logged["step_s"][NUM_UNTIMED_STEPS:]),
    }


def format_cells(row: dict[str, Any]) -> list[str]:
    """Return the text of each column."""
    measured = "-" if row["measured_kb"] is None else f"{row['measured_kb']:,.1f}"
    return [text.format(**row, measured=measured) for text in COLUMNS.values()]


def to_markdown(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Return the table, and one line on where it was measured."""
    cells = [list(COLUMNS), ["---"] * len(COLUMNS), *map(format_cells, rows)]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    where = "{devices} ranks, {accelerator}, {num_cpus} cores, torch {torch}, Lightning {lightning}, seed {seed}"
    return "\n".join([*lines, "", where.format(**environment) + "; 1 kB = 1000 bytes, of one rank.", ""])


def draw(curves: dict[tuple[str, str], dict[str, list[float]]], path: Path) -> None:
    """Plot the smoothed training loss against the bytes one rank has sent so far, one panel per task."""
    figure = Figure(figsize=(10, 4), layout="constrained")  # without pyplot: needs no display
    panels = dict(zip([task.name for task in TASKS], figure.subplots(1, len(TASKS)), strict=True))
    for (task, strategy), logged in curves.items():
        loss = torch.tensor(logged["train_loss"]).unfold(0, SMOOTHING_STEPS, 1).mean(dim=1)
        sent_mb = torch.tensor(logged["traffic/bytes_sent"], dtype=torch.float64).cumsum(0) / MB
        panels[task].plot(sent_mb[SMOOTHING_STEPS - 1 :], loss, label=strategy)
    for task, panel in panels.items():
        panel.set(title=task, xscale="log", xlabel="MB sent by one rank so far", ylabel="training loss")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.legend()
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    has_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if has_gpus else 2)
    parser.add_argument("--max-steps", type=int, help="end every run after so many steps (a quick look)")
    parser.add_argument("--output", type=Path, default=Path("demo_results"))
    parser.add_argument("--readme", type=Path, help="file whose marked block is replaced by the table")
    arguments = parser.parse_args()
    if arguments.max_steps is not None and arguments.max_steps <= NUM_UNTIMED_STEPS:
        parser.error(f"--max-steps {arguments.max_steps}: the first {NUM_UNTIMED_STEPS} are not timed, give more")
    ranks = {"accelerator": "gpu" if has_gpus else "cpu", "devices": arguments.devices}

    rows, curves = [], {}
    shutil.rmtree(arguments.output / "logs", ignore_errors=True)
    for task in TASKS:
        task.trainer_options.update({"max_steps": arguments.max_steps} if arguments.max_steps else {})
        for strategy in ("ddp", "dgc"):
            print(f"training {task.name} with {strategy} on {ranks['devices']} ranks ...", flush=True)
            test_accuracy, logged = train(task, strategy, ranks, arguments.output / "logs")
            row = {"task": task.name, "strategy": strategy, "test_accuracy": test_accuracy, **summarize(logged, ranks)}
            rows.append(row)
            curves[task.name, strategy] = logged

    versions = {"lightning_lowbw": lowbw.__version__, "torch": torch.__version__, "lightning": lightning.__version__}
    machine = {"python": platform.python_version(), "platform": platform.platform(), "num_cpus": os.cpu_count()}
    environment = {**versions, **machine, **ranks, "seed": SEED}
    markdown = to_markdown(rows, environment)
    (arguments.output / "demo.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")
    (arguments.output / "demo.md").write_text(markdown)
    draw(curves, arguments.output / "demo.png")
    if arguments.readme:
        before, rest = arguments.readme.read_text().split(README_BEGIN)
        after = rest.split(README_END)[1]
        arguments.readme.write_text(f"{before}{README_BEGIN}\n{markdown}{README_END}{after}")
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for title in COLUMNS:  # one word per line: nine columns fit into a terminal of 80
        table.add_column(title.replace(" ", "\n"), justify="right")
    for row in rows:
        table.add_row(*format_cells(row))
    Console().print(table)
    print(f"Wrote {arguments.output}/demo.json, demo.md and demo.png.")


if __name__ == "__main__":
    main()
