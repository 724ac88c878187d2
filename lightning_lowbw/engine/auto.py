"""`sparsity="auto"`: chooses the density and the schedule of deep gradient compression from measured step times.

Accuracy comes first, then time. Top-k costs accuracy because it delays elements. The cost decreases with the number of
times that an element is sent in the run, density times steps: 10 times cost 0.4 % of the loss, 0.8 times 2.5 %
(docs/methods/dgc_measured.md). So the choice among a few densities is

    the largest whose exchange fits into a fraction of the step (the budget), and
    none at which an element is sent less than `Run.times_sent` times in the rest of the run;

if the two differ, the denser one. If no sparse step is much faster than a dense one, all steps are dense, as in DDP.
All steps are also dense, and the link is not measured, if the time that could be saved is less than the time of the
measurement, or if the run is too short for any of these densities.
A warm-up comes first: dense steps, then stairs. Its length is a fraction of the steps of the run, not of its time: on a
slow link that would be only a dozen dense steps, and sparse steps so early cost more accuracy than any density later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.link import Link

DENSITIES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)
LEAST_TIMES_SENT = 30
LEAST_TIMES_SENT_ADAM = 60  # with 48, text from scratch lost 0.8 % in 800 steps, with 97 nothing
# Of the wait of a dense step: less is not worth it, and the prediction is not more precise.
LEAST_SAVED = 0.2
MEASURING_S = 1.0  # for the link and the work
ASSUMED_STEPS = 10_000  # where the length of the run is not known
STAIR = 2  # from one stair to the next, in the densities above: a factor of 4
MOST_STAIR = 0.3  # the paper's first is 0.25
MOST_STAIR_ADAM = 0.2  # with 0.256, text from scratch lost 0.6 % in 5,000 steps, with dense steps in its place nothing
DENSE_SHARE, STAIRS_SHARE = 0.05, 0.20  # of the steps of the run
MOST_DENSE_EPOCHS, MOST_STAIR_EPOCHS = 2, 4  # PaddlePaddle Fleet's, and the paper's


@dataclass(frozen=True)
class Measured:
    """The times of steps, on this rank or on the slowest; for a plan they must be the same on all ranks.

    Attributes:
        step_s: seconds of an optimizer step without communication.
        dense_s: seconds of a dense one.
        sparse_s: seconds that the exchange of a sparse step adds to the first, by density.
        link: by which the latter was predicted.
        narrow_s: as `sparse_s`, of gradients in few bits per value, by `value_dtype`; empty if not needed.
        average_s: seconds of an average of the weights.
    """

    step_s: float
    dense_s: float
    sparse_s: Mapping[float, float]
    link: Link
    narrow_s: Mapping[str, float] = field(default_factory=dict)
    average_s: float = 0.0

    def __str__(self) -> str:
        """Return the measured numbers on which the choice is based."""
        return (
            f"{_timed(self.step_s, self.dense_s)}, the link carries {self.link.bandwidth_bytes_per_s * 8e-6:,.0f} "
            f"Mb/s, latency {in_time(self.link.latency_s)}"
        )


@dataclass(frozen=True)
class Run:
    """What is known of the run.

    Attributes:
        num_done: optimizer steps taken.
        num_steps: of the whole run; None where it is not known.
        steps_per_epoch: None where it is not known.
        is_pretrained: whether it starts from trained weights, which need no warm-up.
        is_adam: whether the optimizer is Adam or AdamW; see `times_sent` and `most_stair`.
    """

    num_done: int
    num_steps: int | None = None
    steps_per_epoch: int | None = None
    is_pretrained: bool = False
    is_adam: bool = False

    @property
    def num_left(self) -> int:
        """Steps to come, at least 1."""
        return max(1, (ASSUMED_STEPS if self.num_steps is None else self.num_steps) - self.num_done)

    @property
    def times_sent(self) -> int:
        """How many times, on average, an element must be sent at least in the remaining steps."""
        return LEAST_TIMES_SENT_ADAM if self.is_adam else LEAST_TIMES_SENT

    @property
    def most_stair(self) -> float:
        """The highest density of a stair of the warm-up; dense steps take the place of higher ones."""
        return MOST_STAIR_ADAM if self.is_adam else MOST_STAIR


def why_dense(step_s: float, dense_s: float, run: Run, budget: float, *, or_else: bool = False) -> str | None:
    """Return why all steps are dense for any link, which is then not measured; None if the link matters.

    Args:
        step_s: seconds of an optimizer step without communication.
        dense_s: of a dense one.
        run: what is known of the run.
        budget: as of `plan`.
        or_else: whether another method than sparse steps may replace dense ones: then the link matters even if the run
            is too short for sparse steps.

    Example:
        >>> why_dense(0.01, 0.03, Run(num_done=7, num_steps=200), budget=0.05)
        'a step takes 10 ms without communication and 30 ms with all gradients: whole gradients are sent, as with DDP; \
193 steps are left, which wait 3.86 s for gradients in all; the link is measured, for 1 s, only from 5 s on'
    """
    waited_s, why = run.num_left * (dense_s - step_s), _why_it_fits(step_s, dense_s, budget)
    if why is None and not or_else and not _often_enough(run):
        why = _times_sent(run, _length(run))
    if why is None and LEAST_SAVED * waited_s < MEASURING_S:
        why = f"{_length(run)}, which wait {in_time(waited_s)} for gradients in all; the link is measured, for "
        why += f"{in_time(MEASURING_S)}, only from {in_time(MEASURING_S / LEAST_SAVED)} on"
    return None if why is None else f"{_timed(step_s, dense_s)}: {_all(why)}"


def plan(measured: Measured, run: Run, budget: float) -> tuple[EveryStep | None, str]:
    """Return the schedule, or None if all steps are to be dense; and one sentence with the reason.

    Args:
        measured: the times of steps.
        run: what is known of the run.
        budget: the fraction of a step that its exchange may take, in (0, 1].

    Example:
        >>> slow = Measured(0.1, 0.9, {density: 2 * density for density in DENSITIES}, Link(1e-4, 125e6))
        >>> when, reason = plan(slow, Run(num_done=6, num_steps=20_000, is_pretrained=True), budget=0.05)
        >>> when.rampup_begin_step, when.sparsity
        (6, (0.998,))
        >>> print(reason)
        a step takes 100 ms without communication and 900 ms with all gradients, the link carries 1,000 Mb/s, \
