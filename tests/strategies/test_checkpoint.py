"""Rank-local state: resume to the bit, looking changes nothing, shards live and die with their checkpoint."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from lightning_lowbw import ConfigurationError, DGCStrategy
from lightning_lowbw.strategies import checkpoint
from tests.ranks import on_ranks
from tests.strategies import fits
from tests.tiny import Tiny, amp_with_scaler, make_data, weights_of

STEPS = 10
DGC = "dgc, warm-up"


# In the dense phase and after the warm-up; in the first interval and in mid-interval.
@pytest.mark.parametrize("name", [DGC, "sparse_loco"])
@on_ranks(2)
def test_a_resume_continues_to_the_bit_also_from_files_that_were_moved(name: str, tmp_path: Path) -> None:
    """With a scaler, and random numbers of its own on each rank; of all methods: tests/golden, tests/contract."""
    path, amp = f"{tmp_path}/step{{}}.ckpt", partial(amp_with_scaler, 2.0**20)
    whole = fits.state_of(fits.train_by_step(name, path, (1, 7), plugins=[amp()]))
    fits.same(whole["weights"])
    assert len(set(fits.gathered(whole["residuals"]))) == 2
    moved = tmp_path / "elsewhere" / "renamed.ckpt"
    if dist.get_rank() == 0:
        saved = torch.load(path.format(7), weights_only=True)
        Tiny().load_state_dict(saved["state_dict"])
        metadata = saved["lightning_lowbw"]
        assert metadata["num_ranks"] == 2
        names = [f"rank-{rank}-of-2-{metadata['save_id']}.pt" for rank in (0, 1)]
        assert sorted(os.listdir(tmp_path / "step7.ckpt.ranks")) == names
        moved.parent.mkdir()
        (tmp_path / "step7.ckpt").rename(moved)
        (tmp_path / "step7.ckpt.ranks").rename(f"{moved}.ranks")
    dist.barrier()
    for file in (path.format(1), str(moved)):
        assert fits.state_of(fits.train_by_step(name, resume=file, plugins=[amp()])) == whole, file


class OwnMetric(Tiny):
    """Each rank has its own metric, one per epoch."""

    def on_train_epoch_end(self) -> None:
        values = (1.0, 2.0, 0.0) if self.global_rank == 0 else (2.0, 1.0, 0.0)
        self.log("own", values[self.current_epoch])


@on_ranks(2)
def test_all_nodes_delete_the_shards_of_what_rank_zero_deletes(tmp_path: Path) -> None:
    """Each rank's `ModelCheckpoint` deletes the worst by its own metric; here on two nodes of one rank."""
    os.environ["LOCAL_RANK"] = "0"
    keep = ModelCheckpoint(tmp_path, "{epoch}", monitor="own", save_top_k=2, save_on_train_epoch_end=True)
    fits.train(DGC, OwnMetric(), 3, callbacks=[keep], enable_checkpointing=True, max_epochs=3)
    dist.barrier()
    kept = ["epoch=0.ckpt", "epoch=0.ckpt.ranks", "epoch=2.ckpt", "epoch=2.ckpt.ranks"]
    assert sorted(os.listdir(tmp_path)) == kept
    assert all(len(os.listdir(tmp_path / name)) == 2 for name in kept if name.endswith(".ranks"))


@on_ranks(2)
def test_a_linked_last_checkpoint_resumes(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, monitor="val_loss", save_top_k=-1, save_last="link")
    fits.train(DGC, None, 6, 2, callbacks=[keep], enable_checkpointing=True, val_check_interval=2)
    dist.barrier()
    last = tmp_path / "last.ckpt"
    assert last.is_symlink()
    if dist.get_rank() == 0:
        # A folder that an earlier last.ckpt has left behind, before it became a link, is passed over.
        stale = next(each for each in tmp_path.glob("*.ranks") if each.name != f"{last.resolve().name}.ranks")
        shutil.copytree(stale, tmp_path / "last.ckpt.ranks", dirs_exist_ok=True)
    dist.barrier()
    assert fits.train_by_step(DGC, resume=str(last)).strategy.workers[0].step == STEPS


