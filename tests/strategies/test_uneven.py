"""Data of different or unknown lengths: all ranks take the batches of the longest, and end together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_lowbw import AveragingSchedule, ConfigurationError, LocalSGDStrategy
from tests.programs import free_port
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE, Trace, uneven_loader, weights
from tests.sync.problem import each
from tests.tiny import BATCH, Tiny, TwoOptimizers, make_trainer


class Stream(IterableDataset):
    """The samples of another loader, one after the other; nobody knows how many."""

    def __init__(self, loader: DataLoader, times: int = 100) -> None:
        self.samples, self.times = loader.dataset, times

    def __iter__(self) -> Iterator[Any]:
        self.times -= 1
        for index in range(len(self.samples) if self.times >= 0 else 0):  # type: ignore[arg-type]
            yield self.samples[index]


def stream(num_batches: int) -> DataLoader:
    return DataLoader(Stream(uneven_loader(num_batches)), batch_size=BATCH)


class Scheduled(Tiny):
    """With a learning rate by the length of the run in steps, and one by epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        num_steps = int(self.trainer.estimated_stepping_batches)
        of_steps = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_steps if num_steps > 0 else 24)
        of_epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": of_steps, "interval": "step"}, of_epochs]


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
    "k_steps=1": {"k_steps": 1},
    "sparse_loco": {"compression": SPARSE},
    "streaming_diloco": {"outer": "nesterov", "num_fragments": 2, "delay_steps": 1},
}


def fit(
    method: str, load: Callable[[int], DataLoader], lengths: list[int], model: type[Tiny] = Scheduled, **options: Any
) -> dict[str, Any]:
    trace, made, path = Trace(), model(), options.pop("ckpt_path", None)
    options = {"max_epochs": 2, **options, "callbacks": [trace, *options.get("callbacks", [])]}
    strategy = LocalSGDStrategy(**{"k_steps": 3, "begin_step": 0, **METHODS[method]})
    trainer = make_trainer(strategy, dist.get_world_size(), **options)
    trainer.fit(made, load(lengths[dist.get_rank()]), uneven_loader(1), ckpt_path=path)
    return {
        "steps": [worker.step for worker in strategy.workers],
        "batches": len(trace.after),
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "end": weights(made),
        # In synchronous steps buffers are those of rank 0 in each forward pass, as in DDP.
        "shown": trace.shown if method != "k_steps=1" else len(trace.shown),
    }


def agreed(results: list[Any]) -> Any:
    """Return what is the same on all ranks."""
    assert results == [results[0]] * len(results)
    return results[0]


def fit_known_and_unknown(*args: Any, **options: Any) -> list[dict[str, Any]]:
    return [fit(args[0], load, *args[1:], **options) for load in (uneven_loader, stream)]


@pytest.mark.parametrize(
    ("method", "model", "unknown"),
    [
        ("begins later", Scheduled, [13]),
        ("k_steps=1", Scheduled, [10]),
        ("sparse_loco", Two, [12, 6]),  # a stream ends with the average after the fifth batch
        ("streaming_diloco", Scheduled, [12]),
    ],
)
def test_all_ranks_take_the_batches_of_the_longest_epoch(method: str, model: type[Tiny], unknown: list[int]) -> None:
    known, streamed = agreed(run_ranks(fit_known_and_unknown, 2, method, [4, 5], model))
    assert (known["batches"], known["steps"]) == (10, [10] if model is Scheduled else [10, 4])
    assert (streamed["batches"], streamed["steps"]) == (unknown[0], unknown)


def test_the_length_of_equal_streams_changes_no_bit_where_they_end_with_an_average() -> None:
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_steps": 12}
    known, unknown = agreed(run_ranks(partial(fit_known_and_unknown, **options), 2, "local_sgd", [12, 12]))
    assert unknown == known


def test_validation_and_checkpoints_in_mid_epoch_come_at_the_same_batches(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {"callbacks": [save], "enable_checkpointing": True, "val_check_interval": 4}
    streamed = agreed(run_ranks(partial(fit, **options), 2, "local_sgd", stream, [6, 11]))
    assert streamed["batches"] == 24
    assert len(streamed["shown"]) == 2 * (1 + 6) + 1  # before and after each validation, and the end
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        f"epoch={(step - 1) // 12}-step={step}.ckpt" for step in range(4, 25, 4)
    }


