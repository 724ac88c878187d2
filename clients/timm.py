"""A MobileNet of timm in a LightningModule, with timm's own learning rates."""

from typing import Any

import lightning.pytorch as pl
import timm
import timm.optim
import timm.scheduler
import torch
from torch.utils.data import DataLoader, TensorDataset

from clients.trial import Trial, images

PROJECT = "timm"


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        loss = torch.nn.functional.cross_entropy(self.model(pixels), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pixels, labels = batch
        self.log("val_accuracy", (self.model(pixels).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = timm.optim.create_optimizer_v2(self.model, opt="momentum", lr=0.01, weight_decay=1e-4)
        scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    data = TensorDataset(*images(384, 32, 4))
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=5, **trial.options())
    trainer.fit(Classifier(), DataLoader(data, 8, shuffle=True), DataLoader(data, 64))
    trainer.validate(ckpt_path="best", dataloaders=DataLoader(data, 64))


if __name__ == "__main__":
    main()
