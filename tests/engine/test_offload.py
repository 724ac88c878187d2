"""State that lies in the host's memory between averages: nothing reads it there, and the numbers are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from lightning_lowbw.engine.offload import HOST, Offload
from torch import Tensor

from lightning_lowbw import LocalSGD
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import AWKWARD
from tests.engine.replica_problem import attach, take_step
from tests.ranks import run_ranks

SHAPES = {"conv": AWKWARD["conv"], "matrix": AWKWARD["matrix"], "vector": (17,)}
SPARSE = Compression(chunk=None, min_numel=100)
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"k_steps": 3, "outer": "nesterov"},
    "sparse_loco": {"k_steps": 3, "compression": SPARSE},
    "sparse_loco, hidden": {"k_steps": 4, "delay_steps": 2, "compression": SPARSE},
    "int8": {"k_steps": 3, "value_dtype": "int8"},
}
STEPS = 14


class Elsewhere(Offload):
    """Takes everything out, and leaves NaN in its place, as no step must see."""

    away: dict[int, Tensor]
    num_fetched = 0

    def _tensors(self) -> list[Tensor]:
        averaging = self._averaging
        exchanges = [each for each in (averaging.sparse, averaging.narrow) if each is not None]
        residuals = [residual for each in exchanges for residual in each.residuals.values()]
        return [*averaging.start.values(), *averaging.velocity.values(), *residuals]

    def move(self, device: torch.device) -> None:
        self.num_fetched += 1
        for tensor in self._tensors():
            if id(tensor) in self.away:
                tensor.copy_(self.away.pop(id(tensor)))

    def put_away(self) -> None:
        if self.is_on and not self._num_users:
            for tensor in self._tensors():
                if id(tensor) not in self.away:
                    self.away[id(tensor)] = tensor.clone()
                    tensor.fill_(float("nan"))


def train(name: str, elsewhere: bool) -> tuple[str, int, int]:
    worker, parameters = attach(LocalSGD(**{"begin_step": 0, **METHODS[name]}), "adamw", SHAPES)
    assert isinstance(worker, ReplicaWorker)
    if elsewhere:
        worker.averaging.offload = offload = Elsewhere(worker.averaging)
        offload.is_on, offload.away = True, {}
    for step in range(STEPS):
        take_step(worker, parameters, step)
    num_away = len(offload.away) if elsewhere else 0
    worker.finish()
    return digest(parameters.values()), num_away, offload.num_fetched if elsewhere else 0


@pytest.mark.parametrize("name", METHODS)
def test_nothing_reads_it_between_averages(name: str) -> None:
    for (expected, _, _), (digests, num_away, num_fetched) in zip(
        run_ranks(train, 2, name, False), run_ranks(train, 2, name, True), strict=True
    ):
        assert digests == expected
        assert num_away > 0
        assert STEPS / 5 < num_fetched < STEPS


def move() -> list[bool]:
    worker, parameters = attach(LocalSGD(**{"begin_step": 0, **METHODS["sparse_loco"]}), "sgd", SHAPES)
    worker.averaging.offload.is_on = True
    for step in range(STEPS):
        take_step(worker, parameters, step)
    averaging, moves = worker.averaging, list[torch.device]()
    before = copy.deepcopy(list(averaging.start.values()))
    averaging.offload.move = lambda device: moves.append(device)  # type: ignore[method-assign]
    with averaging.offload.at_hand(torch.device("meta")), averaging.offload.at_hand(torch.device("meta")):
        averaging.offload.put_away()  # in use
    worker.finish()
    same = all(map(torch.equal, before, averaging.start.values()))
    return [same, moves == [torch.device("meta"), HOST]]


def test_it_is_moved_once_to_the_device_and_back() -> None:
    assert run_ranks(move, 2) == [[True, True]] * 2


def look_in_flight() -> list[int]:
    """Save, then end, while an average is in flight; return how many users the offloaded state had at each time."""
    worker, parameters = attach(LocalSGD(**{"begin_step": 0, **METHODS["sparse_loco, hidden"]}), "sgd", SHAPES)
    assert isinstance(worker, ReplicaWorker)
    worker.averaging.offload.is_on = True
    for step in range(13):
        take_step(worker, parameters, step)
    (work,) = [fragment.work for fragment in worker.fragments]
    assert work is not None
    num_users = list[int]()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            num_users.append(worker.averaging.offload._num_users)
            return function(*args)

        return noted

    with mock.patch.object(work, "state_dict", noting(work.state_dict)):
        worker.state_dict()
    with mock.patch.object(worker.averaging, "drop", noting(worker.averaging.drop)):
        worker.finish()
    return [*num_users, worker.averaging.offload._num_users]


def test_it_is_at_hand_where_an_average_in_flight_is_saved_or_dropped() -> None:
    """Both decode it, and on a GPU what lies in the host's memory cannot be used with what has arrived."""
    assert run_ranks(look_in_flight, 2) == [[1, 1, 0]] * 2
