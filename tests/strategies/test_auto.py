"""`strategy="lowbw"` in a fit: it becomes what it chooses, to the bit, on all ranks, and stays it in a resume."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import RMSprop

from lightning_lowbw import (
    AutoStrategy,
    ConfigurationError,
    DGCStrategy,
    LocalSGDStrategy,
    Method,
    Narrow,
    NarrowGradients,
    Strategy,
    TopK,
)
from lightning_lowbw.engine import measuring
from lightning_lowbw.engine.auto import DENSITIES, Measured
from lightning_lowbw.engine.measuring import seconds_of_narrow_work
from lightning_lowbw.strategies import auto_sparsity
from lightning_lowbw.strategies.auto_sparsity import AutoSparsity
from lightning_lowbw.strategies.step_times import NUM_STEPS, StepTimes
from lightning_lowbw.what.narrow_values import NARROW_NAMES
from lightning_lowbw.where.link import Link
from tests.measured import give_measured
from tests.ranks import run_ranks
from tests.tiny import Stop, Tiny, TwoOptimizers, Watcher, make_data, make_trainer, sgd, since_lightning_2_5, weights_of

STEPS, END = 130, 40  # a run is planned for STEPS, and stopped after END: all is chosen by then
LATER = NUM_STEPS + 20
WIDE = 160  # 160 * 160 elements are more than `min_numel` whatever else is trained
SLOW = Measured(0.1, 1.0, dict.fromkeys(DENSITIES, 0.05), Link(1e-4, 1e7), {"float16": 0.6, "int8": 0.4}, 0.35)
CASES: dict[str, tuple[Measured, Any]] = {  # what is measured, and the strategy that this is the same as
    "ddp": (dataclasses.replace(SLOW, dense_s=0.101), DDPStrategy),
    "int8": (
        dataclasses.replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.8)),
        lambda: Strategy(NarrowGradients("int8", rampup_begin_step=NUM_STEPS)),
    ),
    "dgc": (
        SLOW,
        lambda: DGCStrategy(rampup_begin_step=NUM_STEPS, rampup_step=1, sparsity=[1 - 0.256], keep_momentum=True),
    ),
    "local_sgd": (
        dataclasses.replace(SLOW, sparse_s=dict.fromkeys(DENSITIES, 0.8)),
        lambda: LocalSGDStrategy(8, NUM_STEPS, delay_steps=4),
    ),
}

FACTS = "a step takes 100 ms without communication and 1 s with all gradients, the link carries 80 Mb/s, latency 0.1 ms"
SENTENCES = {
    "int8": "int8, 61.5 s to the end; ddp would take 2.05 min, float16 86.1 s; not dgc, because each element must be "
    "sent 30 times on average, and 123 steps are left: that would be 25.6 %, and hardly faster. To write it down: "
    'strategy="int8"',
    "dgc": "dgc, 18.5 s to the end (25.6 % of each gradient is sent from step 7 on; each element must be sent 30 "
    "times on average, and 123 steps are left); ddp would take 2.05 min, float16 86.1 s, int8 61.5 s. To write it "
    "down: lowbw.DGCStrategy(rampup_begin_step=7, rampup_step=1, sparsity=[0.744], keep_momentum=True)",
    "local_sgd": "local_sgd, 12.3 s to the end (weights are averaged after every 8 steps, each average hidden behind "
    "4); ddp would take 2.05 min, float16 86.1 s, int8 61.5 s; not dgc, because each element must be sent 30 times on "
    "average, and 123 steps are left: that would be 25.6 %, and hardly faster. To write it down: "
    "lowbw.LocalSGDStrategy(k_steps=8, begin_step=7, delay_steps=4)",
}


class Wide(Tiny):
    """One layer is large enough for every payload."""

    def __init__(self, optimizer: Any = sgd) -> None:
        super().__init__(optimizer, data_by_step=True)
        self.wide, self.wider = torch.nn.Linear(16, WIDE), torch.nn.Linear(WIDE, 32)
        self.norm, self.widest = torch.nn.BatchNorm1d(WIDE), torch.nn.Linear(WIDE, WIDE)
        self.lr = 0.05

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.widest(self.wide(x + self.frozen(x)))))
        return self.head(torch.relu(self.wider(hidden)))


def fit(
    case: str,
    *,
    picks: bool = True,
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    model: Any = Wide,
    callbacks: tuple[Any, ...] = (),
    fits: int = 1,
    **knobs: Any,
) -> dict[str, Any]:
    torch.manual_seed(7)
    num_ranks, said = dist.get_world_size(), list[str]()
    measured, make_other = CASES[case]
    options = {"allow_local": case == "local_sgd", "pretrained": True, **knobs}
    strategy = AutoStrategy(**options) if picks else make_other()
    module, stop = model(), Stop(END)
    trainer = make_trainer(
        strategy, num_ranks, max_steps=STEPS, max_epochs=-1, callbacks=[Watcher(path, save_at), stop, *callbacks]
    )
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = give_measured(monkeypatch, measured)  # the ranks live on
        monkeypatch.setattr(auto_sparsity, "rank_zero_info", said.append)
        for number in range(fits):
            trainer.fit_loop.epoch_loop.max_steps, stop.at = (number + 1) * STEPS, (number + 1) * END
            trainer.fit(module, make_data(num_ranks, STEPS), ckpt_path=resume)
    warned = [str(each.message) for each in caught]
    result = {
        "weights": weights_of(module),
        "warned": warned,
        "said": said,
        "num_measured": len(given),
        "shown": repr(strategy),
    }
    if isinstance(strategy, Strategy):
        result |= {"method": strategy.method, "buffers": [digest_of(each) for each in module.buffers()]}
    return result


def digest_of(buffer: torch.Tensor) -> str:
    return str(buffer.tolist())


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[dict[str, Any]]]]:
    """Return a checkpoint of a run with a case, and what `fit` says of it: one run for all tests."""

    @functools.cache
    def run(case: str) -> tuple[str, list[dict[str, Any]]]:
        path = str(tmp_path_factory.mktemp(case) / "{}.ckpt")
        return path.format(LATER), run_ranks(partial(fit, case, path=path, save_at=(LATER,)), 2)

    return run


@functools.cache
def without_choosing(case: str) -> list[dict[str, Any]]:
    return run_ranks(partial(fit, case, picks=False), 2)


@pytest.mark.parametrize("case", CASES)
def test_it_becomes_what_it_has_chosen(case: str, chosen: Any) -> None:
    (_, found), expected = chosen(case), without_choosing(case)
    assert len({each["weights"] for each in found}) == 1
    assert [each["weights"] for each in found] == [each["weights"] for each in expected]
    if case == "ddp":
        assert [each["num_measured"] for each in found] == [0, 0]
        assert found[0]["said"] == [
            "AutoStrategy: a step takes 100 ms without communication and 101 ms with all gradients: whole "
            "gradients are sent, as with DDP; a dense exchange adds less than 5 % of a step. To write it down: "
            'strategy="ddp".'
        ]
    else:
        assert [each["num_measured"] for each in found] == [1, 1]
        assert found[0]["said"] == [f"AutoStrategy: {FACTS}: {SENTENCES[case]}."]
        methods = found[0]["method"], expected[0]["method"]
        assert type(methods[0].when) is type(methods[1].when)
        assert methods[0].what == methods[1].what
        assert [each["buffers"] for each in found] == [each["buffers"] for each in expected]


@pytest.mark.parametrize("case", CASES)
def test_a_resume_does_not_choose_anew(case: str, chosen: Any) -> None:
    path, whole = chosen(case)
    other = "ddp" if case != "ddp" else "dgc"  # it would choose now
    later = run_ranks(partial(fit, other, resume=path, allow_local=case == "local_sgd"), 2)
    assert [each["num_measured"] for each in later] == [0, 0]
    assert [each["weights"] for each in later] == [each["weights"] for each in whole]
    assert later[0]["method"] == whole[0]["method"]


def test_dgc_goes_on_with_the_weights_of_replicas(chosen: Any) -> None:
    one, other = run_ranks(partial(resume_by_dgc, chosen("local_sgd")[0]), 2)
    assert one == other
    assert isinstance(one.what, TopK)


def resume_by_dgc(path: str) -> Method:
    strategy = DGCStrategy(sparsity="auto")
    trainer = make_trainer(strategy, dist.get_world_size(), max_steps=STEPS, max_epochs=-1, callbacks=[Stop(END)])
    trainer.fit(Wide(), make_data(dist.get_world_size(), STEPS), ckpt_path=path)
    return strategy.method


@since_lightning_2_5
@pytest.mark.parametrize("case", ["int8", "local_sgd"])
def test_the_next_fit_chooses_anew(case: str, chosen: Any) -> None:
    (_, once), twice = chosen(case), run_ranks(partial(fit, case, fits=2), 2)
    assert [each["num_measured"] for each in twice] == [2, 2]
    assert len({each["weights"] for each in twice}) == 1
    assert twice[0]["weights"] != once[0]["weights"]


def test_a_search_for_a_learning_rate_is_no_run() -> None:
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
    results = run_ranks(partial(fit, "local_sgd", callbacks=(finder,)), 2)
    assert [each["num_measured"] for each in results] == [1, 1]
    assert len({each["weights"] for each in results}) == 1


def rmsprop(parameters: Any) -> RMSprop:
    return RMSprop(parameters, lr=1e-3)


class WithRMSprop(Wide):
    def __init__(self) -> None:
        super().__init__(rmsprop)


def test_it_does_not_take_what_is_not_measured() -> None:
    results = run_ranks(partial(fit, "dgc", model=WithRMSprop, allow_local=True), 2)
    assert isinstance(results[0]["method"].what, Narrow)
    (said,) = results[0]["said"]
    assert "not dgc, because its accuracy is measured with SGD, Adam and AdamW, not with RMSprop" in said
    assert "not local_sgd, because its accuracy is measured with SGD, not with RMSprop" in said


def dampened(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1)


class WithDampening(Wide):
    def __init__(self) -> None:
        super().__init__(dampened)


def test_an_optimizer_that_dgc_refuses_is_trained() -> None:
    results = run_ranks(partial(fit, "dgc", model=WithDampening), 2)
    assert isinstance(results[0]["method"].what, Narrow)
    assert "not dgc, because SGD with dampening=0.1 has no momentum correction" in results[0]["said"][0]


def fit_on_uneven_data() -> list[str]:
    said: list[str] = []
    strategy = AutoStrategy(allow_local=True, pretrained=True)
    trainer = make_trainer(strategy, dist.get_world_size(), max_steps=20, max_epochs=-1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, CASES["local_sgd"][0])
        monkeypatch.setattr(auto_sparsity, "rank_zero_info", said.append)
        trainer.fit(Wide(), make_data(dist.get_world_size(), 30 + dist.get_rank()))
    return said


def test_local_steps_are_not_taken_on_uneven_data() -> None:
    (said,) = run_ranks(fit_on_uneven_data, 2)[0]
    assert "int8, " in said
    assert "not local_sgd, because the ranks have different or unknown numbers of batches" in said


class Two(TwoOptimizers, Wide):
    """Two optimizers, both of which step in every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


