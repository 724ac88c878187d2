"""What a sparse message costs: bits per element against the entropy, time to code, accuracy of training.

    .venv/bin/python benchmarks/wire.py

Writes benchmarks/results/wire.json and the tables. One process, a few minutes on one core. In the training all ranks
are a list, and DGC is written out in the package's own functions.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.harness import RESULTS, describe_environment
from benchmarks.models import mlp_25m
from lightning_lowbw.kernels.reference import Constants, correct_, largest, scatter_mean_, take_
from lightning_lowbw.payloads.codec import VALUE_NAMES, SparseCodec
from lightning_lowbw.payloads.top_k import num_selected
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.tools.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

MIN_NUMEL = 16384  # smaller tensors go dense
DENSITIES = (0.25, 1 / 64, 0.004, 0.001)
REPETITIONS = 21
NUM_RANKS = 2


def resnet50_numels() -> list[int]:
    """Return the sizes of ResNet-50's tensors (He et al., arXiv 1512.03385, table 1), batch norms and bias left out."""
    numels, num_in = [3 * 64 * 49], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            numels += [num_in * width, 9 * width * width, 4 * width * width]
            if block == 0:
                numels.append(num_in * 4 * width)
            num_in = 4 * width
    return [*numels, 2048 * 1000]


MODELS: dict[str, list[int]] = {
    "mlp-25M": [parameter.numel() for parameter in mlp_25m().parameters()],
    "ResNet-50": resnet50_numels(),
}


def log2_choose(numel: int, count: int) -> float:
    """Return the bits that tell which `count` of `numel` elements were chosen."""
    return (math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)) / math.log(2)


def median_ms(run: Callable[[], object], repetitions: int) -> float:
    """Return the median milliseconds of a call, after two untimed ones."""
    seconds = []
    for _ in range(repetitions + 2):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return 1e3 * statistics.median(seconds[2:])


def measure_wire() -> list[dict[str, Any]]:
    """Code the largest of normal values in each format."""
    rows = []
    for model, all_numels in MODELS.items():
        numels = [numel for numel in all_numels if numel >= MIN_NUMEL]
        tensors = [torch.randn(numel) for numel in numels]
        for density in DENSITIES:
            counts = [num_selected(numel, density) for numel in numels]
            parts = []
            for tensor, count in zip(tensors, counts, strict=True):
                indices = largest(tensor, count)
                parts.append((indices, tensor[indices]))
            total = sum(counts)
            entropy = sum(log2_choose(*sizes) for sizes in zip(numels, counts, strict=True)) / total
            repetitions = REPETITIONS if total < 1 << 20 else 3
            for value_dtype in VALUE_NAMES:
                codec = SparseCodec(value_dtype)
                message = codec.encode(parts, numels)
                exact = torch.cat([values for _, values in parts])
                error = codec.decode(message[None], counts, numels)[1][0] - exact
                rows.append(
                    {
                        "model": model,
                        "density": density,
                        "value_dtype": value_dtype,
                        "num_selected": total,
                        "entropy_bits": entropy,
                        "bits": message.numel() * 8 / total,
                        "relative_error": float(error.norm() / exact.norm()),
                        "encode_ms": median_ms(lambda c=codec, p=parts, n=numels: c.encode(p, n), repetitions),
                        "decode_ms": median_ms(
                            lambda c=codec, m=message, k=counts, n=numels: c.decode(m, k, n), repetitions
                        ),
                    }
                )
    return rows


@dataclass(frozen=True)
class Task:
    """A training of the zoo: which modules, and for how long."""

    make_model: Callable[[], nn.Module]
    make_data: Callable[[], DigitsData | StdlibText]
    batch: int
    num_steps: int
    rampup_begin_step: int
    rampup_step: int


TASKS = {
    "digits": Task(DigitsClassifier, DigitsData, 32, 300, 20, 60),
    # At the zoo's own rate of 0.3 one of five dense runs diverges on batches this small.
    "text": Task(lambda: ByteLanguageModel(d_model=64, num_layers=2, lr=0.1), StdlibText, 8, 400, 40, 120),
}


class VirtualRanks:
    """Deep gradient compression on NUM_RANKS ranks that share one replica and lie in a list."""

    def __init__(self, model: nn.Module, knobs: Any, value_dtype: str | None) -> None:
        self.parameters = list(model.parameters())
        self.sparse = [p for p in self.parameters if p.numel() >= MIN_NUMEL]
        self.numels = [parameter.numel() for parameter in self.sparse]
        self.lr, self.momentum, self.nesterov = knobs["lr"], knobs["momentum"], knobs["nesterov"]
        self.codec = SparseCodec(value_dtype) if value_dtype is not None else None
        self.shared = {parameter: torch.zeros_like(parameter) for parameter in self.parameters}
        self.own: list[list[tuple[Tensor, Tensor]]] = []

    def step(self, gradients: list[list[Tensor]], density: float) -> None:
        """Take one step with the gradients of all ranks."""
        updates: dict[nn.Parameter, Tensor] = {}
        if self.codec is not None and density < 1.0:
            updates = self._exchange(self.codec, gradients, density)
        for number, parameter in enumerate(self.parameters):
            if parameter not in updates:
                mean, buffer = torch.stack([own[number] for own in gradients]).mean(0), self.shared[parameter]
                buffer.mul_(self.momentum).add_(mean)
                updates[parameter] = mean.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
        for parameter, update in updates.items():
            parameter.data.sub_(update, alpha=self.lr)

    def _exchange(
        self, codec: SparseCodec, gradients: list[list[Tensor]], density: float
    ) -> dict[nn.Parameter, Tensor]:
        counts = [num_selected(numel, density) for numel in self.numels]
        if not self.own:  # hand-over: a residual and a velocity per rank
            self.own = [[(torch.zeros_like(p), self.shared[p].clone()) for p in self.sparse] for _ in gradients]
        messages = []
        for own, state in zip(gradients, self.own, strict=True):
            of_sparse = [own[number] for number, p in enumerate(self.parameters) if p in set(self.sparse)]
            parts = []
            for gradient, (residual, velocity), count in zip(of_sparse, state, counts, strict=True):
                correct_(residual, velocity, gradient, Constants(momentum=self.momentum, nesterov=self.nesterov))
                indices = largest(residual.view(-1), count)
                parts.append((indices, take_(residual.view(-1), velocity.view(-1), indices)))
            messages.append(codec.encode(parts, self.numels))
            sent = codec.decode(messages[-1][None], counts, self.numels)[1][0].split(counts)
            for (residual, _), (indices, exact), values in zip(state, parts, sent, strict=True):
                residual.view(-1).index_add_(0, indices, exact - values)
        received = [codec.decode(message, counts, self.numels) for message in messages]
        updates = {parameter: torch.empty_like(parameter) for parameter in self.sparse}
        for number, update in enumerate(updates.values()):
            scatter_mean_(update.view(-1), [parts[number] for parts in received])
        return updates


