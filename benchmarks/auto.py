"""`DGCStrategy(sparsity="auto")` beside ddp and dgc at a fixed 99.9 %: what is lost in accuracy, what is won in time.

    .venv/bin/python benchmarks/auto.py accuracy                     # hours on two cores; goes on where it was stopped
    .venv/bin/python benchmarks/auto.py accuracy --tasks digits --steps 100 --links 1gbit --seeds 0
    .venv/bin/python benchmarks/auto.py accuracy --constant LEAST_TIMES_SENT=100    # another rule; shares what is there
    .venv/bin/python benchmarks/auto.py wall-clock                   # in the lab; a quarter of an hour
    .venv/bin/python benchmarks/auto.py report                       # table and plot of what there is

accuracy: two ranks on loopback, a thread each. The link acts on accuracy through the schedule alone, so nothing is
throttled: the schedule is chosen by the package from nominal values, the same on every machine but for the seconds of
computation, which are measured once and kept. Nominal is the link, 0.1 ms of latency, and that a dense step takes
computation and all-reduce one after the other. Links for which the same schedule is chosen share their runs.

wall-clock: two nodes in the lab, a core each, real links and real measuring. Seconds per step are measured of each
density that a run goes through; seconds of a run are computed from them and the schedule.

The GPT-2 cell needs `transformers`. Writes benchmarks/results/auto.json, .md and .png, the tables into
docs/methods/dgc_measured.md, and a summary into the method card.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import os
import socket
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from benchmarks.harness import RESULTS, as_plain, describe_environment, in_words, replace_block, run_in_lab
from benchmarks.models import GPT2, WORKLOADS, Scored, Timed, loader, small_resnet
from lightning_lowbw import DGCStrategy, EveryStep
from lightning_lowbw.engine import auto as rule
from lightning_lowbw.engine import measuring
from lightning_lowbw.engine.auto import DENSITIES, Measured, Run, plan, why_dense
from lightning_lowbw.engine.measuring import seconds_of_work
from lightning_lowbw.strategies import auto_sparsity
from lightning_lowbw.strategies.exclusions import numels_of
from lightning_lowbw.strategies.step_times import NUM_STEPS, NUM_UNTIMED, StepTimes
from lightning_lowbw.what.top_k import MOST_NUMEL, TopK, small_numel
from lightning_lowbw.where.flat_peers import FlatPeers
from lightning_lowbw.where.link import Link
from lightning_lowbw.where.volume import all_reduce_bytes, all_reduce_rounds
from lightning_lowbw.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

NUM_RANKS = 2
CHOSEN_AFTER = NUM_STEPS
STEPS = (100, 800, 5000)
LATENCY_S = 1e-4
LINKS = {name: Link(LATENCY_S, gbit * 1e9 / 8) for name, gbit in (("100mbit", 0.1), ("1gbit", 1.0), ("10gbit", 10.0))}
FIXED = {"rampup_begin_step": 0, "rampup_step": 1, "sparsity": [0.999]}
METHODS = ("ddp", "dgc 99.9 %", "auto")
LATER_SEEDS = 10  # the first of those that were added to judge the others by
CONTROL = "ddp, perturbed"  # the first parameter by a millionth: how much runs differ that are equal but for rounding
PERTURBATION = 1e-6
VARIANTS: dict[str, dict[str, Any]] = {  # arguments of DGCStrategy
    "dgc 99.9 %": {"sparsity": FIXED["sparsity"]},
    "auto": {"sparsity": "auto"},
    "auto, momentum cut": {"sparsity": "auto", "keep_momentum": False},  # as in steps that send less
}
NUM_WORK_SAMPLES = 8  # of which the fastest counts, as of steps
SMOOTHING = 20  # steps of the training loss at the end
NUM_NOMINAL_STEPS = 60  # of which the fastest is a task's step, whatever else runs on the machine
COMMON: dict[str, Any] = {"init_sync": False, "broadcast_buffers": False}  # as in contestants.py
WINDOW_S, LEAST_STEPS, MOST_STEPS, UNTIMED_STEPS = 4.0, 3, 20, 3  # of one measurement in the lab
NUM_ROUNDS = 8  # of measurements in turn, where a step is short enough for `MOST_STEPS`
NUM_SEEDS = 5  # of most rows
LEAST_GROUPS = 4  # of so many seeds, to be judged one by one
CLEARLY = 2.0  # standard errors by which a run takes longer than another
DDP_KEY, DENSE_KEY = "ddp", "1.0"  # of what is timed; the others are densities, too
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


def make_trainer(strategy: Any, num_steps: int, callback: pl.Callback, data: Any, num_ranks: int) -> pl.Trainer:
    """Return a Trainer that does nothing but train."""
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
        val_check_interval=num_steps + 1,  # after the fit only
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


# Accuracy -----------------------------------------------------------------------------------------------------------


def measure_nominal(nominal: dict[str, Any], tasks: Sequence[str]) -> None:
    """Measure what is not there yet: seconds of a task's step on one thread, and of selecting, by density.

    In place:
        `nominal`.
    """
    torch.set_num_threads(1)
    if len(nominal.get("work_s", ())) != len(DENSITIES):
        what = DGCStrategy(sparsity="auto").method.what
        assert isinstance(what, TopK)
        cpu = torch.device("cpu")
        samples = [[seconds_of_work(what, each, NUM_RANKS, cpu) for each in DENSITIES] for _ in range(NUM_WORK_SAMPLES)]
        nominal["work_s"] = [min(of_density) for of_density in zip(*samples, strict=True)]
    for task in tasks:
        if task not in nominal.setdefault("step_s", {}):
            curve, data = Curve(), data_of(task)
            alone = SingleDeviceStrategy(torch.device("cpu"))
            make_trainer(alone, NUM_NOMINAL_STEPS, curve, data, 1).fit(TASKS[task].make_model(), data)
            nominal["step_s"][task] = min(curve.step_s)


@contextlib.contextmanager
def nominal_values(nominal: dict[str, Any], task: str, link: Link) -> Iterator[list[str]]:
    """Let auto measure nominal values: the clock, the link and the work are given, all else is the package's own."""
    said: list[str] = []
    work_s = dict(zip(DENSITIES, nominal["work_s"], strict=True))

    def timed(times: StepTimes) -> tuple[float, float]:
        sparse, others = numels_of(times._strategy)
        step_s, nbytes = nominal["step_s"][task], 4 * (sum(sparse) + sum(others))
        return step_s, step_s + link.time_s(all_reduce_rounds(NUM_RANKS), all_reduce_bytes(nbytes, NUM_RANKS))

    with (
        mock.patch.object(StepTimes, "medians", timed),
        mock.patch.object(measuring, "measure_link", return_value=link),
        mock.patch.object(measuring, "seconds_of_work", lambda _, density, *__: work_s[density]),
        mock.patch.object(measuring, "seconds_of_small_tensors", return_value=nominal["small_s"][task]),
        mock.patch.object(auto_sparsity, "rank_zero_info", said.append),
    ):
        yield said


