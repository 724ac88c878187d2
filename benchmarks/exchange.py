"""Bytes that a rank receives per step by three exchanges of 25M parameters, at density 1e-3: by ledger and by formula.

    python benchmarks/exchange.py      # gloo on loopback; two minutes on two cores

Selections are random and independent, which is the worst case for the reduce-scatter: hardly any positions coincide.
Writes benchmarks/results/exchange.json and .md. Volumes only: loopback has no bandwidth to speak of.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.slow_link import RESULTS, describe_environment
from lightning_lowbw.comm.collectives import Exchange
from lightning_lowbw.comm.sparse import SparseReduceScatter
from lightning_lowbw.core.codec import SparseCodec
from lightning_lowbw.core.schedule import num_selected
from lightning_lowbw.core.volume import all_gather_bytes, all_reduce_bytes, sparse_reduce_scatter_elements
from tests.ranks import run_ranks

NUMELS, DENSITY, RANKS, STEPS = (16_000_000, 8_000_000, 1_000_000), 1e-3, (2, 4, 8), 4
COUNTS = [num_selected(numel, DENSITY) for numel in NUMELS]
ELEMENT_BYTES = 8


def select(rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return random selections of exactly k elements, their values as random."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    parts = []
    for numel, k in zip(NUMELS, COUNTS, strict=True):
        stratum = numel // k  # one element in each of k strata: distinct, ascending
        positions = torch.arange(k) * stratum + torch.randint(stratum, (k,), generator=generator)
        parts.append((positions, torch.randn(k, generator=generator)))
    return parts


def measure() -> dict[str, list[float]]:
    """Return received bytes of each step and exchange, and what the reduce-scatter kept back, in units of k."""
    exchange, codec = Exchange(), SparseCodec()
    reducer = SparseReduceScatter(exchange, codec)
    measured: dict[str, list[float]] = {name: [] for name in ("dense", "all_gather", "reduce_scatter", "unsent")}
    dense = torch.zeros(sum(NUMELS))
    for step in range(STEPS):
        parts = select(exchange.rank, step)
        for name in ("dense", "all_gather", "reduce_scatter"):
            before = exchange.ledger.received_bytes
            if name == "dense":
                exchange.all_reduce_(dense)
            elif name == "all_gather":
                exchange.all_gather(codec.encode(parts))
            else:
                averaged = reducer.average(parts, NUMELS, COUNTS)
                measured["unsent"].append(sum(values.numel() for _, values in averaged.unsent) / sum(COUNTS))
            measured[name].append(exchange.ledger.received_bytes - before)
    return measured


def main() -> None:
    """Measure, write."""
    k, rows = sum(COUNTS), []
    for num_ranks in RANKS:
        by_rank = run_ranks(measure, num_ranks, timeout_s=300.0)
        formulas = {
            "dense": all_reduce_bytes(4 * sum(NUMELS), num_ranks),
            "all_gather": all_gather_bytes(ELEMENT_BYTES * k, num_ranks),
            "reduce_scatter": ELEMENT_BYTES * sparse_reduce_scatter_elements(k, num_ranks),
        }
        for name, formula in formulas.items():
            received = max(value for result in by_rank for value in result[name])
            unsent = statistics.mean(value for result in by_rank for value in result["unsent"])
            rows.append(
                {
                    "ranks": num_ranks,
                    "exchange": name,
                    "received_bytes": received,
                    "formula_bytes": formula,
                    "elements_per_k": None if name == "dense" else received / (ELEMENT_BYTES * k),
                    "unsent_per_k": unsent if name == "reduce_scatter" else 0.0,
                }
            )
    environment: dict[str, Any] = {**describe_environment(), "link": "loopback, gloo"}
    results = {"environment": environment, "command": " ".join(sys.argv), "numels": NUMELS, "k": k, "rows": rows}
    (RESULTS / "exchange.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        "| ranks | exchange | bytes received | by formula | elements / k | kept back / k |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        elements = "-" if row["elements_per_k"] is None else f"{row['elements_per_k']:.2f}"
        lines.append(
            f"| {row['ranks']} | {row['exchange']} | {row['received_bytes']:,.0f} | {row['formula_bytes']:,.0f} | "
            f"{elements} | {row['unsent_per_k']:.2f} |"
        )
    (RESULTS / "exchange.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
