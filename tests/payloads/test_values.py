"""Values on the wire: finite, of the same sign, near enough, and the same bits wherever they are decoded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels.reference import largest
from lightning_lowbw.payloads import codec

LEVELS = ["int8", "int4", "int2"]


def code(name: str, values: Tensor) -> Tensor:
    """What the receivers get."""
    counts, value_format = [values.numel()], codec.VALUE_FORMATS[name]
    data = value_format.encode(values, counts)
    assert data.dtype == torch.uint8
    assert data.shape == (value_format.nbytes(counts),)
    decoded = value_format.decode(data, counts)
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    return decoded


def tail() -> Tensor:
    """What top-k leaves of a distribution with heavy tails."""
    values = torch.distributions.StudentT(3.0).sample((400_000,))
    return values[largest(values, 2000)]


def encode_by_blocks(bits: int, values: Tensor, counts: list[int]) -> Tensor:
    """The slow twin: block by block, in the order of the definition."""
    extremes, codes = [], []
    blocks = (block for tensor in values.split(counts) for block in tensor.split(codec.LEVELS_BLOCK))
    for block in filter(Tensor.numel, blocks):
        magnitudes = block.abs().view(torch.int32).clamp(max=(codec.LARGEST << codec.HALF) | 0xFFFF)
        is_zero = magnitudes == 0
        highest = ((magnitudes.amax() + 0xFFFF) >> codec.HALF).clamp(max=codec.LARGEST)
        lowest = (magnitudes.masked_fill(is_zero, codec.LARGEST << codec.HALF).amin() >> codec.HALF).clamp(min=1)
        top = (1 << (bits - 1)) - 1
        per_bit = top / ((highest - lowest).clamp(min=1) << codec.HALF).to(torch.float32)
        level = ((magnitudes - (lowest << codec.HALF)) * per_bit).round().clamp(min=0, max=top).to(torch.uint8)
        if is_zero.any():  # the lowest level is taken
            level, lowest = level.clamp(min=1).masked_fill(is_zero, 0), -lowest
        extremes += [lowest, highest]
        codes.append(level + ((block < 0).to(torch.uint8) << (bits - 1)))
    packed = torch.cat(codes)
    if bits == 4:
        pairs = torch.cat([packed, packed.new_zeros(packed.numel() % 2)]).view(-1, 2)
        packed = pairs[:, 0] | (pairs[:, 1] << 4)
    return torch.cat([torch.stack(extremes).to(torch.int16).view(torch.uint8), packed])


BLOCKS = [codec.LEVELS_BLOCK + 1, 1, 0, codec.LEVELS_BLOCK - 1]
PIECES = [codec.PIECE - 1, 3, 2 * codec.PIECE + codec.LEVELS_BLOCK, 9]


@pytest.mark.parametrize(("bits", "counts"), [(8, BLOCKS), (4, BLOCKS), (4, [codec.PIECE]), (4, PIECES)], ids=str)
def test_pieces_are_coded_as_the_whole(bits: int, counts: list[int]) -> None:
    values = torch.randn(sum(counts)) * 10.0 ** torch.empty(sum(counts)).uniform_(-3, 3)
    values[::1001] = 0.0
    assert codec.LevelFormat(bits).encode(values, counts).equal(encode_by_blocks(bits, values, counts))


@pytest.mark.parametrize("name", codec.VALUE_NAMES)
def test_hard_values(name: str) -> None:
    """All magnitudes of float32 in one block: none becomes infinite, none changes its sign."""
    largest = torch.finfo(torch.float32).max
    edges = torch.tensor([largest, 3.395e38, 1e30, 65520.0, 65504.0, 1.0, 6e-8, 1e-9, 1e-38, 1e-40, 1.4e-45, 0.0])
    values = torch.cat([edges, -edges])
    decoded = code(name, values)
    assert decoded.isfinite().all()
    assert (decoded * values.sign() >= 0).all()
    assert (decoded[values == 0] == 0).all()
    if name in LEVELS:  # float16 has nothing that small
        assert (decoded[values != 0] != 0).all()


@pytest.mark.parametrize("numel", [2, 60, codec.LEVELS_BLOCK])
def test_two_levels_are_the_best_two(numel: int) -> None:
    """Against all ways to part the sorted values in two; the iteration may end in another of nearly the same error."""
    values = tail()[torch.randperm(2000)[:numel]]
    decoded = code("int2", values)
    levels = decoded.abs().unique()
    assert levels.numel() == 2
    nearest = levels[(values.abs().unsqueeze(1) - levels).abs().argmin(1)]
    assert decoded.abs().equal(nearest)
    ordered = values.abs().double().sort().values
    errors = [ordered[:cut].var(unbiased=False) * cut for cut in range(1, numel)]
    errors = [e + ordered[cut:].var(unbiased=False) * (numel - cut) for cut, e in enumerate(errors, start=1)]
    assert float((decoded - values).norm() ** 2) <= 1.1 * float(min(errors)) + 1e-4 * float(values.norm() ** 2)


@pytest.mark.parametrize("name", codec.VALUE_NAMES)
def test_zeros_stay_beside_values(name: str) -> None:
    """Padding of a dead tensor; the smallest value that is not zero moves up by a level, because zero takes its own."""
    values = torch.tensor([0.0, 2.0, -0.0, -4.0, 0.0, 2.5])
    decoded = code(name, values)
    assert (decoded[values == 0] == 0).all()
    assert decoded.sign().equal(values.sign())
    torch.testing.assert_close(decoded, values, rtol=0.42 if name == "int2" else 0.15, atol=0.0)
    assert code(name, torch.zeros(5)).tolist() == [0.0] * 5


LIMITS = {"float32": 0.0, "bfloat16": 0.002, "float16": 0.0003, "int8": 0.006, "int4": 0.10, "int2": 0.30}


@pytest.mark.parametrize("name", codec.VALUE_NAMES)
def test_the_error_of_what_top_k_leaves(name: str) -> None:
    values = tail()
    assert (code(name, values) - values).norm() <= LIMITS[name] * values.norm()


def test_nbytes() -> None:
    counts = [1, codec.LEVELS_BLOCK, codec.LEVELS_BLOCK + 1]  # 1 + 1 + 2 blocks of 4 bytes, 258 values
    sizes = {name: codec.VALUE_FORMATS[name].nbytes(counts) for name in codec.VALUE_NAMES}
    levels = {"int8": 16 + 258, "int4": 16 + 129, "int2": 16 + 65}
    assert sizes == {"float32": 4 * 258, "bfloat16": 2 * 258, "float16": 2 * 258, **levels}


@pytest.mark.gpu
@pytest.mark.parametrize("name", codec.VALUE_NAMES)
def test_a_gpu_decodes_the_same_bits(name: str) -> None:
    values, counts = tail(), [700, 300, 1000]
    value_format = codec.VALUE_FORMATS[name]
    data = value_format.encode(values.cuda(), counts)
    assert value_format.decode(data, counts).cpu().equal(value_format.decode(data.cpu(), counts))
