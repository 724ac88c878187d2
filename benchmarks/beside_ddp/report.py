"""The report and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.beside_ddp.accuracy import PERTURBATION
from benchmarks.beside_ddp.cells import LATER_SEEDS, NUM_SEEDS, Cell, cells_of, former_of, later_of
from benchmarks.beside_ddp.tables import (
    accuracy_to_markdown,
    check_dense,
    control_to_markdown,
    differences_to_markdown,
    fewer_seeds_of,
    groups_to_markdown,
    phases_to_markdown,
    summary_of,
    variants_to_markdown,
    wall_clock_to_markdown,
)
from benchmarks.beside_ddp.tasks import LATENCY_S, MODEL_25M, NUM_RANKS, STEPS, TASKS, Row, is_same
from benchmarks.beside_ddp.wall_clock import seconds_of_run, sorted_records
from benchmarks.harness import colour_of

# Of one colour: hollow is what does not choose by itself.
FILLS = {"ddp": None, "auto": None, "dgc 99.9 %": "white"}


def report(results: dict[str, Any], constants: dict[str, float]) -> str:
    """Return the summary of the table."""
    cells = cells_of(results, constants)
    parts = report_accuracy(results, cells) if cells else []
    if control := control_to_markdown(results, cells):
        parts += [
            "What chance does: ddp beside ddp whose first parameter is multiplied by 1 + "
            f"{PERTURBATION:g} at the start. Runs that differ by rounding alone diverge within some hundred steps. "
            f"{fewer_seeds_of(cells)}"
            "Of the first ten seeds of resnet and of text, 5,000 steps, five were added after auto was worse than ddp "
            "with the first five.",
            control,
        ]
    if groups := groups_to_markdown(results, cells):
        parts += [
            f"Rows with many seeds, judged as {NUM_SEEDS} seeds would judge them: in how many disjoint groups of "
            f"{NUM_SEEDS} seeds the mean is not worse than ddp's by more than the standard error of ddp's mean.",
            groups,
        ]
    if variants := variants_to_markdown(results, cells):
        parts += [
            "The same schedules with `keep_momentum=False`, velocities cleared at every density:",
            variants,
        ]
    if later := differences_to_markdown(later_of(cells)):
        parts += [f"Seeds from {LATER_SEEDS} on alone, which were added to judge the others by:", later]
    if constants:  # cells are what these choose
        return "\n\n".join(parts) + "\n"
    if former := differences_to_markdown(former_of(results, cells, are_trials=False)):
        parts += ["What auto chose before its rule was changed because of these runs:", former]
    if trials := differences_to_markdown(former_of(results, cells, are_trials=True)):
        parts += ["Other rules, which were tried and not taken (`--constant`):", trials]
    if results["wall_clock"]:
        records = sorted_records(results)
        parts += [
            "Wall-clock in the lab, 2 nodes, a core each. Seconds of a run are computed: steps at each density times "
            "the median seconds of such a step, below, and once what measuring and deciding takes, where it measures.",
            wall_clock_to_markdown(records),
            phases_to_markdown(records),
        ]
    for number, environment in enumerate(results["environments"]):
        num_runs = sum(is_same(row, environment=number) for row in results["rows"])
        timed = [each for each in sorted_records(results) if is_same(each, environment=number)]
        of = [f"{num_runs} runs of training"] * (num_runs > 0)
        of += ["the times of " + ", ".join(f"{each['task']} at {each['link']}" for each in timed)] * bool(timed)
        if of:
            told = ", ".join(f"{name} {value}" for name, value in environment.items())
            parts.append(f"Environment of {' and of '.join(of)}: {told}.")
    return "\n\n".join(parts) + "\n"


def report_accuracy(results: dict[str, Any], cells: list[Cell]) -> list[str]:
    """Return caption, table and summary."""
    names = {cell.task for cell in cells}
    tasks = "; ".join(f"{name}: {task.note}" for name, task in TASKS.items() if name in names)
    step_ms = ", ".join(f"{name} {1e3 * results['nominal']['step_s'][name]:.1f}" for name in TASKS if name in names)
    return [
        f"Accuracy at equal steps, {NUM_RANKS} ranks. {tasks}. Learning rate in one cycle, no clipping. Mean ± "
        "standard error (SE) over seeds. A difference is the mean over seeds of that between runs of one seed, ± its "
        "SE, positive where auto is worse; it is within one standard error where its mean is not larger than its SE. "
        f"What auto chooses is by a nominal link (latency {1e3 * LATENCY_S:g} ms) and the computation of a step, "
        f"measured once (ms: {step_ms}); links for which it chooses the same share their runs. Where it stays dense "
        f"the runs are ddp's: the weights were equal to the bit {check_dense(results['rows'])}.",
        accuracy_to_markdown(cells),
        summary_of(cells),
        "Two methods that are equal differ by more than one standard error over 5 seeds in 37 % of such rows "
        "(Student's t, 4 degrees of freedom).",
    ]


def draw(cells: list[Cell], records: list[Row], path: Path) -> None:
    """Plot the differences to ddp with their standard errors, and the seconds of a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 3, figsize=(15, 1.6 + 0.34 * max(len(cells), 12)), layout="constrained", width_ratios=(1, 1, 1.1)
    )
    labels = [f"{cell.task}, {cell.steps:,}: {', '.join(cell.links)}" for cell in cells]
    for axis, key, scale, title in (
        (axes[0], "val_loss", 1.0, "validation loss above ddp's"),
        (axes[1], "test_accuracy", 100.0, "test accuracy below ddp's, points"),
    ):
        for number, method in enumerate(("auto", "dgc 99.9 %")):
            found = [cell.difference(key, method) for cell in cells]
            places = [place + 0.15 - 0.3 * number for place in range(len(cells))]
            axis.errorbar(
                [scale * each.mean for each in found],
                places,
                xerr=[scale * each.error for each in found],
                fmt="o",
                ms=4,
                capsize=2,
                label=method,
                color=colour_of(method),
                mfc=FILLS[method],
            )
        axis.axvline(0.0, color="k", lw=0.8)
        axis.set_yticks(range(len(cells)), labels if axis is axes[0] else [""] * len(cells), fontsize=8)
        least = 0.01 if scale == 1.0 else 1.0  # linear below
        axis.set_xscale("symlog", linthresh=least)
        axis.set_xticks([sign * least * 10**power for power in (0, 1, 2) for sign in (-1, 1)] + [0])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        axis.set_title(f"{title}\n(mean and standard error over seeds; right is worse)", fontsize=9)
    axes[0].legend(fontsize=8)
    draw_wall_clock(axes[2], records)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_wall_clock(axis: Any, records: list[Row]) -> None:
    """Plot the seconds of a run of the 25M model."""
    places = []
    for record in (each for each in records if each["task"] == MODEL_25M):
        for num_steps in STEPS:
            place = len(places)
            places.append(f"{record['link']}, {num_steps:,}")
            for method in ("ddp", "dgc 99.9 %", "auto"):
                if (seconds := seconds_of_run(record, method, num_steps)) is not None:
                    label = method if place == 0 else None
                    axis.plot(seconds, place, "o", color=colour_of(method), mfc=FILLS[method], label=label)
    axis.set_yticks(range(len(places)), places, fontsize=8)
    axis.invert_yaxis()
    axis.set_title(f"{MODEL_25M}: seconds of a run, by link and steps\n(computed from seconds per step)", fontsize=9)
    axis.grid(alpha=0.3, which="both")
    if places:
        axis.set_xscale("log")
        axis.legend(fontsize=8)
    else:
        axis.text(0.5, 0.5, "not measured yet", ha="center", transform=axis.transAxes)
