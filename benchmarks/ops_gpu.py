"""What compressing costs on a GPU: Triton's kernels against plain torch, PowerSGD's matmuls, and the memory's speed.

    .venv/bin/python benchmarks/ops_gpu.py

The tensors are those of ResNet-50 that are sent sparse (at least 16384 elements). All contestants run in turn, between
CUDA events; medians. Writes benchmarks/results/ops_gpu.json and a table. Needs a CUDA device and Triton.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from lightning_lowbw.ops import gpu, reference
from lightning_lowbw.ops.reference import Segment, correct_, take_
from lightning_lowbw.what.selection import SampledSelector, exact_top_k, num_selected

RESULTS = Path(__file__).parent / "results"
MIN_NUMEL = 16384
MOMENTUM = 0.9
BYTES_PER_PARAMETER = 20  # gradient read, velocity and residual read and written; float32
NUM_RANKS = 8  # of the average
POWERSGD_RANKS = (1, 2, 4)


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the weights of ResNet-50: convolutions, then the last layer."""
    shapes, width = [(64, 3, 7, 7)], 64
    for planes, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            shapes += [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if block == 0:
                shapes.append((4 * planes, width, 1, 1))
            width = 4 * planes
    return [*shapes, (1000, width)]


Step = Callable[[], object]


def contestants(shapes: list[tuple[int, ...]], density: float) -> dict[str, Step]:
    """Return what is timed, by name; each has tensors of its own."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    def segments() -> list[Segment]:
        return [
            Segment(
                residual=torch.zeros(numel, device="cuda"),
                momentum_buffer=torch.zeros(numel, device="cuda"),
                gradient=draw(numel),
                weight=None,
                k=num_selected(numel, density),
                momentum=MOMENTUM,
            )
            for numel in map(prod, shapes)
        ]

    def fused() -> Step:
        mine, workspace = segments(), gpu.Workspace()

        def step() -> None:
            gpu.compress_many_(mine, value_dtype=torch.float32, masking=True, workspace=workspace)
            workspaces.add(workspace)

        return step

    def per_tensor(selectors: list[Callable[[Tensor, int], Tensor]]) -> Step:
        mine = segments()

        def step() -> None:
            for segment, select in zip(mine, selectors, strict=True):
                v, u = segment.residual, segment.momentum_buffer
                correct_(v, u, segment.gradient, momentum=MOMENTUM, nesterov=False)
                take_(v, u, select(v, segment.k), value_dtype=torch.float32, masking=True)

        return step

    def powersgd(rank: int) -> Step:
        matrices = [draw(shape[0], prod(shape[1:])) for shape in shapes]
        rights = [draw(matrix.shape[1], rank) for matrix in matrices]

        def step() -> None:
            for matrix, right in zip(matrices, rights, strict=True):
                left = matrix @ right
                torch.matmul(left, (matrix.T @ left).T)

        return step

    def copy() -> Step:
        source = draw(sum(map(prod, shapes)) * BYTES_PER_PARAMETER // 8)  # a copied float32 is read and written
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def average(scatter: Callable[..., None]) -> Step:
        outs = [torch.empty(prod(shape), device="cuda") for shape in shapes]
        counts = [num_selected(out.numel(), density) for out in outs]
        parts = [
            (
                torch.cat(
                    [torch.randperm(out.numel(), device="cuda")[:k] for out, k in zip(outs, counts, strict=True)]
                ),
                draw(sum(counts)),
            )
            for _ in range(NUM_RANKS)
        ]
        return lambda: scatter(outs, counts, parts)

    return {
        f"copy of {BYTES_PER_PARAMETER} bytes per parameter": copy(),
        "compress: Triton, all tensors": fused(),
        "compress: torch, per tensor, sampled": per_tensor([SampledSelector() for _ in shapes]),
        "compress: torch, per tensor, topk": per_tensor([exact_top_k for _ in shapes]),
        **{f"PowerSGD, matmuls of rank {rank}": powersgd(rank) for rank in POWERSGD_RANKS},
        f"average of {NUM_RANKS} ranks: Triton, all tensors": average(gpu.scatter_mean_many_),
        f"average of {NUM_RANKS} ranks: torch, per tensor": average(reference.scatter_mean_many_),
    }


workspaces: set[gpu.Workspace] = set()  # in use


def measure(steps: dict[str, Step], warm_up: int, repetitions: int) -> dict[str, list[float]]:
    """Return milliseconds of each repetition, all contestants in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(warm_up + repetitions):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            end.synchronize()
            if repetition >= warm_up:
                times[name].append(start.elapsed_time(end))
    return times


def describe_environment() -> dict[str, Any]:
    """Return what the numbers depend on."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def to_markdown(results: dict[str, Any]) -> str:
    """Return the table: medians, and their ratio to the first row."""
    environment, medians = results["environment"], {}
    for name, times in results["times_ms"].items():
        medians[name] = statistics.median(times)
    limit = next(iter(medians.values()))
    lines = [
        f"{environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}; {results['parameters']} "
        f"parameters in {results['tensors']} tensors, density {results['density']}, {results['repetitions']} "
        f"repetitions; {results['missed']} tensors looked through in the last step.",
        "",
        "| | ms | fastest - slowest | x the copy |",
        "| --- | --- | --- | --- |",
    ]
    for name, times in results["times_ms"].items():
        spread = f"{min(times):.3f} - {max(times):.3f}"
        lines.append(f"| {name} | {medians[name]:.3f} | {spread} | {medians[name] / limit:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--warm-up", type=int, default=50, help="steps before the first that counts")
    parser.add_argument("--repetitions", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not gpu.is_available(torch.device("cuda")):
        raise SystemExit("This measures a GPU: it needs a CUDA device that Triton supports, and Triton.")
    torch.manual_seed(0)
    shapes = [shape for shape in resnet50_shapes() if prod(shape) >= MIN_NUMEL]
    times = measure(contestants(shapes, options.density), options.warm_up, options.repetitions)
    results = {
        "environment": describe_environment(),
        "command": " ".join(sys.argv),
        "tensors": len(shapes),
        "parameters": sum(map(prod, shapes)),
        "density": options.density,
        "repetitions": options.repetitions,
        "missed": sum(len(workspace.missed()) for workspace in workspaces),
        "times_ms": times,
    }
    (RESULTS / "ops_gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "ops_gpu.md").write_text(to_markdown(results))
    print(to_markdown(results))


if __name__ == "__main__":
    main()
