"""The small tasks: what they serve is fixed and disjoint, and their models learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_lowbw.tools.zoo import ByteLanguageModel, DigitsClassifier, DigitsData, StdlibText
from lightning_lowbw.tools.zoo.text import read_splits
from tests.tiny import QUIET

TINY_MODEL = {"d_model": 32, "num_layers": 1, "num_heads": 2}


def fit(model: pl.LightningModule, data: pl.LightningDataModule, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(accelerator="cpu", devices=1, **QUIET, **options)
    trainer.fit(model, datamodule=data)
    return trainer


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Twenty files of 500 bytes, each of its own letter."""
    for number in range(20):
        (tmp_path / f"module_{number:02}.py").write_text(chr(ord("a") + number) * 500)
    return tmp_path


@pytest.mark.parametrize("model_class", [DigitsClassifier, ByteLanguageModel])
def test_knobs_reach_the_optimizer(model_class: Any) -> None:
    for knobs, kind in (({}, torch.optim.SGD), ({"optimizer": "adamw", "lr": 0.2}, torch.optim.AdamW)):
        optimizer = model_class(weight_decay=0.25, **knobs).configure_optimizers()["optimizer"]
        assert type(optimizer) is kind
        assert optimizer.param_groups[0]["weight_decay"] == 0.25
        assert optimizer.param_groups[0]["lr"] == knobs.get("lr", 0.05 if model_class is DigitsClassifier else 0.3)
    for knob in ("optimizer", "schedule"):
        with pytest.raises(ValueError, match=f"{knob}='best'; choose one of '"):
            model_class(**{knob: "best"})


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle"])
def test_schedules_end_with_the_training(schedule: str, sources: Path) -> None:
    model = ByteLanguageModel(**TINY_MODEL, lr=0.1, schedule=schedule)
    data = StdlibText(batch_size=4, context=16, num_train=40, root=str(sources))
    trainer = fit(model, data, max_epochs=1, limit_val_batches=0)
    assert trainer.global_step == 10
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.01  # a tenth of the peak
    with pytest.raises(ValueError, match="give the Trainer max_epochs or max_steps"):
        fit(model, data, max_epochs=-1)


def test_digits_are_split_once_and_for_all() -> None:
    first, second = DigitsData(), DigitsData(batch_size=8)
    for seed, data in enumerate((first, second)):
        torch.manual_seed(seed)
        data.setup("fit")
    sizes = {name: len(split) for name, split in first.splits.items()}
    assert sizes == {"train": 1257, "val": 180, "test": 360}
    for name in sizes:
        for left, right in zip(first.splits[name].tensors, second.splits[name].tensors, strict=True):
            assert torch.equal(left, right)
    images = torch.cat([split.tensors[0] for split in first.splits.values()])
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)


def test_text_is_dealt_by_file_without_tests_and_packages_up_to_a_limit(sources: Path) -> None:
    for folder in ("test", "site-packages", "package/tests"):
        (sources / folder).mkdir(parents=True)
        (sources / folder / "a.py").write_text("X" * 500)
    letters = {name: {chr(byte) for byte in text.tolist()} for name, text in read_splits(sources, 10_000).items()}
    assert letters == {"train": set("abcdefghklmnopqr"), "val": set("is"), "test": set("jt")}
    assert sum(len(text) for text in read_splits(sources, 1_234).values()) == 1_234
    with pytest.raises(ValueError, match="raise limit_bytes, or name a folder of at least 10 files"):
        StdlibText(limit_bytes=1000, root=str(sources)).setup("fit")


def test_crops_are_fixed_and_shifted_by_one(sources: Path) -> None:
    options: dict[str, Any] = {"context": 16, "num_train": 50, "num_eval": 5, "root": str(sources)}
    first, second, other = StdlibText(**options), StdlibText(**options), StdlibText(**options, seed=1)
    for data in (first, second, other):
        data.setup("fit")
    assert {name: len(split) for name, split in first.splits.items()} == {"train": 50, "val": 5, "test": 5}
    assert torch.equal(first.splits["train"].offsets, second.splits["train"].offsets)
    assert not torch.equal(first.splits["train"].offsets, other.splits["train"].offsets)
    for crop, targets in (first.splits["train"][index] for index in range(50)):
        assert crop.shape == targets.shape == (16,)
        assert torch.equal(crop[1:], targets[:-1])


def test_a_language_model_sees_earlier_bytes_in_their_order_and_no_later_one() -> None:
    model = ByteLanguageModel(**TINY_MODEL).eval()
    text = torch.randint(256, (2, 12))
    changed, swapped = text.clone(), text[:, [1, 0, *range(2, 12)]]
    changed[:, 7:] = 0
    with torch.no_grad():
        logits = model(text)
        torch.testing.assert_close(logits[:, :7], model(changed)[:, :7])
        assert not torch.allclose(logits[:, 7:], model(changed)[:, 7:])
        assert not torch.allclose(logits[:, 2], model(swapped)[:, 2], rtol=1e-6, atol=1e-7)


def test_text_is_learned(sources: Path) -> None:
    model = ByteLanguageModel(**TINY_MODEL)
    data = StdlibText(context=16, num_train=960, root=str(sources))
    trainer = fit(model, data, max_epochs=1, limit_val_batches=2)
    # Two letters follow themselves in each file: far below the log(256) = 5.5 of a guess.
    assert trainer.callback_metrics["train_loss"] < 2.0
    assert set(trainer.callback_metrics) >= {"val_loss", "val_acc"}
