"""A checkpoint without the folder beside it: refused, or resumed with the weights and the optimizer, as asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import ConfigurationError, DGCStrategy, LocalSGDStrategy, QuantizedGradients, Strategy
from tests.ranks import run_ranks
from tests.tiny import MIN_NUMEL, Tiny, Watcher, make_data, make_trainer, since_lightning_2_5, weights_of

EPOCH = 5  # steps
SAVED = 7  # the step
RESUME = "weights and optimizer"


def make(name: str, **kwargs: Any) -> Strategy:
    if name == "dgc":
        return DGCStrategy(sparsity=[0.9], min_numel=MIN_NUMEL, **kwargs)
    if name == "dgc, auto":
        return DGCStrategy(**kwargs)
    if name == "int8":
        return Strategy(QuantizedGradients("int8"), **kwargs)
    return LocalSGDStrategy(3, begin_step="first_lr_decay", **kwargs)


class Decaying(Tiny):
    def __init__(self) -> None:
        super().__init__(data_by_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Begin(pl.Callback):
    """What a resume begins with."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        momentum = [state["momentum_buffer"].clone() for state in trainer.optimizers[0].state.values()]
        self.begun = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "step of the worker": trainer.strategy.workers[0].step,
            "is local": trainer.strategy.workers[0].is_local,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "weights": {name: value.clone() for name, value in module.state_dict().items()},
            "momentum": momentum,
        }


def train(strategy: Strategy, path: str, resume: str | None = None) -> dict[str, Any]:
    begin, model = Begin(), Decaying()
    options = {"max_epochs": 3, "callbacks": [Watcher(path, (SAVED,)), *([] if resume is None else [begin])]}
    trainer = make_trainer(strategy, dist.get_world_size(), **options)
    trainer.fit(model, make_data(dist.get_world_size(), EPOCH), ckpt_path=resume)
    result = {"weights": weights_of(model), "step": trainer.global_step, "worker": strategy.workers[0].step}
    return result if resume is None else {**result, "begin": begin.begun}


def refused(strategy: Strategy, path: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        train(strategy, "", path)
    return str(caught.value)


def save_then_resume(name: str, folder: str) -> dict[str, Any]:
    path = f"{folder}/{name}.ckpt"
    train(make(name), path)
    with_folder = train(make(name, resume=RESUME), f"{folder}/again", path)
    dist.barrier()
    if dist.get_rank() == 0:  # the shard of one rank is gone; the other one has its own
        next(Path(f"{path}.ranks").glob("rank-1-*")).unlink()
    dist.barrier()
    message = refused(make(name), path)
    alone = train(make(name, resume=RESUME), f"{folder}/again", path)
    assert alone["weights"] == with_folder["weights"], "the folder is not read"
    return {**alone, "message": message}


@since_lightning_2_5
@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
def test_a_checkpoint_alone_is_resumed_where_that_is_asked_for(name: str, tmp_path: Path) -> None:
    first, second = results = run_ranks(save_then_resume, 2, name, str(tmp_path))
    saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
    for result in results:
        assert f"resume={RESUME!r}" in result["message"]
        begin = result["begin"]
        assert (begin["step"], begin["epoch"], begin["step of the worker"]) == (SAVED, 1, SAVED)
        assert begin["is local"] == (name == "local_sgd")
        assert begin["lr"] == saved["optimizer_states"][0]["param_groups"][0]["lr"] < 0.05
        for key, value in saved["state_dict"].items():
            assert torch.equal(begin["weights"][key], value)
        momentum = [state["momentum_buffer"] for state in saved["optimizer_states"][0]["state"].values()]
        for mine, theirs in zip(begin["momentum"], momentum, strict=True):
            assert torch.equal(mine, theirs)
        assert (result["step"], result["worker"]) == (3 * EPOCH, 3 * EPOCH)
    assert first["weights"] == second["weights"]


# Which the residuals of "dgc" do not fit, and why.
OTHERS: dict[str, str] = {"int8": "keeps gradients that TopK has not sent", "dgc, auto": "would be dense"}


def resume_with_other_methods(folder: str) -> list[tuple[str, dict[str, Any]]]:
    path = f"{folder}/dgc.ckpt"
    train(make("dgc"), path)
    return [(refused(make(name), path), train(make(name, resume=RESUME), f"{folder}/again", path)) for name in OTHERS]


@since_lightning_2_5
def test_a_method_that_residuals_do_not_fit_goes_on_without(tmp_path: Path) -> None:
    results = run_ranks(resume_with_other_methods, 2, str(tmp_path))
    for why, *of_ranks in zip(OTHERS.values(), *results, strict=True):
        for message, result in of_ranks:
            assert why in message
            assert f"resume={RESUME!r}" in message
            assert (result["begin"]["step"], result["worker"]) == (SAVED, 3 * EPOCH)
        assert len({result["weights"] for _, result in of_ranks}) == 1


def test_what_a_resume_needs_is_one_of_two() -> None:
    assert f"resume={RESUME!r}" in repr(make("dgc", resume=RESUME))
    assert "resume" not in repr(make("dgc"))
    with pytest.raises(ConfigurationError, match="choose one of exact, weights and optimizer"):
        make("local_sgd", resume="weights")
