"""A damaged message on real ranks: a CPU raises; a GPU notes it, and the next control message tells all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.late_faults import check_late_faults
from lightning_lowbw.engine.sparse_work import GatheredWork
from torch import Tensor, nn
from torch.optim import SGD

from lightning_lowbw import LocalSGD
from lightning_lowbw.engine.presets import DGC
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from tests.ranks import run_ranks

METHODS = {
    "dgc": DGC(sparsity=(0.9,), min_numel=100),
    "local_sgd": LocalSGD(
        k_steps=2, begin_step=0, compression={"min_numel": 100, "density": 0.1, "value_dtype": "float32"}
    ),
}
STEPS = 4


def make_worker(name: str) -> tuple[Worker, nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = SGD(model.parameters(), lr=0.1)
    return METHODS[name].attach(optimizer, model.named_parameters()), model, optimizer


def take_steps(worker: Worker, model: nn.Module, optimizer: SGD) -> None:
    """Take the steps of an exchange."""
    for _ in range(2 if isinstance(worker, ReplicaWorker) else 1):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter).add_(0.1 * dist.get_rank())
        optimizer.step()  # exchanges: the worker is attached


def receive_damage(name: str) -> list[str]:
    """Return what each exchange says, until one fails, where a bit flips in what rank 1 receives in the second one."""
    worker, model, optimizer = make_worker(name)
    receive, said = GatheredWork.wait, []

    def receive_flipped(work: GatheredWork) -> Tensor:
        gathered = receive(work).clone()
        gathered[0, 0, 0] ^= dist.get_rank()  # of the unary part: a position more, or one less
        return gathered

    for step in range(2):
        GatheredWork.wait = receive_flipped if step else receive  # type: ignore[method-assign]
        try:
            take_steps(worker, model, optimizer)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        finally:
            GatheredWork.wait = receive  # type: ignore[method-assign]
    return said


@pytest.mark.parametrize("name", METHODS)
def test_who_receives_it_raises(name: str) -> None:
    """The others learn of it as of any error of a rank."""
    first, second = run_ranks(receive_damage, 2, name)
    assert first == ["", ""]
    assert second[0] == ""
    assert "positions; " in second[1]
    assert "were expected" in second[1]


def note_damage(name: str, ends: bool) -> list[str]:
    """Return what each exchange says, until one fails, where rank 1 notes in the second one what a GPU would."""
    worker, model, optimizer = make_worker(name)
    said: list[str] = []
    for step in range(STEPS):
        try:
            if ends and step == 2:
                check_late_faults(worker)
            take_steps(worker, model, optimizer)
            said.append("")
        except ValueError as error:
            return [*said, str(error)]
        if step == 1:
            assert worker.sparse is not None
            assert worker.sparse.damaged is not None
            assert not worker.sparse.damaged
            worker.sparse.damaged.fill_(dist.get_rank() == 1)
    return said


@pytest.mark.parametrize(("name", "ends"), [("dgc", False), ("dgc", True), ("local_sgd", False)])
def test_what_a_gpu_has_noted_is_told_to_all_in_the_next_step_or_at_the_end(name: str, ends: bool) -> None:
    for said in run_ranks(note_damage, 2, name, ends):
        assert said[:2] == ["", ""]
        assert len(said) == 3
        assert "rank 1 has received a damaged message: its positions were too many, too few, or outside" in said[2]
