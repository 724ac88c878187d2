"""What is won in time: seconds per step in the lab, of each density that a run goes through."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch.distributed as dist

from benchmarks.beside_ddp.tasks import (
    CHOSEN_AFTER,
    COMMON,
    LINKS,
    NUM_RANKS,
    STEPS,
    TIMED_TASKS,
    Curve,
    Row,
    be_quiet,
    data_of,
    is_same,
    make_trainer,
    this_environment,
    write,
)
from benchmarks.harness import run_in_lab
from lightning_lowbw import DGC, DGCStrategy, EveryStep
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.comm.link import Link
from lightning_lowbw.cost_model import DENSITIES, Candidate, Measured, Run, choose, why_dense
from lightning_lowbw.strategies import auto_choice
from lightning_lowbw.strategies.auto_choice import NUM_UNTIMED, OF_AUTO

WINDOW_S, LEAST_STEPS, MOST_STEPS, UNTIMED_STEPS = 4.0, 3, 20, 3  # of one measurement in the lab
NUM_ROUNDS = 8  # of measurements in turn, where a step is short enough for `MOST_STEPS`
DDP_KEY, DENSE_KEY = "ddp", "1.0"  # of what is timed; the others are densities, too
SCRIPT = str(Path(__file__).parents[1] / "auto.py")


def measure_wall_clock(options: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Measure each task on each link in a lab of its own; what has been measured stays."""
    number = this_environment(results)
    for task in options.timed_tasks:
        for link in options.links:
            same = [each for each in results["wall_clock"] if is_same(each, task=task, link=link)]
            job = {"task": task, "link": link, "steps": options.steps, "environment": number}
            job["record"] = same[0] if same else None
            rate = 8 * LINKS[link].bandwidth_bytes_per_s
            command = [SCRIPT, "timed-rank"]
            record = run_in_lab([rate] * NUM_RANKS, command, job=job, what=f"{task}, {link}", timeout_s=600.0)
            results["wall_clock"] = [each for each in results["wall_clock"] if each not in same] + [record]
            print(f"{task}, {link}: {planned(record, max(options.steps))[1]}", flush=True)
            write(results, path)


def time_all(job: Row, path: Path) -> None:
    """One rank: time ddp, what auto does until it has chosen, and each density that a run goes through."""
    be_quiet()
    dist.init_process_group("gloo")
    task, link, record = job["task"], LINKS[job["link"]], job["record"]
    model = TIMED_TASKS[task].make_model()
    nbytes = all_reduce_bytes(4 * sum(parameter.numel() for parameter in model.parameters()), NUM_RANKS)
    missing = missing_in(record, job["steps"]) if record else []
    if not record or (missing and record["environment"] != job["environment"]):  # no row is of two machines
        record = {"task": task, "link": job["link"], "environment": job["environment"], "timed": {}}
        record |= choose_for_real(task)
        missing = missing_in(record, job["steps"])
    for number in range(NUM_ROUNDS):  # in turn, there and back: a slow moment of the machine is no method's own
        for name in missing if number % 2 == 0 else reversed(missing):
            num_steps = num_timed_steps(nbytes, 1.0 if name == DDP_KEY else float(name), link)
            if number == 0 or num_steps == MOST_STEPS:
                seconds = time_steps(task, timed_strategy(name), num_steps)
                record["timed"].setdefault(name, []).append(seconds)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


def missing_in(record: Row, all_steps: Sequence[int]) -> list[str]:
    """Return what has not been timed yet of what runs of these lengths go through."""
    wanted = {1.0: 0, 0.001: 0}
    for num_steps in all_steps:
        wanted |= densities_of(planned(record, num_steps)[0], num_steps)
    return [name for name in (DDP_KEY, *map(str, sorted(wanted))) if name not in record["timed"]]


def num_timed_steps(dense_bytes: int, density: float, link: Link) -> int:
    """Return how many steps to time: as many as fit the window."""
    share = 1.0 if density == 1.0 else min(1.0, 0.7 * density)
    seconds = 0.1 + share * dense_bytes / link.bandwidth_bytes_per_s
    return min(MOST_STEPS, max(LEAST_STEPS, int(WINDOW_S / seconds)))


def time_steps(task: str, strategy: Any, num_steps: int) -> list[float]:
    """Train a fresh model for a few steps; return the seconds of each that is timed."""
    pl.seed_everything(0, verbose=False)  # the replicas are not made equal
    curve, data = Curve(), data_of(task)
    total = UNTIMED_STEPS + num_steps
    make_trainer(strategy, total, curve, data, NUM_RANKS).fit(TIMED_TASKS[task].make_model(), data)
    gc.collect()  # a Trainer refers to itself: without this some dozen models of 25M parameters stay in memory
    return [round(seconds, 5) for seconds in curve.step_s[-num_steps:]]


