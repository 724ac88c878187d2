"""Faults around checkpoints on real ranks: saves that are cut off, exceptions in mid-step, shards of something else."""

from __future__ import annotations

import gc
import io
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_lowbw import ConfigurationError, LocalSGDStrategy
from lightning_lowbw.comm.collectives import TensorWork
from lightning_lowbw.strategies import checkpoint as files
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE
from tests.tiny import Tiny, Watcher, make_data, make_strategy, make_trainer, since_lightning_2_5, weights_of

STEPS = 10
SAVES = (5, 7)  # to one place


def make(name: str, **options: Any) -> DDPStrategy:
    if name in ("ddp", "dgc"):
        return make_strategy(name, **options)
    averages: dict[str, Any] = {
        "local_sgd": {"k_steps": 4},
        "delayed": {"k_steps": 4, "compression": SPARSE, "delay_steps": 3},
    }
    return LocalSGDStrategy(begin_step=0, **averages[name], **options)


def fit(
    name: str,
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    **options: Any,
) -> str:
    """Return a digest of the weights at the end; of all weights and random numbers on the way to it."""
    num_ranks, model = dist.get_world_size(), Tiny(dropout=0.3, data_by_step=True)
    torch.manual_seed(7 + dist.get_rank() if resume is None else 99)
    watching = [Watcher(path, save_at), *callbacks]
    settings: dict[str, Any] = {"callbacks": watching, "max_steps": STEPS, "max_epochs": -1}
    trainer = make_trainer(make(name, **options), num_ranks, enable_checkpointing=bool(callbacks), **settings)
    trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=resume)
    assert trainer.global_step == STEPS
    return weights_of(model)


# Saves that are cut off -----------------------------------------------------------------------------------------------


