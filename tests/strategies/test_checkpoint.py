"""Rank-local state: resume to the bit, looking changes nothing, shards live and die with their checkpoint."""

from __future__ import annotations

import copy
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
from torch import Tensor

from lightning_lowbw import LocalSGDStrategy
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.strategies import checkpoint
from tests.ranks import run_ranks
from tests.tiny import Tiny, Watcher, amp_with_scaler, make_data, make_strategy, make_trainer, sgd, weights_of

STEPS = 10
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


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
    optimizer: str,
    path: str = "",
    save_at: tuple[int, ...] = (),
    resume: str | None = None,
    amp: bool = False,
    looks: bool = False,
    dropout: float = 0.3,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Tiny(OPTIMIZERS[optimizer], dropout=dropout, data_by_step=True)
    torch.manual_seed(7 + dist.get_rank() if resume is None else 99)
    options: dict[str, Any] = {"plugins": [amp_with_scaler()]} if amp else {}
    options |= {"max_steps": STEPS, "max_epochs": -1}
    if looks:
        options |= {"val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(make_strategy("dgc"), num_ranks, callbacks=[Watcher(path, save_at)], **options)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 2) if looks else None, ckpt_path=resume)
    assert model.looks > 0 or not looks
    return state_of(trainer)


def test_resume_with_a_scaler_continues_to_the_bit(tmp_path: Path) -> None:
    """Each rank has random numbers of its own; of all methods: tests/golden."""
    path = str(tmp_path / "step{}.ckpt")
    steps = (1, 4, 7)
    whole = run_ranks(fit, 2, "sgd", path, steps, None, True)
    assert whole[0]["weights"] == whole[1]["weights"]
    assert whole[0]["residuals"] != whole[1]["residuals"]
    for step in steps:  # dense phase, in the warm-up (or at its begin), after it
        assert run_ranks(fit, 2, "sgd", path, (), path.format(step), True) == whole, step


def test_saving_and_validating_change_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "step{}.ckpt")
    # Without dropout: making a validation loader draws a random number, with stock Lightning too.
    blind = run_ranks(fit, 2, "sgd", "", (), None, False, False, 0.0)
    assert run_ranks(fit, 2, "sgd", path, tuple(range(STEPS)), None, False, True, 0.0) == blind


def test_a_checkpoint_is_a_plain_file_and_may_be_moved_with_its_shards(tmp_path: Path) -> None:
    path = str(tmp_path / "step{}.ckpt")
    whole = run_ranks(fit, 2, "sgd", path, (7,))
    checkpoint = torch.load(path.format(7), weights_only=True)
    Tiny().load_state_dict(checkpoint["state_dict"])
    metadata = checkpoint["lightning_lowbw"]
    assert metadata["num_ranks"] == 2
    names = [f"rank-{rank}-of-2-{metadata['save_id']}.pt" for rank in (0, 1)]
    assert sorted(os.listdir(tmp_path / "step7.ckpt.ranks")) == names
    torch.load(tmp_path / "step7.ckpt.ranks" / names[1], weights_only=True)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "step7.ckpt").rename(moved / "renamed.ckpt")
    (tmp_path / "step7.ckpt.ranks").rename(moved / "renamed.ckpt.ranks")
    assert run_ranks(fit, 2, "sgd", "", (), str(moved / "renamed.ckpt")) == whole


def mean_update(path: str, resume: str) -> dict[str, Tensor]:
    """Resume and return this rank's residuals as they are before the first step."""
    num_ranks = dist.get_world_size()
    trainer = make_trainer(make_strategy("dgc"), num_ranks, max_steps=7, max_epochs=-1)
    trainer.fit(Tiny(OPTIMIZERS["sgd"]), make_data(num_ranks, STEPS), ckpt_path=resume)
    (worker,) = trainer.strategy.workers
    parameters = worker.by_name()
    buffers = {f"u {name}": worker.optimizer.state[parameters[name]]["momentum_buffer"] for name in worker.residuals}
    return {**{f"v {name}": v for name, v in worker.residuals.items()}, **buffers}


def test_resume_with_another_number_of_ranks_keeps_the_mean_residual(tmp_path: Path) -> None:
    path = str(tmp_path / "step{}.ckpt")
    run_ranks(fit, 3, "sgd", path, (7,))
    shards = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "step7.ckpt.ranks").iterdir())]
    for residuals in run_ranks(mean_update, 2, path, path.format(7)):
        assert residuals
        for name, value in residuals.items():
            key = {"v": "residuals", "u": "velocities"}[name[0]]
            expected = torch.stack([shard["workers"][0][key][name[2:]] for shard in shards]).mean(0)
            torch.testing.assert_close(value.flatten(), expected, rtol=0, atol=1e-7)
            assert float(value.abs().max()) > 0