def schedule_of(strategy: Any) -> Row | None:
    """Return the schedule that a strategy has come to have as plain values; None where all steps are dense."""
    when = strategy.method.when if isinstance(strategy, DGCStrategy) else EveryStep(sparsity="auto")
    return as_plain(when)


def small_numel_of(task: str) -> int:
    """Return the elements below which a tensor of a task's model is sent whole."""
    if task == "gpt2":
        return MOST_NUMEL  # known, so that a report needs no transformers; checked where it is trained
    return small_numel(each.numel() for each in TASKS[task].make_model().parameters())


@cache
def payload_of(method: str, task: str) -> Row:
    """Return what a method sends, but for defaults: a row with another payload is no row of this method."""
    if method not in VARIANTS:
        return {}
    least = small_numel_of(task)
    what = DGCStrategy(**VARIANTS[method]).method.what
    assert isinstance(what, TopK)
    if VARIANTS[method].get("sparsity") == "auto" and what.keep_momentum is None:
        what = replace(what, keep_momentum=True)  # as auto does with what it chooses
    default = asdict(TopK())
    payload = {name: value for name, value in asdict(what).items() if value != default[name]}
    return payload if least == MOST_NUMEL else {**payload, "small_numel": least}  # rows from before are of `MOST_NUMEL`


def train(job: Row, nominal: dict[str, Any], stop_after: int | None = None) -> Row:
    """Train on this rank, with all others; return what has been chosen and how good the model is.

    Args:
        job: task, steps, seed, method and link.
        nominal: of `measure_nominal`.
        stop_after: end after so many steps, without an evaluation.
    """
    pl.seed_everything(job["seed"], workers=True, verbose=False)
    curve, data = Curve(stop_after), data_of(job["task"])
    model = TASKS[job["task"]].make_model()
    if job["method"] == CONTROL:
        with torch.no_grad():
            next(model.parameters()).mul_(1.0 + PERTURBATION)
    strategy = DGCStrategy(**VARIANTS[job["method"]]) if job["method"] in VARIANTS else "ddp"
    trainer = make_trainer(strategy, job["steps"], curve, data, NUM_RANKS)
    started_s = time.perf_counter()
    with nominal_values(nominal, job["task"], LINKS[job["link"]]) as said:
        trainer.fit(model, data)
    row = {
        "schedule": schedule_of(trainer.strategy),
        "payload": payload_of(job["method"], job["task"]),
        "sentence": "".join(said),
    }
    if stop_after is not None:
        return row
    seconds = time.perf_counter() - started_s
    final = torch.tensor(curve.losses[-SMOOTHING:], dtype=torch.float64).mean() / NUM_RANKS
    dist.all_reduce(final)
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    return {
        **row,
        "train_loss": float(final),
        "val_loss": trainer.validate(model, data, verbose=False)[0]["val_loss"],
        "test_accuracy": trainer.test(model, data, verbose=False)[0]["test_acc"],
        "weights": digest.hexdigest()[:16],
        "seconds": round(seconds, 2),
    }


def is_same(row: Row, **fields: Any) -> bool:
    """Return whether a row has these values."""
    return all(row.get(name) == value for name, value in fields.items())


def train_all(job: Row, path: Path) -> None:
    """One rank: choose for each link, then train what is missing; rank 0 writes after each run."""
    be_quiet()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for name, value in job["constants"].items():
        setattr(rule, name, value)
    results = json.loads(path.read_text())
    nominal, constants = results["nominal"], job["constants"]
    dist.init_process_group("gloo")
    for task in job["tasks"]:
        if task not in nominal.setdefault("small_s", {}):
            nominal["small_s"][task] = seconds_of_tensors(task)
    for num_steps in job["steps"]:
        for task in job["tasks"]:
            cell = {"task": task, "steps": num_steps}
            chosen = choose_for(cell, job["links"], nominal)
            kept = [
                each
                for each in results["choices"]
                if not (is_same(each, **cell, constants=constants) and each["link"] in job["links"])
            ]
            results["choices"] = [*kept, *({**cell, "constants": constants, **each} for each in chosen)]
            for seed in job["seeds"]:
                for wanted in wanted_runs(task, chosen, job["methods"], is_first=seed == job["seeds"][0]):
                    if not any(is_same(row, **cell, seed=seed, **wanted["key"]) for row in results["rows"]):
                        run = {**cell, "seed": seed, "method": wanted["key"]["method"], "link": wanted["link"]}
                        row = {**run, **train(run, nominal), "environment": job["environment"]}
                        if constants:
                            row["constants"] = constants
                        assert is_same(row, **wanted["key"]), (row, wanted)
                        results["rows"].append(row)
                        if os.environ["RANK"] == "0":
                            print({key: value for key, value in row.items() if key != "sentence"}, flush=True)
                            write(results, path)
    if os.environ["RANK"] == "0":
        write(results, path)
    dist.barrier()
    dist.destroy_process_group()


