"""Data of different or unknown lengths: all ranks take the batches of the longest, and end together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_lowbw import AveragingSchedule, ConfigurationError, LocalSGDStrategy
from tests.programs import free_port
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import LOOKS, SPARSE, Noted, refusal, same, train, weights
from tests.tiny import BATCH, Tiny, TwoOptimizers, make_trainer


def uneven_loader(num_batches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(BATCH * num_batches, 16, generator=generator)
    y = torch.randint(0, 5, (BATCH * num_batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


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


METHODS: dict[str, dict[str, Any]] = {
    "begins later": {"begin_step": 4},
    "k_steps=1": {"k_steps": 1},
    "sparse_loco": {"compression": SPARSE},
    "streaming_diloco": {"outer": "nesterov", "num_fragments": 2, "delay_steps": 1},
}


def fit(method: str, load: Any, lengths: list[int], model: type[Tiny] = Scheduled, **options: Any) -> dict[str, Any]:
    """Return what is the same on all ranks."""
    after, shown, made, callbacks = Noted(), Noted(weights, *LOOKS), model(), options.pop("callbacks", [])
    strategy = LocalSGDStrategy(**{"k_steps": 3, "begin_step": 0, **METHODS.get(method, {})})
    options = {"max_epochs": 2, **options, "callbacks": [after, shown, *callbacks]}
    trainer = train(strategy, made, load(lengths[dist.get_rank()]), uneven_loader(1), **options)
    ends = {
        "steps": [worker.step for worker in strategy.workers],
        "batches": len(after.values),
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "end": weights(made),
        # In synchronous steps buffers are those of rank 0 in each forward pass, as in DDP.
        "shown": shown.values if method != "k_steps=1" else len(shown.values),
    }
    return same(ends)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "model", "unknown"),
    [
        *[("begins later", Scheduled, [13]), ("k_steps=1", Scheduled, [10]), ("streaming_diloco", Scheduled, [12])],
        ("sparse_loco", TwoOptimizers, [12, 6]),  # a stream ends with the average after the fifth batch
    ],
)
@on_ranks(2)
def test_all_ranks_take_the_batches_of_the_longest_epoch(method: str, model: type[Tiny], unknown: list[int]) -> None:
    known, streamed = (fit(method, load, [4, 5], model) for load in (uneven_loader, stream))
    assert (known["batches"], known["steps"]) == (10, [10] if model is Scheduled else [10, 4])
    assert (streamed["batches"], streamed["steps"]) == (unknown[0], unknown)


@on_ranks(2)
def test_the_length_of_equal_streams_changes_no_bit_where_they_end_with_an_average() -> None:
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_steps": 12}
    assert fit("local_sgd", stream, [12, 12], **options) == fit("local_sgd", uneven_loader, [12, 12], **options)


@on_ranks(2)
def test_validation_and_checkpoints_in_mid_epoch_come_at_the_same_batches(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {"callbacks": [save], "enable_checkpointing": True, "val_check_interval": 4}
    streamed = fit("local_sgd", stream, [6, 11], **options)
    assert streamed["batches"] == 24
    assert len(streamed["shown"]) == 2 * (1 + 6) + 1  # before and after each validation, and the end
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        f"epoch={(step - 1) // 12}-step={step}.ckpt" for step in range(4, 25, 4)
    }


@on_ranks(2)
def test_a_validation_interval_is_a_fraction_of_the_longest_epoch() -> None:
    assert len(fit("local_sgd", uneven_loader, [6, 11], val_check_interval=0.5)["shown"]) == 2 * (1 + 4) + 1


class Reloading(Scheduled):
    """Each epoch has other data, whose lengths are equal in the second one alone."""

    def train_dataloader(self) -> DataLoader:
        lengths = [[3, 5], [4, 4], [6, 2]][self.trainer.current_epoch]
        return uneven_loader(lengths[self.trainer.global_rank])


@on_ranks(2)
def test_data_that_are_loaded_anew_may_have_other_lengths() -> None:
    model, trainer = Reloading(), make_trainer("local_sgd", 2, reload_dataloaders_every_n_epochs=1, max_epochs=3)
    trainer.fit(model, val_dataloaders=uneven_loader(1))
    same(weights(model))
    assert trainer.global_step == 5 + 4 + 6


@on_ranks(2)
def test_a_resume_after_an_uneven_epoch_is_exact(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = fit("local_sgd", stream, [5, 7], callbacks=[save], enable_checkpointing=True)
    resumed = fit("local_sgd", stream, [5, 7], resume=f"{tmp_path}/epoch=0.ckpt")
    for name in ("steps", "lr", "end"):
        assert resumed[name] == whole[name]


@pytest.mark.parametrize(("load", "num_steps"), [(uneven_loader, 10), (stream, 13)])
@on_ranks(4)
def test_the_ranks_of_a_node_may_have_different_lengths_too(load: Any, num_steps: int) -> None:
    model, strategy = Scheduled(), LocalSGDStrategy(3, begin_step=1, topology=2)
    trainer = train(strategy, model, load([3, 2, 4, 5][dist.get_rank()]), uneven_loader(1), max_epochs=2)
    same(weights(model))
    assert trainer.global_step == num_steps


# What is refused ---------------------------------------------------------------------------------------------------


class Fetching(Tiny):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


IN_VAIN = {"empty": "This rank has no batch in this epoch", "read once": "cannot be read a second time"}
IN_VAIN["fetching"] = "training_step(dataloader_iter) does not show which batch is the last one"


@pytest.mark.parametrize("trouble", IN_VAIN)
def test_what_cannot_go_on_fails_on_all_ranks(trouble: str) -> None:
    for message in run_ranks(fit_in_vain, 2, free_port(), trouble, timeout_s=60):
        assert IN_VAIN[trouble] in message


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


@on_ranks(2, timeout_s=60.0)
def test_epochs_are_counted_by_the_longest_and_not_without_a_length() -> None:
    """Begin local steps after half an epoch of a rank's data."""
    strategy, begin = LocalSGDStrategy(), {"callbacks": [AveragingSchedule(k_steps=2, begin_epoch=0.5)]}
    train(strategy, data=uneven_loader([6, 8][dist.get_rank()]), **begin)
    assert strategy.method.when.begin_step == 4
    message = refusal(LocalSGDStrategy(), data=stream(3), **begin)
    assert "the training data has no length. Give it in steps: AveragingSchedule(begin_step=...)" in message
