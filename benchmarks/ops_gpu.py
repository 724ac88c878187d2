"""What a sparse step costs on a GPU, beside the optimizer's own step: at 25M, 100M and 1B parameters.

    python benchmarks/ops_gpu.py             # about four minutes; `make gpu` runs the GPU's tests first

Timed is all between the end of backward and the stepped weights: `worker.exchange` and `optimizer.step`. Nothing is
sent: each rank's message is this rank's own, so that packing, unpacking and averaging are those of a real step. Beside
it stand the optimizer's own step, the copy of as much memory as a step must touch, `torch.topk`, and PowerSGD's
matmuls. All take turns, between CUDA events; medians. What does not fit into memory has no
row. The exit status is 1 if a sparse step waits for the device more than once.

Writes benchmarks/results/ops_gpu.json and a table anew after each row, and a plot. Needs a CUDA device and Triton; on a
CPU (`--device cpu`) it shows only that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import shlex
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

import lightning_lowbw
from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.presets import DGC
from lightning_lowbw.sync import gradient as whole_gradients
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.status import Status
from lightning_lowbw.sync.synchronizer import Synchronizer
from lightning_lowbw.tools.check import kernels_of

RESULTS = Path(__file__).parent / "results"
WIDTHS = {"25M": (512, 6), "100M": (1024, 6), "1B": (2048, 19)}  # of a decoder: width, and number of its layers
WIDTHS["tiny"] = (16, 1)  # for a CPU
NUM_TOKENS = 16_384
# Read and written per parameter: gradient, velocity, residual; Adam's second moment. Float32.
BYTES = {"SGD": 20, "AdamW": 28}
NUM_RANKS = (2, 8, 64)
POWERSGD_RANKS = (1, 4)
LIMIT = "copy of {} bytes per parameter"

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One contestant at one size.

    Attributes:
        limit: the row it is compared with.
        ms: of each repetition.
        waits: what a sparse step has waited for, by the warnings of `torch.cuda.set_sync_debug_mode`.
    """

    size: str
    parameters: int
    tensors: int
    name: str
    limit: str
    ms: list[float] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


def prepare(device: torch.device) -> None:
    """Try the kernels, and let echoes pass for ranks."""
    if device.type == "cuda" and not (torch.cuda.is_available() and dispatch.uses_triton(torch.device("cuda", 0))):
        raise SystemExit("This measures a GPU: it needs a CUDA device that Triton supports, and Triton.")
    if device.type == "cuda" and (found := kernels_of(torch.device("cuda", 0))) != "compiled":
        raise SystemExit(found)
    torch.manual_seed(0)
    whole_gradients.CHECK_EVERY_STEPS = sys.maxsize  # a checksum of the weights is not a part of most steps
    Status.read = staticmethod(read_echoed)  # type: ignore[method-assign]


def read_echoed(values: list[float], num_ranks: int) -> Status:
    """Read the sum of a status and its echoes, which have no marks of their own."""
    return Status(values[: -2 * num_ranks], any(values[-2 * num_ranks : -num_ranks]), [0] * num_ranks)


def decoder_shapes(width: int, num_layers: int) -> list[tuple[int, ...]]:
    """Return the shapes of a decoder's weights, norms and biases."""
    shapes: list[tuple[int, ...]] = [(NUM_TOKENS, width)]
    for _ in range(num_layers):
        for outputs, inputs in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
            shapes += [(outputs, inputs), (outputs,)]
        shapes += [(width,)] * 4
    return shapes


def step_of(worker: Synchronizer, optimizer: Optimizer, refresh: Callable[[], None]) -> Step:
    """Return a step that exchanges and applies; its `refresh` draws gradients."""

    def step() -> None:
        with worker.stepping():
            worker.exchange(applies=True)
            optimizer.step()

    step.refresh = refresh  # type: ignore[attr-defined]
    return step


