"""The table of the README: what each method takes to DDP's loss, on three links, and what it costs in accuracy.

    .venv/bin/python benchmarks/headline.py             # hours on two cores; goes on where it was stopped
    .venv/bin/python benchmarks/headline.py --tasks resnet text    # the rows of the others stay
    .venv/bin/python benchmarks/headline.py --tasks resnet text --controls    # what else there is to try, half an hour
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
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from benchmarks.worker import INTERFACE
from lightning_lowbw.presets import preset
from lightning_lowbw.strategies.auto_choice import NUM_STEPS
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.lab.network import read_sent_bytes
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText

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
    "resnet-long": ("ResNet, SGD, 5,000 steps", TASKS["resnet"], 5000),
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


@dataclass(frozen=True)
class Control:
    """What else a user would try; trained with one seed on the slowest link.

    Attributes:
        make: makes the strategy for a number of optimizer steps.
        steps: optimizer steps, times the task's.
        batches: of which the gradients make a step.
        beta1: Adam's, in place of 0.9; then tasks with SGD have no such row.
    """

    make: Callable[[int], Any]
    steps: float = 1.0
    batches: int = 1
    beta1: float | None = None


HIDDEN = "Hidden local SGD, 1.6 times the steps"
CONTROLS = {
    "bfloat16": Control(lambda _: lowbw.Strategy(preset("bfloat16"), **COMMON)),  # torch's hook for it needs NCCL
    "ddp, beta1 = 0.7": Control(lambda _: DDPStrategy(**STOCK), beta1=0.7),
    "ddp, 4 batches in a step, as many batches": Control(lambda _: DDPStrategy(**STOCK), steps=0.25, batches=4),
    "ddp, PowerSGD rank 4 hook after a tenth": Control(lambda num_steps: power_sgd(4, num_steps // 10)),
    "powersgd, rank 4 after a tenth": Control(
        lambda num_steps: lowbw.Strategy(lowbw.PowerSGD(4, start_step=num_steps // 10), **COMMON)
    ),
    HIDDEN: Control(lambda _: lowbw.Strategy(preset("hidden_local_sgd"), **COMMON), steps=1.6),
}
CONTROL_LINK = "100 Mb/s, 50 ms"
LONG = ("dgc", "lowbw", "ddp, fp16 hook", "ddp")  # an hour on the slowest link: less is sent there than in short runs


class Fused(pl.Callback):
    """Let the optimizers take their fused step, the fastest there is; and Adam's beta1 where one is given."""

    def __init__(self, beta1: float | None = None) -> None:
        self.beta1 = beta1

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["fused"] = True
                if self.beta1 is not None:
                    group["betas"] = (self.beta1, group["betas"][1])


def train(task: Task, data: Any, strategy: Any, seed: int, num_steps: int, control: Control | None = None) -> Row:
    """Train once on this rank, with the others; return losses, seconds, bytes, and what was chosen."""
    pl.seed_everything(seed, workers=True, verbose=False)
    curve, model = Curve(), task.make_model()
    trainer = make_trainer(strategy, num_steps, curve, data, NUM_NODES)
    num_batches = control.batches if control else 1
    trainer.accumulate_grad_batches = num_batches
    trainer.callbacks.append(Fused(control.beta1 if control else None))
    before = read_sent_bytes(INTERFACE)
    trainer.fit(model, data)
    dist.barrier()
    sent = read_sent_bytes(INTERFACE) - before
    method, auto = (getattr(trainer.strategy, name, None) for name in ("method", "auto"))
    tested = trainer.test(model, data, verbose=False)[0]
    validated = trainer.validate(model, data, verbose=False)[0]
    del trainer
    gc.collect()
    # Lightning has divided the loss of a batch by the number of batches.
    losses = [sum(curve.losses[done : done + num_batches]) for done in range(0, len(curve.losses), num_batches)]
    return {
        "losses": [round(loss, 5) for loss in losses],
        "seconds": [round(clock - curve.clock[0], 4) for clock in curve.clock[num_batches - 1 :: num_batches]],
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
        control = CONTROLS.get(name)
        steps = round(num_steps * (control.steps if control else 1))
        if control:
            strategy = control.make(steps)
        else:
            strategy = METHODS[name]() if method is None else lowbw.Strategy(lowbw.Method(**method), **COMMON)
        run = train(task, data, strategy, seed, steps, control)
        rows.append({"task": job["task"], "link": job["link"], "method": name, "given": method, "seed": seed, **run})
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(rows))
            print(f"{job['task']}, {job['link']}, {name}, seed {seed}: {run['seconds'][-1]:.1f} s", flush=True)
    dist.barrier()


def measure_controls(results: Row, path: Path, tasks: list[str]) -> None:
    """Train the controls that are missing, and write the results after each task."""
    for task in tasks:
        done = {row["method"] for row in results["rows"] if row["task"] == task}
        is_adam = SHOWN_TASKS[task][0].endswith("AdamW")
        todo = [name for name, control in CONTROLS.items() if name not in done and (is_adam or control.beta1 is None)]
        run(results, path, task, CONTROL_LINK, [(name, None, 0) for name in todo])


