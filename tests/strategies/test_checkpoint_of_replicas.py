"""Checkpoints of replicas that differ: the mean in the file, each rank's own beside it, resumed to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_lowbw import AdaptiveLocalSGDStrategy, DGCStrategy, LocalSGDStrategy
from tests.ranks import run_ranks
from tests.strategies.fits import Trace, adamw, gathered, weights
from tests.tiny import Tiny, Watcher, amp_with_scaler, make_data, make_trainer

STEPS = 10


def fit_with_unsynced_names(folder: str, resume: str) -> tuple[str, list[str]]:
    num_ranks = dist.get_world_size()

    class Named(Tiny):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", float(self.global_rank))
            return loss

    saver = ModelCheckpoint(folder, filename="{step}-{mine:.1f}", every_n_train_steps=3, save_top_k=1, monitor="mine")
    trace = Trace()
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True}
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, callbacks=[saver, trace], **options)
    trainer.fit(Named(data_by_step=True), make_data(num_ranks, STEPS), ckpt_path=resume or None)
    return str(saver.best_model_path), trace.after


def test_shards_lie_beside_the_file_of_rank_0(tmp_path: Path) -> None:
    """Rank 1 would name the file after its own metric."""
    straight = run_ranks(fit_with_unsynced_names, 2, str(tmp_path), "")
    (path,) = tmp_path.glob("*.ckpt")
    (folder,) = tmp_path.glob("*.ranks")
    assert folder.name == path.name + ".ranks"
    assert len(list(folder.iterdir())) == 2
    step = torch.load(path, weights_only=False)["global_step"]
    resumed = run_ranks(fit_with_unsynced_names, 2, str(tmp_path / "more"), str(path))
    for (_, before), (_, after) in zip(straight, resumed, strict=True):
        assert before[step:] == after


def fit_and_save(path: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            if trainer.global_step == 6:
                before = weights(module)
                trainer.save_checkpoint(path)
                assert weights(module) == before

        def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict) -> None:
            assert len(set(gathered(weights(module)))) == 1

    trace = Trace()
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, callbacks=[trace, Save()])
    model = Tiny(data_by_step=True)
    trainer.fit(model, make_data(num_ranks, STEPS))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_checkpoint_is_a_plain_file_with_the_mean_of_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "six.ckpt"
    run_ranks(fit_and_save, 2, str(path))
    checkpoint = torch.load(path, weights_only=False)
    shards = sorted((tmp_path / "six.ckpt.ranks").iterdir())
    own = [torch.load(shard, weights_only=True)["workers"][0]["own"] for shard in shards]
    assert len(own) == 2
    for name, value in checkpoint["state_dict"].items():
        if name in own[0] and "norm" not in name:
            torch.testing.assert_close(value, (own[0][name] + own[1][name]) / 2)
    assert not torch.equal(own[0]["wide.weight"], own[1]["wide.weight"])
    Tiny().load_state_dict(checkpoint["state_dict"])


def fit_resumable(
    strategy: dict[str, Any],
    path: str,
    save_at: int = 0,
    resume: bool = False,
    amp: bool = False,
    adaptive: bool = False,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(adamw, data_by_step=True, dropout=0.3), Trace()
    torch.manual_seed(7 + dist.get_rank() if not resume else 99)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == save_at:
                trainer.save_checkpoint(path)

    options: dict[str, Any] = {"plugins": [amp_with_scaler(2.0**20)]} if amp else {}
    chosen = AdaptiveLocalSGDStrategy(**strategy) if adaptive else LocalSGDStrategy(**strategy)
    trainer = make_trainer(chosen, num_ranks, callbacks=[trace, Save()], max_steps=STEPS, max_epochs=-1, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=path if resume else None)
    return {"after": trace.after, "end": weights(model), "averages": trace.averages}


@pytest.mark.parametrize(
    ("strategy", "save_at", "amp", "adaptive"),
    [
        ({"k_steps": 4}, 7, True, False),
        ({"init_k_steps": 4, "rule": "adacomm"}, 7, False, True),
        ({"k_steps": 4, "num_fragments": 3, "delay_steps": 3}, 6, False, False),
    ],
)
def test_resume_in_mid_interval_to_the_bit(
    strategy: dict[str, Any], save_at: int, amp: bool, adaptive: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "some.ckpt")
    fit = partial(fit_resumable, strategy, path, amp=amp, adaptive=adaptive)
    straight = run_ranks(partial(fit, save_at=save_at), 2)
    resumed = run_ranks(partial(fit, resume=True), 2)
    for before, after in zip(straight, resumed, strict=True):
        assert before["after"][save_at:] == after["after"]
        assert before["end"] == after["end"]
        assert before["averages"][save_at:] == after["averages"]


def test_another_number_of_ranks_resumes_from_the_consensus(tmp_path: Path) -> None:
    path = str(tmp_path / "some.ckpt")
    run_ranks(partial(fit_resumable, {"k_steps": 4}, path, save_at=6), 2)
    for num_ranks in (1, 3):
        results = run_ranks(partial(fit_resumable, {"k_steps": 4}, path, resume=True), num_ranks)
        assert len({result["end"] for result in results}) == 1
        assert len(results[0]["after"]) == STEPS - 6


# With nothing left to train ------------------------------------------------------------------------------------------

FINISHED: dict[str, Any] = {
    "local_sgd": lambda: LocalSGDStrategy(k_steps=4),
    "streaming": lambda: LocalSGDStrategy(k_steps=4, num_fragments=3, delay_steps=2),
    "dgc": lambda: DGCStrategy(sparsity=[0.9], min_numel=100),
}


def state_of(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def resume_finished(name: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """Train and save on the way; resume with no step left, test and save; resume with the steps that are left."""
    path, again = f"{folder}/first.ckpt", f"{folder}/again.ckpt"
    states = {}
    for leg, resume, last in (("straight", None, 15), ("finished", path, STEPS), ("resumed", path, 15)):
        model, watcher = Tiny(data_by_step=True), Watcher(path, () if resume else (STEPS,))
        strategy = DDPStrategy() if name == "ddp" else FINISHED[name]()
        trainer = make_trainer(strategy, 2, max_steps=last, max_epochs=-1, callbacks=[watcher])
        # With a look before the first batch, too.
        trainer.fit(model, make_data(2, STEPS), make_data(2, 1), ckpt_path=resume)
        states[leg] = state_of(model)
        if leg == "finished":
            trainer.save_checkpoint(again)
            trainer.test(model, make_data(2, 1), verbose=False)
            states["tested"] = state_of(model)
    return states


@pytest.mark.fault(
    "a finished run that is resumed",
    "all ranks have the weights of the checkpoint, and their own state when training goes on",
)
@pytest.mark.parametrize("name", list(FINISHED))
def test_a_finished_run_that_is_resumed_has_the_weights_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    results = run_ranks(resume_finished, 2, name, str(tmp_path))
    first, again = (
        torch.load(tmp_path / f"{which}.ckpt", weights_only=True)["state_dict"] for which in ("first", "again")
    )
    for states in results:
        for mine, expected in (
            (states["finished"], first),
            (states["tested"], first),
            (again, first),
            (states["resumed"], states["straight"]),
        ):
            assert all(torch.equal(value, expected[key]) for key, value in mine.items())
