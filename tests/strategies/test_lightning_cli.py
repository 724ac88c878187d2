"""The strategies and the callbacks in a LightningCLI: by class, as YAML, and printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI

from lightning_lowbw import AveragingSchedule, SparsityWarmup, Strategy, TrafficMonitor
from tests.programs import ROOT
from tests.tiny import QUIET

GUIDE = ROOT / "docs" / "api.md"
DEFAULTS: dict[str, Any] = {**QUIET, "accelerator": "cpu", "devices": 2}
SPARSE = {"sparsity": [0.9, 0.99], "rampup_step": 10, "exclude": ["*.bias"]}
INT4 = {"payload": "quantized", "value_dtype": "int4"}
LOCAL = {"k_steps": 4, "begin_step": 0.5, "compression": {"decay": 0.5}}
# By class: what is given in `init_args`, and what the strategy's repr says of it.
CLASSES: dict[str, tuple[dict[str, Any], str]] = {
    "DGCStrategy": (SPARSE, "EveryStep(rampup_step=10, sparsity=(0.9, 0.99))"),
    "LocalSGDStrategy": (LOCAL, "EveryK(k_steps=4, begin_step=0.5), what=TopK(density=0.015625, chunk=4096"),
    "Strategy": ({"method": {"what": INT4}}, "Quantized(value_dtype='int4')"),
}
OF_ALL = {"topology": 2, "find_unused_parameters": True, "bucket_cap_mb": 7, "timeout": "0:10:00"}

CommandLine = Callable[..., LightningCLI]


class Model(pl.LightningModule):
    """Nothing is trained here."""


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning calls there

    def run(*arguments: str) -> LightningCLI:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        options: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
        return LightningCLI(Model, run=False, trainer_defaults=DEFAULTS, **options)

    return run


def write(folder: Path, trainer: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    return f"--config={path}"


@pytest.mark.parametrize("name", CLASSES)
def test_by_class_from_yaml_and_back(name: str, command_line: CommandLine, tmp_path: Path, capsys: Any) -> None:
    options, words = CLASSES[name]
    strategy = {"class_path": f"lightning_lowbw.{name}", "init_args": {**OF_ALL, **options}}
    built = command_line(write(tmp_path, {"strategy": strategy})).trainer.strategy
    assert isinstance(built, Strategy)
    assert words in repr(built)
    assert built.method.where.topology == 2
    assert built._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 7}
    assert built._timeout == timedelta(minutes=10)

    capsys.readouterr()
    with pytest.raises(SystemExit):
        command_line(f"--config={tmp_path}/config.yaml", "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    again = command_line(f"--config={printed}").trainer.strategy
    assert again.method == built.method
    assert repr(again) == repr(built)
    assert again._timeout == built._timeout


def test_by_class_on_the_command_line_and_in_its_help(command_line: CommandLine, capsys: Any) -> None:
    flags = ["--trainer.strategy.topology=2", "--trainer.strategy.find_unused_parameters=true"]
    built = command_line("--trainer.strategy.class_path=lightning_lowbw.DGCStrategy", *flags).trainer.strategy
    assert isinstance(built, Strategy)
    assert built.method.where.topology == 2  # a number, no name
    assert built._ddp_kwargs == {"find_unused_parameters": True}
    with pytest.raises(SystemExit):
        command_line("--trainer.strategy.help=lightning_lowbw.DGCStrategy")
    shown = capsys.readouterr().out
    for option in ("topology", "find_unused_parameters", "bucket_cap_mb", "start_method", "sparsity"):
        assert f"--trainer.strategy.{option} " in shown
    assert "ddp_comm_hook" not in shown


def test_callbacks(command_line: CommandLine, tmp_path: Path) -> None:
    callbacks = [
        {"class_path": "lightning_lowbw.TrafficMonitor", "init_args": {"prog_bar": False}},
        {"class_path": "lightning_lowbw.SparsityWarmup", "init_args": {"begin_epoch": 1, "sparsity": [0.9, 0.99]}},
        {"class_path": "lightning_lowbw.AveragingSchedule", "init_args": {"k_steps": 4, "begin_step": 0.5}},
    ]
    config = write(tmp_path, {"strategy": "dgc", "callbacks": callbacks})
    flags = ["--trainer.callbacks+=lightning_lowbw.SparsityWarmup", "--trainer.callbacks.begin_step=7"]
    built = command_line(config, *flags).trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    monitor, warmup, schedule, in_steps = built[:4]
    assert isinstance(monitor, TrafficMonitor)
    assert not monitor.prog_bar
    assert isinstance(warmup, SparsityWarmup)
    assert warmup.schedule(10).rampup_begin_step == 10
    assert isinstance(schedule, AveragingSchedule)
    assert isinstance(in_steps, SparsityWarmup)
    assert in_steps.schedule(10).rampup_begin_step == 7


def test_the_configurations_of_the_guide(tmp_path: Path, command_line: CommandLine) -> None:
    """Of a LightningCLI, and of Hydra."""
    by_cli, by_hydra = (text.split("```")[0] for text in GUIDE.read_text().split("```yaml\n")[1:3])
    (tmp_path / "config.yaml").write_text(by_cli)
    built = repr(command_line(f"--config={tmp_path}/config.yaml").trainer.strategy)
    assert "rampup_begin_step=500" in built
    assert repr(instantiate(yaml.safe_load(by_hydra)["strategy"])) == built
