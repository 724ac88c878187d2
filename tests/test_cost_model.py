"""What `sparsity="auto"` and `strategy="lowbw"` choose by given measurements, and what they measure."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

import lightning_lowbw
from lightning_lowbw import EveryStep, Method, QuantizedGradients, TopK, Topology, Where
from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.comm.link import Link
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.cost_model import (
    CANDIDATES,
    DENSE_SHARE,
    DENSITIES,
    EVERY_STEP,
    LEAST_TIMES_SENT,
    LEAST_TIMES_SENT_ADAM,
    LEAST_WAIT_S,
    STAIRS_SHARE,
    Cluster,
    Measured,
    Run,
    choose,
    cost_of,
    why_dense,
)
from lightning_lowbw.strategies import auto_choice
from lightning_lowbw.strategies.auto_choice import measure
from tests.ranks import on_ranks

ROOT = Path(__file__).resolve().parents[1]
GIVEN = Method(when=EveryStep(sparsity="auto"), what=TopK(exclude=("embedding.*",)))
OF_DGC, OF_LOWBW = ("ddp", "dgc"), ("ddp", "bfloat16", "int8", "dgc")
# A model of 25M parameters on two nodes at 1 Gb/s.
BY_DENSITY = {density: 0.002 + 0.35 * density for density in DENSITIES}
SLOW = Measured(0.11, 0.93, {**BY_DENSITY, "bfloat16": 0.55, "int8": 0.41}, Link(1e-4, 125e6))
NO_FASTER = replace(SLOW, exchange_s={**dict.fromkeys(DENSITIES, 0.83), "bfloat16": 0.83, "int8": 0.84})
LONG = Run(num_done=7, num_steps=100_007)
FACTS = "a step takes 110 ms without communication and 930 ms with all gradients, the link carries 1,000 Mb/s, "
FACTS += "latency 0.1 ms: "


def sparse(begin: int, length: int, *densities: float) -> Method:
    return replace(GIVEN, when=EveryStep(begin, length, [round(1.0 - density, 6) for density in densities]))


OFTEN = "each element must be sent 30 times on average, and"
SITUATIONS: dict[str, tuple[Measured, Run, tuple[str, ...], Method, str]] = {
    "long run": (SLOW, LONG, OF_DGC, sparse(5007, 30_000, 0.128, 0.032, 0.008),
        "dgc, 161 ms a step (more would take over 5 % of a step); ddp would take 930 ms. To write it down: "
        "strategy=lowbw.Strategy(lowbw.Method(when=lowbw.EveryStep(rampup_begin_step=5007, rampup_step=30000, "
        "sparsity=(0.872, 0.968, 0.992)), what=lowbw.TopK(exclude=('embedding.*',))))"),
    "short run": (SLOW, Run(7, 807), OF_DGC, sparse(47, 320, 0.256, 0.064),
        f"dgc, 188 ms a step ({OFTEN} 800 steps are left); ddp would take 930 ms"),
    "with Adam the stair of 26 % is dense": (SLOW, Run(7, 5007, is_adam=True), OF_DGC, sparse(757, 1000, 0.064, 0.016),
        "dgc, 241 ms a step (each element must be sent 60 times on average, and 5,000 steps are left)"),
    "with Adam there is no stair": (SLOW, Run(7, 1007, is_adam=True), OF_DGC, sparse(257, 1, 0.064), "dgc, 333 ms"),
    "too short a run": (SLOW, Run(7, 57), OF_DGC, Method(), f"ddp, 930 ms a step; not dgc, because {OFTEN} 50 steps"),
    "a stream": (SLOW, Run(7), OF_DGC, Method(), "not dgc, because the number of steps is not known: give Trainer(max"),
    "fine-tuning": (SLOW, Run(1007, 2007, True), OF_DGC, sparse(1007, 1, 0.032), "dgc, 123 ms a step"),
    "no faster": (NO_FASTER, LONG, OF_LOWBW, Method(), "ddp, 930 ms a step; bfloat16 would take 940 ms; int8 would"),
    "short run of lowbw": (SLOW, Run(7, 57), OF_LOWBW, QuantizedGradients("int8", rampup_begin_step=7),
        f"int8, 520 ms a step; ddp would take 930 ms; bfloat16 would take 660 ms; not dgc, because {OFTEN} 50 steps "
        "are left. To write it down: strategy=lowbw.Strategy(lowbw.Method(when=lowbw.EveryStep(rampup_begin_step=7), "
        "what=lowbw.Quantized()))"),
    "lowbw, whose dense steps are in bfloat16": (SLOW, LONG, OF_LOWBW,
        replace(sparse(5007, 30_000, 0.128, 0.032, 0.008), where=Where(inter_dtype="bfloat16")), "dgc, 147 ms a step"),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation: str) -> None:
    measured, run, names, expected, sentence = SITUATIONS[situation]
    found, reason = choose(measured, run, GIVEN, names, {})
    assert found.method == expected
    assert reason.startswith(FACTS)
    assert sentence in reason


def test_what_is_refused_is_named() -> None:
    found, reason = choose(SLOW, LONG, GIVEN, OF_LOWBW, {"dgc": "of the reason"})
    assert found.name == "int8"
    assert "; not dgc, because of the reason. " in reason


@pytest.mark.parametrize(
    ("dense_s", "steps", "word"),
    [(0.115, 10**6, "less than 5 % of a step"), (0.21, 24, "all 24 steps that are left wait 2.4 s"), (0.21, 26, "")],
)
def test_the_link_is_measured_only_where_it_matters(dense_s: float, steps: int, word: str) -> None:
    why = why_dense(Measured(0.11, dense_s, {}, Link(0.0, math.inf)), Run(7, 7 + steps), 0.05)
    assert (why is None) == (word == "")
    assert word in (why or "")


def test_what_takes_as_long_is_not_taken_for_it_changes_more() -> None:
    for seconds, expected in ((0.96, "ddp"), (0.94, "bfloat16")):
        narrow_s = seconds * SLOW.dense_s - SLOW.step_s
        measured = replace(SLOW, exchange_s={**SLOW.exchange_s, "bfloat16": narrow_s, "int8": narrow_s})
        assert choose(measured, Run(7, 57), GIVEN, OF_LOWBW, {})[0].name == expected


@pytest.mark.parametrize("num_steps", [60, 1000, 1_000_000])
@pytest.mark.parametrize("scale", [0.01, 1.0])
@pytest.mark.parametrize("is_adam", [False, True])
def test_promises(num_steps: int, scale: float, is_adam: bool) -> None:
    """No element is sent too seldom, density never rises, the warm-up is a share, the mean is that of the steps."""
    measured = Measured(0.11, 0.11 + scale, {d: scale * d + 0.001 for d in DENSITIES}, Link(1e-4, 1e8))
    run = Run(num_done=7, num_steps=num_steps, is_adam=is_adam)
    found, _ = choose(measured, run, GIVEN, OF_DGC, {})
    times_sent = LEAST_TIMES_SENT_ADAM if is_adam else LEAST_TIMES_SENT
    if found.name == "ddp":
        assert DENSITIES[-1] * run.num_left < times_sent or measured.dense_s <= 1.05 * (0.11 + scale * 0.256)
        return
    when: Any = found.method.when
    densities = [when.density(step) for step in range(7, min(num_steps, 20_000))]
    assert all(after <= before for before, after in pairwise(densities))
    assert when.density(10**9) * run.num_left >= times_sent * (1 - 1e-9)
    assert not is_adam or {round(d, 6) for d in densities[: when.rampup_step]} <= {1.0, *(d for d in DENSITIES)}
    assert when.rampup_begin_step <= 7 + round((DENSE_SHARE + STAIRS_SHARE) * run.num_left) + len(DENSITIES)
    if num_steps <= 20_000:
        times_s = [0.11 + scale if d == 1.0 else 0.111 + scale * d for d in densities]
        assert found.mean_s == pytest.approx(sum(times_s) / len(times_s))


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("ddp", "flat"),
        ("ddp", "auto"),
        ("bfloat16", 2),
        ("int8", "flat"),
        ("dgc", Topology(((0, 1), (2, 3)))),
    ],
)
def test_what_is_to_be_written_down_can_be_typed(name: str, topology: Any) -> None:
    given = replace(GIVEN, where=Where(topology=topology))
    found, reason = choose(SLOW, LONG, given, ("ddp",) if name == "ddp" else ("ddp", name), {})
    assert found.name == ("hierarchical" if name == "ddp" and topology != "flat" else name)
    typed: dict[str, Any] = {}
    exec(reason.partition("To write it down: ")[2], {"lowbw": lightning_lowbw}, typed)
    trainer = pl.Trainer(**typed, accelerator="cpu", devices=4, logger=False, barebones=True)
    if typed["strategy"] == "ddp":
        assert type(trainer.strategy) is DDPStrategy
    else:
        assert trainer.strategy.method == found.method  # type: ignore[attr-defined]


def test_the_numbers_of_the_documents() -> None:
    """Whole phrases: the numbers alone are in the tables of these documents, too."""
    free = replace(SLOW, exchange_s=dict.fromkeys(DENSITIES, 0.0))
    sgd, adam = (
        next(n for n in range(1000) if choose(free, Run(7, 7 + n, True, adam), GIVEN, OF_DGC, {})[0].name == "dgc")
        for adam in (False, True)
    )
    of_a_run = f"in a run of fewer than {sgd + 7} steps (with Adam {adam + 7})"
    wait = f"would wait less than {LEAST_WAIT_S:g} s"
    phrases = {
        "lightning_lowbw/strategies/names.py": (of_a_run,),
        "docs/methods/dgc.md": (of_a_run.replace("in a run", "In a run"), wait),
        "docs/methods/choose.md": (of_a_run, wait),
    }
    for document, expected in phrases.items():
        text = " ".join((ROOT / document).read_text().split())
        assert [phrase in text for phrase in expected] == [True] * len(expected), document


@pytest.mark.parametrize("what", [TopK(), TopK(chunk=4096, value_dtype="int2")])
@on_ranks()
def test_every_candidate_is_measured_and_enters_no_ledger(what: TopK) -> None:
    peers, state = Peers(), torch.get_rng_state()
    timed = Measured(0.1, 0.2, {}, Link(0.0, math.inf))
    given, shapes = replace(GIVEN, what=what), ([(1000, 1000), (1000, 1000)], [(100,)])
    measured = measure(given, tuple(CANDIDATES), shapes, peers, torch.device("cpu"), timed, begins_early=True)
    assert torch.equal(state, torch.get_rng_state())
    assert (peers.ledger.sent_bytes, peers.ledger.exposed_s) == (0, 0.0)
    assert measured.exchange_s.keys() == {*DENSITIES, *EVERY_STEP}
    assert all(0 < measured.exchange_s[key] < 10 for key in measured.exchange_s)
    by_density = [measured.exchange_s[density] for density in DENSITIES]
    assert by_density == sorted(by_density)
    assert 0.5 * (timed.dense_s - timed.step_s) < measured.exchange_s["bfloat16"]


def test_what_is_predicted_is_bytes_and_rounds_of_the_link_and_half_types_wait_for_half_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, shapes = Link(0.01, 1e6), ([(1000, 1000)], [(50,)])
    monkeypatch.setattr(auto_choice, "measure_link", lambda *_: link)
    monkeypatch.setattr(auto_choice, "time_work", lambda *_: dict.fromkeys([*DENSITIES, *EVERY_STEP], 0.0))
    timed, cluster = Measured(0.1, 3.1, {}, link), Cluster(2, 1, link, memory_bytes_per_s=math.inf)
    measured = measure(GIVEN, tuple(CANDIDATES), shapes, echo(2), torch.device("cpu"), timed, begins_early=False)
    expected = cost_of(QuantizedGradients(), [*shapes[0], *shapes[1]], cluster, 0.1).seconds
    assert measured.exchange_s["int8"] == pytest.approx(expected)
    assert measured.exchange_s["bfloat16"] == pytest.approx(1.5, rel=0.02)
    sent = [measured.exchange_s[density] - measured.exchange_s[DENSITIES[0]] for density in DENSITIES[1:]]
    assert sent == sorted(sent)


def test_what_of_a_dense_step_was_not_waited_for_hides_other_gradients_where_they_begin_as_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight seconds of gradients, of which six are waited for: two lie beside the backward pass of a step of 20."""
    link, shapes = Link(0.0, 1e6), ([(1000, 250)] * 8, list[tuple[int, ...]]())
    monkeypatch.setattr(auto_choice, "measure_link", lambda *_: link)
    monkeypatch.setattr(auto_choice, "time_work", lambda *_: dict.fromkeys([*DENSITIES, *EVERY_STEP], 0.0))

    def measured(dense_s: float, begins_early: bool) -> dict[float | str, float]:
        timed, names = Measured(20.0, dense_s, {}, link), tuple(CANDIDATES)
        return {
            **measure(GIVEN, names, shapes, echo(2), torch.device("cpu"), timed, begins_early=begins_early).exchange_s
        }

    early, late, waits = measured(26.0, True), measured(26.0, False), measured(28.0, True)
    assert early["bfloat16"] == late["bfloat16"] == pytest.approx(4 - 2, rel=0.01)
    assert late["int8"] == waits["int8"] == pytest.approx(2, rel=0.02)
    assert early["int8"] == pytest.approx(2 / 4, rel=0.05)  # the last of four groups
    assert {name: early[name] for name in DENSITIES} == {name: late[name] for name in DENSITIES}
    assert measured(20.5, True)["int8"] == pytest.approx(early["int8"])  # which it can be no more
