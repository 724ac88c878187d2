"""Steps of many nodes on few cores: computation is emulated, gradients and communication are real.

    .venv/bin/python benchmarks/emulated.py

Writes benchmarks/results/emulated.json and .md: seconds per step by number of nodes and link, beside what the planner
predicts. At "unlimited" what remains is processor time, of which a cluster would have a machine per node.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import DDP, EMULATED, EMULATED_TWO_LEVEL, NO_COMMUNICATION
from benchmarks.harness import RESULTS, describe_environment
from benchmarks.slow_link import Cell, run_cells

WORKLOAD = "resnet50-emulated"


def to_markdown(cells: list[Cell]) -> str:
    """Return a row per number of nodes and method; the columns are links."""
    links = list(dict.fromkeys((cell.rate, cell.rtt_ms) for cell in cells))
    shown = [f"{rate}{f', {rtt_ms:g} ms' if rtt_ms else ''}" for rate, rtt_ms in links]
    lines = [
        f"| nodes x ranks | method | {' | '.join(f'{link}: s per step | predicted | ddp / it' for link in shown)} |",
        "| --- | --- |" + " --- |" * 3 * len(links),
    ]
    table = {(cell.num_nodes, cell.ranks_per_node, cell.method, cell.rate, cell.rtt_ms): cell for cell in cells}
    for num_nodes, ranks_per_node, method in dict.fromkeys(key[:3] for key in table):
        row = [f"{num_nodes} x {ranks_per_node}", method]
        for link in links:
            names = (method, NO_COMMUNICATION.name, DDP.name)
            cell, limit, dense = (table.get((num_nodes, ranks_per_node, each, *link)) for each in names)
            if cell is None:
                row += ["-"] * 3
                continue
            has_prediction = limit is not None and cell.predicted_add_s is not None
            row += [
                f"{cell.median_s:.3f}",
                f"{limit.median_s + cell.predicted_add_s:.3f}" if has_prediction else "-",
                f"{dense.median_s / cell.median_s:.2f}" if dense else "-",
            ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Parse the command line, measure, write after each link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--ranks-per-node", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--links", nargs="+", default=["unlimited", "1gbit:0.5", "100mbit:50"], metavar="RATE[:RTT_MS]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--name", default="emulated")
    options = parser.parse_args()
    cells: list[Cell] = []
    for ranks_per_node in options.ranks_per_node:
        contestants = EMULATED if ranks_per_node == 1 else EMULATED_TWO_LEVEL
        for num_nodes in options.nodes:
            for link in options.links:
                rate, _, rtt_ms = link.partition(":")
                cells += run_cells(
                    WORKLOAD,
                    num_nodes,
                    rate,
                    contestants,
                    options.repetitions,
                    ranks_per_node=ranks_per_node,
                    rtt_ms=float(rtt_ms or 0),
                    predicts=ranks_per_node == 1,
                )
                results = {"environment": describe_environment(), "command": shlex.join(sys.argv)}
                results["cells"] = [asdict(cell) for cell in cells]
                (RESULTS / f"{options.name}.json").write_text(json.dumps(results, indent=1) + "\n")
                (RESULTS / f"{options.name}.md").write_text(to_markdown(cells))
                print(to_markdown(cells), flush=True)


if __name__ == "__main__":
    main()
