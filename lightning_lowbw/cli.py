"""The entry points `lowbw-train`, `lowbw-plan` (Hydra) and `lowbw-check`: compose a configuration, build what it names.

No logic lives here, only composition. What depends on the machine and on the launcher (accelerator, devices, start
method, output folder) is given to the configuration files as resolvers, so that every choice is visible with
`lowbw-train --cfg job --resolve`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
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
from lightning_lowbw import check
from lightning_lowbw.arguments import check_one_of
from lightning_lowbw.cost_model import Run
from lightning_lowbw.planner import CLUSTER, Plan, make_cluster, shapes_of

NUM_STEPS = 100_000  # of a run that nothing is known of, as in conf/plan.yaml


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

    A launcher's processes are used as they are ("popen" starts none then). Otherwise "spawn": children of "popen"
    would run this program again, with its output folder, and under --multirun with its whole sweep.
    """
    return "popen" if is_launched_externally() else "spawn"


def resolve_accelerator() -> str:
    """Choose GPUs if CUDA is there, else CPUs (never "auto": DDP cannot train on Apple's MPS)."""
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
    """Return the first of these environment variables that is set, if a launcher set it."""
    values = (os.environ.get(name) for name in names)
    return next((value for value in values if value), None) if is_launched_externally() else None


@cache
def _temporary_dir() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that goes away with this process."""
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
        config: As composed from conf/train.yaml.

    Returns:
        The metric that `optimized_metric` names, for a sweep; None if it names none.

    Raises:
        ValueError: If the run logged no such metric.
    """
    seed_everything(config.seed, workers=True)

    def build(node: Any, **options: Any) -> Any:
        # Plain lists and dictionaries: what spawned processes get must pickle, and no constructor expects a ListConfig.
        return instantiate(node, _convert_="all", **options)

    model, strategy = build(config.model), build(config.strategy)
    data = build(config.data) or None  # data=none is an empty node
    # callbacks.progress_bar=null leaves one out.
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


def show_plan(config: DictConfig) -> None:
    """Print what each method would take, and draw it.

    Args:
        config: As composed from conf/plan.yaml.
    """
    numbers = {name: config[name] for name in CLUSTER}
    if config.link is not None:
        given = {each.partition("=")[0] for each in HydraConfig.get().overrides.task}
        measured = OmegaConf.load(config.link).cluster
        numbers |= {name: measured[name] for name in CLUSTER if name not in given}
    shapes = shapes_of(int(config.parameters))
    if config.model._target_ is not None:
        shapes = [tuple(each.shape) for each in instantiate(config.model).parameters() if each.requires_grad]
    check_one_of("optimizer", config.optimizer, ("sgd", "adam", "adamw"))
    run = Run(0, config.steps, config.pretrained, is_adam=config.optimizer != "sgd")
    planned = Plan(shapes, make_cluster(numbers, begins_early=config.begins_early), config.step_s, run)
    sys.stdout.write(planned.text())
    if config.curves is not None:
        planned.draw(Path(config.curves))


def main() -> None:
    """Run `lowbw-train`."""
    _run(train, "train")


def plan_main() -> None:
    """Run `lowbw-plan`; its help is its configuration file, with the comments."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.stdout.write((find_conf_dir() / "plan.yaml").read_text().partition("\ndefaults:")[0] + "\n")
    else:
        _run(show_plan, "plan")


def _run(task: Callable[[DictConfig], Any], name: str) -> None:
    # As `python -m` does, so that model._target_=my_module.MyModule finds my_module.py in the folder one works in.
    sys.path.insert(0, os.getcwd())
    register_resolvers()
    hydra.main(version_base="1.3", config_path=str(find_conf_dir()), config_name=name)(task)()


def check_main(arguments: list[str] | None = None) -> None:
    """Run `lowbw-check`."""
    parser = argparse.ArgumentParser(
        "lowbw-check", description=check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FILE", help="write what was found, for lowbw-plan link=FILE")
    parser.add_argument("--parameters", type=float, metavar="N", help="of a model: say which strategy suits it")
    parser.add_argument("--step-s", type=float, default=0.2, metavar="S", help="seconds of a step alone (default 0.2)")
    options = parser.parse_args(arguments)
    found = check.check_ranks(join_ranks())
    if dist.get_rank() == 0:
        sys.stdout.write(check.text(found))
        if options.parameters is not None:
            shapes, cluster = shapes_of(int(options.parameters)), make_cluster(found["cluster"])
            sys.stdout.write("\n" + Plan(shapes, cluster, options.step_s, Run(0, NUM_STEPS)).text())
        if options.out is not None:
            OmegaConf.save(OmegaConf.create(found), options.out)
    dist.barrier()
    dist.destroy_process_group()


def join_ranks() -> torch.device:
    """Connect the processes that a launcher has started, or this one alone; return this rank's device."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values: tuple[Any, ...] = (0, 1, 0, "127.0.0.1", 0)
    if "RANK" not in os.environ and SLURMEnvironment.detect():
        slurm = SLURMEnvironment()
        values = slurm.global_rank(), slurm.world_size(), slurm.local_rank(), slurm.main_address, slurm.main_port
    for name, value in zip(names, values, strict=True):
        os.environ.setdefault(name, str(value))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


if __name__ == "__main__":
    main()
