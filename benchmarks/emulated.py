"""Steps of many nodes on few cores: computation is emulated, gradients and communication are real.

    .venv/bin/python benchmarks/emulated.py

Writes benchmarks/results/emulated.json and .md: seconds per step by number of nodes and link, beside what the planner
predicts from the rate and the round trip that were asked for. Rows of earlier runs that are not measured again stay. At
"unlimited" what remains is processor time, of which a cluster would have a machine per node; it is in the predictions
for the other links.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import DDP, EMULATED, EMULATED_TWO_LEVEL, NO_COMMUNICATION
from benchmarks.harness import RESULTS, describe_environment
from benchmarks.models import resnet50_layers
from benchmarks.slow_link import WITH_HEADERS, Cell, run_cells
from lightning_lowbw import DGC, Hierarchical, Method, PowerSGD, QuantizedGradients, Where
from lightning_lowbw.comm.link import Link
from lightning_lowbw.cost_model import Cluster, cost_of
from lightning_lowbw.tools.lab import parse_rate

WORKLOAD = "resnet50-emulated"
CAPTION = (
    "ResNet-50's gradients; computation is a wait, messages are real, all nodes share two cores. dgc sends 0.1 %. "
    "Predicted: what the method takes at unlimited bandwidth here, and the planner's seconds for the network."
)
WITHIN = 20  # percent
SHAPES = [shape for shapes in resnet50_layers() for shape in shapes]
BACKWARD = 2 / 3  # of the computation
METHODS = {
    "ddp": Method(),
    "ddp + fp16": Method(where=Where(inter_dtype="bfloat16")),  # as many bytes
    "PowerSGD rank 1": PowerSGD(1),
    "int8": QuantizedGradients("int8"),
    "dgc": DGC(sparsity=[0.999]),
    "hierarchical, sharded": Hierarchical(),
    "dgc, two levels": DGC(sparsity=[0.999], topology="auto"),
}


def predicted_s(cell: Cell, step_s: float) -> float:
    """Return the planner's seconds of a step, from those without waiting for the network."""
    if cell.method == NO_COMMUNICATION.name:
        return step_s
    rate = parse_rate(cell.rate)
    rtt_s = cell.rtt_ms / 1e3  # which a message of gloo takes, as `lowbw-check` finds it
    link = Link(rtt_s, math.inf if rate is None else rate / 8 / WITH_HEADERS)
    cluster = Cluster(cell.num_nodes, cell.ranks_per_node, link, overlap=BACKWARD)
    return step_s + cost_of(METHODS[cell.method], SHAPES, cluster, step_s).seconds


def to_markdown(cells: list[Cell]) -> str:
    """Return a row per number of nodes and method; the columns are links."""
    links = list(dict.fromkeys((cell.rate, cell.rtt_ms) for cell in cells))
    shown = [f"{rate}{f', {rtt_ms:g} ms' if rtt_ms else ''}" for rate, rtt_ms in links]
    lines = [
        f"| nodes x ranks | method | {' | '.join(f'{link}: s per step | predicted | ddp / it' for link in shown)} |",
        "| --- | --- |" + " --- |" * 3 * len(links),
    ]
    num_predicted, outside = 0, []
    table = {(cell.num_nodes, cell.ranks_per_node, cell.method, cell.rate, cell.rtt_ms): cell for cell in cells}
    for num_nodes, ranks_per_node, method in dict.fromkeys(key[:3] for key in table):
        row = [f"{num_nodes} x {ranks_per_node}", method]
        for link in links:
            names = (method, NO_COMMUNICATION.name, DDP.name)
            cell, limit, dense = (table.get((num_nodes, ranks_per_node, each, *link)) for each in names)
            base = table.get((num_nodes, ranks_per_node, method, "unlimited", 0.0), limit)
            if cell is None:
                row += ["-"] * 3
                continue
            predicted = predicted_s(cell, base.median_s) if base and base is not cell else None
            if predicted and method != NO_COMMUNICATION.name:
                num_predicted, percent = num_predicted + 1, 100 * (predicted / cell.median_s - 1)
                if abs(percent) > WITHIN:
                    outside.append(f"{percent:+.0f} % ({num_nodes} x {ranks_per_node}, {method}, {cell.rate})")
            row += [
                f"{cell.median_s:.3f}",
                f"{predicted:.3f}" if predicted else "-",
                f"{dense.median_s / cell.median_s:.2f}" if dense else "-",
            ]
        lines.append(f"| {' | '.join(row)} |")
    note = f"{num_predicted - len(outside)} of {num_predicted} predictions are within {WITHIN} %"
    note += f"; not so {', '.join(outside)}" if outside else ""
    return "\n".join([CAPTION, f"{note}.", "", *lines, ""])


def main() -> None:
    """Parse the command line, measure, write after each link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--ranks-per-node", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--links", nargs="+", default=["unlimited", "1gbit:0.5", "100mbit:50"], metavar="RATE[:RTT_MS]")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--name", default="emulated")
    options = parser.parse_args()
    path = RESULTS / f"{options.name}.json"
    cells = [Cell(**cell) for cell in json.loads(path.read_text())["cells"]] if path.exists() else []
    for ranks_per_node in options.ranks_per_node:
        contestants = EMULATED if ranks_per_node == 1 else EMULATED_TWO_LEVEL
        for num_nodes in options.nodes:
            for link in options.links:
                rate, _, rtt_ms = link.partition(":")
                here = num_nodes, ranks_per_node, rate, float(rtt_ms or 0)
                found = run_cells(
                    *(WORKLOAD, num_nodes, rate, contestants, options.repetitions),
                    ranks_per_node=ranks_per_node,
                    rtt_ms=here[-1],
                )
                others = [c for c in cells if (c.num_nodes, c.ranks_per_node, c.rate, c.rtt_ms) != here]
                cells = sorted([*others, *found], key=lambda cell: (cell.ranks_per_node, cell.num_nodes))
                results = {"environment": describe_environment(), "command": shlex.join(sys.argv)}
                results["cells"] = [asdict(cell) for cell in cells]
                path.write_text(json.dumps(results, indent=1) + "\n")
                path.with_suffix(".md").write_text(to_markdown(cells))
                print(to_markdown(cells), flush=True)


if __name__ == "__main__":
    main()
