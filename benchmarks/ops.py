"""What a sparse step computes on one rank, in nanoseconds per parameter, beside a copy of the same memory.

    python benchmarks/ops.py                # 25M parameters, one thread; a minute or two

A step is what lies between the gradient and the message: the look for what is not finite, decay, momentum correction,
the k largest, masking. All variants start from one state, in which the threshold has settled, take turns, and do the
same steps. Then, by density, what a step does apart from the exchange itself: it selects, codes, reads and applies.
Writes benchmarks/results/ops_cpu.json with the environment, and a table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw.kernels import dispatch, reference
from lightning_lowbw.kernels.dispatch import averages_for
from lightning_lowbw.kernels.reference import Arrival, SecondMoment, Segment, scatter_mean_, take_
from lightning_lowbw.payloads import top_k
from lightning_lowbw.payloads.codec import SparseCodec
from lightning_lowbw.payloads.top_k import SampledSelector, Selection, num_selected

SIZES = [6553600, 5000003, 4194304, 2500000, 2097152, 1638400, 1048576, 1000001, 589824, 378140]  # 25,000,000
DENSITY = 1e-3
DENSITIES = (0.001, 0.008, 0.032, 0.064, 0.128, 0.256)  # of which those of a warm-up are larger
MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4
# Read and written per parameter: G read, u and v read and written; with decay w read; Adam's m, v and the residual.
COPY_BYTES = {"SGD": 20, "SGD, decay": 24, "AdamW": 28}
SETTLING_STEPS = 30  # until a residual has stopped growing fast


@dataclass(frozen=True)
class Row:
    """One variant, repeated.

    Attributes:
        optimizer: one of `COPY_BYTES`, with its copy the row is compared; empty: with the first.
        ns: nanoseconds per parameter, of each repetition.
    """

    variant: str
    optimizer: str
    ns: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        return statistics.median(self.ns)


class State:
    """What one variant keeps from step to step: v, u, Adam's mean of squares and a selector per tensor."""

    def __init__(self, device: str) -> None:
        self.residuals = [torch.zeros(size, device=device) for size in SIZES]
        self.momentum_buffers = [torch.zeros(size, device=device) for size in SIZES]
        self.squares = [torch.zeros(size, device=device) for size in SIZES]
        self.selectors = [SampledSelector() for _ in SIZES]

    def clone(self) -> State:
        other = State.__new__(State)
        other.residuals = [tensor.clone() for tensor in self.residuals]
        other.momentum_buffers = [tensor.clone() for tensor in self.momentum_buffers]
        other.squares = [tensor.clone() for tensor in self.squares]
        other.selectors = [SampledSelector() for _ in SIZES]
        for mine, its in zip(self.selectors, other.selectors, strict=True):
            its.threshold = mine.threshold
        return other


Select = Callable[[SampledSelector, Segment], Tensor]


def step(state: State, select: Select, optimizer: str, gradients: list[Tensor], weights: list[Tensor]) -> None:
    """Correct, look for what is not finite, select and mask all tensors."""
    is_adam = optimizer == "AdamW"
    for number, (v, u) in enumerate(zip(state.residuals, state.momentum_buffers, strict=True)):
        moment = SecondMoment(
            square=state.squares[number], largest=None, beta2=0.999, share=0.5, eps=1e-8, corrections=(1.0, 0.1)
        )
        segment = Segment(
            residual=v,
            momentum_buffer=u,
            gradient=gradients[number],
            weight=weights[number] if optimizer == "SGD, decay" else None,
            k=num_selected(v.numel(), DENSITY),
            momentum=MOMENTUM,
            dampening=MOMENTUM if is_adam else 0.0,
            weight_decay=WEIGHT_DECAY if optimizer == "SGD, decay" else 0.0,
            second_moment=moment if is_adam else None,
            fault=torch.zeros((), dtype=torch.bool),
        )
        positions = select(state.selectors[number], segment)
        take_(v, None if is_adam else u, positions)


def select_in_one_pass(selector: SampledSelector, segment: Segment) -> Tensor:
    return selector.accumulate_(segment)


def select_without_a_threshold(selector: SampledSelector, segment: Segment) -> Tensor:
    selector.threshold = 0.0
    return select_in_one_pass(selector, segment)


@contextmanager
def only(kernels: ModuleType) -> Iterator[None]:
    """Run the selectors on one of the twins, whatever would be chosen."""
    with mock.patch.object(top_k, "kernels_for", return_value=kernels):
        yield


