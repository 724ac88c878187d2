"""What `sparsity="auto"` chooses, and the sentence that says why; on one node or rank see `tests/strategies`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lightning_lowbw import ConfigurationError, EveryStep, Method, TopK
from lightning_lowbw.engine.auto import (
    DENSE_SHARE,
    DENSITIES,
    LEAST_SAVED,
    LEAST_TIMES_SENT,
    LEAST_TIMES_SENT_ADAM,
    MEASURING_S,
    STAIRS_SHARE,
    Measured,
    Run,
    plan,
    plan_anew,
    sparse_seconds,
    why_dense,
)
from lightning_lowbw.where.link import Link

ROOT = Path(__file__).resolve().parents[2]
# A model of 25M parameters on two nodes at 1 Gb/s: seconds of a step alone, with all gradients, and of what is sent.
SLOW = Measured(0.11, 0.93, {density: 0.002 + 0.35 * density for density in DENSITIES}, Link(1e-4, 125e6))
FAST = Measured(0.11, 0.115, dict.fromkeys(DENSITIES, 0.002), Link(1e-5, 12.5e9))
SLOWER = Measured(0.11, 8.3, {density: 0.02 + 3.5 * density for density in DENSITIES}, Link(1e-4, 12.5e6))
LONG = Run(num_done=6, num_steps=100_006, steps_per_epoch=5000)
FACTS = (
    "a step takes 110 ms without communication and 930 ms with all gradients, the link carries 1,000 Mb/s, "
    "latency 0.1 ms: "
)
# From these densities on, sparse steps are hardly faster than dense ones.
STEEP = {
    least: replace(SLOW, sparse_s=SLOW.sparse_s | {d: 0.7 for d in DENSITIES if d >= least}) for least in (0.128, 0.016)
}
SITUATIONS: dict[str, tuple[Measured, Run, EveryStep | None, str]] = {
    "fast link": (
        FAST,
        LONG,
        None,
        "a step takes 110 ms without communication and 115 ms with all gradients: whole gradients are sent, as with "
        "DDP; a dense exchange adds less than 5 % of a step",
    ),
    "slow link": (
        SLOWER,
        Run(num_done=6, num_steps=20_006, steps_per_epoch=1000),
        EveryStep(1000, 5332, (1 - 0.128, 1 - 0.032, 1 - 0.008, 1 - 0.002)),
        "a step takes 110 ms without communication and 8.3 s with all gradients, the link carries 100 Mb/s, latency "
        "0.1 ms: whole gradients until step 1000, then 1333 steps each at 12.8 %, 3.2 %, 0.8 %, then 0.2 % to the end; "
        "each element must be sent 30 times on average, and 20000 steps are left",
    ),
    "long run": (
        SLOW,
        LONG,
        EveryStep(5000, 30000, (1 - 0.128, 1 - 0.032, 1 - 0.008)),
        FACTS + "whole gradients until step 5000, then 10000 steps each at 12.8 %, 3.2 %, then 0.8 % to the end; "
        "more would take over 5 % of a step",
    ),
    "the first stair is dense": (
        STEEP[0.128],
        LONG,
        EveryStep(15000, 20000, (1 - 0.032, 1 - 0.008)),
        FACTS
        + "whole gradients until step 15000, then 10000 steps at 3.2 %, then 0.8 % to the end; more would take over "
        "5 % of a step",
    ),
    "all stairs are dense": (
        STEEP[0.016],
        LONG,
        EveryStep(25000, 1, (1 - 0.008,)),
        FACTS + "0.8 % of each gradient is sent from step 25000 on; more would take over 5 % of a step",
    ),
    "dense so far, and the stairs are dense": (
        STEEP[0.016],
        replace(LONG, num_done=40_006, num_steps=140_006),
        EveryStep(40006, 1, (1 - 0.008,)),
        FACTS + "0.8 % of each gradient is sent from step 40006 on; more would take over 5 % of a step",
    ),
    "short run": (
        SLOW,
        Run(num_done=6, num_steps=806, steps_per_epoch=400),
        EveryStep(40, 320, (1 - 0.256, 1 - 0.064)),
        FACTS + "whole gradients until step 40, then 160 steps at 25.6 %, then 6.4 % to the end; each element "
        "must be sent 30 times on average, and 800 steps are left",
    ),
    "with Adam the stair of 25.6 % is dense": (
        SLOW,
        Run(num_done=6, num_steps=5006, steps_per_epoch=1000, is_adam=True),
        EveryStep(750, 1000, (1 - 0.064, 1 - 0.016)),
        FACTS + "whole gradients until step 750, then 500 steps at 6.4 %, then 1.6 % to the end; each element must be "
        "sent 60 times on average, and 5000 steps are left",
    ),
    "too short a run": (
        SLOW,
        Run(num_done=6, num_steps=50),
        None,
        "a step takes 110 ms without communication and 930 ms with all gradients: whole gradients are sent, as with "
        "DDP; each element must be sent 30 times on average, and 44 steps are left",
    ),
    "fine-tuning": (
        SLOW,
        Run(num_done=1006, num_steps=2006, is_pretrained=True),
        EveryStep(1006, 1, (1 - 0.032,)),
        FACTS + "3.2 % of each gradient is sent from step 1006 on; each element must be sent 30 times on average, "
        "and 1000 steps are left",
    ),
    "a length that is not known": (
        replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.5)),
        Run(num_done=6, is_pretrained=True),
        EveryStep(6, 1, (1 - 0.004,)),
        FACTS + "0.4 % of each gradient is sent from step 6 on; each element must be sent 30 times on average, and "
        "10000 steps are assumed",
    ),
    "sparse steps that take as long": (
        replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.83)),
        LONG,
        None,
        FACTS + "whole gradients are sent, as with DDP; each element must be sent 30 times on average, and "
        "100000 steps are left: that would be 0.1 %, and hardly faster",
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation: str) -> None:
    """As a fit does it: the link is measured, and planned for, only where it matters."""
    measured, run, expected, sentence = SITUATIONS[situation]
    why = why_dense(measured.step_s, measured.dense_s, run, 0.05)
    assert (plan(measured, run, 0.05) if why is None else (None, why)) == (expected, sentence)


def test_anew_it_sends_more_because_of_the_link_only() -> None:
    """Not because few steps are left: the elements have been sent before."""
    when, _ = plan(SLOW, replace(LONG, is_pretrained=True), 0.05)
    assert when is not None
    late = replace(LONG, num_done=99_000)
    again, reason = plan_anew(SLOW, late, 0.05, when.rampup_begin_step)
    assert again.stairs == when.stairs
    assert reason == FACTS + "0.8 % of each gradient is sent from step 99000 on; more would take over 5 % of a step"
    slower = replace(SLOW, sparse_s={density: 10 * seconds for density, seconds in SLOW.sparse_s.items()})
    less, reason = plan_anew(slower, late, 0.05, when.rampup_begin_step)
    assert less.density(late.num_done) == pytest.approx(0.001)
    assert reason.endswith("each element must be sent 30 times on average, and 100000 steps are sparse")
    faster = replace(SLOW, dense_s=0.112)
    most, reason = plan_anew(faster, late, 0.05, when.rampup_begin_step)
    assert most.density(late.num_done) == pytest.approx(DENSITIES[-1])  # dense it cannot become
    assert reason.endswith("a dense exchange adds less than 5 % of a step")


def test_a_larger_budget_sends_more() -> None:
    run = replace(LONG, is_pretrained=True)
    densities = []
    for budget in (0.02, 0.05, 0.1, 0.5):
        when, _ = plan(SLOW, run, budget)
        assert when is not None
        densities.append(when.density(run.num_done))
    assert densities == pytest.approx([0.001, 0.008, 0.016, 0.128])


@pytest.mark.parametrize("num_steps", [60, 100, 1000, 10_000, 1_000_000])
@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e7, 1e8, 1e9, 1e10])
@pytest.mark.parametrize("step_s", [0.01, 1.0])
@pytest.mark.parametrize("is_adam", [False, True])
def test_promises(num_steps: int, bandwidth: float, step_s: float, is_adam: bool) -> None:
    """No element is sent too seldom, no sparse step takes longer than a dense one, density never rises."""
    numel, link = 25_000_000, Link(1e-4, bandwidth)
    dense_s = step_s + link.time_s(2, 4 * numel)
    exchange_s = [link.time_s(1, 3.5 * numel * density) for density in DENSITIES]
    measured = Measured(step_s, dense_s, sparse_seconds(exchange_s, [0.1 * density for density in DENSITIES]), link)
    run = Run(num_done=6, num_steps=num_steps, steps_per_epoch=num_steps, is_adam=is_adam)
    times_sent = LEAST_TIMES_SENT_ADAM if is_adam else LEAST_TIMES_SENT
    when, _ = plan(measured, run, 0.05)
    if when is None:
        at_least = min((d for d in DENSITIES if d * run.num_left >= times_sent), default=1.0)
        fits = dense_s - step_s <= 0.05 * step_s
        saves = [s <= (1 - LEAST_SAVED) * (dense_s - step_s) for d, s in measured.sparse_s.items() if d >= at_least]
        assert fits or at_least == 1.0 or not any(saves)
        return
    densities = [when.density(step) for step in range(min(num_steps, 20_000))]
    assert densities[: run.num_done] == [1.0] * run.num_done
    assert all(after <= before for before, after in pairwise(densities))
    last = when.density(10**9)
    assert last * run.num_left >= times_sent * (1 - 1e-9)
    taken = {round(density, 6) for density in densities} - {1.0}
    assert not is_adam or taken - {round(last, 6)} <= {d for d in DENSITIES if d <= 0.2}
    assert taken <= {round(density, 6) for density in DENSITIES}
    assert all(
        measured.sparse_s[d] <= (1 - LEAST_SAVED) * (dense_s - step_s) for d in DENSITIES if round(d, 6) in taken
    )
    most_dense = round((DENSE_SHARE + STAIRS_SHARE) * run.num_left) + len(DENSITIES)  # whose steps are rounded
    assert when.rampup_begin_step <= max(run.num_done, most_dense)


def shortest_sparse(is_adam: bool) -> int:
    """Return the least number of steps left for which any is sparse, where sparse steps take no time."""
    free = replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.0))
    for num_left in range(1, 1000):
        run = Run(num_done=7, num_steps=7 + num_left, is_pretrained=True, is_adam=is_adam)
        when, reason = plan(free, run, 1.0)
        if when is not None:
            return num_left
        assert f"must be sent {60 if is_adam else 30} times" in reason
    raise AssertionError("no run is sparse")


def test_the_shortest_wait_for_which_the_link_is_measured_is_that_of_the_documents() -> None:
    least = f"less than {MEASURING_S / LEAST_SAVED:g} s"
    phrases = {
        "README.md": f"if the whole run would wait {least} for gradients",
        "docs/methods/dgc.md": f"rest of the run would wait {least} for gradients",
        "docs/methods/lowbw.md": f"all remaining steps together would wait {least}",
    }
    for document, phrase in phrases.items():
        assert phrase in " ".join((ROOT / document).read_text().split()), f"{document} should say: {phrase}"


def test_the_shortest_run_that_is_sparse_is_that_of_the_documents() -> None:
    """Whole phrases: the numbers alone are in the tables of these documents, too."""
    sgd, adam = (shortest_sparse(is_adam) for is_adam in (False, True))
    of_a_run = f"in a run of fewer than {sgd + 7} steps (with Adam {adam + 7})"
    phrases = {
        "README.md": of_a_run,
        "lightning_lowbw/strategies/dgc.py": of_a_run,
        "docs/methods/dgc.md": f"fewer than {sgd} steps (with Adam and AdamW {adam}) are left",
    }
    for document, phrase in phrases.items():
        assert phrase in " ".join((ROOT / document).read_text().split()), f"{document} should say: {phrase}"


@pytest.mark.parametrize(
    "arguments",
    [
        {"rampup_begin_step": 10},
        {"rampup_step": 10},
        {"budget": 0.0},
        {"budget": 1.5},
        {"budget": float("nan")},
        {"pretrained": 1},
    ],
)
def test_arguments_that_do_not_go_with_auto(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        EveryStep(sparsity="auto", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"budget": 0.1}, {"pretrained": True}])
def test_arguments_that_are_for_auto_only(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="sparsity='auto'"):
        EveryStep(sparsity=[0.999], **arguments)  # type: ignore[arg-type]


def test_until_it_is_chosen_steps_are_dense() -> None:
    assert [EveryStep(sparsity="auto").density(step, 0.001) for step in (0, 1000)] == [1.0, 1.0]


def test_a_plain_loop_has_no_trainer_to_ask() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    method = Method(when=EveryStep(sparsity="auto"), what=TopK())
    with pytest.raises(ConfigurationError, match=r"plain loop.*Give the numbers"):
        method.attach(torch.optim.SGD([parameter], lr=0.1), [("weight", parameter)])