@on_ranks(2)
def test_remote_file_systems() -> None:
    """Each rank has a file system of its own, as nodes without a shared disk do."""
    path, memory, rank = "memory://deep/step7.ckpt", fsspec.filesystem("memory"), dist.get_rank()
    whole = fits.state_of(fits.train_by_step(DGC, path, (7,)))
    saved = [memory.cat("/deep/step7.ckpt") if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)  # a file of rank 0, copied to each node
    memory.pipe("/deep/step7.ckpt", saved[0])
    file, shard = sorted(memory.find("/deep"))
    assert file == "/deep/step7.ckpt"
    assert shard.startswith(f"/deep/step7.ckpt.ranks/rank-{rank}-of-2-")
    assert fits.state_of(fits.train_by_step(DGC, resume=path)) == whole
    fits.make(DGC).remove_checkpoint(path)
    assert not memory.find("/deep")


class Store(CheckpointIO):
    """Files by key, without folders: nothing else knows its paths."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file_of(self, path: Any) -> Path:
        return self.root / quote(str(path), safe="")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, self.file_of(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(self.file_of(path), weights_only=weights_only)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        self.file_of(path).unlink()


@on_ranks(2)
def test_a_plugin_writes_reads_and_removes_the_shards(tmp_path: Path) -> None:
    """Shards that are overwritten; also after a resume the shards of the oldest of two checkpoints."""
    path, folder, options = "store://bucket/last.ckpt", tmp_path / "folder", {"enable_checkpointing": True}

    def run(*args: Any, **more: Any) -> Any:
        keep = ModelCheckpoint(folder, "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=2)
        plugins: Any = [Store(tmp_path)]
        trainer = fits.train_by_step(DGC, *args, callbacks=[keep], plugins=plugins, **options, **more)
        dist.barrier()
        return fits.state_of(trainer)

    def is_kept(*paths: str) -> bool:
        names, io = os.listdir(tmp_path), Store(tmp_path)
        return len(names) == 3 * len(paths) and all(
            sum(name.startswith(io.file_of(each).name) for name in names) == 3 for each in paths
        )

    run(path, (5, 7), steps=8)
    assert is_kept(path, f"{folder}/step=6.ckpt", f"{folder}/step=8.ckpt")
    whole = run(resume=f"{folder}/step=8.ckpt")
    assert is_kept(path, f"{folder}/step=8.ckpt", f"{folder}/step=10.ckpt")
    assert fits.state_of(fits.train_by_step(DGC, resume=path, plugins=[Store(tmp_path)])) == whole
    assert fits.state_of(fits.train_by_step(DGC)) == whole


@on_ranks(2)
def test_each_rank_may_have_a_folder_of_its_own(tmp_path: Path) -> None:
    """They are merged, or each rank has the ``.ckpt``, which rank 0 alone has written."""
    own, one = tmp_path / str(dist.get_rank()), tmp_path / "one"
    whole = fits.state_of(fits.train_by_step(DGC, f"{own}/{own.name}.ckpt", (7,)))
    assert [name.partition("-of")[0] for name in os.listdir(own / "0.ckpt.ranks")] == [f"rank-{own.name}"]
    shutil.copytree(own, one, dirs_exist_ok=True)
    dist.barrier()
    if dist.get_rank() == 1:
        shutil.copy(tmp_path / "0" / "0.ckpt", own)
    for folder in (one, own):
        assert fits.state_of(fits.train_by_step(DGC, resume=f"{folder}/0.ckpt")) == whole


@pytest.mark.parametrize(("name", "writer"), [("ddp", "another program"), ("local_sgd", "a method of kind 'replicas'")])
@on_ranks(2)
def test_a_run_can_change_to_dgc(name: str, writer: str, tmp_path: Path) -> None:
    said, path, options = list[str](), f"{tmp_path}/some.ckpt", {"max_steps": STEPS, "max_epochs": -1}
    fits.train(name, data=STEPS, callbacks=[fits.saving(path, (4,))], **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(checkpoint, "rank_zero_info", said.append)
        trainer: Any = fits.train(DGCStrategy(sparsity=[0.9], min_numel=100), data=STEPS, resume=path, **options)
    assert f"was written by {writer}. DGCStrategy, of kind 'gradients', begins with the weights" in said[-1]
    fits.same(weights_of(trainer.lightning_module))
    assert trainer.strategy.workers[0].step == STEPS


# With nothing left to train ------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("name", ["diloco", "dgc"])
@on_ranks(2)
def test_a_finished_run_that_is_resumed_has_the_weights_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Train and save on the way; resume with no step left, test and save; resume with the steps that are left."""
    first, again, states = f"{tmp_path}/first.ckpt", f"{tmp_path}/again.ckpt", {}
    for leg, resume, last in (("straight", None, 15), ("finished", first, STEPS), ("resumed", first, 15)):
        model, watcher = Tiny(data_by_step=True), fits.saving(first, () if resume else (STEPS,))
        strategy = fits.make(name, {"k_steps": 5, "begin_step": 1} if name == "diloco" else {})
        options = {"max_steps": last, "max_epochs": -1, "callbacks": [watcher]}
        # With a look before the first batch, too.
        trainer = fits.train(strategy, model, STEPS, 1, resume=resume, **options)
        states[leg] = fits.weights(model)
        if leg == "finished":
            trainer.save_checkpoint(again)
            trainer.test(model, make_data(2, 1), verbose=False)
            states["tested"] = fits.weights(model)
    dist.barrier()
    for path in (first, again):
        saved = Tiny()
        saved.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert states["finished"] == states["tested"] == fits.weights(saved)
    assert states["resumed"] == states["straight"]


