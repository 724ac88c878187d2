"""The mean in few bits, of every size: nothing is lost, equal bits on all ranks, and the bytes of the formula.

That int8 and int4 are those of the definition, to the bit, is in `tests/sync/test_quantized.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.collectives import all_gather_bytes
from lightning_lowbw.comm.peers import make_peers
from lightning_lowbw.compress.quantization import make_format, quantized_mean_bytes
from lightning_lowbw.sync import quantized
from lightning_lowbw.sync.quantized import quantized_mean_
from tests.ranks import run_ranks

TOPOLOGIES: dict[str, Any] = {"flat": ((0,), (1,), (2,), (3,)), "crossed": ((0, 2), (1, 3))}
NUMELS = (0, 1, 3, 130, 1001)
DTYPES = (torch.float32, torch.float64)
STEPS = 2
# What rounding takes at most, in units of the largest value: half a step, on each of the two ways.
LIMITS = {"bfloat16": 2.0**-8, "int4": 1.02 / 14}


def vector_of(participant: int, step: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + participant)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def average(topology: str) -> list[dict[str, Any]]:
    """Several means in a row, each with what the last has left over; of each size and format."""
    nodes, results = TOPOLOGIES[topology], []
    peers = make_peers(nodes if len(nodes) < 4 else "flat")
    participant = next(index for index, node in enumerate(nodes) if peers.rank in node)
    for name, numel, dtype in product(LIMITS, NUMELS, DTYPES):
        means, before = [], peers.ledger.sent_bytes
        unsent = torch.zeros(numel)[peers.part(numel)].clone()
        for step in range(STEPS):
            vector = vector_of(participant, step, numel, dtype)
            kept, mean = vector.clone(), torch.empty_like(vector)
            quantized_mean_([vector], [unsent], [mean], make_format(name), peers)
            assert vector.equal(kept)
            means.append(mean)
        results.append({"means": means, "unsent": unsent, "sent": peers.ledger.sent_bytes - before})
    peers.close()
    return results


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_sent_and_unsent_are_what_was_given_in_the_bytes_of_the_formula(topology: str) -> None:
    nodes = TOPOLOGIES[topology]
    cases = product(LIMITS, NUMELS, DTYPES)
    for (name, numel, dtype), *by_rank in zip(cases, *run_ranks(average, 4, topology), strict=True):
        vectors = (vector_of(p, step, numel, dtype) for p in range(len(nodes)) for step in range(STEPS))
        given = sum(vectors) / len(nodes)
        of_nodes = [torch.cat([by_rank[rank]["unsent"] for rank in node]) for node in nodes]
        unsent, part = torch.stack(of_nodes).mean(0), -(-numel // len(nodes[0]))
        inter = quantized_mean_bytes(part, len(nodes), make_format(name))
        intra = all_gather_bytes(part * dtype.itemsize, len(nodes[0]))
        for each in by_rank:
            for mean, first in zip(each["means"], by_rank[0]["means"], strict=True):
                assert mean.equal(first), "replicas differ"
            taken = sum(each["means"])
            torch.testing.assert_close(taken + unsent, given, rtol=1e-5, atol=1e-5)
            assert numel == 0 or float((taken - given).abs().max()) <= 20 * LIMITS[name]
            assert each["sent"] == STEPS * (inter + intra)
        assert numel < 100 or unsent.any()


def test_one_rank_rounds_nothing() -> None:
    vector, unsent, mean = torch.randn(300), torch.ones(300), torch.empty(300)
    quantized_mean_([vector], [unsent], [mean], make_format("int4"), make_peers())
    assert mean.equal(vector + 1)
    assert not unsent.any()


def average_in_ranges(numels: list[int]) -> list[tuple[bytes, bytes]]:
    """Return the bits of the means and the residuals of several tensors, worked through in ranges of two lengths."""
    found = []
    for length in (1 << 18, 128):
        with mock.patch.object(quantized, "RANGE", length):
            signals = [vector_of(dist.get_rank(), numel, numel, torch.float32) for numel in numels]
            residuals, means = ([torch.full_like(signal, 1e-3) for signal in signals] for _ in range(2))
            quantized_mean_(signals, residuals, means, make_format("int4"), make_peers())
        found.append((torch.cat(means).numpy().tobytes(), torch.cat(residuals).numpy().tobytes()))
    return found


def test_ranges_and_the_borders_of_tensors_change_nothing() -> None:
    for whole, cut in run_ranks(average_in_ranges, 2, [1, 700, 3, 128, 2049]):
        assert cut == whole
