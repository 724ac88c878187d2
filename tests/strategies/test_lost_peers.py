"""A rank that has gone is named on all others, soon; nothing hangs. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from lightning_lowbw.strategies import lost_peers
from lightning_lowbw.strategies.lost_peers import BEAT_S, Answers, LostPeers, _is_of_lost_peer
from tests.programs import free_port
from tests.ranks import run_ranks
from tests.strategies.fits import At, make
from tests.tiny import Tiny, make_data, make_trainer

STOPPED_S = 12.0  # longer than a timeout and the answers take, on a busy machine, too


def stop(trainer: Any, folder: Path) -> None:
    """Until all other ranks have ended, each of which has left a file."""
    waker = os.fork()
    if waker == 0:
        deadline = time.monotonic() + STOPPED_S
        while len(os.listdir(folder)) < trainer.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(waker, 0)


def fail(*_: Any) -> None:
    raise ValueError("no such file")


TROUBLES: dict[str, Any] = {
    "stop": stop,
    "raise": fail,
    "dawdle": lambda *_: time.sleep(5.0),
    "branch": lambda *_: dist.barrier(),
}


def lose_a_rank(port: int, name: str, what: str, folder: Path, timeout_s: int = 2) -> tuple[str, str, float]:
    """Let the last rank have some trouble before its fourth step."""
    num_ranks, own = dist.get_world_size(), dist.get_rank()
    data = make_data(num_ranks, 8)
    dist.barrier()  # the strategy's timeout is that of the rendezvous, too
    dist.destroy_process_group()  # that of the tests has no server, and no timeout
    os.environ.update(MASTER_PORT=str(port), GROUP_RANK=str(own // 2))
    trouble = At(3, lambda trainer, _: TROUBLES[what](trainer, folder), "on_train_batch_start", ranks=(num_ranks - 1,))
    save = LambdaCallback(on_exception=lambda trainer, *_: trainer.save_checkpoint(folder / "sharded.ckpt"))
    callbacks, begin = [trouble, *([save] if "sharded" in name else [])], time.monotonic()
    trainer = make_trainer(make(name, timeout=timeout_s), num_ranks, callbacks=callbacks)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        trainer.fit(Tiny(), data)
    seconds = time.monotonic() - begin
    (folder / f"rank{own}").touch()
    if dist.is_initialized():
        dist.destroy_process_group()
    return str(caught.value), str(caught.value.__cause__), seconds


def lose(num_ranks: int, *case: Any) -> list[tuple[str, str, float]]:
    return run_ranks(lose_a_rank, num_ranks, free_port(), *case, timeout_s=60.0)


@pytest.mark.fault
def test_a_stopped_rank_is_named_after_the_timeout_on_two_levels_too(tmp_path: Path, record_property: Any) -> None:
    results = lose(4, "dgc on two levels", "stop", tmp_path, 1)
    for rank, (message, cause, seconds) in enumerate(results[:3]):
        assert message.startswith(f"Rank {rank}, in ")
        assert "rank 3 (node 1, host " in message
        assert "is gone or stopped: no answer within 2 s" in message
        assert all(f"rank {other} (" not in message for other in range(3))
        assert "gloo" in cause or cause == "Application timeout caused pair closure"  # gloo's, too
        assert seconds < STOPPED_S, "not the user's timeout"
        record_property("seconds", seconds)


@pytest.mark.fault
@pytest.mark.parametrize(("name", "num_ranks"), [("local_sgd", 2), ("dgc, sharded", 4)])
def test_a_rank_that_fails_is_named(name: str, num_ranks: int, tmp_path: Path, record_property: Any) -> None:
    """Of a sharded model nothing is saved then."""
    *others, (own, _, _) = lose(num_ranks, name, "raise", tmp_path, 3)
    assert own == "no such file"
    for message, cause, seconds in others:
        assert f"rank {num_ranks - 1} (node {num_ranks // 2 - 1}, host " in message
        assert "has failed: ValueError in the training after step 3: no such file" in message
        assert "after step" in message.split(":")[0]
        assert "gloo" in cause
        assert seconds < 30.0
        record_property("seconds", seconds)
    assert not (tmp_path / "sharded.ckpt").exists()


@pytest.mark.fault
def test_ranks_that_are_only_late_are_not_accused(tmp_path: Path) -> None:
    (message, _, _), _ = lose(2, "dgc", "dawdle", tmp_path)
    assert "all other ranks answer (rank 1 in the training after step 3)" in message
    assert "give a longer timeout=" in message


@pytest.mark.fault
def test_ranks_that_wait_for_each_other_are_told_where(tmp_path: Path) -> None:
    results = lose(2, "dgc", "branch", tmp_path)
    for other, (message, _, _) in zip((1, 0), results, strict=True):
        assert f"rank {other}" in message
        assert "after step 3" in message.split(f"rank {other}")[1]
        assert "taken another branch" in message
        assert "is gone" not in message


def test_the_words_for_ranks_that_have_all_lost_a_peer() -> None:
    """Which of them calls first is chance in the test above."""
    failed = {1: "a peer was lost in the training after step 38"}
    told = Answers({}, failed, [], {0: "host a, pid 1", 1: "host a, pid 2"}).in_words()
    assert "rank 1: a peer was lost in the training after step 38" in told
    assert "limit_train_batches" in told


@pytest.fixture
def ranks(monkeypatch: Any) -> Iterator[list[LostPeers]]:
    """Three ranks in one process."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(lost_peers, "_server", lambda: store)
    ranks = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        ranks.append(LostPeers())
        ranks[-1].begin_fit(lambda: 7)
    yield ranks
    for each in ranks:
        each.close()


