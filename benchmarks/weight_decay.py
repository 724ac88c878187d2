"""Does deep gradient compression diverge where plain training converges? Weight decay, clipping, four optimizers.

What waits in a residual is applied some times 1 / density steps later: after the rate of learning has fallen or risen,
too. So the rate is varied as well.

    .venv/bin/python benchmarks/weight_decay.py            # hours on two cores; goes on where it was stopped
    .venv/bin/python benchmarks/weight_decay.py --quick    # a minute; writes nothing

Two ranks on gloo train a small net from scratch with dgc as it is without arguments: 99.9 % of each large tensor stays
back, from the first step on. Beside it "ddp": torch alone with the batches of both ranks in one, whose gradient is the
ranks' mean. A run's loss is the mean of the last tenth of its steps, over both ranks' batches. Writes
benchmarks/results/weight_decay.json and the table, there and into the method card.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw import DGC
from lightning_lowbw.tools.zoo.digits import load_digit_tensors

NUM_RANKS, NUM_STEPS, BATCH = 2, 5000, 32
AT_ONCE = 2  # runs, of which each waits for messages a fifth of its time
WIDTH = 256  # of the only tensor that is sent sparse: the layer in the middle
DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
CLIPS = (None, 0.05)  # the norm of a gradient is 0.1 to 10 here
TINY_CLIP = 0.005
RATES: dict[str, Callable[[float], float]] = {  # what the rate of learning is multiplied by, from the share of the run
    "constant": lambda share: 1.0,
    "a tenth from 60 % on": lambda share: 1.0 if share < 0.6 else 0.1,
    "linear warm-up to 20 %": lambda share: min(1.0, share / 0.2),
}
RATES_DECAY, RATES_CLIPS, RATES_TASKS = 1e-4, (None, TINY_CLIP), ("regression",)  # where the rate varies
LEARNED = 0.02  # a loss below it: the data is known by heart, and a ratio says nothing
METHODS = ("ddp", "dgc")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9),
    "Nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, lr=1e-3),
    "AdamW": partial(AdamW, lr=1e-3),
}
Loss = Callable[[Tensor, Tensor], Tensor]
Row = dict[str, Any]


def regression() -> tuple[Tensor, Tensor, int, Loss]:
    """Return inputs, targets, outputs and loss: a teacher of two layers, with noise."""
    inputs = torch.randn(4096, 64)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).requires_grad_(False)
    return inputs, 2.0 * teacher(inputs) + 0.3 * torch.randn(4096, 1), 1, F.mse_loss


def digits() -> tuple[Tensor, Tensor, int, Loss]:
    """Return inputs, targets, outputs and loss: handwritten digits; see `FRESH_NOISE`."""
    images, labels = load_digit_tensors()
    return images.flatten(1), labels, 10, F.cross_entropy


def digits_by_heart() -> tuple[Tensor, Tensor, int, Loss]:
    """Return the same with a tenth of the labels replaced once: the loss says how many of these have been memorised."""
    images, labels, num_outputs, loss_of = digits()
    return images, with_noise(labels, 0.1), num_outputs, loss_of


def with_noise(labels: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Return labels of which a share is replaced by random ones."""
    is_wrong = torch.rand(labels.shape, generator=generator) < share
    return torch.where(is_wrong, torch.randint(10, labels.shape, generator=generator), labels)


TASKS = {"regression": regression, "digits": digits, "digits by heart": digits_by_heart}
# The share of labels that is replaced each time a sample is drawn: nobody can memorise these, and no weight decay or
# rate of learning brings the loss to zero.
FRESH_NOISE = {"digits": 0.1}


