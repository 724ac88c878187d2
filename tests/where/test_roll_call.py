"""What ranks hear of one that fails, before the store may end with its process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_lowbw.where import roll_call
from lightning_lowbw.where.roll_call import Answers, RollCall


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RollCall]]:
    """Three ranks in one process."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(roll_call, "_server", lambda: store)
    calls = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        calls.append(RollCall(lambda: "a step"))
        calls[-1].begin(f"pid {rank}")
    yield calls
    for call in calls:
        call.close()


def test_all_hear_of_a_rank_that_fails(ranks: list[RollCall]) -> None:
    ranks[0].note("no such file", tells=True)
    for call in ranks[1:]:
        assert call.heard == Answers({}, {0: "no such file"}, [], {0: "pid 0"})
    assert ranks[0].heard == Answers({}, {}, [], {})
    answers = ranks[1].call()
    assert answers == Answers({2: "a step"}, {0: "no such file"}, [], {rank: f"pid {rank}" for rank in range(3)})


def test_a_rank_that_has_lost_a_peer_leaves_a_note_only(ranks: list[RollCall]) -> None:
    ranks[0].note("a peer was lost", tells=False)
    assert all(call.heard.failed == {} for call in ranks)


def test_what_was_heard_is_forgotten_with_the_next_fit(ranks: list[RollCall], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks[0].note("no such file", tells=True)
    ranks[1].close()
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    ranks[1].begin("pid 1")
    assert ranks[1].heard.failed == {}
