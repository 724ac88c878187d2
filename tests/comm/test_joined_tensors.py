"""Ranges of joined tensors are those of their concatenation."""

from __future__ import annotations

import pytest
import torch

from lightning_lowbw.sync.quantized import Joined

NUMELS = (0, 3, 0, 1, 5, 0)


@pytest.mark.parametrize("start", range(11))
@pytest.mark.parametrize("numel", [0, 1, 2, 4, 12])
def test_ranges_are_those_of_the_concatenation(start: int, numel: int) -> None:
    tensors = [torch.randn(each) for each in NUMELS]
    whole = torch.cat([*tensors, torch.zeros(20)])
    joined = Joined(tensors)
    assert joined.numel == 9
    read = joined.read(start, numel, torch.float32)
    assert read.equal(whole[start : start + numel])
    out, values = torch.ones(numel), torch.randn(numel)
    joined.add_to_(start, out)
    assert out.equal(whole[start : start + numel] + 1)
    joined.write_(start, values)
    whole[start : start + numel] = values
    assert torch.cat(tensors).equal(whole[:9])
    joined.add_(start, values)
    whole[start : start + numel] += values
    assert torch.cat(tensors).equal(whole[:9])


def test_what_lies_in_one_tensor_is_no_copy() -> None:
    tensors = [torch.zeros(4), torch.zeros(4)]
    joined = Joined(tensors)
    view = joined.read(4, 3, torch.float32)
    view.fill_(2)
    joined.write_(4, view)
    assert tensors[1].tolist() == [2, 2, 2, 0]
    for copy in (joined.read(3, 2, torch.float32), joined.read(4, 3, torch.float64), joined.read(6, 3, torch.float32)):
        copy.fill_(7)
    assert tensors[1].tolist() == [2, 2, 2, 0]
