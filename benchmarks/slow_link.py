"""Step time against bandwidth: every contestant on every link, in one run, interleaved.

    .venv/bin/python benchmarks/slow_link.py            # a short grid, under 15 minutes on two cores
    .venv/bin/python benchmarks/slow_link.py --full     # all models, links and node counts
    .venv/bin/python benchmarks/slow_link.py --two-level # two nodes of two ranks

Writes benchmarks/results/slow_link*.json with the environment, a Markdown table and a plot. Every number in a table
comes from there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib

from benchmarks.contestants import ALL, ALONE, BY_NAME, DDP, FP16, NO_COMMUNICATION, SHORT, TWO_LEVEL, Contestant
from benchmarks.harness import RESULTS, colour_of, describe_environment, run_in_lab
from benchmarks.models import WORKLOADS, Timed
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.tools.lab import parse_rate

matplotlib.use("Agg")  # draws without a display
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

WORKER = Path(__file__).with_name("worker.py")
WINDOW_S = 12.0  # what one measurement may take, roughly
MIN_STEPS, MAX_STEPS = 2, 10
MAX_SERIES = 8
LEFT_OUT = ("dgc, plain torch", "PowerSGD rank 4", ALONE.name)  # of a plot with more, in this order
SHOWN = ("slow_link_quantized", "two_level")  # whose plots are on pages
WITH_HEADERS = 1514 / 1448  # Ethernet, IP and TCP headers of a full packet beside its data


@dataclass(frozen=True)
class Cell:
    """One link, one model, one method: repeated measurements.

    Attributes:
        step_s: mean seconds per step of each repetition.
        interface_bytes: sent by node 0 per step, by the kernel, headers included.
        formula_bytes: what the volume formulas say for it, where there are any.
        rtt_ms: the round-trip time that the lab was asked for.
    """

    workload: str
    num_nodes: int
    rate: str
    method: str
    step_s: list[float] = field(default_factory=list)
    interface_bytes: list[float] = field(default_factory=list)
    formula_bytes: float | None = None
    ranks_per_node: int = 1
    rtt_ms: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def num_steps(contestant: Contestant, dense_bytes: int, rate: float | None, compute_s: float) -> int:
    """Choose how many steps to time: as many as fit the window, a multiple of the method's period."""
    expected_s = compute_s + (contestant.dense_share * dense_bytes * 8 / rate if rate else 0.0)
    steps = min(MAX_STEPS, max(MIN_STEPS, int(WINDOW_S / expected_s)))
    return -(-steps // contestant.period) * contestant.period


def run_cells(
    workload: str,
    num_nodes: int,
    rate: str,
    contestants: list[Contestant],
    repetitions: int,
    batch: int | None = None,
    ranks_per_node: int = 1,
    rtt_ms: float = 0.0,
) -> list[Cell]:
    """Measure all contestants on one link; they take turns within one group of processes."""
    parameters = Timed(WORKLOADS[workload]).parameters()
    num_ranks = num_nodes * ranks_per_node
    dense_bytes = all_reduce_bytes(sum(parameter.nbytes for parameter in parameters), num_ranks)
    bits_per_s = parse_rate(rate)
    job = {
        "workload": workload,
        "batch": batch,
        "threads": max(1, (os.cpu_count() or 1) // num_ranks),
        "repetitions": repetitions,
        "contestants": [
            {"name": each.name, "num_steps": num_steps(each, dense_bytes, bits_per_s, 0.4)} for each in contestants
        ],
    }
    records = run_in_lab(
        [bits_per_s] * num_nodes,
        [str(WORKER)],
        job=job,
        what=f"{workload}, {num_nodes} nodes, {rate}",
        ranks_per_node=ranks_per_node,
        rtt_ms=rtt_ms,
        timeout_s=3600.0,
    )
    cells = []
    for contestant in contestants:
        mine = [record for record in records if record["method"] == contestant.name]
        formula = {
            ALONE.name: 0.0,
            NO_COMMUNICATION.name: 0.0,
            DDP.name: float(dense_bytes),
            FP16.name: dense_bytes / 2,
        }
        by_formula = mine[0]["ledger_bytes"] if mine[0]["ledger_bytes"] is not None else formula.get(contestant.name)
        cells.append(
            Cell(
                workload,
                num_nodes,
                rate,
                contestant.name,
                [record["step_s"] for record in mine],
                [record["interface_bytes"] for record in mine],
                by_formula,
                ranks_per_node,
                rtt_ms,
            )
        )
    return cells


def to_markdown(cells: list[Cell]) -> str:
    """Return a table: one row per link and method; ratios are of medians within one run."""
    lines = [
        "| model | nodes | link | method | s per step | spread | x alone | x limit | DDP / it | bytes measured "
        "| by formula | with headers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in cells:
        same = [c for c in cells if (c.workload, c.num_nodes, c.rate) == (cell.workload, cell.num_nodes, cell.rate)]
        medians = {c.method: c.median_s for c in same}
        alone, limit, dense = (medians.get(each.name) for each in (ALONE, NO_COMMUNICATION, DDP))
        lines.append(
            "| "
            + " | ".join(
                [
                    cell.workload,
                    str(cell.num_nodes) if cell.ranks_per_node == 1 else f"{cell.num_nodes} x {cell.ranks_per_node}",
                    cell.rate,
                    cell.method,
                    f"{cell.median_s:.3f}",
                    f"{min(cell.step_s):.3f} - {max(cell.step_s):.3f}",
                    "-" if alone is None else f"{cell.median_s / alone:.2f}",
                    "-" if limit is None else f"{cell.median_s / limit:.2f}",
                    "-" if dense is None else f"{dense / cell.median_s:.2f}",
                    f"{statistics.median(cell.interface_bytes):,.0f}",
                    "-" if cell.formula_bytes is None else f"{cell.formula_bytes:,.0f}",
                    "-" if cell.formula_bytes is None else f"{cell.formula_bytes * WITH_HEADERS:,.0f}",
                ]
            )
            + " |"
        )
    return "\n".join([*lines, ""])


def draw(cells: list[Cell], path: Path) -> None:
    """Plot step time against bandwidth: a panel per model and number of nodes, a line per method."""
    cells = [cell for cell in cells if parse_rate(cell.rate) is not None]  # "unlimited" has no place on the axis
    panels = list(dict.fromkeys((cell.workload, cell.num_nodes) for cell in cells))
    if not panels:
        return
    if len({(cell.workload, cell.num_nodes, cell.rate) for cell in cells}) == 1:
        draw_bars(cells, path)
        return
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.5 * len(panels) + 2.0, 4.2), squeeze=False, layout="constrained"
    )
    methods = list(dict.fromkeys(cell.method for cell in cells))
    for method in LEFT_OUT:
        if len(methods) > MAX_SERIES and method in methods:
            methods.remove(method)
    markers: dict[str, str] = {}  # tell variants of a method apart, which have one colour
    for method in methods:
        markers[method] = "os^DvX"[sum(colour_of(each) == colour_of(method) for each in markers)]
    shown: dict[str, Any] = {}
    for axis, (workload, num_nodes) in zip(axes[0], panels, strict=True):
        mine = [cell for cell in cells if (cell.workload, cell.num_nodes) == (workload, num_nodes)]
        for method in (each for each in methods if any(cell.method == each for cell in mine)):
            points = [((parse_rate(cell.rate) or 0.0) / 1e9, cell.median_s) for cell in mine if cell.method == method]
            limited = sorted(points)
            is_limit = method == NO_COMMUNICATION.name
            style: dict[str, Any] = {"ls": "--"} if is_limit else {"marker": markers[method], "ms": 5}
            style["color"] = colour_of(method)
            if method.startswith(("PowerSGD", "torch")):  # torch's, beside ours of the same colour
                style["ls"] = ":"
            (shown[method],) = axis.plot([rate for rate, _ in limited], [seconds for _, seconds in limited], **style)
        axis.set(title=f"{workload}, {num_nodes} nodes", xscale="log", yscale="log")
        axis.set(xlabel="link, Gb/s", ylabel="seconds per step")
        rates = sorted({(parse_rate(cell.rate) or 0.0) / 1e9 for cell in mine})
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        axis.set_xticks([], minor=True)
        for of_axis in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            of_axis(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else ""))
        axis.grid(alpha=0.3, which="both")
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_bars(cells: list[Cell], path: Path) -> None:
    """Plot the step times of a single link, a bar per method."""
    figure, axis = plt.subplots(figsize=(7.5, 0.4 * len(cells) + 1.2), layout="constrained")
    colours = [colour_of(cell.method) for cell in cells]
    bars = axis.barh([cell.method for cell in cells], [cell.median_s for cell in cells], color=colours)
    axis.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set(title=f"{cells[0].workload}, {cells[0].num_nodes} nodes, {cells[0].rate}", xlabel="seconds per step")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def note(results: dict[str, Any]) -> str:
    """Return what a table is about."""
    where = "{cpu}, {num_cpus} cores, torch {torch}, {date}".format(**results["environment"])
    return (
        f'Nodes on one machine ({where}), bytes of one node: `{results["command"]}`. "alone" is a process that trains '
        'by itself, without DDP; "no communication" (the limit, "it") is DDP with its communication switched off. dgc '
        'is `DGCStrategy(sparsity=[0.999])`; it can take less time than "alone", because SGD\'s own step reads and '
        'writes every weight, a sparse step only those that were sent. "plain torch" is without numba; "hidden" is '
        "`delay_steps=7`.\n\n"
    )


