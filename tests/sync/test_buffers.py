"""Which buffers an average sends, and what becomes of buffers whose shape changes; in plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import LocalSGD, Method
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.sync.local import LocalSync
from tests.ranks import on_ranks

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
        "norm.running_mean": torch.zeros(3),
        "late": torch.zeros(5),
        "count": torch.tensor(0),
    }
    buffers |= {"norm.num_batches_tracked": torch.tensor(0), "flag": torch.tensor([True, False])}
    worker, sent, rank = attach(LocalSGD(k_steps=2, begin_step=0), buffers), [], dist.get_rank()
    for number in range(1, 9):
        buffers["norm.running_mean"] = buffers["norm.running_mean"] + rank  # another tensor
        buffers["late"] += rank * (number >= 3)
        buffers["count"] += 1
        if number == 8:
            buffers["flag"].fill_(bool(rank))
            buffers["norm.num_batches_tracked"].fill_(rank)
        sent.append(take_steps(worker))
    assert buffers["norm.running_mean"].tolist() == [4.0] * 3  # half of 8
    assert buffers["late"].tolist() == [0.0] * 5  # that of rank 0
    assert buffers["flag"].tolist() == [False, False]
    assert int(buffers["norm.num_batches_tracked"]) == 0
    assert int(buffers["count"]) == 8
    expected = [all_reduce_bytes(4 * (CONTROL + 8 + 3), 2)] * 8
    expected[3:] = [nbytes + 4 * 5 for nbytes in expected[3:]]  # late
    expected[0] += 4 * 3  # rank 0's, from which the changes of the first one are measured
    for number, num_unknown in ((1, 6), (1, 5), (2, 5), (4, 5), (8, 4)):
        expected[number - 1] += all_reduce_bytes(2 * 8 * (1 + num_unknown), 2)
    expected[-1] += 2 + 8  # flag, and the batches
    assert sent == expected


@pytest.mark.parametrize("name", METHODS)
@on_ranks()
def test_statistics_are_averaged_and_other_buffers_are_those_of_rank_zero(name: str) -> None:
    """Also buffers that get another shape; of statistics that is not looked for."""
    rank = dist.get_rank()
    buffers = {"norm.running_mean": torch.zeros(2), "bank": torch.full((2,), math.inf), "pointer": torch.tensor([0])}
    buffers |= {"mask": torch.tensor([0.0, -math.inf]), "wave": torch.zeros(2, dtype=torch.complex64)}
    worker = attach(METHODS[name], buffers)
    for number in range(8):
        if number in (1, 4):
            buffers["bank"].resize_(3 + number)
        buffers["norm.running_mean"] = buffers["norm.running_mean"] + rank  # another tensor
        buffers["bank"].fill_(number + 0.5 * rank)
        buffers["pointer"] += 1 + rank
        buffers["wave"] += 1 + rank * 1j
        take_steps(worker, 1)
    worker.finish()
    assert buffers["norm.running_mean"].tolist() == [4.0] * 2  # half of 8
    assert buffers["bank"].tolist() == [7.0] * 7
    assert buffers["pointer"].tolist() == [8]
    assert buffers["wave"].tolist() == [8.0] * 2
    assert buffers["mask"].tolist() == [0.0, -math.inf]


@on_ranks()
def test_statistics_that_were_infinite_and_are_not_any_more_are_averaged() -> None:
    buffers = {"norm.running_var": torch.tensor([math.inf, math.inf])}
    worker = attach(METHODS["flat"], buffers)
    buffers["norm.running_var"].copy_(torch.tensor([2.0 + dist.get_rank(), math.inf]))
    take_steps(worker)
    assert buffers["norm.running_var"].tolist() == [2.5, math.inf]
