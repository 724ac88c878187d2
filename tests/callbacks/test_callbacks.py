"""The warm-up in epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_lowbw import ConfigurationError, DGCStrategy, DisagreementError, SparsityWarmup, TrafficMonitor
from lightning_lowbw.schedules.every_step import EveryStep
from tests.ranks import on_ranks
from tests.strategies.fits import Noted, train, warned
from tests.tiny import Tiny, make_data, make_trainer


def test_epochs_become_steps() -> None:
    assert SparsityWarmup().schedule(1252) == EveryStep(2504, 3756, (0.984375, 0.996, 0.999))
    assert SparsityWarmup(begin_epoch=0.5, epochs=0).schedule(10) == EveryStep(5, 3, (0.984375, 0.996, 0.999))
    assert SparsityWarmup(begin_step=7, sparsity=[0.9]).schedule(1252) == EveryStep(7, 1, (0.9,))  # nothing to spread
    assert SparsityWarmup(begin_step=7, sparsity=[0.5, 0.9, 0.99]).schedule(1252) == EveryStep(7, 3, (0.5, 0.9, 0.99))


def warm_up(options: dict[str, Any], more_on_rank_1: int = 0, **of_trainer: Any) -> list[float]:
    densities = Noted(lambda module: round(module.trainer.strategy.workers[0].last_density, 6))
    callbacks = [SparsityWarmup(**options), densities, *of_trainer.pop("callbacks", [])]
    trainer = make_trainer("dgc", 2, callbacks=callbacks, **of_trainer)
    trainer.fit(Tiny(), make_data(2, 4 + more_on_rank_1 * dist.get_rank()))
    return densities.values


@on_ranks()
def test_warmup_by_name() -> None:
    """Every other batch steps: two steps per epoch."""
    stairs = {"begin_epoch": 1, "epochs": 2, "sparsity": [0.5, 0.9]}
    assert warm_up(stairs, max_epochs=4, accumulate_grad_batches=2) == [1.0] * 5 + [0.5] * 4 + [0.1] * 7


@on_ranks()
def test_warmups_that_cannot_be_known() -> None:
    """Lightning sets what an epoch has when the first one starts; and there may be a batch more on one rank."""
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler"):
        warm_up({}, callbacks=[GradientAccumulationScheduler({0: 4})])
    words = "different numbers of batches per epoch: rank 0 has 4, rank 1 has 5"
    with pytest.raises(DisagreementError, match=words):
        warm_up({"begin_epoch": 1}, more_on_rank_1=1)


@pytest.mark.parametrize("schedule", [{"rampup_begin_step": 1}, {}])
@on_ranks()
def test_a_warmup_that_replaces_the_strategys_own_is_warned_about(schedule: dict[str, Any]) -> None:
    callbacks = [SparsityWarmup(begin_epoch=1, epochs=1)]
    _, said = warned(lambda: train(DGCStrategy(**schedule), data=4, callbacks=callbacks))
    said = [each for each in said if "overrides" in each]
    assert len(said) == (bool(schedule) and dist.get_rank() == 0)
    assert all("rampup_begin_step=1" in message and "rampup_begin_step=4" in message for message in said)


@pytest.mark.parametrize(
    ("callback", "name", "words"),
    [(SparsityWarmup, "ddp", "strategy='dgc'"), (TrafficMonitor, "auto", "SingleDeviceStrategy")],
)
@on_ranks(1)
def test_callbacks_need_their_strategy(callback: Any, name: str, words: str) -> None:
    trainer = make_trainer(name, 1, callbacks=[callback()])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=words):
        trainer.fit(Tiny(), make_data(1, 2))
