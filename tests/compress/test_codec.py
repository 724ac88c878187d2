"""One message per step: positions and values come out, in the size that every rank knows beforehand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.compress.codec import ALIGNMENT_BYTES, VALUE_NAMES, SparseCodec, make_value_format
from lightning_lowbw.kernels.reference import largest

Part = tuple[Tensor, Tensor]
# (k, n) of each tensor of a step
STEPS = [
    [(1, 1)],
    [(3, 10)],
    [(16, 16384), (1, 5), (7, 7), (129, 100_000)],
    [(0, 4)],
    [(2, 9), (0, 3), (5, 31)],
    [(1001, 4004)],
]


def make_parts(sizes: list[tuple[int, int]]) -> list[Part]:
    parts = []
    for count, numel in sizes:
        values = torch.randn(numel)
        indices = largest(values, count)
        parts.append((indices, values[indices]))
    return parts


def split(sizes: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [count for count, _ in sizes], [numel for _, numel in sizes]


@pytest.mark.parametrize("value_dtype", VALUE_NAMES)
@pytest.mark.parametrize("sizes", STEPS, ids=str)
def test_what_comes_out_is_what_the_values_became(value_dtype: str, sizes: list[tuple[int, int]]) -> None:
    codec, (counts, numels), parts = SparseCodec(value_dtype), split(sizes), make_parts(sizes)
    message = codec.encode(parts, numels)
    assert message.dtype == torch.uint8  # gloo takes no 16-bit integers
    assert message.shape == (codec.nbytes(counts, numels),)
    assert message.numel() % ALIGNMENT_BYTES == 0
    sent = codec.decode_values(message, counts, numels)
    values = torch.cat([values for _, values in parts])
    value_format = make_value_format(value_dtype)
    assert torch.cat(sent).equal(value_format.decode(value_format.encode(values, counts), counts))
    positions, decoded = codec.decode(message.unsqueeze(0), counts, numels)
    assert positions[0].equal(torch.cat([indices for indices, _ in parts]))
    assert decoded[0].equal(torch.cat(sent))
    residuals = [torch.zeros(numel) for numel in numels]
    assert codec.encode(parts, numels, residuals).equal(message)
    for residual, (indices, exact), mine in zip(residuals, parts, sent, strict=True):
        assert residual[indices].equal(exact - mine)


@pytest.mark.parametrize(
    ("value_dtype", "limit"),
    [("float32", 45.0), ("bfloat16", 28.5), ("float16", 28.5), ("int8", 21.0), ("int4", 17.0), ("int2", 15.0)],
)
@pytest.mark.parametrize("numel", [100_000, 4_194_304, 16_777_216])
def test_bits_per_element_at_one_in_a_thousand(value_dtype: str, limit: float, numel: int) -> None:
    count = round(numel * 0.001)
    assert SparseCodec(value_dtype).nbytes([count] * 4, [numel] * 4) * 8 / (4 * count) < limit
    # What was promised: the default takes at most 32 bits, the tightest at most 20.
    assert SparseCodec().nbytes([count], [numel]) * 8 / count <= 32
    assert min(SparseCodec(name).nbytes([count], [numel]) for name in VALUE_NAMES) * 8 / count <= 20


def test_equal_content_makes_equal_bytes() -> None:
    """No byte is left unwritten, not even the padding: a digest of a message means something."""
    codec, parts = SparseCodec("int4"), [(torch.tensor([1, 5, 9]), torch.tensor([1.0, 2.0, 3.0]))]
    message = codec.encode(parts, [10])
    assert all(codec.encode(parts, [10]).equal(message) for _ in range(20))
    assert message[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_message_of_the_wrong_size_is_refused(change: int) -> None:
    codec, counts, numels = SparseCodec("int8"), [4, 2], [100, 50]
    size = codec.nbytes(counts, numels)
    message = torch.zeros(size + change, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"A message of {size + change} bytes; {size} were expected"):
        codec.decode_values(message, counts, numels)
    with pytest.raises(ValueError, match=f"A message of {size + change} bytes; {size} were expected"):
        codec.decode(message.unsqueeze(0), counts, numels)