def fit_two(**limits: int) -> tuple[int, int | None]:
    runs: list[Any] = []
    real = auto_sparsity.agreed
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, CASES["ddp"][0])
        monkeypatch.setattr(auto_sparsity, "agreed", lambda *args: (runs.append(args[1]), real(*args))[1])
        trainer = make_trainer(AutoStrategy(), dist.get_world_size(), **limits)
        trainer.fit(Two(), make_data(dist.get_world_size(), 60))
    (run,) = runs
    return run.num_done, run.num_steps


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_steps": 120, "max_epochs": -1}])
def test_the_length_of_a_run_with_two_optimizers(limits: dict[str, int]) -> None:
    """Each takes 60 steps, where Lightning says 60 or 120 in all."""
    num_done, num_steps = run_ranks(partial(fit_two, **limits), 2)[0]
    assert num_done == NUM_STEPS
    assert num_steps is not None
    assert abs(num_steps - 60) <= 5


class Small(Tiny):
    """No matrix of 1,024 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)
        self.wider, self.head = torch.nn.Linear(32, 31), torch.nn.Linear(31, 5)


def test_small_tensors_are_no_reason_to_send_all_bits() -> None:
    results = run_ranks(partial(fit, "dgc", model=Small), 2)
    assert isinstance(results[0]["method"].what, Narrow)
    assert "not dgc, because no tensor that is trained has min_numel elements" in results[0]["said"][0]


@pytest.mark.parametrize("case", ["int8", "local_sgd"])
def test_two_levels(case: str) -> None:
    results = run_ranks(partial(fit, case, topology=2), 4)
    assert len({each["weights"] for each in results}) == 1
    assert results[0]["method"].where.topology == 2
    assert f": {case}, " in results[0]["said"][0]


def test_on_one_node_it_is_ddp() -> None:
    result = run_ranks(partial(fit, "dgc", topology=2), 2)[0]
    assert result["num_measured"] == 0
    assert result["weights"] == without_choosing("ddp")[0]["weights"]
    assert [each for each in result["warned"] if "all ranks are on one node" in each] == [
        "AutoStrategy, topology=2: all ranks are on one node, so there is one level only, and no slow network between "
        "nodes: this trains as DDP."
    ]


def measure_all() -> Measured:
    found: list[Measured] = []
    real = AutoSparsity._measure

    def measure(auto: AutoSparsity, *timed: float) -> Measured:
        found.append(real(auto, *timed))
        return found[0]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(StepTimes, "medians", lambda _: (SLOW.step_s, SLOW.dense_s + 10.0))  # few steps are left
        monkeypatch.setattr(AutoSparsity, "_measure", measure)
        trainer = make_trainer(AutoStrategy(), dist.get_world_size(), max_steps=NUM_STEPS + 1, max_epochs=-1)
        trainer.fit(Wide(), make_data(dist.get_world_size(), STEPS))
    return found[0]


def test_it_measures_all_methods() -> None:
    for measured in run_ranks(measure_all, 2):
        assert all(0 < measured.narrow_s[name] < 10 for name in ("float16", "int8"))
        assert 0 < measured.average_s < 10


@pytest.mark.parametrize("value_dtype", NARROW_NAMES)
def test_the_time_of_the_work_is_measured(value_dtype: str) -> None:
    fixed_s, sample_s = seconds_of_narrow_work(value_dtype, torch.device("cpu"))
    assert fixed_s == 0 < sample_s < 10


@pytest.mark.parametrize(("launches_s", "of_sample_s"), [(0.4e-3, 0.01e-3), (0.4e-3, 0.0), (0.0, 2e-3)])
def test_launches_are_not_multiplied_on_a_gpu(launches_s: float, of_sample_s: float) -> None:
    def time_of(numel: int) -> float:
        return launches_s + of_sample_s * numel / measuring.SAMPLE

    times = measuring._fixed_and_of_sample(time_of, torch.device("cuda"))
    assert times == (pytest.approx(launches_s), pytest.approx(of_sample_s))


def test_it_says_what_it_will_do(chosen: Any) -> None:
    assert repr(AutoStrategy()) == "AutoStrategy(what takes least time, chosen after 7 steps; topology='flat')"
    shown, dense = (chosen(case)[1][0]["shown"] for case in ("int8", "ddp"))
    assert shown == "AutoStrategy(every step, whole gradients as int8, from step 7; topology='flat')"
    assert dense == "AutoStrategy(every step, whole gradients; topology='flat')"
    with pytest.raises(ConfigurationError, match="allow_local=1"):
        AutoStrategy(allow_local=1)  # type: ignore[arg-type]
