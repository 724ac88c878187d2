"""Tables and sentences about the cells, and about the seconds."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

from benchmarks.beside_ddp.accuracy import CONTROL, METHODS, VARIANTS
from benchmarks.beside_ddp.cells import NUM_SEEDS, Cell, Difference, beside_perturbed, error_of, is_beyond_ddp
from benchmarks.beside_ddp.tasks import STEPS, Row, is_same
from benchmarks.beside_ddp.wall_clock import DDP_KEY, DENSE_KEY, planned, ratios_of, seconds_of_run, step_s_of
from benchmarks.harness import as_plain, in_words

LEAST_GROUPS = 4  # of this many seeds, to be judged one by one
CLEARLY = 2.0  # standard errors by which a run takes longer than another


def accuracy_to_markdown(cells: list[Cell]) -> str:
    """Return the table of losses and accuracies."""
    lines = [
        "| task | steps | link | auto sends | seeds | validation loss of ddp | dgc 99.9 % | auto | auto - ddp "
        "| in SE | test accuracy of ddp, % | dgc 99.9 % | auto | ddp - auto, points | in SE | loss, accuracy |",
        "| --- |" + " --- |" * 15,
    ]
    for cell in cells:
        texts = [cell.task, f"{cell.steps:,}", ", ".join(cell.links), in_words(cell.schedule), str(len(cell.seeds))]
        verdicts = []
        for key, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
            for method in METHODS:
                values = [scale * value for value in cell.values(method, key)]
                texts.append(with_error(statistics.mean(values), error_of(values), form) if values else "-")
            difference = cell.difference(key)
            texts += told(difference, scale, form)
            verdicts.append("the same" if cell.schedule is None else difference.verdict)
        lines.append("| " + " | ".join([*texts, ", ".join(verdicts)]) + " |")
    return "\n".join(lines)


def variants_to_markdown(results: dict[str, Any], cells: list[Cell]) -> str:
    """Return the table of what else has been tried with auto's schedules; empty where nothing has."""
    lines = [
        "| task | steps | auto sends | variant | seeds | validation loss of ddp | above it | as auto does it | "
        "test accuracy of ddp, % | points below it | as auto does it |",
        "| --- |" + " --- |" * 10,
    ]
    for cell in cells:
        for variant in [name for name in VARIANTS if name not in METHODS]:
            key = {"task": cell.task, "steps": cell.steps, "schedule": cell.schedule, "method": variant}
            rows = {row["seed"]: row for row in results["rows"] if is_same(row, **key)}
            both = replace(cell, rows={**cell.rows, variant: rows})
            if not (rows and both.seeds):
                continue
            texts = [cell.task, f"{cell.steps:,}", in_words(cell.schedule), variant, str(len(both.seeds))]
            for name, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
                texts.append(f"{scale * statistics.mean(both.values('ddp', name)):{form}}")
                for each in (both.difference(name, variant), both.difference(name)):
                    texts.append(with_error(scale * each.mean, scale * each.error, "+" + form))
            lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def differences_to_markdown(cells: list[Cell]) -> str:
    """Return a table of the differences alone; empty where there are none."""
    lines = [
        "| task | steps | link | auto sends | seeds | loss, auto - ddp | in SE "
        "| test accuracy, ddp - auto, points | in SE |",
        "| --- |" + " --- |" * 8,
    ]
    for cell in cells:
        texts = [cell.task, f"{cell.steps:,}", ", ".join(cell.links), in_words(cell.schedule), str(len(cell.seeds))]
        for name, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
            texts += told(cell.difference(name), scale, form)
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def groups_to_markdown(results: dict[str, Any], cells: list[Cell]) -> str:
    """Return the table of the comparison of `NUM_SEEDS` seeds, repeated with others; empty where there are too few."""
    lines = [
        f"| task | steps | link | beside ddp | groups of {NUM_SEEDS} seeds | loss within or better "
        "| test accuracy within or better |",
        "| --- |" + " --- |" * 6,
    ]
    for cell in cells:
        if cell.schedule is None:
            continue
        for method, both in (("auto", cell), (CONTROL, beside_perturbed(results, cell))):
            seeds = [seed for seed in both.seeds if seed in both.rows[method]]
            groups = [
                both.of_seeds(seeds[first : first + NUM_SEEDS])
                for first in range(0, len(seeds) - NUM_SEEDS + 1, NUM_SEEDS)
            ]
            if len(groups) >= LEAST_GROUPS:
                counts = [
                    str(sum(not is_beyond_ddp(group, key, method) for group in groups))
                    for key in ("val_loss", "test_accuracy")
                ]
                links = "-" if method == CONTROL else ", ".join(cell.links)
                texts = [cell.task, f"{cell.steps:,}", links, method, str(len(groups)), *counts]
                lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(dict.fromkeys(lines)) if len(lines) > 2 else ""


