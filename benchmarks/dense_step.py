"""What a step costs where `lowbw` has chosen DDP, beside the same step of `DDPStrategy`: wall clock and processor time.

    python benchmarks/dense_step.py                   # two nodes in the lab, a core each; a few minutes
    python benchmarks/dense_step.py --links unlimited --models resnet-0.3M

In each pair `ddp` trains, then `lowbw`, then `ddp` once more, each a fit of its own, in one process on each rank; the
next pair goes the other way around. `ddp` beside itself is the noise. Of ten parts of a fit the fastest counts. The
processor time is that of the whole process, with gloo's threads; it hardly depends on what else the machine does.
Writes benchmarks/results/dense_step.json with the environment, and a table. The exit status is 1 if `lowbw` has chosen
anything but DDP.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

import lightning_lowbw as lowbw
from benchmarks.beside_ddp.tasks import Row, be_quiet, make_trainer
from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from benchmarks.models import Timed, Workload, loader, small_resnet
from lightning_lowbw.strategies.auto_choice import NUM_STEPS
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.zoo import ByteLanguageModel

NUM_NODES, NUM_PAIRS, NUM_TIMED = 2, 5, 200
NUM_OF_PART = 20  # in which there is a message of signals, which comes once in 16 steps
NUM_UNTIMED = NUM_STEPS + 33  # the choice is made, and two of Lightning's signals have been asked for
LINKS: dict[str, tuple[str | None, float]] = {"unlimited": (None, 0.0), "1 Gb/s, 0.5 ms": ("1gbit", 0.5)}
MODELS = {
    workload.name: workload
    for workload in (
        Workload("resnet-0.3M", small_resnet, 16, (1, 8, 8), 10),
        Workload("transformer-0.7M", ByteLanguageModel, 8, (64,), 256, is_text=True, optimizer="adamw"),
    )
}


def choose_ddp() -> Any:
    """Return `lowbw` with a budget that a dense exchange keeps, also while other work slows the machine."""
    return lowbw.AutoStrategy(budget=1.0)


STRATEGIES: dict[str, Callable[[], Any]] = {"ddp": DDPStrategy, "lowbw": choose_ddp, "ddp again": DDPStrategy}


class Window(pl.Callback):
    """Take both clocks of parts of a window of steps; the least of each counts, to which other work has added least."""

    def __init__(self) -> None:
        self.clocks: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        done = trainer.global_step - NUM_UNTIMED
        if done == 0:
            dist.barrier()
        if done >= 0 and done % NUM_OF_PART == 0:
            self.clocks.append((time.perf_counter(), time.process_time()))

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of a step, by both clocks."""
        return [
            min(1e3 * (after - before) / NUM_OF_PART for before, after in pairwise(clock))
            for clock in zip(*self.clocks, strict=True)
        ]


def measure(workload: Workload, name: str) -> Row:
    """Train once on this rank; return milliseconds per step by both clocks, the means of the ranks."""
    gc.collect()
    window, strategy, data = Window(), STRATEGIES[name](), loader(workload, NUM_UNTIMED + NUM_TIMED)
    make_trainer(strategy, NUM_UNTIMED + NUM_TIMED, window, data, NUM_NODES).fit(Timed(workload), data)
    chosen = strategy.fit.auto.chosen if isinstance(strategy, lowbw.AutoStrategy) else None
    of_ranks: list[Any] = [None] * NUM_NODES
    dist.all_gather_object(of_ranks, window.step_ms)
    wall_ms, processor_ms = (statistics.fmean(each) for each in zip(*of_ranks, strict=True))
    return {"wall_ms": wall_ms, "processor_ms": processor_ms, "chosen": chosen and chosen.name}


def measure_rank(job: Row, path: Path) -> None:
    """One rank: train in turn what the job says; rank 0 writes the rows."""
    be_quiet()
    torch.set_num_threads(1)
    workload, rows = MODELS[job["model"]], []
    for pair in range(job["pairs"]):
        for name in list(STRATEGIES)[:: 1 if pair % 2 == 0 else -1]:
            row = {"pair": pair, "strategy": name, **measure(workload, name)}
            rows.append({"model": job["model"], "link": job["link"], **row})
            if os.environ["RANK"] == "0":
                path.write_text(json.dumps(rows))
    dist.barrier()


def to_markdown(rows: list[Row], environment: Row) -> str:
    """Return the table: ratios of each pair, their median and range."""
    lines = ["| model | link | ddp, ms | | lowbw / ddp | ddp again / ddp |", "| --- " * 6 + "|"]
    for model, link in product(MODELS, LINKS):
        of_cell = [row for row in rows if (row["model"], row["link"]) == (model, link)]
        for clock in ("wall", "processor") if of_cell else ():
            pairs = [
                {row["strategy"]: row[f"{clock}_ms"] for row in of_cell if row["pair"] == pair}
                for pair in sorted({row["pair"] for row in of_cell})
            ]
            ratios = [[each[name] / each["ddp"] for each in pairs] for name in list(STRATEGIES)[1:]]
            shown = [f"{statistics.median(r):.3f} ({min(r):.3f} to {max(r):.3f})" for r in ratios]
            ddp_ms = statistics.median(each["ddp"] for each in pairs)
            lines.append(f"| {model} | {link} | {ddp_ms:.2f} | {clock} | {shown[0]} | {shown[1]} |")
    note = (
        f"Milliseconds of a step, the least of parts of {NUM_OF_PART} steps, and ratios: median (range) of {NUM_PAIRS} "
        f"pairs of {NUM_TIMED} steps, where `lowbw` "
        f"has chosen DDP. {NUM_NODES} nodes on one machine ({environment['cpu']}, a core each), torch "
        f"{environment['torch']}, {environment['date']}. Wall clock, and processor time of the process."
    )
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    """Measure, and write what there is after each cell."""
    if sys.argv[1:2] == ["--rank"]:
        measure_rank(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    parser.add_argument("--name", default="dense_step", help="of the results")
    options = parser.parse_args()
    path, environment, rows = RESULTS / f"{options.name}.json", describe_environment(), list[Row]()
    for model, link in product(options.models, options.links):
        rate, rtt_ms = LINKS[link]
        rates = [None if rate is None else parse_rate(rate)] * NUM_NODES
        job = {"model": model, "link": link, "pairs": options.pairs}
        rows += run_in_lab(rates, [__file__, "--rank"], job=job, what=f"{model}, {link}", rtt_ms=rtt_ms)
        path.write_text(json.dumps({"environment": environment, "rows": rows}) + "\n")
        path.with_suffix(".md").write_text(to_markdown(rows, environment))
    print(path.with_suffix(".md").read_text())
    if not all(row["chosen"] in (None, "ddp") for row in rows):
        raise SystemExit("lowbw has chosen another method: these are not the same steps.")


if __name__ == "__main__":
    main()
