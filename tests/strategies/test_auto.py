"""`sparsity="auto"` and `strategy="lowbw"` in a fit: they become what they choose, on all ranks, also in a resume."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
    cost_model,
)
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.cost_model import Measured, Run
from lightning_lowbw.strategies import auto_choice, checks
from lightning_lowbw.strategies.auto_choice import NUM_STEPS, medians, refusals
from tests.measured import give_measured, make_measured
from tests.ranks import run_ranks
from tests.tiny import Stop, Tiny, TwoOptimizers, Watcher, make_data, make_trainer, sgd, since_lightning_2_5, weights_of

STEPS, END = 130, 20  # a run is planned for STEPS, and stopped after END: all is chosen by then
LATER = NUM_STEPS + 6
SLOW = make_measured(0.1, 1.0, 0.05, float16=0.6, int8=0.4)
NO_DGC = make_measured(0.1, 1.0, 1.2, float16=0.6, int8=0.4)
DGC: dict[str, Any] = {"rampup_begin_step": NUM_STEPS, "sparsity": [0.744]}
CASES: dict[str, tuple[Measured, Any]] = {  # what is measured, and the strategy that this is the same as
    "ddp": (dataclasses.replace(SLOW, dense_s=0.101), DDPStrategy),
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


def fit(
    case: str | Measured,
    make: Callable[..., Any] | None = None,
    *,
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    model: Any = Wide,
    callbacks: tuple[Any, ...] = (),
    fits: int = 1,
    num_steps: int = STEPS,
    end: int = END,
    **knobs: Any,
) -> dict[str, Any]:
    """Train with what is measured given, from trained weights unless the knobs say otherwise."""
    torch.manual_seed(7)
    num_ranks, measured = dist.get_world_size(), CASES[case][0] if isinstance(case, str) else case
    strategy = AutoStrategy(**{"pretrained": True, **knobs}) if make is None else make(**knobs)
    module, stop = model(), Stop(end)
    callbacks = (Watcher(path, save_at), stop, *callbacks)
    trainer = make_trainer(strategy, num_ranks, max_steps=num_steps, max_epochs=-1, callbacks=[*callbacks])
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asked, said = give_measured(monkeypatch, measured)  # the ranks live on
        for number in range(fits):
            trainer.fit_loop.epoch_loop.max_steps, stop.at = (number + 1) * num_steps, (number + 1) * end
            trainer.fit(module, make_data(num_ranks, STEPS), ckpt_path=resume)
    warned = [str(each.message) for each in caught]
    result = {"weights": weights_of(module), "warned": warned, "said": said, "num_measured": len(asked)}
    return result | ({"method": strategy.method} if isinstance(strategy, Strategy) else {})


def fit_without_choosing(case: str) -> dict[str, Any]:
    return fit(case, CASES[case][1])


@pytest.mark.parametrize("case", CASES)
def test_it_becomes_what_it_has_chosen_and_a_resume_keeps_it(case: str, tmp_path: Path) -> None:
    path = str(tmp_path / "{}.ckpt")
    found = run_ranks(partial(fit, case, path=path, save_at=(LATER,)), 2)
    expected = run_ranks(partial(fit_without_choosing, case), 2)
    assert [each["weights"] for each in found] == [each["weights"] for each in expected]
    assert len({each["weights"] for each in found}) == 1
    assert [each["num_measured"] for each in found] == [int(case != "ddp")] * 2
    said, *_ = found[0]["said"]
    assert said.startswith("AutoStrategy: a step takes 100 ms without communication and ")
    assert f": {case}, " in said
    assert said.count("To write it down: strategy=") == 1
    other = "ddp" if case != "ddp" else "dgc"  # it would choose now
    later = run_ranks(partial(fit, other, resume=path.format(LATER)), 2)
    assert [each["num_measured"] for each in later] == [0, 0]
    assert [each["weights"] for each in later] == [each["weights"] for each in found]
    assert later[0]["method"] == found[0]["method"]
    assert "as chosen before the checkpoint was saved. A resumed run does not choose again" in later[0]["said"][0]


def test_dgc_chooses_its_numbers_and_keeps_its_knobs() -> None:
    fit_dgc = partial(fit, "dgc", DGCStrategy, num_steps=300, model=partial(Wide, adamw), exclude=["head.*"])
    for result in run_ranks(fit_dgc, 2):
        assert result["method"].when.stairs == (0.744,)  # 60 of the steps that are left
        assert result["method"].when.rampup_begin_step == NUM_STEPS + 15
        assert result["method"].what.exclude == ("head.*",)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-3)


@since_lightning_2_5
def test_the_next_fit_chooses_anew() -> None:
    twice = run_ranks(partial(fit, "int8", fits=2), 2)
    assert [each["num_measured"] for each in twice] == [2, 2]
    assert len({each["weights"] for each in twice}) == 1


def test_a_search_for_a_learning_rate_is_no_run() -> None:
    finder = LearningRateFinder(num_training_steps=10, early_stop_threshold=None)
    assert [each["num_measured"] for each in run_ranks(partial(fit, "dgc", callbacks=(finder,)), 2)] == [1, 1]


def test_a_callback_that_gives_numbers_is_obeyed() -> None:
    warmup = SparsityWarmup(begin_step=4, steps=1, sparsity=[0.9])
    (result, _) = run_ranks(partial(fit, "dgc", DGCStrategy, callbacks=(warmup,)), 2)
    assert (result["num_measured"], result["method"].when.stairs) == (0, (0.9,))


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
def test_where_there_is_no_link_nothing_is_measured(num_ranks: int, knobs: dict[str, Any], word: str) -> None:
    result, *_ = run_ranks(partial(fit, "dgc", **knobs), num_ranks)
    assert (result["num_measured"], result["said"]) == (0, [])
    assert len([each for each in result["warned"] if word in each]) == 1


class Two(TwoOptimizers, Wide):
    """Two optimizers, both of which step in every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def runs_of(model: Any, **limits: int) -> list[Run]:
    """Return what ranks, of which the second has only 10 batches to train, know of a run."""
    runs: list[Run] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, SLOW)
        monkeypatch.setattr(auto_choice, "why_dense", lambda _, run, __: (runs.append(run), "of this test")[1])
        monkeypatch.setattr(auto_choice, "num_steps_of_fit", shorter_on_rank_one)
        make_trainer(AutoStrategy(), dist.get_world_size(), **limits).fit(model(), make_data(2, 20))
    return runs


