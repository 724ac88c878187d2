"""`sparsity="auto"` and `strategy="lowbw"` in a fit: they become their choice, on all ranks, also in a resume."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import SGD, AdamW, RMSprop

from lightning_lowbw import (
    AutoStrategy,
    DGCStrategy,
    Method,
    QuantizedGradients,
    SparsityWarmup,
    Strategy,
    Where,
    cost_model,
)
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.cost_model import Measured, Run
from lightning_lowbw.payloads.quantized import PendingQuantized
from lightning_lowbw.strategies import auto_choice, checks
from lightning_lowbw.strategies.auto_choice import NUM_STEPS, medians, refusals
from lightning_lowbw.sync import early
from tests.measured import give_measured, make_measured
from tests.ranks import on_ranks
from tests.strategies.fits import At, same, saving, train, warned
from tests.tiny import ManualTiny, Tiny, TwoOptimizers, amp_with_scaler, make_data, make_trainer, sgd, weights_of

STEPS, END = 130, 20  # a run is planned for STEPS, and stopped after END: all is chosen by then
LATER = NUM_STEPS + 6
SLOW = make_measured(0.1, 1.0, 0.05, bfloat16=0.6, int8=0.4)
NO_DGC = make_measured(0.1, 1.0, 1.2, bfloat16=0.6, int8=0.4)
HALF = make_measured(0.1, 1.0, 1.2, bfloat16=0.4, int8=0.4)
HALF_DDP = Method(where=Where(inter_dtype="bfloat16"))
DGC: dict[str, Any] = {"rampup_begin_step": NUM_STEPS, "sparsity": [0.744]}
CASES: dict[str, tuple[Measured, Any]] = {  # the measurements, and the strategy that trains alike
    "ddp": (dataclasses.replace(SLOW, dense_s=0.101), DDPStrategy),
    "bfloat16": (HALF, lambda: Strategy(Method())),  # which adopts it after as many steps
    "int8": (NO_DGC, lambda: Strategy(QuantizedGradients("int8", rampup_begin_step=NUM_STEPS))),
    "dgc": (SLOW, lambda: DGCStrategy(**DGC)),
}


class Wide(Tiny):
    """One layer is large enough for every payload."""

    def __init__(self, optimizer: Any = sgd) -> None:
        super().__init__(optimizer, data_by_step=True)
        self.wide, self.wider = torch.nn.Linear(16, 160), torch.nn.Linear(160, 32)
        self.norm, self.widest = torch.nn.BatchNorm1d(160), torch.nn.Linear(160, 160)
        self.lr = 0.05

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.widest(self.wide(x + self.frozen(x)))))
        return self.head(torch.relu(self.wider(hidden)))


def stop(trainer: Any, _: Any) -> None:
    """End a run, and let everybody plan for more."""
    trainer.should_stop = True


def fit(
    case: str | Measured,
    strategy: Any = None,
    *,
    path: str = "",
    resume: str | None = None,
    model: Any = Wide,
    callbacks: tuple[Any, ...] = (),
    fits: int = 1,
    num_steps: int = STEPS,
    plugins: Any = None,
) -> SimpleNamespace:
    """Train with given measurements, from trained weights unless a strategy is given."""
    torch.manual_seed(7)
    num_ranks, measured = dist.get_world_size(), CASES[case][0] if isinstance(case, str) else case
    strategy = AutoStrategy(pretrained=True) if strategy is None else strategy
    module, ends = model(), tuple((number + 1) * END for number in range(fits))
    watching = [saving(path, (LATER,) if path else ()), At(ends, stop), *callbacks]
    options = {"callbacks": watching, "plugins": plugins}
    trainer = make_trainer(strategy, num_ranks, max_steps=num_steps, max_epochs=-1, **options)

    def fit_all() -> None:
        for number in range(fits):
            trainer.fit_loop.epoch_loop.max_steps = (number + 1) * num_steps
            trainer.fit(module, make_data(num_ranks, STEPS), ckpt_path=resume)

    with pytest.MonkeyPatch.context() as monkeypatch:
        asked, said = give_measured(monkeypatch, measured)  # the ranks live on
        _, warnings = warned(fit_all)
    method = getattr(strategy, "method", None)
    weights = same(weights_of(module))
    return SimpleNamespace(weights=weights, warned=warnings, said=said, asked=asked, method=method)


def adopt_half(trainer: Any, _: Any) -> None:
    trainer.strategy.fit.adopt(HALF_DDP)


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_it_becomes_what_it_has_chosen_and_a_resume_keeps_it(case: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/some.ckpt"
    found = fit(case, path=path)
    callbacks = (At((NUM_STEPS,), adopt_half),) if case == "bfloat16" else ()
    assert found.weights == fit(case, CASES[case][1](), callbacks=callbacks).weights
    assert len(found.asked) == int(case != "ddp")
    other = "ddp" if case != "ddp" else "dgc"  # it would choose now
    later = fit(other, resume=path)
    if case == "ddp":  # a resume may have more steps left: it chooses
        assert len(later.asked) == 1
        assert later.method != found.method
        return
    assert (later.asked, later.weights, later.method) == ([], found.weights, found.method)
    if dist.get_rank() == 0:
        said, *_ = found.said
        assert re.match(r"AutoStrategy, chosen in [\d.e-]+ s: a step takes 100 ms without communication and ", said)
        assert f": {case}, " in said
        assert said.count("To write it down: strategy=") == 1
        assert re.match(rf'{case}, strategy=(lowbw\.|"bfloat16")', later.said[0])
        assert "as chosen before the checkpoint was saved. A resumed run does not choose again" in later.said[0]


@on_ranks(2)
def test_a_resume_with_more_steps_left_chooses_anew(tmp_path: Path) -> None:
    path = f"{tmp_path}/some.ckpt"
    assert not fit("dgc", DGCStrategy(), path=path, num_steps=100).method.compresses_gradients
    assert fit("dgc", DGCStrategy(), resume=path, num_steps=300).method.compresses_gradients


class Changing(Wide):
    """May change gradients before they are exchanged."""

    def on_after_backward(self) -> None:
        pass


EARLY: dict[str, dict[str, Any]] = {
    "a Trainer": {},
    "hooks of a module": {"model": Changing},
    "a GradScaler": {"plugins": [amp_with_scaler()]},
    "manual": {"model": ManualTiny},
}


@pytest.mark.parametrize("case", EARLY)
@on_ranks(2)
def test_few_bits_are_predicted_to_begin_early_where_they_do(case: str) -> None:
    are_early, send = list[bool](), PendingQuantized.send

    def noted(*arguments: Any) -> Any:
        are_early.append(torch._C._current_graph_task_id() != -1)
        return send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early, "LEAST_NUMEL", 1)
        patch.setattr(PendingQuantized, "send", noted)
        assert fit("int8", **EARLY[case]).asked == [case == "a Trainer"]
    assert are_early
    assert any(are_early) == (case == "a Trainer")


@on_ranks(2)
def test_dgc_chooses_its_numbers_and_keeps_its_knobs() -> None:
    model = partial(Wide, partial(AdamW, lr=1e-3))
    method = fit("dgc", DGCStrategy(exclude=["head.*"]), num_steps=300, model=model).method
    assert method.when.stairs == (0.744,)  # 60 of the steps that are left
    assert method.when.rampup_begin_step == NUM_STEPS + 15
    assert method.what.exclude == ("head.*",)


@on_ranks(2)
def test_each_fit_chooses_once_unless_it_is_a_search_or_a_callback_gives_numbers() -> None:
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    assert len(fit("int8", fits=2).asked) == 2
    assert fit("dgc", callbacks=(finder,)).asked == [True]
    given = fit("dgc", DGCStrategy(), callbacks=(SparsityWarmup(begin_step=4, steps=1, sparsity=[0.9]),))
    assert (given.asked, given.method.when.stairs) == ([], (0.9,))


@on_ranks(4)
def test_on_two_levels_given_numbers_end_the_dense_steps_of_a_choice() -> None:
    """Which would be DDP's own, and counted as such."""
    strategy = DGCStrategy(topology=2)
    fit("dgc", strategy, callbacks=(SparsityWarmup(begin_step=4, steps=1, sparsity=[0.9]),))
    assert (strategy.peers.is_summed_flat, strategy.ledger.has_levels) == (False, True)