def write(name: str, cells: list[Cell], **more: Any) -> str:
    """Write the JSON, the table, and the plot if a page shows it; return the table."""
    RESULTS.mkdir(exist_ok=True)
    results = {"environment": describe_environment(), "command": shlex.join(sys.argv), **more}
    results["cells"] = [asdict(cell) for cell in cells]
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    table = note(results) + to_markdown(cells)
    (RESULTS / f"{name}.md").write_text(table)
    if name in SHOWN:
        draw(cells, RESULTS / f"{name}.png")
    return table


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--two-level", action="store_true")
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--nodes", nargs="+", type=int)
    parser.add_argument("--rates", nargs="+")
    parser.add_argument("--methods", nargs="+", choices=list(BY_NAME))
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--name")
    parser.add_argument("--resume", action="store_true", help="keep the links already in the result, measure the rest")
    options = parser.parse_args()
    grid = {
        "models": options.models or (list(WORKLOADS) if options.full else ["mlp-25M"]),
        "nodes": options.nodes or ([2, 4] if options.full else [2]),
        "rates": options.rates
        or (
            ["unlimited", "10gbit", "1gbit", "200mbit", "100mbit"]
            if options.full
            else ["unlimited", "1gbit", "200mbit"]
        ),
    }
    contestants = TWO_LEVEL if options.two_level else ALL if options.full else SHORT
    if options.methods:
        contestants = [BY_NAME[each] for each in options.methods]
    name = options.name or ("two_level" if options.two_level else "slow_link_full" if options.full else "slow_link")
    cells: list[Cell] = []
    if options.resume and (RESULTS / f"{name}.json").exists():
        cells = [Cell(**cell) for cell in json.loads((RESULTS / f"{name}.json").read_text())["cells"]]
    for workload in grid["models"]:
        for nodes in grid["nodes"]:
            for rate in grid["rates"]:
                if any((cell.workload, cell.num_nodes, cell.rate) == (workload, nodes, rate) for cell in cells):
                    continue
                ranks_per_node = 2 if options.two_level else 1
                repetitions = options.repetitions or 3
                cells += run_cells(workload, nodes, rate, contestants, repetitions, None, ranks_per_node)
                print(to_markdown(cells[-len(contestants) :]), flush=True)
                write(name, cells)
    fastest = {
        (cell.workload, cell.num_nodes, cell.rate): min(
            (c for c in cells if (c.workload, c.num_nodes, c.rate) == (cell.workload, cell.num_nodes, cell.rate)),
            key=lambda c: c.median_s if c.method not in (ALONE.name, NO_COMMUNICATION.name) else float("inf"),
        ).method
        for cell in cells
    }
    for (workload, nodes, rate), method in fastest.items():
        print(f"{workload}, {nodes} nodes, {rate}: fastest is {method}")


if __name__ == "__main__":
    main()