# Without the folder beside it: refused, or resumed with the weights and the optimizer, as asked -----------------------

EPOCH = 5  # steps
SAVED = 7  # the step
RESUME = "weights and optimizer"


class Decaying(Tiny):
    def __init__(self) -> None:
        super().__init__(data_by_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def begin_of(module: Any) -> dict[str, Any]:
    """Return what a resume begins with."""
    trainer = module.trainer
    (worker,), (optimizer,) = trainer.strategy.workers, trainer.optimizers
    return {
        "steps": (trainer.global_step, trainer.current_epoch, worker.step),
        "is local": worker.plan.is_local,
        "lr": optimizer.param_groups[0]["lr"],
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "momentum": [state["momentum_buffer"].clone() for state in optimizer.state.values()],
    }


def fit(name: str, path: str, resume: str | None = None, needs: Any = "exact") -> tuple[str, dict[str, Any]]:
    """Train to the end of three epochs; return the weights, and what it began with."""
    begun, model = fits.Noted(begin_of, "on_train_start"), Decaying()
    strategy = fits.make(name, {"begin_step": 2} if name == "local_sgd" else {}, resume=needs)
    options = {"max_epochs": 3, "callbacks": [fits.saving(path, (SAVED,)), begun]}
    trainer = fits.train(strategy, model, EPOCH, resume=resume, **options)
    assert (trainer.global_step, strategy.workers[0].step) == (3 * EPOCH, 3 * EPOCH)
    return weights_of(model), begun.values[0]


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
@on_ranks(2)
def test_a_checkpoint_alone_is_resumed_where_that_is_asked_for(name: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/some.ckpt"
    fit(name, path)
    with_folder, _ = fit(name, f"{tmp_path}/again", path, RESUME)
    dist.barrier()
    if dist.get_rank() == 0:  # the shard of one rank is gone; the other one has its own
        next(Path(f"{path}.ranks").glob("rank-1-*")).unlink()
    dist.barrier()
    assert f"resume={RESUME!r}" in fits.refusal(name, "", path, fit=fit)
    alone, begin = fit(name, f"{tmp_path}/again", path, RESUME)
    assert fits.same(alone) == with_folder, "the folder is read"
    saved = torch.load(path, weights_only=True)
    assert (begin["steps"], begin["is local"]) == ((SAVED, 1, SAVED), name == "local_sgd")
    assert begin["lr"] == saved["optimizer_states"][0]["param_groups"][0]["lr"] < 0.05
    momentum = [state["momentum_buffer"] for state in saved["optimizer_states"][0]["state"].values()]
    for begun, expected in ((begin["weights"], dict(saved["state_dict"])), (begin["momentum"], momentum)):
        torch.testing.assert_close(begun, expected, rtol=0, atol=0)


def test_what_a_resume_needs_is_one_of_two() -> None:
    assert f"resume={RESUME!r}" in repr(fits.make("dgc", resume=RESUME))
    assert "resume" not in repr(fits.make("dgc"))
    with pytest.raises(ConfigurationError, match="choose one of exact, weights and optimizer"):
        fits.make("local_sgd", resume="weights")
