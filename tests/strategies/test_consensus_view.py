"""Validation, checkpoints and the end of the fit see the replicas' mean, which changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

from lightning_lowbw import LocalSGDStrategy, NonFiniteGradientError
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE, Trace, adamw, gathered, weights
from tests.tiny import Tiny, make_data, make_trainer, weights_of

STEPS = 10


def fit_and_look(look: bool, folder: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(adamw, data_by_step=True), Trace()  # no dropout: a validation loader draws a random number
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "callbacks": [trace]}
    if look:
        options |= {"val_check_interval": 2, "num_sanity_val_steps": 1}
        options["callbacks"] += [ModelCheckpoint(folder, monitor="val_loss", every_n_train_steps=3, save_top_k=-1)]
        options["enable_checkpointing"] = True
    strategy = LocalSGDStrategy(k_steps=4, num_fragments=3, delay_steps=2, compression=SPARSE)
    trainer = make_trainer(strategy, num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 2) if look else None)
    assert len(set(gathered(weights(model)))) == 1, "no consensus after the fit"
    shown = gathered(trace.shown)
    assert all(len(set(each)) == 1 for each in zip(*shown, strict=True)), "somebody saw no consensus"
    assert len(trace.shown) > 5 or not look
    return {"after": trace.after, "end": weights(model)}


def test_validating_and_saving_change_nothing(tmp_path: Path) -> None:
    quiet = run_ranks(fit_and_look, 2, False, "")
    looked = run_ranks(fit_and_look, 2, True, str(tmp_path))
    assert quiet == looked
    assert quiet[0]["after"][2] != quiet[1]["after"][2], "the ranks were not local"


def look_at_buffers() -> list[str]:
    """Look after the last synchronous step, right after averages, and in the middle of an accumulation."""
    num_ranks, trace = dist.get_world_size(), Trace()
    trainer = make_trainer(
        LocalSGDStrategy(k_steps=2, begin_step=3),
        num_ranks,
        callbacks=[trace],
        val_check_interval=1,
        accumulate_grad_batches=2,
    )
    trainer.fit(Tiny(), make_data(num_ranks, 14), make_data(num_ranks, 1))
    return trace.shown[2 * (1 + 5) :]  # before: the sanity check, and five batches of steps as in DDP


def test_all_ranks_see_the_same_buffers() -> None:
    first, second = run_ranks(look_at_buffers, 2)
    assert len(first) == 2 * 9 + 1
    assert first == second


def fit_with_swa() -> str:
    num_ranks, model = dist.get_world_size(), Tiny()
    callbacks = [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]
    trainer = make_trainer(LocalSGDStrategy(k_steps=3), num_ranks, callbacks=callbacks, max_epochs=4)
    trainer.fit(model, make_data(num_ranks, 4))
    return weights_of(model)


def test_weights_that_a_callback_leaves_at_the_end_are_averaged_too() -> None:
    first, second = run_ranks(fit_with_swa, 2)
    assert first == second


def save_averaged(path: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the average of this rank's own weights after each step, and the average that a checkpoint has."""
    own: list[dict[str, torch.Tensor]] = []

    class Collect(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            own.append({name: p.detach().clone() for name, p in module.named_parameters()})
            if trainer.global_step == STEPS - 2:
                trainer.save_checkpoint(path)

    callbacks = [pl.callbacks.WeightAveraging(), Collect()]
    strategy = LocalSGDStrategy(k_steps=100, begin_step=0)
    make_trainer(strategy, 2, callbacks=callbacks).fit(Tiny(), make_data(2, STEPS))
    kept = own[: STEPS - 2]
    average = {name: torch.stack([each[name] for each in kept]).mean(0) for name in kept[0]}
    return average, torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.skipif(not hasattr(pl.callbacks, "WeightAveraging"), reason="not before Lightning 2.6")
def test_a_checkpoint_has_the_average_over_steps_of_all_ranks(tmp_path: Path) -> None:
    (first, saved), (second, _) = run_ranks(save_averaged, 2, str(tmp_path / "some.ckpt"))
    assert not first["wide.weight"].allclose(second["wide.weight"])
    for name, average in first.items():
        torch.testing.assert_close(saved[name], (average + second[name]) / 2, rtol=1e-4, atol=1e-6)


class Spoil(Callback):
    """A weight of rank 1 becomes NaN after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            with torch.no_grad():
                module.wider.weight[0, 0] = torch.nan


def diverge(folder: str, spoiled: int, kwargs: dict[str, Any]) -> tuple[str, int]:
    callbacks: list[Callback] = [Spoil(spoiled)]
    if folder:
        callbacks.append(ModelCheckpoint(folder, filename="last", every_n_train_steps=3, enable_version_counter=False))
    strategy = LocalSGDStrategy(**{"k_steps": 20, "begin_step": 0, **kwargs})
    trainer = make_trainer(strategy, 2, callbacks=callbacks, enable_checkpointing=bool(folder))
    with pytest.raises(NonFiniteGradientError) as caught:
        trainer.fit(Tiny(), make_data(2, STEPS))
    return str(caught.value), trainer.global_step


@pytest.mark.fault(
    "a weight that becomes NaN between two averages",
    "an error on all ranks that names the rank and the parameter; the last good checkpoint stays",
)
def test_a_nan_between_averages_reaches_no_checkpoint(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"k_steps": 4, "delay_steps": 3, "compression": SPARSE}
    first, second = run_ranks(diverge, 2, str(tmp_path), 5, kwargs)
    assert first == second
    assert "rank 1 up to step" in first[0]
    assert "infinite or NaN" in first[0]
    (path,) = tmp_path.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == 3
    assert all(bool(value.isfinite().all()) for value in checkpoint["state_dict"].values())


class Large(Tiny):
    """Rank 1 has finite gradients of 3e38, from the third step on; without buffers nothing differs after an average."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.wide.weight.register_hook(self._enlarge)

    def _enlarge(self, gradient: torch.Tensor) -> torch.Tensor | None:
        is_large = self.trainer.global_rank == 1 and self.trainer.global_step >= 2
        return torch.full_like(gradient, 3e38) if is_large else None


def overflow(folder: str) -> tuple[str, int]:
    saves = ModelCheckpoint(folder, filename="last", every_n_train_steps=3) if folder else None
    trainer = make_trainer(
        LocalSGDStrategy(k_steps=3, begin_step=0, compression="float16"),
        2,
        callbacks=[] if saves is None else [saves],
        enable_checkpointing=saves is not None,
        max_steps=STEPS if folder else 3,
    )
    with pytest.raises(NonFiniteGradientError) as caught:
        trainer.fit(Large(), make_data(2, STEPS))
    return str(caught.value), trainer.global_step


@pytest.mark.fault(
    "a change of the weights that overflows in the residual of an average in few bits",
    "an error on all ranks that names the rank; no checkpoint is written, not even directly after the average",
)
def test_an_overflow_in_the_last_average_reaches_no_checkpoint_and_ends_no_fit(tmp_path: Path) -> None:
    for folder in (str(tmp_path), ""):
        first, second = run_ranks(overflow, 2, folder)
        assert first == second
        assert "Step 3: what was kept of earlier changes of the weights on rank 1 has become too large" in first[0]
        assert first[1] == 3
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.fault("a weight that becomes NaN between two averages")
def test_a_nan_after_the_last_average_ends_no_fit_unseen() -> None:
    first, second = run_ranks(diverge, 2, "", STEPS, {})
    assert first == second
    assert "'wider.weight'" in first[0]
