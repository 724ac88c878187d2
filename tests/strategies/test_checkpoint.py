"""Rank-local state: resume to the bit, looking changes nothing, shards live and die with their checkpoint."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_lowbw import LocalSGDStrategy
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.strategies import checkpoint
from tests.ranks import run_ranks
from tests.tiny import Tiny, Watcher, amp_with_scaler, make_data, make_strategy, make_trainer, sgd, weights_of

STEPS = 10
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Return digests of all that a step depends on, on this rank."""
    module = trainer.lightning_module
    (worker,) = trainer.strategy.workers
    optimizer_state = [
        value.float() for state in worker.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    return {
        "weights": weights_of(module),
        "buffers": digest(module.buffers()),
        "residuals": digest(worker.residuals.values()),
        "optimizer": digest(optimizer_state),
        "step": worker.step,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in worker.optimizer.param_groups],
    }


def fit(
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    *,
    optimizer: Any = sgd,
    amp: bool = False,
    looks: bool = False,
    dropout: float = 0.3,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Tiny(optimizer, dropout=dropout, data_by_step=True)
    torch.manual_seed(7 + dist.get_rank() if resume is None else 99)
    options: dict[str, Any] = {"plugins": [amp_with_scaler()]} if amp else {}
    options |= {"max_steps": STEPS, "max_epochs": -1}
    if looks:
        options |= {"val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(make_strategy("dgc"), num_ranks, callbacks=[Watcher(path, save_at)], **options)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 2) if looks else None, ckpt_path=resume)
    assert model.looks > 0 or not looks
    return state_of(trainer)


def test_a_resume_continues_to_the_bit_also_from_files_that_were_moved(tmp_path: Path) -> None:
    """With a scaler, and random numbers of its own on each rank; of all methods: tests/golden."""
    path = str(tmp_path / "step{}.ckpt")
    whole = run_ranks(partial(fit, path, (1, 7), amp=True), 2)
    assert whole[0]["weights"] == whole[1]["weights"]
    assert whole[0]["residuals"] != whole[1]["residuals"]
    checkpoint = torch.load(path.format(7), weights_only=True)
    Tiny().load_state_dict(checkpoint["state_dict"])
    metadata = checkpoint["lightning_lowbw"]
    assert metadata["num_ranks"] == 2
    names = [f"rank-{rank}-of-2-{metadata['save_id']}.pt" for rank in (0, 1)]
    assert sorted(os.listdir(tmp_path / "step7.ckpt.ranks")) == names
    moved = tmp_path / "elsewhere" / "renamed.ckpt"
    moved.parent.mkdir()
    (tmp_path / "step7.ckpt").rename(moved)
    (tmp_path / "step7.ckpt.ranks").rename(f"{moved}.ranks")
    for saved in (path.format(1), str(moved)):  # in the dense phase, after the warm-up
        assert run_ranks(partial(fit, resume=saved, amp=True), 2) == whole, saved


def test_saving_and_validating_change_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "step{}.ckpt")
    # Without dropout: making a validation loader draws a random number, with stock Lightning too.
    blind = run_ranks(partial(fit, dropout=0.0), 2)
    assert run_ranks(partial(fit, path, tuple(range(STEPS)), looks=True, dropout=0.0), 2) == blind


def kept_after_a_resume(resume: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(make_strategy("dgc"), 2, max_steps=7, max_epochs=-1)
    trainer.fit(Tiny(), make_data(2, STEPS), ckpt_path=resume)
    (worker,) = trainer.strategy.workers
    parameters = worker.by_name()
    buffers = {f"u {name}": worker.optimizer.state[parameters[name]]["momentum_buffer"] for name in worker.residuals}
    return {**{f"v {name}": v for name, v in worker.residuals.items()}, **buffers}


def test_resume_with_another_number_of_ranks_keeps_the_mean_residual(tmp_path: Path) -> None:
    path = str(tmp_path / "step{}.ckpt")
    run_ranks(partial(fit, path, (7,)), 3)
    shards = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "step7.ckpt.ranks").iterdir())]
    for kept in run_ranks(kept_after_a_resume, 2, path.format(7)):
        assert kept
        for name, value in kept.items():
            key = {"v": "residuals", "u": "velocities"}[name[0]]
            expected = torch.stack([shard["workers"][0][key][name[2:]] for shard in shards]).mean(0)
            torch.testing.assert_close(value.flatten(), expected, rtol=0, atol=1e-7)
            assert float(value.abs().max()) > 0


def fit_linking_the_last(folder: str) -> list[str]:
    num_ranks = dist.get_world_size()
    keep = ModelCheckpoint(folder, every_n_train_steps=2, monitor="val_loss", save_top_k=-1, save_last="link")
    options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "val_check_interval": 2}
    trainer = make_trainer(make_strategy("dgc"), num_ranks, **options)
    trainer.fit(Tiny(), make_data(num_ranks, 6), make_data(num_ranks, 2))
    dist.barrier()
    return sorted(os.listdir(folder))


class OwnMetric(Tiny):
    """Each rank has its own metric, one per epoch."""

    def on_train_epoch_end(self) -> None:
        values = (1.0, 2.0, 0.0) if self.global_rank == 0 else (2.0, 1.0, 0.0)
        self.log("own", values[self.current_epoch])


