"""Train an existing LightningModule over a slow network: the three marked lines are the whole change.

The third gives numbers, for a run this short; without it the strategy measures some steps and the link, and chooses.

Run it:  python examples/digits_dgc.py
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import Trainer, seed_everything

import lightning_lowbw as lowbw  # 1. registers strategy="dgc"
from lightning_lowbw.tools.zoo import DigitsClassifier, DigitsData


def main() -> None:
    has_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if has_gpus else 2)
    parser.add_argument("--max-epochs", type=int, default=15)
    arguments = parser.parse_args()

    seed_everything(1, workers=True)
    trainer = Trainer(
        accelerator="gpu" if has_gpus else "cpu",
        devices=arguments.devices,
        strategy="dgc",  # 2. was "ddp"
        callbacks=[lowbw.SparsityWarmup(begin_epoch=2, epochs=3)],  # 3. dense for two epochs, 99.9 % sparse after four
        max_epochs=arguments.max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model, data = DigitsClassifier(), DigitsData()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    main()
