"""A training script as torchrun restarts it: python restarted.py FOLDER. Rank 1 is killed once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_lowbw import LocalSGDStrategy
from tests.strategies.fits import SPARSE, weights
from tests.tiny import Tiny, make_data, make_trainer

STEPS, KILLED_AFTER = 12, 8


class KillOnce(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if is_first and trainer.global_rank == 1 and trainer.global_step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


class Model(Tiny):
    def train_dataloader(self) -> Any:  # made when the process group is there
        return make_data(2, STEPS)


class Begin(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step


def train(folder: str) -> None:
    model, begin = Model(data_by_step=True), Begin()
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)
    trainer = make_trainer(
        LocalSGDStrategy(k_steps=4, begin_step=0, compression=SPARSE),
        2,
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[KillOnce(), save, begin],
        enable_checkpointing=True,
    )
    trainer.fit(model, ckpt_path="last")
    (Path(folder) / f"rank{trainer.global_rank}").write_text(f"{begin.step} {weights(model)}")


if __name__ == "__main__":
    train(sys.argv[1])