def train(task: Task, value_dtype: str | None, seed: int) -> dict[str, float]:
    """Train once, dense where `value_dtype` is None; return the mean loss of the last steps and the accuracy."""
    torch.manual_seed(seed)
    model, data = task.make_model(), task.make_data()
    data.setup("fit")
    examples: Dataset[Any] = data.splits["train"]
    ranks = VirtualRanks(model, model.hparams, value_dtype)
    schedule = EveryStep(task.rampup_begin_step, task.rampup_step, (0.984375, 0.996, 0.999))
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(task.num_steps):
        gradients = []
        drawn = torch.randint(len(examples), (NUM_RANKS, task.batch), generator=generator)  # type: ignore[arg-type]
        for numbers in drawn.tolist():
            inputs, targets = (torch.stack(column) for column in zip(*(examples[i] for i in numbers), strict=True))
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            gradients.append(list(torch.autograd.grad(loss, ranks.parameters)))
            losses.append(float(loss.detach()))
        with torch.no_grad():
            ranks.step(gradients, schedule.density(step))
    held_out: Dataset[Any] = data.splits["test"]
    inputs, targets = (torch.stack(column) for column in zip(*held_out, strict=True))
    with torch.no_grad():
        hits = torch.cat([model(chunk).argmax(-1).flatten() for chunk in inputs.split(64)]) == targets.flatten()
    last = losses[-NUM_RANKS * (task.num_steps // 10) :]
    return {"final_loss": statistics.mean(last), "test_accuracy": float(hits.double().mean())}


def measure_accuracy(seeds: list[int]) -> list[dict[str, Any]]:
    """Train each task with each format; the formats of a seed see the same data."""
    rows = []
    for name, task in TASKS.items():
        for seed in seeds:
            for value_dtype in (None, *VALUE_NAMES):
                rows.append({"task": name, "seed": seed, "value_dtype": value_dtype, **train(task, value_dtype, seed)})
                print(rows[-1], flush=True)
    return rows


def to_markdown(wire: list[dict[str, Any]], accuracy: list[dict[str, Any]]) -> str:
    """Return both tables."""
    lines = [
        "Bits per element sent, of normal values; the limit is log2 of n over k plus the bits of a value:",
        "",
        "| model | density | elements | values | bits | limit | relative error | encode ms | decode ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    value_bits = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
    for row in wire:
        cells = [
            row["model"],
            f"{row['density']:.4g}",
            f"{row['num_selected']:,}",
            row["value_dtype"],
            f"{row['bits']:.2f}",
            f"{row['entropy_bits'] + value_bits[row['value_dtype']]:.2f}",
            f"{row['relative_error']:.2%}",
            f"{row['encode_ms']:.2f}",
            f"{row['decode_ms']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Training on {NUM_RANKS} ranks in a list, 0.999 sparse after the warm-up: mean (smallest - largest) over "
        "seeds; the difference to float32 is between runs of one seed, with its standard error.",
        "",
        "| task | values | final loss | to float32 | test accuracy | to float32 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for task in TASKS:
        for value_dtype in (None, *VALUE_NAMES) if accuracy else ():
            mine, base = (
                [row for row in accuracy if (row["task"], row["value_dtype"]) == (task, name)]
                for name in (value_dtype, "float32")
            )
            cells = [task, value_dtype or "dense"]
            for key, form, unit, scale in (("final_loss", ".4f", "", 1), ("test_accuracy", ".2f", " %", 100)):
                values = [scale * row[key] for row in mine]
                differences = [v - scale * row[key] for v, row in zip(values, base, strict=True)]
                error = float(torch.tensor(differences).std()) / math.sqrt(len(differences))
                cells.append(f"{statistics.mean(values):{form}}{unit} ({min(values):{form}} - {max(values):{form}})")
                cells.append(f"{statistics.mean(differences):+{form}} ± {error:{form}}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parts", nargs="+", choices=["wire", "accuracy"], default=["wire", "accuracy"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "wire.json"
    results = json.loads(path.read_text()) if path.exists() else {"wire": [], "accuracy": []}
    results["environment"] = describe_environment(link=None)
    results["command"] = shlex.join(sys.argv)
    for part in options.parts:  # the other stays as it was measured before
        results[part] = measure_wire() if part == "wire" else measure_accuracy(options.seeds)
    path.write_text(json.dumps(results, indent=1) + "\n")
    table = to_markdown(results["wire"], results["accuracy"])
    (RESULTS / "wire.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
