"""A link whose rate changes during training: what `DGCStrategy(sparsity="auto")` sends before and after, in the lab.

    python benchmarks/link_change.py        # two nodes, a core each; five minutes

One fit, of a model of 25M parameters whose weights count as trained, so that there is no warm-up. The rate of both
links falls during the run, and rises again. Of each step there is the clock, and what was sent. Writes
benchmarks/results/link_change.json with the environment, a table, and a block of docs/methods/dgc_measured.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from benchmarks.beside_ddp.tasks import COMMON, MODEL_25M, NUM_RANKS, TIMED_TASKS, be_quiet
from benchmarks.harness import RESULTS, describe_environment, replace_block, run_in_lab
from benchmarks.models import WORKLOADS, loader
from lightning_lowbw import DGCStrategy
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.strategies import auto_sparsity

NUM_STEPS = 50_000  # as the run counts them: the density depends on it; it ends earlier
STEPS_PER_EPOCH = 100
FAST, SLOW = 1e9, 2e7  # bit/s
SLOW_AT_S, FAST_AT_S, END_S = 40.0, 170.0, 280.0  # after the start of the ranks
LEAST_STEPS = 5  # in a row of the table

Row = dict[str, Any]


class Steps(pl.Callback):
    """Keep the clock, the density and the bytes of each step; stop when the time is over."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, DGCStrategy)
        worker, now_s = strategy.workers[0], time.time()
        assert isinstance(worker, GradientWorker)
        self.rows.append({"at_s": now_s, "density": worker.last_density, "sent_bytes": strategy.ledger.sent_bytes})
        if trainer.global_step % 10 == 0:
            is_over = torch.tensor(float(now_s > process_start_s() + END_S))
            dist.broadcast(is_over, 0)
            trainer.should_stop = bool(is_over)


def process_start_s() -> float:
    """Return when this process was started, with which the changes of the link are timed; Linux."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def run_rank(path: Path) -> None:
    """Train; rank 0 writes."""
    be_quiet()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    pl.seed_everything(0, verbose=False)
    steps, said = Steps(), list[Row]()
    trainer = pl.Trainer(
        strategy=DGCStrategy(sparsity="auto", pretrained=True, **COMMON),
        accelerator="cpu",
        devices=1,
        num_nodes=NUM_RANKS,
        max_epochs=NUM_STEPS // STEPS_PER_EPOCH,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    tell = mock.patch.object(
        auto_sparsity, "rank_zero_info", lambda line: said.append({"at_s": time.time(), "line": line})
    )
    with tell:
        trainer.fit(TIMED_TASKS[MODEL_25M].make_model(), loader(WORKLOADS[MODEL_25M], STEPS_PER_EPOCH))
    if dist.get_rank() == 0:
        path.write_text(json.dumps({"started_s": process_start_s(), "steps": steps.rows, "said": said}))
    dist.barrier()
    dist.destroy_process_group()


def rate_at(seconds: float) -> float:
    """Return the rate of the links so long after the start, bit/s."""
    return SLOW if SLOW_AT_S <= seconds < FAST_AT_S else FAST


def stretches(results: Row) -> list[Row]:
    """Return the pieces of the run in which neither the link nor what is sent changes."""
    rows: list[Row] = []
    for before, after in pairwise(results["steps"]):
        since_s = after["at_s"] - results["started_s"]
        if rate_at(since_s) != rate_at(before["at_s"] - results["started_s"]):
            continue  # partly on each
        of = {"rate": rate_at(since_s), "density": after["density"]}
        if not rows or any(rows[-1][name] != value for name, value in of.items()):
            rows.append({**of, "from_s": before["at_s"] - results["started_s"], "seconds": [], "sent": []})
        rows[-1]["seconds"].append(after["at_s"] - before["at_s"])
        rows[-1]["sent"].append(after["sent_bytes"] - before["sent_bytes"])
    return [row for row in rows if len(row["seconds"]) >= LEAST_STEPS]


def table(results: Row) -> str:
    """Return the stretches as a table, with the lines that rank 0 has logged and the environment."""
    lines = [
        "| from second | link, Mb/s | sent of each gradient | steps | ms per step | MB sent per step and rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in stretches(results):
        sent = "all" if row["density"] == 1.0 else f"{100 * row['density']:.2g} %"
        lines.append(
            f"| {row['from_s']:.0f} | {row['rate'] * 1e-6:,.0f} | {sent} | {len(row['seconds'])} | "
            f"{1e3 * statistics.median(row['seconds']):.0f} | {statistics.median(row['sent']) * 1e-6:.2f} |"
        )
    lines += ["", "Logged by rank 0:", ""]
    for each in results["said"]:
        lines.append(f"- after {each['at_s'] - results['started_s']:.0f} s: {each['line']}")
    told = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    note = f"{MODEL_25M}, {NUM_RANKS} nodes, a core each; medians. {told}."
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    """Measure in the lab, and write."""
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]))
        return
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    changes = [(SLOW_AT_S, SLOW), (FAST_AT_S, FAST)]
    measured = run_in_lab([FAST] * NUM_RANKS, [__file__, "rank"], changes=changes, timeout_s=END_S + 120.0)
    results = {**measured, "environment": describe_environment(link=None)}
    text = table(results)
    (RESULTS / "link_change.json").write_text(json.dumps(results) + "\n")
    (RESULTS / "link_change.md").write_text(text)
    print(text)
    replace_block("docs/methods/dgc_measured.md", "link_change", text)


if __name__ == "__main__":
    main()
