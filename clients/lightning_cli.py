"""A LightningCLI: the strategy by its name on the command line, everything else as the project has it."""

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI

from clients.ema import Classifier, loaders
from clients.trial import WAYS, Trial

PROJECT = "jsonargparse"


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.loaders = loaders()

    def train_dataloader(self) -> object:
        return self.loaders[0]

    def val_dataloader(self) -> object:
        return self.loaders[1]


def main() -> None:
    trial = Trial(pl, "train.py fit --trainer.strategy=%s", dict(zip(WAYS, WAYS, strict=True)))
    arguments = ["fit", f"--trainer.strategy={trial.typed}", "--trainer.max_epochs=5"]
    LightningCLI(Classifier, Data, trainer_defaults=trial.options(), seed_everything_default=0, args=arguments)


if __name__ == "__main__":
    main()
