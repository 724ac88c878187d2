"""Process groups: nothing here keeps one alive that torch has destroyed."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from lightning_lowbw import LocalSGD
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer

NODES = ((0, 1), (2, 3))


def world_groups() -> list[Any]:
    return [ref(group) for group in dist.distributed_c10d._world.pg_map]


def destroy_under_a_worker() -> tuple[int, int, list[str]]:
    """Return how many groups there are, how many of them after they are destroyed, and what is said then."""
    model = nn.Linear(20, 10)
    optimizer = SGD(model.parameters(), lr=0.1)
    worker = LocalSGD(k_steps=2, begin_step=0).attach(optimizer, model.named_parameters(), topology=NODES)
    for _ in range(3):
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
    found = world_groups()
    dist.destroy_process_group()
    gc.collect()
    said = []
    try:
        _ = worker.peers.node.group
    except RuntimeError as error:
        said.append(str(error))
    return len(found), sum(each() is not None for each in found), said


def test_a_worker_keeps_no_group_alive() -> None:
    """Its threads may be dropping a tensor when the interpreter ends, which aborts the process."""
    for num_groups, num_left, said in run_ranks(destroy_under_a_worker, 4):
        assert num_groups > 4
        assert num_left == 0
        assert "The process group has been destroyed" in said[0]


def destroy_under_a_trainer() -> tuple[int, int]:
    strategy = make_strategy("dgc", topology=NODES)
    trainer = make_trainer(strategy, 4)
    trainer.fit(Tiny(), make_data(4, 4))
    found = world_groups()
    dist.destroy_process_group()
    gc.collect()
    assert trainer.strategy is strategy
    return len(found), sum(each() is not None for each in found)


def test_a_trainer_keeps_no_group_alive() -> None:
    for num_groups, num_left in run_ranks(destroy_under_a_trainer, 4):
        assert num_groups > 4
        assert num_left == 0
