"""Dense values in few bits: sizes, exact zeros, and errors within half a step of each block."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels.reference import largest_integer
from lightning_lowbw.sync.quantized import FORMATS, SCALED, LinearFormat
from tests.quantized import decode, encode


def round_trip(name: str, vectors: Tensor) -> Tensor:
    value_format = FORMATS[name]
    return decode(value_format, encode(value_format, vectors), vectors.shape[1])


@pytest.mark.parametrize("name", FORMATS)
def test_size_shape_and_error(name: str) -> None:
    for numel, dtype in product((1, 128, 1001), (torch.float32, torch.float64)):
        vectors = torch.randn(3, numel, dtype=dtype) * torch.tensor([[1e-3], [1.0], [1e3]], dtype=dtype)
        value_format = FORMATS[name]
        data = encode(value_format, vectors)
        assert data.dtype == torch.uint8
        assert data.shape == (3, value_format.nbytes(numel))
        decoded = decode(value_format, data, numel)
        assert (decoded.dtype, decoded.shape) == (torch.float32, vectors.shape)
        for row in range(3):  # each by itself
            assert encode(value_format, vectors[row : row + 1])[0].equal(data[row])
            for block, exact in zip(decoded[row].split(SCALED), vectors[row].float().split(SCALED), strict=True):
                if isinstance(value_format, LinearFormat):  # whose scale is rounded upwards
                    step = float(exact.abs().max()) / largest_integer(value_format.bits) * (1 + 2**-7)
                    assert float((block - exact).abs().max()) <= step / 2 * (1 + 1e-5)
                else:
                    torch.testing.assert_close(block, exact, rtol=2.0**-8, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_plus_what_stays_is_what_was_there(name: str, dtype: torch.dtype) -> None:
    """And a message is the same in whichever ranges it is written and read."""
    value_format, vectors = FORMATS[name], torch.randn(2, 1001, dtype=dtype)
    whole, unsent = encode(value_format, vectors), vectors.clone()
    messages = torch.empty_like(whole)
    for start in range(0, 1001, 3 * SCALED):
        value_format.write_(messages, 1001, start, unsent[:, start : start + 3 * SCALED])
    assert messages.equal(whole)
    decoded = decode(value_format, whole, 1001)
    torch.testing.assert_close(decoded.to(dtype) + unsent, vectors, rtol=1e-6, atol=1e-7)
    assert bool(unsent.any())
    for start, stop in ((0, SCALED), (SCALED, 1001), (7 * SCALED, 1001)):
        assert value_format.read(messages, 1001, start, stop).equal(decoded[:, start:stop])


def test_an_odd_number_of_half_bytes() -> None:
    assert FORMATS["int4"].nbytes(129) == 4 + 65
    integers = torch.arange(-7.0, 8.0)  # every one there is: the scale is 1
    assert round_trip("int4", integers.unsqueeze(0)).squeeze(0).equal(integers)
    assert round_trip("int8", torch.arange(-127.0, 128.0).unsqueeze(0)[:, :128])[0, 0] == -127


def test_a_message_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="A message of 5 bytes; 4 were"):
        FORMATS["int8"].read(torch.zeros((1, 5), dtype=torch.uint8), 2, 0, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_zero_stays_zero_and_signs_stay(name: str) -> None:
    vectors = torch.randn(2, 1000)
    vectors[:, ::3] = 0
    vectors[1, 128:384] = 0  # whole blocks
    decoded = round_trip(name, vectors)
    assert not decoded[vectors == 0].any()
    assert not decoded[(decoded.sign() != vectors.sign())].any()
    again = round_trip(name, decoded)
    torch.testing.assert_close(again, decoded, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_the_ends_of_float32(name: str) -> None:
    large, tiny = torch.full((1, 5), torch.finfo(torch.float32).max), torch.full((1, 5), 1e-45)
    assert round_trip(name, large).isfinite().all()
    assert float(round_trip(name, tiny).max()) <= 1e-44
    if name in ("int8", "int4"):
        torch.testing.assert_close(round_trip(name, large), large, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize(("name", "value"), [("int8", float("nan")), ("int4", -float("inf"))])
def test_what_is_not_finite_is_seen_by_all(name: str, value: float) -> None:
    vectors = torch.randn(1, 300)
    vectors[0, 200] = value
    decoded = round_trip(name, vectors)
    assert not decoded[0, 200].isfinite()
    assert decoded[0, :128].isfinite().all()
