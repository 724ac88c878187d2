"""`lowbw-demo`: train on two nodes with a slow link between them, with ddp and with dgc; print a table, draw a plot.

    python -m lightning_lowbw.tools.demo

The lab makes the nodes, with links of 200 Mb/s. If the lab cannot be made, two processes train over the loopback
interface, which shows accuracy and bytes, but not the time on a slow link. Takes less than three minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch import __version__ as lightning_version

from lightning_lowbw.strategies.traffic_monitor import TrafficMonitor
from lightning_lowbw.tools.lab import LabError, Network, launch, parse_rate, read_sent_bytes
from lightning_lowbw.tools.zoo import DigitsClassifier, DigitsData

# One rank ------------------------------------------------------------------------------------------------------------

STRATEGIES = ("ddp", "dgc")  # what a user writes
MAX_STEPS = 300  # 15 epochs
SEEDS = (1, 2, 3)


class Recorder(Callback):
    """Keep the loss, the time and the bytes of each step, and the bytes of the interface during all steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss: list[float] = []
        self.sent_bytes: list[float] = []
        self.interface_bytes: int | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Not at the start of the training: the strategy compiles its kernels after that, a quarter of a minute once.
        if trainer.current_epoch > 0:
            return
        trainer.strategy.barrier()
        self._interface_bytes_before = _read_interface()
        self._started_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started_s)
        self.loss.append(outputs["loss"].item())
        self.sent_bytes.append(float(trainer.callback_metrics["traffic/bytes_sent"]))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.strategy.barrier()  # what the other ranks still send belongs to the training, too
        before, now = self._interface_bytes_before, _read_interface()
        self.interface_bytes = None if before is None or now is None else now - before

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # gloo sometimes aborts at exit if a reduction came last; the strategies of this package do this themselves
        trainer.strategy.barrier()


def _read_interface() -> int | None:
    return read_sent_bytes(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))


