"""The status: the largest mark beside requests, the flags of a node, and which fault is reported."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import NonFiniteGradientError
from lightning_lowbw.kernels.reference import is_finite
from lightning_lowbw.sync.status import (
    MODULUS,
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


def messages(faults: list[float], marks: list[Tensor | int], requests: int = 0) -> list[Tensor]:
    num, asked = len(faults), MODULUS**2 * requests
    rows = [
        status_message([1.0, 0.5 * rank], faults[rank], marks[rank] + (rank == 1) * asked, rank, num, CPU)
        for rank in range(num)
    ]
    assert all(row.dtype == torch.float32 and row.shape == (2 + 2 * num,) for row in rows)
    return rows


def test_requests_are_told_beside_the_largest_mark_at_no_cost() -> None:
    """Marks are exact in float32."""
    largest = MODULUS**2 - 1
    for mark in (largest, torch.tensor(largest)):
        rows = messages([0.0, 0.0], [mark, mark], STOP | SAVE)
        assert Status.read((rows[0] + rows[1]).tolist(), 2) == Status([2.0, 0.5], False, [largest] * 2, STOP | SAVE)


def test_a_rank_tells_its_peers_the_flags_of_its_node() -> None:
    """On the device, as part of its status."""
    shards = [flags(SAVE, CPU, batch=3), flags(STOP, CPU, torch.tensor(True), batch=3)]
    fault, differ, requests = flags_of_node(torch.stack(shards).amax(0))
    assert (bool(fault), bool(differ)) == (True, False)
    rows = [status_message([], fault, make_mark(3, None, requests), 0, 2, CPU), status_message([], 0, 3, 1, 2, CPU)]
    assert Status.read((rows[0] + rows[1]).tolist(), 2) == Status([], True, [3, 3], STOP | SAVE)
    assert flags_of_node(torch.stack(shards).amax(0), read_before=SAVE)[2] == STOP
    assert flags_of_node(torch.stack([shards[0], flags(0, CPU, batch=2)]).amax(0))[1] > 0


def test_marks_tell_counts_and_weights_apart() -> None:
    weights = [torch.randn(5), torch.randn(3, 2), torch.randn(2, dtype=torch.complex64)]
    mark = int(make_mark(3, weights))
    assert mark == int(make_mark(3 + MODULUS, [weight.clone() for weight in weights])) != int(make_mark(4, weights))
    assert divmod(mark, MODULUS)[1] == 3 == make_mark(3, None)
    weights[1][2, 1] = torch.nextafter(weights[1][2, 1], torch.tensor(math.inf))
    assert int(make_mark(3, weights)) != mark


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_finite_tensors_are_told_from_others(dtype: torch.dtype) -> None:
    assert is_finite(torch.zeros(0, 3, dtype=dtype)).item()
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((4, 3), largest, dtype=dtype)).item(), "a norm would overflow"
    for bad in (math.nan, math.inf, -math.inf):
        tensor = torch.full((4, 3), -largest, dtype=dtype)
        tensor[2, 1] = complex(0, bad) if dtype.is_complex else bad
        assert not is_finite(tensor).item()


@pytest.mark.parametrize(("kinds", "words"), [([4, 2, 2], "kind 2 on rank 1"), ([None] * 3, "no rank has found one")])
@on_ranks(3)
def test_the_fault_that_may_have_caused_the_others_is_reported(kinds: list[int | None], words: str) -> None:
    rank = dist.get_rank()
    kind = kinds[rank]
    own = None if kind is None else Fault(kind, NonFiniteGradientError, f"kind {kind} on rank {rank}")
    assert words in first_fault(own, None).text