def break_the_disk(patch: pytest.MonkeyPatch, victim: int, what: str, fail: Callable[[], None]) -> None:
    """Let a rank write half of its second shard, or of its second checkpoint, which comes from a folder of temporary
    files."""
    num_files = 0
    write = files.write_shard

    def is_last() -> bool:
        nonlocal num_files
        num_files += dist.get_rank() == victim
        return dist.get_rank() == victim and num_files == len(SAVES)

    def write_shard(shard: Any, path: str) -> None:
        write(shard, path)
        if is_last():
            Path(path).write_bytes(Path(path).read_bytes()[:500])
            fail()

    def move(source: str, target: str) -> None:
        content = Path(source).read_bytes()
        os.remove(source)
        is_cut = is_last()
        Path(target).write_bytes(content[: len(content) // 2] if is_cut else content)
        if is_cut:
            fail()

    if what == "shard":
        patch.setattr(files, "write_shard", write_shard)
    else:
        patch.setattr(shutil, "move", move)


def have_no_room() -> None:
    raise OSError("No space left on device")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


CUTS = {"shard": 1, "checkpoint": 0}  # what is cut, and the rank that writes it


def fail_while_saving(name: str, folder: str) -> list[str]:
    whole, messages = fit(name, f"{folder}/whole.ckpt", SAVES), []
    for what, victim in CUTS.items():
        path = f"{folder}/{what}.ckpt"
        with pytest.MonkeyPatch.context() as patch:
            break_the_disk(patch, victim, what, have_no_room)
            with pytest.raises((OSError, ConfigurationError)) as caught:
                fit(name, path, SAVES)
        messages.append(str(caught.value))
        assert fit(name, path, (9,), resume=path) == whole, what
        dist.barrier()
        assert len(os.listdir(f"{path}.ranks")) == 2, "what the failed save has left is swept"
    return messages


@pytest.mark.fault(
    "a disk that is full while a checkpoint is overwritten, on any rank",
    "an error on all ranks that names the rank; the checkpoint before is whole, and resumes to the same bits",
)
def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = run_ranks(fail_while_saving, 2, "dgc", str(tmp_path))
    assert second[0] == first[1] == "No space left on device"
    assert "rank 1: OSError: No space left on device" in first[0]
    assert "rank 0: OSError: No space left on device" in second[1]


def die_while_saving(name: str, path: str, cut: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if cut in CUTS:
            break_the_disk(patch, CUTS[cut], cut, die)
        elif dist.get_rank() == 0:  # the new checkpoint is there, the shards of the one before have not been deleted
            replace = os.replace
            patch.setattr(os, "replace", lambda *args: (replace(*args), die()))
        fit(name, path, SAVES)


def resume_after_death(name: str, path: str, folder: str) -> tuple[str, str, int]:
    whole = fit(name, f"{folder}/whole.ckpt", SAVES)
    resumed = fit(name, path, (9,), resume=path)
    dist.barrier()
    return whole, resumed, len(os.listdir(f"{path}.ranks"))


@pytest.mark.fault(
    "kill -9 while a checkpoint is overwritten",
    "the last whole checkpoint resumes to the same bits; the unfinished one is deleted",
)
@pytest.mark.parametrize(("name", "cut"), [("dgc", "before sweeping"), ("local_sgd", "checkpoint")])
def test_a_rank_that_is_killed_while_it_saves_leaves_the_last_whole_checkpoint(
    name: str, cut: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "last.ckpt")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(die_while_saving, 2, name, path, cut, fresh=True)
    for whole, resumed, num_files in run_ranks(resume_after_death, 2, name, path, str(tmp_path)):
        assert resumed == whole
        assert num_files == 2


# Exceptions in the middle of a step -----------------------------------------------------------------------------------


class LinkLost(RuntimeError):
    pass


class LosesTheLink(pl.Callback):
    """From a step on nothing that has been sent arrives, on any rank."""

    def __init__(self, patch: pytest.MonkeyPatch, step: int) -> None:
        self.patch, self.step = patch, step

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.patch.setattr(TensorWork, "wait", self.fail)

    @staticmethod
    def fail(*_: Any) -> None:
        raise LinkLost


def warned(function: Callable[[], Any]) -> tuple[Any, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, "\n".join(str(each.message) for each in caught)


def lose_the_link(name: str, folder: str) -> dict[str, Any]:
    path = f"{folder}/{name}.ckpt"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LinkLost):
        fit(name, callbacks=(LosesTheLink(patch, 5), OnExceptionCheckpoint(folder, name)))
    dist.barrier()
    weights, warning = warned(lambda: fit(name, resume=path))
    shard = next(Path(f"{path}.ranks").glob(f"rank-{dist.get_rank()}-*"))
    (state,) = torch.load(shard, weights_only=True)["workers"]
    kept = {key: state.get(key) for key in ("torn", "own", "step")}
    return {"weights": weights, "warning": warning, **kept}


@pytest.mark.fault(
    "an exception inside an exchange, and a checkpoint on exceptions",
    "each rank saves what it has; a warning of the resumed run names ranks that repeat the step",
)
@pytest.mark.parametrize("name", ["dgc", "delayed"])
def test_a_checkpoint_on_an_exception_in_an_exchange_keeps_what_each_rank_has(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(lose_the_link, 2, name, str(tmp_path))
    assert first["weights"] == second["weights"]
    # That of a gradient, of the average that has been begun after step 4.
    assert first["step"] == second["step"] == {"dgc": 5, "delayed": 6}[name]
    assert first["torn"] == second["torn"] != ""
    assert f"rank 0: {first['torn']}; rank 1: {first['torn']}. Those ranks take the step again" in first["warning"]
    if name != "dgc":
        assert not torch.equal(first["own"]["wide.weight"], second["own"]["wide.weight"])


class Raises(Tiny):
    def __init__(self, raised: type[BaseException]) -> None:
        super().__init__(data_by_step=True)
        self.raised = raised

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, batch_idx) in ((1, 5), (0, 6)):
            raise self.raised
        return super().training_step(batch, batch_idx)


def raise_apart(name: str, folder: str, raised: type[BaseException]) -> float:
    """The first rank that raises ends, as a process would; the other one meets the end of its connection, or raises."""
    model, begun_s = Raises(raised), time.monotonic()
    saver = OnExceptionCheckpoint(folder, name)
    trainer = make_trainer(make(name), 2, callbacks=[saver], max_steps=STEPS, enable_checkpointing=True)
    with pytest.raises((KeyError, RuntimeError, SystemExit)):
        trainer.fit(model, make_data(2, STEPS))
    del model, trainer, saver
    dist.destroy_process_group()
    gc.collect()
    return time.monotonic() - begun_s


def resume_with_warning(name: str, path: str) -> tuple[str, str]:
    try:
        return warned(lambda: fit(name, resume=path))
    except ConfigurationError as error:
        return "", str(error)


@pytest.mark.fault(
    "ranks that end one step apart by a bug or Ctrl-C, and a checkpoint on exceptions",
    "no rank waits for another; all save and end",
)
@pytest.mark.parametrize(
    ("name", "raised", "expected"),
    [
        ("dgc", KeyError, "rank 0: the exchange of gradients after step 5. Those ranks"),
        (
            "local_sgd",
            KeyboardInterrupt,  # between two averages, where ranks are apart
            "steps and averages [(5, 1)] instead of [(6, 1)]",
        ),
    ],
)
def test_ranks_that_are_interrupted_apart_save_and_end(
    name: str, raised: type[BaseException], expected: str, tmp_path: Path
) -> None:
    for seconds in run_ranks(raise_apart, 2, name, str(tmp_path), raised, fresh=True, timeout_s=60.0):
        assert seconds < 20.0
    first, second = run_ranks(resume_with_warning, 2, name, str(tmp_path / f"{name}.ckpt"))
    assert first[0] == second[0]
    assert expected in first[1]


# Shards that are not those of the save --------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


DAMAGES = {  # of the shard of rank 1
    "of another rank": "does not belong to the checkpoint beside it",
    "of another save": "save_id ",
    "cut": "is damaged",
    "code": "is damaged",
}


def resume_damaged(folder: str) -> dict[str, str]:
    os.chdir(folder)
    for name in ("one.ckpt", "two.ckpt"):
        fit("dgc", name, (7,))
    dist.barrier()
    (first, second), (_, other) = (sorted(Path(f"{name}.ckpt.ranks").iterdir()) for name in ("one", "two"))
    content, code, messages = second.read_bytes(), io.BytesIO(), {}
    torch.save(Evil(), code)
    contents = (first.read_bytes(), other.read_bytes(), content[:-100], code.getvalue())
    for what, damaged in zip(DAMAGES, contents, strict=True):
        dist.barrier()
        if dist.get_rank() == 0:
            second.write_bytes(damaged)
        dist.barrier()
        with pytest.raises(ConfigurationError) as caught:
            fit("dgc", resume="one.ckpt")
        messages[what] = str(caught.value)
    assert not Path("executed").exists()
    return messages


@pytest.mark.fault(
    "shards of another save or rank, cut or damaged ones",
    "refused on all ranks, with the reason; nothing in them is executed",
)
def test_shards_that_are_not_those_of_the_save_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for messages in run_ranks(resume_damaged, 2, str(tmp_path)):
        for what, expected in DAMAGES.items():
            assert expected in messages[what], what


def mutated(content: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(content)), rng.choice([1, 8, 200])
    kind = rng.choice(["flip", "cut", "random", "zeros"])
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    piece = rng.randbytes(size) if kind == "random" else bytes(size)
    return (content[:at] + piece + content[at + size :])[: len(content)]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.fault("shards of another save or rank, cut or damaged ones")
def test_a_damaged_shard_is_an_error_or_has_the_right_bits(tmp_path: Path) -> None:
    """torch.load alone takes half of these files, with other numbers in them."""
    rng, folder = random.Random(0), tmp_path / "some.ckpt.ranks"
    metadata = {"num_ranks": 1, "save_id": "a-1", "is_interrupted": False}
    residuals = {"weight": torch.randn(100), "bias": torch.randn(7)}
    shard = {"rank": 0, "save_id": "a-1", "step": 3, "workers": [{"step": 3, "residuals": residuals}]}
    folder.mkdir()
    path = files.shard_path(str(folder), 0, metadata)
    torch.save(shard, path)
    content, num_errors = Path(path).read_bytes(), 0
    for _ in range(400):
        Path(path).write_bytes(mutated(content, rng))
        try:
            loaded = files.load_shard(tmp_path / "some.ckpt", metadata, 0)
        except ConfigurationError:
            num_errors += 1
        else:
            assert equal(loaded, shard)
    assert num_errors > 300


# Saves in the background, and by one rank alone -----------------------------------------------------------------------


class SlowDisk(TorchCheckpointIO):
    """Takes long for a checkpoint, and looks meanwhile whether the one that is there has all its shards."""

    def __init__(self) -> None:
        self.num_looks, self.missing = 0, list[str]()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        time.sleep(0.3)
        if os.path.exists(path):
            self.num_looks += 1
            metadata = torch.load(path, weights_only=False)[files.METADATA_KEY]
            needed = [files.shard_path(files.folder_of(path), rank, metadata) for rank in range(2)]
            self.missing += [each for each in needed if not os.path.exists(each)]
        super().save_checkpoint(checkpoint, path, storage_options)


def save_in_the_background(path: str) -> tuple[int, list[str], str]:
    disk = SlowDisk()
    weights = fit("dgc", path, SAVES, checkpoint_io=AsyncCheckpointIO(disk))
    return disk.num_looks, disk.missing, weights


@since_lightning_2_5
def test_a_save_in_the_background_keeps_the_shards_of_the_checkpoint_on_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    first, second = run_ranks(save_in_the_background, 2, path)
    assert first[:2] == (1, [])
    assert first[2] == second[2]
    assert run_ranks(fit, 2, "dgc", "", (), path) == [first[2]] * 2


class SaveAlone(pl.Callback):
    """Rank 0 saves the weights; the others do not know of it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            trainer.strategy.save_checkpoint({"state_dict": module.state_dict()}, self.path)


def save_alone(name: str, path: str) -> str:
    return fit(name, callbacks=(SaveAlone(path),))


def test_weights_that_rank_0_saves_alone_wait_for_nobody(tmp_path: Path) -> None:
    """As under DDP; it waited for the others, which were in the next step."""
    path = tmp_path / "weights.ckpt"
    first, second = run_ranks(save_alone, 2, "local_sgd", str(path), timeout_s=60.0)
    assert first == second
    assert set(torch.load(path, weights_only=True)["state_dict"]) == set(Tiny().state_dict())
