"""Seconds per step of this package's methods in two versions of it, in turn: the short grid of `slow_link.py`.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before --rates 1gbit        # two nodes of the lab, a core each; some minutes

Each round runs the benchmark of one checkout, then that of the other, and the next round the other way around. Methods
of torch are there to show the noise. Writes benchmarks/results/versions.json with the environment, and a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.slow_link import RESULTS, describe_environment

HERE = Path(__file__).resolve().parents[1]
NAME = "versions_of_one"  # of what a checkout writes
MODEL = "mlp-25M"

Cells = dict[tuple[str, str], float]


def measure(checkout: Path, rates: list[str]) -> Cells:
    """Return the median seconds per step in a checkout, by link and method."""
    command = [sys.executable, "benchmarks/slow_link.py", "--models", MODEL, "--rates", *rates]
    command += ["--repetitions", "1", "--name", NAME]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    written = [checkout / "benchmarks" / "results" / f"{NAME}.{kind}" for kind in ("json", "md", "png")]
    cells = json.loads(written[0].read_text())["cells"]
    for each in written:
        each.unlink(missing_ok=True)
    return {(cell["rate"], cell["method"]): statistics.median(cell["step_s"]) for cell in cells}


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, short."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()


def table(results: dict[str, Any]) -> str:
    """Return the medians of both, and the ratios by round."""
    lines = [
        f"| {MODEL} | method | s per step, {results['before']} | {results['after']} | after / before | by round |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        ratios = [after / before for before, after in zip(row["before"], row["after"], strict=True)]
        before, after = statistics.median(row["before"]), statistics.median(row["after"])
        lines.append(
            f"| {row['rate']} | {row['method']} | {before:.4f} | {after:.4f} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} - {max(ratios):.2f} |"
        )
    told = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    return "\n".join([*lines, "", f"Two nodes, a core each; {results['rounds']} rounds in turn. {told}.", ""])


def main() -> None:
    """Measure both in turn, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other version")
    parser.add_argument("--rates", nargs="+", default=["1gbit"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    before = options.before.resolve()
    measured: dict[Path, list[Cells]] = {before: [], HERE: []}
    for number in range(options.rounds):
        for checkout in [before, HERE][:: 1 if number % 2 == 0 else -1]:
            measured[checkout].append(measure(checkout, options.rates))
    common = [key for key in measured[HERE][0] if key in measured[before][0]]
    results = {
        "before": commit_of(before),
        "after": commit_of(HERE),
        "rounds": options.rounds,
        "rows": [
            {
                "rate": rate,
                "method": method,
                "before": [cells[rate, method] for cells in measured[before]],
                "after": [cells[rate, method] for cells in measured[HERE]],
            }
            for rate, method in common
        ],
        "environment": {name: each for name, each in describe_environment().items() if name != "link"},
    }
    (RESULTS / "versions.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "versions.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
