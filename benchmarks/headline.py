"""The table of the README: what each method takes to DDP's loss, on three links, and what it costs in accuracy.

    .venv/bin/python benchmarks/headline.py             # hours on two cores; goes on where it was stopped
    .venv/bin/python benchmarks/headline.py --tasks resnet text    # the rows of the others stay
    .venv/bin/python benchmarks/headline.py --report    # tables of what there is, and the README's block

Two nodes in the lab, a core each. Three tasks: a ResNet with SGD, two transformers with AdamW, all with fused
optimizers. `dgc` and `lowbw` choose for themselves on each link. The first seed is trained on each link; all seeds are
trained without a limit of bandwidth and latency, with what was chosen on each link, which is all that a link changes in
the weights. "ddp again" is the noise of a row. Seconds to a loss are the seconds of the first seed's step in which the
seed's own curve reaches it; all other times are of the first seed alone, so the machine need be quiet for that one
only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import textwrap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lightning_lowbw as lowbw
from benchmarks.beside_ddp.tasks import TASKS, Curve, Row, Task, be_quiet, make_trainer
from benchmarks.contestants import COMMON, HookStrategy, power_sgd
from benchmarks.harness import RESULTS, describe_environment, replace_block, run_in_lab
from benchmarks.worker import INTERFACE
from lightning_lowbw.lab import parse_rate
from lightning_lowbw.lab.network import read_sent_bytes
from lightning_lowbw.strategies.auto_choice import NUM_STEPS
from lightning_lowbw.zoo import ByteLanguageModel, StdlibText

NUM_NODES = 2
SMOOTHING = 40  # steps of the running mean
SLACK = 1.01  # the loss that counts as reached: the last of ddp, and 1 %
LARGE = Task(
    lambda: ByteLanguageModel(256, 6, optimizer="adamw", lr=1e-3, schedule="one_cycle"),
    lambda: StdlibText(batch_size=4),
    "ByteLanguageModel with 6 layers of width 256, AdamW, 2 x 4 crops of 64 bytes",
)
SHOWN_TASKS: dict[str, tuple[str, Task, int]] = {  # title, and optimizer steps
    "resnet": ("ResNet, SGD", TASKS["resnet"], 500),
    "text": ("transformer, AdamW", TASKS["text"], 500),
    "large": ("transformer, AdamW", LARGE, 300),
}
LINKS: dict[str, tuple[str, float]] = {  # rate, and round-trip time in milliseconds
    "100 Mb/s, 50 ms": ("100mbit", 50.0),
    "1 Gb/s, 0.5 ms": ("1gbit", 0.5),
    "10 Gb/s, 0.1 ms": ("10gbit", 0.1),
}
UNLIMITED = "unlimited"
STOCK: dict[str, Any] = {**COMMON, "gradient_as_bucket_view": True}
METHODS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(**STOCK),
    "ddp, fp16 hook": lambda: HookStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook, **STOCK),
    "ddp, PowerSGD rank 2 hook": lambda: power_sgd(2),
    "int8": lambda: lowbw.Strategy(lowbw.QuantizedGradients("int8"), **COMMON),
    "dgc": lambda: lowbw.DGCStrategy(**COMMON),
    "lowbw": lambda: lowbw.AutoStrategy(**COMMON),
    "ddp again": lambda: DDPStrategy(**STOCK),
}
CHOOSING = ("dgc", "lowbw")
AGAIN = {"ddp again": "ddp"}  # the same, to see the noise


class Fused(pl.Callback):
    """Let the optimizers take their fused step, the fastest there is."""

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["fused"] = True


def train(task: Task, data: Any, strategy: Any, seed: int, num_steps: int) -> Row:
    """Train once on this rank, with the others; return losses, seconds, bytes, and what was chosen."""
    pl.seed_everything(seed, workers=True, verbose=False)
    curve, model = Curve(), task.make_model()
    trainer = make_trainer(strategy, num_steps, curve, data, NUM_NODES)
    trainer.callbacks.append(Fused())
    before = read_sent_bytes(INTERFACE)
    trainer.fit(model, data)
    dist.barrier()
    sent = read_sent_bytes(INTERFACE) - before
    method, auto = (getattr(trainer.strategy, name, None) for name in ("method", "auto"))
    tested = trainer.test(model, data, verbose=False)[0]
    validated = trainer.validate(model, data, verbose=False)[0]
    del trainer
    gc.collect()
    return {
        "losses": [round(loss, 5) for loss in curve.losses],
        "seconds": [round(clock - curve.clock[0], 4) for clock in curve.clock],
        "sent_bytes": sent,
        "val_loss": validated["val_loss"],
        "test_accuracy": tested["test_acc"],
        "chosen": None if method is None else method.describe(),
        "predicted_s": auto.chosen.mean_s if auto is not None and auto.chosen is not None else None,
    }


def train_rank(job: Row, path: Path) -> None:
    """One rank: train what the job lists; rank 0 writes the rows."""
    be_quiet()
    torch.set_num_threads(1)
    _, task, num_steps = SHOWN_TASKS[job["task"]]
    rows, data = [], task.make_data()
    for name, method, seed in job["runs"]:
        make = METHODS.get(name)
        strategy = make() if method is None and make else lowbw.Strategy(lowbw.Method(**method), **COMMON)
        run = train(task, data, strategy, seed, num_steps)
        rows.append({"task": job["task"], "link": job["link"], "method": name, "given": method, "seed": seed, **run})
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(rows))
            print(f"{job['task']}, {job['link']}, {name}, seed {seed}: {run['seconds'][-1]:.1f} s", flush=True)
    dist.barrier()


def measure(results: Row, path: Path, tasks: list[str], num_seeds: int) -> None:
    """Train what is missing, link by link, and write the results after each."""
    for task in tasks:
        for link in LINKS:
            done = {row["method"] for row in results["rows"] if (row["task"], row["link"]) == (task, link)}
            run(results, path, task, link, [(name, None, 0) for name in METHODS if name not in done])
        chosen = {key: None for key in METHODS if key not in (*CHOOSING, *AGAIN)} | choices_of(results, task)
        done_runs = {
            (row["method"], row["seed"]) for row in results["rows"] if (row["task"], row["link"]) == (task, UNLIMITED)
        }
        for seed in range(num_seeds):
            todo = [(name, method, seed) for name, method in chosen.items() if (name, seed) not in done_runs]
            run(results, path, task, UNLIMITED, todo)


def choices_of(results: Row, task: str) -> dict[str, Row]:
    """Return what was chosen on any link, by the name of its run: equal choices share it."""
    return {
        name_of(row["chosen"]): row["chosen"]
        for row in results["rows"]
        if row["task"] == task and row["method"] in CHOOSING and row["link"] in LINKS
    }


def name_of(chosen: Row) -> str:
    """Return one name for equal methods."""
    return json.dumps(chosen, sort_keys=True)


def run(results: Row, path: Path, task: str, link: str, runs: list[Any]) -> None:
    """Start the ranks in a lab with this link, and keep their rows."""
    if not runs:
        return
    rate, rtt_ms = LINKS.get(link, (None, 0.0))
    job = {"task": task, "link": link, "runs": runs}
    rates = [None if rate is None else parse_rate(rate)] * NUM_NODES
    rows = run_in_lab(rates, [__file__, "--rank"], job=job, what=f"{task}, {link}", rtt_ms=rtt_ms)
    cpu = describe_environment()["cpu"]
    results["rows"] += [{**row, "cpu": cpu} for row in rows]
    path.write_text(json.dumps(results) + "\n")


def smooth(losses: list[float]) -> list[float]:
    """Return the running mean."""
    return torch.tensor(losses).unfold(0, SMOOTHING, 1).mean(1).tolist()


def summarise(rows: list[Row]) -> list[Row]:
    """Return one row for each task, link and method; differences are to ddp with the same seed."""
    found = []
    for task, link in product(SHOWN_TASKS, LINKS):
        timed = {row["method"]: row for row in rows if (row["task"], row["link"]) == (task, link)}
        if not timed:
            continue
        unlimited = {
            (row["method"], row["seed"]): row
            for row in rows
            if (row["task"], row["link"], row["cpu"]) == (task, UNLIMITED, timed["ddp"]["cpu"])
        }
        seeds = sorted({seed for name, seed in unlimited if name == "ddp"})
        dense = {seed: unlimited["ddp", seed] for seed in seeds}
        targets = {seed: SLACK * smooth(run["losses"])[-1] for seed, run in dense.items()}
        for name, run in timed.items():
            key = name_of(run["chosen"]) if name in CHOOSING else AGAIN.get(name, name)
            after_choice = run["seconds"][NUM_STEPS:]
            after_choice_s = (after_choice[-1] - after_choice[0]) / (len(after_choice) - 1)
            mine = {seed: unlimited[key, seed] for seed in seeds if (key, seed) in unlimited}
            reached = [reached_s(each, targets[seed], run["seconds"]) for seed, each in mine.items()]
            found.append(
                {
                    "task": task,
                    "link": link,
                    "cpu": run["cpu"],
                    "method": name,
                    "is_older": "predicted_s" not in run,
                    "chosen": in_words_of(run["chosen"]) if name in CHOOSING else "",
                    "step_s": run["seconds"][-1] / len(run["seconds"]),
                    "to_prediction": after_choice_s / predicted_s if (predicted_s := run.get("predicted_s")) else None,
                    "unlimited_step_s": mine[0]["seconds"][-1] / len(mine[0]["seconds"]),
                    "sent_bytes": run["sent_bytes"] / len(run["losses"]),
                    "dense_bytes": timed["ddp"]["sent_bytes"] / len(run["losses"]),
                    "reached_s": [each for each in reached if each is not None],
                    "seeds": len(mine),
                    "loss": statistics.fmean(each["val_loss"] for each in mine.values()),
                    "loss_to_ddp": [each["val_loss"] - dense[seed]["val_loss"] for seed, each in mine.items()],
                    "points_to_ddp": [
                        100 * (each["test_accuracy"] - dense[seed]["test_accuracy"]) for seed, each in mine.items()
                    ],
                    "accuracy": statistics.fmean(each["test_accuracy"] for each in mine.values()),
                }
            )
    return found


def reached_s(run: Row, target: float, clock: list[float]) -> float | None:
    """Return the seconds, by the clock of a link, of the step in which a run has reached a loss; None if it has not."""
    steps = (step for step, loss in enumerate(smooth(run["losses"]), SMOOTHING - 1) if loss <= target)
    step = next(steps, None)
    return None if step is None else clock[step]


def in_words_of(chosen: Row) -> str:
    """Return a method in few words: "ddp", "bfloat16", "int8", "dgc, 12.8 %"."""
    method = lowbw.Method(**chosen)
    if isinstance(method.what, lowbw.TopK) and method.when.stairs:
        return f"dgc, {100 * (1 - method.when.stairs[-1]):.3g} %"
    whole = "ddp" if method.where.inter_dtype == "float32" else method.where.inter_dtype
    return method.what.value_dtype if isinstance(method.what, lowbw.Quantized) else whole


def with_error(values: list[float], form: str) -> str:
    """Return the mean, and its standard error; of one value nobody knows it."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):{form}} ± {error:{form.lstrip('+')}}"


