"""Tiny modules for the golden trajectories: seeded, with batches that depend on step and rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


class Golden(pl.LightningModule):
    """A linear network with batch norm; subclasses have other layers and inputs."""

    num_classes = 5
    input_shape: tuple[int, ...] = (16,)

    def __init__(self, make_optimizer: MakeOptimizer, lr_milestones: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.make_optimizer = make_optimizer
        self.lr_milestones = lr_milestones
        self.body = self.make_body()
        self._place = (-1, 0)  # of the batch: optimizer steps before it, batches since the last one

    def make_body(self) -> nn.Module:
        first = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU()
        return nn.Sequential(*first, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))

    def make_input(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randn(size, *self.input_shape, generator=generator)

    def batch_loss(self, size: int) -> Tensor:
        """Return the loss of a batch that a resumed run finds again, and that no other rank has."""
        step, number = self._place
        self._place = (step, number + 1) if step == self.trainer.global_step else (self.trainer.global_step, 0)
        step, number = self._place
        generator = torch.Generator().manual_seed(1000 * step + 100 * number + self.global_rank)
        x = self.make_input(size, generator)
        y = torch.randint(0, self.num_classes, (size,), generator=generator)
        return nn.functional.cross_entropy(self.body(x).float(), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.batch_loss(len(batch[0]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = self.make_input(len(batch[0]), torch.Generator().manual_seed(batch_idx))
        self.log("val_loss", self.body(x).float().square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if not self.lr_milestones:
            return optimizer
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(self.lr_milestones), gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Conv(Golden):
    """Convolutions with batch norm."""

    input_shape = (3, 8, 8)

    def make_body(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 5),
        )


class ChannelsLast(Conv):
    """Weights whose memory is in another order than their elements."""

    def make_body(self) -> nn.Module:
        return super().make_body().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class TiedBody(nn.Module):
    """Embedding and decoder share one weight; `unused` is in no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.hidden = nn.Linear(16, 16)
        self.decoder = nn.Linear(16, 40)
        self.decoder.weight = self.embedding.weight
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.relu(self.hidden(self.embedding(x))))


class Tied(Golden):
    """Needs `find_unused_parameters=True` where DDP reduces in the backward pass."""

    num_classes = 40

    def make_body(self) -> nn.Module:
        return TiedBody()

    def make_input(self, size: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 40, (size,), generator=generator)


class TiedAndUsed(Tied):
    """Without the layer that no forward pass uses."""

    def make_body(self) -> nn.Module:
        body = super().make_body()
        del body.unused
        return body


class Wide(Golden):
    """One tensor of 71,680 elements: above the size from which a selection is sampled."""

    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 280), nn.ReLU(), nn.Linear(280, 256), nn.ReLU(), nn.Linear(256, 5))


class Dropout(Golden):
    """Draws random numbers of the global generator, which a resumed run has to find again."""

    def make_body(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 5))


class Groups(Golden):
    """Two param groups with options of their own."""

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        return self.make_optimizer([{"params": weights}, {"params": others, "lr": 0.02, "weight_decay": 0.0}])


class Sharded(Golden):
    """Shards itself inside a node, one layer as a block of its own."""

    def configure_model(self) -> None:
        body, mesh = self.body, self.device_mesh["data_parallel"]  # type: ignore[index]
        assert isinstance(body, nn.Sequential)
        fully_shard(body[0], mesh=mesh)
        fully_shard(body, mesh=mesh)


class TwoOptimizers(Golden):
    """Manual optimization; the second optimizer steps every other time."""

    def __init__(self, make_optimizer: MakeOptimizer, lr_milestones: tuple[int, ...] = ()) -> None:
        super().__init__(make_optimizer, lr_milestones)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if number <= batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(self.batch_loss(len(batch[0])))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        body = self.body
        assert isinstance(body, nn.Sequential)
        return [self.make_optimizer(body[:3].parameters()), self.make_optimizer(body[3:].parameters())]


def make_loader(num_batches: int) -> DataLoader:
    """Return as many batches as wanted; of them the module takes the size alone."""
    return DataLoader(TensorDataset(torch.zeros(BATCH * num_batches)), batch_size=BATCH)
