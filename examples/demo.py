"""Train two small real tasks on two ranks with DDP and with deep gradient compression, and compare what they sent.

    python examples/demo.py                        # every GPU if there are two or more, else two CPU processes

Ends with a table and writes demo_results/demo.json, demo.md and demo.png (loss against bytes sent). With --readme FILE the table
also replaces what stands between the markers of that file, so that no number in it is typed by hand.
"""

import argparse
import csv
import json
import logging
import os
import platform
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: one thread per rank

import lightning
import matplotlib
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from matplotlib import pyplot

import lightning_lowbw as lowbw
from lightning_lowbw.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

matplotlib.use("Agg")  # draws without a display
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory

SEED = 1
NUM_EXCLUDED_STEPS = 20  # the first steps rebuild buckets and warm caches: not timed
NUM_LAST_STEPS = 10  # what "at the end" means
SMOOTHING_STEPS = 10  # running mean of the plotted loss
LOOPBACK_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")  # Linux: bytes sent between processes of this machine
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"
COLUMNS = {
    "task": "{}",
    "strategy": "{}",
    "test accuracy": "{:.2%}",
    "bytes sent per step": "{:,.0f}",
    "... at the end": "{:,.0f}",
    "... measured": "{:,.0f}",
    "compression ratio": "{:,.1f}x",
    "... at the end ": "{:,.1f}x",
    "seconds per step": "{:.4f}",
}


@dataclass(frozen=True)
class Task:
    """A model, its data and how long it trains; the Trainer's options are the same for both strategies."""

    name: str
    model: type[LightningModule]
    data: type[LightningDataModule]
    options: dict[str, Any]
    warmup: dict[str, Any]


TASKS = (
    Task("digits", DigitsClassifier, DigitsData, {"max_epochs": 15}, {"begin_epoch": 2, "epochs": 3}),
    Task(
        "stdlib text",
        ByteLanguageModel,
        StdlibText,
        {"max_steps": 400, "gradient_clip_val": 1.0},
        {"begin_step": 40, "steps": 60},
    ),
)


class Recorder(Callback):
    """Write the seconds of each step, and what the loopback interface carried between first and last step, to the log."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loopback_bytes = read_loopback_bytes()
        self.last_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        trainer.logger.log_metrics({"step_s": now_s - self.last_s}, trainer.global_step)
        self.last_s = now_s

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_s = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        used = read_loopback_bytes() - self.loopback_bytes
        trainer.logger.log_metrics({"loopback_bytes": used}, trainer.global_step)


def read_loopback_bytes() -> int:
    """Return the kernel's count of bytes sent over the loopback interface; 0 where there is no such counter."""
    return int(LOOPBACK_COUNTER.read_text()) if LOOPBACK_COUNTER.exists() else 0


def run(task: Task, strategy: str, accelerator: str, devices: int, folder: Path) -> dict[str, Any]:
    """Train one task with one strategy and return its row of the table, with the curve for the plot."""
    seed_everything(SEED, workers=True, verbose=False)
    model, data = task.model(), task.data(batch_size=512 // 16 if task.name == "digits" else 16)
    logger = CSVLogger(folder, name=f"{task.name}-{strategy}".replace(" ", "_"))
    callbacks: list[Callback] = [lowbw.TrafficMonitor(), Recorder()]
    if strategy == "dgc":
        callbacks.append(lowbw.SparsityWarmup(**task.warmup, sparsity=[0.9, 0.984375, 0.996, 0.999]))
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy=f"{strategy}_spawn",
        accelerator=accelerator,
        devices=devices,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        **task.options,
        **quiet,
    )
    trainer.fit(model, datamodule=data)
    # One process sees every test sample once; the spawned ranks have handed their weights back.
    judge = Trainer(accelerator=accelerator, devices=1, logger=False, **quiet)
    accuracy = judge.test(model, datamodule=data, verbose=False)[0]["test_acc"]
    return summarize(task.name, strategy, accuracy, read_metrics(logger), devices, is_measured=accelerator == "cpu")
