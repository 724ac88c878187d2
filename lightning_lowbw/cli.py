"""The entry point `lowbw-train`: composes a configuration with Hydra, and builds the objects that it names.

No logic lives here, only composition. Values that depend on the machine and on the launcher (accelerator, devices,
start method, output folder) are resolvers in the configuration files, so that `lowbw-train --cfg job --resolve` shows
every choice.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

import lightning_lowbw  # noqa: F401  registers the strategy names, so that strategy="dgc" works in any configuration


def find_conf_dir() -> Path:
    """Return the folder of the configuration files: inside an installed package, beside it in a source tree."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


def is_launched_externally() -> bool:
    """Return whether torchrun, SLURM or another launcher has already started one process per device."""
    clusters = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    return LightningEnvironment().creates_processes_externally or any(cluster.detect() for cluster in clusters)


def resolve_start_method() -> str:
    """Choose how ranks are started.

    If a launcher has started processes, "popen", which then starts none. Otherwise "spawn": children of "popen" would
    run this program again, with its output folder, and under --multirun with its whole sweep.
    """
    return "popen" if is_launched_externally() else "spawn"


def resolve_accelerator() -> str:
    """Choose GPUs if CUDA is available, else CPUs (never "auto": DDP cannot train on Apple's MPS)."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def resolve_devices(accelerator: str) -> int | str:
    """Choose as many devices per node as a launcher started processes; without one all GPUs, or two CPU processes."""
    default = "2" if accelerator == "cpu" else "auto"
    devices = _from_launcher("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE") or default
    return int(devices) if devices.isdecimal() else devices


def resolve_num_nodes() -> int:
    """Choose as many nodes as the launcher uses, else one."""
    return int(_from_launcher("GROUP_WORLD_SIZE", "SLURM_NNODES") or 1)


def _from_launcher(*names: str) -> str | None:
    """Return the value of the first environment variable in `names` that a launcher has set."""
    values = (os.environ.get(name) for name in names)
    return next((value for value in values if value), None) if is_launched_externally() else None


@cache
def _temporary_dir() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is deleted when this process ends."""
    return tempfile.TemporaryDirectory(prefix="lowbw-train-")


def resolve_rank_zero_dir(path: str) -> str:
    """Return the path on rank zero, and a temporary folder in the other processes that a launcher started."""
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]  # set on import, from the launcher's environment
    is_rank_zero = rank == 0 and int(os.environ.get("NODE_RANK", 0)) == 0
    return path if is_rank_zero else _temporary_dir().name


def register_resolvers() -> None:
    """Register this module's resolvers with OmegaConf. Idempotent."""
    for resolver in (
        resolve_start_method,
        resolve_accelerator,
        resolve_devices,
        resolve_num_nodes,
        resolve_rank_zero_dir,
    ):
        OmegaConf.register_new_resolver(f"lowbw.{resolver.__name__.removeprefix('resolve_')}", resolver, replace=True)


def train(config: DictConfig) -> float | None:
    """Build everything that a configuration names and train.

    Args:
        config: the configuration, as composed from conf/train.yaml.

    Returns:
        The metric that `optimized_metric` names, for a sweep; None if there is no name.

    Raises:
        ValueError: If the run logged no such metric.
    """
    seed_everything(config.seed, workers=True)

    def build(node: Any, **options: Any) -> Any:
        # Plain lists and dictionaries: spawned processes unpickle them, and no constructor expects a ListConfig.
        return instantiate(node, _convert_="all", **options)

    model, strategy = build(config.model), build(config.strategy)
    data = build(config.data) or None  # data=none is an empty node
    # callbacks.progress_bar=null leaves the progress bar out.
    callbacks, loggers = (
        [each for each in build(config[group]).values() if each is not None] for group in ("callbacks", "logger")
    )
    trainer = build(config.trainer, _partial_=True)(strategy=strategy, callbacks=callbacks, logger=loggers)

    trainer.fit(model, datamodule=data, ckpt_path=config.ckpt_path)
    metrics = dict(trainer.callback_metrics)
    if config.test:
        trainer.test(model, datamodule=data)
        metrics |= trainer.callback_metrics

    if config.optimized_metric is None:
        return None
    if config.optimized_metric not in metrics:
        raise ValueError(f"optimized_metric={config.optimized_metric!r} was not logged; logged were {sorted(metrics)}")
    return float(metrics[config.optimized_metric])


def main() -> None:
    """Run `lowbw-train`."""
    run(train, "train")


def run(task: Callable[[DictConfig], Any], name: str) -> None:
    """Run a task with the configuration that Hydra composes from the command line and this file of the folder."""
    # As `python -m` does: model._target_=my_module.MyModule then finds my_module.py in the working folder.
    sys.path.insert(0, os.getcwd())
    register_resolvers()
    hydra.main(version_base="1.3", config_path=str(find_conf_dir()), config_name=name)(task)()


if __name__ == "__main__":
    main()
