"""A rank that does not come ends the other ranks after the user's `timeout`, in each group of ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from tests.programs import free_port
from tests.ranks import run_ranks
from tests.strategies.fits import At, make
from tests.tiny import Tiny, make_data, make_trainer

LATE_S = 8.0  # longer than a timeout takes on a busy machine


def wait_for_a_late_rank(port: int, name: str) -> float:
    """Let the last rank be late before its fourth step; return the seconds after which this rank has ended."""
    num_ranks, own = dist.get_world_size(), dist.get_rank()
    data = make_data(num_ranks, 8)
    dist.barrier()  # the strategy's timeout is that of the rendezvous, too
    dist.destroy_process_group()  # the group of the tests has no timeout
    os.environ.update(MASTER_PORT=str(port), GROUP_RANK=str(own // 2))
    late = At(3, lambda *_: time.sleep(LATE_S), "on_train_batch_start", ranks=(num_ranks - 1,))
    trainer, begun = make_trainer(make(name, timeout=2), num_ranks, callbacks=[late]), time.monotonic()
    with pytest.raises(RuntimeError):
        trainer.fit(Tiny(), data)
    seconds = time.monotonic() - begun
    if dist.is_initialized():
        dist.destroy_process_group()
    return seconds


def test_a_rank_that_does_not_come_ends_the_others_after_the_timeout_on_two_levels() -> None:
    *others, late = run_ranks(wait_for_a_late_rank, 4, free_port(), "dgc on two levels", timeout_s=60.0)
    assert max(others) < LATE_S <= late
