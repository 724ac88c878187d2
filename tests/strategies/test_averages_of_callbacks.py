"""A moving average that a callback puts into the model: equal on all ranks, and there for as long as under ddp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_lowbw import LocalSGD
from tests.ranks import on_ranks
from tests.strategies.fits import Noted, gathered, make, same, train
from tests.strategies.sharded_models import Configured, shard_digest, train_shards
from tests.tiny import Tiny, make_data, weights_of

STEPS = 10
# When it is taken out again -> whether the last weights that were validated are saved, and left after the fit, by ddp.
OUT = {
    "on_train_epoch_start": (True, True),  # as in schnetpack
    "on_validation_end": (False, False),  # before a save
    "on_train_batch_start": (True, True),
    "on_fit_end": (True, False),  # in since the first validation; what is validated later has been trained from it
    "": (True, True),  # never
}
CHANGES = {"local_sgd": {"k_steps": 4}, "post-local": {"k_steps": 4, "begin_step": 6}, "sparse_loco": {"k_steps": 4}}


def strategy(name: str) -> Any:
    return make(name, CHANGES.get(name.removesuffix(" on two levels")))


class Average(Callback):
    """A moving average that is in the model from a validation on, until the hook `out`."""

    def __init__(self, out: str, *, swaps_pointers: bool = False) -> None:
        self.out, self.swaps_pointers, self.own = out, swaps_pointers, list[torch.Tensor]()
        if out:
            setattr(self, out, lambda trainer, module, *_: self.end(module))

    def _put(self, module: pl.LightningModule, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(module.parameters(), values, strict=True):
            if self.swaps_pointers:
                parameter.data = value
            else:
                parameter.data.copy_(value)

    def end(self, module: pl.LightningModule) -> None:
        if self.own:
            self._put(module, self.own)
            self.own = []

    def on_train_start(self, trainer: Any, module: pl.LightningModule) -> None:
        self.mean = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        for mean, parameter in zip(self.mean, module.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.3)

    def on_validation_epoch_start(self, trainer: Any, module: pl.LightningModule) -> None:
        if not self.own or not self.out:
            now = [p.data for p in module.parameters()]
            self.own = now if self.swaps_pointers else [each.clone() for each in now]
            self._put(module, self.mean)


def fit(name: str, folder: Path, average: Average | None, **options: Any) -> tuple[list[str], bool, bool]:
    """Train two epochs; return what was trained, and whether what was validated last is saved, and left."""
    module, after, validated = Tiny(), Noted(), Noted(weights_of, "on_validation_batch_start")
    # What others read at the end of a validation and of an epoch, and beside a save.
    read = Noted(weights_of, "on_validation_end", "on_train_epoch_end", "on_save_checkpoint")
    callbacks: list[Callback] = [] if name == "ddp" else [after]
    if average is not None:
        saves = ModelCheckpoint(folder, filename=name, enable_version_counter=False)
        callbacks += [average, validated, read, saves]
    usual = {"max_epochs": 2, "enable_checkpointing": average is not None, "num_sanity_val_steps": 0}
    trainer = train(strategy(name), module, STEPS, 2 * bool(average), callbacks=callbacks, **{**usual, **options})
    left = same(weights_of(module))
    if average is None:
        return after.values, False, False
    last, saved = validated.values[-1], Tiny()
    saved.load_state_dict(torch.load(folder / f"{name}.ckpt", weights_only=True)["state_dict"])
    trainer.validate(module, make_data(dist.get_world_size(), 2), verbose=False)
    same(validated.values)
    if "val_check_interval" not in options:
        same(read.values)
    return after.values, weights_of(saved) == last, left == last


@pytest.mark.fault
@pytest.mark.parametrize("name", ["ddp", "local_sgd", "post-local", "sparse_loco", "streaming"])
@on_ranks(2, timeout_s=240.0)
def test_an_average_is_validated_saved_and_left_as_by_ddp(name: str, tmp_path: Path) -> None:
    quiet, *_ = fit(name, tmp_path, None)
    for out, expected in OUT.items() if name != "post-local" else [*OUT.items()][-2:]:
        after, *is_kept = fit(name, tmp_path, Average(out, swaps_pointers=out == "on_train_epoch_start"))
        assert tuple(is_kept) == expected, out
        if out in ("", "on_fit_end"):
            assert after[:STEPS] == quiet[:STEPS], out
            assert after != quiet or name == "ddp", out
        else:  # what is taken out again changes nothing
            assert after == quiet, out
    if name != "ddp":
        assert len(set(gathered(tuple(quiet)))) == 2, "the ranks were not local"
        # Also in mid-epoch, where it is out again before the next batch.
        assert fit(name, tmp_path, Average("on_train_batch_start"), val_check_interval=3)[0] == quiet


@on_ranks(4)
def test_an_average_is_that_of_all_nodes(tmp_path: Path) -> None:
    assert fit("local_sgd on two levels", tmp_path, Average("on_train_epoch_start"))[1:] == (True, True)


class BeforeStep(Tiny):
    """Calls a function with the weights that a step begins with."""

    def __init__(self, check: Callable[[Any], None]) -> None:
        super().__init__()
        self.check = check

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.check(self)
        return super().training_step(batch, batch_idx)


@on_ranks(2)
def test_what_stays_is_the_next_consensus() -> None:
    """From which the next changes are measured; averages in progress end."""
    had_averages = list[bool]()

    def has_averages(trainer: Any) -> bool:
        return any(fragment.work for fragment in trainer.strategy.workers[0].fragments)

    def check(module: BeforeStep) -> None:
        (worker,) = module.trainer.strategy.workers
        had_averages.append(has_averages(module.trainer))
        if module.trainer.global_step == 5:  # a validation has just been
            assert not had_averages[-1]
            assert worker.parameters_agree
            same(weights_of(module))
            assert all(start.equal(parameter) for parameter, start in worker.replica.start.items())

    module, look = BeforeStep(check), Noted(lambda module: has_averages(module.trainer), "on_validation_start")
    options = {"val_check_interval": 5, "max_steps": 8, "num_sanity_val_steps": 0, "callbacks": [Average(""), look]}
    train("streaming", module, 9, 1, **options)
    assert all(look.values)
    assert any(had_averages)
    same(weights_of(module))


class SwapsInModelEval(Tiny):
    """Puts its average in before the consensus is shown, and out with Lightning's counterpart of that hook."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Average("")
        self.average.out = "on_validation_model_train"

    def on_train_start(self) -> None:
        self.average.on_train_start(self.trainer, self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.on_train_batch_end(self.trainer, self)

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.average.on_validation_epoch_start(self.trainer, self)

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.average.end(self)


@on_ranks(2)
def test_an_average_that_goes_in_before_the_consensus_is_shown_changes_nothing() -> None:
    after = []
    for num_batches in (0, 2):
        trace, validated = Noted(), Noted(weights_of, "on_validation_batch_start")
        options = {"val_check_interval": 5, "max_epochs": 2, "num_sanity_val_steps": 0}
        train(strategy("local_sgd"), SwapsInModelEval(), STEPS, num_batches, callbacks=[trace, validated], **options)
        after.append(trace.values)
        same(validated.values)
    assert after[0] == after[1]


@on_ranks(2)
def test_a_resume_begins_with_the_average_that_was_saved(tmp_path: Path) -> None:
    """As under ddp, on all ranks."""
    path, saved, begun = tmp_path / "local_sgd.ckpt", Tiny(), list[str]()
    fit("local_sgd", tmp_path, Average("on_train_epoch_start"))
    saved.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    module = BeforeStep(lambda module: begun.append(weights_of(module)))
    train(strategy("local_sgd"), module, STEPS, max_epochs=3, resume=str(path))
    assert same(begun[0]) == weights_of(saved)
    assert len(begun) == STEPS
    same(weights_of(module))


@on_ranks(4)
def test_an_average_of_a_sharded_model_is_that_of_all_nodes() -> None:
    """Two nodes of two ranks; rank i has the same shard as rank i + 2."""
    left = {}
    for out in (None, "on_validation_end", "on_train_epoch_start", "on_train_batch_start", ""):
        module, validated = Configured(), Noted(shard_digest, "on_validation_batch_start")
        callbacks = [] if out is None else [Average(out), validated]
        options = {"callbacks": callbacks, "max_epochs": 2, "max_steps": 13, "limit_val_batches": 2}
        train_shards(LocalSGD(4, 0), module, STEPS - 1, val=out is not None, **options)
        for of_ranks in (gathered(validated.values), left.setdefault(out, gathered(shard_digest(module)))):
            assert of_ranks[:2] == of_ranks[2:], out
    quiet, *others, kept = left.values()
    assert others == [quiet] * 3
    assert kept != quiet
