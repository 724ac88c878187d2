"""Data of different or unknown lengths: as with equal ones while all ranks have data, then an end of all together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from lightning_lowbw import (
    AveragingSchedule,
    ConfigurationError,
    DisagreementError,
    LocalSGDStrategy,
)
from tests.ranks import run_ranks
from tests.strategies.watching import SPARSE, Kill, Trace, uneven_loader, weights
from tests.tiny import BATCH, Constant, Tiny, TwoOptimizers, make_trainer


class Stream(IterableDataset):
    """The samples of another loader, one after the other; nobody knows how many."""

    def __init__(self, loader: DataLoader) -> None:
        self.samples = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.samples)):  # type: ignore[arg-type]
            yield self.samples[index]


def stream(num_batches: int) -> DataLoader:
    return DataLoader(Stream(uneven_loader(num_batches)), batch_size=BATCH)


class Decaying(Tiny):
    """With a learning rate that falls after every third step, and after every epoch in a second scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]
        intervals = ["step", "epoch"]
        return [optimizer], [
            {"scheduler": scheduler, "interval": interval}
            for scheduler, interval in zip(schedulers, intervals, strict=True)
        ]


class Two(TwoOptimizers):
    """The second optimizer steps in every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()


METHODS: dict[str, dict[str, Any]] = {
    "local_sgd": {},
    "begins later": {"begin_step": 4},
    "first_lr_decay": {"begin_step": "first_lr_decay"},
    "k_steps=1": {"k_steps": 1},
    "sparse_loco": {"compression": SPARSE},
    "int8": {"compression": "int8"},
    "diloco": {"outer": "nesterov"},
    "streaming_diloco": {"outer": "nesterov", "num_fragments": 2, "delay_steps": 1},
}


def make(method: str, **kwargs: Any) -> LocalSGDStrategy:
    return LocalSGDStrategy(**{"k_steps": 3, "begin_step": 0, **METHODS[method], **kwargs})


def fit(method: str, data: DataLoader, model: Tiny, uneven: str = "finish", **options: Any) -> dict[str, Any]:
    trace = Trace()
    options = {"max_epochs": 2, **options, "callbacks": [trace, *options.get("callbacks", [])]}
    strategy = make(method, uneven=uneven)
    trainer = make_trainer(strategy, dist.get_world_size(), **options)
    trainer.fit(model, data, uneven_loader(1))
    return {
        "steps": trainer.global_step,
        "steps of workers": [worker.step for worker in strategy.workers],
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "end": weights(model),
        "shown": trace.shown,
        "after": trace.after,
        "averages": trace.averages,
    }


# Equal lengths -----------------------------------------------------------------------------------------------------


def fit_known_and_unknown(method: str, model: type[Tiny], options: dict[str, Any]) -> list[dict[str, Any]]:
    return [fit(method, data, model(), **options) for data in (uneven_loader(7), stream(7))]


@pytest.mark.parametrize(
    ("method", "model", "options"),
    [
        *[(method, Decaying, {}) for method in ("local_sgd", "first_lr_decay", "int8", "streaming_diloco")],
        ("local_sgd", Decaying, {"accumulate_grad_batches": 2}),
        ("local_sgd", Decaying, {"val_check_interval": 3}),
        ("local_sgd", Decaying, {"max_steps": 9}),
        ("begins later", Two, {}),
        ("sparse_loco", Two, {"val_check_interval": 3}),
    ],
)
def test_equal_lengths_that_are_unknown_are_trained_to_the_bits_of_known_ones(
    method: str, model: type[Tiny], options: dict[str, Any]
) -> None:
    for known, unknown in run_ranks(fit_known_and_unknown, 2, method, model, options):
        assert unknown == known


# Other lengths -----------------------------------------------------------------------------------------------------


def fit_stream(method: str, policy: str, model: type[Tiny], lengths: list[int], **options: Any) -> dict[str, Any]:
    """Train on data whose lengths are unknown, and on the same data with known lengths, which changes no bit."""
    unknown, known = (fit_lengths(load, method, policy, model, lengths, **options) for load in (stream, uneven_loader))
    assert known == unknown
    return unknown


def fit_lengths(
    load: Callable[[int], DataLoader], method: str, policy: str, model: type[Tiny], lengths: list[int], **options: Any
) -> dict[str, Any]:
    return fit(method, load(lengths[dist.get_rank()]), model(), policy, **options)


def agreed(results: list[dict[str, Any]], *, shown: bool = True) -> int:
    """Return the number of steps, after which everything is the same on all ranks."""
    for name in ("steps", "steps of workers", "lr", "end", *(["shown"] if shown else [])):
        assert all(result[name] == results[0][name] for result in results), name
    return results[0]["steps"]


@pytest.mark.parametrize(
    ("method", "policy", "steps"),
    [
        ("local_sgd", "finish", 20),
        ("local_sgd", "stop", 18),  # after 7 batches the next average comes after 9
        ("diloco", "finish", 20),
        ("begins later", "finish", 20),
        ("first_lr_decay", "stop", 16),  # local after step 4, and averages after 7, 10, 13 and 16
        ("k_steps=1", "finish", 14),  # every step needs all ranks
        ("sparse_loco", "finish", 18),  # equal weights
        ("int8", "stop", 18),
    ],
)
def test_ranks_with_more_data_finish_or_stop(method: str, policy: str, steps: int) -> None:
    results = run_ranks(fit_stream, 2, method, policy, Decaying, [7, 10])
    # In synchronous steps buffers are those of rank 0 in each forward pass, as in DDP.
    assert agreed(results, shown=method != "k_steps=1") == steps


def test_averages_that_are_hidden_are_waited_for() -> None:
    for lengths in ([6, 10], [10, 7]):
        steps = agreed(run_ranks(fit_stream, 2, "streaming_diloco", "finish", Decaying, lengths))
        assert 2 * min(lengths) <= steps < 20


def test_several_optimizers_end_together() -> None:
    for method in ("local_sgd", "sparse_loco"):
        results = run_ranks(fit_stream, 2, method, "finish", Two, [7, 11])
        agreed(results)
        assert results[0]["steps of workers"][0] == (22 if method == "local_sgd" else 18)
    results = run_ranks(fit_stream, 2, "begins later", "stop", Two, [3, 6])  # the first epoch is synchronous
    agreed(results, shown=False)
    assert results[0]["steps of workers"] == [6, 2]


def test_three_ranks_end_one_after_the_other() -> None:
    assert agreed(run_ranks(fit_stream, 3, "local_sgd", "finish", Decaying, [3, 11, 7])) == 22


def fit_with_views(folder: str, lengths: list[int], **options: Any) -> dict[str, Any]:
    results = []
    for name, load in (("unknown", stream), ("known", uneven_loader)):
        save = ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=4, save_top_k=-1)
        options = {**options, "callbacks": [save], "enable_checkpointing": True}
        result = fit("local_sgd", load(lengths[dist.get_rank()]), Decaying(), "finish", **options)
        results.append({**result, "saved": sorted(os.listdir(f"{folder}/{name}"))})
    assert results[1] == results[0]
    return results[0]


def test_checkpoints_by_steps_come_at_the_same_steps(tmp_path: Any) -> None:
    results = run_ranks(fit_with_views, 2, str(tmp_path), [6, 11])
    # 8 in the first epoch, where all are needed; 6 of rank 0 in the second one, and again all for the 16th
    assert agreed(results) == 16
    assert [name for name in results[0]["saved"] if name.endswith(".ckpt")] == [
        f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 4), (0, 8), (1, 12), (1, 16))
    ]


def test_validation_in_the_middle_of_an_epoch_ends_it_where_a_rank_is_out_of_data() -> None:
    results = run_ranks(partial(fit_stream, val_check_interval=4), 2, "local_sgd", "finish", Decaying, [6, 11])
    assert agreed(results) == 16
    assert len(results[0]["shown"]) == 2 * (1 + 4) + 1  # before and after each, and the end


def test_a_step_that_comes_early_waits_for_those_who_accumulate() -> None:
    """Rank 0 takes its third step with its fifth batch, and rank 1 with the sixth, which validation follows."""
    options = {"val_check_interval": 6, "accumulate_grad_batches": 2}
    # Lightning refuses a known length below the interval.
    results = run_ranks(partial(fit_lengths, stream, **options), 2, "local_sgd", "finish", Decaying, [5, 11])
    assert agreed(results) == 6


def test_a_validation_interval_is_a_fraction_of_the_longest_epoch() -> None:
    load = partial(fit_lengths, uneven_loader, val_check_interval=0.5)
    # after batches 5 and 10, before which rank 0 has ended
    results = run_ranks(load, 2, "local_sgd", "finish", Decaying, [6, 11])
    assert agreed(results) == 20
    assert len(results[0]["shown"]) == 2 * (1 + 4) + 1


class Reloading(Decaying):
    """Each epoch has other data, whose lengths are equal in the second one alone."""

    def train_dataloader(self) -> DataLoader:
        lengths = [[3, 5], [4, 4], [6, 2]][self.trainer.current_epoch]
        return uneven_loader(lengths[self.trainer.global_rank])


def fit_reloading() -> tuple[int, str, list[int]]:
    trace, strategy = Trace(), make("local_sgd")
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "callbacks": [trace]}
    model, trainer = Reloading(), make_trainer(strategy, 2, **options)
    averages: list[int] = []

    class Averages(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            averages.append(strategy.workers[0].num_averages)

    trainer.callbacks.append(Averages())  # type: ignore[attr-defined]
    trainer.fit(model, val_dataloaders=uneven_loader(1))
    return trainer.global_step, weights(model), averages


def test_data_that_are_loaded_anew_may_have_other_lengths() -> None:
    (steps, first, averages), (_, second, _) = run_ranks(fit_reloading, 2)
    assert steps == 5 + 4 + 6
    assert first == second
    assert averages == [2, 3, 6]  # after 3 and 5 steps; 8; 11, 14 and 15


class StopInMidEpoch(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 4


class Worse(Decaying):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("worse", float(self.trainer.current_epoch))


@pytest.mark.parametrize(
    ("stop", "options", "steps"),
    [
        (EarlyStopping("worse", patience=1), {"max_epochs": 6, "min_epochs": 4}, 40),
        (StopInMidEpoch(), {"max_epochs": 6, "min_epochs": 1}, 10),  # goes on to the end of the first epoch
        (StopInMidEpoch(), {"max_epochs": 6}, 4),
        (Callback(), {"max_steps": 9}, 9),
    ],
)
def test_a_training_that_stops_early_ends_on_all_ranks(stop: Callback, options: dict[str, Any], steps: int) -> None:
    fits = partial(fit_stream, callbacks=[stop], **options)
    assert agreed(run_ranks(fits, 2, "local_sgd", "finish", Worse, [7, 10])) == steps


def fit_with_a_timer() -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit_stream("local_sgd", "finish", Decaying, [6, 11], callbacks=[Timer(duration={"hours": 1})])
    return str(caught.value)


def test_timers_are_refused_where_a_rank_may_have_no_batch() -> None:
    assert all("broadcast the time of rank 0" in message for message in run_ranks(fit_with_a_timer, 2))


def average(k_steps: int, policy: str) -> list[float]:
    models = []
    for load in (stream, uneven_loader):
        models.append(Constant())
        trainer = make_trainer(LocalSGDStrategy(k_steps, begin_step=0, uneven=policy), 2)
        trainer.fit(models[-1], load([1, 3][dist.get_rank()]))
    return [float(model.weight) for model in models]


def test_those_that_train_longer_weigh_more() -> None:
    # no average before the end of both
    assert run_ranks(average, 2, 4, "finish") == [[pytest.approx((1 * 1.0 + 3 * 6.0) / 4)] * 2] * 2
    # the mean of 1 and 4 by 1 and 2 batches, where rank 1 stops, or goes on alone
    assert run_ranks(average, 2, 2, "stop") == [[pytest.approx(3.0)] * 2] * 2
    assert run_ranks(average, 2, 2, "finish") == [[pytest.approx(5.0)] * 2] * 2


def fit_and_resume(method: str, load: Callable[[int], DataLoader], policy: str, folder: str) -> list[tuple[int, str]]:
    """Return the steps and weights at the end of a run, and of its resume from the checkpoint of its first epoch."""
    ends: list[tuple[int, str]] = []
    save = ModelCheckpoint(folder, save_top_k=-1)
    for is_resume in (False, True):
        model = Decaying()
        options: dict[str, Any] = {} if is_resume else {"callbacks": [save], "enable_checkpointing": True}
        trainer = make_trainer(make(method, uneven=policy), 2, max_epochs=2, **options)
        ckpt_path = next((f"{folder}/{each}" for each in os.listdir(folder) if "epoch=0" in each), None)
        trainer.fit(model, load([5, 7][dist.get_rank()]), uneven_loader(1), ckpt_path=ckpt_path)
        ends.append((trainer.global_step, weights(model)))
    return ends


@pytest.mark.parametrize("load", [stream, uneven_loader])
@pytest.mark.parametrize(
    ("method", "policy"), [("local_sgd", "finish"), ("local_sgd", "stop"), ("sparse_loco", "stop")]
)
def test_a_resume_after_an_uneven_epoch_is_exact(
    method: str, policy: str, load: Callable[[int], DataLoader], tmp_path: Any
) -> None:
    for whole, resumed in run_ranks(fit_and_resume, 2, method, load, policy, str(tmp_path)):
        assert resumed == whole


class OneCycle(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=num_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def rates(method: str) -> tuple[list[float], str]:
    found: list[float] = []

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            found.append(trainer.optimizers[0].param_groups[0]["lr"])

    result = fit(method, uneven_loader([7, 10][dist.get_rank()]), OneCycle(), callbacks=[Rates()])
    return found[:7], result["end"]


@pytest.mark.parametrize("method", ["local_sgd", "k_steps=1"])
def test_schedulers_have_the_number_of_steps_of_the_longest_data(method: str) -> None:
    first, second = run_ranks(rates, 2, method)
    assert first == second


# Two levels --------------------------------------------------------------------------------------------------------


def fit_on_nodes(load: Callable[[int], DataLoader]) -> tuple[int, str]:
    strategy = LocalSGDStrategy(3, begin_step=1, topology=2)
    trainer, model = make_trainer(strategy, 4, max_epochs=2), Decaying()
    trainer.fit(model, load([6, 5, 9, 11][dist.get_rank()]), uneven_loader(1))
    return trainer.global_step, weights(model)


def test_the_ranks_of_a_node_end_with_the_first_of_them() -> None:
    ends = [end for load in (stream, uneven_loader) for end in run_ranks(fit_on_nodes, 4, load)]
    assert [steps for steps, _ in ends] == [18] * 8
    assert len({digest for _, digest in ends}) == 1


# What ends otherwise -----------------------------------------------------------------------------------------------


def fit_until_killed(lengths: list[int], policy: str, load: Callable[[int], DataLoader]) -> int:
    trainer = make_trainer(LocalSGDStrategy(4, begin_step=0, uneven=policy), 2, callbacks=[Kill()])
    try:  # rank 1 gets its signal after 3 batches
        trainer.fit(Tiny(), load(lengths[dist.get_rank()]), uneven_loader(1))
    except SIGTERMException:
        return trainer.global_step
    return -1


@pytest.mark.parametrize("policy", ["finish", "stop"])
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("load", [stream, uneven_loader])
def test_a_sigterm_ends_those_who_wait(load: Callable[[int], DataLoader], first: int, policy: str) -> None:
    assert run_ranks(fit_until_killed, 2, [first, 9], policy, load) == [first, 4]


class StopAlone(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or (trainer.global_rank == 0 and trainer.global_step == 2)


class StepTwice(Two):
    """The second rank steps twice in a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            self.optimizers()[0].step()  # type: ignore[index]


