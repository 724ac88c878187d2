"""Messages that have been damaged on their way: an error that says so, or something that is safe to use.

Compiled passes write where a message tells them, so a position may come out only if it is inside its tensor.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_lowbw.compress.codec import VALUE_NAMES, SparseCodec
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.sync.top_k import Sparse

SAID = "damaged message|A message (of|with) -?\\d+ "  # what an error must say
COUNTS, NUMELS = [3, 0, 2, 40], [100, 7, 50, 300]
Damage = tuple[str, list[tuple[int, int]]]
slow = [HealthCheck.function_scoped_fixture]
fuzz = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=slow)


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """What happens to a message: bits that flip, bytes that are others or change places, an end that is lost or grows.

    Numbers are taken modulo the size of what they are applied to.
    """
    kind = draw(st.sampled_from(["flip", "swap", "write", "zero", "cut", "lengthen"]))
    pairs = st.tuples(st.integers(0, 1 << 20), st.integers(0, 255))
    return kind, draw(st.lists(pairs, min_size=1, max_size=1 if kind in ("cut", "lengthen") else 8))


def damaged(message: Tensor, damage: Damage) -> Tensor:
    kind, places = damage
    data = bytearray(message.numpy().tobytes())
    for where, number in places:
        at = where % len(data)
        if kind == "flip":
            data[at] ^= 1 << number % 8
        elif kind == "swap":
            other = (at + number) % len(data)
            data[at], data[other] = data[other], data[at]
        elif kind == "write":
            data[at : at + 4] = bytes([number] * len(data[at : at + 4]))
        elif kind == "zero":
            data[at:] = bytes(len(data) - at)
        elif kind == "cut":
            del data[at:]
        else:
            data += bytes([number]) * (1 + where % 9)
    return torch.tensor(list(data), dtype=torch.uint8)


def fields() -> tuple[list[Sparse], SparseCodec]:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for count, numel in zip(COUNTS, NUMELS, strict=True):
        positions = torch.randperm(numel, generator=generator)[:count].sort().values
        parts.append((positions, torch.randn(count, generator=generator)))
    return parts, SparseCodec("float32")


@fuzz
@given(damage=damages(), name=st.sampled_from(VALUE_NAMES), is_compiled=st.booleans())
def test_positions_stay_inside_their_tensors(damage: Damage, name: str, is_compiled: bool) -> None:
    parts, codec = fields()[0], SparseCodec(name)  # type: ignore[arg-type]
    whole = codec.encode(parts, NUMELS)
    message = damaged(whole, damage)
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(dispatch, "_disabled", {"cpu"})
        try:
            positions, values = codec.decode(message.unsqueeze(0), COUNTS, NUMELS)
        except ValueError as error:
            assert_said(error)
            assert not message.equal(whole)
            return
    assert positions.shape == values.shape == (1, sum(COUNTS))
    assert values.dtype == torch.float32
    for numel, mine in zip(NUMELS, positions[0].split(COUNTS), strict=True):
        assert ((mine >= 0) & (mine < numel)).all()
    if message.equal(whole):
        assert positions[0].equal(torch.cat([each for each, _ in parts]))


def assert_said(error: ValueError) -> None:
    with pytest.raises(ValueError, match=SAID):
        raise error
