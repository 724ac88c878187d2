"""Frozen models with trained adapters, as LoRA makes them, and how the tests train them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_lowbw import DGC, Hierarchical, LocalSGD, Method, QuantizedGradients, Strategy
from lightning_lowbw.presets import preset
from tests.tiny import make_data, make_trainer

STEPS, SAVED_AT = 7, 5  # in the middle of an interval
RANK = 4
METHODS: dict[str, Method] = {
    "dgc": DGC(rampup_begin_step=2, sparsity=[0.9], min_numel=50),
    "int8": QuantizedGradients("int8"),
    "hierarchical": Hierarchical(1),
    "local_sgd": LocalSGD(k_steps=3, begin_step=0),
    "diloco": preset("diloco").replace(k_steps=3, begin_step=0),
    "sparse_loco": preset("sparse_loco").replace(k_steps=3, begin_step=0),
}


class Adapter(nn.Module):
    """A frozen layer, and what is trained beside it: x W + x A B."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class Adapted(pl.LightningModule):
    """A frozen model with adapters on its layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 5)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.requires_grad_(False)
        torch.default_generator.manual_seed(1)
        self.first, self.last = Adapter(self.first), Adapter(self.last)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.global_rank)
        x, y = torch.randn(4, 16, generator=generator), torch.randint(0, 5, (4,), generator=generator)
        x = self.first(x)
        for layer in self.middle:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.last(x), y)

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


class SavesAdapters(Adapted):
    """Leaves the frozen weights out of its state, as peft does."""

    strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if "lora" in name}


class DropsFrozen(Adapted):
    """Leaves the frozen weights out of its checkpoints by the hook; its optimizer has them all, as many write it."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: tensor for name, tensor in weights.items() if "lora" in name}

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.01)


def fit(method: Method, model: pl.LightningModule, ckpt_path: str | None = None, **kwargs: Any) -> pl.Trainer:
    trainer = make_trainer(Strategy(method), dist.get_world_size(), **kwargs)
    trainer.fit(model, make_data(dist.get_world_size(), STEPS), ckpt_path=ckpt_path)
    return trainer
