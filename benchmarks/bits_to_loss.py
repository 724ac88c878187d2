"""Loss against bits per parameter and step, and against seconds: what local steps and sparse averages cost, and save.

    .venv/bin/python benchmarks/bits_to_loss.py    # two hours a seed on two cores

Four ranks on links of 100 Mb/s train the byte-level transformer with AdamW, with each method for as many steps on the
same batches: first from scratch, then on, from what DDP has reached there, with a new cycle of the learning rate, and
so once more with twice as many steps. Runs that benchmarks/results/bits_to_loss.json has already are not repeated.
Writes a table and a plot beside it, and the table into the method card.

Losses and bits do not depend on the rate: more seeds may be run on a faster link, their seconds are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.harness import RESULTS, as_plain, colour_of, describe_environment, in_words, run_in_lab
from benchmarks.quantized_accuracy import smooth, train
from lightning_lowbw import Compression, DGCStrategy, LocalSGD, LocalSGDStrategy, MuonAdamW, Quantized, Strategy
from lightning_lowbw.presets import preset
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies.names import NAMES
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText

NUM_RANKS = 4
RATE = "100mbit"
SMOOTHING = 96  # steps of the running mean in the plot: one start's crops are the same for all methods, and noisy
PEAK_STEPS = 4  # the peak is over this many consecutive steps
MODEL: dict[str, Any] = {"optimizer": "adamw", "schedule": "one_cycle"}
BATCH = 8


class Start(NamedTuple):
    """Steps, the peak of the learning rate, and whether they go on from what DDP has reached from scratch."""

    num_steps: int
    lr: float
    goes_on: bool


STARTS = {
    "scratch": Start(1024, 3e-3, False),
    "continued": Start(1024, 1e-3, True),
    "continued, longer": Start(2048, 1e-3, True),
}


def local(name: str, k: int, **knobs: Any) -> Callable[[], LocalSGDStrategy]:
    """Return what makes the strategy of a name with another period."""
    return lambda: LocalSGDStrategy(**{**NAMES[name][1], "k_steps": k, **knobs})


PAPERS: dict[str, Any] = {"outer": "nesterov", "outer_momentum": 0.9}  # DiLoCo's


def streaming(k: int, **knobs: Any) -> Strategy:
    """Make a strategy with fragments, hidden and mixed as in the paper of Streaming DiLoCo."""
    knobs |= {"k_steps": k, "begin_step": 0, "num_fragments": "auto", "delay_steps": 5, "mixing": 0.5}
    return Strategy(LocalSGD(**knobs))


DGC_SCHEDULE = EveryStep(64, 320, (0.75, 0.9375, 0.984375, 0.996, 0.999))
METHODS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "dgc": lambda: DGCStrategy(
        rampup_begin_step=DGC_SCHEDULE.rampup_begin_step,
        rampup_step=DGC_SCHEDULE.rampup_step,
        sparsity=list(DGC_SCHEDULE.stairs),
    ),
    **{f"diloco, k = {k}": lambda k=k: Strategy(LocalSGD(k, 0, **PAPERS)) for k in (16, 64)},
    **{f"streaming_diloco, k = {k}": partial(streaming, k, **PAPERS) for k in (16, 64)},
    "streaming_diloco by name": lambda: "streaming_diloco",
    "streaming_diloco by name, int4": lambda: Strategy(
        replace(preset("streaming_diloco"), what=Quantized(value_dtype="int4"))
    ),
    "muloco, k = 16": lambda: Strategy(preset("muloco").replace(k_steps=16)),
    **{f"sparse_loco, k = {k}": local("sparse_loco", k) for k in (16, 64)},
    "sparse_loco, k = 16, over ranks": local("sparse_loco", 16, compression=Compression(mean_over="ranks")),
    "sparse_loco, k = 16, norms too": local("sparse_loco", 16, compression=Compression(min_numel=1)),
    "sparse_loco, k = 16, 1 of 128, norms too": local(
        "sparse_loco", 16, compression=Compression(density=1 / 128, min_numel=1)
    ),
    "sparse_loco, k = 8, 1 of 256, norms too": local(
        "sparse_loco", 8, compression=Compression(density=1 / 256, min_numel=1)
    ),
    "sparse_loco, k = 16, streaming": partial(streaming, 16, compression=Compression(density=1 / 128, min_numel=1)),
    "sparse_loco, k = 64, 1 of 32": local("sparse_loco", 64, compression=Compression(density=1 / 32)),
}


# In the plot, at most eight; filled are the methods as their names choose them, squares average every 64 steps.
PLAIN = ("ddp", "dgc", "diloco, k = 16", "diloco, k = 64", "sparse_loco, k = 16", "sparse_loco, k = 64")
DRAWN = (*PLAIN, "streaming_diloco, k = 16", "sparse_loco, k = 16, 1 of 128, norms too")


class ByMuon(ByteLanguageModel):
    """Steps its matrices by Muon, at the rates of AdamW."""

    def configure_optimizers(self) -> Any:
        optimizer, lr = MuonAdamW(self, weight_decay=0.0, exclude=("head.*",)), self.hparams["lr"]
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, max_lr=lr, total_steps=num_steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train_all(job: dict[str, Any], path: Path) -> None:
    """One rank: train from each start with each method and seed in turn; rank 0 writes the curves."""
    curves = []
    for start, method, seed in job["runs"]:
        num_steps, lr, goes_on = STARTS[start]
        num_steps = job["max_steps"] or num_steps
        # One epoch, and of other crops where it goes on.
        data = StdlibText(BATCH, num_train=NUM_RANKS * BATCH * num_steps, seed=2 * seed + goes_on)
        weights = Path(job["folder"]) / f"{seed}.pt" if goes_on or method == "ddp" else None
        if goes_on and weights is not None and not weights.exists():
            raise SystemExit(f"{weights} is not there: let DDP train from scratch first, with the same --folder.")
        make_model = ByMuon if method.startswith("muloco") else ByteLanguageModel
        run = train(METHODS[method], seed, num_steps, data, 1.0, weights, make_model, lr=lr, **MODEL)
        curves.append({"start": start, "method": method, "rate": job["rate"], **run})
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(curves))
            print(start, method, seed, curves[-1]["val_loss"], curves[-1]["seconds"][-1], flush=True)
    torch.distributed.barrier()


def bits(curve: dict[str, Any], sent_bytes: float, num_steps: int) -> float:
    """Return bits per parameter and step."""
    return float(8 * sent_bytes / curve["num_parameters"] / num_steps)


def peak_bits(curve: dict[str, Any]) -> float:
    """Return bits per parameter and step of the busiest `PEAK_STEPS` consecutive steps."""
    totals = [0, *curve["sent_bytes"][:-1]]
    busiest = max(late - early for early, late in zip(totals, totals[PEAK_STEPS:], strict=False))
    return bits(curve, busiest, PEAK_STEPS)


def to_markdown(curves: list[dict[str, Any]]) -> str:
    """Return the table; losses are compared with DDP's of the same start and seed."""
    lines = [
        "| start | method | seeds | bits per parameter and step | in its busiest steps | validation loss | to DDP | "
        "test accuracy | s | DDP's s / s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for start, method in itertools.product(STARTS, METHODS):
        of_start = [curve for curve in curves if curve["start"] == start]
        dense = {curve["seed"]: curve for curve in of_start if curve["method"] == "ddp"}
        mine = [curve for curve in of_start if curve["method"] == method and curve["seed"] in dense]
        began = {c["seed"]: c for c in curves if (c["start"], c["method"]) == ("scratch", "ddp")}
        if STARTS[start].goes_on and method == "ddp" and dense.keys() & began.keys():
            seeds = dense.keys() & began.keys()
            worse = [100.0 * (began[seed]["val_loss"] / dense[seed]["val_loss"] - 1.0) for seed in seeds]
            loss = statistics.mean(began[seed]["val_loss"] for seed in seeds)
            lines.append(
                f"| {start} | not at all | {len(seeds)} | 0 | 0 | {loss:.4f} | {statistics.mean(worse):+.1f} % | | | |"
            )
        if not mine:
            continue
        relative = [100.0 * (curve["val_loss"] / dense[curve["seed"]]["val_loss"] - 1.0) for curve in mine]
        timed = [curve for curve in mine if curve["rate"] == dense[curve["seed"]]["rate"] == RATE]
        faster = [dense[curve["seed"]]["seconds"][-1] / curve["seconds"][-1] for curve in timed]
        spread = f" ({min(relative):+.1f} to {max(relative):+.1f})" if len(mine) > 1 else ""
        cells = [
            start,
            method,
            str(len(mine)),
            f"{statistics.mean(bits(c, c['sent_bytes'][-1], len(c['losses'])) for c in mine):.3g}",
            f"{statistics.mean(map(peak_bits, mine)):.3g}",
            f"{statistics.mean(curve['val_loss'] for curve in mine):.4f}",
            f"{statistics.mean(relative):+.1f} %{spread}",
            f"{statistics.mean(curve['test_accuracy'] for curve in mine):.2%}",
            f"{statistics.median(curve['seconds'][-1] for curve in timed):.0f}" if timed else "",
            f"{statistics.median(faster):.2f}" if timed else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def note(results: dict[str, Any]) -> str:
    """Return what the table is about."""
    environment, num_parameters = results["environment"], results["curves"][0]["num_parameters"]
    return (
        f"{NUM_RANKS} nodes at {RATE}, {num_parameters:,} parameters, AdamW, {STARTS['scratch'].num_steps} steps of "
        f"{NUM_RANKS} x {BATCH} crops of 64 bytes, from scratch and on from what DDP has reached there, "
        f'"longer" for {STARTS["continued, longer"].num_steps} steps '
        f"(`benchmarks/bits_to_loss.py`, {environment['num_cpus']} cores, torch {environment['torch']}, "
        f"{environment['date']}). Bits are those that rank 0's interface has sent in the whole fit, with all headers: "
        f"in an all-gather each message passes it {NUM_RANKS - 1} times. The busiest steps are {PEAK_STEPS} in a row. "
        f'Seconds are those of the seeds that were run at {RATE}; losses and bits do not depend on it. "Norms too": no '
        'tensor is averaged whole. "Over ranks": mean_over="ranks". "By name": with its defaults, k = 16, hidden by 15 '
        "steps, outer 0.7 / 0.6; rows of diloco, and the other rows of streaming_diloco, as in the papers: 0.7 / 0.9, "
        "hidden by 5 steps, mixing 0.5. "
        'muloco trains by MuonAdamW. "Streaming": in fragments, hidden, 1 of 128, norms too; its replicas are not '
        "equal at the end, so it ends with a whole average. dgc sends "
        f"{in_words(as_plain(DGC_SCHEDULE))}; it has not chosen this itself.\n\n"
    )


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """Plot for each start the loss against seconds (first seed), and the validation loss against bits (all)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(len(STARTS), 2, figsize=(13, 12), layout="constrained")
    for start, (left, right) in zip(STARTS, rows, strict=True):
        for method in DRAWN:
            color, is_plain = colour_of(method), method in PLAIN
            marker, line = ("s", ":") if "k = 64" in method else ("o", "-" if is_plain else "--")
            mine = [curve for curve in curves if (curve["start"], curve["method"]) == (start, method)]
            for curve in [curve for curve in mine if curve["rate"] == RATE][:1]:
                seconds = curve["seconds"][SMOOTHING - 1 :]
                left.plot(seconds, smooth(curve["losses"], SMOOTHING), color=color, lw=1, ls=line)
            sent, fill = [bits(c, c["sent_bytes"][-1], len(c["losses"])) for c in mine], "full" if is_plain else "none"
            losses = [curve["val_loss"] for curve in mine]
            right.plot(sent, losses, marker, color=color, fillstyle=fill, label=method)
        left.set(xlabel="seconds", ylabel=f"training loss of rank 0 (mean over {SMOOTHING} steps)", xscale="log")
        left.set(title=start)
        if not STARTS[start].goes_on:
            left.set_ylim(top=3.5)
        right.set(xlabel="bits per parameter and step, on the interface", ylabel="validation loss", xscale="log")
        for axis in (left, right):
            axis.grid(alpha=0.3)
    figure.legend(*rows[0][1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(f"{NUM_RANKS} nodes at {RATE}, AdamW")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measure(
    runs: Sequence[tuple[str, str, int]], rate: str, max_steps: int | None, folder: Path
) -> list[dict[str, Any]]:
    """Start the ranks in the lab; return the curves of rank 0. The folder keeps weights from one start to the next."""
    job = {"runs": runs, "rate": rate, "max_steps": max_steps, "folder": str(folder)}
    curves: list[dict[str, Any]] = run_in_lab([parse_rate(rate)] * NUM_RANKS, [__file__, "--job"], job=job)
    return curves


def report(results: dict[str, Any]) -> None:
    """Write the table and the plot."""
    (RESULTS / "bits_to_loss.md").write_text(note(results) + to_markdown(results["curves"]))
    draw(results["curves"], RESULTS / "bits_to_loss.png")


def main() -> None:
    """Measure what is missing, write after each seed and start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default=RATE)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, help="another number of steps, for a look; writes nothing")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for DDP's weights")
    parser.add_argument("--job", type=Path, nargs=2, help=argparse.SUPPRESS)  # in the ranks
    parser.add_argument("--report", action="store_true", help="write the table and the plot again, of what is there")
    options = parser.parse_args()
    if options.job is not None:
        given, path = options.job
        train_all(json.loads(given.read_text()), path)
        return
    path = RESULTS / "bits_to_loss.json"
    results: dict[str, Any] = {"curves": []}
    if path.exists() and options.steps is None:
        results = json.loads(path.read_text())
    if options.report:
        report(results)
        return
    for seed, start in itertools.product(options.seeds, options.starts):
        made = {(curve["start"], curve["method"], curve["seed"]) for curve in results["curves"]}
        runs = [(start, method, seed) for method in options.methods if (start, method, seed) not in made]
        if not runs:
            continue
        if runs[0][:2] == ("scratch", "ddp"):
            (options.folder / f"{seed}.pt").unlink(missing_ok=True)
        results["curves"] += measure(runs, options.rate, options.steps, options.folder)
        results |= {"environment": describe_environment(), "command": shlex.join(sys.argv)}
        if options.steps is None:
            path.write_text(json.dumps(results) + "\n")
            report(results)
    print(to_markdown(results["curves"]))


if __name__ == "__main__":
    main()
