"""`Trainer(strategy="lowbw")`: the fastest method among those without a measured loss of accuracy.

Methods, ordered by how much they change the training:

    DDP           nothing
    float16       rounds values, and sends rounding errors later
    int8          as float16, coarser
    DGC           delays most elements of the gradient, as `engine.auto` chooses
    local SGD     trains replicas that differ between averages; only where it is allowed

The choice is the first whose predicted time to the end of the run exceeds the shortest by at most a fraction (the
budget). Methods whose cost in accuracy has not been measured for the given training are excluded; the sentence names
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_lowbw.engine.auto import Measured, Run, in_time, schedule, seconds_left
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import LocalSGD, NarrowGradients
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.topology import TopologyChoice

NARROW = ("float16", "int8")  # each a name of `engine.presets`, too
# benchmarks/results/local_sgd.md: with averages after 8 steps a language model lost 1.9 points of accuracy.
LOCAL_STEPS = 8


@dataclass(frozen=True)
class Candidate:
    """A method, and its predicted time.

    Attributes:
        name: as it is called in the sentence.
        seconds: to the end of the run.
        found: the method; its schedule alone for DGC, whose payload is the user's; None for DDP.
        words: what it does.
        call: the call that selects it, flat; of DDP none.
    """

    name: str
    seconds: float
    found: Method | EveryStep | None
    words: str
    call: str


def pick(
    measured: Measured,
    run: Run,
    budget: float,
    *,
    allow_local: bool = False,
    left_out: Sequence[str] = (),
    topology: TopologyChoice = "flat",
) -> tuple[Method | EveryStep | None, str]:
    """Return the method, of DGC its schedule alone, or None for DDP; and one sentence that says why.

    Args:
        measured: what steps take, with `narrow_s` and `average_s`.
        run: what is known of the run.
        budget: the share by which the time of the method may exceed the least, and which the exchange of DGC may take
            of a step; in (0, 1].
        allow_local: whether local SGD may be taken.
        topology: for the sentence.
        left_out: why other methods may not, each as "dgc: the reason" or "local_sgd: the reason".

    Example:
        >>> from lightning_lowbw.where.link import Link
        >>> slow = Measured(0.1, 0.9, {0.256: 0.3}, Link(1e-4, 125e6), {"float16": 0.3, "int8": 0.2})
        >>> method, reason = pick(slow, Run(num_done=6, num_steps=50), budget=0.05)
        >>> method.what
        Narrow(value_dtype='int8')
        >>> print(reason.partition(": ")[2])
        int8, 13.2 s to the end; ddp would take 39.6 s, float16 17.6 s; not dgc, because each element must be sent \
30 times on average, and 44 steps are left. To write it down: strategy="int8"
    """
    refused = dict(each.split(": ", 1) for each in left_out)
    candidates = [_ddp(measured, run), *(_narrow(dtype, measured, run) for dtype in NARROW)]
    if "dgc" not in refused:
        when, words = schedule(measured, run, budget)
        if when is None:
            refused["dgc"] = words.partition("; ")[2]
        else:
            candidates.append(_dgc(when, words, measured, run))
    if allow_local and "local_sgd" not in refused:
        candidate = _local(measured, run)
        if candidate is None:
            refused["local_sgd"] = f"{run.num_left} steps are left, and its averages come after {LOCAL_STEPS}"
        else:
            candidates.append(candidate)
    least = min(candidate.seconds for candidate in candidates)
    chosen = next(candidate for candidate in candidates if candidate.seconds <= (1.0 + budget) * least)
    others = [f"{each.name} {in_time(each.seconds)}" for each in candidates if each is not chosen]
    sentence = f"{measured}: {chosen.name}, {in_time(chosen.seconds)} to the end"
    sentence += "" if run.num_steps is not None else f" of {run.num_done + run.num_left} steps, which are assumed"
    sentence += f" ({chosen.words})" if chosen.words else ""
    sentence += f", which is within {100 * budget:.4g} % of the least" if chosen.seconds > least else ""
    sentence += f"; {others[0].replace(' ', ' would take ', 1)}" if others else ""
    sentence += "".join(f", {each}" for each in others[1:])
    sentence += "".join(f"; not {name}, because {reason}" for name, reason in refused.items())
    return chosen.found, f"{sentence}. To write it down: {_code(chosen, topology)}"


def code_of_ddp(topology: TopologyChoice) -> str:
    """Return the code that selects dense steps, as it can be typed."""
    return 'strategy="ddp"' if topology == "flat" else f"lowbw.HierarchicalStrategy({_argument(topology)})"


def _code(chosen: Candidate, topology: TopologyChoice) -> str:
    """Return the code that selects a candidate, as it can be typed: a name, if one says all, or a class."""
    if chosen.found is None:
        return code_of_ddp(topology)
    if chosen.name in NARROW and isinstance(topology, str):
        return f'strategy="{chosen.name}{"_hierarchical" if topology == "auto" else ""}"'
    return chosen.call if topology == "flat" else f"{chosen.call[:-1]}, {_argument(topology)})"


def _argument(topology: TopologyChoice) -> str:
    return f"topology={getattr(topology, 'nodes', topology)!r}"


def _ddp(measured: Measured, run: Run) -> Candidate:
    return Candidate("ddp", run.num_left * measured.dense_s, None, "", "")


def _narrow(value_dtype: str, measured: Measured, run: Run) -> Candidate:
    seconds = run.num_left * (measured.step_s + measured.narrow_s[value_dtype])
    method = NarrowGradients(value_dtype, rampup_begin_step=run.num_done)
    return Candidate(value_dtype, seconds, method, "", f'lowbw.Strategy(lowbw.NarrowGradients("{value_dtype}"))')


def _dgc(when: EveryStep, words: str, measured: Measured, run: Run) -> Candidate:
    sparsity = ", ".join(f"{each:.4g}" for each in when.stairs)
    call = f"lowbw.DGCStrategy(rampup_begin_step={when.rampup_begin_step}, rampup_step={when.rampup_step}, "
    call += f"sparsity=[{sparsity}], keep_momentum=True)"
    return Candidate("dgc", seconds_left(when, measured, run), when, words, call)


def _local(measured: Measured, run: Run) -> Candidate | None:
    k, step_s, average_s = LOCAL_STEPS, measured.step_s, measured.average_s
    delay = min(k - 1, math.ceil(average_s / step_s))
    if run.num_left < k + delay:
        return None
    seconds = run.num_left * (step_s + max(0.0, average_s - delay * step_s) / k)
    method = LocalSGD(k, run.num_done, delay_steps=delay)
    words = f"weights are averaged after every {k} steps, each average hidden behind {delay}"
    call = f"lowbw.LocalSGDStrategy(k_steps={k}, begin_step={run.num_done}, delay_steps={delay})"
    return Candidate("local_sgd", seconds, method, words, call)