def timed_strategy(name: str) -> Any:
    """Return the strategy whose steps are timed under this name."""
    if name == DDP_KEY:
        from benchmarks.contestants import DDP

        return DDP.make()
    # As auto itself has it for so short a run.
    return DGCStrategy(sparsity="auto" if name == DENSE_KEY else [1.0 - float(name)], **COMMON)


def choose_for_real(task: str) -> Row:
    """Train until auto has chosen; return what it has measured, and what deciding took."""
    pl.seed_everything(0, verbose=False)
    curve, data = Curve(stop_after=CHOSEN_AFTER), data_of(task)
    found: Row = {}

    def choosing(measured: Measured, run: Run, *others: Any) -> tuple[Candidate, str]:
        found.update(measured=as_numbers(measured), is_adam=run.is_adam)
        return choose(measured, run, *others)

    strategy = DGCStrategy(sparsity="auto", **COMMON)
    # For runs of all lengths it has to measure, whether or not one of this length does.
    with (
        mock.patch.object(auto_choice, "choose", choosing),
        mock.patch.object(auto_choice, "why_dense", return_value=None),
    ):
        make_trainer(strategy, max(STEPS), curve, data, NUM_RANKS).fit(TIMED_TASKS[task].make_model(), data)
    dense_s = curve.step_s[NUM_UNTIMED - 1 : -1]
    decide_s = max(0.0, curve.step_s[-1] - statistics.median(dense_s))
    return {**found, "decide_s": decide_s}


def as_numbers(measured: Measured) -> Row:
    """Return what has been measured as plain values."""
    times = {"step_s": measured.step_s, "dense_s": measured.dense_s, "link": asdict(measured.link)}
    return {**times, "sparse_s": [measured.exchange_s[density] for density in DENSITIES]}


def planned(record: Row, num_steps: int) -> tuple[EveryStep | None, str, bool]:
    """Return what auto chooses for a run of this many steps from what it has measured; why; and whether it measures."""
    kept = record["measured"]
    sparse_s = dict(zip(DENSITIES, kept["sparse_s"], strict=True))
    measured = Measured(kept["step_s"], kept["dense_s"], sparse_s, Link(**kept["link"]))
    run = Run(num_done=CHOSEN_AFTER, num_steps=num_steps, is_adam=record.get("is_adam", False))
    if reason := why_dense(measured, run, EveryStep().budget):
        return None, reason, False
    found, reason = choose(measured, run, DGC(sparsity="auto"), OF_AUTO, {})
    when = found.method.when
    return when if found.name == "dgc" and isinstance(when, EveryStep) else None, reason, True


def densities_of(when: EveryStep | None, num_steps: int) -> dict[float, int]:
    """Return the steps of a run at each density."""
    counts: dict[float, int] = {}
    for step in range(num_steps):
        density = 1.0 if when is None else round(when.density(step), 6)
        counts[density] = counts.get(density, 0) + 1
    return counts


def step_s_of(record: Row, name: str, number: int | None = None) -> float:
    """Return the seconds of a step: the median of what has been timed, in all rounds or in one of them."""
    rounds = record["timed"][name]
    chosen = rounds if number is None else [rounds[min(number, len(rounds) - 1)]]
    return statistics.median(seconds for of_round in chosen for seconds in of_round)


def seconds_of_run(record: Row, method: str, num_steps: int, number: int | None = None) -> float | None:
    """Return the seconds of a run, by what its steps take, in all rounds or in one of them; None where one of its
    densities has not been measured."""
    if method != "auto":
        return num_steps * step_s_of(record, DDP_KEY if method == "ddp" else "0.001", number)
    step_s = {float(name): step_s_of(record, name, number) for name in record["timed"] if name != DDP_KEY}
    when, _, measures = planned(record, num_steps)
    counts = densities_of(when, num_steps)
    if counts.keys() - step_s.keys():
        return None
    return measures * record["decide_s"] + sum(count * step_s[density] for density, count in counts.items())


def ratios_of(record: Row, num_steps: int) -> list[float]:
    """Return the seconds of a run of ddp in units of those of auto, of each round."""
    pairs = (
        [seconds_of_run(record, method, num_steps, number) for method in ("ddp", "auto")]
        for number in range(len(record["timed"][DDP_KEY]))
    )
    return [ddp_s / auto_s for ddp_s, auto_s in pairs if ddp_s is not None and auto_s is not None]


def sorted_records(results: dict[str, Any]) -> list[Row]:
    """Return what has been timed, in the order of tasks and links."""
    tasks, links = list(TIMED_TASKS), list(LINKS)
    return sorted(results["wall_clock"], key=lambda each: (tasks.index(each["task"]), links.index(each["link"])))
