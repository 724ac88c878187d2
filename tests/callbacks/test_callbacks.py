"""The warm-up in epochs."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_lowbw import ConfigurationError, DGCStrategy, DisagreementError, SparsityWarmup, TrafficMonitor
from lightning_lowbw.schedules.every_step import EveryStep
from tests.ranks import run_ranks
from tests.sync.problem import each
from tests.tiny import Tiny, make_data, make_trainer


def test_epochs_become_steps() -> None:
    assert SparsityWarmup().schedule(1252) == EveryStep(2504, 3756, (0.984375, 0.996, 0.999))
    assert SparsityWarmup(begin_epoch=0.5, epochs=0).schedule(10) == EveryStep(5, 3, (0.984375, 0.996, 0.999))
    assert SparsityWarmup(begin_step=7, sparsity=[0.9]).schedule(1252) == EveryStep(7, 1, (0.9,))  # nothing to spread
    assert SparsityWarmup(begin_step=7, sparsity=[0.5, 0.9, 0.99]).schedule(1252) == EveryStep(7, 3, (0.5, 0.9, 0.99))


class Densities(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(round(trainer.strategy.workers[0].last_density, 6))


def warm_up(options: dict[str, Any], trainer_options: dict[str, Any], per_rank: int = 0) -> Any:
    densities = Densities()
    callbacks = [SparsityWarmup(**options), densities, *trainer_options.pop("callbacks", [])]
    trainer = make_trainer("dgc", dist.get_world_size(), callbacks=callbacks, **trainer_options)
    try:
        trainer.fit(Tiny(), make_data(2, 4 + per_rank * dist.get_rank()))
    except ConfigurationError as error:
        return type(error).__name__, str(error)
    return densities.seen


def test_warmup_by_name() -> None:
    """Every other batch steps: two steps per epoch."""
    stairs = {"begin_epoch": 1, "epochs": 2, "sparsity": [0.5, 0.9]}
    expected = [1.0] * 5 + [0.5] * 4 + [0.1] * 7
    assert run_ranks(warm_up, 2, stairs, {"max_epochs": 4, "accumulate_grad_batches": 2}) == [expected, expected]


def test_warmups_that_cannot_be_known() -> None:
    changing = {"callbacks": [GradientAccumulationScheduler({0: 4})]}  # Lightning sets it when the first epoch starts
    cases = [({}, changing), ({"begin_epoch": 1}, {}, 1)]  # a batch more on rank 1
    for of_scheduler, of_lengths in run_ranks(each, 2, warm_up, cases):
        assert of_scheduler[0] == "ConfigurationError"
        assert "GradientAccumulationScheduler" in of_scheduler[1]
        assert of_lengths[0] == DisagreementError.__name__
        assert "different numbers of batches per epoch: rank 0 has 4, rank 1 has 5" in of_lengths[1]


def warnings_of(schedule: dict[str, Any], warmup: dict[str, Any]) -> list[str]:
    trainer = make_trainer(DGCStrategy(**schedule), 2, callbacks=[SparsityWarmup(**warmup)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Tiny(), make_data(2, 4))
    return [str(warning.message) for warning in caught if "overrides" in str(warning.message)]


def test_a_warmup_that_replaces_the_strategys_own_is_warned_about() -> None:
    warmup = {"begin_epoch": 1, "epochs": 1}
    cases = [({"rampup_begin_step": 1}, warmup), ({}, warmup)]
    (replaced,), quiet = run_ranks(each, 2, warnings_of, cases)[0]
    assert "rampup_begin_step=1" in replaced
    assert "rampup_begin_step=4" in replaced
    assert quiet == []


def wrong_strategy() -> list[str]:
    messages = []
    for callback, name in ((SparsityWarmup(), "ddp"), (TrafficMonitor(), "auto")):
        options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(strategy=name, devices=1, callbacks=[callback], **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(Tiny(), make_data(1, 2))
        messages.append(str(caught.value))
    return messages


def test_callbacks_need_their_strategy() -> None:
    warmup, monitor = run_ranks(wrong_strategy, 1)[0]
    assert "strategy='dgc'" in warmup
    assert "SingleDeviceStrategy" in monitor
