"""What a rank that is slow now and then costs: DDP waits for it in every step, local SGD at averages only.

    .venv/bin/python benchmarks/straggler.py

Each rank sleeps 0.2 s in a tenth of its steps, each in others. Writes benchmarks/results/straggler.json and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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

from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from lightning_lowbw import LocalSGDStrategy
from lightning_lowbw.tools.zoo import DigitsClassifier, DigitsData

NUM_STEPS = 200
SLEEP_S, SHARE = 0.2, 0.1
METHODS: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "local_sgd, k = 8": lambda: LocalSGDStrategy(8),
    "local_sgd, k = 32": lambda: LocalSGDStrategy(32),
}


class Sleep(pl.Callback):
    """Sleep in steps of this rank's own, and time the fit."""

    def __init__(self, seed: int, rank: int) -> None:
        self.random = random.Random(1000 * seed + rank)
        self.slept_s = 0.0

    def on_train_start(self, *_: Any) -> None:
        self.started_s = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        if self.random.random() < SHARE:
            self.slept_s += SLEEP_S
            time.sleep(SLEEP_S)

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.started_s


def measure_all(repetitions: int, path: Path) -> None:
    """One rank: all methods in turn; rank 0 writes the rows."""
    warnings.simplefilter("ignore")
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows = []
    for seed in range(repetitions):
        for method, make in METHODS.items():
            pl.seed_everything(seed, verbose=False)
            sleep = Sleep(seed, rank)
            trainer = pl.Trainer(
                strategy=make(),
                accelerator="cpu",
                devices=1,
                num_nodes=num_ranks,
                max_steps=NUM_STEPS,
                max_epochs=-1,
                limit_val_batches=0,
                callbacks=[sleep],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(DigitsClassifier(), DigitsData(batch_size=16))
            slept: list[Any] = [None] * num_ranks
            torch.distributed.all_gather_object(slept, sleep.slept_s)
            rows.append({"method": method, "seed": seed, "seconds": sleep.seconds, "longest_sleep_s": max(slept)})
    if rank == 0:
        path.write_text(json.dumps(rows))
    torch.distributed.barrier()


def to_markdown(rows: list[dict[str, Any]], num_nodes: int) -> str:
    """Return the table: medians over repetitions."""
    lines = [
        f"{num_nodes} ranks, {NUM_STEPS} steps, each rank asleep for {SLEEP_S} s in a tenth of its steps.",
        "",
        "| method | s | s beyond the sleep of the rank that slept longest |",
        "| --- | --- | --- |",
    ]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        seconds = statistics.median(row["seconds"] for row in mine)
        beyond = statistics.median(row["seconds"] - row["longest_sleep_s"] for row in mine)
        lines.append(f"| {method} | {seconds:.2f} | {beyond:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Start the ranks in the lab, then write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)  # in the ranks
    options = parser.parse_args()
    if options.rank_output is not None:
        measure_all(options.repetitions, options.rank_output)
        return
    command = [__file__, "--repetitions", str(options.repetitions), "--rank-output"]
    rows = run_in_lab([None] * options.nodes, command)
    results = {
        "environment": describe_environment(),
        "command": shlex.join(sys.argv),
        "nodes": options.nodes,
        "rows": rows,
    }
    (RESULTS / "straggler.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "straggler.md").write_text(to_markdown(rows, options.nodes))
    print(to_markdown(rows, options.nodes))


if __name__ == "__main__":
    main()
