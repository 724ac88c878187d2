"""The store of error feedback: flat views of one buffer, by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.payloads.selection import ALIGNMENT, Residuals

CPU, META = torch.device("cpu"), torch.device("meta")
NUMELS = {"a": 5, "empty": 0, "scalar": 1, "b": 200}


def make() -> Residuals:
    residuals = Residuals()
    residuals.ensure(NUMELS, CPU)
    for name in residuals:
        residuals[name].normal_()
    return residuals


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_one_buffer_of_aligned_zeros() -> None:
    residuals = Residuals()
    residuals.ensure(NUMELS, CPU)
    assert list(residuals) == list(NUMELS)
    assert len({storage(residuals[name]) for name in NUMELS}) == 1
    for name, numel in NUMELS.items():
        assert residuals[name].equal(torch.zeros(numel))
        assert residuals[name].storage_offset() % ALIGNMENT == 0


def test_those_that_are_there_stay_until_all_are_moved_into_one_buffer() -> None:
    residuals = make()
    before, state = residuals["a"], residuals.state()
    residuals.ensure({"a": 5, "late": 7}, CPU)
    assert residuals["a"] is before
    assert list(residuals) == [*NUMELS, "late"]
    assert all(residuals[name].equal(state[name]) for name in NUMELS)
    assert storage(residuals["late"]) != storage(residuals["a"])
    residuals.to(META)
    assert all(residuals[name].device == META for name in residuals)
    assert residuals["late"].storage_offset() > 0


def test_another_size_is_refused_and_changes_nothing() -> None:
    residuals = make()
    with pytest.raises(ValueError, match=r"'b' has 200 elements, and 199"):
        residuals.ensure({"new": 3, "b": 199}, CPU)
    assert "new" not in residuals
    residuals.pop("b")
    residuals.ensure({"b": 199}, CPU)
    assert not residuals["b"].any()
