"""Which correction Adam needs under deep gradient compression: the final loss of each candidate against dense AdamW.

    .venv/bin/python benchmarks/adam.py --jobs 2   # hours on two cores; goes on where it was stopped
    .venv/bin/python benchmarks/adam.py --quick    # a minute; writes nothing

A candidate is chosen by its loss on the validation split; the test split, beside it, is what the choice is worth.

Writes benchmarks/results/adam.json and the table, there and into the method card. One process: the ranks are a list,
their gradients are taken one after the other on one replica. All variants of a seed begin with the same weights and see
the same data.

A candidate "corrected" does, on each rank, with G its own mean gradient, t the steps taken and N ranks:

    momentum   m = beta1 m + (1 - beta1) G              beta1 below that of the dense phase
    variance   v = beta2 v + (1 - beta2) G^2 / N        "own"; "frozen" and "refreshed" leave v as the dense phase left
                                                        it, the latter except in single dense steps, ever more seldom
    correct    r = r + (m / (weight of all G in m)) / (sqrt(v / (1 - beta2^t)) + eps)
    select     the k largest |r| of each tensor
    mask       r = 0 there (a knob: m = 0 too)
    average    the update is 1/N times the sum of what all ranks sent
    step       w = w - lr (update + c w)

m and v come from the dense phase, which is AdamW as it is; small tensors stay with it. "feedback" is v = v + G, select,
average, and AdamW steps with that as if it were the gradient.

Why G^2 / N: AdamW on all ranks together sees the square of the mean of N gradients. Where noise outweighs the mean,
which is so for most elements and steps, that is the mean square of one divided by N. On one rank, with everything sent
and the same beta1, nothing differs from AdamW.

Why a smaller beta1: an element that waits for its turn moves late and by all it has gathered, which acts like momentum.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw.payloads.top_k import num_selected
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.tools.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText

NUM_RANKS = 4
BETA1, BETA2, EPS, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01  # torch's AdamW
SPARSE_BETA1 = 0.7  # while sparse, for sending late is a momentum of its own
STAIRS = (0.75, 0.9375, 0.984375, 0.996, 0.999)
EVAL_BATCH = 128


@dataclass(frozen=True)
class Task:
    """A model with its data; the learning rate warms up, then follows a cosine to zero.

    Attributes:
        min_numel: smaller tensors are dense. Below the package's default, so that a small model is compressed too.
        batch: samples per rank and step.
        num_dense_steps: before the first sparse one.
        num_ramp_steps: over which the stairs are spread.
    """

    make_model: Callable[[], nn.Module]
    make_data: Callable[[], DigitsData | StdlibText]
    min_numel: int
    batch: int
    num_steps: int
    num_warmup_steps: int
    num_dense_steps: int
    num_ramp_steps: int
    lr: float

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        progress = max(0.0, (step - self.num_warmup_steps) / (self.num_steps - self.num_warmup_steps))
        return self.lr * min(1.0, (step + 1) / self.num_warmup_steps) * (1.0 + math.cos(math.pi * progress)) / 2.0


# The rate of the text is the best of 1.5e-3, 3e-3 and 6e-3 for dense AdamW.
TEXT = Task(
    lambda: ByteLanguageModel(d_model=96, num_layers=2),
    lambda: StdlibText(num_train=200_000),
    min_numel=4096,
    batch=4,
    num_steps=800,
    num_warmup_steps=40,
    num_dense_steps=40,
    num_ramp_steps=320,
    lr=3e-3,
)
TASKS = {
    "text": TEXT,
    "text, long": replace(TEXT, num_steps=2400, num_warmup_steps=120, num_dense_steps=120, num_ramp_steps=480),
    "text, longer": replace(TEXT, num_steps=9600, num_warmup_steps=480, num_dense_steps=480, num_ramp_steps=1920),
    "digits": Task(
        lambda: DigitsClassifier(hidden=256),
        DigitsData,
        min_numel=4096,
        batch=16,
        num_steps=400,
        num_warmup_steps=20,
        num_dense_steps=20,
        num_ramp_steps=160,
        lr=1e-3,
    ),
}


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
        kind: "dense", "feedback" or "corrected", as in the module's docstring.
        variance: "own", "frozen" or "refreshed".
        noise_share: what G^2 is multiplied with for "own".
        refreshes_per_gap: for "refreshed": after this many the gap doubles. 0/1 Adam (arXiv 2202.06009, section 4)
            takes 16, in long runs.
        floor: the denominator is at least this fraction of its mean over the tensor.
        beta1: of the dense phase and of small tensors.
        sparse_beta1: of the corrected tensors.
        is_momentum_masked: whether m is cleared where r was sent.
        is_in_weights: whether r holds lr times the step, so that a late element moves by the rate of its own time.
        stairs: None is the warm-up of the paper.
        has_dense_phase: whether there are dense steps before the first sparse one.
    """

    kind: str = "corrected"
    variance: str = "own"
    refreshes_per_gap: int = 4
    noise_share: float = 1.0 / NUM_RANKS
    floor: float = 0.0
    beta1: float = BETA1
    sparse_beta1: float = SPARSE_BETA1
    is_momentum_masked: bool = False
    is_in_weights: bool = False
    stairs: tuple[float, ...] = STAIRS
    has_dense_phase: bool = True


