"""What is trained, and how; of both measurements."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from benchmarks.harness import describe_environment
from benchmarks.models import GPT2, WORKLOADS, Scored, Timed, loader, small_resnet
from lightning_lowbw.comm.link import Link
from lightning_lowbw.strategies.auto_choice import NUM_STEPS
from lightning_lowbw.tools.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

NUM_RANKS = 2
CHOSEN_AFTER = NUM_STEPS
STEPS = (100, 800, 5000)
LATENCY_S = 1e-4
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # by which torch asks for large pages
LINKS = {name: Link(LATENCY_S, gbit * 1e9 / 8) for name, gbit in (("100mbit", 0.1), ("1gbit", 1.0), ("10gbit", 10.0))}
COMMON: dict[str, Any] = {"init_sync": False, "broadcast_buffers": False}  # as in contestants.py
MODEL_25M = "mlp-25M"
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make_model: makes the module.
        make_data: makes what `fit` takes.
        note: for the table's caption.
    """

    make_model: Callable[[], pl.LightningModule]
    make_data: Callable[[], Any]
    note: str


def gpt2() -> Scored:
    """Make GPT-2 over bytes."""
    return Scored(GPT2(64), 256, optimizer="adamw", lr=1e-3, weight_decay=0.01)


TASKS = {
    "digits": Task(
        lambda: DigitsClassifier(schedule="one_cycle"),
        DigitsData,
        "DigitsClassifier, SGD with momentum, 2 x 32 images",
    ),
    "resnet": Task(
        lambda: Scored(small_resnet(), 10, optimizer="sgd", lr=0.05, weight_decay=5e-4),
        lambda: DigitsData(batch_size=16),
        "a ResNet of 0.3M parameters on the same images, SGD with momentum and weight decay 5e-4, 2 x 16 images",
    ),
    "text": Task(
        lambda: ByteLanguageModel(optimizer="adamw", schedule="one_cycle"),
        lambda: StdlibText(batch_size=8),
        "ByteLanguageModel, AdamW, 2 x 8 crops of 64 bytes",
    ),
    "gpt2": Task(
        gpt2,
        lambda: StdlibText(batch_size=4),
        "GPT-2 of 1.2M parameters from a config of transformers, AdamW, 2 x 4 crops of 64 bytes of the same text",
    ),
}
# Not for accuracy: random data.
TIMED_TASKS = {
    MODEL_25M: Task(
        lambda: Timed(WORKLOADS[MODEL_25M]),
        lambda: loader(WORKLOADS[MODEL_25M], max(STEPS)),
        "25M MLP of models.py, SGD with momentum, 2 x 32 samples",
    ),
    **TASKS,
}


@cache
def data_of(task: str) -> Any:
    """Return the data of a task, read once per process."""
    return TIMED_TASKS[task].make_data()


def make_trainer(
    strategy: Any, num_steps: int, callback: pl.Callback, data: Any, num_ranks: int, every: int | None = None
) -> pl.Trainer:
    """Return a Trainer that does nothing but train, and validate each `every` steps; None: after the fit only."""
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=num_ranks,
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=[callback],
        num_sanity_val_steps=0,
        limit_val_batches=None,
        check_val_every_n_epoch=None,
        val_check_interval=every or num_steps + 1,
        use_distributed_sampler=not isinstance(data, DataLoader),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def be_quiet() -> None:
    """Let Lightning say nothing of ordinary things."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


class Curve(pl.Callback):
    """Keep the loss of each step and when it was over, and stop early where that is asked for."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.losses: list[float] = []
        self.clock: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.clock.append(time.perf_counter())
        if len(self.losses) == self.stop_after:
            trainer.should_stop = True

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step after the first."""
        return [after - before for before, after in zip(self.clock, self.clock[1:], strict=False)]


def is_same(row: Row, **fields: Any) -> bool:
    """Return whether a row has these values."""
    return all(row.get(name) == value for name, value in fields.items())


def write(results: dict[str, Any], path: Path) -> None:
    """Write the results, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


def this_environment(results: dict[str, Any]) -> int:
    """Return the number of this environment among those of the results, and add it if it is new."""
    environment = {name: each for name, each in describe_environment(link=None).items() if name != "date"}
    environment |= {name: os.environ[name] for name in (LARGE_PAGES,) if name in os.environ}
    if environment not in results["environments"]:
        results["environments"].append(environment)
    return int(results["environments"].index(environment))
