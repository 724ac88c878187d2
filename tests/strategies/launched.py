"""A training script as a user has it, for the tests of the launchers: python launched.py FOLDER STRATEGY ..."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch

import lightning_lowbw  # noqa: F401 - registers the names
from lightning_lowbw import AveragingSchedule, SparsityWarmup
from lightning_lowbw.comm.agreement import digest


class Model(pl.LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        (worker,) = strategy.workers
        density = getattr(worker, "last_density", math.nan)
        line = f"{strategy.world_size} {worker.step} {density:.4f} {digest(self.parameters())}"
        (self.folder / f"rank{self.global_rank}").write_text(line)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(strategy: str, folder: str) -> None:
    pl.seed_everything(0, verbose=False)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    callbacks = [AveragingSchedule(k_steps=3)]
    if "dgc" in strategy:
        callbacks = [SparsityWarmup(begin_epoch=0.5, epochs=0.5, sparsity=[0.9, 0.99])]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, callbacks=callbacks, **quiet)
    model = Model(folder)
    trainer.fit(model, loader)
    (Path(folder) / f"after{trainer.global_rank}").write_text(digest(model.parameters()))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        (Path(sys.argv[1]) / name).mkdir(exist_ok=True)
        train(name, str(Path(sys.argv[1]) / name))
