"""The flags of a node, and which fault is reported; what else is in a status is in the tests of steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import NonFiniteGradientError
from lightning_lowbw.sync.status import (
    SAVE,
    STOP,
    Fault,
    Status,
    first_fault,
    flags,
    flags_of_node,
    make_mark,
    status_message,
)
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def test_a_rank_tells_its_peers_the_flags_of_its_node() -> None:
    """On the device, as part of its status."""
    shards = [flags(SAVE, CPU, batch=3), flags(STOP, CPU, torch.tensor(True), batch=3)]
    fault, differ, requests = flags_of_node(torch.stack(shards).amax(0))
    assert (bool(fault), bool(differ)) == (True, False)
    rows = [status_message([], fault, make_mark(3, None, requests), 0, 2, CPU), status_message([], 0, 3, 1, 2, CPU)]
    assert Status.read((rows[0] + rows[1]).tolist(), 2) == Status([], True, [3, 3], STOP | SAVE)
    assert flags_of_node(torch.stack([shards[0], flags(0, CPU, batch=2)]).amax(0))[1] > 0


@pytest.mark.parametrize(("kinds", "words"), [([4, 2, 2], "kind 2 on rank 1"), ([None] * 3, "no rank has found one")])
@on_ranks(3)
def test_the_fault_that_may_have_caused_the_others_is_reported(kinds: list[int | None], words: str) -> None:
    rank = dist.get_rank()
    kind = kinds[rank]
    own = None if kind is None else Fault(kind, NonFiniteGradientError, f"kind {kind} on rank {rank}")
    assert words in first_fault(own, None).text
