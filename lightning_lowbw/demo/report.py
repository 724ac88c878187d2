"""The table and the plot of the demo, made from the measurements only."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    from rich import box  # only the demo needs rich and matplotlib
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