OWN = Variant()
FROZEN = Variant(variance="frozen", floor=0.1)
MAIN = {
    "dense AdamW": Variant("dense"),
    "feedback, no dense phase": Variant("feedback", has_dense_phase=False),
    "feedback": Variant("feedback"),
    "frozen, masked, beta1 0.9": replace(FROZEN, is_momentum_masked=True, sparse_beta1=BETA1),
    "frozen, beta1 0.9": replace(FROZEN, sparse_beta1=BETA1),
    "frozen": FROZEN,
    "refreshed": replace(FROZEN, variance="refreshed"),
    "refreshed as 0/1 Adam, beta1 0.9": replace(FROZEN, variance="refreshed", refreshes_per_gap=16, sparse_beta1=BETA1),
    "refreshed as 0/1 Adam, masked, beta1 0.9": replace(
        FROZEN, variance="refreshed", refreshes_per_gap=16, sparse_beta1=BETA1, is_momentum_masked=True
    ),
    "own, beta1 0.9": replace(OWN, sparse_beta1=BETA1),
    "own, beta1 0.8": replace(OWN, sparse_beta1=0.8),
    "own": OWN,
    "own, beta1 0.5": replace(OWN, sparse_beta1=0.5),
}
MORE = {
    "dense AdamW, beta1 0.7": Variant("dense", beta1=0.7),
    "own, beta1 0.3": replace(OWN, sparse_beta1=0.3),
    "own, masked": replace(OWN, is_momentum_masked=True),
    "own, no dense phase": replace(OWN, has_dense_phase=False),
    "own, no stairs": replace(OWN, stairs=(0.999,)),
    "own, r in weights": replace(OWN, is_in_weights=True),
    "own, floor 0.1": replace(OWN, floor=0.1),
    "own, G^2 undivided": replace(OWN, noise_share=1.0),
    "own, 99 % sparse": replace(OWN, stairs=(0.75, 0.9375, 0.984375, 0.99)),
    "own, 50 % sparse": replace(OWN, stairs=(0.5,)),
    "frozen, floor 0": replace(FROZEN, floor=0.0),
    "frozen, floor 0.3": replace(FROZEN, floor=0.3),
    "frozen, floor 1": replace(FROZEN, floor=1.0),
}
LONG = {  # too slow for all variants
    "text, long": ("dense AdamW", "feedback", "frozen", "own, beta1 0.9", "own, beta1 0.8", "own"),
    "text, longer": ("dense AdamW", "own"),
}
VARIANTS = {**MAIN, **MORE}