def test_a_validation_interval_is_a_fraction_of_the_longest_epoch() -> None:
    known = agreed(run_ranks(partial(fit, val_check_interval=0.5), 2, "local_sgd", uneven_loader, [6, 11]))
    assert len(known["shown"]) == 2 * (1 + 4) + 1


class Reloading(Scheduled):
    """Each epoch has other data, whose lengths are equal in the second one alone."""

    def train_dataloader(self) -> DataLoader:
        lengths = [[3, 5], [4, 4], [6, 2]][self.trainer.current_epoch]
        return uneven_loader(lengths[self.trainer.global_rank])


def fit_reloading() -> tuple[int, str]:
    model, trainer = Reloading(), make_trainer("local_sgd", 2, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    trainer.fit(model, val_dataloaders=uneven_loader(1))
    return trainer.global_step, weights(model)


def test_data_that_are_loaded_anew_may_have_other_lengths() -> None:
    first, second = run_ranks(fit_reloading, 2)
    assert first == second
    assert first[0] == 5 + 4 + 6


def fit_and_resume(folder: str) -> list[dict[str, Any]]:
    """Return a run, and its resume from the checkpoint of its first epoch."""
    save = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    whole = fit("local_sgd", stream, [5, 7], callbacks=[save], enable_checkpointing=True)
    return [whole, fit("local_sgd", stream, [5, 7], ckpt_path=f"{folder}/epoch=0.ckpt")]


def test_a_resume_after_an_uneven_epoch_is_exact(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(fit_and_resume, 2, str(tmp_path)):
        for name in ("steps", "lr", "end"):
            assert resumed[name] == whole[name]


def fit_on_nodes() -> list[tuple[int, str]]:
    ends = []
    for load in (uneven_loader, stream):
        trainer, model = make_trainer(LocalSGDStrategy(3, begin_step=1, topology=2), 4, max_epochs=2), Scheduled()
        trainer.fit(model, load([3, 2, 4, 5][dist.get_rank()]), uneven_loader(1))
        ends.append((trainer.global_step, weights(model)))
    return ends


def test_the_ranks_of_a_node_may_have_different_lengths_too() -> None:
    known, unknown = agreed(run_ranks(fit_on_nodes, 4))
    assert (known[0], unknown[0]) == (10, 13)


# What is refused ---------------------------------------------------------------------------------------------------


class Fetching(Tiny):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


def fit_in_vain(port: int, trouble: str) -> str:
    data = stream(3)
    if dist.get_rank() == 0 and trouble != "fetching":
        data = stream(0) if trouble == "empty" else DataLoader(Stream(uneven_loader(2), times=1), batch_size=BATCH)
    dist.destroy_process_group()  # that of the tests has no server, and no timeout
    os.environ.update(MASTER_PORT=str(port))
    trainer = make_trainer(LocalSGDStrategy(4, begin_step=0, timeout=2), 2)
    with pytest.raises((ConfigurationError, RuntimeError)) as caught:
        trainer.fit(Fetching() if trouble == "fetching" else Tiny(), data)
    if dist.is_initialized():
        dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("empty", "This rank has no batch in this epoch"),
        ("read once", "cannot be read a second time"),
        ("fetching", "training_step(dataloader_iter) does not show which batch is the last one"),
    ],
)
def test_what_cannot_go_on_fails_on_all_ranks(trouble: str, words: str) -> None:
    for message in run_ranks(fit_in_vain, 2, free_port(), trouble, timeout_s=60):
        assert words in message


def begin_in_epochs(num_batches: list[int]) -> tuple[int, str]:
    """Begin local steps after half an epoch, of a rank's data; -1 batches are a stream."""
    number = num_batches[dist.get_rank()]
    schedule = AveragingSchedule(k_steps=2, begin_epoch=0.5)
    trainer = make_trainer(LocalSGDStrategy(), 2, max_epochs=1, callbacks=[schedule])
    try:
        trainer.fit(Tiny(), stream(3) if number < 0 else uneven_loader(number))
    except ConfigurationError as error:
        return -1, str(error)
    return trainer.strategy.method.when.begin_step, ""  # type: ignore[attr-defined]


def test_epochs_are_counted_by_the_longest_and_not_without_a_length() -> None:
    for known, (begin, message) in run_ranks(each, 2, begin_in_epochs, [([6, 8],), ([-1, -1],)], timeout_s=60.0):
        assert known == (4, "")
        assert begin == -1
        assert "the training data has no length. Give it in steps: AveragingSchedule(begin_step=...)" in message
