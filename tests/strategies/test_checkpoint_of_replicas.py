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

from lightning_lowbw import DGCStrategy, LocalSGDStrategy
from tests.ranks import run_ranks
from tests.strategies.fits import Trace, adamw, gathered, weights
from tests.tiny import Tiny, Watcher, amp_with_scaler, make_data, make_trainer

STEPS = 10


def save_by_a_metric_of_each_rank(folder: str) -> None:
    num_ranks = dist.get_world_size()

    class Named(Tiny):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", float(self.global_rank))
            return loss

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert len(set(gathered(weights(self)))) == 1

    saver = ModelCheckpoint(folder, filename="{step}-{mine:.1f}", every_n_train_steps=3, save_top_k=1, monitor="mine")
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True}
    make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, **options).fit(Named(), make_data(num_ranks, 4))


def test_a_checkpoint_is_a_plain_file_of_rank_0_with_the_mean_and_shards_beside_it(tmp_path: Path) -> None:
    """Rank 1 would name the file after its own metric."""
    run_ranks(save_by_a_metric_of_each_rank, 2, str(tmp_path))
    (path,) = tmp_path.glob("*.ckpt")
    (folder,) = tmp_path.glob("*.ranks")
    assert folder.name == path.name + ".ranks"
    state = torch.load(path, weights_only=True)["state_dict"]
    own, others = (torch.load(shard, weights_only=True)["workers"][0]["own"] for shard in folder.iterdir())
    for name, value in state.items():
        if name in own and "norm" not in name:
            torch.testing.assert_close(value, (own[name] + others[name]) / 2)
    assert not torch.equal(own["wide.weight"], others["wide.weight"])
    Tiny().load_state_dict(state)


def fit_resumable(path: str, save_at: int = 0, resume: bool = False, amp: bool = False) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(adamw, data_by_step=True, dropout=0.3), Trace()
    torch.manual_seed(7 + dist.get_rank() if not resume else 99)
    options: dict[str, Any] = {"plugins": [amp_with_scaler(2.0**20)]} if amp else {}
    options |= {"callbacks": [trace, Watcher(path, (save_at,))], "max_steps": STEPS, "max_epochs": -1}
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=path if resume else None)
    return {"after": trace.after, "end": weights(model), "averages": trace.averages}


def test_resume_in_mid_interval_to_the_bit(tmp_path: Path) -> None:
    """With a scaler, and random numbers of its own on each rank; of all methods: tests/contract."""
    path = str(tmp_path / "some.ckpt")
    straight = run_ranks(partial(fit_resumable, path, save_at=7, amp=True), 2)
    resumed = run_ranks(partial(fit_resumable, path, resume=True, amp=True), 2)
    for before, after in zip(straight, resumed, strict=True):
        assert before["after"][7:] == after["after"]
        assert before["end"] == after["end"]
        assert before["averages"][7:] == after["averages"]


def test_another_number_of_ranks_resumes_from_the_consensus(tmp_path: Path) -> None:
    path = str(tmp_path / "some.ckpt")
    run_ranks(partial(fit_resumable, path, save_at=6), 2)
    for num_ranks in (1, 3):
        results = run_ranks(partial(fit_resumable, path, resume=True), num_ranks)
        assert len({result["end"] for result in results}) == 1
        assert len(results[0]["after"]) == STEPS - 6


# With nothing left to train ------------------------------------------------------------------------------------------

FINISHED: dict[str, Any] = {
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
