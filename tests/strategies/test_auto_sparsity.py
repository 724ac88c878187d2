"""`sparsity="auto"` in a fit: when it is chosen, by all ranks alike, and that a resume does not choose anew."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy

from lightning_lowbw import ConfigurationError, DGCStrategy, EveryStep, SparsityWarmup
from lightning_lowbw.engine import auto
from lightning_lowbw.engine.auto import DENSITIES, Measured, Run, plan
from lightning_lowbw.engine.measuring import seconds_of_work
from lightning_lowbw.strategies import auto_sparsity, step_times
from lightning_lowbw.strategies.step_times import NUM_STEPS, StepTimes
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.link import Link
from tests.measured import give_measured
from tests.ranks import run_ranks
from tests.tiny import MIN_NUMEL, Stop, Tiny, Watcher, make_data, make_trainer, sgd, since_lightning_2_5, weights_of

CHOSEN_AFTER = NUM_STEPS
STEPS, END = 130, 20  # a run is planned for STEPS, and stopped after END: all is chosen by then
BEFORE, AFTER = CHOSEN_AFTER - 2, CHOSEN_AFTER + 5
LINK = Link(1e-4, 1e7)
SLOW = Measured(0.1, 1.0, dict.fromkeys(DENSITIES, 0.2), LINK)  # no density fits, the least that is enough is taken
FAST = Measured(0.1, 0.101, dict.fromkeys(DENSITIES, 0.2), LINK)


def fit(
    measured: Measured | None,
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    callbacks: tuple[Any, ...] = (),
    ddp: bool = False,
    optimizer: Any = sgd,
    num_steps: int = STEPS,
    **knobs: Any,
) -> dict[str, Any]:
    """Train; what is measured is given, unless it is None."""
    torch.manual_seed(7)
    num_ranks, said = dist.get_world_size(), list[str]()
    runs = list[Run]()
    knobs = {"min_numel": MIN_NUMEL, "selection": "exact", **knobs}
    strategy: Any = DDPStrategy() if ddp else DGCStrategy(**knobs)
    model = Tiny(optimizer, data_by_step=True)
    ends = [Watcher(path, save_at), Stop(END)]
    trainer = make_trainer(strategy, num_ranks, max_steps=num_steps, max_epochs=-1, callbacks=[*ends, *callbacks])
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # the ranks live on
        given = [] if measured is None else give_measured(monkeypatch, measured)
        monkeypatch.setattr(auto_sparsity, "rank_zero_info", said.append)
        monkeypatch.setattr(
            auto_sparsity, "plan", lambda given, run, budget: (runs.append(run), plan(given, run, budget))[1]
        )
        trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=resume)
    if ddp:
        return {"weights": weights_of(model)}
    (worker,) = strategy.workers
    return {
        "weights": weights_of(model),
        "when": strategy.method.when,
        "said": said,
        "warned": [str(each.message) for each in caught],
        "num_measured": len(given),
        "runs": runs,
        "density": worker.last_density,
        "has_residuals": worker.has_residuals,
    }


RUNS: dict[str, dict[str, Any]] = {"slow": {"measured": SLOW}, "fast": {"measured": FAST}}
RUNS["ddp"] = {"measured": None, "ddp": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[dict[str, Any]]]]:
    """Return the path of checkpoints of a run, by the step, and what `fit` says of it: one run for all tests."""

    @functools.cache
    def run(name: str) -> tuple[str, list[dict[str, Any]]]:
        path = str(tmp_path_factory.mktemp(name) / "{}.ckpt")
        return path, run_ranks(partial(fit, path=path, save_at=(3, BEFORE, AFTER), **RUNS[name]), 2)

    return run


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_with_adam_elements_are_sent_more_often(optimizer: Any) -> None:
    (result, _) = run_ranks(partial(fit, SLOW, optimizer=partial(optimizer, lr=1e-3), num_steps=300), 2)
    assert [run.is_adam for run in result["runs"]] == [True]
    assert result["when"].stairs == pytest.approx([1 - 0.256])  # 60 of the steps that are left
    assert "each element must be sent 60 times on average" in result["said"][0]


def test_it_is_chosen_once_and_alike_and_a_resume_keeps_it(trained: Any) -> None:
    path, whole = trained("slow")
    first = whole[0]
    assert [result["num_measured"] for result in whole] == [1, 1]
    assert len({result["weights"] for result in whole}) == 1
    assert first["when"].stairs == pytest.approx([1 - 0.256])  # 30 of the steps that are left
    assert first["when"].rampup_begin_step >= CHOSEN_AFTER
    assert first["density"] == pytest.approx(0.256)
    assert first["said"] == [
        'DGCStrategy, sparsity="auto": a step takes 100 ms without communication and 1 s with all gradients, the link '
        "carries 80 Mb/s, latency 0.1 ms: 25.6 % of each gradient is sent from step 7 on; each element must be sent "
        "30 times on average, and 123 steps are left."
    ]
    later = run_ranks(partial(fit, FAST, resume=path.format(AFTER)), 2)
    assert [result["num_measured"] for result in later] == [0, 0]
    assert later[0]["when"] == first["when"]
    assert later[0]["said"] == [
        "DGCStrategy: every step, the 25.6 % largest elements of each tensor as bfloat16, from step 7, as chosen "
        "before the checkpoint was saved. A resumed run does not choose again; to change it, write it down, as in "
        "lightning_lowbw.DGCStrategy(sparsity=[0.999])."
    ]
    assert [result["weights"] for result in later] == [result["weights"] for result in whole]
    anew = run_ranks(partial(fit, SLOW, resume=path.format(BEFORE)), 2)
    assert [result["num_measured"] for result in anew] == [1, 1]


def test_where_the_link_is_fast_it_is_ddp_to_the_bit(trained: Any) -> None:
    (_, (found, other)), (_, (ddp, _)) = trained("fast"), trained("ddp")
    assert found["when"].is_auto
    assert not found["has_residuals"]
    assert found["density"] == 1.0
    assert found["weights"] == other["weights"] == ddp["weights"]
    assert found["num_measured"] == 0
    assert found["said"] == [
        'DGCStrategy, sparsity="auto": a step takes 100 ms without communication and 101 ms with all gradients: whole '
        "gradients are sent, as with DDP; a dense exchange adds less than 5 % of a step."
    ]


def test_a_dense_choice_is_kept_by_a_resume(trained: Any) -> None:
    path, whole = trained("fast")
    later = run_ranks(partial(fit, SLOW, resume=path.format(AFTER)), 2)
    assert later[0]["num_measured"] == 0
    assert later[0]["weights"] == whole[0]["weights"]
    assert [line.split(", as chosen")[0] for line in later[0]["said"]] == [
        "DGCStrategy: whole gradients in every step, as with DDP"
    ]


def test_a_dense_choice_for_a_short_trial_is_made_anew_for_the_long_run(tmp_path: Any) -> None:
    path = str(tmp_path / "{}.ckpt")
    (trial, _) = run_ranks(partial(fit, SLOW, path=path, save_at=(CHOSEN_AFTER,), num_steps=END), 2)
    assert trial["when"].is_auto
    assert trial["said"][0].endswith("13 steps are left.")
    for resumed in run_ranks(partial(fit, SLOW, resume=path.format(CHOSEN_AFTER), num_steps=150), 2):
        assert resumed["said"][0] == (
            "DGCStrategy: whole gradients were chosen for a run of 20 steps, and this one has 150: it measures and "
            "chooses again."
        )
        assert resumed["when"].stairs == pytest.approx([1 - 0.256])
        assert resumed["num_measured"] == 1


def test_fine_tuning_has_no_warm_up(trained: Any) -> None:
    by_keyword = run_ranks(partial(fit, SLOW, pretrained=True), 2)[0]["when"]
    assert (by_keyword.rampup_begin_step, by_keyword.stairs) == (CHOSEN_AFTER, pytest.approx([1 - 0.256]))
    by_checkpoint = run_ranks(partial(fit, SLOW, resume=trained("ddp")[0].format(BEFORE)), 2)[0]["when"]
    assert by_checkpoint.rampup_begin_step == BEFORE + CHOSEN_AFTER


def test_a_callback_that_gives_numbers_is_obeyed() -> None:
    warmup = SparsityWarmup(begin_step=4, steps=1, sparsity=[0.9])
    result = run_ranks(partial(fit, SLOW, callbacks=(warmup,)), 2)[0]
    assert result["num_measured"] == 0
    assert result["when"].stairs == (0.9,)


def fit_and_measure(**knobs: Any) -> dict[str, Any]:
    """Measure even where all that could be saved is less than what that takes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(auto, "MEASURING_S", 0.0)
        return fit(None, budget=1e-9, **knobs)


