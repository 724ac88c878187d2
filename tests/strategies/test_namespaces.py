"""`lightning` and `pytorch_lightning`: each takes strategies and callbacks of its own, and trains to the same bits.

All of it runs in ranks and programs of its own, so that the process of the tests does not import `pytorch_lightning`.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_lowbw as lowbw
from lightning_lowbw import namespaces
from lightning_lowbw.comm.agreement import digest
from tests.programs import run_script
from tests.ranks import on_ranks, run_ranks

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def make_trainer(pl: Any, strategy: Any, num_ranks: int = 2, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=num_ranks, **{**quiet, "max_epochs": 1, **options})


# Names and classes ----------------------------------------------------------------------------------------------------


@on_ranks(1, fresh=True)
def test_the_registries_of_both_have_every_name() -> None:
    assert "pytorch_lightning" not in sys.modules, "the import of lightning_lowbw must not take longer"
    ours, theirs = (importlib.import_module(f"{package}.strategies").StrategyRegistry for package in PACKAGES)
    names = [name for name in ours if ours[name]["strategy"].__module__.startswith("lightning_lowbw.")]
    assert len(names) > 80
    for name in names:
        strategy, twin = ours.get(name), theirs.get(name)
        assert type(strategy) is not type(twin)
        assert twin.__module__ == strategy.__module__.replace("lightning_lowbw.", "lightning_lowbw.mirror.", 1)
        assert repr(twin) == repr(strategy)
        assert getattr(twin, "_start_method", None) == getattr(strategy, "_start_method", None)


@on_ranks(1)
def test_objects_of_the_other_package_are_refused() -> None:
    """In both directions, before the first step; callbacks of this package also with a stock strategy."""
    mirror = importlib.import_module("lightning_lowbw.mirror")
    for package, own, other in ((PACKAGES[0], lowbw, mirror), (PACKAGES[1], mirror, lowbw)):
        pl, stock = importlib.import_module(package), importlib.import_module(PACKAGES[package == PACKAGES[0]])
        ours = own.__name__.replace(".", r"\.")
        words = rf"the Trainer is one of {package.partition('.')[0]}\. Import {{}} instead"
        derived = type("Mine", (other.Strategy,), {})
        for strategy, name in ((other.DGCStrategy(), "DGCStrategy"), (derived(lowbw.DGC()), "Strategy")):
            with pytest.raises(lowbw.ConfigurationError, match=words.format(rf"{ours}\.{name}")):
                make_trainer(pl, strategy)
        cases = [
            ("dgc", other.SparsityWarmup(), rf"{ours}\.SparsityWarmup"),
            ("ddp", other.TrafficMonitor(), rf"{ours}\.TrafficMonitor"),
            ("local_sgd", stock.callbacks.EarlyStopping("loss"), rf"{package}\.callbacks\..*EarlyStopping"),
        ]
        for strategy, callback, found in cases:
            with pytest.raises(lowbw.ConfigurationError, match=words.format(found)):
                make_trainer(pl, strategy, 1, callbacks=[callback]).fit(make_model(pl), make_data())
        assert make_trainer(pl, own.DGCStrategy()).strategy.method == lowbw.DGCStrategy().method
    with pytest.raises(lowbw.ConfigurationError, match="sparsity"):  # the same class of errors
        mirror.DGCStrategy(sparsity=[2.0])
    assert {*mirror.__all__} - {*lowbw.__all__} == {"register", "steps_per_epoch_of"}


# Training -------------------------------------------------------------------------------------------------------------


def make_model(pl: Any) -> Any:
    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Model()


def make_data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 64, generator=generator), torch.randint(0, 10, (48,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)  # 6 batches for each of two ranks


def make_cases(package: str) -> list[tuple[Any, list[Any]]]:
    """Return strategies or their names, and callbacks."""
    own: Any = lowbw if package == PACKAGES[0] else importlib.import_module("lightning_lowbw.mirror")
    warmup, schedule = own.SparsityWarmup(begin_epoch=0.5, epochs=0.5), own.AveragingSchedule(k_steps=3)
    return [
        (own.DGCStrategy(min_numel=100), [warmup, own.TrafficMonitor()]),
        ("local_sgd", [schedule, own.TrafficMonitor()]),
        ("ddp", [own.TrafficMonitor()]),
        ("lowbw", []),
    ]


def train(package: str, number: int, folder: Path | None = None, **options: Any) -> tuple[Any, ...]:
    """Return the weights and what was logged; with a folder, resume from the checkpoint in it, and leave one."""
    pl = importlib.import_module(package)
    strategy, callbacks = make_cases(package)[number]
    assert all(isinstance(each, pl.Callback) for each in callbacks)
    path = None
    if folder is not None:
        callbacks = [*callbacks, pl.callbacks.ModelCheckpoint(folder, save_last=True)]
        options |= {"enable_checkpointing": True}
        path = folder / "last.ckpt"
    trainer, model, data = make_trainer(pl, strategy, callbacks=callbacks, **options), make_model(pl), make_data()
    trainer.fit(model, data, data, ckpt_path=path if path is not None and path.exists() else None)
    assert isinstance(strategy, str) or trainer.strategy is strategy
    assert type(trainer.strategy).__mro__[-3].__module__.startswith(package)
    assert [type(each).__name__ for each in trainer.callbacks].count("TrafficMonitor") <= 1
    logged = {**trainer.callback_metrics, **trainer.logged_metrics}
    logged = {name: float(value) for name, value in logged.items() if "exposed" not in name}
    return digest(model.parameters()), trainer.global_step, logged


@on_ranks(2)
def test_trains_to_the_same_bits() -> None:
    for number in range(4):
        options = {"gradient_clip_val": 1.0, "enable_progress_bar": True}
        first, second = (train(package, number, **options) for package in PACKAGES)
        assert first == second, number
        assert first[1] == 6
        has_monitor = number != 3  # of the callbacks; what "lowbw" brings logs nothing
        assert ("traffic/bytes_sent" in first[2]) == has_monitor


@on_ranks(2)
def test_a_checkpoint_of_either_is_resumed_by_the_other(tmp_path: Path) -> None:
    whole = train(PACKAGES[1], 0, max_epochs=2)
    for first, second in (PACKAGES, PACKAGES[::-1]):
        path = tmp_path / first
        train(first, 0, path)
        assert (path / "last.ckpt.ranks").exists()
        assert train(second, 0, path, max_epochs=2)[:2] == whole[:2]


# Processes and installations ------------------------------------------------------------------------------------------


def pickled() -> bytes:
    pl, mirror = map(importlib.import_module, ("pytorch_lightning", "lightning_lowbw.mirror"))
    trainer = make_trainer(pl, mirror.AutoStrategy(start_method="spawn"), callbacks=[mirror.TrafficMonitor()])
    return pickle.dumps((trainer.strategy, trainer.callbacks))


def load_pickled(data: bytes) -> None:
    assert "pytorch_lightning" not in sys.modules
    strategy, callbacks = pickle.loads(data)
    assert repr(strategy) == repr(lowbw.AutoStrategy())
    assert namespaces.package_of(strategy) == "pytorch_lightning"
    assert "dgc" in importlib.import_module("pytorch_lightning.strategies").StrategyRegistry
    mirror = importlib.import_module("lightning_lowbw.mirror")
    assert any(type(callback) is mirror.TrafficMonitor for callback in callbacks)


def test_a_new_process_can_load_what_a_trainer_has() -> None:
    """Which imports the mirror before `pytorch_lightning`. Whole trainings that spawn: test_launchers.py."""
    run_ranks(load_pickled, 1, run_ranks(pickled, 1)[0], fresh=True)


ONLY_ONE = """
import sys
from tests.programs import forget_packages
forget_packages("lightning_lowbw", "lightning", "pytorch_lightning")
sys.modules["lightning"] = None  # as if it were not installed
import lightning_lowbw as lowbw
import lightning_lowbw.cli, lightning_lowbw.tools.demo.__main__, lightning_lowbw.tools.zoo
import pytorch_lightning as pl
from lightning_lowbw import namespaces
from tests.strategies.test_namespaces import make_data, make_model, make_trainer

for strategy in ("local_sgd", lowbw.DGCStrategy(rampup_begin_step=2)):
    trainer = make_trainer(pl, strategy, 1, callbacks=[lowbw.TrafficMonitor()])
    trainer.fit(make_model(pl), make_data())
    assert trainer.global_step == 12
    assert type(trainer.strategy).__module__.startswith("lightning_lowbw.strategies."), type(trainer.strategy)
hidden = [name for name in sys.modules if namespaces.PACKAGES.get(name.partition(".")[0]) == "lightning"]
assert hidden == ["lightning"], hidden
assert namespaces.LOGGER == "pytorch_lightning.lightning_lowbw"
assert namespaces.MIRROR not in sys.modules
"""


def test_pytorch_lightning_is_enough(tmp_path: Path) -> None:
    script = tmp_path / "only_one.py"
    script.write_text(ONLY_ONE)
    run_script(tmp_path, str(script))
