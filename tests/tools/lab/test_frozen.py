"""What of a frozen model goes over the network, counted on a node's interface."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_lowbw import DGC, LocalSGD, Method, Strategy
from lightning_lowbw.presets import preset
from lightning_lowbw.tools.lab import Network, launch, read_sent_bytes
from lightning_lowbw.tools.lab.network import INTERFACE
from tests.tiny import make_data, make_trainer
from tests.tools.lab.namespaces import needs_lab

pytestmark = [*needs_lab, pytest.mark.slow]

STEPS, SAVED_AT = 7, 5  # in the middle of an interval
METHODS: dict[str, Method] = {
    "dgc": DGC(rampup_begin_step=2, sparsity=[0.9], min_numel=50),
    "local_sgd": LocalSGD(k_steps=3, begin_step=0),
    "sparse_loco": preset("sparse_loco").replace(k_steps=3, begin_step=0),
}


class Adapted(pl.LightningModule):
    """Frozen layers, of which one has a trained adapter beside it; checkpoints leave the frozen weights out."""

    strict_loading = False

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.frozen = nn.Sequential(nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 5))
        self.frozen.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 5, bias=False))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.frozen(batch[0]) + self.adapter(batch[0]), batch[1])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: tensor for name, tensor in weights.items() if "adapter" in name}

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.01)  # has the frozen ones, too, as many write it


class Count(pl.Callback):
    """Count what the interface sends from the first batch to the end of the fit, with a checkpoint on the way."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, *_: Any) -> None:
        if not hasattr(self, "before"):
            dist.barrier()
            self.before = read_sent_bytes(INTERFACE)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)

    def on_fit_end(self, *_: Any) -> None:
        dist.barrier()
        self.sent = read_sent_bytes(INTERFACE) - self.before


def count(folder: str) -> None:
    """Train small and large frozen models with each method; print what was sent."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, method in METHODS.items():
        for width in (64, 1024):
            counter, model = Count(f"{folder}/{name}{width}.ckpt"), Adapted(width)
            make_trainer(Strategy(method), 2, callbacks=[counter]).fit(model, make_data(2, STEPS))
            if dist.get_rank() == 0:
                frozen, trained = (4 * sum(p.numel() for p in each.parameters()) for each in model.children())
                sys.stdout.write(f"sent {name} {frozen} {trained} {counter.sent}\n")
                sys.stdout.flush()
    dist.destroy_process_group()


def test_frozen_weights_are_never_sent(tmp_path: Path) -> None:
    """Counted on the interface of a node, from the first batch to the end of the fit."""
    command = [sys.executable, "-c", f"import {__name__} as t; t.count({str(tmp_path)!r})"]
    output = tmp_path / "output"
    with Network([None, None]) as network, output.open("w+b") as file:
        assert launch(network, command, timeout_s=120.0, output=file).status == 0, output.read_text()
    lines = [line.split()[1:] for line in output.read_text().splitlines() if line.startswith("sent ")]
    assert [line[0] for line in lines] == [name for name in METHODS for _ in range(2)]
    for name, *numbers in lines:
        frozen, trained, sent = (int(number) for number in numbers)
        assert sent < 60_000 + 2 * STEPS * trained, name  # agreements; at most the trained weights every step
        assert frozen < 4e6 or sent < frozen / 5, name