def control_to_markdown(results: dict[str, Any], cells: list[Cell]) -> str:
    """Return the table of what a change of a millionth makes of ddp; empty where that has not been trained."""
    worse = {"val_loss": 0, "test_accuracy": 0}
    lines = [
        "| task | steps | seeds | validation loss of ddp | perturbed - ddp | in SE | test accuracy of ddp, % "
        "| ddp - perturbed, points | in SE |",
        "| --- |" + " --- |" * 8,
    ]
    for task, num_steps in dict.fromkeys((cell.task, cell.steps) for cell in cells):
        cell = next(each for each in cells if (each.task, each.steps) == (task, num_steps))
        both = beside_perturbed(results, cell)
        if not (both.rows[CONTROL] and both.seeds):
            continue
        texts = [task, f"{num_steps:,}", str(len(both.seeds))]
        for name, scale, form in (("val_loss", 1.0, ".4f"), ("test_accuracy", 100.0, ".2f")):
            values, each = [scale * value for value in both.values("ddp", name)], both.difference(name, CONTROL)
            worse[name] += each.in_errors > 1.0
            texts.append(with_error(statistics.mean(values), error_of(values), form))
            texts += told(each, scale, form)
        lines.append("| " + " | ".join(texts) + " |")
    if len(lines) == 2:
        return ""
    return "\n".join(lines) + (
        f"\n\nSo ddp is worse than itself, by more than one standard error, in {worse['val_loss']} of these "
        f"{len(lines) - 2} rows in the loss, in {worse['test_accuracy']} in the accuracy."
    )


def told(difference: Difference, scale: float, form: str) -> list[str]:
    """Return a difference with its standard error, and how many of these it is; a dash for one seed."""
    in_errors = "-" if math.isnan(difference.error) else f"{difference.in_errors:+.1f}"
    return [with_error(scale * difference.mean, scale * difference.error, "+" + form), in_errors]


def with_error(mean: float, error: float, form: str) -> str:
    """Return "mean ± error", or the mean of one seed."""
    return f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form.lstrip('+')}}")


def fewer_seeds_of(cells: list[Cell]) -> str:
    """Return where dgc 99.9 % has been trained with fewer seeds than what the row compares."""
    told: dict[str, None] = {}
    for cell in cells:
        num_seeds = len(cell.values("dgc 99.9 %", "val_loss"))
        if 0 < num_seeds < len(cell.seeds):
            told[f"{cell.task}, {cell.steps:,} steps: dgc 99.9 % has {num_seeds} seeds. "] = None
    return "".join(told)


def summary_of(cells: list[Cell]) -> str:
    """Return in how many rows auto reaches the goal, and by how much it misses it in the others."""
    sparse = [cell for cell in cells if cell.schedule is not None and len(cell.seeds) > 1]
    parts = [f"In {sum(cell.schedule is None for cell in cells)} rows auto stays dense, in {len(sparse)} it does not."]
    for key, name in (("val_loss", "Validation loss"), ("test_accuracy", "Test accuracy")):
        found: dict[str, list[str]] = {"within": [], "better": [], "worse": []}
        for cell in sparse:
            difference, where = cell.difference(key), f"{cell.task} {cell.steps:,} ({', '.join(cell.links)})"
            found[difference.verdict].append(f"{where} by {abs(difference.in_errors):.1f} SE")
        worse = f": {'; '.join(found['worse'])}" if found["worse"] else ""
        within, better = len(found["within"]), len(found["better"])
        parts.append(
            f"{name} of these {len(sparse)}: within one standard error (SE) of ddp's in {within}, better in {better}, "
            f"worse in {len(found['worse'])}{worse}."
        )
    beyond = {key: sum(is_beyond_ddp(cell, key) for cell in sparse) for key in ("val_loss", "test_accuracy")}
    parts.append(
        "A row with more seeds has a smaller error. By more than the standard error that ddp's own mean has over "
        f"{NUM_SEEDS} seeds (its standard deviation / √{NUM_SEEDS}), auto is worse in {beyond['val_loss']} rows in the "
        f"loss, in {beyond['test_accuracy']} in the accuracy."
    )
    return " ".join(parts)


