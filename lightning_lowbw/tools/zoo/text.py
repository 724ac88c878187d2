"""Byte-level language modelling of the Python standard library's own source code.

Every machine that runs this package has that text on its disk, so the task needs no download and no tokenizer. The
model is a plain pre-norm transformer decoder; its sizes are knobs, from 0.6 million parameters (the default) to tens
of millions for benchmarks.
"""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_lowbw.tools.zoo.optimizers import OptimizerName, ScheduleName, check_choice, configure_optimizer

DEFAULT_LR = {"sgd": 0.3, "adamw": 2e-3}
NUM_BYTES = 256  # the vocabulary
INIT_STD = 0.02  # GPT-2
ROTARY_BASE = 10_000  # RoFormer
SPLIT_EVERY = 10  # of ten consecutive files one is for validation and one for the test
# Not library text: third-party packages, and test suites, whose long tables of literals are no language.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def rotary_angles(length: int, head_width: int, device: torch.device) -> Tensor:
    """Return the angle of each position and pair of channels, shape (length, head_width // 2), in radians.

    Source: RoFormer, arXiv 2104.09864, section 3.2.2. Computed and not stored: DDP would broadcast a buffer at every
    step.
    """
    pairs = torch.arange(0, head_width, 2, device=device) / head_width
    return torch.outer(torch.arange(length, device=device), ROTARY_BASE**-pairs)


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn queries or keys (..., length, head_width) by their positions: products then depend on distance alone."""
    left, right = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(heads.dtype)


class Block(nn.Module):
    """Apply causal self-attention and a two-layer perceptron, each on the normalised input and added to it.

    Args:
        d_model: Width of the residual stream.
        num_heads: Number of attention heads; divides d_model.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.perceptron_norm = nn.LayerNorm(d_model)
        self.perceptron_in = nn.Linear(d_model, 4 * d_model, bias=False)
        self.perceptron_out = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, stream: Tensor, angles: Tensor) -> Tensor:
        """Map the residual stream (batch, length, d_model) to its next state; angles as from `rotary_angles`."""
        batch, length, d_model = stream.shape
        heads = self.query_key_value(self.attention_norm(stream)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query, angles), rotate(key, angles), value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, d_model))
        update: Tensor = self.perceptron_out(F.gelu(self.perceptron_in(self.perceptron_norm(stream))))
        return stream + update


