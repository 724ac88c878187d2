"""What selects and packs, compiled by numba, against its specification: the same positions and bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, compiler, reference
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
    assert unpack(words, counts, numels).equal(positions)
    with monkeypatch.context() as plain:
        plain.setattr(code, "packs_compiled", lambda _: False)
        assert pack(positions, counts, numels).equal(words)
        assert unpack(words, counts, numels).equal(positions)


@pytest.mark.parametrize("fill", [0, -1, 0x55555555])
def test_a_message_with_another_number_of_positions(fill: int) -> None:
    words = torch.full((code.num_words([40], [1000]),), fill, dtype=torch.int32)
    num_unary = 40 + (999 >> 4)
    expected = sum((fill >> bit % 32) & 1 for bit in range(num_unary))
    with pytest.raises(ValueError, match=f"A message with {expected} positions; 40 were expected"):
        unpack(words, [40], [1000])