class AdamState:
    """m and v of one tensor, flat: of all ranks together, and from the first sparse step on one of each per rank."""

    def __init__(self, numel: int) -> None:
        self.momentum, self.variance = torch.zeros(numel), torch.zeros(numel)
        self.momentum_weight, self.num_variance_steps = 0.0, 0

    def hand_over_(self) -> None:
        """Give each rank a row of its own, all beginning with the common one."""
        self.momentum, self.variance = (x.repeat(NUM_RANKS, 1) for x in (self.momentum, self.variance))

    def add_momentum_(self, gradient: Tensor, beta1: float) -> None:
        self.momentum.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        self.momentum_weight = beta1 * self.momentum_weight + 1.0 - beta1  # 1 - beta1^t where beta1 stays

    def add_variance_(self, square: Tensor) -> None:
        self.num_variance_steps += 1
        self.variance.mul_(BETA2).add_(square, alpha=1.0 - BETA2)

    def direction(self, floor: float = 0.0) -> Tensor:
        """Return Adam's step without the learning rate."""
        if self.num_variance_steps == 0:
            raise ValueError("a frozen variance needs a dense phase")
        denominator = (self.variance / (1.0 - BETA2**self.num_variance_steps)).sqrt() + EPS
        denominator = torch.maximum(denominator, floor * denominator.mean(-1, keepdim=True))
        return self.momentum / self.momentum_weight / denominator


