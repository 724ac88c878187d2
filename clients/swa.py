"""Lightning's StochasticWeightAveraging over the last epochs, and its pass for the statistics of batch norm."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging

from clients.ema import Classifier, loaders
from clients.trial import Trial

PROJECT = "lightning"


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    average = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.6, annealing_epochs=1)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=5, **trial.options(average))
    trainer.fit(Classifier(), *loaders())


if __name__ == "__main__":
    main()