def test_all_hear_of_a_rank_that_fails_also_without_the_store(ranks: Any, monkeypatch: Any) -> None:
    ranks[0].explain_(ValueError("no such file"))
    words = "has failed: ValueError in the training after step 7: no such file"
    assert words in ranks[1].heard.in_words()
    assert ranks[0].heard.failed == {}
    answers = ranks[1]._ask()
    assert answers is not None
    assert answers.present == {2: "the training after step 7"}
    monkeypatch.setattr(LostPeers, "_connect", time_out)
    for rank, told in ((1, words), (2, "the lost rank is not known")):
        if rank == 2:
            ranks[2].heard = Answers({}, {0: "a peer was lost in the training"}, [], {})
        error = raised(RuntimeError("gloo: Connection closed by peer"))
        ranks[rank].explain_(error)
        assert told in str(error)


class Nccl:
    """In place of torch's ProcessGroupNCCL, as a backend and as the group of it."""

    def __init__(self, is_there: bool = True) -> None:
        self.is_there, self.aborted = is_there, threading.Event()

    def _get_backend(self, device: torch.device) -> Nccl:
        if not self.is_there:
            raise RuntimeError("No backend type associated with device type cuda")
        return self

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: Any) -> list[Nccl]:
    groups = [Nccl(), Nccl(is_there=False), Nccl()]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist.distributed_c10d._world, "_pg_map", dict.fromkeys(groups), raising=False)
    monkeypatch.setattr(type(dist.distributed_c10d._world), "pg_map", property(lambda world: world._pg_map))
    return groups


def test_a_rank_that_waits_in_nccl_is_freed(nccl: Any, ranks: Any, monkeypatch: Any, caplog: Any) -> None:
    ranks[2].close()  # its fit has ended
    ranks[0].explain_(ValueError("no such file"))
    assert nccl[0].aborted.wait(10.0)
    assert nccl[2].aborted.wait(1.0)
    assert not nccl[1].aborted.is_set()
    words = "has failed: ValueError in the training after step 7: no such file"
    assert ["Rank 1 ends" in each.message and words in each.message for each in caplog.records] == [True]
    monkeypatch.setattr(LostPeers, "_connect", time_out)
    garbage = raised(ValueError("what the aborted collective has left makes no sense"))
    ranks[1].explain_(garbage)
    assert words in str(garbage)


def test_ranks_that_fail_together_abort_nothing(nccl: Any, ranks: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lost_peers, "ANSWER_S", BEAT_S)
    for rank in ranks:
        rank._has_failed = True
    ranks[0]._note("ValueError", tells=True)
    time.sleep(4 * BEAT_S)
    assert ranks[1].heard.failed == {0: "ValueError"}
    assert not any(each.aborted.is_set() for each in nccl)


def test_what_ends_collectives_of_nccl_is_where_it_was() -> None:
    """By torch's own names: the groups, their backends, and `abort` from torch 2.6 on."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        (group,) = dist.distributed_c10d._world.pg_map
        backend = group._get_backend(torch.device("cpu"))
        is_old = tuple(int(each) for each in torch.__version__.split(".")[:2]) < (2, 6)
        assert hasattr(type(backend), "abort") or is_old
        assert lost_peers._nccl_backends() == []
    finally:
        dist.destroy_process_group()


def time_out(_: LostPeers) -> None:
    raise dist.DistNetworkError("timed out")


def test_a_store_that_does_not_answer_in_time_does_not_end_the_fit(ranks: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(LostPeers, "_connect", time_out)
    peers = LostPeers()
    peers.begin_fit(lambda: 0)
    error = raised(RuntimeError("gloo: Connection closed by peer"))
    peers.explain_(error)
    assert str(error) == "gloo: Connection closed by peer"


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_errors_of_data_of_a_gpu_and_of_users_are_none_of_lost_peers() -> None:
    for message in (
        "DataLoader timed out after 5 seconds",
        "Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: Connection reset by the server",
        "CUDA error: the launch timed out and was terminated",
        "my own server timed out",
    ):
        assert not _is_of_lost_peer(raised(RuntimeError(message))), message
    assert not _is_of_lost_peer(raised(ValueError("gloo")))
    assert _is_of_lost_peer(raised(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")))
    assert _is_of_lost_peer(raised(dist.DistStoreError("wait timeout after 10000ms")))
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", free_port(), None, False, timeout=timedelta(seconds=1))
    assert _is_of_lost_peer(caught.value)
