"""`lowbw-train`: every configuration file composes and builds; a run leaves one output folder, however launched."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig
from packaging.requirements import Requirement

from lightning_lowbw import Compression, Topology, cli
from tests.programs import ROOT, TORCHRUN, run_python, run_script

CONF = ROOT / "conf"
GROUPS = ("strategy", "model", "data", "callbacks", "logger")
CHOICES = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
CHOICES.remove("data=custom")
MY_TASK = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule

class MyModule(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        assert self.trainer.world_size == 2
        loss = self.layer(batch).square().mean()
        self.log("my_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

class MyData(LightningDataModule):
    def __init__(self, widths):
        super().__init__()
        assert type(widths) is list
        self.width = widths[0]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, self.width))
"""
MINE = ["model._target_=my_task.MyModule", "data=custom", "data._target_=my_task.MyData"]
MY_WIDTH = ["+model.width=4", "+data.widths=[4]"]


@pytest.fixture
def composing() -> Iterator[None]:
    cli.register_resolvers()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield
    GlobalHydra.instance().clear()


def compose_train(*overrides: str) -> DictConfig:
    return compose("train", overrides=["output_dir=somewhere", *overrides])


def read_metric(metrics_file: Path, name: str) -> list[float]:
    with metrics_file.open(newline="") as file:
        return [float(line[name]) for line in csv.DictReader(file) if line[name]]


@pytest.fixture
def my_folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(MY_TASK)
    return tmp_path


def test_the_first_line_of_each_file_is_a_command_that_composes(composing: None) -> None:
    for path in sorted(CONF.rglob("*.yaml")):
        lines = path.read_text().splitlines()
        first = lines[1] if lines[0].startswith("# @package") else lines[0]
        program, _, command = first.removeprefix("# lowbw-").partition(" ")
        overrides = shlex.split(command.split("   ")[0]) if command[:1].strip() else []
        assert compose(program, overrides=overrides), path


def test_each_choice_builds_what_it_names(composing: None) -> None:
    for choice in CHOICES:
        node = compose_train(choice)[choice.split("=")[0]]
        built = instantiate(node, _convert_="all")
        pairs = [(node, built)] if "_target_" in node else zip(node.values(), built.values(), strict=True)
        for each, made in pairs:
            assert type(made).__name__ == each._target_.split(".")[-1]


def test_the_presets_of_the_command_line_are_those_of_the_names(composing: None) -> None:
    names = "dgc post_local_sgd adaptive_local_sgd diloco sparse_loco streaming_diloco powersgd local_sgd_elastic "
    for name in (names + "hidden_local_sgd diloco_elastic sparse_loco_elastic").split():
        built = instantiate(compose_train(f"strategy={name}").strategy)
        assert built.method == StrategyRegistry.get(name).method


def test_parts_of_a_compression_are_overridden_one_by_one(composing: None) -> None:
    overrides = ("strategy.compression.chunk=null", "strategy.compression.decay=0.9", "strategy.num_fragments=3")
    method = instantiate(compose_train("experiment=text_sparse_loco", *overrides).strategy).method
    assert method.what == Compression(chunk=None, decay=0.9)
    assert (method.when.k_steps, method.when.begin_step, method.when.num_fragments) == (25, 0, 3)


