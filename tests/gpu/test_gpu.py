"""Trainings and sums of ranks on GPUs, or on one that they share, through NCCL and gloo, beside those on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_lowbw import DGC, LocalSGD
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import make_peers
from lightning_lowbw.sync.local import LocalSync
from tests.gpu.problem import check_near, on_gpu
from tests.ranks import run_ranks
from tests.sync.problem import Nodes
from tests.tiny import sgd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SPARSE: dict[str, Any] = {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": (0.5, 0.99)}
METHODS: dict[str, Any] = {
    "dgc": DGC(**SPARSE),
    "dgc bfloat16": DGC(**SPARSE, value_dtype="bfloat16"),
    "local": LocalSGD(k_steps=3),
    "local bfloat16": LocalSGD(k_steps=3, compression="bfloat16"),
}
CROSSED: Nodes = ((0, 3), (1, 2))
TRAININGS: list[tuple[str, int, Nodes]] = [  # of others: test_lightning.py
    ("dgc", 2, ()),
    ("dgc", 4, CROSSED),
    ("dgc", 6, ()),
    ("local", 4, CROSSED),
    *((name, 2, ()) for name in ("dgc bfloat16", "local bfloat16")),
]


def train(device: str, name: str, nodes: Nodes) -> tuple[list[torch.Tensor], str]:
    """Train in a plain loop; return the weights, and their digest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4)).to(device)
    optimizer = sgd(model.parameters())
    method = METHODS[name]
    worker = method.attach(optimizer, model.named_parameters(), topology=nodes or "flat")
    for step in range(10):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 32, generator=generator).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    if isinstance(worker, LocalSync):
        worker.finish()
    return [p.detach().cpu() for p in model.parameters()], digest(model.parameters())


@pytest.mark.parametrize(("name", "num_ranks", "nodes"), TRAININGS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_trainings(backend: str, name: str, num_ranks: int, nodes: Nodes, tmp_path: Path) -> None:
    """The same bits on all ranks, and the weights of a CPU."""
    of_gpu = run_ranks(on_gpu, num_ranks, backend, str(tmp_path / "store"), train, name, nodes, timeout_s=40.0)
    assert len({weights for _, weights in of_gpu}) == 1
    of_cpu = run_ranks(train, num_ranks, "cpu", name, nodes)
    selects = METHODS[name].compresses_gradients
    check_near(of_gpu[0][0], of_cpu[0][0], rtol=1e-3, atol=1e-4, selects=selects)


def reduce_on_two_levels(device: str, algorithm: Any) -> tuple[list[torch.Tensor], int]:
    """Sum over four ranks, with sizes that do not divide by two among them, several begun at once."""
    exchange, pending = make_peers(CROSSED, algorithm=algorithm), []
    for numel in (1, 5, 1000, 100_001):
        generator = torch.Generator().manual_seed(100 * numel + dist.get_rank())
        buffer = torch.randn(numel, generator=generator).to(device)
        pending.append((exchange.begin_all_reduce_(buffer), buffer))
    for work, _ in pending:
        work.wait()
    return [buffer.cpu() for _, buffer in pending], exchange.ledger.inter_bytes


@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_all_reduce_on_two_levels(backend: str, algorithm: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    of_gpu = run_ranks(on_gpu, 4, backend, store, reduce_on_two_levels, algorithm, timeout_s=40.0)
    of_cpu = run_ranks(reduce_on_two_levels, 4, "cpu", algorithm)
    for sums, inter_bytes in of_gpu:
        assert inter_bytes == of_cpu[0][1] or inter_bytes == 0  # with "leader" the others send nothing
        for mine, first, expected in zip(sums, of_gpu[0][0], of_cpu[0][0], strict=True):
            assert mine.equal(first)
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
