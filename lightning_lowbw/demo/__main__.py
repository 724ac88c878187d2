"""`lowbw-demo`: train on two nodes with a slow link between them, with ddp and with dgc; print a table, draw a plot.

    python -m lightning_lowbw.demo

The nodes are those of the lab, at 1 Gb/s and at 100 Mb/s. Where the lab cannot be made, two processes train over the
loopback interface, which shows accuracy and bytes, but not the time on a slow link. Takes less than three minutes on
two cores.
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
from typing import IO, Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch import __version__ as lightning_version

from lightning_lowbw.callbacks.traffic_monitor import TrafficMonitor
from lightning_lowbw.lab import LabError, Network, launch, parse_rate, read_sent_bytes
from lightning_lowbw.strategies import DGCStrategy
from lightning_lowbw.zoo import DigitsClassifier, DigitsData

# One rank ------------------------------------------------------------------------------------------------------------

# What a user writes for each strategy.
# The sparsity is a number, so that each run sends the same: "auto" goes by the times it measures.
TRAINER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "dgc": {"strategy": DGCStrategy(sparsity=[0.999])},
}
MAX_EPOCHS = 15
SEED = 1


class Recorder(Callback):
    """Keep the loss, the time and the bytes of each step, and what the interface sent during all of them."""

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


def train_rank(strategy: str, max_steps: int, output: Path) -> None:
    """Train, test, and write the record on rank zero: an ordinary Lightning script, started as torchrun starts one."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # the data is in memory
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning 2.6 and torch 2.13
    seed_everything(SEED, workers=True, verbose=False)
    model, data, recorder = DigitsClassifier(), DigitsData(), Recorder()
    trainer = Trainer(
        callbacks=[TrafficMonitor(), recorder],
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=MAX_EPOCHS,
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **TRAINER_ARGUMENTS[strategy],
    )
    trainer.fit(model, data)
    tested = trainer.test(model, data, verbose=False)[0]
    if trainer.is_global_zero:
        names = ("seconds", "loss", "sent_bytes", "interface_bytes")
        record = {"test_accuracy": tested["test_acc"], **{name: getattr(recorder, name) for name in names}}
        output.write_text(json.dumps(record))


# The table and the plot, made from the measurements only --------------------------------------------------------------

BASELINE = "ddp"
SMOOTHING_STEPS = 20  # running mean of the plotted loss: an epoch
COLOURS = {"ddp": "tab:orange", "dgc": "tab:blue"}
KB = 1000
README_BEGIN, README_END = "<!-- demo:begin -->", "<!-- demo:end -->"
COLUMNS = {
    "link": "{link}",
    "strategy": "{strategy}",
    "steps": "{num_steps}",
    "test accuracy": "{test_accuracy:.2%}",
    "seconds": "{training_s:.1f}",
    "seconds per step": "{step_s:.4f}",
    "speed-up": "{speed_up:.1f}",
    "kB per step": "{sent_kb:,.1f}",
    "kB measured": "{measured}",
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        link: "1 Gb/s" or the like.
        strategy: by name.
        test_accuracy: of the trained model, on images that it has not seen.
        seconds: at the end of each step, since the start of the training.
        loss: of rank 0's batch, of each step.
        sent_bytes: by rank 0 in each step, by the volume formulas.
        interface_bytes: sent by a rank during the training, by the kernel's counter; None where there is none.
    """

    link: str
    strategy: str
    test_accuracy: float
    seconds: Sequence[float]
    loss: Sequence[float]
    sent_bytes: Sequence[float]
    interface_bytes: float | None

    @property
    def step_s(self) -> float:
        """Seconds per step, the mean of all steps."""
        return self.seconds[-1] / len(self.seconds)


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the numbers of the table, one row for each run."""
    baseline_s = {run.link: run.step_s for run in runs if run.strategy == BASELINE}
    return [
        {
            "link": run.link,
            "strategy": run.strategy,
            "num_steps": len(run.seconds),
            "test_accuracy": run.test_accuracy,
            "training_s": run.seconds[-1],
            "step_s": run.step_s,
            "speed_up": baseline_s[run.link] / run.step_s,
            "sent_kb": statistics.fmean(run.sent_bytes) / KB,
            "measured_kb": None if run.interface_bytes is None else run.interface_bytes / len(run.seconds) / KB,
        }
        for run in runs
    ]


def format_cells(row: dict[str, Any]) -> list[str]:
    """Return the text of each column."""
    measured = "-" if row["measured_kb"] is None else f"{row['measured_kb']:,.1f}"
    return [text.format(**row, measured=measured) for text in COLUMNS.values()]


def to_markdown(rows: Sequence[dict[str, Any]], caption: str) -> str:
    """Return the table, and a caption."""
    cells = [list(COLUMNS), ["---"] * len(COLUMNS), *map(format_cells, rows)]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in cells), "", caption, ""])


def replace_in_readme(path: Path, markdown: str) -> None:
    """Put the table in place of what is between the markers of a file.

    Raises:
        ValueError: it has no markers.
    """
    before, begin, rest = path.read_text().partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ValueError(f"{path} has no place for the table: put the lines {README_BEGIN} and {README_END} into it.")
    path.write_text(f"{before}{begin}\n{markdown}{end}{after}")


