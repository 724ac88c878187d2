"""Sums of ranks on GPUs, or on one that they share, through NCCL and gloo, beside those on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.comm.peers import make_peers
from lightning_lowbw.comm.topology import Where
from tests.gpu.problem import on_gpu
from tests.ranks import run_ranks
from tests.sync.problem import Nodes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CROSSED: Nodes = ((0, 3), (1, 2))


def reduce_on_two_levels(device: str, algorithm: Any) -> tuple[list[torch.Tensor], int]:
    """Sum over four ranks, with sizes that do not divide by two among them, several begun at once."""
    exchange, pending = make_peers(Where(topology=CROSSED, algorithm=algorithm)), []
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
