"""What few bits per value cost, and low rank: DDP and others for the same steps, on a link that is not throttled.

    .venv/bin/python benchmarks/quantized_accuracy.py                       # 10 minutes
    .venv/bin/python benchmarks/quantized_accuracy.py --tasks text --only-seeds 5   # more; other rows stay

Writes benchmarks/results/quantized_accuracy.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shlex
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch

from benchmarks.harness import RESULTS, as_plain, describe_environment, run_in_lab
from benchmarks.worker import INTERFACE
from lightning_lowbw import EveryStep, QuantizedGradients, Strategy
from lightning_lowbw.tools.lab.network import read_sent_bytes
from lightning_lowbw.tools.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

SMOOTHING = 20  # steps of the running mean


class WithRMSprop(DigitsClassifier):
    """Trains with an optimizer for which top-k has no correction: values in few bits need none."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


# By task: what makes the model and the data, and steps. SGD with momentum, RMSprop, and AdamW.
TASKS: dict[str, tuple[Any, Any, int]] = {
    "digits": (lambda: DigitsClassifier(schedule="one_cycle"), DigitsData, 300),
    "digits, RMSprop": (WithRMSprop, DigitsData, 300),
    "text": (lambda: ByteLanguageModel(optimizer="adamw", schedule="one_cycle"), StdlibText, 300),
}
METHODS: dict[str, Any] = {  # what makes the strategy
    "ddp": lambda: "ddp",
    "bfloat16": lambda: "bfloat16",
    "float16": lambda: Strategy(QuantizedGradients("float16")),
    "int8": lambda: "int8",
    "int4": lambda: "int4",
    "powersgd": lambda: "powersgd",
}