def fit_on_two_nodes_of_one_rank(folder: str) -> list[str]:
    os.environ["LOCAL_RANK"] = "0"
    keep = ModelCheckpoint(folder, "{epoch}", monitor="own", save_top_k=2, save_on_train_epoch_end=True)
    trainer = make_trainer(make_strategy("dgc"), 2, callbacks=[keep], enable_checkpointing=True, max_epochs=3)
    trainer.fit(OwnMetric(), make_data(2, 3))
    dist.barrier()
    return sorted(os.listdir(folder))


def test_all_nodes_delete_the_shards_of_what_rank_zero_deletes(tmp_path: Path) -> None:
    """Each rank's `ModelCheckpoint` deletes the worst by its own metric."""
    kept = ["epoch=0.ckpt", "epoch=0.ckpt.ranks", "epoch=2.ckpt", "epoch=2.ckpt.ranks"]
    assert run_ranks(fit_on_two_nodes_of_one_rank, 2, str(tmp_path)) == [kept] * 2
    assert all(len(os.listdir(tmp_path / name)) == 2 for name in kept if name.endswith(".ranks"))


def test_a_linked_last_checkpoint_resumes(tmp_path: Path) -> None:
    names = run_ranks(fit_linking_the_last, 2, str(tmp_path))[0]
    assert "last.ckpt" in names
    assert (tmp_path / "last.ckpt").is_symlink()
    # A folder that an earlier last.ckpt has left behind, before it became a link, is passed over.
    target = (tmp_path / "last.ckpt").resolve()
    stale = next(tmp_path / name for name in names if name.endswith(".ranks") and name != f"{target.name}.ranks")
    shutil.copytree(stale, tmp_path / "last.ckpt.ranks", dirs_exist_ok=True)
    states = run_ranks(fit, 2, "", (), str(tmp_path / "last.ckpt"))
    assert [state["step"] for state in states] == [STEPS, STEPS]


def fit_in_memory() -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """Each rank has a file system of its own, as nodes without a shared disk do."""
    path = "memory://deep/step{}.ckpt"
    whole, memory = fit(path, (7,)), fsspec.filesystem("memory")
    checkpoint = [memory.cat("/deep/step7.ckpt") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(checkpoint, src=0)  # a file of rank 0, copied to each node
    memory.pipe("/deep/step7.ckpt", checkpoint[0])
    before = sorted(memory.find("/deep"))
    resumed = fit(resume=path.format(7))
    make_strategy("dgc").remove_checkpoint(path.format(7))
    return whole, resumed, before, sorted(memory.find("/deep"))


def test_remote_file_systems() -> None:
    for rank, (whole, resumed, before, after) in enumerate(run_ranks(fit_in_memory, 2)):
        assert resumed == whole
        assert before[0] == "/deep/step7.ckpt"
        assert [name.startswith(f"/deep/step7.ckpt.ranks/rank-{rank}-of-2-") for name in before[1:]] == [True]
        assert after == []


def resume_under_dgc(path: str) -> list[tuple[int, str]]:
    """Begin with DDP, then with replicas; return the last step and the weights."""
    found, said = [], list[str]()
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    begins = [(make_strategy("ddp"), "another program")]
    begins += [(LocalSGDStrategy(k_steps=2, begin_step=0), "a method of kind 'replicas'")]
    for strategy, writer in begins:
        saving = make_trainer(strategy, 2, callbacks=[Watcher(path, (4,))], **options)
        saving.fit(Tiny(), make_data(2, STEPS))
        trainer = make_trainer(make_strategy("dgc"), 2, **options)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(checkpoint, "rank_zero_info", said.append)
            trainer.fit(Tiny(), make_data(2, STEPS), ckpt_path=path)
        assert f"was written by {writer}. DGCStrategy, of kind 'gradients', begins with the weights" in said[-1]
        found.append((trainer.strategy.workers[0].step, weights_of(trainer.lightning_module)))
    return found


def test_a_run_can_change_to_dgc(tmp_path: Path) -> None:
    first, second = run_ranks(resume_under_dgc, 2, str(tmp_path / "some.ckpt"))
    assert first == second
    assert [step for step, _ in first] == [STEPS] * 2


def resume_in_ddp(path: str) -> tuple[int, str]:
    trainer = make_trainer(make_strategy("ddp"), 2, max_steps=STEPS, max_epochs=-1)
    trainer.fit(Tiny(ADAMW), make_data(2, STEPS), ckpt_path=path)
    return trainer.global_step, weights_of(trainer.lightning_module)


def test_a_run_can_go_on_under_plain_ddp(tmp_path: Path) -> None:
    """With the state that AdamW has after any 7 steps, under any strategy. With momentum: test_levels.py."""
    path = str(tmp_path / "step{}.ckpt")
    run_ranks(partial(fit, path, (7,), optimizer=ADAMW), 2)
    states = torch.load(path.format(7), weights_only=True)["optimizer_states"][0]["state"]
    assert len(states) == 8
    for state in states.values():
        assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
        assert float(state["step"]) == 7.0
        assert all(value.isfinite().all() and value.count_nonzero() > 0 for value in state.values())
    first, second = run_ranks(resume_in_ddp, 2, path.format(7))
    assert first == second
    assert first[0] == STEPS
