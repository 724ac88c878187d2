"""Running statistics are a rank's own in the sparse phase, and rank 0's in validation; other buffers as in DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.where.agreement import digest
from tests.ranks import run_ranks
from tests.strategies.watching import STEPS, fit
from tests.tiny import Tiny, make_data, make_strategy, make_trainer


def buffers_while_looking() -> tuple[list[str], str, str]:
    """Return the running statistics in training, in validation, and after the fit."""
    num_ranks = dist.get_world_size()
    seen: dict[str, list[str]] = {"train": [], "validation": []}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            seen["train"].append(digest(module.buffers()))

        def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            seen["validation"].append(digest(module.buffers()))

    model = Tiny()
    trainer = make_trainer(make_strategy("dgc"), num_ranks, callbacks=[Watch()], val_check_interval=3)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 1))
    return seen["train"], seen["validation"][-1], digest(model.buffers())


def test_buffers_are_those_of_rank_zero_wherever_somebody_looks() -> None:
    (train_0, validation_0, end_0), (train_1, validation_1, end_1) = run_ranks(buffers_while_looking, 2)
    assert train_0[-1] != train_1[-1]  # not sent in every step
    assert validation_0 == validation_1 == train_0[-1]
    assert end_0 == end_1


class Codebook(Tiny):
    """A buffer that the training reads: it must be the same on all ranks, unlike batch norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(digest([self.mean]))
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


def read_a_buffer() -> list[str]:
    model = Codebook()
    fit(model)
    return model.seen


def test_buffers_that_the_training_reads_are_those_of_rank_zero() -> None:
    """Each forward begins with rank 0's, as in DDP; batch norm's are in another test."""
    results = run_ranks(read_a_buffer, 2)
    assert results[0] == results[1]
    assert len(set(results[0])) == STEPS