def test_a_list_of_nodes_is_a_topology(composing: None) -> None:
    for strategy in ("dgc", "method"):
        node = compose_train(f"strategy={strategy}", "strategy.topology=[[0,1],[2,3]]").strategy
        assert instantiate(node, _convert_="all").method.where.topology == Topology(((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("spawn", 2, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, ("popen", 4, 2)),
    ],
)
def test_the_launcher_decides_how_many_processes_there_are(
    variables: dict[str, str], expected: tuple[str, int, int], composing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if variables:  # what Lightning asks for
        for name in ("WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "8")
    config = compose_train("trainer.accelerator=cpu")
    assert (config.strategy.start_method, config.trainer.devices, config.trainer.num_nodes) == expected


def test_only_rank_zero_keeps_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.resolve_rank_zero_dir("outputs/now") == "outputs/now"
    with monkeypatch.context() as node:
        node.setenv("NODE_RANK", "1")
        assert Path(cli.resolve_rank_zero_dir("outputs/now")).parent != Path("outputs")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    folder = Path(cli.resolve_rank_zero_dir("outputs/now"))
    assert folder.is_dir()
    cli._temporary_dir().cleanup()
    cli._temporary_dir.cache_clear()
    assert not folder.exists()


def test_a_sweep_gets_the_metric_it_asks_for(composing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli.train(compose_in_one_process(monkeypatch, "optimized_metric=test_acc", "test=true"))
    assert found is not None
    assert 0 < found <= 1
    with pytest.raises(ValueError, match=r"optimized_metric='speed' was not logged; logged were \['train_loss', "):
        cli.train(compose_in_one_process(monkeypatch, "optimized_metric=speed"))


def compose_in_one_process(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> DictConfig:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # written by seed_everything
        monkeypatch.setenv(name, "0")
    return compose_train(
        *("strategy=ddp", "strategy._target_=lightning.pytorch.strategies.SingleDeviceStrategy"),
        *("~strategy.start_method", "~callbacks.traffic_monitor", "~callbacks.model_checkpoint", "logger=none"),
        *("model=digits_classifier", "data=digits", "trainer.accelerator=cpu", "trainer.devices=1"),
        *("trainer.limit_train_batches=2", "+trainer.enable_checkpointing=false", *overrides),
    )


def make_sources(folder: Path) -> Path:
    sources = folder / "sources"
    sources.mkdir()
    for number in range(10):
        (sources / f"module_{number}.py").write_text("value = 1\n" * 200)
    return sources


def test_the_command_of_the_documentation(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        *("-m", "lightning_lowbw.cli"),
        *("strategy=dgc", "strategy.sparsity=[0.75,0.99,0.999]", "trainer.max_epochs=3", "data.batch_size=64"),
        *(f"+data.root={make_sources(tmp_path)}", "+data.num_train=256", "+model.num_layers=1"),
        *("trainer.log_every_n_steps=1", "strategy.rampup_begin_step=2", "strategy.rampup_step=3"),
    )
    (output,) = tmp_path.glob("outputs/*/*")
    density = read_metric(output / "csv/metrics.csv", "traffic/density")
    assert len(density) == 3 * 256 // (2 * 64)
    whole = (density[-1] - 0.001) / 0.999  # the share of the small tensors, of which all is sent
    assert 0 < whole < 0.005
    assert density == pytest.approx([whole + (1 - whole) * each for each in (1, 1, 0.25, 0.01, 0.001, 0.001)], rel=0.05)
    assert list((output / "checkpoints").glob("*.ckpt"))


@pytest.mark.slow
def test_a_sweep_over_my_own_modules_makes_one_folder_per_job(my_folder: Path) -> None:
    program = ("-m", "lightning_lowbw.cli", "--multirun", "seed=1,2")
    run_script(my_folder, *program, *MINE, *MY_WIDTH, "strategy=dgc", "logger=none")
    assert not (my_folder / "outputs").exists()
    assert sorted(folder.name for folder in my_folder.glob("multirun/*/*/*") if folder.is_dir()) == ["0", "1"]


@pytest.mark.slow
def test_torchrun_with_my_own_configuration_makes_one_folder(my_folder: Path) -> None:
    (my_folder / "my_conf/model").mkdir(parents=True)
    (my_folder / "my_conf/model/mine.yaml").write_text("_target_: my_task.MyModule\nwidth: 6\n")
    run_python(
        my_folder,
        *(*TORCHRUN, "-m", "lightning_lowbw.cli"),
        *("--config-dir", "my_conf", "model=mine", *MINE[1:], "+data.widths=[6]", "callbacks=sparsity_warmup"),
        *("trainer.log_every_n_steps=1", "optimized_metric=my_loss"),
    )
    (output,) = my_folder.glob("outputs/*/*")
    assert len(read_metric(output / "csv/metrics.csv", "my_loss")) == 4
    assert {path.name for path in my_folder.iterdir()} <= {"my_conf", "my_task.py", "outputs", "__pycache__"}


def test_what_is_built_requires_releases_that_work_and_has_types() -> None:
    """`make test-wheel` builds the wheel, installs it and trains with it."""
    assert (ROOT / "lightning_lowbw/py.typed").is_file()  # or type checkers ignore the annotations
    required = re.findall(r'"((?:pytorch-)?lightning>=[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert len(required) == 2
    for each in map(Requirement, required):
        found = [*each.specifier.filter(["2.4.0", "2.5.0", "2.6.1", "2.6.2", "2.6.3", "2.6.4"])]
        assert found == ["2.5.0", "2.6.1", "2.6.4"]
