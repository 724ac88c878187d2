"""The helper that runs functions on ranks: it keeps processes, forgets what they did, and never hangs."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_lowbw.comm import collectives
from tests.ranks import idle_processes, run_ranks


def whoami() -> tuple[int, int, int]:
    return os.getpid(), dist.get_rank(), dist.get_world_size()


def total(value: int) -> float:
    tensor = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return float(tensor)


def test_processes_stay_and_worlds_do_not() -> None:
    for num_ranks in (2, 4, 3):
        before = {process.pid for process in idle_processes()}
        pids, ranks, sizes = zip(*run_ranks(whoami, num_ranks), strict=True)
        assert len(before & set(pids)) == min(len(before), num_ranks)
        assert ranks == tuple(range(num_ranks))
        assert sizes == (num_ranks,) * num_ranks
        assert run_ranks(total, num_ranks, 10) == [10.0 * num_ranks + sum(range(num_ranks))] * num_ranks


def look() -> dict[str, object]:
    """Return what a function finds, as something to compare."""
    loggers = logging.root, logging.getLogger("lightning.pytorch")
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")},
        "folder": os.getcwd(),
        "torch": torch.initial_seed(),
        "numbers": (torch.rand(2).tolist(), random.random()),
        "settings": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "handler": str(signal.getsignal(signal.SIGUSR1)),
        "filters": len(warnings.filters),
        "rank of Lightning": rank_zero_only.rank,
        "loggers": [(len(logger.handlers), logger.level) for logger in loggers],
        "package": (collectives.all_reduce_bytes(8, 2), dist.get_world_size()),
    }


def leave_everything_behind(folder: str) -> None:
    os.environ["LEFT"] = "behind"
    del os.environ["PATH"]
    os.chdir(folder)
    torch.manual_seed(5)
    torch.rand(1)
    random.random()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    rank_zero_only.rank = 7
    logging.getLogger("lightning.pytorch").addHandler(logging.NullHandler())
    logging.getLogger().setLevel(1)
    dist.new_group([0])
    collectives.all_reduce_bytes = lambda *_: -1
    dist.get_world_size = lambda *_: -1


def test_a_rank_forgets(tmp_path: Path) -> None:
    before = run_ranks(look, 2)
    run_ranks(leave_everything_behind, 2, str(tmp_path))
    assert run_ranks(look, 2) == before
    assert before[0]["folder"] == os.getcwd()
    assert {**run_ranks(look, 2, fresh=True)[0], "numbers": before[0]["numbers"]} == before[0]  # seeded by no one


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
    for fresh in (True, False):
        before = {pid for pid, _, _ in run_ranks(whoami, 2)}
        with pytest.raises(AssertionError, match=expected):
            run_ranks(fail_on, 2, 1, how, fresh=fresh)
        after = {pid for pid, _, _ in run_ranks(whoami, 2)}
        assert after == before if fresh else not after & before


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_the_time_is_limited() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)Ranks \[0, 1\] did not end in time.*Rank 1:.*in sleep_on"):
        run_ranks(sleep_on, 2, 1, timeout_s=1.0)
    assert time.monotonic() - begin < 20
    run_ranks(whoami, 2)
    victim = idle_processes()[0]  # one that dies between calls is replaced
    victim.kill()
    victim.join()
    assert run_ranks(total, 2, 1) == [3.0, 3.0]
