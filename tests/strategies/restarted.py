"""A training script as torchrun restarts it: python restarted.py FOLDER. Rank 1 is killed once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.strategies.fits import At, Noted, make, weights
from tests.tiny import Tiny, make_data, make_trainer

STEPS, KILLED_AFTER = 12, 8


class Model(Tiny):
    def train_dataloader(self) -> Any:  # made when the process group is there
        return make_data(2, STEPS)


def train(folder: str) -> None:
    """Train; rank 1 is killed once."""
    model, begin = Model(data_by_step=True), Noted(lambda module: module.trainer.global_step, "on_train_start")
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    kill = At(KILLED_AFTER if is_first else -1, lambda *_: os.kill(os.getpid(), signal.SIGKILL), ranks=(1,))
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)
    options = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True}
    trainer = make_trainer(make("sparse_loco", {"k_steps": 4}), 2, callbacks=[kill, save, begin], **options)
    trainer.fit(model, ckpt_path="last")
    (Path(folder) / f"rank{trainer.global_rank}").write_text(f"{begin.values[0]} {weights(model)}")


if __name__ == "__main__":
    train(sys.argv[1])
