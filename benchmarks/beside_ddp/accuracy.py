"""What is lost in accuracy: training on two ranks on loopback, with schedules that are chosen from nominal values."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy

from benchmarks.beside_ddp.tasks import (
    CHOSEN_AFTER,
    LINKS,
    NUM_RANKS,
    TASKS,
    Curve,
    Row,
    be_quiet,
    data_of,
    is_same,
    make_trainer,
    this_environment,
    write,
)
from benchmarks.harness import as_plain
from lightning_lowbw import DGCStrategy, Method
from lightning_lowbw import cost_model as rule
from lightning_lowbw.comm.collectives import all_reduce_bytes, all_reduce_rounds
from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.comm.link import Link
from lightning_lowbw.cost_model import DENSITIES, Measured
from lightning_lowbw.payloads.params import MOST_NUMEL, small_numel
from lightning_lowbw.payloads.payload import Shapes
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.strategies import auto_choice
from lightning_lowbw.strategies.auto_choice import SAMPLE, SMALL, time_exchange

FIXED = {"rampup_begin_step": 0, "rampup_step": 1, "sparsity": [0.999]}
METHODS = ("ddp", "dgc 99.9 %", "auto")
CONTROL = "ddp, perturbed"  # the first parameter by a millionth: how much runs differ by rounding alone
PERTURBATION = 1e-6
VARIANTS: dict[str, dict[str, Any]] = {  # arguments of DGCStrategy
    "dgc 99.9 %": {"sparsity": FIXED["sparsity"]},
    "auto": {"sparsity": "auto"},
}
SMOOTHING = 20  # steps of the training loss at the end
NUM_NOMINAL_STEPS = 60  # of which the fastest is a task's step, whatever else runs on the machine
SCRIPT = str(Path(__file__).parents[1] / "auto.py")


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
    start_on_loopback([sys.executable, SCRIPT, "rank", json.dumps(job), str(path)])


def constants_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the constants of `cost_model` that are asked for.

    Raises:
        SystemExit: there is none of this name.
    """
    constants = {name: float(value) for name, _, value in (each.partition("=") for each in options.constant)}
    if unknown := [name for name in constants if not hasattr(rule, name)]:
        raise SystemExit(f"cost_model.py has no {', '.join(unknown)}.")
    return constants


def measure_nominal(nominal: dict[str, Any], tasks: Sequence[str]) -> None:
    """Measure what is not there yet: seconds of a task's step on one thread.

    In place:
        `nominal`.
    """
    torch.set_num_threads(1)
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
    step_s, (small_s, sent_s) = nominal["step_s"][task], nominal["exchange_s"][task]
    numels = [each.numel() for each in TASKS[task].make_model().parameters() if each.requires_grad]

    def time_s(rounds: int, nbytes: float) -> float:
        return rounds * link.latency_s + nbytes / link.bandwidth_bytes_per_s

    def dense_s(numel: int) -> float:
        return time_s(all_reduce_rounds(NUM_RANKS), all_reduce_bytes(4 * numel, NUM_RANKS))

    def measure(given: Any, _: Any, shapes: tuple[Shapes, Shapes], *__: Any) -> Measured:
        sparse, others = ([math.prod(shape) for shape in each] for each in shapes)
        fixed_s = small_s + dense_s(sum(others))
        work_s = {density: fixed_s + sent_s * density * sum(sparse) for density in DENSITIES}
        sending_s = {density: time_s(1, given.what.at(density).nbytes(sparse)) for density in DENSITIES}
        exchange_s: dict[float | str, float] = {density: work_s[density] + sending_s[density] for density in DENSITIES}
        return Measured(step_s, step_s + dense_s(sum(sparse) + sum(others)), exchange_s, link)

    timed = Measured(step_s, step_s + dense_s(sum(numels)), {}, link)
    with (
        mock.patch.object(auto_choice, "medians", return_value=timed),
        mock.patch.object(auto_choice, "measure", measure),
        mock.patch.object(auto_choice, "rank_zero_info", said.append),
    ):
        yield said


def schedule_of(strategy: Any) -> Row | None:
    """Return the schedule that a strategy has come to have as plain values; None where all steps are dense."""
    method = strategy.method if isinstance(strategy, DGCStrategy) else Method()
    return as_plain(method.when) if method.compresses_gradients else None


def small_numel_of(task: str) -> int:
    """Return the elements below which a tensor of a task's model is sent whole."""
    if task == "gpt2":
        return MOST_NUMEL  # known, so that a report needs no transformers; checked where it is trained
    return small_numel(each.numel() for each in TASKS[task].make_model().parameters())


@cache
def payload_of(method: str, task: str) -> Row:
    """Return what a method sends, except defaults: a row with another payload is no row of this method."""
    if method not in VARIANTS:
        return {}
    least = small_numel_of(task)
    what = DGCStrategy(**VARIANTS[method]).method.what
    assert isinstance(what, TopK)
    default = asdict(TopK())
    payload = {name: value for name, value in asdict(what).items() if value != default[name]}
    return payload if least == MOST_NUMEL else {**payload, "small_numel": least}  # rows from before are of `MOST_NUMEL`


def train(job: Row, nominal: dict[str, Any], stop_after: int | None = None) -> Row:
    """Train on this rank, with all others; return what has been chosen and how good the model is.

    Args:
        job: task, steps, seed, method and link.
        nominal: of `measure_nominal`.
        stop_after: end after this many steps, without an evaluation.
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
        if task not in nominal.setdefault("exchange_s", {}):
            nominal["exchange_s"][task] = seconds_of_exchanges(task)
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


def seconds_of_exchanges(task: str) -> list[float]:
    """Return what a sparse exchange computes for the tensors of a task, and for each element that is sent."""
    sizes = [*[SMALL] * len(list(TASKS[task].make_model().parameters())), SAMPLE]
    least, most = DENSITIES[0], DENSITIES[-1]
    methods = [Method(what=TopK(min_numel=SMALL, density=density)) for density in (least, most)]
    few_s, many_s = (time_exchange(each, sizes, echo(NUM_RANKS), torch.device("cpu")) for each in methods)
    found = torch.tensor([few_s, max(0.0, many_s - few_s) / SAMPLE**2 / (most - least)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return list(found.tolist())


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