def seconds_of_tensors(task: str) -> float:
    """Return what the exchange of a sparse step takes for the tensors of a task, however little is sent."""
    what = TopK()
    numels = {name: each.numel() for name, each in TASKS[task].make_model().named_parameters()}
    least = small_numel(numels.values())
    assert least == small_numel_of(task)
    are_sparse = [what.takes(name, numel, least) for name, numel in numels.items()]
    samples = []
    for _ in range(NUM_WORK_SAMPLES):
        counts = sum(are_sparse), len(are_sparse) - sum(are_sparse)
        samples.append(measuring.seconds_of_small_tensors(what, FlatPeers(), torch.device("cpu"), *counts))
    least = torch.tensor(min(samples), dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MAX)
    return float(least)


def choose_for(cell: Row, links: Sequence[str], nominal: dict[str, Any]) -> list[Row]:
    """Return what auto chooses on each link; takes the dense steps before it."""
    chosen = []
    for link in links:
        run = {**cell, "seed": 0, "method": "auto", "link": link}
        chosen.append({"link": link, **train(run, nominal, stop_after=CHOSEN_AFTER + 1)})
    return chosen


def wanted_runs(task: str, chosen: list[Row], methods: Sequence[str], is_first: bool) -> list[Row]:
    """Return the runs of a seed: what tells each from the others, and a link on which it is.

    Where auto stays dense it is ddp, to the bit: checked with the first seed.
    """
    fixed, runs = {"ddp": None, CONTROL: None, "dgc 99.9 %": FIXED}, list[Row]()
    for method in methods:
        for each in chosen:
            schedule = fixed.get(method, each["schedule"])
            key = {"method": method, "schedule": schedule, "payload": payload_of(method, task)}
            is_wanted = method in fixed or schedule is not None or (is_first and method == "auto")
            if is_wanted and all(run["key"] != key for run in runs):
                runs.append({"key": key, "link": each["link"]})
    return runs


def write(results: dict[str, Any], path: Path) -> None:
    """Write the results, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


def this_environment(results: dict[str, Any]) -> int:
    """Return the number of this environment among those of the results, and add it if it is new."""
    environment = {name: each for name, each in describe_environment(link=None).items() if name != "date"}
    if environment not in results["environments"]:
        results["environments"].append(environment)
    return int(results["environments"].index(environment))


def start_on_loopback(command: Sequence[str]) -> None:
    """Start a command once per rank, with the environment that torchrun would give; if one fails, end the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": NUM_RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": NUM_RANKS}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"TORCHELASTIC_RUN_ID": "auto"}
    ranks = []
    try:
        for rank in range(NUM_RANKS):
            own = {**common, "RANK": rank, "GROUP_RANK": rank, "NODE_RANK": rank}
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            ranks.append(subprocess.Popen(command, env=environment))
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.2)
        if any(rank.poll() for rank in ranks):
            raise SystemExit("A rank failed.")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()  # a Trainer only notes that it is asked to end
            rank.wait()


