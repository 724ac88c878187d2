"""The plan against the clock, at size: seconds of a step that `lowbw-plan` predicts, and that the lab measures.

    .venv/bin/python benchmarks/plan_clock.py              # two ranks, about 20 minutes on two quiet cores
    .venv/bin/python benchmarks/plan_clock.py --ranks 4    # two ranks on a core, ddp, int8 and dgc alone
    .venv/bin/python benchmarks/plan_clock.py --report     # the table of what there is

MLPs of 25M, 50M and 100M parameters with a batch of 4, one rank per node. The plan is given what a user can know: the
shapes, the seconds of a step that a process takes alone (all ranks at the same time, before and after), the rate, the
round trip as the latency (which a message of gloo takes), and what its help says of a core of a CPU, half of it if four
ranks share two cores. Three constants of the plan, for the work of dgc, of sparse_loco and of outer steps, were chosen
by the rows of two ranks, and the half of a core, and the work of each further message, after the rows of four were
seen. Writes benchmarks/results/plan_clock.json and .md after each row; rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

import lightning_lowbw as lowbw
from benchmarks.contestants import ALONE, COMMON, DDP, Contestant
from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from benchmarks.headline import LINKS
from benchmarks.models import Workload
from benchmarks.worker import measure
from lightning_lowbw import DGC, Method
from lightning_lowbw.cost_model import Cost, cost_of
from lightning_lowbw.presets import preset
from lightning_lowbw.strategies.base import SETTLE_S
from lightning_lowbw.tools.check import OF_CPU
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.plan import make_cluster

Row = dict[str, Any]
PATH = RESULTS / "plan_clock.json"
WIDTH, BATCH = 2048, 4
HIDDEN_LAYERS = {"mlp-25M": 5, "mlp-50M": 11, "mlp-100M": 23}
METHODS: dict[str, Method] = {
    "ddp": Method(),
    "bfloat16": preset("bfloat16"),
    "int8": preset("int8"),
    "dgc, 0.1 %": DGC(sparsity=[0.999]),
    "dgc, 6.4 %": DGC(sparsity=[0.936]),
    "sparse_loco": preset("sparse_loco"),
    "hidden_local_sgd": preset("hidden_local_sgd"),
}
OF_FOUR = ("ddp", "int8", "dgc, 0.1 %", "dgc, 6.4 %")
SHOWN_LINKS = ("1 Gb/s, 0.5 ms", "100 Mb/s, 50 ms")  # the short one first
WITHIN = 20  # percent
NUM_CORES = 2
WINDOW_S, MIN_STEPS, MAX_STEPS = 12.0, 2, 20
GUESS_S = 4e-9  # seconds of a step, per parameter, before it is measured: chooses the number of timed steps alone
MOST_S = 120.0  # of one row; ddp with 100M parameters at 100 Mb/s takes 105 s on two ranks


def mlp(hidden_layers: int) -> nn.Module:
    """Matrices of one size, as those of a transformer, whose gradients neither vanish nor explode."""
    widths = [1024, *[WIDTH] * (hidden_layers + 1), 1000]
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(widths):
        linear = nn.Linear(num_in, num_out)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / num_in))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def workload_of(model: str) -> Workload:
    return Workload(model, partial(mlp, HIDDEN_LAYERS[model]), BATCH, (1024,), 1000)


def shapes_of(model: str) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in mlp(HIDDEN_LAYERS[model]).parameters()]


def cost(method: str, model: str, link: str, num_ranks: int, step_s: float) -> Cost:
    """Return what the plan says that a method adds to a step."""
    rate, rtt_ms = LINKS[link]
    given = {"nodes": num_ranks, "ranks_per_node": 1, "gbit_per_s": (parse_rate(rate) or math.inf) / 1e9}
    given |= {"latency_ms": rtt_ms, "inside_gbit_per_s": 200.0, **OF_CPU}
    given["memory_gbyte_per_s"] *= NUM_CORES / num_ranks
    return cost_of(METHODS[method], shapes_of(model), make_cluster(given), step_s)


def steps_of(method: str, model: str, link: str, num_ranks: int) -> tuple[int, int] | None:
    """Return how many steps come before the window and in it; None if the row would take more than `MOST_S`."""
    step_s = GUESS_S * sum(map(math.prod, shapes_of(model)))
    if method == ALONE.name:
        return ALONE.num_untimed_steps, MAX_STEPS
    step_s += cost(method, model, link, num_ranks, step_s).seconds
    k_steps = METHODS[method].when.k_steps
    timed = k_steps if k_steps > 1 else max(MIN_STEPS, min(MAX_STEPS, int(WINDOW_S / step_s)))
    # A window of an average begins after its predecessor has landed, and ends after the average has.
    untimed = 2 * k_steps - 1 if k_steps > 1 else max(1, min(5, timed // 2))
    return (untimed, timed) if (untimed + timed) * step_s <= MOST_S else None


def strategy_of(name: str) -> Callable[[], Any]:
    if name in (ALONE.name, DDP.name):
        return (ALONE if name == ALONE.name else DDP).make
    return lambda: lowbw.Strategy(METHODS[name], **COMMON)


def work(job: Row) -> None:
    """Measure, as one rank; rank 0 adds each row to the results."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job["same"]["ranks"]))
    dist.init_process_group("gloo")
    for method, untimed, timed in job["todo"]:
        contestant = Contestant(method, strategy_of(method), num_untimed_steps=untimed, is_alone=method == ALONE.name)
        record = measure(contestant, workload_of(job["same"]["model"]), timed)
        if dist.get_rank() == 0:
            row = {**job["same"], "method": method, "steps": timed, **record, "environment": describe_environment()}
            write([*read(), row])
            print(f"{', '.join(map(str, job['same'].values()))}, {method}: {row['step_s']:.3f} s", flush=True)
    time.sleep(SETTLE_S)
    dist.barrier()
    dist.destroy_process_group()