def seconds_on_cpu(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(
    variants: dict[str, Callable[[], object]], optimizer: str, repetitions: int, prepare: Callable[[], None]
) -> list[Row]:
    """Time the variants in turns, after a first round that is not counted; `prepare` comes before each round."""
    rows = [Row(name, optimizer) for name in variants]
    for number in range(-1, repetitions):
        prepare()
        for row, function in zip(rows, variants.values(), strict=True):
            ns = seconds_on_cpu(function) / sum(SIZES) * 1e9
            if number >= 0:
                row.ns.append(ns)
    return rows


def draw(gradients: list[Tensor]) -> None:
    """Fill in the gradients of the next step."""
    for gradient in gradients:
        gradient.normal_()


def steps_on_cpu(optimizer: str, repetitions: int) -> list[Row]:
    """Measure a whole step in each variant, and its limit."""
    gradients = [torch.empty(size) for size in SIZES]
    weights = [torch.randn(size) for size in SIZES]
    settled = State("cpu")
    for _ in range(SETTLING_STEPS):
        draw(gradients)
        step(settled, select_in_one_pass, optimizer, gradients, weights)
    source = torch.ones(sum(SIZES) * COPY_BYTES[optimizer] // 8)  # four bytes read and four written per element
    target = torch.zeros_like(source)

    def stepping(select: Select, kernels: ModuleType) -> Callable[[], object]:
        state = settled.clone()

        def run() -> None:
            with only(kernels):
                step(state, select, optimizer, gradients, weights)

        return run

    variants: dict[str, Callable[[], object]] = {
        copy_of(optimizer): lambda: target.copy_(source),
        "torch": stepping(select_in_one_pass, reference),
        "torch, no threshold yet": stepping(select_without_a_threshold, reference),
    }
    if (compiled := dispatch.compiled_for()) is not None:
        variants["compiled (numba)"] = stepping(select_in_one_pass, compiled)
        variants["compiled (numba), no threshold yet"] = stepping(select_without_a_threshold, compiled)
    return measure(variants, optimizer, repetitions, lambda: draw(gradients))


def rest_on_cpu(repetitions: int) -> list[Row]:
    """Measure what comes before and after: the look for NaN and inf, and the mean of what arrived."""
    dense = [torch.randn(size) for size in SIZES]

    def look() -> None:
        for tensor in dense:
            torch.aminmax(tensor)

    def averaging(num_ranks: int) -> Callable[[], object]:
        parts = []
        for size in SIZES:
            k = num_selected(size, DENSITY)
            parts.append([(torch.randint(size, (k,)).sort().values, torch.randn(k)) for _ in range(num_ranks)])

        def run() -> None:
            for out, of_ranks in zip(dense, parts, strict=True):
                scatter_mean_(out, of_ranks)

        return run

    variants: dict[str, Callable[[], object]] = {"look for NaN and inf (aminmax)": look}
    variants |= {f"scatter_mean_, {ranks} ranks": averaging(ranks) for ranks in (2, 8, 32)}
    return measure(variants, "", repetitions, lambda: None)


def parts_by_density(density: float, repetitions: int) -> list[Row]:
    """Measure what a sparse step of SGD with momentum does on one of two ranks, apart from the exchange itself."""
    gradients, weights = [torch.empty(size) for size in SIZES], [torch.randn(size) for size in SIZES]
    state, chosen, codec = State("cpu"), Selection(), SparseCodec()
    counts = [num_selected(size, density) for size in SIZES]
    places = list(zip(counts, accumulate(counts[:-1], initial=0), strict=True))
    found: dict[str, Any] = {}

    def select() -> None:
        segments = {
            str(number): Segment(residual=v, momentum_buffer=u, gradient=gradient, weight=None, k=k, momentum=MOMENTUM)
            for number, (v, u, gradient, k) in enumerate(
                zip(state.residuals, state.momentum_buffers, gradients, counts, strict=True)
            )
        }
        found["parts"] = chosen.compress_(segments, masking=True)

    def code() -> None:
        found["message"] = codec.encode(found["parts"], SIZES, state.residuals)

    def read() -> None:
        found["positions"], found["values"] = codec.decode(torch.stack([found["message"]] * 2), counts, SIZES)

    def apply() -> None:
        rooms = state.squares  # of no use to SGD
        arrivals = [
            Arrival(room, 0, first, count, weight, 1e-3)
            for room, weight, (count, first) in zip(rooms, weights, places, strict=True)
        ]
        averages_for(torch.device("cpu")).average_many_(arrivals, found["positions"][None], found["values"][None])

    for _ in range(SETTLING_STEPS // 3):
        draw(gradients)
        select()
        code()
    parts = {"select": select, "code": code, "read 2 messages": read, "apply": apply}
    variants = {f"{name}, {density:.1%}": part for name, part in parts.items()}
    return measure(variants, "", repetitions, lambda: draw(gradients))


def copy_of(optimizer: str) -> str:
    """Return the name of the row that is the limit."""
    return f"copy, {COPY_BYTES[optimizer]} bytes"


def to_markdown(rows: list[Row]) -> str:
    """Return a table; ratios are of medians within one run."""
    medians = {row.variant: row.median_ns for row in rows}
    lines = [
        "| variant | optimizer | ns per parameter | spread | x copy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        spread = f"{min(row.ns):.2f} - {max(row.ns):.2f}"
        ratio = row.median_ns / medians[copy_of(row.optimizer or "SGD")]
        lines.append(f"| {row.variant} | {row.optimizer} | {row.median_ns:.2f} | {spread} | {ratio:.2f} |")
    return "\n".join([*lines, ""])


def write(name: str, rows: list[Row], **more: Any) -> str:
    """Write the JSON and the table; return the table."""
    environment = describe_environment(link=None)
    results = {"environment": environment, "command": shlex.join(sys.argv), "sizes": SIZES, "density": DENSITY, **more}
    results["rows"] = [asdict(row) for row in rows]
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    table = to_markdown(rows)
    (RESULTS / f"{name}.md").write_text(table)
    return table


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--name", default="ops_cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [row for optimizer in COPY_BYTES for row in steps_on_cpu(optimizer, options.repetitions)]
        rows += rest_on_cpu(options.repetitions)
        for density in DENSITIES:
            rows += parts_by_density(density, options.repetitions)
    print(write(options.name, rows, threads=options.threads))


if __name__ == "__main__":
    main()
