"""Validation and checkpoints see the last average, which changes nothing; the fit ends with an average of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from lightning_lowbw import LocalSGD, Method, NonFiniteGradientError, Strategy
from tests.ranks import on_ranks
from tests.strategies import fits
from tests.tiny import Tiny, trained, weights_of

STEPS = 10


REPLICAS = LocalSGD(4, num_fragments=3, delay_steps=2, compression=fits.SPARSE)


@pytest.mark.parametrize("method", [fits.METHODS["dgc, warm-up"], REPLICAS], ids=["gradients", "replicas"])
@on_ranks(2)
def test_validating_and_saving_change_nothing(method: Method, tmp_path: Path) -> None:
    ends = []
    saves = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=1, save_top_k=-1)
    before = fits.At((5, 7), lambda trainer, _: trainer.save_checkpoint(tmp_path / "some.ckpt"), "on_before_backward")
    for looks in (False, True):
        model = Tiny(fits.adamw, data_by_step=True)  # no dropout: a validation loader draws a random number
        # Statistics of dense steps are as under ddp.
        after = fits.Noted(fits.weights if method.when.averages_weights else weights_of)
        shown = fits.Noted(fits.weights, *fits.LOOKS[: 3 if method.when.averages_weights else 1])
        options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "callbacks": [after, shown]}
        if looks:
            options |= {"val_check_interval": 2, "num_sanity_val_steps": 1, "callbacks": [after, shown, saves, before]}
        trainer = fits.train(Strategy(method), model, STEPS, 2 * looks, enable_checkpointing=looks, **options)
        fits.same([fits.weights(model), *shown.values])
        ends.append([*after.values, fits.state_of(trainer)])
    assert len(shown.values) > 2
    assert ends[0] == ends[1]
    assert len(set(fits.gathered(after.values[2]))) == 1 + method.when.averages_weights, "a replica is local"


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "delayed"])
@on_ranks(2)
def test_between_two_averages_the_last_one_is_validated_and_saved(name: str, tmp_path: Path) -> None:
    """After the steps 3 and 6, or of the average that is begun after step 4, after step 7."""
    seen, after = fits.Noted(weights_of, "on_validation_start"), fits.Noted(weights_of)
    saves = fits.saving(f"{tmp_path}/{{}}.ckpt", tuple(range(1, 9)))
    options = {"val_check_interval": 1, "num_sanity_val_steps": 0, "callbacks": [after, seen, saves]}
    model = Tiny()
    begin = weights_of(model)
    fits.train(name, model, 8, 1, **options)
    last = (4, 8) if name == "delayed" else (3, 6)
    assert fits.same(seen.values) == seen.values
    of = [seen.values[number] for number in range(8)]
    begins = [0, *last] if name != "delayed" else [0, 7]
    for number, each in enumerate(of):
        first = max(step for step in begins if step <= number + 1)
        assert each == (of[first - 1] if first else begin), number + 1
        saved = Tiny()
        saved.load_state_dict(torch.load(tmp_path / f"{number + 1}.ckpt", weights_only=True)["state_dict"])
        assert weights_of(saved) == each
    if name != "delayed":
        assert [of[step - 1] for step in last] == [after.values[step - 1] for step in last]
    fits.same(weights_of(model))


class Writes(Callback):
    """Puts other weights in for a validation, and never takes them out."""

    def on_validation_epoch_start(self, trainer: Any, module: pl.LightningModule) -> None:
        for parameter in trained(module):
            parameter.data.mul_(0.5)


@on_ranks(2)
def test_what_is_written_to_the_last_average_is_dropped_with_one_warning() -> None:
    ends = []
    for callbacks in ([], [Writes()]):
        after = fits.Noted()
        options = {"val_check_interval": 2, "num_sanity_val_steps": 0, "callbacks": [after, *callbacks]}
        _, said = fits.warned(lambda options=options: fits.train("local_sgd", Tiny(), STEPS, 1, **options))
        ends.append(after.values)
        assert sum("These changes are dropped" in each for each in said) == bool(callbacks and dist.get_rank() == 0)
    assert ends[0] == ends[1]


@on_ranks(2)
def test_looks_that_come_more_often_than_averages_are_told_once() -> None:
    quiet, every = {"val_check_interval": 3}, {"val_check_interval": 2}
    stops = {"callbacks": [EarlyStopping("val_loss", check_on_train_epoch_end=True)], "max_epochs": 2}
    for options, num_steps, words in (
        (quiet, 6, ""),
        (every, 6, "validation comes every 2 steps, and the weights are averaged every 3"),
        ({**stops, "val_check_interval": 1.0}, 2, "validation comes every 2 steps and early stopping comes every 2"),
    ):
        _, said = fits.warned(lambda options=options, n=num_steps: fits.train("local_sgd", Tiny(), n, 1, **options))
        told = [each for each in said if "sees the same weights again" in each]
        assert len(told) == bool(words and dist.get_rank() == 0)
        assert all(words in each for each in told)


@pytest.mark.skipif(not hasattr(pl.callbacks, "WeightAveraging"), reason="not before Lightning 2.6")
@on_ranks(2)
def test_a_moving_average_works_with_a_method_that_exchanges_gradients() -> None:
    model = Tiny()
    fits.train("dgc", model, 4, callbacks=[pl.callbacks.WeightAveraging()])
    fits.same(weights_of(model))


@pytest.mark.fault
@on_ranks(2)
def test_a_nan_between_averages_reaches_no_checkpoint_and_ends_no_fit_unseen(tmp_path: Path) -> None:
    """An overflow in an average: tests/sync/test_faults.py and test_sharded_errors.py."""
    saves = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=3, enable_version_counter=False)
    hidden = LocalSGD(4, 0, delay_steps=3, compression=fits.SPARSE)
    for method, step, callbacks, name in (
        (hidden, 5, [saves], "wide.weight"),
        (LocalSGD(20, 0), STEPS, [], "wider.weight"),
    ):
        spoil = fits.At(step, lambda _, module: module.wider.weight.data[0, 0].fill_(torch.nan), ranks=(1,))
        options = {"callbacks": [spoil, *callbacks], "enable_checkpointing": bool(callbacks)}
        message = fits.same(fits.refusal(Strategy(method), Tiny(), STEPS, error=NonFiniteGradientError, **options))
        assert f"rank 1 up to step {STEPS} left parameter '{name}' infinite or NaN" in message
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 9  # the anchor is finite
    assert all(bool(value.isfinite().all()) for value in checkpoint["state_dict"].values())