def wall_clock_to_markdown(records: list[Row]) -> str:
    """Return the table of seconds per run."""
    lines = [
        "| task | link | steps | auto sends | ddp, s | dgc 99.9 %, s | auto, s | ddp / auto | by round |",
        "| --- |" + " --- |" * 8,
    ]
    for record in records:
        for num_steps in STEPS:
            seconds = [seconds_of_run(record, method, num_steps) for method in METHODS]
            texts = ["-" if each is None else f"{each:,.1f}" for each in seconds]
            ratio = f"{seconds[0] / seconds[2]:.2f}" if seconds[0] and seconds[2] else "-"
            ratios = ratios_of(record, num_steps)
            by_round = with_error(statistics.mean(ratios), error_of(ratios), ".2f") if len(ratios) > 1 else "-"
            chosen = in_words(as_plain(planned(record, num_steps)[0]))
            texts += [ratio, by_round]
            lines.append(f"| {record['task']} | {record['link']} | {num_steps:,} | {chosen} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", slower_in_words(records)])


def slower_in_words(records: list[Row]) -> str:
    """Return where auto takes clearly longer than ddp."""
    found = {}
    for record in records:
        for num_steps in STEPS:
            ratios = ratios_of(record, num_steps)
            name = f"{record['task']} {num_steps:,} ({record['link']})"
            found[name] = 1 - statistics.mean(ratios) if len(ratios) > 1 else 0.0, error_of(ratios)
    slower = [f"{name} by {100 * mean:.0f} %" for name, (mean, error) in found.items() if mean > CLEARLY * error]
    return (
        "By round: the mean of the ratios in each round, ± its standard error; - where there was one round. auto takes "
        f"longer than ddp by more than {CLEARLY:g} standard errors in {len(slower)} of {len(found)} rows"
        f"{': ' if slower else ''}{'; '.join(slower)}."
    )


def phases_to_markdown(records: list[Row]) -> str:
    """Return the table of seconds per step that runs are computed from."""
    lines = [
        "| task | link | computation, ms | ddp | auto, dense | auto, to decide | sparse, by density |",
        "| --- |" + " --- |" * 6,
    ]
    for record in records:
        ms = {name: 1e3 * step_s_of(record, name) for name in record["timed"]}
        sparse = sorted((float(name), each) for name, each in ms.items() if name not in (DDP_KEY, DENSE_KEY))
        shown = ", ".join(f"{100 * density:.4g} %: {each:.1f}" for density, each in sparse)
        lines.append(
            f"| {record['task']} | {record['link']} | {1e3 * record['measured']['step_s']:.1f} | {ms[DDP_KEY]:.1f} | "
            f"{ms[DENSE_KEY]:.1f} | {1e3 * record['decide_s']:.0f} | {shown} |"
        )
    lines += ["", noise_in_words(records)]
    return "\n".join(lines)


def noise_in_words(records: list[Row]) -> str:
    """Return by how much one strategy differs from itself, from round to round."""
    rounds = [[statistics.median(each) for each in record["timed"][DDP_KEY]] for record in records]
    spreads = sorted(100 * (max(each) / min(each) - 1) for each in rounds if len(each) > 1)
    if not spreads:
        return ""
    return (
        f"Medians over {len(max(rounds, key=len))} rounds in turn, where a step is short. Between rounds ddp's own "
        f"median differs by {statistics.median(spreads):.0f} % (median over these rows; at most {spreads[-1]:.0f} %)."
    )


def check_dense(rows: list[Row]) -> str:
    """Return in words how many runs of auto that stayed dense end with the weights of ddp, and which do not."""
    dense = {(row["task"], row["steps"], row["seed"]): row for row in rows if row["method"] == "ddp"}
    checked = [(row, dense[row["task"], row["steps"], row["seed"]]) for row in rows if is_dense_auto(row)]
    others = [
        f"{own['task']}, {own['steps']:,} steps, seed {own['seed']} (validation loss {own['val_loss']:.4f} and "
        f"{ddp['val_loss']:.4f})"
        for own, ddp in checked
        if own["weights"] != ddp["weights"]
    ]
    exceptions = f"; not in {'; '.join(others)}" if others else ""
    return f"in {len(checked) - len(others)} of {len(checked)} runs that checked it{exceptions}"


def is_dense_auto(row: Row) -> bool:
    """Return whether a run is one of auto that stayed dense."""
    return is_same(row, method="auto", schedule=None)
