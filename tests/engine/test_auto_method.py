"""What `strategy="lowbw"` takes, and the sentence that says why.

On a fast link, on one node and on one rank nothing is measured to choose by: see `tests/strategies/test_auto.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy

import lightning_lowbw
from lightning_lowbw import EveryStep, LocalSGD, Method, NarrowGradients, Topology, Whole
from lightning_lowbw.engine.auto import DENSITIES, Measured, Run, in_time, schedule, seconds_left
from lightning_lowbw.engine.auto_method import LOCAL_STEPS, NARROW, pick
from lightning_lowbw.where.link import Link

# As in test_auto.py, a model of 25M parameters on two nodes at 1 Gb/s.
SLOW = Measured(
    0.11,
    0.93,
    {density: 0.002 + 0.35 * density for density in DENSITIES},
    Link(1e-4, 125e6),
    narrow_s={"float16": 0.55, "int8": 0.41},
    average_s=0.8,
)
SLOWER = Measured(
    0.11,
    8.3,
    {density: 0.02 + 3.5 * density for density in DENSITIES},
    Link(1e-4, 12.5e6),
    narrow_s={"float16": 4.9, "int8": 3.1},
    average_s=8.0,
)
ALL_AS_LONG = replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.83), narrow_s={"float16": 0.83, "int8": 0.84})
FAR = replace(  # the latency is all there is
    SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.2), link=Link(0.05, 125e6), narrow_s={"float16": 0.7, "int8": 0.6}
)
LONG = Run(num_done=7, num_steps=100_007, steps_per_epoch=5000)
SHORT = Run(num_done=7, num_steps=50)
FACTS = (
    "a step takes 110 ms without communication and 930 ms with all gradients, the link carries 1,000 Mb/s, latency "
    "0.1 ms: "
)
SITUATIONS: dict[str, tuple[Measured, Run, dict[str, object], Method | EveryStep | None, str]] = {
    "no method is faster": (
        ALL_AS_LONG,
        LONG,
        {},
        None,
        FACTS
        + "ddp, 25.8 h to the end; float16 would take 26.1 h, int8 26.4 h; not dgc, because each element must be sent "
        "30 times on average, and 100000 steps are left: that would be 0.1 %, and hardly faster. To write it down: "
        'strategy="ddp"',
    ),
    "slow link": (
        SLOWER,
        Run(num_done=7, num_steps=20_007, steps_per_epoch=1000),
        {},
        EveryStep(1000, 5332, (1 - 0.128, 1 - 0.032, 1 - 0.008, 1 - 0.002)),
        "a step takes 110 ms without communication and 8.3 s with all gradients, the link carries 100 Mb/s, latency "
        "0.1 ms: dgc, 3.22 h to the end (whole gradients until step 1000, then 1333 steps each at 12.8 %, 3.2 %, "
        "0.8 %, then 0.2 % to the end; each element must be sent 30 times on average, and 20000 steps are left); ddp "
        "would take 46.1 h, float16 27.8 h, int8 17.8 h. To write it down: lowbw.DGCStrategy(rampup_begin_step=1000, "
        "rampup_step=5332, sparsity=[0.872, 0.968, 0.992, 0.998], keep_momentum=True)",
    ),
    "long run": (
        SLOW,
        LONG,
        {},
        EveryStep(5000, 30000, (1 - 0.128, 1 - 0.032, 1 - 0.008)),
        FACTS + "dgc, 4.46 h to the end (whole gradients until step 5000, then 10000 steps each at 12.8 %, 3.2 %, then "
        "0.8 % to the end; more would take over 5 % of a step); ddp would take 25.8 h, float16 18.3 h, int8 14.4 h. To "
        "write it down: lowbw.DGCStrategy(rampup_begin_step=5000, rampup_step=30000, sparsity=[0.872, 0.968, 0.992], "
        "keep_momentum=True)",
    ),
    "short run": (
        SLOW,
        SHORT,
        {},
        NarrowGradients("int8", rampup_begin_step=7),
        FACTS + "int8, 22.4 s to the end; ddp would take 40 s, float16 28.4 s; not dgc, because each element must be "
        'sent 30 times on average, and 43 steps are left. To write it down: strategy="int8"',
    ),
    "fine-tuning": (
        SLOW,
        Run(num_done=1007, num_steps=2007, is_pretrained=True),
        {},
        EveryStep(1007, 1, (1 - 0.032,)),
        FACTS + "dgc, 2.05 min to the end (3.2 % of each gradient is sent from step 1007 on; each element must be "
        "sent 30 times on average, and 1000 steps are left); ddp would take 15.5 min, float16 11 min, int8 8.67 min. "
        "To write it down: "
        "lowbw.DGCStrategy(rampup_begin_step=1007, rampup_step=1, sparsity=[0.968], keep_momentum=True)",
    ),
    "an optimizer that is not measured": (
        SLOW,
        LONG,
        {"left_out": ["dgc: its accuracy is measured with SGD, Adam and AdamW, not with RMSprop"]},
        NarrowGradients("int8", rampup_begin_step=7),
        FACTS
        + "int8, 14.4 h to the end; ddp would take 25.8 h, float16 18.3 h; not dgc, because its accuracy is measured "
        'with SGD, Adam and AdamW, not with RMSprop. To write it down: strategy="int8"',
    ),
    "high latency, local steps allowed": (
        FAR,
        LONG,
        {"allow_local": True},
        LocalSGD(8, 7, delay_steps=7),
        "a step takes 110 ms without communication and 930 ms with all gradients, the link carries 1,000 Mb/s, latency "
        "50 ms: local_sgd, 3.16 h to the end (weights are averaged after every 8 steps, each average hidden behind 7); "
        "ddp would take 25.8 h, float16 22.5 h, int8 19.7 h, dgc 9.47 h. To write it down: "
        "lowbw.LocalSGDStrategy(k_steps=8, begin_step=7, delay_steps=7)",
    ),
    "a length that is not known": (
        replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.5)),
        Run(num_done=7),
        {},
        NarrowGradients("int8", rampup_begin_step=7),
        FACTS
        + "int8, 86.6 min to the end of 10000 steps, which are assumed; ddp would take 2.58 h, float16 110 min, dgc "
        '104 min. To write it down: strategy="int8"',
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation: str) -> None:
    measured, run, options, expected, sentence = SITUATIONS[situation]
    found, reason = pick(measured, run, 0.05, **options)  # type: ignore[arg-type]
    assert found == expected
    assert reason == sentence
    assert ("of 10000 steps, which are assumed" in reason) == (run.num_steps is None)


HALF = replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.8), narrow_s={"float16": 0.4, "int8": 0.4})
CANDIDATES: dict[str, tuple[Measured, Run, bool]] = {
    "ddp": (ALL_AS_LONG, LONG, False),
    "float16": (HALF, SHORT, False),
    "int8": (SLOW, SHORT, False),
    "dgc": (SLOW, LONG, False),
    "local_sgd": (FAR, LONG, True),
}


@pytest.mark.parametrize("topology", ["flat", "auto", 2, Topology(((0, 1), (2, 3)))])
@pytest.mark.parametrize("name", CANDIDATES)
def test_what_is_to_be_written_down_can_be_typed(name: str, topology: Any) -> None:
    assert [*CANDIDATES] == ["ddp", *NARROW, "dgc", "local_sgd"]
    measured, run, allow_local = CANDIDATES[name]
    found, reason = pick(measured, run, 0.05, allow_local=allow_local, topology=topology)
    assert f": {name}, " in reason
    given: dict[str, Any] = {}
    code = reason.partition("To write it down: ")[2]
    exec(code if code.startswith("strategy=") else f"strategy={code}", {"lowbw": lightning_lowbw}, given)
    trainer = pl.Trainer(**given, accelerator="cpu", devices=4, logger=False, barebones=True)
    if code == 'strategy="ddp"':
        assert type(trainer.strategy) is DDPStrategy
        return
    method = trainer.strategy.method  # type: ignore[attr-defined]
    assert method.where.topology == topology
    if found is None:
        assert (method.when, method.what) == (EveryStep(), Whole())
    elif isinstance(found, EveryStep):
        assert replace(method.when, sparsity=found.sparsity) == found
        assert method.when.stairs == pytest.approx(found.stairs)
    else:
        assert method.what == found.what
        assert name in NARROW or method.when == found.when


def test_no_local_steps_where_none_would_be_averaged() -> None:
    for num_left, is_taken in ((14, False), (15, True)):
        found, reason = pick(FAR, Run(num_done=7, num_steps=7 + num_left), 0.05, allow_local=True)
        assert (isinstance(found, Method) and found.averages_weights) == is_taken
        assert (
            f"not local_sgd, because {num_left} steps are left, and its averages come after 8" in reason
        ) != is_taken


def test_local_steps_only_where_they_are_allowed() -> None:
    assert pick(FAR, LONG, 0.05)[0] != pick(FAR, LONG, 0.05, allow_local=True)[0]
    refused = pick(FAR, LONG, 0.05, allow_local=True, left_out=["local_sgd: the reason"])
    assert refused[0] == pick(FAR, LONG, 0.05)[0]
    assert "not local_sgd, because the reason" in refused[1]


def test_what_takes_as_long_is_not_taken_for_it_changes_more() -> None:
    """Of those within the budget the first; one that is a little better than that is taken."""
    for seconds, expected in ((0.96, None), (0.94, "float16")):
        narrow_s = {"float16": seconds * SLOW.dense_s - SLOW.step_s, "int8": seconds * SLOW.dense_s - SLOW.step_s}
        found, _ = pick(replace(SLOW, narrow_s=narrow_s), SHORT, 0.05)
        assert found is expected or found == NarrowGradients(str(expected), rampup_begin_step=7)


@pytest.mark.parametrize("allow_local", [False, True])
def test_it_never_takes_longer_than_ddp(allow_local: bool) -> None:
    for step_s, exposed, sparse, narrow, steps in itertools.product(
        (0.01, 1.0), (0.001, 0.1, 10.0), (0.01, 1.0), (0.1, 2.0), (20, 1000, 100_000)
    ):
        exposed_s = exposed * step_s
        measured = Measured(
            step_s,
            step_s + exposed_s,
            {density: sparse * exposed_s * (0.5 + density) for density in DENSITIES},
            Link(1e-4, 1e8),
            dict.fromkeys(("float16", "int8"), narrow * exposed_s),
            exposed_s,
        )
        run = Run(num_done=7, num_steps=7 + steps)
        found, _ = pick(measured, run, 0.05, allow_local=allow_local)
        if isinstance(found, EveryStep):
            seconds = seconds_left(found, measured, run)
        elif found is None:
            continue
        elif found.averages_weights:
            assert allow_local
            assert found.when.k_steps == LOCAL_STEPS  # type: ignore[union-attr]
            continue
        else:
            seconds = steps * (step_s + narrow * exposed_s)
        assert seconds < steps * measured.dense_s


STEEP = replace(SLOW, sparse_s=SLOW.sparse_s | {density: 0.7 for density in DENSITIES if density >= 0.128})


@pytest.mark.parametrize("measured", [SLOW, STEEP], ids=["all stairs are sparse", "the first stair is dense"])
def test_the_time_that_is_left_is_that_of_the_schedule_step_by_step(measured: Measured) -> None:
    for run in (LONG, Run(num_done=7, num_steps=807, steps_per_epoch=400), Run(3, 1003, is_pretrained=True)):
        when, _ = schedule(measured, run, 0.05)
        assert when is not None
        by_density = {round(density, 9): seconds for density, seconds in measured.sparse_s.items()}
        densities = [when.density(step) for step in range(run.num_done, run.num_done + run.num_left)]
        seconds = [measured.dense_s if d == 1.0 else measured.step_s + by_density[round(d, 9)] for d in densities]
        assert seconds_left(when, measured, run) == pytest.approx(sum(seconds))


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.11, "110 ms"), (1.5, "1.5 s"), (90, "90 s"), (130, "2.17 min"), (7200, "2 h")]
)
def test_times_have_their_unit(seconds: float, shown: str) -> None:
    assert in_time(seconds) == shown
