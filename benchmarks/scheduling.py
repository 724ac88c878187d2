"""Seconds per step with gloo on CPUs, under Linux's default scheduling policy and under SCHED_BATCH (`chrt --batch 0`).

    python benchmarks/scheduling.py         # two nodes of the lab, a core each; four minutes

gloo has a thread per process that receives. When a message arrives this thread is woken up, and the default policy lets
it interrupt the thread that computes or sends, on a node that has one core for each rank. If that one was just sending,
it holds a lock which the first needs, and which it polls until its share of the time is used up. Under SCHED_BATCH who
is woken up waits for its turn.

Policies and strategies take turns, there and back, in the same two processes. Writes benchmarks/results/scheduling.json
with the environment, and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.beside_ddp.tasks import NUM_RANKS, be_quiet
from benchmarks.beside_ddp.wall_clock import time_steps, timed_strategy
from benchmarks.harness import RESULTS, describe_environment, run_in_lab

TASKS = {"digits": 40, "resnet": 40, "text": 20, "mlp-25M": 4}  # and how many steps are timed in a round
STRATEGIES = {"ddp": "ddp", "dgc 99.9 %": "0.001"}  # as `timed_strategy` knows them
POLICIES = {"default": "SCHED_OTHER", "batch": "SCHED_BATCH"}  # names in `os`, on Linux
RATE, LINK = 1e9, "1gbit"
NUM_ROUNDS = 6

Row = dict[str, Any]


def set_policy(name: str) -> None:
    """Set the scheduling policy of all threads of this process, gloo's too; of those to come as well."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), getattr(os, name), os.sched_param(0))


def time_task(task: str, num_steps: int) -> list[Row]:
    """Return a row for each strategy: its seconds per step, by policy and round. On each rank."""
    rows = [Row(task=task, strategy=name, seconds={policy: [] for policy in POLICIES}) for name in STRATEGIES]
    turns = [(row, policy) for row in rows for policy in POLICIES]
    for number in range(NUM_ROUNDS):
        for row, policy in turns if number % 2 == 0 else reversed(turns):
            set_policy(POLICIES[policy])
            steps = time_steps(task, timed_strategy(STRATEGIES[row["strategy"]]), num_steps)
            row["seconds"][policy].append(statistics.median(steps))
    return rows


def run_rank(path: Path) -> None:
    """Time all tasks on this rank; rank 0 writes."""
    be_quiet()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    rows = [row for task, num_steps in TASKS.items() for row in time_task(task, num_steps)]
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def table(results: Row) -> str:
    """Return the rows as a table, with the environment."""
    lines = [
        f"| model, {LINK} | strategy | s per step, default | batch | default / batch | by round |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        default, batch = (row["seconds"][policy] for policy in POLICIES)
        ratios = [one / other for one, other in zip(default, batch, strict=True)]
        middle = [statistics.median(each) for each in (default, batch)]
        lines.append(
            f"| {row['task']} | {row['strategy']} | {middle[0]:.4f} | {middle[1]:.4f} | {middle[0] / middle[1]:.2f} | "
            f"{min(ratios):.2f} - {max(ratios):.2f} |"
        )
    told = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    note = f"Medians of {NUM_ROUNDS} rounds in turn; a core for each of {NUM_RANKS} nodes. {told}."
    return "\n".join([*lines, "", note, ""])


def main() -> None:
    """Measure in the lab, and write."""
    if sys.argv[1:2] == ["rank"]:
        run_rank(Path(sys.argv[2]))
        return
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = run_in_lab([RATE] * NUM_RANKS, [__file__, "rank"], timeout_s=1200.0)
    results = {"rows": rows, "environment": describe_environment(link=None)}
    (RESULTS / "scheduling.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    (RESULTS / "scheduling.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