def show(rows: Sequence[dict[str, Any]], caption: str) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for title in COLUMNS:  # one word per line: nine columns fit into a terminal of 80
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*format_cells(row))
    console = Console(highlight=False)
    console.print(table)
    console.print(caption, soft_wrap=True)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Plot the training loss against the seconds of training: a panel for each link, a line for each strategy."""
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(run.link for run in runs))
    figure = Figure(figsize=(5 * len(links), 4), layout="constrained")  # without pyplot: needs no display
    panels = dict(zip(links, figure.subplots(1, len(links), sharey=True, squeeze=False)[0], strict=True))
    for run in runs:
        loss = smooth(run.loss, SMOOTHING_STEPS)
        label = f"{run.strategy}: test accuracy {run.test_accuracy:.1%} after {run.seconds[-1]:.0f} s"
        panels[run.link].plot(run.seconds[-len(loss) :], loss, label=label, color=COLOURS[run.strategy])
        panels[run.link].plot(run.seconds[-1], loss[-1], "o", color=COLOURS[run.strategy])
    for link, panel in panels.items():
        panel.set(title=f"two nodes, {link}", yscale="log", xlabel="seconds of training", xlim=(0, None))
        panel.legend()
        panel.grid(alpha=0.3)
    panels[links[0]].set_ylabel("training loss")
    figure.savefig(path, dpi=120)


def smooth(values: Sequence[float], length: int) -> list[float]:
    """Return the running mean; the first value is that of the first `length` values.

    Example:
        >>> smooth([1.0, 2.0, 3.0, 7.0], 3)
        [2.0, 4.0]
    """
    sums = [0.0, *itertools.accumulate(values)]
    length = min(length, len(values))
    return [(late - early) / length for early, late in zip(sums, sums[length:], strict=False)]


# All of them ----------------------------------------------------------------------------------------------------------

NUM_NODES = 2
LINKS = {"1 Gb/s": "1gbit", "100 Mb/s": "100mbit"}
LOOPBACK = "loopback, not throttled"
TIMEOUT_S = 600.0  # of one training
NEEDED = ("matplotlib", "rich", "sklearn")  # of the extra "demo"
CAPTION = (
    "Digits of scikit-learn; {num_nodes} nodes on one machine of {num_cores} cores, torch {torch}, "
    "Lightning {lightning}, seed {seed}. Speed-up: over {baseline} on the same link. kB: 1000 bytes, sent by one node; "
    "measured on its network interface, with headers. The demo took {total_s:.0f} s in all, "
    "without loading libraries."
)


def train(link: str, strategy: str, max_steps: int = -1) -> Run:
    """Train once, on two nodes of the lab or on the loopback interface.

    Raises:
        SystemExit: the training failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        record = Path(folder) / "record.json"
        options = ["--rank-of", strategy, "--max-steps", str(max_steps), "--output", str(record)]
        command = ["-m", "lightning_lowbw.demo", *options]
        status = (
            _run_on_loopback(command, output) if link == LOOPBACK else _run_in_the_lab(LINKS[link], command, output)
        )
        if status != 0:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            raise SystemExit(f"lowbw-demo: the training with {strategy} ({link}) ended with status {status}.")
        values: dict[str, Any] = json.loads(record.read_text())
    if link == LOOPBACK and values["interface_bytes"] is not None:
        values["interface_bytes"] /= NUM_NODES  # they share the interface
    return Run(link, strategy, **values)


def _run_in_the_lab(rate: str, command: list[str], output: IO[bytes]) -> int:
    with Network([parse_rate(rate)] * NUM_NODES) as network:
        return launch(network, [sys.executable, *command], timeout_s=TIMEOUT_S, output=output).status


def _run_on_loopback(command: list[str], output: IO[bytes]) -> int:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    ranks = [sys.executable, *torchrun, f"--nproc-per-node={NUM_NODES}", *command]
    return subprocess.run(ranks, stdout=output, stderr=output, timeout=TIMEOUT_S).returncode


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
        "seed": SEED,
        "torch": torch.__version__,
        "lightning": lightning_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, train with each strategy on each link, write and show the results."""
    parser = argparse.ArgumentParser(
        "lowbw-demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo_results"), help="folder for the results")
    parser.add_argument("--max-steps", type=int, default=-1, help="end each training after this number of steps")
    parser.add_argument("--loopback", action="store_true", help="do not use the lab")
    # What the ranks are started with.
    parser.add_argument("--rank-of", choices=sorted(TRAINER_ARGUMENTS), help=argparse.SUPPRESS)
    parser.add_argument("--readme", type=Path, help="file whose marked block is replaced by the table")
    options = parser.parse_args(arguments)
    if options.rank_of:
        train_rank(options.rank_of, options.max_steps, options.output)
        return 0
    started_s = time.perf_counter()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; the demo needs pip install 'lightning-lowbw[demo]'")
    links = [LOOPBACK] if options.loopback or not _has_lab() else list(LINKS)
    runs = []
    for link in links:
        for strategy in TRAINER_ARGUMENTS:
            _say(f"Training with {strategy}, {link} ...")
            runs.append(train(link, strategy, options.max_steps))
            _say(f"  test accuracy {runs[-1].test_accuracy:.1%} after {runs[-1].seconds[-1]:.1f} s")

    results: Path = options.output
    results.mkdir(parents=True, exist_ok=True)
    draw(runs, results / "demo.png")
    environment, total_s = describe_environment(), time.perf_counter() - started_s
    rows, caption = summarize(runs), CAPTION.format(**environment, baseline=BASELINE, total_s=total_s)
    record = {"environment": environment, "total_s": total_s, "rows": rows}
    (results / "demo.json").write_text(json.dumps(record, indent=2) + "\n")
    (results / "demo.md").write_text(to_markdown(rows, caption))
    if options.readme:
        replace_in_readme(options.readme, to_markdown(rows, caption))
    show(rows, caption)
    _say(f"Wrote {results}/demo.json, demo.md and demo.png: look at the picture.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
