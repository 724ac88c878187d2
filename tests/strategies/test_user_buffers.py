"""What a module does to its buffers in hooks lasts, as under ddp, also while the buffers of others are shown."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_trainer

METHODS = ("ddp", "dgc", "int8", "local_sgd", "diloco")


class Hooks(Tiny):
    """Sets a buffer when an epoch begins, and two after each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(-1.0))
        self.register_buffer("best", torch.tensor(float("inf")))
        self.register_buffer("patience", torch.tensor(0))
        self.seen: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.temperature.fill_(float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(float(self.temperature))
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.best.fill_(1.0)
        self.patience += 1


class SaveEpoch(Callback):
    """Saves when the first epoch ends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def set_in_hooks(strategy: str, path: str) -> tuple[list[float], list[float], float, int]:
    """Return what a resumed fit has seen of a buffer, and what validation has made of two others."""
    num_ranks = dist.get_world_size()
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2, "num_sanity_val_steps": 0}
    models = [Hooks(), Hooks()]
    for model, resume in zip(models, (None, path), strict=True):
        callbacks = [] if resume else [SaveEpoch(path)]
        trainer = make_trainer(strategy, num_ranks, callbacks=callbacks, **options)  # type: ignore[arg-type]
        trainer.fit(model, make_data(num_ranks, 4), make_data(num_ranks, 1), ckpt_path=resume)
    whole, resumed = models
    return whole.seen, resumed.seen, float(resumed.best), int(resumed.patience)


@pytest.mark.parametrize("strategy", METHODS)
def test_what_hooks_set_stays(strategy: str, tmp_path: Path) -> None:
    for whole, resumed, best, patience in run_ranks(set_in_hooks, 2, strategy, str(tmp_path / "epoch.ckpt")):
        assert whole == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        assert resumed == whole[4:]
        assert (best, patience) == (1.0, 6)


class Marks(Tiny):
    """Sets buffers after each validation; writes down what the training sees of them."""

    def __init__(self) -> None:
        super().__init__(data_by_step=True)
        self.register_buffer("best", torch.tensor(100.0))
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((float(self.best), float(self.norm.running_mean[0])))
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.best.fill_(7.0 + self.global_step)
        self.norm.running_mean.fill_(50.0 + self.global_step)


class SaveFirst(Callback):
    """Saves when the first validation ends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def set_in_validation(strategy: str, path: str) -> list[list[tuple[float, float]]]:
    num_ranks, seen = dist.get_world_size(), []
    for resume in (None, path):
        model, callbacks = Marks(), [] if resume else [SaveFirst(path)]
        options: dict[str, Any] = {"max_epochs": 1, "val_check_interval": 3, "num_sanity_val_steps": 0}
        trainer = make_trainer(strategy, num_ranks, callbacks=callbacks, **options)  # type: ignore[arg-type]
        trainer.fit(model, make_data(num_ranks, 8), make_data(num_ranks, 1), ckpt_path=resume)
        seen.append(model.seen)
    return seen


@pytest.mark.parametrize("strategy", METHODS)
def test_what_validation_sets_is_in_its_checkpoint(strategy: str, tmp_path: Path) -> None:
    for whole, resumed in run_ranks(set_in_validation, 2, strategy, str(tmp_path / "validated.ckpt")):
        assert whole[3] == (10.0, 53.0)
        assert resumed == whole[3:]


class WithScale(Tiny):
    """Has a buffer beside the running statistics of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


def count_broadcasts(strategy: str) -> list[int]:
    """Return the bytes of buffers that DDP sends in the forward passes of a fit."""
    sent: list[int] = []
    broadcast = DistributedDataParallel._distributed_broadcast_coalesced

    def watched(model: DistributedDataParallel, tensors: list[torch.Tensor], *args: Any) -> None:
        if model.training:
            sent.append(sum(tensor.nbytes for tensor in tensors))
        broadcast(model, tensors, *args)

    DistributedDataParallel._distributed_broadcast_coalesced = watched  # put back by `run_ranks`
    num_ranks = dist.get_world_size()
    make_trainer(strategy, num_ranks).fit(WithScale(), make_data(num_ranks, 4))  # type: ignore[arg-type]
    return sent


def test_only_buffers_that_the_training_reads_are_broadcast() -> None:
    """Batch norm's statistics are not, whatever other buffers there are."""
    for sent in run_ranks(count_broadcasts, 2, "int8"):
        assert sent == [12] * 4
    for sent in run_ranks(count_broadcasts, 2, "ddp"):
        assert min(sent) > 12


class Replaces(Tiny):
    """Has a buffer of which the training puts another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ema = self.ema + 1.0
        return super().training_step(batch, batch_idx)


def replace_a_buffer() -> list[str]:
    num_ranks = dist.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer("local_sgd", num_ranks, val_check_interval=2)  # type: ignore[arg-type]
        trainer.fit(Replaces(), make_data(num_ranks, 8), make_data(num_ranks, 1))
    return [str(each.message) for each in caught if "have been replaced" in str(each.message)]


def test_a_buffer_that_is_replaced_is_told_once() -> None:
    (message,), _ = run_ranks(replace_a_buffer, 2)
    assert ": ema. Each rank has its own" in message