def measure_accuracy(options: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Measure what is nominal, then start the ranks."""
    be_quiet()
    tasks = [task for task in options.tasks if task != "gpt2" or importlib.util.find_spec("transformers")]
    if tasks != options.tasks:
        print("gpt2 is left out: there is no transformers.", flush=True)
    measure_nominal(results["nominal"], tasks)
    write(results, path)
    job = {"tasks": tasks, "steps": options.steps, "links": options.links, "seeds": options.seeds}
    job |= {"methods": options.methods, "constants": constants_of(options), "environment": this_environment(results)}
    write(results, path)
    start_on_loopback([sys.executable, __file__, "rank", json.dumps(job), str(path)])


def constants_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the constants of `engine.auto` that are asked for.

    Raises:
        SystemExit: there is none of this name.
    """
    constants = {name: float(value) for name, _, value in (each.partition("=") for each in options.constant)}
    if unknown := [name for name in constants if not hasattr(rule, name)]:
        raise SystemExit(f"engine/auto.py has no {', '.join(unknown)}.")
    return constants


# Wall-clock ---------------------------------------------------------------------------------------------------------


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
    return [round(seconds, 5) for seconds in curve.step_s[-num_steps:]]


def choose_for_real(task: str) -> Row:
    """Train until auto has chosen; return what it has measured, and what deciding took."""
    pl.seed_everything(0, verbose=False)
    curve, data = Curve(stop_after=CHOSEN_AFTER), data_of(task)
    found: Row = {}

    def planning(measured: Measured, run: Run, budget: float) -> tuple[EveryStep | None, str]:
        found.update(measured=as_numbers(measured), steps_per_epoch=run.steps_per_epoch, is_adam=run.is_adam)
        return plan(measured, run, budget)

    strategy = DGCStrategy(sparsity="auto", **COMMON)
    # For runs of all lengths it has to measure, whether or not one of this length does.
    with (
        mock.patch.object(auto_sparsity, "plan", planning),
        mock.patch.object(auto_sparsity, "why_dense", return_value=None),
    ):
        make_trainer(strategy, max(STEPS), curve, data, NUM_RANKS).fit(TIMED_TASKS[task].make_model(), data)
    dense_s = curve.step_s[NUM_UNTIMED - 1 : -1]
    decide_s = max(0.0, curve.step_s[-1] - statistics.median(dense_s))
    return {**found, "decide_s": decide_s}


def as_numbers(measured: Measured) -> Row:
    """Return what has been measured as plain values."""
    return {**asdict(measured), "sparse_s": list(measured.sparse_s.values())}


def planned(record: Row, num_steps: int) -> tuple[EveryStep | None, str, bool]:
    """Return what auto chooses for a run of so many steps from what it has measured; why; and whether it measures."""
    kept = record["measured"]
    sparse_s = dict(zip(DENSITIES, kept["sparse_s"], strict=True))
    measured = Measured(kept["step_s"], kept["dense_s"], sparse_s, Link(**kept["link"]))
    lengths = {name: record[name] for name in ("steps_per_epoch", "is_adam") if name in record}
    run = Run(num_done=CHOSEN_AFTER, num_steps=num_steps, **lengths)
    reason = why_dense(measured.step_s, measured.dense_s, run, EveryStep().budget)
    return (*plan(measured, run, EveryStep().budget), True) if reason is None else (None, reason, False)


def densities_of(when: EveryStep | None, num_steps: int) -> dict[float, int]:
    """Return the steps of a run at each density."""
    counts: dict[float, int] = {}
    for step in range(num_steps):
        density = 1.0 if when is None else round(when.density(step), 6)
        counts[density] = counts.get(density, 0) + 1
    return counts


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


def timed_strategy(name: str) -> Any:
    """Return the strategy whose steps are timed under this name."""
    if name == DDP_KEY:
        from benchmarks.contestants import DDP

        return DDP.make()
    # As auto itself has it for so short a run.
    return DGCStrategy(sparsity="auto" if name == DENSE_KEY else [1.0 - float(name)], **COMMON)


def step_s_of(record: Row, name: str, number: int | None = None) -> float:
    """Return the seconds of a step: the median of what has been timed, in all rounds or in one of them."""
    rounds = record["timed"][name]
    chosen = rounds if number is None else [rounds[min(number, len(rounds) - 1)]]
    return statistics.median(seconds for of_round in chosen for seconds in of_round)


def measure_wall_clock(options: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Measure each task on each link in a lab of its own; what has been measured stays."""
    number = this_environment(results)
    for task in options.timed_tasks:
        for link in options.links:
            same = [each for each in results["wall_clock"] if is_same(each, task=task, link=link)]
            job = {"task": task, "link": link, "steps": options.steps, "environment": number}
            job["record"] = same[0] if same else None
            rate = 8 * LINKS[link].bandwidth_bytes_per_s
            command = [__file__, "timed-rank"]
            record = run_in_lab([rate] * NUM_RANKS, command, job=job, what=f"{task}, {link}", timeout_s=600.0)
            results["wall_clock"] = [each for each in results["wall_clock"] if each not in same] + [record]
            print(f"{task}, {link}: {planned(record, max(options.steps))[1]}", flush=True)
            write(results, path)


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


# Report -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of the difference to ddp with the same seed, and its standard error.

    Attributes:
        mean: positive is worse.
        error: the standard deviation of the differences, divided by the root of their number; NaN for one seed.
    """

    mean: float
    error: float

    @property
    def in_errors(self) -> float:
        """The mean in standard errors; 0 where no run differs."""
        return self.mean / self.error if self.error else 0.0

    @property
    def verdict(self) -> str:
        """Whether this is within one standard error."""
        if math.isnan(self.error):
            return "one seed"
        return "within" if abs(self.in_errors) <= 1 else "worse" if self.mean > 0 else "better"


@dataclass(frozen=True)
class Cell:
    """A task, a length and a schedule of auto, on all links for which it is chosen: rows of each method by seed."""

    task: str
    steps: int
    links: tuple[str, ...]
    schedule: Row | None
    rows: dict[str, dict[int, Row]]

    @property
    def seeds(self) -> list[int]:
        """Those with which ddp and what is compared with it have been trained; dgc 99.9 % may have fewer."""
        of_methods = [set(rows) for method, rows in self.rows.items() if rows and method != "dgc 99.9 %"]
        return sorted(set.intersection(*of_methods)) if of_methods else []

    def values(self, method: str, key: str) -> list[float]:
        """Return the values of a method by seed; none if it has not been trained."""
        return [self.rows[method][seed][key] for seed in self.seeds if seed in self.rows[method]]

    def of_seeds(self, seeds: Sequence[int]) -> Cell:
        """Return the same with these seeds only."""
        rows = {name: {each: of[each] for each in seeds if each in of} for name, of in self.rows.items()}
        return replace(self, rows=rows)

    def difference(self, key: str, method: str = "auto") -> Difference:
        sign = -1.0 if key == "test_accuracy" else 1.0
        own, dense = self.rows[method], self.rows["ddp"]
        differences = [sign * (own[seed][key] - dense[seed][key]) for seed in self.seeds if seed in own]
        if not differences:
            return Difference(math.nan, math.nan)
        return Difference(statistics.mean(differences), error_of(differences))


def error_of(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def cells_of(results: dict[str, Any], constants: dict[str, float]) -> list[Cell]:
    """Return the cells for which there are rows of ddp and auto."""
    cells = []
    for task in TASKS:
        for num_steps in STEPS:
            same = [row for row in results["rows"] if is_same(row, task=task, steps=num_steps)]
            choices = [
                each for each in results["choices"] if is_same(each, task=task, steps=num_steps, constants=constants)
            ]
            choices.sort(key=lambda each: list(LINKS).index(each["link"]))
            schedules: list[Row | None] = []
            for each in choices:
                if each["schedule"] not in schedules:
                    schedules.append(each["schedule"])
            for schedule in schedules:
                links = tuple(each["link"] for each in choices if each["schedule"] == schedule)
                rows = {}
                for method, sent in (("ddp", None), ("dgc 99.9 %", FIXED), ("auto", schedule)):
                    name = "ddp" if sent is None else method  # to the bit
                    key = {"method": name, "schedule": sent, "payload": payload_of(name, task)}
                    rows[method] = {row["seed"]: row for row in same if is_same(row, **key)}
                cell = Cell(task, num_steps, links, schedule, rows)
                if rows["ddp"] and rows["auto"] and cell.seeds:
                    cells.append(cell)
    return cells


def accuracy_to_markdown(cells: list[Cell]) -> str:
    """Return the table of losses and accuracies."""
    lines = [
        "| task | steps | link | auto sends | seeds | validation loss of ddp | dgc 99.9 % | auto | auto - ddp "
        "| in SE | test accuracy of ddp, % | dgc 99.9 % | auto | ddp - auto, points | in SE | loss, accuracy |",
        "| --- |" + " --- |" * 15,
    ]
    for cell in cells:
        texts = [cell.task, f"{cell.steps:,}", ", ".join(cell.links), in_words(cell.schedule), str(len(cell.seeds))]
        verdicts = []
        for key, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
            for method in METHODS:
                values = [scale * value for value in cell.values(method, key)]
                texts.append(with_error(statistics.mean(values), error_of(values), form) if values else "-")
            difference = cell.difference(key)
            texts += told(difference, scale, form)
            verdicts.append("the same" if cell.schedule is None else difference.verdict)
        lines.append("| " + " | ".join([*texts, ", ".join(verdicts)]) + " |")
    return "\n".join(lines)


def variants_to_markdown(results: dict[str, Any], cells: list[Cell]) -> str:
    """Return the table of what else has been tried with auto's schedules; empty where nothing has."""
    lines = [
        "| task | steps | auto sends | variant | seeds | validation loss of ddp | above it | as auto does it | "
        "test accuracy of ddp, % | points below it | as auto does it |",
        "| --- |" + " --- |" * 10,
    ]
    for cell in cells:
        for variant in [name for name in VARIANTS if name not in METHODS]:
            key = {"task": cell.task, "steps": cell.steps, "schedule": cell.schedule, "method": variant}
            rows = {
                row["seed"]: row
                for row in results["rows"]
                if is_same(row, **key, payload=payload_of(variant, cell.task))
            }
            both = replace(cell, rows={**cell.rows, variant: rows})
            if not (rows and both.seeds):
                continue
            texts = [cell.task, f"{cell.steps:,}", in_words(cell.schedule), variant, str(len(both.seeds))]
            for name, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
                texts.append(f"{scale * statistics.mean(both.values('ddp', name)):{form}}")
                for each in (both.difference(name, variant), both.difference(name)):
                    texts.append(with_error(scale * each.mean, scale * each.error, "+" + form))
            lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def former_of(results: dict[str, Any], cells: list[Cell], *, are_trials: bool) -> list[Cell]:
    """Return cells with schedules that auto does not choose now, of two seeds at least.

    Args:
        results: with their runs.
        cells: what auto chooses.
        are_trials: whether these schedules are of constants that were given, or of former ones of the package.
    """
    found: list[Cell] = []
    for cell in {(cell.task, cell.steps): cell for cell in cells}.values():
        key = {"task": cell.task, "steps": cell.steps, "method": "auto", "payload": payload_of("auto", cell.task)}
        rows = [row for row in results["rows"] if is_same(row, **key) and row["schedule"] is not None]
        known = [each.schedule for each in cells if (each.task, each.steps) == (cell.task, cell.steps)]
        former: list[Row] = []
        for row in rows:
            if row["schedule"] not in [*known, *former]:
                former.append(row["schedule"])
        for schedule in former:
            of = {row["seed"]: row for row in rows if row["schedule"] == schedule}
            links = tuple(dict.fromkeys(row["link"] for row in of.values()))
            old = replace(cell, links=links, schedule=schedule, rows={"ddp": cell.rows["ddp"], "auto": of})
            is_trial = all(row.get("constants") for row in of.values())
            found += [old] * (len(old.seeds) > 1 and is_trial == are_trials)
    return found


def later_of(cells: list[Cell]) -> list[Cell]:
    """Return the sparse cells of many seeds, with those alone that were added to judge the others."""
    found = []
    for cell in cells:
        rows = {
            method: {seed: row for seed, row in cell.rows[method].items() if seed >= LATER_SEEDS}
            for method in ("ddp", "auto")
        }
        later = replace(cell, rows=rows)
        found += [later] * (cell.schedule is not None and len(later.seeds) > 1)
    return found


def differences_to_markdown(cells: list[Cell]) -> str:
    """Return a table of the differences alone; empty where there are none."""
    lines = [
        "| task | steps | link | auto sends | seeds | loss, auto - ddp | in SE "
        "| test accuracy, ddp - auto, points | in SE |",
        "| --- |" + " --- |" * 8,
    ]
    for cell in cells:
        texts = [cell.task, f"{cell.steps:,}", ", ".join(cell.links), in_words(cell.schedule), str(len(cell.seeds))]
        for name, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
            texts += told(cell.difference(name), scale, form)
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def beside_perturbed(results: dict[str, Any], cell: Cell) -> Cell:
    """Return the rows of ddp, and of ddp after a change of a millionth."""
    key = {"task": cell.task, "steps": cell.steps, "method": CONTROL}
    perturbed = {row["seed"]: row for row in results["rows"] if is_same(row, **key)}
    return replace(cell, rows={"ddp": cell.rows["ddp"], CONTROL: perturbed})


def groups_to_markdown(results: dict[str, Any], cells: list[Cell]) -> str:
    """Return the table of the comparison of `NUM_SEEDS` seeds, repeated with others; empty where there are too few."""
    lines = [
        f"| task | steps | link | beside ddp | groups of {NUM_SEEDS} seeds | loss within or better "
        "| test accuracy within or better |",
        "| --- |" + " --- |" * 6,
    ]
    for cell in cells:
        if cell.schedule is None:
            continue
        for method, both in (("auto", cell), (CONTROL, beside_perturbed(results, cell))):
            seeds = [seed for seed in both.seeds if seed in both.rows[method]]
            groups = [
                both.of_seeds(seeds[first : first + NUM_SEEDS])
                for first in range(0, len(seeds) - NUM_SEEDS + 1, NUM_SEEDS)
            ]
            if len(groups) >= LEAST_GROUPS:
                counts = [
                    str(sum(not is_beyond_ddp(group, key, method) for group in groups))
                    for key in ("val_loss", "test_accuracy")
                ]
                links = "-" if method == CONTROL else ", ".join(cell.links)
                texts = [cell.task, f"{cell.steps:,}", links, method, str(len(groups)), *counts]
                lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(dict.fromkeys(lines)) if len(lines) > 2 else ""


def control_to_markdown(results: dict[str, Any], cells: list[Cell]) -> str:
    """Return the table of what a change of a millionth makes of ddp; empty where that has not been trained."""
    worse = {"val_loss": 0, "test_accuracy": 0}
    lines = [
        "| task | steps | seeds | validation loss of ddp | perturbed - ddp | in SE | test accuracy of ddp, % "
        "| ddp - perturbed, points | in SE |",
        "| --- |" + " --- |" * 8,
    ]
    for task, num_steps in dict.fromkeys((cell.task, cell.steps) for cell in cells):
        cell = next(each for each in cells if (each.task, each.steps) == (task, num_steps))
        both = beside_perturbed(results, cell)
        if not (both.rows[CONTROL] and both.seeds):
            continue
        texts = [task, f"{num_steps:,}", str(len(both.seeds))]
        for name, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
            values, each = [scale * value for value in both.values("ddp", name)], both.difference(name, CONTROL)
            worse[name] += each.in_errors > 1.0
            texts.append(with_error(statistics.mean(values), error_of(values), form))
            texts += told(each, scale, form)
        lines.append("| " + " | ".join(texts) + " |")
    if len(lines) == 2:
        return ""
    return "\n".join(lines) + (
        f"\n\nSo ddp is worse than itself, by more than one standard error, in {worse['val_loss']} of these "
        f"{len(lines) - 2} rows in the loss, in {worse['test_accuracy']} in the accuracy."
    )


def told(difference: Difference, scale: float, form: str) -> list[str]:
    """Return a difference with its standard error, and how many of these it is; a dash for one seed."""
    in_errors = "-" if math.isnan(difference.error) else f"{difference.in_errors:+.1f}"
    return [with_error(scale * difference.mean, scale * difference.error, "+" + form), in_errors]


def with_error(mean: float, error: float, form: str) -> str:
    """Return "mean ± error", or the mean of one seed."""
    return f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form.lstrip('+')}}")


def fewer_seeds_of(cells: list[Cell]) -> str:
    """Return where dgc 99.9 % has been trained with fewer seeds than what the row compares."""
    told: dict[str, None] = {}
    for cell in cells:
        num_seeds = len(cell.values("dgc 99.9 %", "val_loss"))
        if 0 < num_seeds < len(cell.seeds):
            told[f"{cell.task}, {cell.steps:,} steps: dgc 99.9 % has {num_seeds} seeds. "] = None
    return "".join(told)


def summary_of(cells: list[Cell]) -> str:
    """Return in how many rows auto reaches the goal, and by how much it misses it in the others."""
    sparse = [cell for cell in cells if cell.schedule is not None and len(cell.seeds) > 1]
    parts = [f"In {sum(cell.schedule is None for cell in cells)} rows auto stays dense, in {len(sparse)} it does not."]
    for key, name in (("val_loss", "Validation loss"), ("test_accuracy", "Test accuracy")):
        found: dict[str, list[str]] = {"within": [], "better": [], "worse": []}
        for cell in sparse:
            difference, where = cell.difference(key), f"{cell.task} {cell.steps:,} ({', '.join(cell.links)})"
            found[difference.verdict].append(f"{where} by {abs(difference.in_errors):.1f} SE")
        worse = f": {'; '.join(found['worse'])}" if found["worse"] else ""
        within, better = len(found["within"]), len(found["better"])
        parts.append(
            f"{name} of these {len(sparse)}: within one standard error (SE) of ddp's in {within}, better in {better}, "
            f"worse in {len(found['worse'])}{worse}."
        )
    beyond = {key: sum(is_beyond_ddp(cell, key) for cell in sparse) for key in ("val_loss", "test_accuracy")}
    parts.append(
        "A row with more seeds has a smaller error. By more than the standard error that ddp's own mean has over "
        f"{NUM_SEEDS} seeds (its standard deviation / √{NUM_SEEDS}), auto is worse in {beyond['val_loss']} rows in the "
        f"loss, in {beyond['test_accuracy']} in the accuracy."
    )
    return " ".join(parts)


def is_beyond_ddp(cell: Cell, key: str, method: str = "auto") -> bool:
    """Whether a method is worse than ddp by more than the standard error that ddp's mean has over `NUM_SEEDS` seeds."""
    return cell.difference(key, method).mean > statistics.stdev(cell.values("ddp", key)) / math.sqrt(NUM_SEEDS)


def wall_clock_to_markdown(records: list[Row]) -> str:
    """Return the table of seconds per run."""
    lines = [
        "| task | link | steps | auto sends | ddp, s | dgc 99.9 %, s | auto, s | ddp / auto | by round |",
        "| --- |" + " --- |" * 8,
    ]
    for record in records:
        for num_steps in STEPS:
            seconds = [seconds_of_run(record, method, num_steps) for method in METHODS]
            texts = ["-" if each is None else f"{each:,.1f}" for each in seconds]
            ratio = f"{seconds[0] / seconds[2]:.2f}" if seconds[0] and seconds[2] else "-"
            ratios = ratios_of(record, num_steps)
            by_round = with_error(statistics.mean(ratios), error_of(ratios), ".2f") if len(ratios) > 1 else "-"
            chosen = in_words(as_plain(planned(record, num_steps)[0]))
            texts += [ratio, by_round]
            lines.append(f"| {record['task']} | {record['link']} | {num_steps:,} | {chosen} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", slower_in_words(records)])


