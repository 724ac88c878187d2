"""What the benchmarks have in common: ranks in the lab, the environment of a measurement, and where results go.

Ranks import this module, too: no plots here.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

import lightning_lowbw
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.tools.lab import Network, launch

RESULTS = Path(__file__).with_name("results")
LAB = "network namespaces, token bucket filter in both directions"


def run_in_lab(
    rates: Sequence[float | None],
    command: Sequence[str],
    *,
    job: Any = None,
    what: str = "",
    rtt_ms: float = 0.0,
    **options: Any,
) -> Any:
    """Start a Python script on every node of the lab; return what rank 0 has written.

    Args:
        rates: bit/s of the nodes' links; None is not throttled.
        command: the script and its arguments. The path of the JSON file that rank 0 is to write is appended.
        job: for the ranks; the path of a JSON file with it comes before that of the result.
        what: is measured, for the message of a failure.
        rtt_ms: round-trip time between two nodes.
        **options: of `lightning_lowbw.tools.lab.launch`.

    Raises:
        SystemExit: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, Network(rates, rtt_ms=rtt_ms) as network:
        written = Path(folder) / "written.json"
        paths = [str(written)]
        if job is not None:
            given = Path(folder) / "job.json"
            given.write_text(json.dumps(job))
            paths = [str(given), *paths]
        if launch(network, [sys.executable, *command, *paths], **options).status != 0:
            raise SystemExit(f"The ranks failed{f' on {what}' if what else ''}.")
        return json.loads(written.read_text())


def describe_environment(link: str | None = LAB) -> dict[str, Any]:
    """Return what the numbers depend on; without a link if they do not depend on it, or rows name it."""
    model = "unknown"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    environment = {
        "lightning_lowbw": lightning_lowbw.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    return environment if link is None else {**environment, "link": link}


def as_plain(when: EveryStep | None) -> dict[str, Any] | None:
    """Return a schedule of sparsity as plain values; None where all steps are dense."""
    if when is None or when.is_auto:
        return None
    return {
        "rampup_begin_step": when.rampup_begin_step,
        "rampup_step": when.rampup_step,
        "sparsity": list(when.stairs),
    }


def in_words(schedule: dict[str, Any] | None) -> str:
    """Return what is sent of each gradient, in the order of the steps; of what `as_plain` returns."""
    if schedule is None:
        return "all, as ddp"
    *stairs, last = (f"{100 * (1 - each):.4g} %" for each in schedule["sparsity"])
    begin, per_stair = schedule["rampup_begin_step"], schedule["rampup_step"] // len(schedule["sparsity"])
    between = f"then {per_stair} steps each at {', '.join(stairs)}, " if stairs else ""
    return f"all until step {begin}, {between}then {last}"


def replace_block(document: str, name: str, text: str) -> None:
    """Replace what lies between the marks of a name in one of the repository's documents."""
    path = Path(__file__).resolve().parents[1] / document
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")


# One colour per method in every plot. Of what a label contains, the first counts: "ddp, fp16 hook" is fp16.
COLOURS = {
    "fp16": "tab:red",
    "float16": "tab:red",
    "bfloat16": "tab:red",
    "int8": "tab:purple",
    "int4": "tab:pink",
    "powersgd": "tab:green",
    "sparse_loco": "tab:cyan",
    "diloco": "tab:olive",
    "local_sgd": "tab:brown",
    "hierarchical": "tab:gray",
    "ddp": "tab:orange",
    "dgc": "tab:blue",
    "auto": "tab:blue",
}


def colour_of(label: str) -> str:
    """Return the colour of a method in plots.

    Example:
        >>> colour_of("PowerSGD rank 2"), colour_of("dgc, two levels")
        ('tab:green', 'tab:blue')
    """
    words = label.lower().replace("local sgd", "local_sgd")
    return next((colour for name, colour in COLOURS.items() if name in words), "black")
