"""SimCLR with lightly: the contrastive loss gathers the embeddings of all ranks, the optimizer is LARS."""

from typing import Any

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.utils.benchmarking import OnlineLinearClassifier
from lightly.utils.lars import LARS
from torch.utils.data import DataLoader, TensorDataset

import lightning_lowbw  # noqa: F401 - as a user adds it
from clients.trial import Trial, images

PROJECT = "lightly"


class SimCLR(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, 2, 1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 128, 3, 2, 1),
            torch.nn.BatchNorm2d(128),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
        )
        self.projection_head = SimCLRProjectionHead(2048, 128, 64)
        self.criterion = NTXentLoss(temperature=0.1, gather_distributed=True)
        self.online_classifier = OnlineLinearClassifier(feature_dim=2048, num_classes=4, topk=(1, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        pixels, labels = batch
        features = [self.backbone(pixels + 0.3 * torch.randn_like(pixels)) for _ in range(2)]
        loss = self.criterion(*(self.projection_head(each) for each in features))
        self.log("train_loss", loss, sync_dist=True)
        loss_of_classifier, values = self.online_classifier.training_step((features[0].detach(), labels), batch_idx)
        self.log_dict(values, sync_dist=True)
        return loss + loss_of_classifier

    def configure_optimizers(self) -> Any:
        weights = [each for each in self.parameters() if each.ndim > 1]
        others = [each for each in self.parameters() if each.ndim <= 1]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        return LARS(groups, lr=0.3, momentum=0.9, weight_decay=1e-6)


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    data = DataLoader(TensorDataset(*images(640, 32, 4)), 16, shuffle=True, drop_last=True)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=6, **trial.options())
    trainer.fit(SimCLR(), data)


if __name__ == "__main__":
    main()