def test_it_measures() -> None:
    """On loopback; whatever it chooses, all ranks do, and it says something."""
    results = run_ranks(fit_and_measure, 2)
    assert len({(result["weights"], result["when"]) for result in results}) == 1
    assert "carries" in results[0]["said"][0]


def test_on_two_levels_the_link_is_that_between_nodes() -> None:
    results = run_ranks(partial(fit_and_measure, topology=2), 4)
    assert len({(result["weights"], result["when"]) for result in results}) == 1
    assert "carries" in results[0]["said"][0]


def test_a_run_too_short_to_save_what_measuring_takes_is_ddp(trained: Any) -> None:
    """123 steps. A fifth of what is waited in them is sure to be saved."""
    short = dataclasses.replace(SLOW, dense_s=SLOW.step_s + 0.03)
    found, ddp = run_ranks(partial(fit, short), 2)[0], trained("ddp")[1][0]
    assert found["num_measured"] == 0
    assert found["weights"] == ddp["weights"]
    assert found["said"] == [
        'DGCStrategy, sparsity="auto": a step takes 100 ms without communication and 130 ms with all gradients: whole '
        "gradients are sent, as with DDP; 123 steps are left, which wait 3.69 s for gradients in all; the link is "
        "measured, for 1 s, only from 5 s on."
    ]
    longer = dataclasses.replace(SLOW, dense_s=SLOW.step_s + 0.05)
    assert run_ranks(partial(fit, longer), 2)[0]["num_measured"] == 1


