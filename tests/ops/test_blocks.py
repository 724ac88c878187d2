"""The compiled twin of integers with a scale per block against its specification: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import blocks, compiled_blocks, compiler
from lightning_lowbw.ops.blocks import BLOCK
from lightning_lowbw.ops.dispatch import blocks_for
from tests.ops.bits import equal_bits

needs_numba = pytest.mark.skipif(not compiler.is_available(), reason="needs numba")
SHAPES = [(0, 5), (1, 0), (1, 1), (2, 7), (1, BLOCK - 1), (3, BLOCK), (2, BLOCK + 1), (1, 20 * BLOCK + 77)]
FLOAT32 = torch.finfo(torch.float32)


def run(values: Tensor, bits: int) -> list[Tensor]:
    """Run both; return what the specification says: unsent, integers, scales, decoded."""
    results = []
    for module in (blocks, compiled_blocks):
        unsent, packed = values.clone(), torch.empty((len(values), -(-values.shape[1] * bits // 8)), dtype=torch.uint8)
        scales = module.encode_(unsent, bits, packed)
        results.append([unsent, packed, scales, module.decode(scales, packed, values.shape[1], bits)])
    for one, other in zip(*results, strict=True):
        assert equal_bits(one, other)
    return results[0]


@needs_numba
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_sizes(shape: tuple[int, int], bits: int) -> None:
    run(torch.randn(shape) * 10.0 ** torch.randint(-3, 3, shape), bits)


@needs_numba
@pytest.mark.parametrize("bits", [8, 4])
def test_the_ends_of_float32_and_ties(bits: int) -> None:
    largest = blocks.largest_integer(bits)
    halves = torch.arange(-largest, largest).float().repeat(20)[: 2 * BLOCK] + 0.5  # of an exact scale: to even
    halves[::BLOCK] = largest
    for values in (
        torch.full((300,), FLOAT32.max) * torch.randn(300).sign(),
        torch.full((300,), 1e-45),
        torch.rand(300) * FLOAT32.tiny,
        torch.zeros(300),
        -torch.zeros(300),
        halves,
    ):
        unsent, _, _, decoded = run(values.unsqueeze(0), bits)
        assert decoded.isfinite().all()
        assert equal_bits(unsent, values.unsqueeze(0) - decoded)


@needs_numba
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_block(bits: int, value: float) -> None:
    """The bits of a NaN may differ."""
    values = torch.randn(1, 4 * BLOCK)
    values[0, BLOCK + 3] = value
    for module in (blocks, compiled_blocks):
        unsent, packed = values.clone(), torch.empty((1, values.shape[1] * bits // 8), dtype=torch.uint8)
        decoded = module.decode(module.encode_(unsent, bits, packed), packed, values.shape[1], bits)
        for result in (unsent, decoded):
            is_finite = result.isfinite().view(-1, BLOCK)
            assert is_finite.all(1).tolist() == [True, False, True, True]
            assert not is_finite[1].any()


def test_which_one_runs() -> None:
    fastest = compiled_blocks if compiler.is_available() else blocks
    packed, values = torch.zeros((2, 8), dtype=torch.uint8), torch.zeros(2, 8)
    assert blocks_for(packed) is blocks_for(packed, values) is fastest
    assert blocks_for(packed[:, 1:5], values) is blocks  # of several messages
    assert blocks_for(packed[:1, 1:5], values) is fastest  # of one
    assert blocks_for(packed, values.double()) is blocks_for(packed, values.t()) is blocks
    assert blocks_for(packed.to("meta")) is blocks
