"""Sharded models when something ends: SIGTERM on a rank, and a rank that fails or is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_lowbw import ShardedStrategy
from lightning_lowbw.engine.presets import DGC, LocalSGD, preset
from tests.programs import free_port
from tests.ranks import run_ranks
from tests.strategies.sharded_models import ByStep, Configured, shard_digest, train
from tests.tiny import sgd

STEPS, KILLED_AFTER = 10, 3
METHODS = {
    "dgc": DGC(sparsity=[0.9], min_numel=50),
    "hierarchical": preset("hierarchical"),
    "local_sgd": LocalSGD(k_steps=4, begin_step=0),
    "hidden": LocalSGD(k_steps=4, begin_step=0, delay_steps=1),
}


def strategy_of(name: str, **kwargs: Any) -> ShardedStrategy:
    return ShardedStrategy(METHODS[name], topology=2, **kwargs)


class KillAfter(pl.Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == KILLED_AFTER and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def kill_and_resume(name: str, folder: str, whole_file: bool) -> tuple[int, bool]:
    """Return the step at which a rank ended, and whether a run that was resumed there ends with the same bits."""
    straight, killed, resumed = (ByStep(sgd) for _ in range(3))
    kwargs = {"save_distributed_checkpoint": not whole_file}
    train(strategy_of(name, **kwargs), straight, STEPS, 4, dist.get_rank())
    callbacks = [KillAfter(3), OnExceptionCheckpoint(folder, name)]
    with pytest.raises(SIGTERMException):
        train(
            *(strategy_of(name, **kwargs), killed, STEPS, 4, dist.get_rank()),
            callbacks=callbacks,
            enable_checkpointing=True,
        )
    saved = f"{folder}/{name}.ckpt"
    begun: list[int] = []
    look = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, _: begun.append(trainer.global_step))
    train(strategy_of(name, **kwargs), resumed, STEPS, 4, dist.get_rank(), ckpt_path=saved, callbacks=[look])
    return begun[0], shard_digest(straight) == shard_digest(resumed)


@pytest.mark.fault(
    "SIGTERM on one rank of a sharded model",
    "all end after the same step; `OnExceptionCheckpoint` saves a complete checkpoint, which resumes to the bit",
)
@pytest.mark.parametrize("whole_file", [True, False], ids=["file", "folder"])
@pytest.mark.parametrize(("name", "step"), [("dgc", 4), ("hierarchical", 4), ("local_sgd", 4), ("hidden", 5)])
def test_a_sigterm_ends_all_and_saves_all_shards(name: str, step: int, whole_file: bool, tmp_path: Path) -> None:
    assert run_ranks(kill_and_resume, 4, name, str(tmp_path), whole_file) == [(step, True)] * 4


class FailsOnTheLastRank(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no such file")


def lose_a_rank(port: int) -> tuple[str, float]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()  # that of the tests has no server
    os.environ.update(MASTER_PORT=str(port), GROUP_RANK=str(rank // 2))
    begin = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        train(strategy_of("dgc", timeout=3), Configured(sgd), STEPS, num_ranks, rank, callbacks=[FailsOnTheLastRank()])
    seconds = time.monotonic() - begin
    if dist.is_initialized():
        dist.destroy_process_group()
    return str(caught.value), seconds


@pytest.mark.fault("a rank that raises an error of its own")
def test_a_rank_that_fails_is_named_on_all(record_property: Any) -> None:
    *others, (own, _) = run_ranks(lose_a_rank, 4, free_port(), timeout_s=60.0)
    assert own == "no such file"
    for message, seconds in others:
        assert "rank 3 (node 1, host " in message
        assert "has failed: ValueError in the training after step 3: no such file" in message
        assert seconds < 30.0
        record_property("seconds", seconds)