class ByteLanguageModel(LightningModule):
    """Predict the next byte with a small transformer decoder.

    About `12 * num_layers * d_model**2 + 512 * d_model` parameters: 0.7 million by default, 11 million with
    `d_model=384, num_layers=6, num_heads=6`.

    Args:
        d_model: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads per block; 2 * num_heads divides d_model.
        optimizer: "sgd" or "adamw".
        lr: Learning rate (peak, for "one_cycle"). By default 0.3 for "sgd", 2e-3 for "adamw".
        momentum: Momentum of "sgd".
        weight_decay: L2 term of "sgd", decoupled decay of "adamw".
        nesterov: Whether "sgd" looks ahead.
        schedule: "constant", "cosine" or "one_cycle".

    Raises:
        ValueError: If 2 * num_heads does not divide d_model, or a choice is unknown.
    """

    def __init__(
        self,
        d_model: int = 128,
        num_layers: int = 3,
        num_heads: int = 4,
        *,
        optimizer: OptimizerName = "sgd",
        lr: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        schedule: ScheduleName = "constant",
    ) -> None:
        super().__init__()
        check_choice("optimizer", optimizer, OptimizerName)
        check_choice("schedule", schedule, ScheduleName)
        lr = DEFAULT_LR[optimizer] if lr is None else lr
        if d_model % (2 * num_heads):
            raise ValueError(f"num_heads={num_heads} does not split d_model={d_model} into heads of even width")
        self.save_hyperparameters()
        self.head_width = d_model // num_heads
        self.byte_embedding = nn.Embedding(NUM_BYTES, d_model)
        self.blocks = nn.ModuleList(Block(d_model, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, NUM_BYTES, bias=False)
        self.val_loss = MeanMetric()
        self.val_acc = MulticlassAccuracy(NUM_BYTES, average="micro")
        self.test_acc = MulticlassAccuracy(NUM_BYTES, average="micro")
        self._initialize_(num_layers)

    def _initialize_(self, num_layers: int) -> None:
        """Draw the weights as GPT-2 does: the 2 * num_layers additions to the stream keep its variance at one."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_added = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * num_layers) if is_added else INIT_STD)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes (batch, length) to logits of the byte after each (batch, length, 256)."""
        angles = rotary_angles(text.shape[1], self.head_width, text.device)
        stream = self.byte_embedding(text)
        for block in self.blocks:
            stream = block(stream, angles)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._loss_and_prediction(batch)
        # Each rank logs its own loss: averaging it over ranks would cost a round trip per step on the slow link.
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True, sync_dist=False)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, prediction = self._loss_and_prediction(batch)
        self.val_loss.update(loss, weight=len(prediction))
        self.val_acc.update(prediction, batch[1])
        # Metrics sum over ranks once, at the end of the epoch.
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        _, prediction = self._loss_and_prediction(batch)
        self.test_acc.update(prediction, batch[1])
        self.log("test_acc", self.test_acc)

    def _loss_and_prediction(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        text, targets = batch
        logits = self(text)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits.argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return configure_optimizer(self)


class TextCrops(Dataset[tuple[Tensor, Tensor]]):
    """Cut crops of one length out of a text: (context bytes, the same shifted by one).

    Args:
        text: The bytes, shape (length,), uint8.
        offsets: The first byte of each crop. Fixed at construction, so that an index means the same crop on every rank.
        context: Length of a crop in bytes.
    """

    def __init__(self, text: Tensor, offsets: Tensor, context: int) -> None:
        self.text = text
        self.offsets = offsets
        self.context = context

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = int(self.offsets[index])
        crop = self.text[begin : begin + self.context + 1].long()
        return crop[:-1], crop[1:]


class StdlibText(LightningDataModule):
    """Serve crops of the Python standard library's source, or of the Python files of any other folder.

    Files are taken in the order of their paths until limit_bytes is reached. The ninth of ten consecutive files goes to
    validation and the tenth to the test, so no file is in two splits. Training crops begin at random places, fixed by
    the seed; validation and test crops follow each other without overlap. The text differs a little between Python
    versions, and so do the numbers trained on it.

    Args:
        batch_size: Crops per batch and rank.
        context: Length of a crop in bytes.
        limit_bytes: How much text to read, all splits together.
        num_train: Training crops per epoch.
        num_eval: Validation and test crops, at most.
        root: Folder of *.py files; None is the standard library of the running Python.
        num_workers: Loader processes. The data is in memory, so more than 0 rarely pays.
        seed: Seed of the places where training crops begin.
    """

    def __init__(
        self,
        batch_size: int = 16,
        context: int = 64,
        *,
        limit_bytes: int = 2_000_000,
        num_train: int = 16_000,
        num_eval: int = 512,
        root: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.splits: dict[str, TextCrops] = {}

    def setup(self, stage: str) -> None:
        if self.splits:
            return
        root = Path(self.hparams["root"] or sysconfig.get_path("stdlib"))
        context, num_train, num_eval = (self.hparams[name] for name in ("context", "num_train", "num_eval"))
        texts = read_splits(root, self.hparams["limit_bytes"])
        shortest = min(texts, key=lambda name: len(texts[name]))
        if len(texts[shortest]) <= context:
            raise ValueError(
                f"{root} has {len(texts[shortest])} bytes of Python source for the {shortest} split, less than one crop"
                f" of context={context}: raise limit_bytes, or name a folder of at least {SPLIT_EVERY} files as root"
            )
        generator = torch.Generator().manual_seed(self.hparams["seed"])
        offsets = torch.randint(len(texts["train"]) - context, (num_train,), generator=generator)
        self.splits["train"] = TextCrops(texts["train"], offsets, context)
        for name in ("val", "test"):
            offsets = torch.arange(0, len(texts[name]) - context, context)[:num_eval]
            self.splits[name] = TextCrops(texts[name], offsets, context)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader("test", shuffle=False)

    def _loader(self, split: str, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            self.splits[split],
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=self.hparams["num_workers"],
        )


def find_sources(root: Path) -> list[Path]:
    """Return the Python files under a folder in the order of their paths, without tests and third-party packages."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = {*folders} - EXCLUDED_FOLDERS  # are not entered
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_splits(root: Path, limit_bytes: int) -> dict[str, Tensor]:
    """Read Python files until a limit and deal them to three texts.

    Args:
        root: Folder to read.
        limit_bytes: The size of the text; the last file is cut there.

    Returns:
        The bytes of "train", "val" and "test", each of shape (length,), uint8.
    """
    texts = {"train": bytearray(), "val": bytearray(), "test": bytearray()}
    position_to_split = {SPLIT_EVERY - 2: "val", SPLIT_EVERY - 1: "test"}
    remaining = limit_bytes
    for number, path in enumerate(find_sources(root)):
        content = path.read_bytes()[:remaining]
        texts[position_to_split.get(number % SPLIT_EVERY, "train")] += content
        remaining -= len(content)
        if remaining == 0:
            break
    # frombuffer refuses an empty buffer.
    return {
        name: torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        for name, text in texts.items()
    }
