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


BLOCKS = [codec.LEVELS_BLOCK + 1, 1, 0, codec.LEVELS_BLOCK - 1]
PIECES = [codec.PIECE - 1, 3, 2 * codec.PIECE + codec.LEVELS_BLOCK, 9]


@pytest.mark.parametrize(("bits", "counts"), [(8, BLOCKS), (4, BLOCKS), (4, [codec.PIECE]), (4, PIECES)], ids=str)
def test_pieces_are_coded_as_the_whole(bits: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(sum(counts)) * 10.0 ** torch.empty(sum(counts)).uniform_(-3, 3)
    values[::1001] = 0.0
    in_pieces = codec.LevelFormat(bits).encode(values, counts)
    monkeypatch.setattr(codec, "PIECE", 1 << 30)
    assert in_pieces.equal(codec.LevelFormat(bits).encode(values, counts))


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", codec.VALUE_NAMES)
def test_a_gpu_decodes_the_same_bits(name: str) -> None:
    values, counts = tail(), [700, 300, 1000]
    value_format = codec.VALUE_FORMATS[name]
    data = value_format.encode(values.cuda(), counts)
    assert value_format.decode(data, counts).cpu().equal(value_format.decode(data.cpu(), counts))