def fit_linking_the_last(folder: str) -> list[str]:
    num_ranks = dist.get_world_size()
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, monitor="val_loss", save_top_k=-1, save_last="link")
    options: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "val_check_interval": 2}
    make_trainer(make_strategy("dgc"), num_ranks, **options).fit(
        Tiny(), make_data(num_ranks, STEPS), make_data(num_ranks, 2)
    )
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
    states = run_ranks(fit, 2, "sgd", "", (), str(tmp_path / "last.ckpt"))
    assert [state["step"] for state in states] == [STEPS, STEPS]


def fit_in_memory() -> tuple[dict[str, Any], dict[str, Any], list[str], list[str]]:
    """Each rank has a file system of its own, as nodes without a shared disk do."""
    path = "memory://deep/step{}.ckpt"
    if dist.get_rank() != 0:  # a file of rank 0, copied to each node
        whole = fit("sgd", path, (7,))
        checkpoint: list[Any] = [None]
    else:
        whole = fit("sgd", path, (7,))
        checkpoint = [fsspec.filesystem("memory").cat("/deep/step7.ckpt")]
    dist.broadcast_object_list(checkpoint, src=0)
    memory = fsspec.filesystem("memory")
    memory.pipe("/deep/step7.ckpt", checkpoint[0])
    before = sorted(memory.find("/deep"))
    resumed = fit("sgd", resume=path.format(7))
    strategy = make_strategy("dgc")
    strategy.remove_checkpoint(path.format(7))
    return whole, resumed, before, sorted(memory.find("/deep"))


def test_remote_file_systems() -> None:
    for rank, (whole, resumed, before, after) in enumerate(run_ranks(fit_in_memory, 2)):
        assert resumed == whole
        assert before[0] == "/deep/step7.ckpt"
        assert [name.startswith(f"/deep/step7.ckpt.ranks/rank-{rank}-of-2-") for name in before[1:]] == [True]
        assert after == []


def resume_from_ddp(path: str) -> tuple[int, str]:
    num_ranks = dist.get_world_size()
    options = {"max_steps": STEPS, "max_epochs": -1}
    stock = make_trainer(make_strategy("ddp"), num_ranks, callbacks=[Watcher(path, (4,))], **options)
    stock.fit(Tiny(), make_data(num_ranks, STEPS))
    trainer = make_trainer(make_strategy("dgc"), num_ranks, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        said: list[str] = []
        monkeypatch.setattr(checkpoint, "rank_zero_info", said.append)
        trainer.fit(Tiny(), make_data(num_ranks, STEPS), ckpt_path=path)
        assert said == [
            "The checkpoint was written by another program. DGCStrategy, of kind 'gradients', begins with the weights, "
            "the optimizer and the step in it, and with nothing else."
        ]
        local = make_trainer(LocalSGDStrategy(k_steps=2, begin_step=0), num_ranks, max_steps=2)
        local.fit(Tiny(), make_data(num_ranks, 2), ckpt_path=None)
        local.save_checkpoint(path)
        again = make_trainer(make_strategy("dgc"), num_ranks, max_steps=3)
        again.fit(Tiny(), make_data(num_ranks, 3), ckpt_path=path)
        assert "was written by a method of kind 'replicas'. DGCStrategy" in said[-1]
    return trainer.strategy.workers[0].step, weights_of(trainer.lightning_module)


class SeesOptimizer(pl.Callback):
    """What the optimizer has before its first step."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.state = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])


def resume_in_ddp(optimizer: str, path: str) -> tuple[str, dict[int, dict[str, Any]]]:
    num_ranks = dist.get_world_size()
    seen = SeesOptimizer()
    trainer = make_trainer(make_strategy("ddp"), num_ranks, callbacks=[seen], max_steps=STEPS, max_epochs=-1)
    trainer.fit(Tiny(OPTIMIZERS[optimizer]), make_data(num_ranks, STEPS), ckpt_path=path)
    assert trainer.global_step == STEPS
    return weights_of(trainer.lightning_module), seen.state


def test_a_run_can_change_to_dgc_and_back(tmp_path: Path) -> None:
    results = run_ranks(resume_from_ddp, 2, str(tmp_path / "ddp.ckpt"))
    assert results[0] == results[1]
    assert results[0][0] == STEPS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_can_go_on_under_plain_ddp(tmp_path: Path, optimizer: str) -> None:
    path = str(tmp_path / "step{}.ckpt")
    run_ranks(fit, 2, optimizer, path, (7,))
    # As the optimizer has it after any 7 steps, under any strategy.
    keys = {"exp_avg", "exp_avg_sq", "step"} if optimizer == "adamw" else {"momentum_buffer"}
    saved = torch.load(path.format(7), weights_only=True)["optimizer_states"][0]["state"]
    (first, states), (second, _) = run_ranks(resume_in_ddp, 2, optimizer, path.format(7))
    assert first == second
    assert len(states) == 8
    for index, state in states.items():
        assert set(state) == keys
        for key, value in state.items():
            assert torch.equal(value, saved[index][key])
            assert value.isfinite().all()
            assert value.count_nonzero() > 0
    if optimizer == "adamw":
        assert {float(state["step"]) for state in states.values()} == {7.0}
