"""Train two small real tasks on two ranks, with DDP and with deep gradient compression, and compare what they sent.

    python examples/demo.py          # on every GPU if there are two or more, else on two CPU processes

Ends with a table and writes demo_results/demo.json, demo.md and demo.png (loss against bytes sent). With --readme FILE the table also
replaces what stands between the markers of that file, so that no number in it is typed by hand.
"""

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
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank; read when torch is imported

import lightning
import matplotlib
import matplotlib.pyplot
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

import lightning_lowbw as lowbw
from lightning_lowbw.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

matplotlib.use("Agg")  # draws without a display
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*does not have many workers")  # the data is in memory
warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning 2.6 and torch 2.13

SEED = 1
NUM_UNTIMED_STEPS = 20  # DDP rebuilds its buckets, caches warm up
NUM_LAST_STEPS = 10  # what "at the end" means
SMOOTHING_STEPS = 10  # running mean of the plotted loss
LOOPBACK_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")  # Linux: bytes sent between processes of one machine
README_BEGIN, README_END = "<!-- demo:begin -->", "<!-- demo:end -->"


@dataclass(frozen=True)
class Task:
    """A model, its data, and how long it trains; equal for both strategies but for the warm-up of DGC."""

    name: str
    model: type[LightningModule]
    data: type[LightningDataModule]
    trainer_options: dict[str, Any]
    warmup: lowbw.SparsityWarmup


# An element is sent about every 1 / density steps: 99.9 % suits runs of many thousand steps. The digits forgive it, the text stops at 99 %.
TASKS = [
    Task("digits", DigitsClassifier, DigitsData, {"max_epochs": 15}, lowbw.SparsityWarmup(begin_epoch=2, epochs=3)),
    Task(
        "stdlib text",
        ByteLanguageModel,
        StdlibText,
        {"max_steps": 400, "gradient_clip_val": 0.5},
        lowbw.SparsityWarmup(begin_step=100, steps=100, sparsity=[0.96, 0.99]),
    ),
]


@dataclass(frozen=True)
class Row:
    """One line of the table. Bytes are those of one rank in one step; None is what was not measured."""

    task: str
    strategy: str
    test_accuracy: float
    bytes_sent: float
    bytes_sent_at_the_end: float
    bytes_measured: float | None
    compression_ratio: float
    compression_ratio_at_the_end: float
    step_s: float

    def cells(self) -> dict[str, str]:
        """Return title and text of each column."""
        return {
            "task": self.task,
            "strategy": self.strategy,
            "test accuracy": f"{self.test_accuracy:.2%}",
            "bytes sent per step": f"{self.bytes_sent:,.0f}",
            "measured on the interface": "-" if self.bytes_measured is None else f"{self.bytes_measured:,.0f}",
            "compression ratio": f"{self.compression_ratio:.1f}",
            "bytes per step at the end": f"{self.bytes_sent_at_the_end:,.0f}",
            "ratio at the end": f"{self.compression_ratio_at_the_end:.1f}",
            "seconds per step": f"{self.step_s:.4f}",
        }


class Recorder(Callback):
    """Log the seconds of each step, and what the loopback interface carried from the first step to the last."""

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bytes_at_start = read_loopback_bytes()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.started_s = time.perf_counter()

    @rank_zero_only
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        trainer.logger.log_metrics({"step_s": time.perf_counter() - self.started_s}, trainer.global_step)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        used = read_loopback_bytes() - self.bytes_at_start
        trainer.logger.log_metrics({"loopback_bytes": used}, trainer.global_step)


def read_loopback_bytes() -> int:
    """Return the kernel's count of bytes sent over the loopback interface; 0 where there is no such counter."""
    return int(LOOPBACK_COUNTER.read_text()) if LOOPBACK_COUNTER.exists() else 0