def slower_in_words(records: list[Row]) -> str:
    """Return where auto takes clearly longer than ddp."""
    found = {}
    for record in records:
        for num_steps in STEPS:
            ratios = ratios_of(record, num_steps)
            name = f"{record['task']} {num_steps:,} ({record['link']})"
            found[name] = 1 - statistics.mean(ratios) if len(ratios) > 1 else 0.0, error_of(ratios)
    slower = [f"{name} by {100 * mean:.0f} %" for name, (mean, error) in found.items() if mean > CLEARLY * error]
    return (
        "By round: the mean of the ratios in each round, ± its standard error; - where there was one round. auto takes "
        f"longer than ddp by more than {CLEARLY:g} standard errors in {len(slower)} of {len(found)} rows"
        f"{': ' if slower else ''}{'; '.join(slower)}."
    )


def phases_to_markdown(records: list[Row]) -> str:
    """Return the table of seconds per step that runs are computed from."""
    lines = [
        "| task | link | computation, ms | ddp | auto, dense | auto, to decide | sparse, by density |",
        "| --- |" + " --- |" * 6,
    ]
    for record in records:
        ms = {name: 1e3 * step_s_of(record, name) for name in record["timed"]}
        sparse = sorted((float(name), each) for name, each in ms.items() if name not in (DDP_KEY, DENSE_KEY))
        shown = ", ".join(f"{100 * density:.4g} %: {each:.1f}" for density, each in sparse)
        lines.append(
            f"| {record['task']} | {record['link']} | {1e3 * record['measured']['step_s']:.1f} | {ms[DDP_KEY]:.1f} | "
            f"{ms[DENSE_KEY]:.1f} | {1e3 * record['decide_s']:.0f} | {shown} |"
        )
    lines += ["", noise_in_words(records)]
    return "\n".join(lines)


