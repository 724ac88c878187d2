"""What the tests of several strategies have in common: fits, callbacks that watch them, and uneven data."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw.comm.agreement import digest
from tests.tiny import BATCH, make_data, make_strategy, make_trainer

STEPS = 9


SPARSE = {"density": 1 / 8, "chunk": 64, "min_numel": 100}  # the tiny layers


adamw = partial(torch.optim.AdamW, lr=1e-2)


def fit(model: pl.LightningModule, steps: int = STEPS, **options: Any) -> pl.Trainer:
    num_ranks = dist.get_world_size()
    strategy = options.pop("strategy", None) or make_strategy("dgc")
    trainer = make_trainer(strategy, num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, steps))
    return trainer


def weights(module: nn.Module) -> str:
    return digest([*module.parameters(), *module.buffers()])


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Trace(pl.Callback):
    """Keep the weights after each step, and what others are shown."""

    def __init__(self) -> None:
        self.after: list[str] = []
        self.shown: list[str] = []
        self.averages: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.after.append(weights(module))
        self.averages.append(trainer.strategy.workers[0].num_averages)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.shown.append(weights(module))

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.shown.append(weights(module))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.shown.append(weights(module))


class Silence(pl.Callback):
    """Fails where something is sent to all ranks in a batch without an average; the last of the callbacks."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = num_collectives()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # In the first step DDP rebuilds its buckets, once.
        if trainer.global_step > 1 and not any(worker.has_met for worker in trainer.strategy.workers):
            assert num_collectives() == self.before, f"sent after step {trainer.global_step}"


def num_collectives() -> int:
    """Return how many have been issued on the group of the world, also by C++."""
    return torch.distributed.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def uneven_loader(num_batches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(BATCH * num_batches, 16, generator=generator)
    y = torch.randint(0, 5, (BATCH * num_batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)