def fit_with_other_facts_on_a_rank() -> EveryStep:
    own = dataclasses.replace(SLOW, step_s=0.1 + 0.1 * dist.get_rank())
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, own)
        for module in (auto_sparsity, step_times):
            monkeypatch.setattr(module, "num_steps_of", lambda _: STEPS if dist.get_rank() else CHOSEN_AFTER + 5)
        strategy = DGCStrategy(min_numel=MIN_NUMEL)
        trainer = make_trainer(strategy, dist.get_world_size(), callbacks=[Stop(END)])
        trainer.fit(Tiny(), make_data(dist.get_world_size(), STEPS))
    when = strategy.method.when
    assert isinstance(when, EveryStep)
    return when


def test_ranks_that_measure_something_else_choose_alike() -> None:
    one, other = run_ranks(fit_with_other_facts_on_a_rank, 2)
    assert one == other
    assert one.is_auto  # for five steps


def fit_small(min_numel: int = 16384, **options: Any) -> list[str]:
    """Train without tensors that are large enough, or with some; return what is said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(auto_sparsity, "rank_zero_info", said.append)
        trainer = make_trainer(DGCStrategy(min_numel=min_numel), dist.get_world_size(), **options)
        trainer.fit(Tiny(), make_data(dist.get_world_size(), 10))
    return said


def test_a_model_without_large_tensors_is_trained_dense_and_this_is_said() -> None:
    for (said,) in run_ranks(fit_small, 2):
        assert said == (
            'DGCStrategy, sparsity="auto": whole gradients are sent, because no tensor that is trained has min_numel '
            "elements and is not excluded."
        )


def test_a_run_that_ends_before_anything_is_chosen_is_told_so() -> None:
    """Only there: a run that is just long enough chooses, and says what."""
    told = (
        "DGCStrategy: this run has 6 more optimizer steps, and the first 7 send whole gradients and are "
        "measured: nothing will be compressed."
    )
    for num_steps, is_told in ((CHOSEN_AFTER - 1, True), (CHOSEN_AFTER, False)):
        (said,) = run_ranks(partial(fit_small, min_numel=MIN_NUMEL, max_steps=num_steps), 2)[0]
        assert (said == told) == is_told


def test_validation_is_not_counted() -> None:
    """It comes after every step, and takes longer than all steps together."""
    assert max(run_ranks(partial(seconds_of_a_step, 0.2), 2)) < 0.2


class SlowToValidate(Tiny):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds)


def seconds_of_a_step(validation_s: float) -> float:
    """Return what a dense step takes by the strategy's clock."""
    found: list[tuple[float, float]] = []
    real = StepTimes.medians
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(StepTimes, "medians", lambda times: found.append(real(times)) or found[0])
        strategy = DGCStrategy(min_numel=MIN_NUMEL)
        trainer = make_trainer(strategy, dist.get_world_size(), val_check_interval=1, limit_val_batches=1)
        data = make_data(dist.get_world_size(), CHOSEN_AFTER + 2)
        trainer.fit(SlowToValidate(validation_s), data, data)
    return found[0][1]