latency 0.1 ms: 0.2 % of each gradient is sent from step 6 on; more would take over 5 % of a step
    """
    when, words = schedule(measured, run, budget)
    return when, f"{measured}: {words}"


def schedule(measured: Measured, run: Run, budget: float) -> tuple[EveryStep | None, str]:
    """Return what `plan` returns, but the reason without the measured numbers."""
    density, why = _density(measured, run, _length(run), budget)
    if density is None:
        return None, _all(why)
    stairs, num_dense, per_stair = _warm_up(measured, run, density)
    when = EveryStep(run.num_done + num_dense, max(1, per_stair) * len(stairs), tuple(1.0 - each for each in stairs))
    begin, last = when.rampup_begin_step, f"{100 * density:.4g} %"
    sent = f"{last} of each gradient is sent from step {begin} on"
    if len(stairs) > 1:
        each = "each " if len(stairs) > 2 else ""
        before = ", ".join(f"{100 * stair:.4g} %" for stair in stairs[:-1])
        sent = f"whole gradients until step {begin}, then {per_stair} steps {each}at {before}, then {last} to the end"
    return when, f"{sent}; {why}"


def plan_anew(measured: Measured, run: Run, budget: float, begin_step: int) -> tuple[EveryStep, str]:
    """Return what `plan` returns, for a run whose steps are sparse already: no warm-up, and no dense steps.

    In dense steps the residuals would never be sent, and velocities differ between ranks.

    Args:
        measured: what steps take.
        run: what is known of the run.
        budget: as of `plan`.
        begin_step: the first sparse step.
    """
    # Elements have been sent since then, too, so the smaller number of steps left is no reason for a higher density.
    sparse = replace(run, num_done=begin_step)
    density, why = _density(measured, sparse, f"{sparse.num_left} steps are sparse", budget)
    density = DENSITIES[-1] if density is None else density
    words = f"{100 * density:.4g} % of each gradient is sent from step {run.num_done} on; {why}"
    return EveryStep(begin_step, 1, (1.0 - density,)), f"{measured}: {words}"


def seconds_left(when: EveryStep, measured: Measured, run: Run) -> float:
    """Return the time of the remaining steps with a schedule of `schedule`, in seconds."""
    begin, stairs, stop = when.rampup_begin_step, when.stairs, run.num_done + run.num_left
    per_stair = when.rampup_step // len(stairs)
    bounds = [min(begin + number * per_stair, stop) for number in range(len(stairs))] + [stop]
    sparse_s = {round(1.0 - density, 9): seconds for density, seconds in measured.sparse_s.items()}
    seconds = (min(begin, stop) - run.num_done) * measured.dense_s
    for stair, first, last in zip(stairs, bounds, bounds[1:], strict=False):
        seconds += (last - first) * (measured.step_s + sparse_s[round(stair, 9)])
    return seconds


def _density(measured: Measured, run: Run, length: str, budget: float) -> tuple[float | None, str]:
    """Return the density after the warm-up, None for dense steps; and the reason."""
    step_s = measured.step_s
    if fits := _why_it_fits(step_s, measured.dense_s, budget):
        return None, fits
    often, enough = _times_sent(run, length), _often_enough(run)
    if not enough:
        return None, often
    most_s = _most_seconds(measured)
    fitting = [density for density in enough if measured.sparse_s[density] <= min(budget * step_s, most_s)]
    density = max(fitting) if fitting else min(enough, key=measured.sparse_s.__getitem__)
    if measured.sparse_s[density] > most_s:
        return None, f"{often}: that would be {100 * density:.4g} %, and hardly faster"
    return density, f"more would take over {_share(budget)}" if fitting else often


def _often_enough(run: Run) -> list[float]:
    """Return the densities at which an element is sent often enough in the remaining steps."""
    return [density for density in DENSITIES if density * run.num_left >= run.times_sent]


def _times_sent(run: Run, length: str) -> str:
    return f"each element must be sent {run.times_sent} times on average, and {length}"


def _length(run: Run) -> str:
    if run.num_steps is None:
        return f"{ASSUMED_STEPS} steps are assumed"
    return "1 step is left" if run.num_left == 1 else f"{run.num_left} steps are left"


def _timed(step_s: float, dense_s: float) -> str:
    return f"a step takes {in_time(step_s)} without communication and {in_time(dense_s)} with all gradients"


def _all(why: str) -> str:
    return f"whole gradients are sent, as with DDP; {why}"


def _share(budget: float) -> str:
    return f"{100 * budget:.4g} % of a step"


def _why_it_fits(step_s: float, dense_s: float, budget: float) -> str | None:
    return f"a dense exchange adds less than {_share(budget)}" if dense_s - step_s <= budget * step_s else None


def _most_seconds(measured: Measured) -> float:
    """Return the longest exchange of a sparse step that is still better than a dense step."""
    return (1.0 - LEAST_SAVED) * (measured.dense_s - measured.step_s)


def _warm_up(measured: Measured, run: Run, density: float) -> tuple[list[float], int, int]:
    """Return the stairs of densities (the last one stays), and the number of dense steps and of steps per stair."""
    if run.is_pretrained:
        return [density], 0, 0
    epoch = run.steps_per_epoch or run.num_left
    above, most_s = DENSITIES[DENSITIES.index(density) + STAIR :: STAIR][::-1], _most_seconds(measured)
    # Dense steps take the place of stairs that cost accuracy, or would not be faster; these stairs are the first ones.
    before = [stair for stair in above if stair <= run.most_stair and measured.sparse_s[stair] <= most_s]
    num_steps = min(STAIRS_SHARE * run.num_left, MOST_STAIR_EPOCHS * epoch)
    per_stair = round(num_steps / len(above)) if above else 0
    num_dense = min(round(DENSE_SHARE * run.num_left), MOST_DENSE_EPOCHS * epoch)
    num_dense = max(0, num_dense + (len(above) - len(before)) * per_stair - run.num_done)
    return ([*before, density], num_dense, per_stair) if before and per_stair else ([density], num_dense, 0)


def in_time(seconds: float) -> str:
    """Return a number of seconds in its unit: "110 ms", "1.5 s", "25 min", "3.5 h"."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (length if unit == "s" else 2 * length):
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"


def sparse_seconds(exchange_s: Sequence[float], work_s: Sequence[float]) -> dict[float, float]:
    """Return the seconds that the exchange of a sparse step adds, by density.

    Args:
        exchange_s: on the link, for each of `DENSITIES`.
        work_s: to select, encode and decode. At the lowest density this is only the pass over the gradient, which takes
            no longer than the optimizer's step that it replaces (benchmarks/results/ops_cpu.md): only the excess is
            added.

    A higher density never takes less time: if the measurement says so, another process has disturbed it.
    """
    work_s = [max(0.0, seconds - work_s[0]) for seconds in work_s]
    seconds = [exchange + work for exchange, work in zip(exchange_s, work_s, strict=True)]
    return dict(zip(DENSITIES, accumulate(seconds, max), strict=True))
