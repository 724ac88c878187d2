"""Bytes that a rank receives per step by three exchanges of 25M parameters, at density 1e-3: by ledger and by formula.

    .venv/bin/python benchmarks/exchange.py      # gloo on loopback; two minutes on two cores

Selections are random and independent, which is the worst case for the reduce-scatter: hardly any positions coincide.
Writes benchmarks/results/exchange.json and .md. Volumes only: loopback has no bandwidth to speak of.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw import DGC
from lightning_lowbw.comm.collectives import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.compress.codec import VALUE_NAMES, SparseCodec
from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.compress.sparse_sum import COUNT_BYTES, SparseSum, even_boundaries
from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.sync.exchange import ReduceScatterExchange
from tests.ranks import run_ranks

NUMELS, DENSITY, STEPS = (16_000_000, 8_000_000, 1_000_000), 1e-3, 4
MEASURED, BY_FORMULA = (2, 4, 8), (16, 64)  # ranks
COUNTS = [num_selected(numel, DENSITY) for numel in NUMELS]
CONTESTANTS = ("dense", "all_gather", "reduce_scatter")


def select(rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return random selections of exactly k elements, their values as random."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    parts = []
    for numel, k in zip(NUMELS, COUNTS, strict=True):
        stratum = numel // k  # one element in each of k strata: distinct, ascending
        positions = torch.arange(k) * stratum + torch.randint(stratum, (k,), generator=generator)
        parts.append((positions, torch.randn(k, generator=generator)))
    return parts


def magnitude(parts: list[tuple[Tensor, Tensor]]) -> float:
    """Return the sum of all magnitudes."""
    return sum(float(values.abs().sum()) for _, values in parts)


def formulas(codec: SparseCodec, num_ranks: int, boundaries: tuple[int, ...] = ()) -> dict[str, int]:
    """Return the bytes that a rank receives in each exchange.

    Args:
        codec: of the elements on the wire.
        num_ranks: the number of ranks.
        boundaries: of the reduce-scatter's parts; as in a first step where there are none.
    """
    plan = SparseSum(NUMELS, sum(COUNTS), boundaries or even_boundaries(NUMELS, COUNTS, num_ranks), codec)
    capacities = plan.scatter_capacity, plan.gather_capacity  # of the two messages, with one and two numbers in front
    messages = sum(codec.nbytes([capacity], [max(capacity, *plan.widths)]) for capacity in capacities)
    return {
        "dense": all_reduce_bytes(4 * sum(NUMELS), num_ranks),
        "all_gather": all_gather_bytes(codec.nbytes(COUNTS, NUMELS), num_ranks),
        "reduce_scatter": (num_ranks - 1) * (3 * COUNT_BYTES + messages),
    }


def measure(codec: SparseCodec) -> list[dict[str, Any]]:
    """Return received bytes of each exchange and step, what the formula says, and the share that was kept back."""
    peers, rows = Peers(), []
    exchange, dense = peers.between, torch.zeros(sum(NUMELS))
    payload = TopK(density=DENSITY, value_dtype=codec.value_dtype, exchange="reduce_scatter")
    reducer = ReduceScatterExchange(payload, peers)
    for step in range(STEPS):
        parts = select(exchange.rank, step)
        formula = formulas(codec, exchange.num_ranks, reducer.boundaries)
        signal = {str(i): torch.zeros(numel).index_add_(0, *parts[i]) for i, numel in enumerate(NUMELS)}
        for name in CONTESTANTS:
            before, unsent = exchange.ledger.received_bytes, 0.0
            if name == "dense":
                exchange.all_reduce_(dense)
            elif name == "all_gather":
                exchange.all_gather(codec.encode(parts, NUMELS))
            else:
                for residual in reducer.residuals.values():
                    residual.zero_()
                reducer.prepare(signal).send()
                unsent = sum(float(residual.abs().sum()) for residual in reducer.residuals.values()) / magnitude(parts)
            received = exchange.ledger.received_bytes - before
            rows.append({"exchange": name, "received": received, "formula": formula[name], "unsent": unsent})
    return rows


def to_markdown(rows: list[dict[str, Any]], codec: SparseCodec) -> str:
    """Return the table."""
    message = codec.nbytes(COUNTS, NUMELS)
    lines = [
        f"{sum(NUMELS):,} parameters, of which {sum(COUNTS):,} are sent: {message:,} bytes, "
        f"{8 * message / sum(COUNTS):.1f} bits per element, values {codec.value_dtype}. Received by a rank in a step; "
        "kept back, of the magnitude that was selected, rounding included:",
        "",
        "| ranks | exchange | bytes received | by formula | in messages | kept back |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        measured = row["received_bytes"] is not None
        cells = [
            row["ranks"],
            row["exchange"],
            f"{row['received_bytes']:,}" if measured else "not measured",
            f"{row['formula_bytes']:,}",
            f"{row['formula_bytes'] / message:.2f}",
            f"{row['unsent']:.1%}" if measured else "-",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=MEASURED)
    parser.add_argument("--value-dtype", choices=VALUE_NAMES, default=DGC().what.value_dtype)
    options = parser.parse_args()
    codec, rows = SparseCodec(options.value_dtype), list[dict[str, Any]]()
    for num_ranks in options.ranks:
        cells = [cell for cells in run_ranks(measure, num_ranks, codec, timeout_s=300.0) for cell in cells]
        for name in CONTESTANTS:
            mine = [cell for cell in cells if cell["exchange"] == name]
            for cell in mine:  # in every step of every rank
                if cell["received"] != cell["formula"]:
                    raise SystemExit(f"{name}: {cell['received']} bytes received, {cell['formula']} by formula.")
            rows.append(
                {
                    "ranks": num_ranks,
                    "exchange": name,
                    "received_bytes": max(cell["received"] for cell in mine),
                    "formula_bytes": max(cell["formula"] for cell in mine),
                    "unsent": statistics.mean(cell["unsent"] for cell in mine),
                }
            )
    for num_ranks in BY_FORMULA:
        for name, nbytes in formulas(codec, num_ranks).items():
            rows.append({"ranks": num_ranks, "exchange": name, "received_bytes": None, "formula_bytes": nbytes})
    environment = describe_environment(link="loopback, gloo")
    results = {"environment": environment, "command": shlex.join(sys.argv), "numels": NUMELS, "k": sum(COUNTS)}
    results |= {"value_dtype": codec.value_dtype, "message_bytes": codec.nbytes(COUNTS, NUMELS), "rows": rows}
    (RESULTS / "exchange.json").write_text(json.dumps(results, indent=1) + "\n")
    table = to_markdown(rows, codec)
    (RESULTS / "exchange.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