class VirtualRanks:
    """NUM_RANKS ranks that share one replica."""

    def __init__(self, parameters: list[nn.Parameter], task: Task, variant: Variant) -> None:
        self.parameters, self.task, self.variant = parameters, task, variant
        self.states = [AdamState(parameter.numel()) for parameter in parameters]
        self.residuals: dict[int, Tensor] = {}
        self.refresh_at = self.num_refreshes = 0
        self.num_sent = self.num_elements = 0

    @torch.no_grad()
    def step(self, step: int, gradients: list[Tensor], density: float) -> None:
        """Take one step; of each tensor the gradients of all ranks, (NUM_RANKS, numel)."""
        lr, is_refresh = self.task.lr_at(step), density < 1.0 and self._is_refresh(step)
        for number, (parameter, own) in enumerate(zip(self.parameters, gradients, strict=True)):
            numel = own.shape[1]
            k = numel if numel < self.task.min_numel else num_selected(numel, density)
            self.num_elements += numel
            self.num_sent += k + (numel if is_refresh and k < numel else 0)
            if k == numel:
                update = self._dense(number, own.mean(0))
            elif self.variant.kind == "feedback":
                residual = self._residual(number).add_(own)
                update = self._dense(number, self._send_(residual, k)[0])
            else:
                update = self._corrected(number, own, k, lr, is_refresh)
            weight = parameter.view(-1)
            weight.mul_(1.0 - lr * WEIGHT_DECAY).sub_(update, alpha=lr)

    def _dense(self, number: int, mean: Tensor) -> Tensor:
        self.states[number].add_momentum_(mean, self.variant.beta1)
        self.states[number].add_variance_(mean.square())
        return self.states[number].direction()

    def _corrected(self, number: int, own: Tensor, k: int, lr: float, is_refresh: bool) -> Tensor:
        state, variant = self.states[number], self.variant
        if number not in self.residuals:
            state.hand_over_()
        residual = self._residual(number)
        state.add_momentum_(own, variant.sparse_beta1)
        if variant.variance == "own":
            state.add_variance_(variant.noise_share * own.square())
        elif is_refresh:
            state.add_variance_(own.mean(0).square())
        unit = lr if variant.is_in_weights else 1.0
        residual.add_(state.direction(variant.floor), alpha=unit)
        update, mask = self._send_(residual, k)
        if variant.is_momentum_masked:
            state.momentum[mask] = 0.0
        return update / unit

    def _send_(self, residual: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the mean of what all ranks send, and where each sends; it leaves the residual."""
        mask = torch.zeros_like(residual, dtype=torch.bool)
        mask.scatter_(1, residual.abs().topk(k, dim=1).indices, True)
        update = torch.where(mask, residual, 0.0).mean(0)
        residual[mask] = 0.0
        return update, mask

    def _residual(self, number: int) -> Tensor:
        if number not in self.residuals:
            self.residuals[number] = torch.zeros(NUM_RANKS, self.parameters[number].numel())
        return self.residuals[number]

    def _is_refresh(self, step: int) -> bool:
        if self.variant.variance != "refreshed" or step < self.refresh_at:
            return False
        self.num_refreshes += 1
        self.refresh_at = step + 2 ** (self.num_refreshes // self.variant.refreshes_per_gap)
        return True


def train(task: Task, variant: Variant, seed: int) -> dict[str, float]:
    """Train once; return loss and accuracy on both held-out splits, and the elements sent as a fraction of dense."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, data = task.make_model(), task.make_data()
    data.setup("fit")
    examples: Dataset[Any] = data.splits["train"]
    ranks = VirtualRanks(list(model.parameters()), task, variant)
    stairs = variant.stairs if variant.kind != "dense" else (0.0,)
    schedule = EveryStep(task.num_dense_steps if variant.has_dense_phase else 0, task.num_ramp_steps, stairs)
    generator, started_s = torch.Generator().manual_seed(seed), time.perf_counter()
    for step in range(task.num_steps):
        drawn = torch.randint(len(examples), (NUM_RANKS, task.batch), generator=generator)  # type: ignore[arg-type]
        gradients = []
        for numbers in drawn.tolist():
            inputs, targets = (torch.stack(column) for column in zip(*(examples[i] for i in numbers), strict=True))
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            gradients.append(torch.autograd.grad(loss, ranks.parameters))
        stacked = [torch.stack(own).flatten(1) for own in zip(*gradients, strict=True)]
        ranks.step(step, stacked, schedule.density(step))
    row = {f"{split}_{key}": x for split in ("val", "test") for key, x in evaluate(model, data.splits[split]).items()}
    return {**row, "sent": ranks.num_sent / ranks.num_elements, "seconds": time.perf_counter() - started_s}


@torch.no_grad()
def evaluate(model: nn.Module, examples: Dataset[Any]) -> dict[str, float]:
    """Return the mean loss and the accuracy."""
    inputs, targets = (torch.stack(column) for column in zip(*examples, strict=True))
    logits = torch.cat([model(chunk).flatten(0, -2) for chunk in inputs.split(EVAL_BATCH)])
    hits = logits.argmax(-1) == targets.flatten()
    return {"loss": float(F.cross_entropy(logits, targets.flatten())), "accuracy": float(hits.double().mean())}


def describe(task: Task, variant: Variant) -> dict[str, Any]:
    """Return what a row depends on, as plain values: a row that was made otherwise is made again."""
    sizes = {name: value for name, value in vars(task).items() if not callable(value)}
    return {**sizes, **asdict(variant), "stairs": list(variant.stairs)}


def to_markdown(results: dict[str, Any]) -> str:
    """Return the table."""
    environment = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    lines = [
        f"AdamW on {NUM_RANKS} ranks in a list. Loss at the end, mean ± standard deviation over seeds; the difference "
        "to dense AdamW is between runs of one seed, with its standard error. Candidates are compared on the "
        "validation split. Sent: elements per rank as a fraction of dense, over the whole run. Unless a name says "
        f"otherwise: beta1 {SPARSE_BETA1} while sparse, no masking, a floor of {FROZEN.floor} under a frozen variance.",
        "",
    ]
    for name, task in TASKS.items():
        lines.append(
            f"{name}: {task.num_steps} steps of {NUM_RANKS} x {task.batch} samples, {task.num_dense_steps} dense, then "
            f"{task.num_ramp_steps} on the stairs to {STAIRS[-1]:.1%}; tensors of at least {task.min_numel} elements."
        )
        lines.append("")
    lines += [
        "| task | variant | seeds | sent | validation loss | to dense | test loss | to dense | test accuracy | "
        "to dense |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task_name in TASKS:
        for variant in VARIANTS:
            rows = {r["seed"]: r for r in results["rows"] if (r["task"], r["variant"]) == (task_name, variant)}
            dense = {
                r["seed"]: r for r in results["rows"] if (r["task"], r["variant"]) == (task_name, next(iter(MAIN)))
            }
            seeds = sorted(rows.keys() & dense.keys())
            if not seeds:
                continue
            cells = [task_name, variant, str(len(seeds)), f"{statistics.mean(rows[s]['sent'] for s in seeds):.1%}"]
            for key in ("val_loss", "test_loss"):
                relative = [100.0 * (rows[seed][key] / dense[seed][key] - 1.0) for seed in seeds]
                cells.append(with_deviation([rows[seed][key] for seed in seeds], ".4f"))
                cells.append(with_error(relative, "+.1f") + " %")
            points = [100.0 * (rows[seed]["test_accuracy"] - dense[seed]["test_accuracy"]) for seed in seeds]
            cells.append(f"{100.0 * statistics.mean(rows[seed]['test_accuracy'] for seed in seeds):.2f} %")
            cells.append(with_error(points, "+.2f"))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Environment: {environment}.", ""])


def with_deviation(values: list[float], form: str) -> str:
    """Return the mean, and the standard deviation where there is one."""
    spread = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def with_error(values: list[float], form: str) -> str:
    """Return the mean, and its standard error where there is one."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{error}"


def main() -> None:
    """Train what is missing, write after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all seeds of these; else the two seed options")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the main variants: 0 to this")
    parser.add_argument("--more-seeds", type=int, default=1, help="seeds of the other variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--quick", action="store_true", help="few steps, one seed of the main variants; write nothing")
    options = parser.parse_args()
    path = RESULTS / "adam.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not options.quick else {"rows": []}
    results["environment"] = describe_environment(link=None)
    results["command"] = shlex.join(sys.argv)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {}
        for task_name, name, seed in wanted(options):
            settings = json.loads(json.dumps(describe(task_of(task_name, options.quick), VARIANTS[name])))
            same = [r for r in results["rows"] if (r["task"], r["variant"], r["seed"]) == (task_name, name, seed)]
            if not (same and same[0]["settings"] == settings):
                results["rows"] = [row for row in results["rows"] if row not in same]
                row = {"task": task_name, "variant": name, "seed": seed, "settings": settings}
                running[pool.submit(train_one, task_name, name, seed, options.quick)] = row
        for done in as_completed(running):
            row = {**running[done], **done.result()}
            print({key: value for key, value in row.items() if key != "settings"}, flush=True)
            results["rows"].append(row)
            if not options.quick:
                path.write_text(json.dumps(results, indent=1) + "\n")
    table = to_markdown(results)
    if not options.quick:
        (RESULTS / "adam.md").write_text(table)
    print(table)


def wanted(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return task, variant and seed of all runs that are asked for, a seed after the other."""
    runs = []
    for seed in range(1 if options.quick else max(options.seeds, options.more_seeds)):
        for task_name in options.tasks:
            for name in options.variants or LONG.get(task_name, VARIANTS):
                num_seeds = options.seeds if options.variants or name in MAIN else options.more_seeds
                if seed < num_seeds and not (options.quick and name in MORE):
                    runs.append((task_name, name, seed))
    return runs


def task_of(name: str, is_quick: bool) -> Task:
    """Return a task, cut short for a quick look."""
    task = TASKS[name]
    return replace(task, num_steps=60, num_warmup_steps=5, num_dense_steps=10, num_ramp_steps=20) if is_quick else task


def train_one(task_name: str, variant: str, seed: int, is_quick: bool) -> dict[str, float]:
    """Train in a process of the pool, where tasks arrive by name: what makes a model does not pickle."""
    return train(task_of(task_name, is_quick), VARIANTS[variant], seed)


if __name__ == "__main__":
    main()
