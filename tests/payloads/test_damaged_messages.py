"""Messages that have been damaged: an error that says so, or positions that are safe to use.

Compiled passes write where a message tells them, so a position may come out only if it is inside its tensor.
"""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch
from lightning_lowbw.payloads.codec import VALUE_NAMES, SparseCodec

SAID = r"damaged message|A message (of|with) -?\d+ "  # what an error must say
COUNTS, NUMELS = [3, 0, 2, 40], [100, 7, 50, 300]


def damaged(message: Tensor, chance: random.Random) -> Tensor:
    """Flip, exchange or overwrite bytes, or lose or add bytes at the end."""
    data, kind = bytearray(message.numpy().tobytes()), chance.choice(["flip", "swap", "write", "zero", "cut", "longer"])
    for _ in range(chance.randint(1, 8) if kind in ("flip", "swap", "write") else 1):
        at, other, number = chance.randrange(len(data)), chance.randrange(len(data)), chance.randrange(256)
        if kind == "flip":
            data[at] ^= 1 << number % 8
        elif kind == "swap":
            data[at], data[other] = data[other], data[at]
        elif kind == "longer":
            data += bytes([number]) * (1 + at % 9)
        else:
            new = {"write": bytes([number]) * 4, "zero": bytes(len(data)), "cut": b""}[kind]
            data[at:] = new[: len(data) - at] + (data[at + 4 :] if kind == "write" else b"")
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", VALUE_NAMES)
def test_positions_stay_inside_their_tensors(name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(torch.randperm(n)[:k].sort().values, torch.randn(k)) for k, n in zip(COUNTS, NUMELS, strict=True)]
    codec = SparseCodec(name)
    monkeypatch.setattr(dispatch, "_disabled", set() if is_compiled else {"cpu"})
    whole, chance, errors = codec.encode(parts, NUMELS), random.Random(name), list[str]()
    for _ in range(40):
        message = damaged(whole, chance)
        try:
            positions, values = codec.decode(message.unsqueeze(0), COUNTS, NUMELS)
        except ValueError as error:
            errors.append(str(error))
            continue
        assert positions.shape == values.shape == (1, sum(COUNTS))
        for numel, mine in zip(NUMELS, positions[0].split(COUNTS), strict=True):
            assert ((mine >= 0) & (mine < numel)).all()
    assert all(re.search(SAID, error) for error in errors)
    assert 0 < len(errors) < 40
