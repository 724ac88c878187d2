"""Throughput and accuracy of local SGD on a slow link: the table of PaddlePaddle Fleet, in kind.

    .venv/bin/python benchmarks/local_sgd.py

Trains the byte-level language model on the source of the standard library with k = 1, 2, 4, 8, 16, an adaptive k and
SlowMo at k = 16, for the same number of steps and several seeds. Writes benchmarks/results/local_sgd.json and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from benchmarks.quantized_accuracy import train
from lightning_lowbw import AdaptiveLocalSGDStrategy, LocalSGDStrategy
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.zoo import StdlibText

NUM_STEPS = 600
UNTIMED_STEPS = 50
MODEL: dict[str, Any] = {"schedule": "one_cycle"}
METHODS: dict[str, Any] = {
    **{f"k = {k}": lambda k=k: LocalSGDStrategy(k) for k in (1, 2, 4, 8, 16)},
    "adaptive": lambda: AdaptiveLocalSGDStrategy(),
    "k = 16, SlowMo": lambda: LocalSGDStrategy(16, outer="slowmo"),
}
# PaddlePaddle Fleet: ResNet-50, ImageNet, 4 nodes of 8 V100, images per second and top-1.
SEED: dict[str, tuple[float, float]] = {
    "k = 1": (8270.91, 0.7579),
    "k = 2": (8715.67, 0.7533),
    "k = 4": (8762.66, 0.7551),
    "k = 8": (9184.62, 0.7511),
    "k = 16": (9431.46, 0.7429),
    "adaptive": (8945.74, 0.7555),
}


def train_all(seeds: list[int], path: Path) -> None:
    """One rank: all methods of each seed in turn; rank 0 writes the rows."""
    rows = []
    batch = StdlibText().hparams["batch_size"] * int(os.environ["WORLD_SIZE"])
    for seed in seeds:
        for method, make in METHODS.items():
            run = train(make, seed, NUM_STEPS, **MODEL)
            seconds = (run["seconds"][-1] - run["seconds"][UNTIMED_STEPS - 1]) / (NUM_STEPS - UNTIMED_STEPS)
            rows.append(
                {
                    "method": method,
                    "seed": seed,
                    "samples_per_s": batch / seconds,
                    "test_accuracy": run["test_accuracy"],
                    "final_loss": statistics.mean(run["losses"][-20:]),
                    "num_averages": run["num_averages"],
                }
            )
            if os.environ["RANK"] == "0":
                path.write_text(json.dumps(rows))
    torch.distributed.barrier()


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table, beside the figures of the seed system."""
    lines = [
        "| method | averages | samples per s | x k = 1 | there | test accuracy | against k = 1 | there |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = [row for row in rows if row["method"] == "k = 1"]
    base_speed = statistics.median(row["samples_per_s"] for row in base)
    base_accuracy = statistics.mean(row["test_accuracy"] for row in base)
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        speed = statistics.median(row["samples_per_s"] for row in mine)
        accuracies = [row["test_accuracy"] for row in mine]
        there = SEED.get(method)
        spread = f"{min(accuracies):.2%} - {max(accuracies):.2%}"
        cells = [
            method,
            f"{statistics.mean(row['num_averages'] for row in mine):.0f}",
            f"{speed:.1f}",
            f"{speed / base_speed:.3f}",
            f"{there[0] / SEED['k = 1'][0]:.3f}" if there else "-",
            f"{statistics.mean(accuracies):.2%} ({spread})",
            f"{100 * (statistics.mean(accuracies) - base_accuracy):+.2f}",
            f"{100 * (there[1] - SEED['k = 1'][1]):+.2f}" if there else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def note(results: dict[str, Any]) -> str:
    """Return what the table is about."""
    num_seeds = len({row["seed"] for row in results["rows"]})
    return (
        f"2 nodes at {results['rate']}, byte-level transformer on Python's own source, {NUM_STEPS} steps, {num_seeds} "
        f'seeds (`benchmarks/local_sgd.py`, torch {results["environment"]["torch"]}); "there": ResNet-50 on ImageNet, '
        "4 nodes of 8 V100, in the documentation of PaddlePaddle Fleet.\n\n"
    )


def main() -> None:
    """Start the ranks in the lab, then write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--resume", action="store_true", help="keep the seeds that are in the result already")
    parser.add_argument("--rank-output", type=Path, help=argparse.SUPPRESS)  # in the ranks
    options = parser.parse_args()
    if options.rank_output is not None:
        train_all(options.seeds, options.rank_output)
        return
    command = [__file__, "--seeds", *map(str, options.seeds), "--rank-output"]
    rows = run_in_lab([parse_rate(options.rate)] * options.nodes, command)
    result = RESULTS / "local_sgd.json"
    if options.resume and result.exists():
        rows = [row for row in json.loads(result.read_text())["rows"] if row["seed"] not in options.seeds] + rows
    results = {
        "environment": describe_environment(),
        "command": shlex.join(sys.argv),
        "rate": options.rate,
        "rows": rows,
    }
    result.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "local_sgd.md").write_text(note(results) + to_markdown(rows))
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