def measure(results: Row, path: Path, tasks: list[str], links: list[str], num_seeds: int) -> None:
    """Train what is missing, link by link, and write the results after each."""
    for task in tasks:
        is_long = task.endswith("-long")
        methods = LONG if is_long else tuple(METHODS)
        for link in [CONTROL_LINK] if is_long else links:
            done = {row["method"] for row in results["rows"] if (row["task"], row["link"]) == (task, link)}
            todo = [(name, None, 0) for name in methods if name not in done]
            for together in [[each] for each in todo] if is_long else [todo]:  # each is kept when it is there
                run(results, path, task, link, together)
        chosen = {key: None for key in methods if key not in (*CHOOSING, *AGAIN)} | choices_of(results, task)
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


def smooth(losses: list[float], window: int = SMOOTHING) -> list[float]:
    """Return the running mean."""
    return torch.tensor(losses).unfold(0, window, 1).mean(1).tolist()


def summarise(rows: list[Row]) -> list[Row]:
    """Return one row for each task, link and method; differences are to ddp with the same seed."""
    found = []
    for task, link in product(SHOWN_TASKS, LINKS):
        timed = timed_rows(rows, task, link, METHODS)
        if "ddp" not in timed:
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


def timed_rows(rows: list[Row], task: str, link: str, names: Iterable[str]) -> dict[str, Row]:
    """Return the rows of a task on a link, by the names of their methods."""
    return {row["method"]: row for row in rows if (row["task"], row["link"]) == (task, link) and row["method"] in names}


def reached_s(run: Row, target: float, clock: list[float], window: int = SMOOTHING) -> float | None:
    """Return the seconds, by the clock of a link, of the step in which a run has reached a loss; None if it has not."""
    steps = (step for step, loss in enumerate(smooth(run["losses"], window), window - 1) if loss <= target)
    step = next(steps, None)
    return None if step is None else clock[step]


def target_of(timed: dict[str, Row]) -> float:
    """Return the loss that counts as reached on a link."""
    return SLACK * smooth(timed["ddp"]["losses"])[-1]


def controls_to_markdown(rows: list[Row], task: str) -> str:
    """Return the table of what else there is to try: the seconds to ddp's loss, and the loss after equal seconds."""
    timed = timed_rows(rows, task, CONTROL_LINK, [*METHODS, *CONTROLS])
    if not any(name in CONTROLS for name in timed):
        return ""
    target, seconds = target_of(timed), timed["lowbw"]["seconds"][-1]
    columns = (
        "method",
        "batches",
        "s per batch",
        "s",
        "s to ddp's loss",
        f"loss after {seconds:.0f} s",
        "validation loss",
    )
    lines = ["| " + " | ".join((*columns, "accuracy")) + " |", "| --- " * (len(columns) + 1) + "|"]
    for name, row in timed.items():
        batches_per_step = CONTROLS[name].batches if name in CONTROLS else 1
        num_batches, window = batches_per_step * len(row["losses"]), SMOOTHING // batches_per_step
        reached = reached_s(row, target, row["seconds"], window)
        num_done = bisect_right(row["seconds"], seconds)
        after = smooth(row["losses"], window)[num_done - window] if num_done >= window else None
        cells = (
            name,
            f"{num_batches}",
            f"{row['seconds'][-1] / num_batches:.3f}",
            f"{row['seconds'][-1]:.0f}",
            "not reached" if reached is None else f"{reached:.0f}",
            "" if after is None else f"{after:.4f}",
            f"{row['val_loss']:.4f}",
            f"{row['test_accuracy']:.2%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        f"What else there is to try, at {CONTROL_LINK}: one seed, on the link itself. A loss is the running mean of "
        f"{SMOOTHING} batches; that after equal seconds is of the time that `lowbw` trains.\n"
    )
    return "\n".join([note, *lines, ""])


def in_words_of(chosen: Row) -> str:
    """Return a method in few words: "ddp", "bfloat16", "int8", "dgc, 12.8 %"."""
    what = {name: value for name, value in chosen["what"].items() if name != "exchange"}  # of rows before 2026-11
    method = lowbw.Method(**{**chosen, "what": what})
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
    """Return the table that comes first: a row for each task and link, seconds to ddp's loss of each method."""
    shown = [method for method in METHODS if method not in AGAIN]
    lines = ["| seconds to ddp's loss | " + " | ".join(shown) + " |", "| --- " * (len(shown) + 1) + "|"]
    for (task, (title, _, _)), link in product(SHOWN_TASKS.items(), LINKS):
        mine = {row["method"]: row for row in found if (row["task"], row["link"]) == (task, link)}
        if not mine:
            continue
        seconds = [in_short(mine[method]) if method in mine else "" for method in shown]
        older = " *" if mine["ddp"]["is_older"] else ""
        lines.append(f"| {title}, {millions_of(mine['ddp'])}; {link}{older} | {' | '.join(seconds)} |")
    return "\n".join([*lines, ""])