COLUMNS = (
    "link",
    "method",
    "s per step",
    "x ddp",
    "x prediction",
    "of which not the network",
    "kB per step",
    "s to ddp's loss",
    "x ddp",
    "validation loss, to ddp",
    "accuracy, points to ddp",
)


def to_markdown(found: list[Row]) -> str:
    """Return the table of a task."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for row in found:
        dense = next(each for each in found if (each["link"], each["method"]) == (row["link"], "ddp"))
        reached = len(row["reached_s"]) == row["seeds"]
        cells = [
            row["link"],
            row["method"] + (f" ({row['chosen']})" if row["chosen"] else ""),
            f"{row['step_s']:.3f}",
            f"{dense['step_s'] / row['step_s']:.2f}",
            f"{row['to_prediction']:.2f}" if row["to_prediction"] else "",
            f"{dense['unlimited_step_s'] / row['unlimited_step_s']:.2f}",
            f"{row['sent_bytes'] / 1e3:,.0f}",
            f"{statistics.fmean(row['reached_s']):.0f}"
            if reached
            else f"{len(row['reached_s'])} of {row['seeds']} reach it",
            f"{statistics.fmean(dense['reached_s']) / statistics.fmean(row['reached_s']):.2f}" if reached else "-",
            f"{row['loss']:.4f}" if row is dense else with_error(row["loss_to_ddp"], "+.4f"),
            f"{row['accuracy']:.2%}" if row is dense else with_error(row["points_to_ddp"], "+.2f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def to_short(found: list[Row]) -> str:
    """Return the README's table: a row for each task and link, seconds to ddp's loss of each method."""
    shown = [method for method in METHODS if method not in AGAIN]
    lines = ["| seconds to ddp's loss | " + " | ".join(shown) + " |", "| --- " * (len(shown) + 1) + "|"]
    for (task, (title, _, _)), link in product(SHOWN_TASKS.items(), LINKS):
        mine = {row["method"]: row for row in found if (row["task"], row["link"]) == (task, link)}
        if not mine:
            continue
        seconds = [
            f"{statistics.fmean(row['reached_s']):.0f}" + (f" ({row['chosen']})" if row["chosen"] else "")
            if len(row["reached_s"]) == row["seeds"]
            else f"{len(row['reached_s'])} of {row['seeds']}"
            for row in (mine[method] for method in shown if method in mine)
        ]
        older = " *" if mine["ddp"]["is_older"] else ""
        lines.append(f"| {title}, {millions_of(mine['ddp'])}; {link}{older} | {' | '.join(seconds)} |")
    return "\n".join([*lines, ""])


def millions_of(row: Row) -> str:
    """Return the number of parameters: among two nodes ddp sends as many float32."""
    return f"{row['dense_bytes'] / 4e6:.1f}M"


def report(results: Row) -> None:
    """Write the tables and the block of the README."""
    found = summarise(results["rows"])
    environment = results["environment"]
    parts = []
    for name, (title, task, num_steps) in SHOWN_TASKS.items():
        mine = [row for row in found if row["task"] == name]
        if mine:
            elsewhere = {f"; {row['link']}: on {row['cpu']}" for row in mine if row["cpu"] != environment["cpu"]}
            elsewhere |= {"; before a step waited for one message"} if mine[0]["is_older"] else set()
            of = f"{title}: {task.note}; {num_steps} steps, seeds: {mine[0]['seeds']}{''.join(sorted(elsewhere))}.\n"
            parts += [of, to_markdown(mine)]
    note = (
        f"{NUM_NODES} nodes on one machine ({environment['cpu']}, a core "
        f"each), torch {environment['torch']}, {environment['date']}; optimizers fused. x ddp: ddp's seconds divided "
        'by the method\'s. "Of which not the network": the same where bandwidth is unlimited, all of it work of the '
        "processor. x prediction: the seconds of a step after the choice, divided by those that the choice predicted. "
        "Seconds to ddp's loss: to the last training loss of ddp with the same seed, and "
        f"{SLACK - 1:.0%}. Losses and accuracies are means over seeds; differences to ddp are ± their standard error."
    )
    table = "\n".join([*parts, note, ""])
    (RESULTS / "headline.md").write_text(table)
    again = [row["step_s"] / dense["step_s"] for row, dense in product(found, found) if is_same(row, dense)]
    short = (
        "Two nodes, a core each; in brackets what `dgc` and `lowbw` chose. "
        f"Two runs of ddp take {min(again):.2f} to {max(again):.2f} times as long. "
        '"0 of 1": seeds. *: before a step waited for one message. [All](benchmarks/results/headline.md)\n'
    )
    replace_block("README.md", "headline", f"{textwrap.fill(short, 128)}\n\n{to_short(found)}")
    print(table)


def is_same(row: Row, dense: Row) -> bool:
    """Return whether a row is that of ddp again, and the other one that of ddp."""
    return AGAIN.get(row["method"]) == dense["method"] and (row["task"], row["link"]) == (dense["task"], dense["link"])


def main() -> None:
    """Measure what is missing, then write what there is."""
    if sys.argv[1:2] == ["--rank"]:
        train_rank(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=SHOWN_TASKS, default=list(SHOWN_TASKS))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    path = RESULTS / "headline.json"
    results: Row = {"environment": describe_environment(), "rows": []}
    if path.exists():
        before = json.loads(path.read_text())
        results = before if options.report else {**before, "environment": results["environment"]}
    if not options.report:
        measure(results, path, options.tasks, options.seeds)
    report(results)


if __name__ == "__main__":
    main()
