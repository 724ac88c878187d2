"""A small LightningModule with everything that gets in the way of an exchange, and how the tests train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw.comm.agreement import digest

BATCH = 4
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
MIN_NUMEL = 100  # so that the tiny layers are sparse


def sgd(parameters: Iterable[Tensor], **changes: Any) -> Optimizer:
    return SGD(parameters, **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, **changes})


def make_data(num_ranks: int, steps: int) -> DataLoader:
    """Return this rank's share; Lightning's own sampler would shuffle."""
    generator = torch.Generator().manual_seed(1)
    size = BATCH * num_ranks * steps
    x = torch.randn(size, 16, generator=generator)
    y = torch.randint(0, 5, (size,), generator=generator)
    mine = slice(dist.get_rank(), None, num_ranks)
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size=BATCH, shuffle=False)


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


class Tiny(pl.LightningModule):
    """Two wide layers, batch norm, biases, a frozen layer and, on request, one that no or one rank uses."""

    def __init__(
        self,
        optimizer: Callable[[Iterable[Tensor]], Optimizer] = sgd,
        *,
        unused: bool = False,
        dropout: float = 0.0,
        data_by_step: bool = False,
        poison: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.make_optimizer = optimizer
        self.poison = poison
        self.data_by_step = data_by_step  # a loader that resumes in the middle of an epoch, which Lightning's do not
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.wide = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.wider = nn.Linear(64, 32)
        self.head = nn.Linear(32, 5)
        self.dropout = nn.Dropout(dropout)
        self.never = nn.Linear(16, 32) if unused else None
        self.rank_zero_only = nn.Linear(16, 64) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.wide(x + self.frozen(x)))
        if self.rank_zero_only is not None and self.global_rank == 0:
            hidden = hidden + self.rank_zero_only(x)
        return self.head(self.dropout(torch.relu(self.wider(torch.relu(hidden)))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.data_by_step:
            generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.global_rank)
            x, y = torch.randn(x.shape, generator=generator), torch.randint(0, 5, y.shape, generator=generator)
        loss = nn.functional.cross_entropy(self(x), y)
        if self.poison is not None and self.global_rank == self.poison[0] and batch_idx in self.poison[1:]:
            loss = loss * float("inf")
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(trained(self))


class WithRate(Tiny):
    """With an attribute that a search for a learning rate changes."""

    lr = 0.05

    def configure_optimizers(self) -> Optimizer:
        return sgd(trained(self), lr=self.lr)


class ManualTiny(Tiny):
    """With the usual steps of manual optimization."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.before_step(optimizer)
        optimizer.step()  # type: ignore[union-attr]
        return loss

    def before_step(self, optimizer: Any) -> None:
        """Do nothing more."""


class TwoOptimizers(Tiny):
    """Two optimizers in manual optimization; the second steps in every other batch, or in all."""

    every = 2

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        found: Any = self.optimizers()
        is_due = (batch_idx + 1) % self.every == 0
        for optimizer in (found if isinstance(found, list) else [found])[: 1 + is_due]:
            optimizer.step()
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        half = list(self.wide.parameters())
        rest = [p for p in trained(self) if not any(p is each for each in half)]
        return [sgd(half), sgd(rest)]


def make_trainer(strategy: DDPStrategy, num_ranks: int, **kwargs: Any) -> pl.Trainer:
    usual = {"accelerator": "cpu", "devices": num_ranks, "max_epochs": 1, "use_distributed_sampler": False}
    return pl.Trainer(strategy=strategy, **{**QUIET, **usual, **kwargs})


def amp_with_scaler(init_scale: float = 2.0**10) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=init_scale))


def weights_of(module: nn.Module) -> str:
    return digest(module.parameters())
