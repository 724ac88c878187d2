"""A triplet loss and a proxy loss of pytorch-metric-learning; the proxies have an optimizer of their own."""

from typing import Any

import lightning.pytorch as pl
import torch
from pytorch_metric_learning import losses, miners
from torch.utils.data import DataLoader, TensorDataset

from clients.trial import Trial, images

PROJECT = "pytorch-metric-learning"


class Embedding(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(768, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)
        )
        self.miner = miners.MultiSimilarityMiner()
        self.triplet = losses.TripletMarginLoss()
        self.proxies = losses.ProxyAnchorLoss(num_classes=8, embedding_size=128)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        pixels, labels = batch
        embeddings = self.net(pixels)
        loss = self.triplet(embeddings, labels, self.miner(embeddings, labels)) + self.proxies(embeddings, labels)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=1e-3),
            torch.optim.SGD(self.proxies.parameters(), lr=0.1),
        ]


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)", loss="train_loss")
    data = DataLoader(TensorDataset(*images(1280, 16, 8)), 16, shuffle=True)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=3, **trial.options())
    trainer.fit(Embedding(), data)


if __name__ == "__main__":
    main()
