"""GPT-2 of transformers from a config: tied embeddings, accumulated gradients, AdamW with groups, linear warm-up."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from clients.trial import Trial

PROJECT = "transformers"


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4)
        self.model: torch.nn.Module = GPT2LMHeadModel(config)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in trained if each.ndim >= 2], "weight_decay": 0.01},
            {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=2e-3)
        scheduler = get_linear_schedule_with_warmup(optimizer, 10, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def sentences(num: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return sequences in which each token is the one before plus a step; the step is drawn per sequence."""
    generator = torch.Generator().manual_seed(0)
    first, step = (torch.randint(low, 256, (num, 1), generator=generator) % high for low, high in ((0, 256), (1, 8)))
    return TensorDataset((first + step * torch.arange(64)) % 256)


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=2, accumulate_grad_batches=2, **trial.options())
    trainer.fit(LanguageModel(), DataLoader(sentences(960), 4, shuffle=True))


if __name__ == "__main__":
    main()