def make_optimizer(kind: str, parameters: list[Parameter], **options: Any) -> Optimizer:
    """Return an optimizer as a user would have it."""
    if kind == "SGD":
        return SGD(parameters, lr=1e-6, momentum=0.9, **options)
    return AdamW(parameters, lr=1e-6, **options)


class Contest:
    """The contestants at one size; each has tensors of its own only while it is measured.

    Args:
        shapes: of the parameters.
        device: of all tensors.
    """

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device) -> None:
        self.shapes, self.device = shapes, device

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)

    def parameters(self) -> list[Parameter]:
        return [Parameter(self.draw(*shape)) for shape in self.shapes]

    def sparse_step(self, kind: str, num_ranks: int) -> Step:
        """Return a step of `dgc` among n ranks."""
        parameters = self.parameters()
        gradients_of = [self.draw(*shape) for shape in self.shapes]
        optimizer = make_optimizer(kind, parameters)
        method = DGC()
        worker = GradientSync(method, optimizer, [(str(i), each) for i, each in enumerate(parameters)], echo(num_ranks))

        def refresh() -> None:
            for parameter, gradient in zip(parameters, gradients_of, strict=True):
                parameter.grad = gradient.normal_()

        return step_of(worker, optimizer, refresh)

    def own_step(self, kind: str, **options: Any) -> Step:
        """Return the optimizer's own step."""
        parameters = self.parameters()
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make_optimizer(kind, parameters, **options)
        return optimizer.step

    def copy(self, num_bytes: int) -> Step:
        source = self.draw(sum(map(prod, self.shapes)) * num_bytes // 8)  # a copied float32 is read and written
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def topk(self) -> Step:
        values = [self.draw(prod(shape)) for shape in self.shapes]
        return lambda: [each.abs().topk(max(1, each.numel() // 1000), sorted=False) for each in values]

    def powersgd(self, rank: int) -> Step:
        matrices = [self.draw(*shape) for shape in self.shapes if len(shape) == 2]
        rights = [self.draw(matrix.shape[1], rank) for matrix in matrices]

        def step() -> None:
            for matrix, right in zip(matrices, rights, strict=True):
                left = matrix @ right
                torch.matmul(left, (matrix.T @ left).T)

        return step

    def contestants(self) -> dict[str, tuple[str, Callable[[], Step]]]:
        """Return what is measured: how it is made, and the row it is compared with."""
        found: dict[str, tuple[str, Callable[[], Step]]] = {}
        for kind, num_bytes in BYTES.items():
            limit = LIMIT.format(num_bytes)
            found[limit] = limit, lambda num_bytes=num_bytes: self.copy(num_bytes)  # type: ignore[misc]
            for options in ({"foreach": True}, {"fused": True}):
                name = f"{kind}({next(iter(options))}=True), its own step"
                found[name] = limit, lambda kind=kind, options=options: self.own_step(kind, **options)  # type: ignore[misc]
            for num_ranks in NUM_RANKS if kind == "SGD" else NUM_RANKS[1:2]:
                name = f"dgc, {kind}, {num_ranks} ranks: exchange and step"
                found[name] = limit, lambda kind=kind, n=num_ranks: self.sparse_step(kind, n)  # type: ignore[misc]
        limit = LIMIT.format(BYTES["SGD"])
        found["torch.topk of each tensor, alone"] = limit, self.topk
        for rank in POWERSGD_RANKS:
            found[f"PowerSGD, matmuls of rank {rank}, alone"] = limit, lambda rank=rank: self.powersgd(rank)  # type: ignore[misc]
        return found


def time_ms(step: Step, device: torch.device) -> float:
    """Return the milliseconds of one step, without drawing its gradients."""
    getattr(step, "refresh", lambda: None)()
    if device.type == "cpu":
        started = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - started)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def waits_of(step: Step, device: torch.device) -> list[str]:
    """Take a step, and return where it has waited for the device: each time the innermost of our functions."""
    if device.type == "cpu":
        step()
        return []
    waits: list[str] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            ours = [frame for frame in traceback.extract_stack() if "/lightning_lowbw/" in frame.filename]
            waits.append(" < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in ours[:-5:-1]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # warns, too: that it does not see all waits
        warnings.simplefilter("always")
        warnings.showwarning = note
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits


def measure(size: str, device: torch.device, repetitions: int) -> Iterator[list[Row]]:
    """Yield the rows of one size, after each that is new. In two rounds, so that a drift of the clock is a spread."""
    shapes, rows = decoder_shapes(*WIDTHS[size]), dict[str, Row]()
    contest, numel = Contest(shapes, device), sum(map(prod, shapes))
    for _ in range(2):
        for name, (limit, make) in contest.contestants().items():
            row = rows.setdefault(name, Row(size, numel, len(shapes), name, limit))
            try:
                take(make(), row, device, repetitions)
            except torch.OutOfMemoryError as error:
                print(f"{size}, {name}: {error}", file=sys.stderr)
            release(device)
            yield [row for row in rows.values() if row.ms]


def release(device: torch.device) -> None:
    """Give back what the last contestant had."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def take(step: Step, row: Row, device: torch.device, repetitions: int) -> None:
    """Add the times of a contestant's steps to its row, and the waits of a sparse one."""
    # Until kernels are compiled, and thresholds fit: in its first steps a residual outgrows those of the step before.
    for _ in range(20 if hasattr(step, "refresh") and device.type == "cuda" else 3):
        time_ms(step, device)
    if hasattr(step, "refresh"):
        step.refresh()
        row.waits[:] = max(row.waits, waits_of(step, device), key=len)
    row.ms.extend(time_ms(step, device) for _ in range(repetitions))


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what the numbers depend on."""
    found = {
        "lightning_lowbw": lightning_lowbw.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu",
    }
    if device.type == "cuda":
        import triton

        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found |= {
            "device": torch.cuda.get_device_name(),
            "capability": capability,
            "cuda": str(torch.version.cuda),
            "triton": triton.__version__,
        }
    return found


def to_markdown(environment: dict[str, Any], rows: list[Row]) -> str:
    """Return the table: medians, and their ratio to the copy."""
    medians = {(row.size, row.name): row.median_ms for row in rows}
    lines = [
        ", ".join(f"{name} {value}" for name, value in environment.items()) + ".",
        "",
        "| parameters | tensors | step | ms | fastest - slowest | x the copy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        limit_ms = medians.get((row.size, row.limit), math.nan)
        ratio = row.median_ms / limit_ms
        spread = f"{min(row.ms):.3f} - {max(row.ms):.3f}"
        lines.append(
            f"| {row.parameters:,} | {row.tensors} | {row.name} | {row.median_ms:.3f} | {spread} | {ratio:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", nargs="+", choices=list(WIDTHS), help="all; on a CPU: tiny")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "ops_gpu", help="of the results, without a suffix")
    options = parser.parse_args()
    device = torch.device(options.device)
    prepare(device)
    before: list[Row] = []
    environment = describe_environment(device)
    for size in options.sizes or sizes_for(device):
        rows = before
        for of_size in measure(size, device, options.repetitions):
            rows = before + of_size
            results = {"environment": environment, "command": shlex.join(sys.argv), "rows": [*map(asdict, rows)]}
            options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(to_markdown(environment, rows))
        before = rows
    print(to_markdown(environment, before))
    late = [f"{row.size}, {row.name}: {len(row.waits)} waits, {row.waits}" for row in before if len(row.waits) > 1]
    if late:
        raise SystemExit("\n".join(["A step may wait for the device once:", *late]))


def sizes_for(device: torch.device) -> list[str]:
    """Return the sizes that are measured where none is asked for."""
    return [size for size in WIDTHS if (size == "tiny") == (device.type == "cpu")]


if __name__ == "__main__":
    main()
