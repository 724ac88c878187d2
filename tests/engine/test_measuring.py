"""What `sparsity="auto"` measures beside the link: that it leaves no trace, and grows with what it is to measure."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from lightning_lowbw.engine.auto import DENSITIES
from lightning_lowbw.engine.measuring import measure, seconds_of_small_tensors
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.peers import make_peers
from lightning_lowbw.where.topology import TopologyChoice
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def measure_once(topology: TopologyChoice) -> tuple[dict[float, float], TrafficLedger, float, float]:
    peers = make_peers(topology)
    peers.ledger.record(12)
    before = dataclasses.asdict(peers.ledger)
    measured = measure(TopK(), peers, CPU, [1 << 16] * 3, [100], step_s=0.1)
    few, many = (seconds_of_small_tensors(TopK(exclude=["head"]), peers, CPU, number, number) for number in (1, 60))
    assert dataclasses.asdict(peers.ledger) == before
    dist.barrier()
    return dict(measured.sparse_s), peers.ledger, few, many


def test_it_enters_no_ledger_and_more_tensors_take_longer() -> None:
    for topology, num_ranks in (("flat", 2), (2, 4)):
        for sparse_s, ledger, few, many in run_ranks(measure_once, num_ranks, topology):
            assert sparse_s.keys() == set(DENSITIES)
            assert ledger.sent_bytes == 12
            assert 0 < few < many < 5