def test_an_early_checkpoint_of_its_own_is_not_fine_tuning(trained: Any) -> None:
    (run,) = run_ranks(partial(fit, SLOW, resume=trained("slow")[0].format(3)), 2)[0]["runs"]
    assert not run.is_pretrained
    assert (run.num_done, run.num_steps) == (3 + CHOSEN_AFTER, STEPS)


def test_overlap_is_that_of_the_fit_which_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "{}.ckpt")
    step = CHOSEN_AFTER + 1
    assert run_ranks(partial(fit, SLOW, path, (step,), overlap=True), 2)[0]["when"].overlap
    assert not run_ranks(partial(fit, SLOW, resume=path.format(step)), 2)[0]["when"].overlap


def fit_after_a_search(finder: Callback) -> tuple[bool, list[int]]:
    """Return whether it is still open, and at which steps it has chosen."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = give_measured(monkeypatch, SLOW)
        strategy = DGCStrategy(min_numel=MIN_NUMEL)
        callbacks = [finder, Stop(END)]
        trainer = make_trainer(strategy, dist.get_world_size(), callbacks=callbacks, max_steps=STEPS, max_epochs=-1)
        trainer.fit(WithRate(), make_data(dist.get_world_size(), STEPS))
    return strategy.method.when.is_auto, steps  # type: ignore[union-attr]


class WithRate(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05


def test_a_search_for_a_learning_rate_is_no_run() -> None:
    """Nothing is chosen in it; the run that follows chooses."""
    finder = LearningRateFinder(num_training_steps=STEPS, early_stop_threshold=None)
    for is_auto, steps in run_ranks(partial(fit_after_a_search, finder), 2):
        assert steps == [CHOSEN_AFTER]
        assert not is_auto


def resume_by_default(path: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(SLOW, resume=path)
    return str(caught.value)


def test_a_run_with_numbers_does_not_become_dense_by_a_resume(tmp_path: Path) -> None:
    """What has not been sent would be lost."""
    path = str(tmp_path / "{}.ckpt")
    run_ranks(partial(fit, None, path, (5,), sparsity=[0.9]), 2)
    for message in run_ranks(resume_by_default, 2, path.format(5)):
        assert "Go on with the schedule it was trained with" in message
        assert "'auto'" in message


@pytest.mark.parametrize(
    ("num_ranks", "knobs", "word", "warning"),
    [
        (
            1,
            {},
            "one rank",
            "DGCStrategy with one rank: there is no other rank to communicate with, so this trains as without it. Set "
            "Trainer(devices=..., num_nodes=...) for more.",
        ),
        (
            2,
            {"topology": 2},
            "one node",
            "DGCStrategy, topology=2: all ranks are on one node, so there is one level only, and no slow network "
            "between nodes: this trains as DDP.",
        ),
    ],
    ids=["one rank", "one node"],
)
def test_where_there_is_no_link_nothing_is_measured(
    num_ranks: int, knobs: dict[str, Any], word: str, warning: str
) -> None:
    result, *_ = run_ranks(partial(fit, SLOW, **knobs), num_ranks)
    assert (result["num_measured"], result["said"]) == (0, [])
    assert [each for each in result["warned"] if word in each] == [warning]
    assert result["when"].is_auto


def fit_twice() -> int:
    strategy, stop = DGCStrategy(min_numel=MIN_NUMEL), Stop(END)
    trainer = make_trainer(strategy, dist.get_world_size(), max_steps=STEPS, max_epochs=-1, callbacks=[stop])
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = give_measured(monkeypatch, SLOW)
        for number in (1, 2):
            trainer.fit_loop.epoch_loop.max_steps, stop.at = number * STEPS, number * END
            trainer.fit(Tiny(), make_data(dist.get_world_size(), STEPS))
    return len(steps)


@since_lightning_2_5
def test_the_next_fit_chooses_anew() -> None:
    assert run_ranks(fit_twice, 2) == [2, 2]


@pytest.mark.parametrize("what", [TopK(), TopK(chunk=4096, value_dtype="int2"), TopK(value_dtype="float32")])
def test_the_time_of_the_work_is_measured_at_every_density(what: TopK) -> None:
    seconds = partial(seconds_of_work, what, num_participants=2, device=torch.device("cpu"))
    assert all(0 < seconds(density) < 10 for density in (DENSITIES[0], DENSITIES[-1]))


def test_the_choice_is_a_schedule_in_plain_values(trained: Any) -> None:
    """It goes into the checkpoint, which loads without this package."""
    result = trained("slow")[1][0]
    assert all(isinstance(value, (int, float, bool, tuple)) for value in dataclasses.asdict(result["when"]).values())


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Batches whose number is not known."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def lengths_of_streams(max_epochs: int, assumed: int) -> list[tuple[int, int | None]]:
    """Return after how many steps a run of epochs of 12 batches is planned, and how long it is thought to be."""
    num_ranks, runs = dist.get_world_size(), list[Run]()
    data = torch.utils.data.DataLoader(Stream(make_data(num_ranks, 12)), batch_size=None)
    trainer = make_trainer(DGCStrategy(min_numel=MIN_NUMEL), num_ranks, max_epochs=max_epochs)
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, SLOW)
        monkeypatch.setattr(auto_sparsity, "ASSUMED_STEPS", assumed)
        monkeypatch.setattr(auto_sparsity, "why_dense", lambda step_s, dense_s, run, *_, **__: runs.append(run))
        trainer.fit(Tiny(), data)
    return [(run.num_done, run.num_steps) for run in runs]


@pytest.mark.parametrize(
    ("max_epochs", "assumed", "known"),
    [(3, 10_000, [(13, 36)]), (10, 100, [(10, None)]), (1, 10_000, [(7, None)])],
    ids=["learnt from the first epoch", "the first epoch is long", "there is one epoch"],
)
def test_the_length_of_a_stream_is_learnt(max_epochs: int, assumed: int, known: list[Any]) -> None:
    assert run_ranks(lengths_of_streams, 2, max_epochs, assumed) == [known] * 2
