"""The processes of one group: its leader's orders, errors on one process, and a process that is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lowbw.elastic.group import SILENT_S, Group, LostProcessError, Orders
from tests.ranks import on_ranks, run_ranks


class UnreadableError(Exception):
    """Cannot be made from its text, as pickle does it."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class UnwritableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: None


ERRORS: list[tuple[Exception, Any, str]] = [
    (ValueError("a word"), ValueError, "^a word$"),
    (UnreadableError(1, 2), RuntimeError, "^UnreadableError: 1 and 2$"),
    (UnwritableError("a word"), RuntimeError, "^UnwritableError: a word$"),
]


@on_ranks()
def test_an_error_of_one_process_is_raised_by_all() -> None:
    """In an order on a follower, or on the leader, or in the section of the leader; the next section runs."""
    orders, carried_out = Orders(None), list[str]()

    def carry_out(name: str) -> None:
        carried_out.append(name)
        if name == "fail" and orders.rank == failing:
            raise error

    def section() -> None:
        if failing < 0:
            raise error
        orders.order("fail")

    for failing in (1, 0, -1):
        for error, expected, words in ERRORS:
            is_own = failing < 0 and orders.rank == 0
            with pytest.raises(type(error) if is_own else expected, match=f"{error}" if is_own else words):
                orders.lead(carry_out, section)
            assert orders.lead(carry_out, lambda: orders.order("go"), lambda: 7) == 7
    assert carried_out == ["fail", "go"] * 6 + ["go"] * 3
    if orders.rank:  # as when the process ends
        orders.close()
        dist.barrier()
        return
    with pytest.raises(LostProcessError, match="A process of this group has ended") as raised:
        orders.lead(carry_out, lambda: orders.order("go"))
    assert not isinstance(raised.value, RuntimeError), "after which the leader would ask for another quorum"
    orders.close()
    dist.barrier()


def beat(stopped: str) -> list[tuple[bool, float]]:
    group, found = Group(), list[tuple[bool, float]]()
    if group.rank:
        Path(stopped).write_text(f"{os.getpid()}")
        dist.barrier()
    else:
        while not Path(stopped).exists():
            time.sleep(0.05)
        pid = int(Path(stopped).read_text())
        for number, is_expected in ((signal.SIGCONT, True), (signal.SIGSTOP, False), (signal.SIGCONT, True)):
            os.kill(pid, number)
            began_s = time.monotonic()
            while group.is_whole() != is_expected and time.monotonic() - began_s < 20.0:
                time.sleep(0.1)
            found.append((group.is_whole(), time.monotonic() - began_s))
        dist.barrier()
    group.close()
    return found


def test_a_process_that_does_not_beat_is_missed_until_it_beats_again(tmp_path: Path) -> None:
    """Its connections stay open, so that no collective fails."""
    found, _ = run_ranks(beat, 2, f"{tmp_path}/pid", fresh=True)
    assert [is_whole for is_whole, _ in found] == [True, False, True]
    assert all(seconds < SILENT_S + 2.0 for _, seconds in found)
    assert found[1][1] > SILENT_S - 1.0