class Small(Tiny):
    """No matrix of 1,024 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)
        self.wider, self.head = torch.nn.Linear(32, 31), torch.nn.Linear(31, 5)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (partial(Wide, partial(RMSprop, lr=1e-3)), "measured with SGD, Adam and AdamW, not with RMSprop"),
        (partial(Wide, partial(SGD, lr=0.05, momentum=0.9, dampening=0.1)), "SGD with dampening=0.1 has no momentum"),
        (Small, "no tensor that is trained has min_numel elements"),
    ],
)
def test_it_does_not_take_what_cannot_be_used_or_is_not_measured(model: Any, words: str) -> None:
    module, method = model(), AutoStrategy().method
    worker = method.make_synchronizer(module.configure_optimizers(), module.named_parameters(), Peers())
    assert words in refusals([worker], is_dgc_asked_for=False)["dgc"]


@pytest.mark.parametrize(("num_ranks", "knobs", "word"), [(1, {}, "one rank"), (2, {"topology": 2}, "one node")])
@on_ranks()
def test_where_there_is_no_link_nothing_is_measured(num_ranks: int, knobs: dict[str, Any], word: str) -> None:
    result = fit("dgc", AutoStrategy(pretrained=True, **knobs))
    assert (result.asked, result.said) == ([], [])
    assert [word in each for each in result.warned].count(True) == (dist.get_rank() == 0)


class Two(TwoOptimizers, Wide):
    every = 1


def shorter_on_rank_one(*args: Any) -> float:
    return checks.num_steps_of_fit(*args) - 10 * dist.get_rank()


@pytest.mark.parametrize(("model", "num_steps"), [(Wide, 10), (Two, math.inf)])
@on_ranks(2)
def test_all_ranks_plan_for_the_shortest_run_of_an_optimizer(model: Any, num_steps: float) -> None:
    """The second rank has only 10 batches to train."""
    runs: list[Run] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, SLOW)
        for module in (auto_choice, cost_model):
            monkeypatch.setattr(module, "why_dense", lambda _, run, __: (runs.append(run), "of this test")[1])
        monkeypatch.setattr(auto_choice, "num_steps_of_fit", shorter_on_rank_one)
        train(AutoStrategy(), model(), 20)
    assert {*runs} == {Run(NUM_STEPS, num_steps)}


class SlowToValidate(Wide):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.1)


@on_ranks(2)
def test_validation_is_not_counted() -> None:
    """It comes after every step."""
    found: list[Measured] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(auto_choice, "medians", lambda times: (found.append(medians(times)), found[0])[1])
        data = make_data(2, NUM_STEPS + 2)
        train(DGCStrategy(), SlowToValidate(), data, data, val_check_interval=1, limit_val_batches=1)
    assert found[0].dense_s < 0.1


@on_ranks(4)
def test_it_measures_and_all_ranks_choose_alike() -> None:
    """On loopback; whatever it chooses, it says so."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cost_model, "LEAST_WAIT_S", 0.0)
        monkeypatch.setattr(auto_choice, "rank_zero_info", said.append)
        strategy, module = AutoStrategy(budget=1e-9, topology=2), Wide()
        train(strategy, module, 20)
    same((strategy.method, weights_of(module)))
    assert dist.get_rank() or "carries" in said[0]


DENSE = make_measured(0.1, 0.2, 5.0, bfloat16=5.0, int8=5.0)


@on_ranks(4)
def test_on_two_levels_dense_steps_are_summed_so_unless_all_steps_are_dense() -> None:
    """All steps are dense if nothing pays: then they stay DDP's own, as up to the choice."""
    summed, strategy = fit(DENSE, AutoStrategy(topology=2)), AutoStrategy(topology=2)
    stays = fit(dataclasses.replace(DENSE, dense_s=0.101), strategy)
    assert stays.weights == fit(DENSE, DDPStrategy()).weights != summed.weights
    assert not strategy.ledger.has_levels
    assert dist.get_rank() or (": hierarchical, " in summed.said[0] and 'strategy="ddp"' in stays.said[0])
