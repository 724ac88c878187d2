"""A graph network of torch-geometric on batches of graphs, from a LightningDataset."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool

from clients.trial import Trial

PROJECT = "torch-geometric"


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gnn = GIN(16, 64, num_layers=4, dropout=0.1, jk="cat")
        self.classifier = MLP([64, 64, 2], norm="batch_norm", dropout=0.1)

    def training_step(self, data: Batch, batch_idx: int) -> torch.Tensor:
        nodes = self.gnn(data.x, data.edge_index)
        logits = self.classifier(global_add_pool(nodes, data.batch, data.num_graphs))
        return torch.nn.functional.cross_entropy(logits, data.y)

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(data, batch_idx), batch_size=data.num_graphs, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def graphs(num: int) -> list[Data]:
    """Return random graphs; what is to be found out is whether a graph has many edges."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(num):
        edges = torch.randint(0, 20, (2, 30 + 30 * (index % 2)), generator=generator)
        made.append(Data(x=torch.randn(20, 16, generator=generator), edge_index=edges, y=torch.tensor([index % 2])))
    return made


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    data = LightningDataset(graphs(640), graphs(64), batch_size=8, num_workers=0)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=3, **trial.options())
    trainer.fit(Model(), data)


if __name__ == "__main__":
    main()
