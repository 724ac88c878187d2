"""Train two networks with two optimizers in manual optimization: each optimizer exchanges its own network's gradients.

Run it:  python examples/gan_manual.py

A tiny GAN draws 8x8 digits. The module does not depend on the strategy. In manual optimization the warm-up is
counted in optimizer steps, because only the module knows how many of them an epoch has.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import DigitsData

NUM_NOISE, NUM_PIXELS, HIDDEN = 32, 64, 256


def perceptron(num_inputs: int, num_outputs: int) -> list[nn.Module]:
    """Return the layers of a perceptron with two hidden layers."""
    hidden = [nn.Linear(num_inputs, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, HIDDEN), nn.LeakyReLU(0.2)]
    return [*hidden, nn.Linear(HIDDEN, num_outputs)]


class DigitsGAN(LightningModule):
    """Pit a generator against a discriminator, both perceptrons of about 0.1 million parameters."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.generator = nn.Sequential(*perceptron(NUM_NOISE, NUM_PIXELS), nn.Sigmoid())
        self.discriminator = nn.Sequential(*perceptron(NUM_PIXELS, 1))

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.generator(noise)
        return images

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        ones, zeros = torch.ones(len(real), 1, device=self.device), torch.zeros(len(real), 1, device=self.device)
        generator_optimizer, discriminator_optimizer = self.optimizers()

        self.toggle_optimizer(discriminator_optimizer)
        fake = self(torch.randn(len(real), NUM_NOISE, device=self.device)).detach()
        judged = F.binary_cross_entropy_with_logits
        discriminator_loss = judged(self.discriminator(real), ones) + judged(self.discriminator(fake), zeros)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.toggle_optimizer(generator_optimizer)
        fake = self(torch.randn(len(real), NUM_NOISE, device=self.device))
        generator_loss = judged(self.discriminator(fake), ones)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)
        self.log_dict({"generator_loss": generator_loss, "discriminator_loss": discriminator_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.SGD(network.parameters(), lr=self.lr, momentum=0.5) for network in networks]


def main() -> None:
    has_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if has_gpus else 2)
    parser.add_argument("--max-epochs", type=int, default=20)
    arguments = parser.parse_args()

    seed_everything(1, workers=True)
    trainer = Trainer(
        accelerator="gpu" if has_gpus else "cpu",
        devices=arguments.devices,
        strategy=lowbw.DGCStrategy(find_unused_parameters=True),
        callbacks=[lowbw.SparsityWarmup(begin_step=40, steps=40, sparsity=[0.9, 0.99]), lowbw.TrafficMonitor()],
        max_epochs=arguments.max_epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsGAN(), datamodule=DigitsData())


if __name__ == "__main__":
    main()