def fit_in_vain(trouble: str) -> str:
    method = "begins later" if "stops" in trouble else "local_sgd"
    lengths = [0, 5] if trouble == "empty" else [9, 9]
    options: dict[str, Any] = {"callbacks": [StopAlone()]} if "stops" in trouble else {}
    options |= {"limit_val_batches": 0} if trouble == "stops alone" else {}
    model = StepTwice() if trouble == "other steps" else Tiny()
    trainer = make_trainer(make(method), 2, **options)
    try:
        trainer.fit(model, stream(lengths[dist.get_rank()]), uneven_loader(1))
    except (ConfigurationError, DisagreementError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("empty", "Ranks [0] have no batch in this epoch"),
        ("stops alone", "The epoch of ranks [0] has ended, and a synchronous step"),
        ("stops and validates", "rank 0 before validation or a checkpoint after 2 steps, rank 1 before a synchronous"),
        ("other steps", "The ranks are at different places"),
    ],
)
def test_what_cannot_go_on_fails_on_all_ranks(trouble: str, words: str) -> None:
    for message in run_ranks(fit_in_vain, 2, trouble, timeout_s=60):
        assert words in message


class Fetching(Tiny):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def fetch() -> str:
    try:
        make_trainer(make("local_sgd"), 2).fit(Fetching(), stream(3))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_step_that_fetches_its_own_data_is_refused() -> None:
    assert all("training_step(dataloader_iter)" in message for message in run_ranks(fetch, 2))


def begin_in_epochs(num_batches: list[int]) -> tuple[int, str]:
    """Begin local steps after half an epoch, of a rank's data; -1 batches are a stream."""
    number = num_batches[dist.get_rank()]
    data = stream(3) if number < 0 else uneven_loader(number)
    schedule = AveragingSchedule(k_steps=2, begin_epoch=0.5)
    trainer = make_trainer(LocalSGDStrategy(), 2, max_epochs=1, callbacks=[schedule], enable_progress_bar=False)
    try:
        trainer.fit(Tiny(), data)
    except ConfigurationError as error:
        return -1, str(error)
    return trainer.strategy.method.when.begin_step, ""  # type: ignore[attr-defined]


def test_epochs_of_different_lengths_are_counted_by_the_longest() -> None:
    assert run_ranks(begin_in_epochs, 2, [6, 8], timeout_s=60.0) == [(4, ""), (4, "")]


def test_epochs_of_data_without_a_length_are_an_error_on_all_ranks() -> None:
    for begin, message in run_ranks(begin_in_epochs, 2, [-1, -1], timeout_s=60.0):
        assert begin == -1
        assert "the training data has no length. Give it in steps: AveragingSchedule(begin_step=...)" in message