def train(
    task: str, optimizer: str, decay: float, clip: float | None, method: str, num_steps: int, rate: str = "constant"
) -> float:
    """Train, dgc on all ranks of the process group; return the loss at the end, inf where it is not finite."""
    torch.manual_seed(0)
    inputs, targets, num_outputs, loss_of = TASKS[task]()
    sizes = (inputs.shape[1], WIDTH, WIDTH, num_outputs)
    first, second, last = (nn.Linear(*pair) for pair in pairwise(sizes))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    ours = OPTIMIZERS[optimizer](model.parameters(), weight_decay=decay)
    worker = DGC().attach(ours, model.named_parameters()) if method == "dgc" else None
    full_rate = ours.param_groups[0]["lr"]
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for step in range(num_steps):
        ours.param_groups[0]["lr"] = full_rate * RATES[rate](step / num_steps)
        drawn = torch.randint(len(inputs), (NUM_RANKS, BATCH), generator=generator)
        wanted = targets[drawn]
        if task in FRESH_NOISE:
            wanted = with_noise(wanted, FRESH_NOISE[task], generator)
        mine, wanted = ((each.flatten(0, 1) if worker is None else each[dist.get_rank()]) for each in (drawn, wanted))
        ours.zero_grad()
        loss = loss_of(model(inputs[mine]), wanted)
        loss.backward()
        losses.append(float(loss.detach()))
        if worker is None:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            ours.step()
            continue
        with worker.stepping():
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip * worker.plan.clip_factor)
            worker.exchange()
            ours.step()
    at_end = torch.tensor(statistics.mean(losses[-num_steps // 10 :]))
    if worker is not None:
        dist.all_reduce(at_end)
        at_end /= NUM_RANKS
    return float(at_end) if at_end.isfinite() else math.inf


def work(process: int, folder: str, done: list[Row], num_steps: int, path: str | None) -> None:
    """One rank of one of the groups: train its share of what ddp lacks alone, of what dgc lacks with its group; write
    after each run."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a decay of 0.1 leaves weights so small that a CPU takes ten times as long
    group, rank = divmod(process, NUM_RANKS)
    store = f"file://{folder}/store_{group}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    missing = [cell for cell in cells() if not any({**row, **cell} == row for row in done)]
    alone = [cell for cell in missing if cell["method"] == "ddp"][process :: AT_ONCE * NUM_RANKS]
    together = [cell for cell in missing if cell["method"] == "dgc"][group::AT_ONCE]
    for cell in (*alone, *together):
        row = {**cell, "loss": train(**cell, num_steps=num_steps)}
        if rank == 0 or cell in alone:
            print(row, flush=True)
            if path is not None:
                append(Path(path), row, num_steps)
    dist.destroy_process_group()


def append(path: Path, row: Row, num_steps: int) -> None:
    """Write a row into the file, which other groups write, too."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        results = json.loads(file.read() or '{"rows": []}')
        results.update(num_steps=num_steps, rows=[*results["rows"], row])
        file.truncate(0)
        file.write(json.dumps(results, indent=1) + "\n")


def cells() -> list[Row]:
    """Return all runs."""
    choices = [("constant", clip, decay, task) for decay in reversed(DECAYS) for clip in CLIPS for task in TASKS]
    choices += [(rate, clip, RATES_DECAY, task) for rate in RATES for clip in RATES_CLIPS for task in RATES_TASKS]
    return [
        {"task": task, "optimizer": optimizer, "rate": rate, "clip": clip, "decay": decay, "method": method}
        for rate, clip, decay, task in dict.fromkeys(choices)
        for optimizer in OPTIMIZERS
        for method in METHODS
    ]


def to_markdown(rows: list[Row]) -> str:
    """Return a table: of each optimizer and decay the losses of ddp and dgc, and their ratio; then of the rates."""
    lines = [
        "| task | optimizer | clip | " + " | ".join(f"c = {decay:g}" for decay in DECAYS) + " |",
        "| --- | --- | --- |" + " --- |" * len(DECAYS),
    ]
    for task in TASKS:
        for optimizer in OPTIMIZERS:
            for clip in CLIPS:
                same = {"task": task, "optimizer": optimizer, "rate": "constant", "clip": clip}
                texts = [losses(rows, {**same, "decay": decay}) for decay in DECAYS]
                lines.append(f"| {task} | {optimizer} | {clip or '-'} | " + " | ".join(texts) + " |")
    lines += [
        "",
        f"The rate of learning varies, c = {RATES_DECAY:g}:",
        "",
        "| task | optimizer | clip | " + " | ".join(RATES) + " |",
        "| --- | --- | --- |" + " --- |" * len(RATES),
    ]
    for task in RATES_TASKS:
        for optimizer in OPTIMIZERS:
            for clip in RATES_CLIPS:
                same = {"task": task, "optimizer": optimizer, "decay": RATES_DECAY, "clip": clip}
                texts = [losses(rows, {**same, "rate": rate}) for rate in RATES]
                lines.append(f"| {task} | {optimizer} | {clip or '-'} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def losses(rows: list[Row], cell: Row) -> str:
    """Return the losses of ddp and dgc, and how much more the second is where one is at least `LEARNED`; empty where
    one is missing."""
    found = {row["method"]: row["loss"] for row in rows if {**row, **cell} == row}
    if len(found) < len(METHODS):
        return ""
    text = f"{found['ddp']:.4f} {found['dgc']:.4f}"
    return text if max(found.values()) < LEARNED else f"{text} ({found['dgc'] / found['ddp'] - 1:+.0%})"


def main() -> None:
    """Train what is missing, on two ranks; then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps; write nothing")
    options = parser.parse_args()
    path, num_steps = RESULTS / "weight_decay.json", 50 if options.quick else NUM_STEPS
    results: Row = {"rows": []}
    if path.exists() and not options.quick:
        results = json.loads(path.read_text())
        if results["num_steps"] != num_steps:
            raise SystemExit(f"{path} is of runs of {results['num_steps']} steps, not {num_steps}: delete it first.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, results["rows"], num_steps, None if options.quick else str(path))
        start_processes(work, arguments, AT_ONCE * NUM_RANKS, start_method="spawn")
    if options.quick:
        return
    results = json.loads(path.read_text())
    results["environment"] = describe_environment(link=None)
    path.write_text(json.dumps(results, indent=1) + "\n")
    environment = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    caption = (
        f"Loss of ddp and of dgc after {num_steps} steps; {NUM_RANKS} ranks, one seed. c is the weight decay. No ratio "
        f"where both are below {LEARNED}: the data is known by heart. A tenth of the labels of digits is replaced by "
        "random ones: each time a sample is drawn, or once (digits by heart). The loss of the latter says how far the "
        "net has memorised wrong labels at a constant rate of learning. What top-k delays makes that slower, with "
        "weight decay and without."
    )
    table = f"{caption}\n\n{to_markdown(results['rows'])}\n\nEnvironment: {environment}.\n"
    (RESULTS / "weight_decay.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
