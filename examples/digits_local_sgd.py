"""Average the weights after every k steps, instead of the gradients in every step.

Run it:  python examples/digits_local_sgd.py
         python examples/digits_local_sgd.py --strategy adaptive_local_sgd     k follows the learning rate and the loss
         python examples/digits_local_sgd.py --strategy post_local_sgd         local in the second half of the run
         python examples/digits_local_sgd.py --strategy diloco --k-steps 20    with an outer optimizer
         python examples/digits_local_sgd.py --strategy streaming_diloco       parts of the model take turns
         python examples/digits_local_sgd.py --strategy sparse_loco            1 in 64 of the changes, in two bits
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

import lightning_lowbw as lowbw  # registers the strategies
from lightning_lowbw.tools.zoo import DigitsClassifier, DigitsData


class Averages(Callback):
    """Print how many averages there were, and how far this rank was from the last one."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for worker in trainer.strategy.workers:
            worker.measures_distance = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (worker,) = trainer.strategy.workers
        if trainer.is_global_zero:
            print(f"{trainer.global_step} steps, {worker.num_averages} averages, k = {worker.plan.k_steps} at the end")
            print(f"distance from the consensus before the last one: {float(worker.consensus_distance):.4f}")


def main() -> None:
    has_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="local_sgd")
    parser.add_argument("--k-steps", type=int)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if has_gpus else 2)
    parser.add_argument("--max-epochs", type=int, default=15)
    arguments = parser.parse_args()

    seed_everything(1, workers=True)
    trainer = Trainer(
        accelerator="gpu" if has_gpus else "cpu",
        devices=arguments.devices,
        strategy=arguments.strategy,
        callbacks=[lowbw.AveragingSchedule(k_steps=arguments.k_steps), Averages()],
        max_epochs=arguments.max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model, data = DigitsClassifier(schedule="cosine"), DigitsData()
    trainer.fit(model, datamodule=data)  # validation and the test use the consensus
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    main()
