"""Dense values in few bits at the ends of what they can hold: zeros, signs, the largest numbers, and none.

The values themselves are those of the oracle, to the bit: tests/payloads/test_quantized.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.payloads.quantized import FORMATS, LinearFormat
from tests.quantized import decode, encode


def round_trip(name: str, vectors: Tensor) -> Tensor:
    value_format = FORMATS[name]
    return decode(value_format, encode(value_format, vectors), vectors.shape[1])


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
    if not isinstance(FORMATS[name], LinearFormat):  # whose errors are those of the oracle in test_quantized.py
        torch.testing.assert_close(decoded, vectors, rtol=2.0**-8, atol=1e-7)
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
