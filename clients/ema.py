"""Lightning's EMAWeightAveraging; the averaged weights are validated and saved."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

from clients.trial import Trial, images

PROJECT = "lightning"


class Classifier(pl.LightningModule):
    """A small convolutional network, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, 2, 1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, 2, 1),
            torch.nn.BatchNorm2d(64),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
        )
        self.head = torch.nn.Sequential(torch.nn.Linear(1024, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        loss = torch.nn.functional.cross_entropy(self.head(self.backbone(pixels)), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = filter(lambda each: each.requires_grad, self.parameters())
        return torch.optim.SGD(trained, lr=0.02, momentum=0.9, nesterov=True)


def loaders() -> tuple[DataLoader[tuple[torch.Tensor, ...]], DataLoader[tuple[torch.Tensor, ...]]]:
    """Return batches to train with, 24 per epoch and rank, and to validate with."""
    data = TensorDataset(*images(384, 16, 4))
    return DataLoader(data, 8, shuffle=True), DataLoader(data, 64)


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    average = EMAWeightAveraging(decay=0.95, update_starting_at_step=20)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=5, **trial.options(average))
    trainer.fit(Classifier(), *loaders())


if __name__ == "__main__":
    main()
