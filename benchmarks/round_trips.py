"""What a step takes, taken apart: its work, its bytes, and how many round trips it waits.

    .venv/bin/python benchmarks/round_trips.py                     # about forty minutes on two quiet cores
    .venv/bin/python benchmarks/round_trips.py --before CHECKOUT   # in turn with another version of the package
    .venv/bin/python benchmarks/round_trips.py --tasks large       # the rows of the others stay

Two nodes in the lab, a core each, train the tasks of headline.py without limits, at the rate of each of its links, and
at the rate with the link's round trip. The second adds the bytes, the third the round trips. Medians of the
repetitions, which are interleaved.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("CHECKOUT", str(Path(__file__).resolve().parents[1])))

import torch
import torch.distributed as dist

import lightning_lowbw as lowbw
from benchmarks.beside_ddp.tasks import NUM_RANKS, be_quiet, make_trainer
from benchmarks.contestants import COMMON, DDP, FP16, POWER_SGD
from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from benchmarks.headline import LINKS, SHOWN_TASKS
from benchmarks.worker import Window
from lightning_lowbw.tools.lab import parse_rate

METHODS = {
    "ddp": DDP.make,
    "ddp, fp16 hook": FP16.make,
    "ddp, PowerSGD rank 2 hook": POWER_SGD[1].make,
    "powersgd, rank 2": lambda: lowbw.Strategy(lowbw.PowerSGD(2, start_step=2), **COMMON),
    "int8": lambda: lowbw.Strategy(lowbw.QuantizedGradients("int8"), **COMMON),
    "dgc, 0.1 %": lambda: lowbw.DGCStrategy(sparsity=[0.999], **COMMON),
}
OURS = tuple(METHODS)[3:]  # what another checkout is asked for
UNLIMITED = "unlimited"
CONDITIONS: dict[str, tuple[str | None, float]] = {UNLIMITED: (None, 0.0)}  # rate, and round-trip time in milliseconds
CONDITIONS |= {rate: (rate, 0.0) for rate, _ in LINKS.values()} | LINKS
UNTIMED, TIMED = 5, 10  # steps
LEAST_RTT_MS = 10.0  # below it a round trip is lost in the noise of a step


def measure(task_name: str, method: str) -> dict[str, float]:
    gc.collect()
    _, task, _ = SHOWN_TASKS[task_name]
    window = Window(UNTIMED, TIMED)
    data, num_steps = task.make_data(), UNTIMED + TIMED
    torch.manual_seed(0)
    make_trainer(METHODS[method](), num_steps, window, data, NUM_RANKS).fit(task.make_model(), data)
    return {"step_s": window.step_s, "interface_bytes": window.sent_bytes}


def work(job: dict[str, Any]) -> None:
    """Measure, as one rank."""
    be_quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = [{"method": method, **measure(job["task"], method)} for method in job["methods"]]
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def report(rows: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    """Write the table: of each task and method the seconds of its work, of its bytes, and the round trips."""
    (RESULTS / "round_trips.json").write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))
    num = 1 + max(row["repetition"] for row in rows)
    shown = [
        "# What a step waits for\n",
        " ".join(__doc__.split("\n\n")[-1].split()) + "\n",
        f"{num} repetitions of {TIMED} steps. A round trip is that of a message that is sent and answered; negative "
        f"ones are noise, and below {LEAST_RTT_MS:.0f} ms all are (-). The bytes are those of the interface of a node, "
        "headers included.\n",
        "| link | task | method | version | work, ms | bytes, ms | waiting, ms | a step, ms | round trips | kB |",
        "| --- " * 10 + "|",
    ]
    cells = dict.fromkeys((row["task"], row["method"], row["version"]) for row in rows)
    for (link, (rate, rtt_ms)), (task, method, version) in product(LINKS.items(), cells):
        conditions = (UNLIMITED, rate, link)
        of_cell = [row for row in rows if (row["task"], row["method"], row["version"]) == (task, method, version)]
        in_turn = [[row for row in of_cell if row["link"] == condition] for condition in conditions]
        alone, carried, all_s = (1e3 * statistics.median(row["step_s"] for row in some) for some in in_turn)
        sent_bytes = statistics.median(row["interface_bytes"] for row in in_turn[-1])
        num_trips = f"{(all_s - carried) / rtt_ms:.1f}" if rtt_ms >= LEAST_RTT_MS else "-"
        parts_ms = (alone, carried - alone, all_s - carried, all_s)
        shown.append(
            f"| {link} | {SHOWN_TASKS[task][0]} ({task}) | {method} | {version} | "
            f"{' | '.join(f'{part:.0f}' for part in parts_ms)} | {num_trips} | {sent_bytes / 1e3:,.0f} |"
        )
    about = ", ".join(f"{name} {value}" for name, value in environment.items())
    RESULTS.joinpath("round_trips.md").write_text("\n".join([*shown, "", f"Environment: {about}.", ""]))
    print("\n".join(shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="another checkout, measured in turn")
    parser.add_argument("--tasks", nargs="+", default=["resnet", "text", "large"], choices=list(SHOWN_TASKS))
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    versions = {"this": str(Path(__file__).resolve().parents[1])}
    versions |= {"before": str(Path(options.before).resolve())} if options.before else {}
    path = RESULTS / "round_trips.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in kept if row["task"] not in options.tasks]
    for task in options.tasks:
        for repetition in range(options.repetitions):
            for link, (rate, rtt_ms) in CONDITIONS.items():
                for version, checkout in versions.items():
                    methods = list(METHODS if version == "this" else OURS)
                    job = {"task": task, "methods": methods}
                    rates = [None if rate is None else parse_rate(rate)] * 2
                    where = {"rtt_ms": rtt_ms, "environment": {"CHECKOUT": checkout}}
                    records = run_in_lab(rates, [__file__, "--rank"], job=job, what=f"{task}, {link}", **where)
                    same = {"task": task, "link": link, "version": version, "repetition": repetition}
                    rows += [{**same, **record} for record in records]
                    print(task, link, version, repetition, flush=True)
        report(rows, describe_environment())


if __name__ == "__main__":
    if "--rank" in sys.argv:
        work(json.loads(Path(sys.argv[2]).read_text()))
    else:
        main()
