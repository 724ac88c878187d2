"""Models that `ShardedStrategy` trains in the tests, with how they are trained, sharded and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import Method, ShardedStrategy
from lightning_lowbw.comm.agreement import digest
from tests.strategies.fits import train
from tests.tiny import sgd, trained

BATCH = 4


def data(steps: int, num_shares: int, share: int) -> DataLoader:
    """Return one of equal shares of the batches; together they are the same, however many there are."""
    generator = torch.Generator().manual_seed(1)
    size = 4 * BATCH * steps
    x = torch.randn(size, 16, generator=generator)
    y = torch.randint(0, 5, (size,), generator=generator)
    rows = torch.arange(size).view(steps, num_shares, -1)[:, share].reshape(-1)
    return DataLoader(TensorDataset(x[rows], y[rows]), batch_size=4 * BATCH // num_shares, shuffle=False)


class Plain(pl.LightningModule):
    """A small network without `configure_model`; widths that two ranks cannot halve, and a frozen layer."""

    width = 63

    def __init__(self, make_optimizer: Callable[[Iterable[Tensor]], Optimizer] = sgd) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer
        self.val_losses: list[float] = []
        self.build()

    def build(self) -> None:
        torch.default_generator.manual_seed(0)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        first = nn.Linear(16, self.width), nn.ReLU()
        self.net = nn.Sequential(*first, nn.Linear(self.width, 32), nn.LayerNorm(32), nn.ReLU())
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x + self.frozen(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.val_losses.append(float(loss))
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(trained(self))


class Configured(Plain):
    """The same, as it is written for Lightning's ModelParallelStrategy."""

    def build(self) -> None:
        self.net = None

    def make(self) -> None:
        """Make the layers."""
        super().build()

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.make()
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net, self.head, self.frozen):
            fully_shard(layer, mesh=mesh)


class Listed(Plain):
    """Layers that are called one by one: each is sharded on its own, and the module itself is not."""

    def build(self) -> None:
        super().build()
        self.net = nn.ModuleList(self.net)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.frozen(x)
        for layer in self.net:
            x = layer(x)
        return self.head(x)


class ByStep(Configured):
    """Draws its data by the step, for a loader begins anew in the middle of an epoch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.global_rank)
        x, y = torch.randn(4, 16, generator=generator), torch.randint(0, 5, (4,), generator=generator)
        return super().training_step((x, y), batch_idx)


def train_shards(method: Any, module: Any, steps: int, *, val: bool = False, shares: Any = None, **more: Any) -> Any:
    """Fit a module on this rank's share of the data.

    Args:
        method: on nodes of two ranks; or a strategy.
        shares: how many there are, and which this is: those of the ranks.
    """
    strategy = ShardedStrategy(method, topology=2) if isinstance(method, Method) else method
    loader = data(steps, *shares or (dist.get_world_size(), dist.get_rank()))
    return train(strategy, module, loader, loader if val else 0, **{"num_sanity_val_steps": 0, **more})


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return all weights, gathered.

    Collective: the ranks of a node.
    """
    return {name: getattr(p, "full_tensor", p.detach)().detach().clone() for name, p in module.named_parameters()}


def shard_digest(module: nn.Module) -> str:
    # Of copies: FSDP cannot free the memory of a gathered tensor that numpy has seen.
    return digest([getattr(p, "to_local", p.detach)().detach().clone() for p in module.parameters()])


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)
