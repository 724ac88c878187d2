"""Which outer rate and momentum hold for `diloco`, and what `sparse_loco` needs from scratch, by the loss to ddp's.

    nice .venv/bin/python benchmarks/defaults.py             # an hour on a core; goes on where it was stopped
    nice .venv/bin/python benchmarks/defaults.py --report    # the tables of what there is

Replicas in one process, as in `steps_to_loss.py`: 2, 4 and 8; from scratch and continued; AdamW and SGD; with ddp's
number of steps and 1.6 times as many. One seed; "ddp, another seed" is the noise of a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside_ddp.tasks import Task
from benchmarks.harness import RESULTS
from benchmarks.steps_to_loss import MEASURED, SIMULATED, Row, Simulated, go_on, runs
from lightning_lowbw import Compression, TopK
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText
from lightning_lowbw.tools.zoo.optimizers import OptimizerName

OUTERS = ((0.7, 0.9), (0.7, 0.6), (1.0, 0.0), (0.7, 0.3))  # rate, momentum of Nesterov
STRETCHES = (1.0, 1.6)
LONGER = 1024  # steps, as in bits_to_loss.py


def small(optimizer: OptimizerName, lr: float, seed: int = 0) -> Task:
    """Return a transformer of 0.3M parameters, on 4 crops of 64 bytes per replica and step."""
    return Task(
        lambda: ByteLanguageModel(96, 2, 4, optimizer=optimizer, lr=lr, schedule="one_cycle"),
        lambda: StdlibText(batch_size=4, num_train=64_000, num_eval=512, seed=seed),
        "",
    )


SMALL = {
    "small": Simulated("from scratch, AdamW", small("adamw", 3e-3), 480),
    "small, continued": Simulated(
        "continued, AdamW", small("adamw", 1e-3, seed=1), 480, {"task": "small", "ranks": 4, "stretch": 2.5}
    ),
    "small, longer": Simulated(f"from scratch, AdamW, {LONGER} steps", small("adamw", 3e-3), LONGER),
}
SIMULATED.update(SMALL)
SHORT = ("small", "small, continued", "resnet")


def grid() -> Iterator[Row]:
    """Yield all runs, those first that say most."""
    texts, outers = SHORT[:2], OUTERS[:2]
    yield from (runs(task, ranks) for ranks, task in product((4, 2, 8), SHORT))
    yield from (runs(task, ranks, 16, outer=o) for o, ranks, task in product(OUTERS, (4, 2), texts))
    yield from (runs("small", ranks=4, **run) for run in LOCAL)
    yield from (runs("resnet", ranks, 16, outer=o) for ranks, o in product((2, 4), OUTERS))
    yield from (runs("small", ranks, 16, outer=o, stretch=1.6) for o, ranks in product(OUTERS, (4, 2)))
    yield from (runs("small", 8, 16, outer=o) for o in OUTERS)
    yield from (runs(task, 4, seed=1) for task in SHORT)
    yield from (runs("small, continued", ranks, 16, outer=o, stretch=1.6) for o, ranks in product(outers, (4, 2)))
    yield from (runs("resnet", 2, 16, outer=o, stretch=1.6) for o in OUTERS)
    yield runs("small, longer", 4)
    yield from (runs("small, longer", 4, 100, outer=o) for o in outers)


LOCAL: tuple[Row, ...] = (
    {"k": 15},
    {"k": 15, "compression": {}},
    {"k": 8, "compression": {}},
    {"k": 15, "compression": {}, "begin": 0.25},
    {"k": 15, "compression": {}, "begin": 0.5},
    {"k": 15, "compression": {}, "stretch": 1.6},
    {"k": 15, "compression": {}, "begin": 0.1},
    {"k": 15, "compression": {"density": 1 / 16}},
    {"k": 4, "compression": {}},
    {"k": 4, "compression": {}, "begin": 0.25},
    {"k": 16, "outer": (0.7, 0.6), "begin": 0.25},
    {"k": 15, "compression": {}, "begin": 0.25, "stretch": 1.6},
)


# The tables ----------------------------------------------------------------------------------------------------------


def losses(rows: Sequence[Row]) -> dict[str, float]:
    """Return by `key_of` the loss divided by ddp's with as many replicas and the same seed; ddp's by that of seed 0."""
    dense = {(row["task"], row["ranks"], row["seed"]): row["val_loss"] for row in rows if row["k"] == 1}
    found = {}
    for row in rows:
        seed = row["seed"] if row["k"] > 1 else 0
        if (base := dense.get((row["task"], row["ranks"], seed))) is not None:
            found[key_of(row)] = row["val_loss"] / base
    return found


def key_of(run: Row) -> str:
    """Return the settings of a run, as text."""
    return json.dumps({name: run[name] for name in run if name not in MEASURED}, sort_keys=True)


def of_outers(found: Row) -> list[str]:
    """Return the table of outer rates and momenta: a row for each task, number of replicas, period and stretch."""
    lines = [
        "| task | replicas | k | steps, to ddp's | " + " | ".join("{} / {}".format(*outer) for outer in OUTERS) + " |",
        "| --- " * (4 + len(OUTERS)) + "|",
    ]
    worst: dict[tuple[str, float], dict[Any, float]] = {}
    for task, ranks, k, stretch in product(SIMULATED, (2, 4, 8), (16, 100), STRETCHES):
        run = partial(runs, task, ranks, k, stretch=stretch)
        shown = {outer: found.get(key_of(run(outer=outer))) for outer in OUTERS}
        known = {outer: ratio for outer, ratio in shown.items() if ratio is not None}
        if known:
            cells = [percent(shown[outer]) for outer in OUTERS]
            lines.append(f"| {SIMULATED[task].title} | {ranks} | {k} | {stretch:g} | " + " | ".join(cells) + " |")
        for outer, ratio in known.items() if len(known) == len(OUTERS) else ():
            of_model = worst.setdefault(("ResNet" if task == "resnet" else "transformer", stretch), {})
            of_model[outer] = max(ratio, of_model.get(outer, 0.0))
    for (model, stretch), of_model in worst.items():
        cells = [percent(of_model.get(outer)) for outer in OUTERS]
        lines.append(f"| worst of the {model} | | | {stretch:g} | " + " | ".join(cells) + " |")
    return lines


def of_local(found: Row) -> list[str]:
    """Return the table of what `sparse_loco` sends, and when: a row for each method of `LOCAL`."""
    columns = "k", "density", "dense steps first", "steps, to ddp's", "bytes, to ddp's", "loss, to ddp's"
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for run in LOCAL:
        if (ratio := found.get(key_of(runs("small", ranks=4, **run)))) is not None:
            what = Compression(**run["compression"]) if "compression" in run else None
            begin, outer, stretch = run.get("begin", 0.0), run.get("outer"), run.get("stretch", 1.0)
            sent = "whole" if what is None else f"1/{1 / what.density:.0f}"
            more = ", outer {} / {}".format(*outer) if outer else ""
            shown = [run["k"], sent + more, f"{begin:.0%}", f"{stretch:g}"]
            shown += [f"{stretch * sent_to_ddp(run['k'], what, begin):.2%}"]
            lines.append("| " + " | ".join(map(str, [*shown, percent(ratio)])) + " |")
    return lines


def sent_to_ddp(k: int, what: TopK | None, begin: float, num_ranks: int = 4) -> float:
    """Return the bytes that a replica sends in a run, to those of ddp's all-reduce of float32."""
    numels = [each.numel() for each in SMALL["small"].task.make_model().parameters()]
    gathered = 1.0
    if what is not None:
        sparse = [numel for numel in numels if what.compresses("", numel, 0)]
        whole = sum(numels) - sum(sparse)
        gathered = (num_ranks * what.nbytes(sparse) / 8 + whole) / sum(numels)  # 2 (N - 1) / N of 4 bytes, N - 1 times
    return begin + (1.0 - begin) * gathered / k


def percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def report(results: Row) -> None:
    """Write the tables."""
    environment, rows, found = results["environment"], results["rows"], losses(results["rows"])
    tasks = [task for task in SIMULATED if any(row["task"] == task and row["k"] > 1 for row in rows)]
    again = {task: found.get(key_of(runs(task, 4, seed=1))) for task in tasks}
    noise = ", ".join(f"{SIMULATED[task].title} {percent(ratio)}" for task, ratio in again.items() if ratio is not None)
    steps = ", ".join(f"{SIMULATED[task].title} {SIMULATED[task].num_steps}" for task in tasks)
    note = (
        f"Replicas in one process ({environment['cpu']}, torch {environment['torch']}, {environment['date']}; "
        "`benchmarks/defaults.py`), one seed; a transformer of 0.3M parameters. Loss to ddp's with as many replicas, "
        f"on data that is not trained on. Steps of ddp: {steps}. ddp with another seed, 4 replicas: {noise}."
    )
    text = "\n".join([note, "", "Outer rate / momentum (Nesterov), nothing is hidden:", "", *of_outers(found)])
    text += "\n\nFrom scratch, 4 replicas: `sparse_loco`, and whole averages beside it:\n\n"
    text += "\n".join([*of_local(found), ""])
    (RESULTS / "defaults.md").write_text(text)
    print(text)


def main() -> None:
    """Run what is missing, and write after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    report(go_on(RESULTS / "defaults.json", () if options.report else grid()))


if __name__ == "__main__":
    main()