def noise_in_words(records: list[Row]) -> str:
    """Return by how much one strategy differs from itself, from round to round."""
    rounds = [[statistics.median(each) for each in record["timed"][DDP_KEY]] for record in records]
    spreads = sorted(100 * (max(each) / min(each) - 1) for each in rounds if len(each) > 1)
    if not spreads:
        return ""
    return (
        f"Medians over {len(max(rounds, key=len))} rounds in turn, where a step is short. Between rounds ddp's own "
        f"median differs by {statistics.median(spreads):.0f} % (median over these rows; at most {spreads[-1]:.0f} %)."
    )


def draw(cells: list[Cell], records: list[Row], path: Path) -> None:
    """Plot the differences to ddp with their standard errors, and the seconds of a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 3, figsize=(15, 1.6 + 0.34 * max(len(cells), 12)), layout="constrained", width_ratios=(1, 1, 1.1)
    )
    labels = [f"{cell.task}, {cell.steps:,}: {', '.join(cell.links)}" for cell in cells]
    for axis, key, scale, title in (
        (axes[0], "val_loss", 1.0, "validation loss above ddp's"),
        (axes[1], "test_accuracy", 100.0, "test accuracy below ddp's, points"),
    ):
        for number, method in enumerate(("auto", "dgc 99.9 %")):
            found = [cell.difference(key, method) for cell in cells]
            places = [place + 0.15 - 0.3 * number for place in range(len(cells))]
            axis.errorbar(
                [scale * each.mean for each in found],
                places,
                xerr=[scale * each.error for each in found],
                fmt="o",
                ms=4,
                capsize=2,
                label=method,
                color=f"C{number}",
            )
        axis.axvline(0.0, color="k", lw=0.8)
        axis.set_yticks(range(len(cells)), labels if axis is axes[0] else [""] * len(cells), fontsize=8)
        least = 0.01 if scale == 1.0 else 1.0  # linear below
        axis.set_xscale("symlog", linthresh=least)
        axis.set_xticks([sign * least * 10**power for power in (0, 1, 2) for sign in (-1, 1)] + [0])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        axis.set_title(f"{title}\n(mean and standard error over seeds; right is worse)", fontsize=9)
    axes[0].legend(fontsize=8)
    draw_wall_clock(axes[2], records)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_wall_clock(axis: Any, records: list[Row]) -> None:
    """Plot the seconds of a run of the 25M model."""
    places = []
    for record in (each for each in records if each["task"] == MODEL_25M):
        for num_steps in STEPS:
            place = len(places)
            places.append(f"{record['link']}, {num_steps:,}")
            for number, method in ((2, "ddp"), (1, "dgc 99.9 %"), (0, "auto")):
                if (seconds := seconds_of_run(record, method, num_steps)) is not None:
                    axis.plot(seconds, place, "o", color=f"C{number}", label=method if place == 0 else None)
    axis.set_yticks(range(len(places)), places, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"{MODEL_25M}: seconds of a run, by link and steps\n(computed from seconds per step)", fontsize=9)
    axis.grid(alpha=0.3, which="both")
    if places:
        axis.set_xscale("log")
        axis.legend(fontsize=8)
    else:
        axis.text(0.5, 0.5, "not measured yet", ha="center", transform=axis.transAxes)


def report(results: dict[str, Any], constants: dict[str, float]) -> str:
    """Return what goes into the card."""
    cells = cells_of(results, constants)
    parts = report_accuracy(results, cells) if cells else []
    if control := control_to_markdown(results, cells):
        parts += [
            "What chance does: ddp beside ddp whose first parameter is multiplied by 1 + "
            f"{PERTURBATION:g} at the start. Runs that differ by rounding alone diverge within some hundred steps. "
            f"{fewer_seeds_of(cells)}"
            "Of the first ten seeds of resnet and of text, 5,000 steps, five were added after auto was worse than ddp "
            "with the first five.",
            control,
        ]
    if groups := groups_to_markdown(results, cells):
        parts += [
            f"Rows with many seeds, judged as {NUM_SEEDS} seeds would judge them: in how many disjoint groups of "
            f"{NUM_SEEDS} seeds the mean is not worse than ddp's by more than the standard error of ddp's mean.",
            groups,
        ]
    if variants := variants_to_markdown(results, cells):
        parts += [
            "The same schedules with `keep_momentum=False`, velocities cleared at every density:",
            variants,
        ]
    if later := differences_to_markdown(later_of(cells)):
        parts += [f"Seeds from {LATER_SEEDS} on alone, which were added to judge the others by:", later]
    if constants:  # cells are what these choose
        return "\n\n".join(parts) + "\n"
    if former := differences_to_markdown(former_of(results, cells, are_trials=False)):
        parts += ["What auto chose before its rule was changed because of these runs:", former]
    if trials := differences_to_markdown(former_of(results, cells, are_trials=True)):
        parts += ["Other rules, which were tried and not taken (`--constant`):", trials]
    if results["wall_clock"]:
        records = sorted_records(results)
        parts += [
            "Wall-clock in the lab, 2 nodes, a core each. Seconds of a run are computed: steps at each density times "
            "the median seconds of such a step, below, and once what measuring and deciding takes, where it measures.",
            wall_clock_to_markdown(records),
            phases_to_markdown(records),
        ]
    for number, environment in enumerate(results["environments"]):
        num_runs = sum(is_same(row, environment=number) for row in results["rows"])
        timed = [each for each in sorted_records(results) if is_same(each, environment=number)]
        of = [f"{num_runs} runs of training"] * (num_runs > 0)
        of += ["the times of " + ", ".join(f"{each['task']} at {each['link']}" for each in timed)] * bool(timed)
        if of:
            told = ", ".join(f"{name} {value}" for name, value in environment.items())
            parts.append(f"Environment of {' and of '.join(of)}: {told}.")
    return "\n\n".join(parts) + "\n"


def sorted_records(results: dict[str, Any]) -> list[Row]:
    """Return what has been timed, in the order of tasks and links."""
    tasks, links = list(TIMED_TASKS), list(LINKS)
    return sorted(results["wall_clock"], key=lambda each: (tasks.index(each["task"]), links.index(each["link"])))


def report_accuracy(results: dict[str, Any], cells: list[Cell]) -> list[str]:
    """Return caption, table and summary."""
    names = {cell.task for cell in cells}
    tasks = "; ".join(f"{name}: {task.note}" for name, task in TASKS.items() if name in names)
    step_ms = ", ".join(f"{name} {1e3 * results['nominal']['step_s'][name]:.1f}" for name in TASKS if name in names)
    return [
        f"Accuracy at equal steps, {NUM_RANKS} ranks. {tasks}. Learning rate in one cycle, no clipping. Mean ± "
        "standard error (SE) over seeds. A difference is the mean over seeds of that between runs of one seed, ± its "
        "SE, positive where auto is worse; it is within one standard error where its mean is not larger than its SE. "
        f"What auto chooses is by a nominal link (latency {1e3 * LATENCY_S:g} ms) and the computation of a step, "
        f"measured once (ms: {step_ms}); links for which it chooses the same share their runs. Where it stays dense "
        f"the runs are ddp's: the weights were equal to the bit {check_dense(results['rows'])}.",
        accuracy_to_markdown(cells),
        summary_of(cells),
        "Two methods that are equal differ by more than one standard error over 5 seeds in 37 % of such rows "
        "(Student's t, 4 degrees of freedom).",
    ]


def check_dense(rows: list[Row]) -> str:
    """Return in words how many runs of auto that stayed dense end with the weights of ddp, and which do not."""
    dense = {(row["task"], row["steps"], row["seed"]): row for row in rows if row["method"] == "ddp"}
    checked = [(row, dense[row["task"], row["steps"], row["seed"]]) for row in rows if is_dense_auto(row)]
    others = [
        f"{own['task']}, {own['steps']:,} steps, seed {own['seed']} (validation loss {own['val_loss']:.4f} and "
        f"{ddp['val_loss']:.4f})"
        for own, ddp in checked
        if own["weights"] != ddp["weights"]
    ]
    exceptions = f"; not in {'; '.join(others)}" if others else ""
    return f"in {len(checked) - len(others)} of {len(checked)} runs that checked it{exceptions}"


def is_dense_auto(row: Row) -> bool:
    """Return whether a run is one of auto that stayed dense."""
    return is_same(row, method="auto", schedule=None)


def card_of(results: dict[str, Any]) -> str:
    """Return the summary in the method card."""
    cells = cells_of(results, {})
    parts = [
        f"`benchmarks/auto.py` trains {len(TASKS)} tasks on {NUM_RANKS} ranks with ddp and with auto, each for "
        f"{', '.join(f'{each:,}' for each in STEPS)} steps; rows are combinations of task, length and link. "
        f"{summary_of(cells)}",
    ]
    ratios: dict[str, list[float]] = {link: [] for link in LINKS}
    for record in sorted_records(results):
        for num_steps in STEPS:
            dense, own = (seconds_of_run(record, method, num_steps) for method in ("ddp", "auto"))
            if dense and own:
                ratios[record["link"]].append(dense / own)
    told = ", ".join(f"{min(of):.2f} to {max(of):.2f} at {link}" for link, of in ratios.items() if of)
    parts.append(f"Seconds of a run with ddp divided by those with auto, over tasks and lengths: {told}.")
    return (
        "\n\n".join(textwrap.fill(part, 125, break_long_words=False, break_on_hyphens=False) for part in parts) + "\n"
    )


def main() -> None:
    """Measure what is missing, then write table and plot."""
    if sys.argv[1:2] == ["rank"]:
        train_all(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1:2] == ["timed-rank"]:
        time_all(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["accuracy", "wall-clock", "report"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--timed-tasks", nargs="+", choices=TIMED_TASKS, default=list(TIMED_TASKS))
    parser.add_argument("--steps", nargs="+", type=int, choices=STEPS, default=list(STEPS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--methods", nargs="+", choices=["ddp", CONTROL, *VARIANTS], default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE", help="of engine/auto.py")
    parser.add_argument("--name", default="auto", help="of the results; the card is written for the default alone")
    options = parser.parse_args()
    path = RESULTS / f"{options.name}.json"
    results: dict[str, Any] = {"nominal": {}, "choices": [], "rows": [], "wall_clock": [], "environments": []}
    if path.exists():
        results = json.loads(path.read_text())
    if options.part != "report":
        measure_part = {"accuracy": measure_accuracy, "wall-clock": measure_wall_clock}[options.part]
        measure_part(options, results, path)
        results = json.loads(path.read_text())
    constants = constants_of(options)
    text = report(results, constants)
    print(text)
    if constants:
        return
    path.with_suffix(".md").write_text(text)
    draw(cells_of(results, {}), sorted_records(results), path.with_suffix(".png"))
    if options.name == "auto":
        image = f"![difference to ddp, and seconds](../../benchmarks/results/{options.name}.png)\n"
        replace_block("docs/methods/dgc_measured.md", "auto", f"{text}\n{image}")
        replace_block("docs/methods/dgc.md", "auto", card_of(results))


if __name__ == "__main__":
    main()
