"""The helper that runs functions on ranks: one that fails, is killed or hangs is a failure that is shown."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raises":
            raise ValueError("enough of this")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", r"(?s)Rank 1 failed:.*in fail_on.*ValueError: enough of this"),
        ("is killed", "Rank [01] (died without a word|failed)"),
    ],
)
def test_a_failure_is_shown_and_ends_all_its_ranks(how: str, expected: str) -> None:
    before = {*run_ranks(os.getpid, 2)}
    with pytest.raises(AssertionError, match=expected):
        run_ranks(fail_on, 2, 1, how)
    assert not {*run_ranks(os.getpid, 2)} & before


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_the_time_is_limited() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)Ranks \[0, 1\] did not end in time.*Rank 1:.*in sleep_on"):
        run_ranks(sleep_on, 2, 1, timeout_s=1.0)
    assert time.monotonic() - begin < 20
