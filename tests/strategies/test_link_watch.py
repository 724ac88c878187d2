"""A fit whose link changes: it is measured again, and what is sent follows, at most once per epoch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import AutoStrategy, DGCStrategy, EveryStep
from lightning_lowbw.engine import link_watch
from lightning_lowbw.engine.auto import DENSITIES, Measured
from lightning_lowbw.strategies import auto_sparsity, step_times
from lightning_lowbw.strategies.auto_sparsity import AutoSparsity, described
from lightning_lowbw.strategies.step_times import NUM_STEPS
from lightning_lowbw.where.link import Link
from tests.measured import give_measured
from tests.ranks import run_ranks
from tests.tiny import MIN_NUMEL, Tiny, Watcher, make_data, make_trainer, weights_of

STEPS, WINDOW = 60, 5
LINK = Link(1e-4, 1e7)
# Steps so short that any wait is longer than predicted, and so long that any is shorter.
BRIEF = Measured(1e-9, 1.0, {density: 4e-9 * density for density in DENSITIES}, LINK)
LENGTHY = Measured(1e3, 1e6, {density: 4e3 * density for density in DENSITIES}, LINK)
VERY_BRIEF = Measured(1e-9, 1.0, {density: 4e-8 * density for density in DENSITIES}, LINK)
BRIEF_DENSE = Measured(1e-9, 1e-9, dict.fromkeys(DENSITIES, 1e-9), LINK)
SLOWER = Measured(0.1, 9.0, {density: 4 * density for density in DENSITIES}, Link(1e-4, 1e5))
FASTER = Measured(0.1, 0.12, {density: 0.01 * density for density in DENSITIES}, Link(1e-4, 1e9))
FAST = Measured(0.1, 0.101, {density: 0.01 * density for density in DENSITIES}, Link(1e-4, 1e10))


def fit(
    first: Measured,
    then: Measured,
    *,
    epochs: int = 1,
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    picks: bool = False,
    **knobs: Any,
) -> dict[str, Any]:
    said: list[str] = []
    num_measured = 0

    def measure_again(*_: Any) -> Measured:
        nonlocal num_measured
        num_measured += 1
        return then

    num_ranks = dist.get_world_size()
    knobs = {"pretrained": True, **knobs}
    strategy: Any = AutoStrategy(**knobs) if picks else DGCStrategy(sparsity="auto", min_numel=MIN_NUMEL, **knobs)
    trainer = make_trainer(strategy, num_ranks, max_epochs=epochs, callbacks=[Watcher(path, save_at)])
    with pytest.MonkeyPatch.context() as monkeypatch:  # the ranks live on
        give_measured(monkeypatch, first)
        monkeypatch.setattr(AutoSparsity, "_measure_exchange", measure_again)
        for module in (auto_sparsity, step_times):
            monkeypatch.setattr(module, "num_steps_of", lambda _: 100_000)
        monkeypatch.setattr(auto_sparsity, "rank_zero_info", said.append)
        monkeypatch.setattr(link_watch, "WATCHED_STEPS", WINDOW)
        monkeypatch.setattr(link_watch, "CHANGE", 1e3)  # what loopback takes varies
        torch.manual_seed(3)
        model = Tiny()
        trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=resume)
    return {
        "weights": weights_of(model),
        "when": strategy.method.when,
        "said": said,
        "num_measured": num_measured,
        "density": strategy.workers[0].last_density,
        "link": strategy.workers[0].sparse.link,
    }


def test_on_a_slower_link_less_is_sent_from_then_on() -> None:
    found, other = run_ranks(partial(fit, BRIEF, SLOWER), 2)
    assert found["weights"] == other["weights"]
    assert found["when"] == other["when"] == EveryStep(NUM_STEPS, 1, (1 - 0.001,))
    assert found["density"] == pytest.approx(0.001)
    first, second = found["said"]
    assert "0.8 % of each gradient is sent from step 7 on" in first
    assert 'DGCStrategy, sparsity="auto": the exchange takes ' in second
    assert " of a step, and was predicted to take 3.2e-08 ms; a step takes 100 ms without communication" in second
    step = NUM_STEPS + WINDOW + 1
    assert second.endswith(f"0.1 % of each gradient is sent from step {step} on; more would take over 5 % of a step.")


def test_on_a_faster_link_more_is_sent_but_never_all() -> None:
    found, _ = run_ranks(partial(fit, LENGTHY, FASTER), 2)
    assert found["density"] == pytest.approx(0.256)
    found, _ = run_ranks(partial(fit, LENGTHY, FAST), 2)
    assert found["density"] == pytest.approx(0.256)
    assert found["said"][1].endswith("a dense exchange adds less than 5 % of a step.")


def test_where_steps_are_dense_a_slower_link_makes_them_sparse() -> None:
    found, other = run_ranks(partial(fit, BRIEF_DENSE, SLOWER), 2)
    assert found["weights"] == other["weights"]
    assert "as with DDP" in found["said"][0]
    assert found["density"] == pytest.approx(0.001)


def test_at_most_once_per_epoch() -> None:
    """What it changes to is no better predicted."""
    for epochs in (1, 2):
        found, _ = run_ranks(partial(fit, BRIEF, VERY_BRIEF, epochs=epochs), 2)
        assert found["num_measured"] == epochs
        assert len(found["said"]) == 2


def test_what_is_no_change_of_the_link_is_not_asked_for_again_and_again() -> None:
    """The same is measured: the wait has another reason, and is what is expected from then on."""
    found, _ = run_ranks(partial(fit, BRIEF, BRIEF), 2)
    assert found["num_measured"] == 1
    assert len(found["said"]) == 1


def test_not_while_the_density_still_falls() -> None:
    """100,000 steps have a warm-up that is longer than this run."""
    found, _ = run_ranks(partial(fit, BRIEF, SLOWER, pretrained=False), 2)
    assert found["num_measured"] == 0


def test_a_resume_keeps_it(tmp_path: Path) -> None:
    path = str(tmp_path / "{}.ckpt")
    step = NUM_STEPS + WINDOW + 10
    whole = run_ranks(partial(fit, BRIEF, SLOWER, path=path, save_at=(step,)), 2)
    later = run_ranks(partial(fit, FAST, SLOWER, resume=path.format(step)), 2)
    assert later[0]["when"] == whole[0]["when"]


def test_what_lowbw_has_picked_follows_where_it_is_dgc() -> None:
    narrow_s = dict.fromkeys(("float16", "int8"), 1.0)
    for first, num_measured in ((BRIEF, 1), (BRIEF_DENSE, 0)):
        first = Measured(first.step_s, first.dense_s, first.sparse_s, first.link, narrow_s)
        found, _ = run_ranks(partial(fit_wide, first), 2)
        assert found["num_measured"] == num_measured


def fit_wide(first: Measured) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(auto_sparsity, "left_out", lambda *_, **__: [])
        return fit(first, SLOWER, picks=True)


@pytest.mark.parametrize(("device", "watches"), [("cpu", True), ("cuda", False)])
def test_dense_steps_on_cuda_whose_waits_are_not_measured_are_not_watched(device: str, watches: bool) -> None:
    """A wait of 0 would seem shorter than predicted."""
    strategy = DGCStrategy()
    auto = AutoSparsity(strategy)
    auto._given = strategy.method
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DGCStrategy, "root_device", torch.device(device))
        auto._choose(described(None, BRIEF))
        assert (auto._link_watch is not None) == watches