class Curve(pl.Callback):
    """Keep of each step the seconds since the first, the loss, and the bytes that the interface has sent since then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.sent_bytes: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        self.started_s, self.sent_before = time.perf_counter(), read_sent_bytes(INTERFACE)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started_s)
        self.losses.append(float(outputs["loss"]))
        self.sent_bytes.append(read_sent_bytes(INTERFACE) - self.sent_before)


def train(
    make: Any,
    seed: int,
    num_steps: int,
    data: pl.LightningDataModule | None = None,
    clip: float = 0.5,
    weights: Path | None = None,
    make_model: Any = ByteLanguageModel,
    **model_options: Any,
) -> dict[str, Any]:
    """Train once on this rank, with all others; return the curve, and how good the model is on what it has not seen.

    Args:
        weights: to begin with, if there are any; else the final ones are written there.
        make_model: makes the model.
        **model_options: of the model.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    pl.seed_everything(seed, workers=True, verbose=False)
    curve = Curve()
    trainer = pl.Trainer(
        strategy=make(),
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_steps=num_steps,
        gradient_clip_val=clip,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=num_steps + 1,  # after the fit only
        callbacks=[curve],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = make_model(**model_options), data or StdlibText()
    if weights is not None and weights.exists():
        model.load_state_dict(torch.load(weights))
    trainer.fit(model, data)
    torch.distributed.barrier()  # what the other ranks still send
    sent_bytes = read_sent_bytes(INTERFACE) - curve.sent_before
    if weights is not None and not weights.exists() and trainer.is_global_zero:
        torch.save(model.state_dict(), weights)
    workers = getattr(trainer.strategy, "workers", [])
    when = workers[0].method.when if workers else None
    num_averages = [getattr(worker, "num_averages", None) for worker in workers]
    accuracy = trainer.test(model, data, verbose=False)[0]["test_acc"]
    return {
        "seed": seed,
        "test_accuracy": accuracy,
        "val_loss": trainer.validate(model, data, verbose=False)[0]["val_loss"],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sent_bytes": [*curve.sent_bytes, sent_bytes],
        "num_averages": num_averages[0] if num_averages else None,
        "schedule": as_plain(when) if isinstance(when, EveryStep) else None,
        "seconds": [round(value, 4) for value in curve.seconds],
        "losses": [round(value, 5) for value in curve.losses],
    }


def train_all(tasks: list[str], seeds: list[int], methods: list[str], path: Path) -> None:
    """One rank: train each task with each seed and method in turn; rank 0 writes the rows."""
    torch.set_num_threads(1)  # of each rank its core
    rows = []
    for task, seed, method in itertools.product(tasks, seeds, methods):
        make_model, make_data, num_steps = TASKS[task]
        run = train(METHODS[method], seed, num_steps, make_data(), make_model=make_model)
        kept = {key: run[key] for key in ("seed", "test_accuracy", "val_loss")}
        kept["final_loss"] = smooth(run["losses"])[-1]
        kept["sent_bytes_per_step"] = run["sent_bytes"][-1] / num_steps
        rows.append({"task": task, "method": method, **kept})
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(rows))
    torch.distributed.barrier()


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table; differences are from DDP with the same seed: the mean, and the least and the largest."""
    lines = [
        "| task | steps | method | seeds | kB sent per step | final loss | validation loss | to DDP | test accuracy "
        "| to DDP, points |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task, method in itertools.product(TASKS, METHODS):
        of_task = [row for row in rows if row["task"] == task]
        dense = {row["seed"]: row for row in of_task if row["method"] == "ddp"}
        mine = [row for row in of_task if row["method"] == method]
        if not mine:
            continue
        loss = [100 * (row["val_loss"] / dense[row["seed"]]["val_loss"] - 1) for row in mine]
        points = [100 * (row["test_accuracy"] - dense[row["seed"]]["test_accuracy"]) for row in mine]
        cells = [
            task,
            str(TASKS[task][2]),
            method,
            str(len(mine)),
            f"{statistics.mean(row['sent_bytes_per_step'] for row in mine) / 1000:,.1f}",
            f"{statistics.mean(row['final_loss'] for row in mine):.4f}",
            f"{statistics.mean(row['val_loss'] for row in mine):.4f}",
            f"{statistics.mean(loss):+.2f} % ({min(loss):+.2f} to {max(loss):+.2f})",
            f"{statistics.mean(row['test_accuracy'] for row in mine):.2%}",
            f"{statistics.mean(points):+.2f} ({min(points):+.2f} to {max(points):+.2f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def note(results: dict[str, Any]) -> str:
    """Return what the table is about."""
    return (
        "2 ranks, the same steps (`benchmarks/quantized_accuracy.py`, torch "
        f"{results['environment']['torch']}); digits with SGD and momentum where no other optimizer is named, text "
        "with AdamW; in brackets the least and the largest difference of a seed.\n\n"
    )


def measure(tasks: list[str], seeds: list[int], methods: list[str]) -> None:
    """Start the ranks, keep what there is of other tasks, seeds and methods, and write the results."""
    result = RESULTS / "quantized_accuracy.json"
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    command = [__file__, "--tasks", *tasks, "--only-seeds", *map(str, seeds), "--methods", *methods, "--rank-output"]
    rows = [row for row in rows if row["task"] not in tasks or row["seed"] not in seeds or row["method"] not in methods]
    rows += run_in_lab([None] * 2, command, timeout_s=3600.0)
    results = {"environment": describe_environment(), "command": shlex.join(sys.argv), "rows": rows}
    result.write_text(json.dumps(results, indent=1) + "\n")
    result.with_suffix(".md").write_text(note(results) + to_markdown(rows))
    print(to_markdown(rows))


def smooth(losses: list[float], num_steps: int = SMOOTHING) -> list[float]:
    """Return the running mean."""
    return torch.tensor(losses).unfold(0, num_steps, 1).mean(1).tolist()


def main() -> None:
    """Start the ranks in the lab, then write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--only-seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="ddp is one of them")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)  # in the ranks
    options = parser.parse_args()
    if options.rank_output is not None:
        train_all(options.tasks, options.only_seeds, options.methods, options.rank_output)
    else:
        measure(options.tasks, options.only_seeds, options.methods)


if __name__ == "__main__":
    main()
