"""Faults around checkpoints on real ranks: saves that are cut off, exceptions, shards of something else."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_lowbw import ConfigurationError, Strategy
from lightning_lowbw.strategies import checkpoint as files
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import At, gathered, make, same, saving, train, train_by_step, warned
from tests.tiny import Tiny, weights_of

SAVES = (5, 7)  # of ten steps; to one place
CHANGES = {"local_sgd": {"k_steps": 4}}


def fit(name: str | Strategy, *args: Any, **options: Any) -> str:
    """Return a digest of the weights at the end; of all weights and random numbers on the way to it."""
    name = make(name, CHANGES.get(name)) if isinstance(name, str) else name
    options["enable_checkpointing"] = bool(options.get("callbacks"))
    return weights_of(train_by_step(name, *args, **options).lightning_module)


# Saves that are cut off -----------------------------------------------------------------------------------------------


CUTS = {"shard": (1, 2), "checkpoint": (0, 4)}  # the rank that writes the file, and which of its files it is


def break_the_disk(patch: pytest.MonkeyPatch, what: str, fail: Callable[[], None], *, is_late: bool = False) -> None:
    """Let a rank fail before, or after, Lightning's plugin has moved a file of the second save to its place."""
    (victim, last), move, num_files = CUTS[what], shutil.move, 0

    def moved(source: str, target: str) -> None:
        nonlocal num_files
        num_files += 1
        is_last = (dist.get_rank(), num_files) == (victim, last)
        if is_last and not is_late:
            fail()
        move(source, target)
        if is_last:
            fail()

    patch.setattr(shutil, "move", moved)


def have_no_room() -> None:
    raise OSError("No space left on device")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.fault
@on_ranks(2)
def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    whole = fit("dgc", f"{tmp_path}/whole.ckpt", SAVES)
    for what, (victim, _) in CUTS.items():
        path = f"{tmp_path}/{what}.ckpt"
        with pytest.MonkeyPatch.context() as patch:
            break_the_disk(patch, what, have_no_room)
            with pytest.raises((OSError, ConfigurationError)) as caught:
                fit("dgc", path, SAVES)
        said = gathered(str(caught.value))
        assert said[victim] == "No space left on device"
        assert f"rank {victim}: OSError: No space left on device" in said[1 - victim]
        assert fit("dgc", path, (9,), path) == whole, what


def die_while_saving(name: str, path: str, is_late: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_the_disk(patch, "checkpoint", die, is_late=is_late)
        fit(name, path, SAVES)


def resume_after_death(name: str, path: str, folder: str) -> None:
    assert fit(name, path, (9,), path) == fit(name, f"{folder}/whole.ckpt", SAVES)


@pytest.mark.fault
@pytest.mark.parametrize(("name", "is_late"), [("dgc", True), ("local_sgd", False)])
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(name: str, is_late: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(die_while_saving, 2, name, path, is_late, fresh=True)
    run_ranks(resume_after_death, 2, name, path, str(tmp_path))


# Exceptions -----------------------------------------------------------------------------------------------------------


class Raises(Tiny):
    raised: type[BaseException]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, batch_idx) in ((1, 5), (0, 6)):
            raise self.raised
        return super().training_step(batch, batch_idx)


def raise_apart(name: str, folder: str, raised: type[BaseException]) -> tuple[float, list[str]]:
    """The first rank that raises ends, as a process would; the other one meets the end of its connection, or raises."""
    begun_s, Raises.raised = time.monotonic(), raised

    def end() -> None:
        callbacks = [saving(f"{folder}/{{}}.ckpt", (4,)), OnExceptionCheckpoint(folder)]
        model, strategy = Raises(data_by_step=True), make(name, CHANGES.get(name))
        with pytest.raises((KeyError, RuntimeError, SystemExit)):
            train(strategy, model, 10, enable_checkpointing=True, callbacks=callbacks)

    _, said = warned(end)
    dist.destroy_process_group()
    gc.collect()
    return time.monotonic() - begun_s, said


@pytest.mark.fault
@pytest.mark.parametrize(("name", "raised"), [("dgc", KeyError), ("local_sgd", KeyboardInterrupt)])
def test_ranks_that_are_interrupted_apart_save_nothing_and_end(name: str, raised: Any, tmp_path: Path) -> None:
    """No rank waits for the other, and the last checkpoint remains."""
    took, said = zip(*run_ranks(raise_apart, 2, name, str(tmp_path), raised, fresh=True, timeout_s=60.0), strict=True)
    assert max(took) < 20.0
    assert any("is not written: an exception is ending the fit" in each for each in said[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4.ckpt", "4.ckpt.ranks"]
    first, second = run_ranks(partial(fit, name, resume=str(tmp_path / "4.ckpt")), 2)
    assert first == second


# Shards of another save ----------------------------------------------------------------------------------------------


@pytest.mark.fault
@on_ranks(2)
def test_shards_that_are_not_those_of_the_save_are_refused_on_all_ranks(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    for name in ("one.ckpt", "two.ckpt"):
        fit("dgc", name, (7,))
    dist.barrier()
    (first, second), (_, other) = (sorted(Path(f"{name}.ckpt.ranks").iterdir()) for name in ("one", "two"))
    content = second.read_bytes()
    for damaged, words in (
        (first.read_bytes(), "does not belong to the checkpoint beside it"),
        (other.read_bytes(), "save_id "),
        (content[:-100], "is missing or damaged"),
    ):
        dist.barrier()
        if dist.get_rank() == 0:
            second.write_bytes(damaged)
        dist.barrier()
        with pytest.raises(ConfigurationError, match=words):
            fit("dgc", resume="one.ckpt")


# Saves in the background, and by one rank alone -----------------------------------------------------------------------


class SlowDisk(TorchCheckpointIO):
    """Takes long for a checkpoint, and checks meanwhile that the checkpoint on disk has all its shards."""

    def __init__(self) -> None:
        self.num_looks, self.missing = 0, list[str]()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        time.sleep(0.3)
        if os.path.exists(path):
            self.num_looks += 1
            metadata = torch.load(path, weights_only=False)[files.METADATA_KEY]
            shards = {"folder": files.folder_of(path), **metadata}
            needed = [files.shard_path(shards, rank) for rank in range(2)]
            self.missing += [each for each in needed if not os.path.exists(each)]
        super().save_checkpoint(checkpoint, path, storage_options)


@on_ranks(2)
def test_a_save_in_the_background_keeps_the_shards_of_the_checkpoint_on_disk(tmp_path: Path) -> None:
    path, disk = str(tmp_path / "last.ckpt"), SlowDisk()
    weights = fit(make("dgc", checkpoint_io=AsyncCheckpointIO(disk)), path, SAVES)
    assert (disk.num_looks, disk.missing) == (1 - dist.get_rank(), [])
    dist.barrier()
    assert len(os.listdir(f"{path}.ranks")) == 2
    assert fit("dgc", resume=path) == same(weights)


@on_ranks(2, timeout_s=60.0)
def test_weights_that_rank_0_saves_alone_wait_for_nobody(tmp_path: Path) -> None:
    """As under DDP: the other ranks are in the next step."""
    path = tmp_path / "weights.ckpt"

    def save(trainer: Any, module: Any) -> None:
        trainer.strategy.save_checkpoint({"state_dict": module.state_dict()}, path)

    same(fit("local_sgd", callbacks=(At(3, save, ranks=(0,)),)))
    dist.barrier()
    assert set(torch.load(path, weights_only=True)["state_dict"]) == set(Tiny().state_dict())
