"""Checkpoints of sharded models that are overwritten: a folder over a folder, over a file, and a file over a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_lowbw import ShardedStrategy
from lightning_lowbw.engine.presets import DGC
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.shards import BEFORE, PART
from tests.ranks import run_ranks
from tests.strategies.sharded_models import ByStep, shard_digest, train
from tests.tiny import sgd

STEPS = 8
METHOD = DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=50)


class Saves(pl.Callback):
    """Save to one path after some steps."""

    def __init__(self, path: str, steps: tuple[int, ...]) -> None:
        self.path, self.steps = path, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.path)


def fit(path: str, saves: tuple[int, ...], *, is_folder: bool = True, resume: str | None = None) -> tuple[str, int]:
    """Train; return the weights, and the step that it began with."""
    model, begin = ByStep(sgd), []

    class Begin(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            begin.append(trainer.global_step)

    strategy = ShardedStrategy(METHOD, topology=2, save_distributed_checkpoint=is_folder)
    train(strategy, model, STEPS, 4, dist.get_rank(), ckpt_path=resume, callbacks=[Saves(path, saves), Begin()])
    return shard_digest(model), begin[0]


def overwrite(path: str, first_is_folder: bool, second_is_folder: bool) -> tuple[tuple[str, int], str]:
    """Save after a step in one format, after two more in another one; resume from the last."""
    expected, _ = fit(path, (1,), is_folder=first_is_folder)
    fit(path, (3, 5), is_folder=second_is_folder)
    return fit("", (), resume=path), expected


@pytest.mark.parametrize(
    ("first", "second"), [(True, True), (False, True), (True, False)], ids=["folders", "file, folder", "folder, file"]
)
def test_a_checkpoint_is_overwritten(first: bool, second: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for resumed, expected in run_ranks(overwrite, 4, str(path), first, second):
        assert resumed == (expected, 5)
    assert path.is_dir() == second
    shards = os.listdir(f"{path}.ranks")
    assert len(shards) == 4
    assert not {PART, BEFORE}.intersection(shards)


def be_killed(path: str) -> tuple[tuple[str, int], str]:
    """Fail in the second save as a kill does, after which nothing is put back; resume."""
    rename, replace = os.rename, os.replace

    def fail(source: Any, target: Any, **kwargs: Any) -> None:
        if str(source).endswith(PART) and os.path.lexists(f"{path}.ranks/{BEFORE}"):
            raise RuntimeError("killed")
        replace(source, target, **kwargs)

    def stay(source: Any, target: Any, **kwargs: Any) -> None:
        if str(source).endswith(BEFORE):
            raise OSError("a process that was killed does not put back")
        rename(source, target, **kwargs)

    expected, _ = fit("", ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", fail)
        patch.setattr(os, "rename", stay)
        with pytest.raises((RuntimeError, ConfigurationError), match="killed"):
            fit(path, (2, 4))
    if dist.get_rank() == 0:
        assert not os.path.lexists(path)
    dist.barrier()
    return fit(path, (6,), resume=path), expected


@pytest.mark.fault(
    "a process that is killed while it puts a sharded model's new folder in the place of the former",
    "a resume finds the checkpoint before, whole, and goes on to the same bits",
)
def test_a_process_that_is_killed_between_the_two_renames(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for resumed, expected in run_ranks(be_killed, 4, str(path)):
        assert resumed == (expected, 2)
    assert path.is_dir()
    assert len(os.listdir(f"{path}.ranks")) == 4


def save_over_files(path: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(path, (1,))
    return str(caught.value)


def test_a_folder_of_other_files_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "mine.txt").write_text("mine")
    for message in run_ranks(save_over_files, 4, str(path), timeout_s=60):
        assert "folder with other files" in message
    assert os.listdir(path) == ["mine.txt"]
