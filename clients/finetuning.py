"""Lightning's BackboneFinetuning: parameters join the optimizer in the middle of the training."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BackboneFinetuning

from clients.ema import Classifier, loaders
from clients.trial import Trial

PROJECT = "lightning"
REMARK = "Stock DDP exchanges no gradients of layers that are thawed after it has wrapped the model."


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.1)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=5, **trial.options(finetuning))
    trainer.fit(Classifier(), *loaders())


if __name__ == "__main__":
    main()
