"""`lowbw-demo`: train on two nodes with a slow link between them, with ddp and with dgc; print a table, draw a plot.

    python -m lightning_lowbw.demo

The nodes are those of the lab, at 1 Gb/s and at 100 Mb/s. Where the lab cannot be made, two processes train over the
loopback interface, which shows accuracy and bytes, but not the time on a slow link. Takes less than three minutes on
two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch import __version__ as lightning_version

from lightning_lowbw.demo.report import BASELINE, Run, draw, replace_in_readme, show, summarize, to_markdown
from lightning_lowbw.demo.training import SEED, TRAINER_ARGUMENTS
from lightning_lowbw.lab import LabError, Network, launch, parse_rate

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


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, train with each strategy on each link, write and show the results."""
    parser = argparse.ArgumentParser(
        "lowbw-demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("demo_results"), help="folder for the results")
    parser.add_argument("--max-steps", type=int, default=-1, help="end each training after this number of steps")
    parser.add_argument("--loopback", action="store_true", help="do not use the lab")
    parser.add_argument("--readme", type=Path, help="file whose marked block is replaced by the table")
    options = parser.parse_args(arguments)
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


def train(link: str, strategy: str, max_steps: int = -1) -> Run:
    """Train once, on two nodes of the lab or on the loopback interface.

    Raises:
        SystemExit: the training failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        record = Path(folder) / "record.json"
        options = ["--strategy", strategy, "--max-steps", str(max_steps), "--output", str(record)]
        command = ["-m", "lightning_lowbw.demo.training", *options]
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
