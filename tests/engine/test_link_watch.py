"""A link that changes in the middle of a run is found out, by all ranks alike, and noise is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.engine.link_watch import CHANGE, WATCHED_STEPS, LinkWatch
from lightning_lowbw.where.peers import Peers
from tests.ranks import run_ranks


def observe(seconds: float, *, num_windows: int = 1, predicted_s: float = 0.1, least_s: float = 0.01) -> list[float]:
    """Return what is found, where the last rank waits so long in every step, and the others do not at all."""
    peers, watch, found = Peers(), LinkWatch(predicted_s, least_s), []
    for _ in range(num_windows * (WATCHED_STEPS + 1)):
        if dist.get_rank() == dist.get_world_size() - 1:
            peers.ledger.exposed_s += seconds
        answer = watch.observe(peers, torch.device("cpu"))
        if answer is not None:
            found.append(answer)
    return found


@pytest.mark.parametrize(
    ("seconds", "is_found"),
    [
        (0.1, False),
        (0.1 * CHANGE * 0.98, False),
        (0.1 * CHANGE * 1.02, True),
        (0.1 / CHANGE * 1.02, False),
        (0.1 / CHANGE * 0.98, True),
    ],
)
def test_a_change_by_a_factor_is_found_on_all_ranks(seconds: float, is_found: bool) -> None:
    for found in run_ranks(partial(observe, seconds), 2):
        assert found == (pytest.approx([seconds]) if is_found else [])


def test_a_wait_that_the_budget_allows_is_no_change() -> None:
    assert run_ranks(partial(observe, 0.015, predicted_s=0.001, least_s=0.01), 2) == [[], []]
    assert run_ranks(partial(observe, 0.03, predicted_s=0.001, least_s=0.01), 2) == [[pytest.approx(0.03)]] * 2


def test_every_window_is_one_by_itself() -> None:
    assert run_ranks(partial(observe, 0.3, num_windows=3), 2) == [[pytest.approx(0.3)] * 3] * 2


def observe_with_a_restart() -> list[float]:
    peers, watch, found = Peers(), LinkWatch(0.1, 0.01), list[float]()
    for step in range(2 * WATCHED_STEPS):
        peers.ledger.exposed_s += 1.0
        if step == WATCHED_STEPS - 1:
            watch.restart()
        elif (answer := watch.observe(peers, torch.device("cpu"))) is not None:
            found.append(answer)
    return found


def test_a_window_that_is_left_is_forgotten() -> None:
    assert run_ranks(observe_with_a_restart, 1) == [[]]
