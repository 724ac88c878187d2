"""The models that are timed: sizes of real ones, random data, so that nothing but the step is measured.

One only waits as long as a GPU would compute. And two that are trained on the zoo's data for what they reach: a small
ResNet, and GPT-2 as `transformers` builds it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowbw.tools.zoo.optimizers import configure_optimizer
from lightning_lowbw.tools.zoo.text import NUM_BYTES, ByteLanguageModel


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut (He et al., arXiv 1512.03385, figure 2)."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def mlp_25m() -> nn.Module:
    """25.1 million parameters in three layers."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32: 11.2 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    num_in = 64
    for num_out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(num_in, num_out, stride), Residual(num_out, num_out, 1)]
        num_in = num_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def transformer_10m() -> nn.Module:
    """A byte-level decoder of 10.1 million parameters."""
    return ByteLanguageModel(d_model=384, num_layers=6, num_heads=6)


def small_resnet() -> nn.Module:
    """A ResNet for the digits' images of 8 x 8: 0.3 million parameters, 0.27 in tensors of 16384 elements or more."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


Shapes = Sequence[tuple[int, ...]]


def resnet50_layers() -> list[Shapes]:
    """The parameters of ResNet-50 for 1000 classes by layer: 25.6 million (He et al., arXiv 1512.03385, table 1)."""

    def normed(num_out: int, num_in: int, size: int) -> list[Shapes]:
        return [[(num_out, num_in, size, size)], [(num_out,), (num_out,)]]

    layers, num_in = normed(64, 3, 7), 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            layers += normed(width, num_in, 1) + normed(width, width, 3) + normed(4 * width, width, 1)
            layers += normed(4 * width, num_in, 1) if block == 0 else []
            num_in = 4 * width
    return [*layers, [(1000, num_in), (1000,)]]


class Emulated(nn.Module):
    """A model that waits instead of computing, a third of the time forward, the rest evenly in the backward of layers.

    Gradients are noise of the right shapes, another one in each step. The device's clock goes on while the host works,
    as with a GPU: what DDP does between two layers takes no time unless it takes longer than the layer.
    """

    def __init__(self, layers: Sequence[Shapes], compute_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.randn(shape) / math.sqrt(math.prod(shape[1:])) for shape in shapes)
            for shapes in layers
        )
        largest = max(parameter.numel() for parameter in self.parameters())
        self.noise = torch.randn(largest + (1 << 20)) / math.sqrt(largest)
        self.compute_s, self.due_s = compute_s, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.due_s = time.perf_counter()
        self.wait(self.compute_s / 3)
        for layer in self.layers:
            x = EmulatedLayer.apply(x, self, *layer)
        return x

    def wait(self, seconds: float) -> None:
        """Wait until the device has computed for so long since what it did last."""
        self.due_s += seconds
        time.sleep(max(0.0, self.due_s - time.perf_counter()))

    def gradient(self, shape: torch.Size) -> Tensor:
        """Return noise, from another place each time."""
        begin = int(torch.randint(1 << 20, ()))
        return self.noise[begin : begin + shape.numel()].view(shape)


class EmulatedLayer(torch.autograd.Function):
    """A layer of `Emulated`: hands on its input, and knows its gradients after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Emulated, *parameters: Tensor) -> Tensor:
        ctx.model, ctx.shapes = model, [parameter.shape for parameter in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.model.wait(ctx.model.compute_s * 2 / 3 / len(ctx.model.layers))
        return (*gradients, None, *(ctx.model.gradient(shape) for shape in ctx.shapes))


class GPT2(nn.Module):
    """GPT-2 of `transformers`, from a config, over bytes: 1.2 million parameters; from bytes to logits.

    Raises:
        ModuleNotFoundError: there is no `transformers`, of which nothing else here has need.
    """

    def __init__(self, context: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 128, "n_layer": 6, "n_head": 4, "n_positions": context, "vocab_size": NUM_BYTES}
        no_tokens = {"bos_token_id": None, "eos_token_id": None}
        self.network = GPT2LMHeadModel(GPT2Config(**sizes, **no_tokens, use_cache=False))

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=text).logits
        return logits


class Scored(pl.LightningModule):
    """A network that is trained by cross-entropy, with the metrics of the zoo's modules.

    Args:
        network: from inputs to logits.
        num_classes: of the targets.
        **knobs: `optimizer`, `lr`, `momentum`, `weight_decay`, `nesterov` and `schedule`, as of the zoo's modules.
    """

    def __init__(self, network: nn.Module, num_classes: int, **knobs: object) -> None:
        super().__init__()
        self.save_hyperparameters({"momentum": 0.9, "nesterov": False, "schedule": "one_cycle", **knobs})
        self.network = network
        self.val_loss = MeanMetric()
        self.val_acc, self.test_acc = (MulticlassAccuracy(num_classes, average="micro") for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss_and_prediction(batch)[0]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, prediction = self._loss_and_prediction(batch)
        self.val_loss.update(loss, weight=len(prediction))
        self.val_acc.update(prediction, batch[1])
        self.log("val_loss", self.val_loss)
        self.log("val_acc", self.val_acc)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, prediction = self._loss_and_prediction(batch)
        self.test_acc.update(prediction, batch[1])
        self.log("test_acc", self.test_acc)

    def _loss_and_prediction(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self.network(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()), logits.argmax(-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configure_optimizer(self)


@dataclass(frozen=True)
class Workload:
    """A model with inputs for one rank.

    Attributes:
        batch: samples per rank and step; chosen so that on one CPU core a step takes a few tenths of a second.
        optimizer: "sgd" with momentum and weight decay, or "adamw".
    """

    name: str
    make: Callable[[], nn.Module]
    batch: int
    input_shape: tuple[int, ...]
    num_classes: int
    is_text: bool = False
    optimizer: str = "sgd"


class Timed(pl.LightningModule):
    """A workload as a LightningModule."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same replica everywhere
        self.workload = workload
        self.network = workload.make()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        logits = self.network(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.workload.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=True)


NUM_BATCHES = 16  # of one alone the gradient hardly changes, and all of Adam's steps are of one size


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """A few random batches again and again."""

    def __init__(self, workload: Workload, num_batches: int) -> None:
        self.num_batches = num_batches
        shape = (NUM_BATCHES, workload.batch, *workload.input_shape)
        self.inputs = torch.randint(0, workload.num_classes, shape) if workload.is_text else torch.randn(shape)
        labels = shape if workload.is_text else shape[:2]
        self.targets = torch.randint(0, workload.num_classes, labels)

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % NUM_BATCHES], self.targets[index % NUM_BATCHES]


def loader(workload: Workload, num_batches: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader of ready batches."""
    return DataLoader(Repeated(workload, num_batches), batch_size=None)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp-25M", mlp_25m, 32, (1024,), 1000),
        Workload("resnet18-11M", resnet18, 8, (3, 32, 32), 10),
        Workload("transformer-10M", transformer_10m, 4, (64,), 256, is_text=True),
        Workload("transformer-10M-adamw", transformer_10m, 4, (64,), 256, is_text=True, optimizer="adamw"),
        # A batch of 64 takes an A100 about this long in 32-bit floats; one rank per GPU.
        Workload("resnet50-emulated", lambda: Emulated(resnet50_layers(), compute_s=0.15), 1, (1000,), 1000),
    )
}