def in_short(row: Row) -> str:
    """Return the seconds to ddp's loss, and what was chosen; how many seeds reach it where not all do."""
    if len(row["reached_s"]) < row["seeds"]:
        return f"{len(row['reached_s'])} of {row['seeds']}"
    return f"{statistics.fmean(row['reached_s']):.0f}" + (f" ({row['chosen']})" if row["chosen"] else "")


def millions_of(row: Row) -> str:
    """Return the number of parameters: among two nodes ddp sends as many float32."""
    return f"{row['dense_bytes'] / 4e6:.1f}M"


def report(results: Row) -> None:
    """Write the tables and the plot."""
    found = summarise(results["rows"])
    environment = results["environment"]
    parts = []
    for name, (title, task, num_steps) in SHOWN_TASKS.items():
        mine = [row for row in found if row["task"] == name]
        if mine:
            elsewhere = {f"; {row['link']}: on {row['cpu']}" for row in mine if row["cpu"] != environment["cpu"]}
            elsewhere |= {"; before a step waited for one message"} if mine[0]["is_older"] else set()
            of = f"{title}: {task.note}; {num_steps} steps, seeds: {mine[0]['seeds']}{''.join(sorted(elsewhere))}.\n"
            parts += [of, to_markdown(mine), controls_to_markdown(results["rows"], name)]
    note = (
        f"{NUM_NODES} nodes on one machine ({environment['cpu']}, a core "
        f"each), torch {environment['torch']}, {environment['date']}; optimizers fused. x ddp: ddp's seconds divided "
        'by the method\'s. "Of which not the network": the same where bandwidth is unlimited, all of it work of the '
        "processor. x prediction: the seconds of a step after the choice, divided by those that the choice predicted. "
        "Seconds to ddp's loss: to the last training loss of ddp with the same seed, and "
        f"{SLACK - 1:.0%}. Losses and accuracies are means over seeds; differences to ddp are ± their standard error."
    )
    again = [row["step_s"] / dense["step_s"] for row, dense in product(found, found) if is_same(row, dense)]
    more = {SHOWN_TASKS[row["task"]][0]: row["seeds"] for row in found if row["seeds"] > 1}
    short = (
        "Two emulated machines with one CPU core each. Brackets show the method that `dgc` or `lowbw` chose. "
        f"One seed per row{''.join(f' ({title}: {num})' for title, num in more.items())}. "
        f'Two runs of ddp itself differ by factors of {min(again):.2f} to {max(again):.2f}. "0 of 1": no seed came to '
        "ddp's loss. Rows with * were measured with an earlier commit. "
    )
    for task, (title, _, _) in SHOWN_TASKS.items():
        timed = timed_rows(results["rows"], task, CONTROL_LINK, ("ddp", HIDDEN))
        if HIDDEN in timed:
            reached = reached_s(timed[HIDDEN], target_of(timed), timed[HIDDEN]["seconds"])
            told = "does not reach it" if reached is None else f"{reached:.0f} s"
            short += f"{HIDDEN}: {told} ({title}, {CONTROL_LINK}). "
    plot_gain(found, RESULTS / "headline.png")
    drawn = "![steps per second, times those of torch's fp16 hook, against the time of ddp's exchange](headline.png)\n"
    table = "\n".join([f"{textwrap.fill(short, 140)}\n", to_short(found), drawn, *parts, note, ""])
    (RESULTS / "headline.md").write_text(table)
    print(table)


def plot_gain(found: list[Row], path: Path) -> None:
    """Draw what a user gains: how many times as fast a step is as with torch's fp16 hook, by what the network takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    cells = {(row["task"], row["link"], row["method"]): row for row in found}
    of_noise = [
        cells[task, link, "ddp"]["step_s"] / row["step_s"] for (task, link, name), row in cells.items() if name in AGAIN
    ]
    axes.axhspan(min(of_noise), max(of_noise), color="0.9", label="two runs of ddp")
    for name, marker in (("ddp", "_"), ("ddp, PowerSGD rank 2 hook", "x"), ("int8", "s"), ("dgc", "^"), ("lowbw", "o")):
        points = []
        for (task, link, method), row in cells.items():
            dense, hook = cells[task, link, "ddp"], cells.get((task, link, "ddp, fp16 hook"))
            if method == name and hook is not None:
                exchange_s = max(0.0, dense["step_s"] - dense["unlimited_step_s"])
                points.append((exchange_s / dense["unlimited_step_s"], hook["step_s"] / row["step_s"]))
        axes.plot(*zip(*sorted(points), strict=True), marker, label=name, linestyle="")
    axes.set(xlabel="time of ddp's exchange / time of a step without it", ylabel="steps per second, x fp16 hook")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--controls", action="store_true", help="measure only what else there is to try")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    path = RESULTS / "headline.json"
    results: Row = {"environment": describe_environment(), "rows": []}
    if path.exists():
        before = json.loads(path.read_text())
        results = before if options.report else {**before, "environment": results["environment"]}
    if options.controls:
        measure_controls(results, path, options.tasks)
    elif not options.report:
        measure(results, path, options.tasks, options.links, options.seeds)
    report(results)


if __name__ == "__main__":
    main()