def run(task: Task, strategy: str, devices: int, accelerator: str, folder: Path) -> tuple[Row, dict[str, list[float]]]:
    """Train one task with one strategy; return its row and its logged columns."""
    seed_everything(SEED, workers=True, verbose=False)
    model, data = task.model(), task.data()
    # With a version of its own choosing, the logger would look for the next free one in this process as well.
    logger = CSVLogger(folder, name="", version=f"{task.name}-{strategy}".replace(" ", "_"))
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy=f"{strategy}_spawn",
        accelerator=accelerator,
        devices=devices,
        callbacks=[lowbw.TrafficMonitor(), Recorder(), *([task.warmup] if strategy == "dgc" else [])],
        logger=logger,
        log_every_n_steps=1,
        **task.trainer_options,
        **quiet,
    )
    trainer.fit(model, datamodule=data)
    # The spawned ranks have handed their weights back: one process then judges each test sample once.
    judge = Trainer(accelerator=accelerator, devices=1, logger=False, **quiet)
    test_accuracy = judge.test(model, datamodule=data, verbose=False)[0]["test_acc"]

    logged = read_columns(Path(logger.log_dir) / "metrics.csv")
    sent = logged["traffic/bytes_sent"]
    dense = [count * ratio for count, ratio in zip(sent, logged["traffic/compression_ratio"], strict=True)]
    loopback_bytes = logged["loopback_bytes"][-1] if accelerator == "cpu" else 0
    row = Row(
        task=task.name,
        strategy=strategy,
        test_accuracy=test_accuracy,
        bytes_sent=statistics.fmean(sent),
        bytes_sent_at_the_end=statistics.fmean(sent[-NUM_LAST_STEPS:]),
        bytes_measured=loopback_bytes / len(sent) / devices if loopback_bytes else None,
        compression_ratio=sum(dense) / sum(sent),
        compression_ratio_at_the_end=sum(dense[-NUM_LAST_STEPS:]) / sum(sent[-NUM_LAST_STEPS:]),
        step_s=statistics.median(logged["step_s"][NUM_UNTIMED_STEPS:]),
    )
    return row, {"cumulative_bytes": list(accumulate(sent)), "train_loss": logged["train_loss"]}


def read_columns(path: Path) -> dict[str, list[float]]:
    """Read a metrics.csv: for each metric the values in the order of the steps, without the empty cells."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return {name: [float(line[name]) for line in lines if line[name]] for name in lines[0]}


def describe_environment(devices: int, accelerator: str) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "lightning_lowbw": lowbw.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if accelerator == "gpu" else "cpu",
        "devices": devices,
        "seed": SEED,
    }


def to_markdown(rows: list[Row], environment: dict[str, Any]) -> str:
    """Return the table, and one line on where it was measured."""
    table = [rows[0].cells().keys(), [" --- "] * len(rows[0].cells()), *(row.cells().values() for row in rows)]
    lines = ["| " + " | ".join(line) + " |" for line in table]
    where = "{devices} ranks on {accelerator} ({num_cpus} cores), torch {torch}, lightning {lightning}, seed {seed}"
    return "\n".join([*lines, "", f"Measured by `make demo`: {where.format(**environment)}.", ""])


def draw(curves: dict[tuple[str, str], dict[str, list[float]]], path: Path) -> None:
    """Plot the smoothed training loss against the bytes one rank has sent so far, one panel per task."""
    figure, panels = matplotlib.pyplot.subplots(1, len(TASKS), figsize=(10, 4), layout="constrained")
    for panel, task in zip(panels, TASKS, strict=True):
        for (name, strategy), curve in curves.items():
            if name == task.name:
                loss = torch.tensor(curve["train_loss"]).unfold(0, SMOOTHING_STEPS, 1).mean(dim=1)
                panel.plot(curve["cumulative_bytes"][SMOOTHING_STEPS - 1 :], loss, label=strategy)
        panel.set(title=task.name, xscale="log", xlabel="bytes sent by one rank so far", ylabel="training loss")
        panel.legend()
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    has_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if has_gpus else 2)
    parser.add_argument("--output", type=Path, default=Path("demo_results"))
    parser.add_argument("--readme", type=Path, help="file whose marked block is replaced by the table")
    arguments = parser.parse_args()
    devices, accelerator = arguments.devices, "gpu" if has_gpus else "cpu"
    shutil.rmtree(arguments.output / "logs", ignore_errors=True)

    rows, curves = [], {}
    for task in TASKS:
        for strategy in ("ddp", "dgc"):
            print(f"training {task.name} with {strategy} on {devices} ranks ({accelerator}) ...", flush=True)
            row, curve = run(task, strategy, devices, accelerator, arguments.output / "logs")
            rows.append(row)
            curves[task.name, strategy] = curve

    environment = describe_environment(devices, accelerator)
    markdown = to_markdown(rows, environment)
    results = {"environment": environment, "rows": [asdict(row) for row in rows]}
    (arguments.output / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    (arguments.output / "demo.md").write_text(markdown)
    draw(curves, arguments.output / "demo.png")
    if arguments.readme:
        before, rest = arguments.readme.read_text().split(README_BEGIN)
        after = rest.split(README_END)[1]
        arguments.readme.write_text(f"{before}{README_BEGIN}\n{markdown}{README_END}{after}")

    table = Table(*rows[0].cells(), title="Deep gradient compression against DDP")
    for row in rows:
        table.add_row(*row.cells().values())
    Console().print(table)
    print(f"wrote {arguments.output}/demo.json, demo.md and demo.png")


if __name__ == "__main__":
    main()
