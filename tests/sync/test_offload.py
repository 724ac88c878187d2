"""State that lies in the host's memory between averages: nothing reads it there, and the numbers are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_lowbw import LocalSGD
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.compress.top_k import Compression
from lightning_lowbw.sync.local import HOST
from tests.ranks import run_ranks
from tests.sync.problem import AWKWARD, each
from tests.sync.replica_problem import attach, take_step

SHAPES = {"conv": AWKWARD["conv"], "matrix": AWKWARD["matrix"], "vector": (17,)}
SPARSE = Compression(chunk=None, min_numel=100)
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"k_steps": 3, "outer": "nesterov"},
    "sparse_loco": {"k_steps": 3, "compression": SPARSE},
    "sparse_loco, hidden": {"k_steps": 4, "delay_steps": 2, "compression": SPARSE},
    "int8": {"k_steps": 3, "compression": "int8"},
}
STEPS = 13  # the hidden average of step 12 is in progress then


def train(name: str, elsewhere: bool) -> tuple[str, int, int]:
    """Train; where the state is elsewhere, NaN is in its place between averages, as no step must see."""
    worker, parameters = attach(LocalSGD(**{"begin_step": 0, **METHODS[name]}), "adamw", SHAPES)
    away: dict[int, Tensor] = {}
    num_fetched = 0

    def move(device: torch.device) -> None:
        nonlocal num_fetched
        num_fetched += device is not HOST
        residuals = {} if worker.compressed is None else worker.compressed.residuals
        for tensor in (*worker.start.values(), *worker.velocity.values(), *residuals.values()):
            if device is not HOST and id(tensor) in away:
                tensor.copy_(away.pop(id(tensor)))
            elif device is HOST and id(tensor) not in away:
                away[id(tensor)] = tensor.clone()
                tensor.fill_(torch.nan)

    if elsewhere:
        worker.is_offloaded, worker._move = True, move  # type: ignore[method-assign]
    for step in range(STEPS):
        take_step(worker, parameters, step)
    num_away = len(away)
    with worker.state_at_hand(), worker.state_at_hand():
        residuals = {} if worker.compressed is None else worker.compressed.residuals
        kept = digest([*parameters.values(), *residuals.values()])
    worker.finish()
    return kept + digest(parameters.values()), num_away, num_fetched


def test_nothing_reads_it_between_averages() -> None:
    cases = [(name, elsewhere) for name in METHODS for elsewhere in (False, True)]
    for results in run_ranks(each, 2, train, cases):
        for (expected, _, _), (found, num_away, num_fetched) in zip(results[::2], results[1::2], strict=True):
            assert found == expected
            assert num_away > 0
            assert STEPS / 5 < num_fetched < STEPS + 3