def shorter_on_rank_one(*args: Any) -> float:
    return checks.num_steps_of_fit(*args) - 10 * dist.get_rank()


@pytest.mark.parametrize(("model", "limits"), [(Wide, {}), (Two, {"max_steps": 40, "max_epochs": -1})])
def test_all_ranks_plan_for_the_shortest_run_of_an_optimizer(model: Any, limits: dict[str, int]) -> None:
    assert run_ranks(partial(runs_of, model, **limits), 2) == [[Run(NUM_STEPS, 10)]] * 2


class SlowToValidate(Wide):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.1)


def seconds_of_a_step() -> float:
    found: list[Measured] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(auto_choice, "medians", lambda times: (found.append(medians(times)), found[0])[1])
        trainer = make_trainer(DGCStrategy(), dist.get_world_size(), val_check_interval=1, limit_val_batches=1)
        data = make_data(dist.get_world_size(), NUM_STEPS + 2)
        trainer.fit(SlowToValidate(), data, data)
    return found[0].dense_s


def test_validation_is_not_counted() -> None:
    """It comes after every step."""
    assert max(run_ranks(seconds_of_a_step, 2)) < 0.1


def measure_and_choose() -> tuple[Method, str, list[str]]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cost_model, "LEAST_WAIT_S", 0.0)
        monkeypatch.setattr(auto_choice, "rank_zero_info", said.append)
        strategy, module = AutoStrategy(budget=1e-9, topology=2), Wide()
        make_trainer(strategy, 4, max_steps=20, max_epochs=-1).fit(module, make_data(4, 20))
    return strategy.method, weights_of(module), said


def test_it_measures_and_all_ranks_choose_alike() -> None:
    """On loopback; whatever it chooses, it says so."""
    results = run_ranks(measure_and_choose, 4)
    assert len({(method, weights) for method, weights, _ in results}) == 1
    assert "carries" in results[0][2][0]


@pytest.mark.parametrize(("factor", "is_told"), [(1e6, True), (1.0, False)])
def test_a_wrong_prediction_is_told_at_the_end(factor: float, is_told: bool) -> None:
    """The prediction of this test is a step of 10,000 s, or what a step takes."""
    said = run_ranks(partial(fit_slowly, factor), 2)[0]
    assert any("a step took" in line and "was predicted when dgc was chosen" in line for line in said) == is_told


class Slow(Wide):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.05)


def fit_slowly(factor: float) -> list[str]:
    measured = make_measured(0.05 * factor, 1.0 * factor, 0.01 * factor)
    model = Slow if factor == 1.0 else Wide
    return fit(measured, partial(DGCStrategy, pretrained=True), model=model, end=30)["said"]  # type: ignore[no-any-return]