def train_rank(strategy: str, seed: int, max_steps: int) -> dict[str, Any]:
    """Train, test, and return the record: an ordinary Lightning script, started as torchrun starts one."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # the data is in memory
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning 2.6 and torch 2.13
    seed_everything(seed, workers=True, verbose=False)
    model, data, recorder = DigitsClassifier(), DigitsData(), Recorder()
    trainer = Trainer(
        strategy=strategy,
        callbacks=[TrafficMonitor(), recorder],
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    tested = trainer.test(model, data, verbose=False)[0]
    names = ("seconds", "loss", "sent_bytes", "interface_bytes")
    return {
        "strategy": strategy,
        "seed": seed,
        "test_accuracy": tested["test_acc"],
        **{name: getattr(recorder, name) for name in names},
    }


def train_all(seeds: Sequence[int], max_steps: int, output: Path) -> None:
    """Train with each seed and strategy in turn; rank zero writes the records."""
    records = []
    for seed, strategy in itertools.product(seeds, STRATEGIES):
        records.append(train_rank(strategy, seed, max_steps))
        if dist.get_rank() == 0:
            seconds, accuracy = records[-1]["seconds"][-1], records[-1]["test_accuracy"]
            _say(f"{strategy}, seed {seed}: test accuracy {accuracy:.1%} after {seconds:.1f} s")
            output.write_text(json.dumps(records))


# The table and the plot, made from the measurements only --------------------------------------------------------------

SMOOTHING_STEPS = 20  # running mean of the loss: an epoch
LOSS_TO_REACH = 0.01  # of the training
COLOURS = {"ddp": "tab:orange", "dgc": "tab:blue"}
KB = 1000
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"
COLUMNS = {
    "strategy": "{strategy}",
    "seeds": "{num_seeds}",
    "steps": "{num_steps}",
    "test accuracy": "{test_accuracy:.2%}",
    "seconds": "{training_s:.1f}",
    f"s to a loss of {LOSS_TO_REACH}": "{reached}",
    "speed-up": "{speed_up:.1f}",
    "kB per step": "{sent_kb:,.1f}",
    "kB measured": "{measured}",
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        strategy: by name.
        seed: of weights and batches.
        test_accuracy: of the trained model, on images that it has not seen.
        seconds: at the end of each step, since the start of the training.
        loss: of rank 0's batch, of each step.
        sent_bytes: by rank 0 in each step, by the volume formulas.
        interface_bytes: sent by a rank during the training, by the kernel's counter; None where there is none.
    """

    strategy: str
    seed: int
    test_accuracy: float
    seconds: Sequence[float]
    loss: Sequence[float]
    sent_bytes: Sequence[float]
    interface_bytes: float | None

    def seconds_to(self, loss: float) -> float | None:
        """Return when the running mean of the loss was first as low as this, or None."""
        means = smooth(self.loss, SMOOTHING_STEPS)
        times = self.seconds[-len(means) :]
        return next((second for second, mean in zip(times, means, strict=True) if mean <= loss), None)


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the numbers of the table, one row for each strategy: means over its runs."""
    rows: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        mine = [run for run in runs if run.strategy == strategy]
        reached = [s for s in (run.seconds_to(LOSS_TO_REACH) for run in mine) if s is not None]
        num_steps = len(mine[0].seconds)
        counted = [run.interface_bytes for run in mine if run.interface_bytes is not None]
        rows.append(
            {
                "strategy": strategy,
                "num_seeds": len(mine),
                "num_steps": num_steps,
                "test_accuracy": statistics.fmean(run.test_accuracy for run in mine),
                "training_s": statistics.fmean(run.seconds[-1] for run in mine),
                "reached_s": statistics.fmean(reached) if reached else None,
                "num_reached": len(reached),
                "sent_kb": statistics.fmean(sum(run.sent_bytes) for run in mine) / num_steps / KB,
                "measured_kb": statistics.fmean(counted) / num_steps / KB if counted else None,
            }
        )
    baseline_s = rows[0]["training_s"]  # of ddp
    return [{**row, "speed_up": baseline_s / row["training_s"]} for row in rows]


def format_cells(row: dict[str, Any]) -> list[str]:
    """Return the text of each column."""
    measured = "-" if row["measured_kb"] is None else f"{row['measured_kb']:,.1f}"
    reached = "not reached" if row["reached_s"] is None else f"{row['reached_s']:.1f}"
    if 0 < row["num_reached"] < row["num_seeds"]:
        reached += f" ({row['num_reached']} of {row['num_seeds']})"
    return [text.format(**row, measured=measured, reached=reached) for text in COLUMNS.values()]


def to_markdown(rows: Sequence[dict[str, Any]], caption: str) -> str:
    """Return the table, and a caption."""
    cells = [list(COLUMNS), ["---"] * len(COLUMNS), *map(format_cells, rows)]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in cells), "", caption, ""])


def replace_block(path: Path, markdown: str) -> None:
    """Replace the text between the markers of a file by the table.

    Raises:
        ValueError: it has no markers.
    """
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the table: put the lines {BEGIN} and {END} into it.")
    path.write_text(f"{before}{begin}\n{markdown}{end}{after}")


def show(rows: Sequence[dict[str, Any]], caption: str) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for title in COLUMNS:
        table.add_column(in_two_lines(title), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*format_cells(row))
    console = Console(highlight=False)
    console.print(table)
    console.print(caption)


def in_two_lines(title: str) -> str:
    """Break a head so that nine columns fit into a terminal of 80.

    Examples:
        >>> in_two_lines("s to a loss of 0.01"), in_two_lines("seconds")
        ('s to a loss\\nof 0.01', 'seconds')
    """
    words = title.split()
    halves = [(" ".join(words[:num]), " ".join(words[num:])) for num in range(1, len(words))]
    return "\n".join(min(halves, key=lambda lines: max(map(len, lines)), default=(title,)))


def draw(rows: Sequence[dict[str, Any]], runs: Sequence[Run], link: str, path: Path) -> None:
    """Plot the training loss against the seconds of training: a line for each run, a dot at its end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")  # without pyplot: needs no display
    panel = figure.subplots()
    for row in rows:
        mine = [run for run in runs if run.strategy == row["strategy"]]
        label = f"{row['strategy']}: {row['training_s']:.0f} s, test accuracy {row['test_accuracy']:.1%}"
        for number, run in enumerate(mine):
            loss, colour = smooth(run.loss, SMOOTHING_STEPS), COLOURS[run.strategy]
            panel.plot(run.seconds[-len(loss) :], loss, color=colour, label=label if number == 0 else None)
            panel.plot(run.seconds[-1], loss[-1], "o", color=colour)
    title = f"{rows[0]['num_steps']} steps on two nodes, {link}; {rows[0]['num_seeds']} seeds"
    panel.axhline(LOSS_TO_REACH, color="grey", lw=0.8, ls="--")
    panel.set(title=title, yscale="log", xlabel="seconds of training", ylabel="training loss", xlim=(0, None))
    panel.legend()
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def smooth(values: Sequence[float], length: int) -> list[float]:
    """Return the running mean; the first value is that of the first `length` values.

    Examples:
        >>> smooth([1.0, 2.0, 3.0, 7.0], 3)
        [2.0, 4.0]
    """
    sums = [0.0, *itertools.accumulate(values)]
    length = min(length, len(values))
    return [(late - early) / length for early, late in zip(sums, sums[length:], strict=False)]