def read() -> list[Row]:
    rows: list[Row] = json.loads(PATH.read_text()) if PATH.exists() else []
    return rows


def write(rows: list[Row]) -> None:
    PATH.write_text(json.dumps(rows, indent=1) + "\n")
    PATH.with_suffix(".md").write_text(to_markdown(rows))


def to_markdown(rows: Sequence[Row]) -> str:
    """Return a row for each number of ranks, link, model and method; which rows are wrong, and which are missing."""
    lines = [
        "| ranks | link | model | method | steps timed | alone, s | predicted, s | measured, s | predicted / measured "
        "| MB by plan | MB of the interface |",
        "| --- " * 11 + "|",
    ]
    keys = "ranks", "link", "model"
    of_alone: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["method"] == ALONE.name:
            of_alone.setdefault(tuple(row[key] for key in keys), []).append(row["step_s"])
    alone_s = {here: sum(found) / len(found) for here, found in of_alone.items()}
    missed, left_out = [], []
    predicted, within = Counter[int](), Counter[int]()
    for num_ranks, link, model in alone_s:
        here = num_ranks, link, model
        measured = {row["method"]: row for row in rows if tuple(row[key] for key in keys) == here}
        for method in METHODS if num_ranks == 2 else OF_FOUR:
            where = f"{num_ranks} ranks, {link}, {model}, {method}"
            if method not in measured:
                left_out += [where] * (steps_of(method, model, link, num_ranks) is None)
                continue
            row, step_s = measured[method], alone_s[here]
            added = cost(method, model, link, num_ranks, step_s)
            ratio = (step_s + added.seconds) / row["step_s"]
            predicted[num_ranks] += 1
            if abs(ratio - 1) <= WITHIN / 100:
                within[num_ranks] += 1
            else:
                missed.append(f"{ratio:.2f} ({where})")
            lines.append(
                f"| {num_ranks} | {link} | {model} | {method} | {row['steps']} | {step_s:.3f} "
                f"| {step_s + added.seconds:.3f} | {row['step_s']:.3f} | {ratio:.2f} "
                f"| {added.node_bytes / 1e6:,.2f} | {row['interface_bytes'] / 1e6:,.2f} |"
            )
    about = " ".join(__doc__.split("\n\n")[-1].split(" Writes")[0].split())
    verdict = f"{within.total()} of {predicted.total()} predictions are within {WITHIN} % of the clock ("
    verdict += "; ".join(f"{ranks} ranks: {within[ranks]} of {num}" for ranks, num in predicted.items()) + ")"
    verdict += f"; predicted / measured of the other rows: {'; '.join(missed)}." if missed else "."
    if left_out:
        verdict += f" Left out, because a row may take {MOST_S:.0f} s: {'; '.join(left_out)}."
    places = dict.fromkeys(", ".join(f"{key} {value}" for key, value in row["environment"].items()) for row in rows)
    return "\n\n".join([about, verdict, "\n".join(lines), *(f"Environment: {place}." for place in places)]) + "\n"


def main() -> None:
    """Parse the command line, measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4])
    parser.add_argument("--links", nargs="+", default=list(SHOWN_LINKS), choices=list(SHOWN_LINKS))
    parser.add_argument("--models", nargs="+", default=list(HIDDEN_LAYERS), choices=list(HIDDEN_LAYERS))
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    for link in options.links if not options.report else []:
        for model in options.models:
            same = {"ranks": options.ranks, "link": link, "model": model}
            done = [row["method"] for row in read() if same.items() <= row.items()]
            todo = []
            for method in (ALONE.name, *(METHODS if options.ranks == 2 else OF_FOUR), ALONE.name):
                steps = steps_of(method, model, link, options.ranks)
                if method in done:
                    done.remove(method)
                elif steps is not None:
                    todo.append((method, *steps))
            rate, rtt_ms = LINKS[link]
            if todo:
                rates = [parse_rate(rate)] * options.ranks
                job = {"same": same, "todo": todo}
                run_in_lab(rates, [__file__, "--rank"], job=job, what=f"{model}, {link}", rtt_ms=rtt_ms)
    write(read())
    print(to_markdown(read()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(json.loads(Path(sys.argv[2]).read_text()))
        Path(sys.argv[3]).write_text("null")
    else:
        main()
