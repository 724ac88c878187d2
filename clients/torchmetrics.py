"""A module full of torchmetrics: collections of the batch and of the epoch, best values, confusion matrix."""

import lightning.pytorch as pl
import torch
import torchmetrics
from torchmetrics import classification

from clients.ema import Classifier, loaders
from clients.trial import Trial

PROJECT = "torchmetrics"


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        of_classes = {"num_classes": 4}
        metrics = torchmetrics.MetricCollection(
            [
                classification.MulticlassAccuracy(**of_classes),
                classification.MulticlassF1Score(**of_classes, average="macro"),
                classification.MulticlassAUROC(**of_classes),
                classification.MulticlassCalibrationError(**of_classes),
            ]
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.train_loss = torchmetrics.MeanMetric()
        self.best = torchmetrics.MaxMetric()
        self.confusion = classification.MulticlassConfusionMatrix(**of_classes)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        logits = self.head(self.backbone(pixels))
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.train_metrics(logits, labels)
        self.train_loss(loss)
        self.log_dict(self.train_metrics, on_step=True, on_epoch=True)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pixels, labels = batch
        logits = self.head(self.backbone(pixels))
        self.val_metrics.update(logits, labels)
        self.confusion.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        values = self.val_metrics.compute()
        self.best(values["val/MulticlassAccuracy"])
        self.log_dict(values)
        self.log("val/best", self.best.compute())
        # Ranks validate 192 of 384 images each: what is computed is that of all, after their states were gathered.
        if not self.trainer.sanity_checking and int(self.confusion.compute().sum()) != 384:
            raise ValueError("the confusion matrix does not count every image once")
        self.val_metrics.reset()
        self.confusion.reset()


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=5, **trial.options())
    trainer.fit(Measured(), *loaders())


if __name__ == "__main__":
    main()