# All runs -----------------------------------------------------------------------------------------------------------

NUM_NODES = 2
LINK, RATE = "200 Mb/s", "200mbit"
LOOPBACK = "loopback, not throttled"
TIMEOUT_S = 600.0  # of all trainings
NEEDED = ("matplotlib", "rich", "sklearn")  # of the extra "demo"
CAPTION = (
    "Digits of scikit-learn, {link}; {num_nodes} nodes on one machine of {num_cores} cores, torch {torch}, "
    "Lightning {lightning}; means over seeds {seeds}. The loss is that of the training, its mean over an epoch. kB: "
    "1000 bytes, sent by one node; measured on its network interface, with headers. The demo took {total_s:.0f} s in "
    "all."
)


def train(link: str, seeds: Sequence[int], max_steps: int) -> list[Run]:
    """Train with each strategy, on two nodes of the lab or on the loopback interface.

    Raises:
        SystemExit: the training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "records.json"
        options = ["--output", str(written), "--max-steps", str(max_steps), "--seeds", *map(str, seeds)]
        command = ["-m", "lightning_lowbw.tools.demo", "--rank", *options]
        status = _run_on_loopback(command) if link == LOOPBACK else _run_in_the_lab(command)
        if status != 0:
            raise SystemExit(f"lowbw-demo: the training ({link}) ended with status {status}.")
        records: list[dict[str, Any]] = json.loads(written.read_text())
    for record in records:
        if link == LOOPBACK and record["interface_bytes"] is not None:
            record["interface_bytes"] /= NUM_NODES  # they share the interface
    return [Run(**record) for record in records]


def _run_in_the_lab(command: list[str]) -> int:
    with Network([parse_rate(RATE)] * NUM_NODES) as network:
        return launch(network, [sys.executable, *command], timeout_s=TIMEOUT_S).status


def _run_on_loopback(command: list[str]) -> int:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    ranks = [sys.executable, *torchrun, f"--nproc-per-node={NUM_NODES}", *command]
    return subprocess.run(ranks, timeout=TIMEOUT_S).returncode


def _has_lab() -> bool:
    """Return whether nodes can be made here; if not, say why, and what the demo then does not show."""
    try:
        with Network([None] * NUM_NODES):
            return True
    except LabError as error:
        _say(
            f"{error}\n\nSo there is no slow link here. The demo trains two processes over the loopback interface: you"
        )
        _say("will see accuracy and bytes, but not the time that fewer bytes save.\n")
        return False


def describe_environment() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "num_nodes": NUM_NODES,
        "num_cores": os.cpu_count(),
        "torch": torch.__version__,
        "lightning": lightning_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, train with each strategy and seed, write and show the results."""
    parser = argparse.ArgumentParser(
        "lowbw-demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo_results"), help="folder for the results")
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS, help="of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--loopback", action="store_true", help="do not use the lab")
    parser.add_argument("--document", type=Path, help="file whose marked block is replaced by the table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # what the ranks are started with
    options = parser.parse_args(arguments)
    if options.rank:
        train_all(options.seeds, options.max_steps, options.output)
        return 0
    started_s = time.perf_counter()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; the demo needs pip install 'lightning-lowbw[demo]'")
    link = LOOPBACK if options.loopback or not _has_lab() else LINK
    _say(f"Training on {NUM_NODES} nodes, {link}.")
    runs = train(link, options.seeds, options.max_steps)
    results: Path = options.output
    results.mkdir(parents=True, exist_ok=True)
    environment, total_s = describe_environment(), time.perf_counter() - started_s
    seeds = ", ".join(map(str, options.seeds))
    rows = summarize(runs)
    caption = CAPTION.format(**environment, link=link, seeds=seeds, total_s=total_s)
    record = {"environment": environment, "link": link, "total_s": total_s, "rows": rows}
    (results / "demo.json").write_text(json.dumps(record, indent=2) + "\n")
    (results / "demo.md").write_text(to_markdown(rows, caption))
    draw(rows, runs, link, results / "demo.png")
    if options.document:
        replace_block(options.document, to_markdown(rows, caption))
    show(rows, caption)
    _say(f"Wrote {results}/demo.json, demo.md and demo.png: look at the picture.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
