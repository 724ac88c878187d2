"""What a round of sparse local SGD computes on one rank, part by part, beside the local steps between two rounds.

    python benchmarks/round.py              # one thread, one process, no network; a minute

10.8M parameters, `Compression()` as of "sparse_loco" (64 of 4096, two bits), messages of four ranks. All parts take
turns; the least processor time of each counts. Writes benchmarks/results/round.json with the environment, and a table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import RESULTS, describe_environment
from benchmarks.models import WORKLOADS
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.reference import Segment, scatter_mean_
from lightning_lowbw.kernels.tensors import NUM_SAMPLED, checksum
from lightning_lowbw.payloads.codec import VALUE_FORMATS, pack, unpack
from lightning_lowbw.payloads.top_k import Selection
from lightning_lowbw.presets import Compression

WORKLOAD = WORKLOADS["transformer-10M"]
BATCHES = (4, 16)  # sequences of 64 bytes per local step; the first is the lab's
K_STEPS = 15
NUM_RANKS = 4
SETTLING_ROUNDS = 12  # until what is kept has the size that it keeps
INIT_STD, CHANGE_STD = 0.02, 1e-3  # of weights, and of what fifteen steps do to them
PARTS = (
    "look for NaN and inf",
    "checksum of x0",
    "change, x - x0",
    "decay and add",
    "select",
    "take values",
    "code positions",
    "code values",
    "own values, keep the rest",
    f"read positions of {NUM_RANKS}",
    f"read values of {NUM_RANKS}",
    f"mean of {NUM_RANKS}",
    "distance, x0 and x",
)
WHOLE = "the round"


class Round:
    """The tensors of one rank, and each part of a round as a function of them."""

    def __init__(self) -> None:
        shapes = [p.shape for p in WORKLOAD.make().parameters()]  # type: ignore[operator]
        self.compression = Compression()
        self.numels = [shape.numel() for shape in shapes if shape.numel() >= self.compression.min_numel]
        self.consensus = [INIT_STD * torch.randn(numel) for numel in self.numels]
        of_ranks = [[torch.zeros(numel) for numel in self.numels] for _ in range(NUM_RANKS)]
        for _ in range(SETTLING_ROUNDS):
            self.messages = [self.prepare_(residuals, self.draw()) for residuals in of_ranks]
        self.kept = of_ranks[0]
        self.weights = [x0 + change for x0, change in zip(self.consensus, self.draw(), strict=True)]
        self.changes = self.change()
        self.residuals = [residual.clone() for residual in self.kept]
        self.accumulate()
        self.positions = self.select()
        self.values = self.take()
        self.counts = [values.numel() for values in self.values]
        self.value_format = VALUE_FORMATS[self.compression.value_dtype]
        num_words = self.code_positions().numel()
        self.words = [message[: 4 * num_words].view(torch.int32) for message in self.messages]
        data_bytes = self.value_format.nbytes(self.counts)
        self.data = [message[4 * num_words :][:data_bytes] for message in self.messages]
        self.decoded = self.decode()
        self.means = self.combine()

    def draw(self) -> list[Tensor]:
        return [CHANGE_STD * torch.randn(numel) for numel in self.numels]

    def segments(self, residuals: list[Tensor], changes: list[Tensor]) -> dict[str, Segment]:
        layouts = [self.compression.layout(numel) for numel in self.numels]
        return {
            str(number): Segment(
                residual=residual,
                momentum_buffer=None,
                gradient=change,
                weight=None,
                k=layout.k,
                k_last=layout.k_last,
                chunk=self.compression.chunk,
            )
            for number, (residual, change, layout) in enumerate(zip(residuals, changes, layouts, strict=True))
        }

    def prepare_(self, residuals: list[Tensor], changes: list[Tensor]) -> Tensor:
        """Do what the engine does with a rank's changes: accumulate, choose, encode, keep the rest."""
        for residual in residuals:
            residual.mul_(self.compression.decay)
        parts = Selection().compress_(self.segments(residuals, changes), masking=False)
        return self.compression.codec.encode(parts, self.numels, residuals)

    def look(self) -> list[Tensor]:
        return [torch.isfinite(torch.stack(weight.aminmax())).all() for weight in self.weights]

    def check(self) -> Tensor | int:
        return checksum(self.consensus)

    def change(self) -> list[Tensor]:
        return [x.float() - x0 for x, x0 in zip(self.weights, self.consensus, strict=True)]

    def accumulate(self) -> None:
        for residual, change in zip(self.residuals, self.changes, strict=True):
            residual.mul_(self.compression.decay).add_(change)

    def select(self) -> list[Tensor]:
        kernels = dispatch.kernels_for(*self.residuals)
        segments = self.segments(self.residuals, self.changes).values()
        return [kernels.largest(each.residual, each.k, each.chunk, each.k_last) for each in segments]

    def take(self) -> list[Tensor]:
        return [residual[where] for residual, where in zip(self.residuals, self.positions, strict=True)]

    def code_positions(self) -> Tensor:
        return pack(torch.cat(self.positions), self.counts, self.numels)

    def code_values(self) -> Tensor:
        return self.value_format.encode(torch.cat(self.values), self.counts)

    def keep(self) -> None:
        rounded = self.value_format.decode(self.data[0], self.counts).split(self.counts)
        for residual, where, values, sent in zip(self.residuals, self.positions, self.values, rounded, strict=True):
            residual[where] = values - sent

    def read_positions(self) -> list[Tensor]:
        return [*unpack(torch.stack(self.words), self.counts, self.numels)]

    def read_values(self) -> list[Tensor]:
        return [self.value_format.decode(data, self.counts) for data in self.data]

    def average(self) -> None:
        for numel, parts in zip(self.numels, self.decoded, strict=True):
            scatter_mean_(torch.empty(numel), parts, over_senders=self.compression.mean_over == "senders")

    def apply(self) -> None:
        for x, x0, change in zip(self.weights, self.consensus, self.means, strict=True):
            mean = x0 + change
            stride = max(1, mean.numel() // NUM_SAMPLED)
            torch.linalg.vector_norm(x[::stride] - mean[::stride])
            torch.linalg.vector_norm(mean[::stride])
            x0.copy_(mean)
            x.copy_(mean)

    def decode(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return of each tensor what each rank has sent: positions and values."""
        messages = torch.stack(self.messages).unsqueeze(0)
        positions, values = self.compression.decode(messages, self.numels, None)
        columns = (each[0].split(self.counts, dim=1) for each in (positions.long(), values))
        return [list(zip(*of_tensor, strict=True)) for of_tensor in zip(*columns, strict=True)]

    def combine(self) -> list[Tensor]:
        means = [torch.empty(numel) for numel in self.numels]
        for mean, parts in zip(means, self.decode(), strict=True):
            scatter_mean_(mean, parts, over_senders=self.compression.mean_over == "senders")
        return means

    def whole(self) -> None:
        self.look()
        self.check()
        self.prepare_(self.residuals, self.change())
        self.combine()
        self.apply()

    def restore(self) -> None:
        """Go back to before the round, as far as the time of a part depends on it."""
        for residual, kept in zip(self.residuals, self.kept, strict=True):
            residual.copy_(kept)
        self.accumulate()

    def parts(self) -> dict[str, Callable[[], object]]:
        functions = (
            *(self.look, self.check, self.change, self.accumulate, self.select, self.take, self.code_positions),
            *(self.code_values, self.keep, self.read_positions, self.read_values, self.average, self.apply),
        )
        return dict(zip(PARTS, functions, strict=True))


def local_step(batch: int) -> Callable[[], object]:
    """Return a step of AdamW on one rank."""
    network = WORKLOAD.make()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    text = torch.randint(0, WORKLOAD.num_classes, (batch, *WORKLOAD.input_shape))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(text).flatten(0, -2), text.flatten()).backward()
        optimizer.step()

    return step


def milliseconds(function: Callable[[], object]) -> float:
    """Return the processor's time for a call: of one thread that waits for nobody, what else runs is not counted."""
    start = time.process_time()
    function()
    return 1e3 * (time.process_time() - start)


def measure(repetitions: int) -> dict[str, list[float]]:
    """Time everything in turns, after a first time that is not counted: milliseconds of each repetition, by name."""
    with torch.no_grad():
        state = Round()
    steps = {step_name(batch): local_step(batch) for batch in BATCHES}
    timed: dict[str, list[float]] = {}
    for number in range(-1, repetitions):
        now = {name: milliseconds(step) for name, step in steps.items()}
        with torch.no_grad():
            for name, function in {**state.parts(), WHOLE: state.whole}.items():
                state.restore()
                now[name] = milliseconds(function)
        if number >= 0:
            for name, ms in now.items():
                timed.setdefault(name, []).append(ms)
    return timed


def step_name(batch: int) -> str:
    return f"a local step, {batch} x {WORKLOAD.input_shape[0]} bytes"


def to_markdown(timed: dict[str, list[float]]) -> str:
    """Return a table; the least time, since whatever disturbs a part adds to it."""
    period = {batch: K_STEPS * min(timed[step_name(batch)]) for batch in BATCHES}
    of_steps = " | ".join(f"of {K_STEPS} steps of {batch}" for batch in BATCHES)
    lines = [f"| part | ms | median | of the round | {of_steps} |", "| --- " * (4 + len(BATCHES)) + "|"]
    for name in [*PARTS, WHOLE, *map(step_name, BATCHES)]:
        least, is_step = min(timed[name]), name not in PARTS and name != WHOLE
        shares = ["-"] if is_step else [f"{least / min(timed[WHOLE]):.0%}"]
        shares += ["-" if is_step else f"{least / ms:.1%}" for ms in period.values()]
        lines.append(f"| {name} | {least:.1f} | {statistics.median(timed[name]):.1f} | {' | '.join(shares)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Parse the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timed = measure(options.repetitions)
    environment: dict[str, Any] = describe_environment(link=None)
    results = {"environment": environment, "command": shlex.join(sys.argv), "k_steps": K_STEPS, "ms": timed}
    (RESULTS / "round.json").write_text(json.dumps(results, indent=1) + "\n")
    table = to_markdown(timed)
    (RESULTS / "round.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
