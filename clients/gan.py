"""A GAN with two optimizers and toggle_optimizer, in manual optimization; each loss leaves half of the model unused."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from clients.trial import Trial, images, names

PROJECT = "lightning"


class GAN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(
            torch.nn.Linear(32, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 768)
        )
        self.discriminator = torch.nn.Sequential(
            torch.nn.Linear(768, 256), torch.nn.LeakyReLU(0.2), torch.nn.Linear(256, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc,attr-defined]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(of_generator)
        made = self.generator(torch.randn(len(real), 32))
        g_loss = cross_entropy(self.discriminator(made), ones)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        made = self.generator(torch.randn(len(real), 32)).detach()
        d_loss = (cross_entropy(self.discriminator(real), ones) + cross_entropy(self.discriminator(made), zeros)) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        ]


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)", names("_find_unused_parameters_true"), loss="d_loss")
    data = DataLoader(TensorDataset(*images(640, 16, 4)), 8, shuffle=True)
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=3, **trial.options())
    trainer.fit(GAN(), data)


if __name__ == "__main__":
    main()
