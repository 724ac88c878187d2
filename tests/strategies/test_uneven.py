"""Ranks with different numbers of batches finish or stop, are weighted by samples, and end together."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_lowbw import ConfigurationError, LocalSGDStrategy
from tests.ranks import run_ranks
from tests.strategies.watching import Kill, Trace, uneven_loader, weights
from tests.tiny import Constant, Tiny, make_trainer


def fit_uneven(policy: str, max_steps: int = -1, **kwargs: Any) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(), Trace()
    options = {"max_epochs": 2, "max_steps": max_steps, "callbacks": [trace]}
    trainer = make_trainer(LocalSGDStrategy(k_steps=3, begin_step=0, uneven=policy, **kwargs), num_ranks, **options)
    trainer.fit(model, uneven_loader([7, 10, 13][dist.get_rank()]), uneven_loader(1))
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch, "end": weights(model), "shown": trace.shown}


def test_ranks_with_more_batches_finish_them() -> None:
    results = run_ranks(fit_uneven, 3, "finish")
    assert [result["steps"] for result in results] == [14, 20, 26]
    assert len({result["end"] for result in results}) == 1
    assert all(result["shown"] == results[0]["shown"] for result in results)


def test_or_stop_at_the_next_average() -> None:
    results = run_ranks(fit_uneven, 3, "stop")
    assert [result["steps"] for result in results] == [14, 18, 18]
    assert len({result["end"] for result in results}) == 1


def test_the_last_step_of_one_rank_ends_the_training_of_all() -> None:
    results = run_ranks(fit_uneven, 3, "finish", 9)
    assert [result["steps"] for result in results] == [7, 9, 9]
    assert len({result["end"] for result in results}) == 1


def fit_uneven_until_killed(policy: str, num_batches: int) -> int:
    trainer = make_trainer(LocalSGDStrategy(k_steps=4, begin_step=0, uneven=policy), 2, callbacks=[Kill()])
    try:  # rank 0 is out of data after 2 batches, rank 1 gets its signal after 3
        trainer.fit(Tiny(), uneven_loader([2, num_batches][dist.get_rank()]), uneven_loader(1))
    except SIGTERMException:
        return trainer.global_step
    return -1


@pytest.mark.parametrize("policy", ["finish", "stop"])
@pytest.mark.parametrize("num_batches", [9, 4])  # 4: the average that tells it ends the epoch of rank 1
def test_a_sigterm_ends_those_who_wait_for_data_of_others(policy: str, num_batches: int) -> None:
    assert run_ranks(fit_uneven_until_killed, 2, policy, num_batches) == [2, 4]


def fit_uneven_with(what: str) -> tuple[int, str]:
    """Things that stop a training early, with 7 and 10 batches."""

    class StopInMidEpoch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 4

    class Worse(Tiny):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.log("worse", float(self.trainer.current_epoch))

    stop = EarlyStopping("worse", patience=1) if what == "early stopping" else StopInMidEpoch()
    strategy = LocalSGDStrategy(k_steps=3, begin_step=0)
    trainer = make_trainer(strategy, 2, callbacks=[stop], max_epochs=6, min_epochs=4 if what == "early stopping" else 1)
    model = Worse()
    trainer.fit(model, uneven_loader([7, 10][dist.get_rank()]), uneven_loader(1))
    return trainer.global_step, weights(model)


def test_early_stopping_waits_for_min_epochs_on_uneven_data() -> None:
    (short, first), (long, second) = run_ranks(fit_uneven_with, 2, "early stopping")
    assert (short, long) == (28, 40)
    assert first == second


def test_a_stop_in_mid_epoch_leaves_a_consensus_on_uneven_data() -> None:
    (_, first), (_, second) = run_ranks(fit_uneven_with, 2, "stop")
    assert first == second


def average_weighted() -> Tensor:
    model = Constant()
    trainer = make_trainer(LocalSGDStrategy(k_steps=4, begin_step=0), 2)
    trainer.fit(model, uneven_loader([1, 3][dist.get_rank()]))
    return model.weight.detach()


def test_replicas_are_weighted_by_samples() -> None:
    for weight in run_ranks(average_weighted, 2):
        assert float(weight) == pytest.approx((1 * 1.0 + 3 * 6.0) / 4)


def fit_uneven_refused(trouble: str) -> str:
    options: dict[str, Any] = {"val_check_interval": 3} if trouble == "validation" else {}
    if trouble == "checkpoint":
        options |= {"callbacks": [ModelCheckpoint(every_n_train_steps=4)], "enable_checkpointing": True}
    if trouble == "accumulation":
        options |= {"accumulate_grad_batches": 3}
    kwargs: dict[str, Any] = {"begin_step": 8} if trouble == "synchronous" else {}
    kwargs |= {"begin_step": 2} if trouble == "accumulation" else {}
    kwargs |= {"delay_steps": 1} if trouble == "delay" else {}
    kwargs |= {"compression": {}} if trouble == "compression" else {}
    kwargs |= {"num_fragments": 2} if trouble == "fragments" else {}
    trainer = make_trainer(LocalSGDStrategy(**{"k_steps": 4, "begin_step": 0, **kwargs}), 2, **options)
    try:
        trainer.fit(Tiny(), uneven_loader(6 + 2 * dist.get_rank()), uneven_loader(1))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("trouble", "word"),
    [
        ("synchronous", "synchronous"),
        ("accumulation", "synchronous"),
        ("delay", "delay_steps"),
        ("compression", "compression"),
        ("fragments", "num_fragments"),
        ("validation", "validation in the middle"),
        ("checkpoint", "end of an epoch"),
    ],
)
def test_what_uneven_data_do_not_allow_is_refused(trouble: str, word: str) -> None:
    for message in run_ranks(fit_uneven_refused, 2, trouble):
        assert word in message
