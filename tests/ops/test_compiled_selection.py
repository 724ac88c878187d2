"""What selects and packs, compiled by numba, against its specification: the same positions and bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import candidates, compiled, compiler, reference
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.what import positions as code
from lightning_lowbw.what.positions import pack, unpack

pytestmark = pytest.mark.skipif(not compiler.is_available(), reason="needs numba")

KINDS = ("normal", "ties", "zeros", "not finite", "denormal", "one magnitude")
SIZES = [1, 2, 63, 64, 65, 1000, 70_001]


def make(kind: str, numel: int) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if kind == "ties":
        values = (2.0 * values).round()
    elif kind == "zeros":
        values = values.where(values.abs() > 1.5, 0.0)
    elif kind == "not finite":
        values[:: max(1, numel // 3)] = torch.inf
        values[-1] = torch.nan
    elif kind == "denormal":
        values *= 1e-39
    elif kind == "one magnitude":
        values = values.sign()
    return values


def stable_top_k(values: Tensor, k: int) -> Tensor:
    """Sort; of equal ones take the first."""
    return values.abs().sort(descending=True, stable=True).indices[:k].sort().values


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_are_those_of_a_stable_sort(kind: str, numel: int) -> None:
    values = make(kind, numel)
    for k in {0, 1, max(1, numel // 100), numel // 2, numel - 1, numel}:
        assert compiled.top_k(values, k).equal(stable_top_k(values, k)), k
        assert reference.top_k(values, k).equal(stable_top_k(values, k)), k


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_found_and_narrowed(kind: str, numel: int) -> None:
    values = make(kind, numel)
    threshold = 5e-40 if kind == "denormal" else 0.7
    candidates = compiled.reach(values, threshold)
    assert candidates.equal(reference.reach(values, threshold))
    for k in {1, candidates.numel() // 2, candidates.numel()} - {0} if candidates.numel() else ():
        found, least = compiled.narrow(values, candidates, k)
        assert found.equal(candidates[stable_top_k(values[candidates], k)])
        expected, least_expected = reference.narrow(values, candidates, k)
        assert found.equal(expected)
        assert least == least_expected


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), 1e39, 3.4e38, 1e-45, 1e-60])
@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_at_the_ends(kind: str, threshold: float) -> None:
    values = make(kind, 1000)
    assert compiled.reach(values, threshold).equal(reference.reach(values, float(torch.tensor(threshold))))


def test_equal_ones_at_the_upper_end() -> None:
    """All bits of the magnitude are ones: a NaN than which nothing is larger."""
    values = torch.full((1000,), -1, dtype=torch.int32).view(torch.float32)
    assert compiled.top_k(values, 300).tolist() == list(range(300))


# Chunks: of one element; of one group; all sent; ending within a group; longer than the tensor; SparseLoCo's;
# with as many sent as a search by groups may have, and one more.
CHUNKS = [(1, 1, 0), (16, 1, 1), (7, 7, 3), (50, 2, 5), (1 << 20, 4096, 3), (4096, 64, 64), (300, 9, 40), (300, 10, 2)]


def in_chunks(values: Tensor, chunk: int, k: int, k_last: int) -> Segment:
    k_last = min(k_last, values.numel() % chunk)
    return Segment(residual=values, momentum_buffer=None, gradient=values, weight=None, k=k, chunk=chunk, k_last=k_last)


@pytest.mark.parametrize("numel", [0, 1, 65, 1000, 10_001])
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_of_each_chunk_are_those_of_a_stable_sort(kind: str, numel: int) -> None:
    values = make(kind, numel) if numel else torch.empty(0)
    for chunk, k, k_last in CHUNKS:
        if numel > 1000 * chunk:  # the specification goes from chunk to chunk
            continue
        segment = in_chunks(values, chunk, k, k_last)
        expected = reference.largest(segment)
        choice = chunk, k, segment.k_last
        assert compiled.top_k_of_chunks(values, *choice).equal(expected), choice
        assert candidates.top_k_of_chunks(values, *choice).equal(expected), choice
        assert candidates.top_k_of_chunks(values.double(), *choice).equal(expected), choice


def test_the_largest_side_by_side_and_far_apart() -> None:
    """The groups' maxima give a low bound, or one that nothing but the largest reaches."""
    for order in (slice(None), torch.arange(4096).view(16, 256).t().flatten()):
        values = torch.arange(4096.0)[order].repeat(3)
        segment = in_chunks(values, 4096, 64, 0)
        assert compiled.top_k_of_chunks(values, 4096, 64, 0).equal(reference.largest(segment))


def test_a_chunk_is_not_torn_apart_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MIN_PER_THREAD", 100)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for numel in (0, 99, 301, 1000, 10_001):
            values = make("ties", max(1, numel))[:numel]
            for chunk in (1, 64, 301, 5000):
                segment = in_chunks(values, chunk, 1, 1)
                found = compiled.top_k_of_chunks(values, chunk, 1, segment.k_last)
                assert found.equal(reference.largest(segment))
    finally:
        torch.set_num_threads(before)


def test_plain_torch_takes_chunks_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "AT_ONCE_ON_CPU", 300)
    values = make("ties", 2000)
    for chunk in (7, 100, 299, 301):
        segment = in_chunks(values, chunk, 3, 2)
        found = candidates.top_k_of_chunks(values, chunk, 3, segment.k_last)
        assert found.equal(reference.largest(segment))


@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_taken_out(kind: str, masking: bool) -> None:
    """Where a zero is taken nothing was sent, and no velocity is cleared."""
    residual = make(kind, 1000)
    positions = torch.arange(0, 1000, 7)
    for velocity in (torch.ones(1000), None):
        twins = [(residual.clone(), None if velocity is None else velocity.clone()) for _ in range(2)]
        taken = [
            module.take_out_(*twin, positions, masking=masking)
            for module, twin in zip((compiled, reference), twins, strict=True)
        ]
        assert taken[0].view(torch.int32).equal(taken[1].view(torch.int32))
        torch.testing.assert_close(twins[0], twins[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("counts", "numels"),
    [([1], [1]), ([0, 3], [5, 3]), ([7, 1, 300], [1000, 1 << 20, 300]), ([1000, 33], [1 << 16, 34]), ([2], [1 << 30])],
)
def test_positions_in_the_same_bits(counts: list[int], numels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    chosen = [
        torch.randperm(min(numel, 1 << 20), generator=generator)[:count].sort().values + max(0, numel - (1 << 20))
        for count, numel in zip(counts, numels, strict=True)
    ]
    positions = torch.cat(chosen)
    words = pack(positions, counts, numels)
    assert unpack(words.unsqueeze(0), counts, numels)[0].equal(positions)
    with monkeypatch.context() as plain:
        plain.setattr(code, "packs_compiled", lambda _: False)
        assert pack(positions, counts, numels).equal(words)
        assert unpack(words.unsqueeze(0), counts, numels)[0].equal(positions)


@pytest.mark.parametrize("fill", [0, -1, 0x55555555])
def test_a_message_with_another_number_of_positions(fill: int) -> None:
    words = torch.full((code.num_words([40], [1000]),), fill, dtype=torch.int32)
    num_unary = 40 + (999 >> 4)
    expected = sum((fill >> bit % 32) & 1 for bit in range(num_unary))
    with pytest.raises(ValueError, match=f"A message with {expected} positions; 40 were expected"):
        unpack(words.unsqueeze(0), [40], [1000])
