"""decode(encode(x)) == x to the bit, and a message is as long as was said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.core.codec import ALIGNMENT_BYTES, MAX_NUMEL, VALUE_DTYPES, IndexValueCodec

COUNTS = [[1], [2], [3], [5, 1], [1, 1, 1], [4, 7, 1, 256], [0], [3, 0, 2], [0, 0], [1001]]


def make_parts(counts: list[int], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for count in counts:
        indices = torch.randint(0, MAX_NUMEL, (count,)).sort().values
        values = (torch.randn(count) * 100).to(dtype)
        parts.append((indices, values))
    special = torch.tensor([-0.0, float("inf"), float("nan"), torch.finfo(dtype).tiny / 2], dtype=dtype)
    last = parts[-1][1]
    last[: special.numel()] = special[: last.numel()]
    return parts


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_what_comes_out_is_what_went_in(value_dtype: str, counts: list[int]) -> None:
    codec = IndexValueCodec(value_dtype)
    parts = make_parts(counts, codec.torch_dtype)
    message = codec.encode(parts)
    assert message.dtype == torch.uint8  # gloo takes no 16-bit integers
    assert message.shape == (codec.nbytes(counts),)
    for (indices, values), (decoded_indices, decoded_values) in zip(parts, codec.decode(message, counts), strict=True):
        assert decoded_indices.dtype == torch.int64
        assert decoded_indices.equal(indices)
        assert decoded_values.dtype == codec.torch_dtype
        assert decoded_values.view(torch.uint8).equal(values.view(torch.uint8))


@pytest.mark.parametrize("value_dtype", VALUE_DTYPES)
def test_messages_lie_behind_one_another(value_dtype: str) -> None:
    """As after an all-gather: each is a row, so its length must keep the next one aligned."""
    codec, counts = IndexValueCodec(value_dtype), [3, 2, 2]
    ranks = [make_parts(counts, codec.torch_dtype) for _ in range(3)]
    gathered = torch.stack([codec.encode(parts) for parts in ranks])
    for parts, row in zip(ranks, gathered, strict=True):
        for (indices, values), decoded in zip(parts, codec.decode(row, counts), strict=True):
            assert decoded[0].equal(indices)
            assert decoded[1].view(torch.uint8).equal(values.view(torch.uint8))


@pytest.mark.parametrize(("value_dtype", "bytes_per_element"), [("float32", 8), ("bfloat16", 6), ("float16", 6)])
@pytest.mark.parametrize("counts", [*COUNTS, []], ids=str)
def test_nbytes(value_dtype: str, bytes_per_element: int, counts: list[int]) -> None:
    nbytes = IndexValueCodec(value_dtype).nbytes(counts)
    padding = nbytes - sum(counts) * bytes_per_element
    assert 0 <= padding < ALIGNMENT_BYTES
    assert nbytes % ALIGNMENT_BYTES == 0


def test_the_largest_position_fits() -> None:
    codec = IndexValueCodec()
    message = codec.encode([(torch.tensor([0, MAX_NUMEL - 1]), torch.tensor([1.0, 2.0]))])
    assert codec.decode(message, [2])[0][0].tolist() == [0, MAX_NUMEL - 1]


def test_equal_content_makes_equal_bytes() -> None:
    """No byte is left unwritten, not even the padding: a digest of a message means something."""
    codec = IndexValueCodec("bfloat16")
    parts = [(torch.tensor([1, 5, 9]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))]
    message = codec.encode(parts)
    assert all(codec.encode(parts).equal(message) for _ in range(20))
    assert message[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_message_of_the_wrong_size_is_refused(change: int) -> None:
    codec, counts = IndexValueCodec("float16"), [4, 2]
    size = codec.nbytes(counts)
    with pytest.raises(ValueError, match=f"A message of {size + change} bytes; {size} were expected"):
        codec.decode(torch.zeros(size + change, dtype=torch.uint8), counts)


def test_codecs_are_values() -> None:
    assert IndexValueCodec() == IndexValueCodec("float32")
    assert IndexValueCodec() != IndexValueCodec("float16")
    assert all(str(IndexValueCodec(name).torch_dtype) == f"torch.{name}" for name in VALUE_DTYPES)
