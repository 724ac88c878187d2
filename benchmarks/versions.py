"""Two versions of this package: seconds per step of its methods, in turn, and what DGC's accuracy is.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before      # two nodes of the lab, a core each, then two nodes of two ranks
    python benchmarks/versions.py ../before --accuracy      # two ranks on loopback

Each round measures with one checkout, then with the other, and the next round the other way around. What torch does by
itself is there to show the noise. With --accuracy both train with the same seeds. Writes
benchmarks/results/versions.json or versions_accuracy.json with the environment, and a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import RESULTS, describe_environment

HERE = Path(__file__).resolve().parents[1]
MODEL = "mlp-25M"
FLAT = ["no communication", "ddp", "dgc, plain torch", "dgc"]
FLAT += ["local_sgd / 8", "local_sgd / 8, hidden"]
TWO_LEVEL = ["ddp", "hierarchical, leader", "hierarchical, sharded", "dgc, two levels", "local_sgd / 8, two levels"]

# In either checkout: both have these functions, and write nothing then.
PROGRAM = """
import json, sys
from benchmarks.contestants import BY_NAME
from benchmarks.slow_link import run_cells
model, ranks_per_node, rate, *names = sys.argv[1:]
cells = run_cells(model, 2, rate, [BY_NAME[name] for name in names], 1, ranks_per_node=int(ranks_per_node))
print(json.dumps({cell.method: cell.step_s[0] for cell in cells}))
"""

# Two tasks, SGD with momentum and AdamW, with a warm-up, then 99.9 %; on two ranks.
TRAINING = """
import json, logging, os, sys, warnings
import lightning.pytorch as pl
import torch
from lightning_lowbw import DGCStrategy
from lightning_lowbw.tools.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

task, num_steps, *seeds = sys.argv[1:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
torch.set_num_threads(1)
rows, steps = [], int(num_steps)
for seed in map(int, seeds):
    pl.seed_everything(seed, workers=True, verbose=False)
    stairs = {"sparsity": [0.75, 0.9375, 0.984375, 0.996, 0.999]}
    strategy = DGCStrategy(rampup_begin_step=steps // 20, rampup_step=steps // 5, **stairs)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=steps,
        num_sanity_val_steps=0, check_val_every_n_epoch=None, val_check_interval=steps + 1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    is_text = task == "text"
    data = StdlibText() if is_text else DigitsData()
    options = {"optimizer": "adamw"} if is_text else {}
    model = (ByteLanguageModel if is_text else DigitsClassifier)(schedule="one_cycle", **options)
    trainer.fit(model, data)
    loss = trainer.validate(model, data, verbose=False)[0]["val_loss"]
    rows.append({"seed": seed, "val_loss": loss, "accuracy": trainer.test(model, data, verbose=False)[0]["test_acc"]})
if os.environ["RANK"] == "0":
    print(json.dumps(rows))
"""

Cells = dict[tuple[int, str, str], float]


def measure(checkout: Path, rates: list[str], two_level_rates: list[str]) -> Cells:
    """Return the seconds per step in a checkout, by ranks of a node, link and method."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    cells: Cells = {}
    links = [(1, rate, FLAT) for rate in rates] + [(2, rate, TWO_LEVEL) for rate in two_level_rates]
    for ranks, rate, names in links:
        command = [sys.executable, "-c", PROGRAM, MODEL, str(ranks), rate, *names]
        done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        cells |= {(ranks, rate, name): each for name, each in json.loads(done.stdout.splitlines()[-1]).items()}
    return cells


def train(checkout: Path, task: str, num_steps: int, seeds: list[int]) -> list[dict[str, Any]]:
    """Return validation loss and test accuracy with the DGC of a checkout, by seed."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(TRAINING)
        program.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [program.name, task, str(num_steps), *map(str, seeds)]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def measure_accuracy(before: Path, tasks: list[str], num_steps: int, seeds: list[int]) -> None:
    """Train with both, and write."""
    rows = [
        {"task": task, "before": old, "after": new}
        for task in tasks
        for old, new in zip(train(before, task, num_steps, seeds), train(HERE, task, num_steps, seeds), strict=True)
    ]
    head = f"| task | seeds | {{}}, {commit_of(before)} | {commit_of(HERE)} | after - before | in SE |"
    lines = [head.format(f"{num_steps} steps"), "| --- | --- | --- | --- | --- | --- |"]
    for task, (key, unit, name) in itertools.product(
        tasks, (("val_loss", 1, "validation loss"), ("accuracy", 100, "test accuracy, %"))
    ):
        old, new = ([unit * row[when][key] for row in rows if row["task"] == task] for when in ("before", "after"))
        change = [b - a for a, b in zip(old, new, strict=True)]
        mean, error = statistics.mean(change), statistics.stdev(change) / len(change) ** 0.5 if len(change) > 1 else 0.0
        lines.append(
            f"| {task}, {name} | {len(change)} | {statistics.mean(old):.4f} | {statistics.mean(new):.4f} | "
            f"{mean:+.4f} ± {error:.4f} | {mean / error if error else 0.0:+.1f} |"
        )
    write("versions_accuracy", {"before": commit_of(before), "after": commit_of(HERE), "rows": rows}, lines)


def write(name: str, results: dict[str, Any], lines: list[str]) -> None:
    """Write results with the environment, and a table of them."""
    results["environment"] = describe_environment(link=None)
    told = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    table = "\n".join([*lines, "", f"{told}.", ""])
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table)
    print(table)


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, short."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()


def table(results: dict[str, Any]) -> list[str]:
    """Return the medians of both, and the ratios by round."""
    lines = [
        f"| {MODEL}, ranks | link | method | s per step, {results['before']} | {results['after']} | after / before "
        "| by round |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        ratios = [after / before for before, after in zip(row["before"], row["after"], strict=True)]
        before, after = statistics.median(row["before"]), statistics.median(row["after"])
        lines.append(
            f"| 2 x {row['ranks_per_node']} | {row['rate']} | {row['method']} | {before:.4f} | {after:.4f} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} - {max(ratios):.2f} |"
        )
    return [*lines, "", f"Two nodes, a core each; medians of {results['rounds']} rounds in turn."]


def main() -> None:
    """Measure both in turn, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other version")
    parser.add_argument("--rates", nargs="*", default=["unlimited", "1gbit", "200mbit"])
    parser.add_argument("--two-level-rates", nargs="*", default=["1gbit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accuracy", action="store_true", help="train, instead of timing steps")
    parser.add_argument("--tasks", nargs="+", default=["digits", "text"], choices=["digits", "text"])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    before = options.before.resolve()
    if options.accuracy:
        measure_accuracy(before, options.tasks, options.steps, options.seeds)
        return
    measured: dict[Path, list[Cells]] = {before: [], HERE: []}
    for number in range(options.rounds):
        for checkout in [before, HERE][:: 1 if number % 2 == 0 else -1]:
            measured[checkout].append(measure(checkout, options.rates, options.two_level_rates))
    results = {
        "before": commit_of(before),
        "after": commit_of(HERE),
        "rounds": options.rounds,
        "rows": [
            {
                "ranks_per_node": key[0],
                "rate": key[1],
                "method": key[2],
                "before": [cells[key] for cells in measured[before]],
                "after": [cells[key] for cells in measured[HERE]],
            }
            for key in measured[HERE][0]
        ],
    }
    write("versions", results, table(results))


if __name__ == "__main__":
    main()
