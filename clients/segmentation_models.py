"""A U-Net of segmentation-models-pytorch: dice loss, and its metrics over the epoch."""

from typing import Any

import lightning.pytorch as pl
import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, TensorDataset

from clients.trial import Trial, images

PROJECT = "segmentation-models-pytorch"


class Segmentation(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = smp.Unet("tu-mobilenetv3_small_050", encoder_weights=None, decoder_channels=(64, 32, 16, 16, 8))
        self.loss = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.outputs: dict[str, list[Any]] = {"train": [], "valid": []}

    def shared_step(self, batch: list[torch.Tensor], stage: str) -> torch.Tensor:
        pixels, mask = batch
        logits = self.model(pixels)
        self.outputs[stage].append(smp.metrics.get_stats(logits.sigmoid() > 0.5, mask.long(), mode="binary"))
        return self.loss(logits, mask)

    def shared_end(self, stage: str) -> None:
        counts = [torch.cat(each) for each in zip(*self.outputs[stage], strict=True)]
        self.log(f"{stage}_iou", smp.metrics.iou_score(*counts, reduction="micro"), sync_dist=True)
        self.outputs[stage].clear()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.shared_step(batch, "train")

    def on_train_epoch_end(self) -> None:
        self.shared_end("train")

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.shared_step(batch, "valid")

    def on_validation_epoch_end(self) -> None:
        self.shared_end("valid")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=120)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    pixels, _ = images(320, 32, 4)
    smooth = torch.nn.functional.avg_pool2d(pixels.mean(1, keepdim=True), 5, 1, 2)
    data = TensorDataset(pixels, (smooth > 0.25).float())
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=3, **trial.options())
    trainer.fit(Segmentation(), DataLoader(data, 4, shuffle=True), DataLoader(data, 4))


if __name__ == "__main__":
    main()
