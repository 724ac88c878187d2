"""What ranks know of one that fails or stops, also when the store ends with its process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_lowbw.comm import heartbeat
from lightning_lowbw.comm.heartbeat import BEAT_S, Answers, Heartbeat

PLACES = {rank: f"pid {rank}" for rank in range(3)}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeat]]:
    """Three ranks in one process."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(heartbeat, "_server", lambda: store)
    hearts = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        hearts.append(Heartbeat(lambda: "a step"))
        hearts[-1].begin(PLACES[rank])
    yield hearts
    for heart in hearts:
        heart.close()


def test_all_hear_of_a_rank_that_fails(ranks: list[Heartbeat], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks[0].note("no such file", tells=True)
    for heart in ranks[1:]:
        assert heart.heard == Answers({}, {0: "no such file"}, [], PLACES)
    assert ranks[0].heard.failed == {}
    assert ranks[1].ask() == Answers({2: "a step"}, {0: "no such file"}, [], PLACES)
    ranks[1].close()  # what was heard is forgotten with the next fit
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    ranks[1].begin("pid 1")
    assert ranks[1].heard.failed == {}


def test_a_rank_whose_heart_does_not_beat_is_named(ranks: list[Heartbeat]) -> None:
    ranks[2].close()
    ranks[0].note("a peer was lost", tells=False)
    assert ranks[1].ask() == Answers({}, {0: "a peer was lost"}, [2], PLACES)
    time.sleep(2 * BEAT_S)
    assert ranks[1].heard.failed == {}, "a rank that has lost a peer leaves a note only"


def test_a_store_that_does_not_answer_in_time_does_not_end_the_fit(
    ranks: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(_: Heartbeat) -> None:
        raise dist.DistNetworkError("timed out")

    monkeypatch.setattr(Heartbeat, "_connect", time_out)
    heart = Heartbeat(lambda: "")
    heart.begin("here")
    assert not heart.has_begun
    heart.note("a reason", tells=True)
    assert heart.ask() is None
    heart.close()


def test_the_store_that_the_ranks_have_met_at_is_found() -> None:
    """By torch's own attributes."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        server = heartbeat._server()
        assert server is not None
        assert (server.host, server.port) == (store.host, store.port)
    finally:
        dist.destroy_process_group()
