"""The mean in few bits: its definition, nothing is lost, equal bits on all ranks, and the bytes of the formula."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.collectives import all_gather_bytes
from lightning_lowbw.comm.peers import make_peers
from lightning_lowbw.compress.quantization import QUANTIZED_NAMES, make_format, quantized_mean_bytes
from lightning_lowbw.sync import quantized
from lightning_lowbw.sync.quantized import Joined, quantized_mean_
from tests.quantized import decode, encode
from tests.ranks import run_ranks

TOPOLOGIES: dict[str, Any] = {
    "flat": ((0,), (1,), (2,), (3,)),
    "blocks": ((0, 1), (2, 3)),
    "crossed": ((0, 2), (1, 3)),
}
NUMELS = (0, 1, 2, 3, 7, 130, 1001)
DTYPES = (torch.float32, torch.float64)
STEPS = 3
# What rounding takes at most, in units of the largest value: half a step, on each of the two ways.
LIMITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1.02 / 254, "int4": 1.02 / 14}

Results = dict[tuple[str, str, int, torch.dtype], dict[str, Any]]


def vector_of(participant: int, step: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + participant)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def average() -> Results:
    """Several means in a row, each with what the last has left over."""
    results: Results = {}
    for topology, nodes in TOPOLOGIES.items():
        peers = make_peers(nodes if len(nodes) < 4 else "flat")
        participant = next(index for index, node in enumerate(nodes) if peers.rank in node)
        for name in QUANTIZED_NAMES:
            for numel in NUMELS:
                for dtype in DTYPES:
                    means, before = [], peers.ledger.sent_bytes
                    unsent = torch.zeros(numel)[peers.part(numel)].clone()
                    for step in range(STEPS):
                        vector = vector_of(participant, step, numel, dtype)
                        kept, mean = vector.clone(), torch.empty_like(vector)
                        quantized_mean_([vector], [unsent], [mean], make_format(name), peers)
                        assert vector.equal(kept)
                        means.append(mean)
                    sent = peers.ledger.sent_bytes - before
                    results[topology, name, numel, dtype] = {"means": means, "unsent": unsent, "sent": sent}
        peers.close()
    return results


@functools.cache
def results() -> list[Results]:
    return run_ranks(average, 4)


@pytest.mark.parametrize("name", QUANTIZED_NAMES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_sent_and_unsent_are_what_was_given(topology: str, name: str) -> None:
    num_participants = len(TOPOLOGIES[topology])
    for numel, dtype in product(NUMELS, DTYPES):
        by_rank = [each[topology, name, numel, dtype] for each in results()]
        vectors = (vector_of(p, step, numel, dtype) for p in range(num_participants) for step in range(STEPS))
        given = sum(vectors) / num_participants
        of_nodes = [torch.cat([by_rank[rank]["unsent"] for rank in node]) for node in TOPOLOGIES[topology]]
        unsent = torch.stack(of_nodes).mean(0)
        for each in by_rank:
            for mean, first in zip(each["means"], by_rank[0]["means"], strict=True):
                assert mean.equal(first), "replicas differ"
            taken = sum(each["means"])
            torch.testing.assert_close(taken + unsent, given, rtol=1e-5, atol=1e-5)
            assert numel == 0 or float((taken - given).abs().max()) <= 20 * LIMITS[name]
        assert numel < 7 or bool(unsent.any()) == (num_participants > 1)


@pytest.mark.parametrize("name", QUANTIZED_NAMES)
def test_one_mean_bit_for_bit(name: str) -> None:
    """The first of the flat means, from all vectors on one machine: the definition."""
    value_format, num_ranks = make_format(name), 4
    for numel, dtype in product(filter(None, NUMELS), DTYPES):
        size, sent = -(-numel // num_ranks), []
        for rank in range(num_ranks):
            padded = torch.nn.functional.pad(vector_of(rank, 0, numel, dtype), (0, num_ranks * size - numel))
            sent.append(decode(value_format, encode(value_format, padded.view(num_ranks, size)), size).to(dtype))
        parts = torch.stack(sent).mean(0)
        expected = decode(value_format, encode(value_format, parts), size).reshape(-1)[:numel].to(dtype)
        for each in results():
            assert each["flat", name, numel, dtype]["means"][0].equal(expected)


@pytest.mark.parametrize("name", QUANTIZED_NAMES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_measured_bytes_are_those_of_the_formula(topology: str, name: str) -> None:
    nodes = TOPOLOGIES[topology]
    for numel, dtype in product(NUMELS, DTYPES):
        part = -(-numel // len(nodes[0]))
        inter = quantized_mean_bytes(part, len(nodes), make_format(name))
        intra = all_gather_bytes(part * dtype.itemsize, len(nodes[0]))
        for each in results():
            assert each[topology, name, numel, dtype]["sent"] == STEPS * (inter + intra)


def test_one_rank_rounds_nothing() -> None:
    vector, unsent, mean = torch.randn(300), torch.ones(300), torch.empty(300)
    quantized_mean_([vector], [unsent], [mean], make_format("int4"), make_peers())
    assert mean.equal(vector + 1)
    assert not unsent.any()


def average_in_ranges(numels: list[int], length: int) -> tuple[bytes, bytes]:
    """Return the bits of the means and the residuals of several tensors, worked through in ranges of one length."""
    with mock.patch.object(quantized, "RANGE", length):
        signals = [vector_of(dist.get_rank(), numel, numel, torch.float32) for numel in numels]
        residuals, means = ([torch.full_like(signal, 1e-3) for signal in signals] for _ in range(2))
        quantized_mean_(signals, residuals, means, make_format("int4"), make_peers())
    return torch.cat(means).numpy().tobytes(), torch.cat(residuals).numpy().tobytes()


def test_ranges_and_the_borders_of_tensors_change_nothing() -> None:
    numels = [1, 700, 3, 128, 2049]
    whole, *cut = (run_ranks(average_in_ranges, 2, numels, length) for length in (1 << 18, 128, 384))
    assert all(each == whole for each in cut)


@pytest.mark.parametrize("numel", [0, 1, 2, 4, 12])
def test_ranges_of_joined_tensors_are_those_of_the_concatenation(numel: int) -> None:
    for start in range(11):
        tensors = [torch.randn(each) for each in (0, 3, 0, 1, 5, 0)]
        whole, joined = torch.cat([*tensors, torch.zeros(20)]), Joined(tensors)
        mine = slice(start, start + numel)
        assert joined.read(start, numel, torch.float32).equal(whole[mine])
        out, values = torch.ones(numel), torch.randn(numel)
        joined.add_to_(start, out)
        assert out.equal(whole[mine] + 1)
        joined.write_(start, values)
        joined.add_(start, values)
        whole[mine] = values + values
        assert torch.cat(tensors).equal(whole[: joined.numel])


def average_gradients_in_place(dtype: torch.dtype) -> bool:
    """The means may be written over the signals."""
    signals = [vector_of(dist.get_rank(), 0, numel, dtype) for numel in (300, 5)]
    apart = [torch.empty_like(signal) for signal in signals]
    for means in (apart, signals):
        residuals = [torch.zeros(len(signal)) for signal in signals]
        quantized_mean_(signals, residuals, means, make_format("int8"), make_peers())
    return all(one.equal(other) for one, other in zip(apart, signals, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_may_replace_the_signals(dtype: torch.dtype) -> None:
    assert all(run_ranks(average_gradients_in_place, 2, dtype))
