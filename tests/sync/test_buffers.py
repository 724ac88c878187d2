"""Which buffers an average sends, and what becomes of those whose shape changes; in plain loops."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import LocalSGD, Method
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.sync.local import LocalSync
from tests.ranks import on_ranks, run_ranks
from tests.sync.problem import each

METHODS: dict[str, Method] = {
    "flat": LocalSGD(k_steps=2, begin_step=0, outer="nesterov"),
    "two levels": LocalSGD(k_steps=2, begin_step=0, topology=1, compression="int8"),
    "hidden": LocalSGD(k_steps=2, begin_step=0, delay_steps=1),
}
CONTROL = 5 + 2 * 2


def attach(method: Method, buffers: dict[str, Tensor]) -> Any:
    weight = Parameter(torch.zeros(8))
    worker = method.attach(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], named_buffers=buffers)
    assert isinstance(worker, LocalSync)
    return worker


def take_steps(worker: Any, num_steps: int = 2) -> int:
    """Return the bytes that are sent in some steps."""
    before = worker.peers.ledger.sent_bytes
    for _ in range(num_steps):
        for parameter in worker.params:
            parameter.grad = torch.ones_like(parameter)
        worker.optimizer.step()
    return worker.peers.ledger.sent_bytes - before


@on_ranks()
def test_only_buffers_that_differ_are_sent() -> None:
    """This is looked at before the averages 1, 2, 4 and 8; nothing is lost of one that differs earlier."""
    buffers = {
        "constant": torch.arange(1000.0),
        "own": torch.zeros(3),
        "late": torch.zeros(5),
        "count": torch.tensor(0),
    }
    buffers |= {"norm.num_batches_tracked": torch.tensor(0), "flag": torch.tensor([True, False])}
    worker, sent, rank = attach(LocalSGD(k_steps=2, begin_step=0), buffers), [], dist.get_rank()
    for number in range(1, 9):
        buffers["own"] = buffers["own"] + rank  # another tensor in the place of the one before
        buffers["late"] += rank * (number >= 3)
        buffers["count"] += 1
        if number == 8:
            buffers["flag"].fill_(bool(rank))
            buffers["norm.num_batches_tracked"].fill_(rank)
        sent.append(take_steps(worker))
    assert buffers["own"].tolist() == [4.0] * 3  # half of 8
    assert buffers["late"].tolist() == [3.0] * 5  # half of 6
    assert buffers["flag"].tolist() == [False, False]
    assert int(buffers["norm.num_batches_tracked"]) == 1
    assert int(buffers["count"]) == 8
    words = [CONTROL + 8 + 3] * 3 + [CONTROL + 8 + 3 + 5] * 5
    expected = [all_reduce_bytes(4 * each, 2) for each in words]
    expected[0] += 4 * 3  # rank 0's, from which the changes of the first one are measured
    for number, num_unknown in ((1, 6), (1, 5), (2, 5), (4, 5), (8, 4)):
        expected[number - 1] += all_reduce_bytes(2 * 8 * (1 + num_unknown), 2)
    expected[-1] += all_reduce_bytes(8 * 3, 2)  # flag, and the batches
    assert sent == expected


def resize(name: str, differs: bool) -> tuple[dict[str, list[float]], list[str]]:
    rank = dist.get_rank()
    buffers = {"grows": torch.full((2,), math.inf), "mean": torch.zeros(2), "mask": torch.tensor([0.0, -math.inf])}
    buffers["pointer"] = torch.zeros(1, dtype=torch.int64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = attach(METHODS[name], buffers)
        for number in range(9):
            if number in (2, 5):
                size = 3 + number + rank * differs
                buffers["grows"].resize_(size).fill_(number + 2.0 * rank)
                buffers["pointer"] = torch.full((size,), 5 + rank)
            buffers["mean"] += rank
            take_steps(worker, 1)
        worker.finish()
    said = [str(each.message) for each in caught if "different shapes" in str(each.message)]
    return {name: buffer.tolist() for name, buffer in buffers.items()}, said


@pytest.mark.parametrize("name", METHODS)
def test_a_buffer_that_changes_its_shape_begins_anew_or_stays_a_ranks_own(name: str) -> None:
    alike, apart = zip(*run_ranks(each, 2, resize, [(name, False), (name, True)]), strict=True)
    (first, said), (second, _) = alike
    assert first == second
    assert first["grows"] == [6.0] * 8  # of 5 and 7
    assert first["pointer"] == [5] * 8
    assert said == []
    (first, said), (second, other) = apart
    assert first["grows"] == [5.0] * 8
    assert second["grows"] == [7.0] * 9
    assert second["pointer"] == [6] * 9
    assert first["mean"] == second["mean"]
    assert first["mask"] == second["mask"] == [0.0, -math.inf]
    assert len(said) == 1
    assert "grows (rank 0: (5,), rank 1: (6,))" in said[0]
    assert other == []


@on_ranks()
def test_what_was_infinite_and_is_not_any_more_is_averaged() -> None:
    """A best loss that begins as inf, and is found in local steps."""
    buffers = {"best": torch.tensor([math.inf, math.inf])}
    worker = attach(METHODS["flat"], buffers)
    buffers["best"].copy_(torch.tensor([2.0 + dist.get_rank(), math.inf]))
    take_steps(worker)
    assert buffers["best"].tolist() == [2.5, math.inf]
