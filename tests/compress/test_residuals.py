"""The store of error feedback: flat views of one buffer, by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.compress.selection import ALIGNMENT, Residuals

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
    assert residuals.norm() == 0.0
    residuals.ensure(NUMELS, CPU)
    assert list(residuals) == list(residuals) == list(NUMELS)
    assert len(residuals) == 4
    assert "a" in residuals
    assert "c" not in residuals
    assert len({storage(residuals[name]) for name in NUMELS}) == 1
    for name, numel in NUMELS.items():
        assert residuals[name].shape == (numel,)
        assert residuals[name].dtype == torch.float32
        assert residuals[name].is_contiguous()
        assert residuals[name].storage_offset() % ALIGNMENT == 0
        assert not residuals[name].any()


def test_those_that_are_there_stay() -> None:
    residuals = make()
    before, state = residuals["a"], residuals.state()
    residuals.ensure({"a": 5, "new": 7}, CPU)
    assert residuals["a"] is before
    assert list(residuals) == [*NUMELS, "new"]
    assert all(residuals[name].equal(state[name]) for name in NUMELS)
    residuals.ensure({}, CPU)


def test_another_size_is_refused_and_changes_nothing() -> None:
    residuals = make()
    with pytest.raises(ValueError, match=r"'b' has 200 elements, and 199"):
        residuals.ensure({"new": 3, "b": 199}, CPU)
    assert "new" not in residuals
    residuals.pop("b")
    residuals.ensure({"b": 199}, CPU)
    assert not residuals["b"].any()


def test_moving_puts_all_into_one_buffer() -> None:
    residuals = make()
    residuals.ensure({"late": 3}, CPU)
    assert storage(residuals["late"]) != storage(residuals["a"])
    residuals.to(META)
    assert all(residuals[name].device == META for name in residuals)
    assert residuals["late"].storage_offset() > 0
    assert list(residuals) == [*NUMELS, "late"]


def test_the_norm_is_of_all_together() -> None:
    residuals = make()
    expected = torch.cat([residuals[name] for name in residuals]).norm()
    assert residuals.norm() == pytest.approx(float(expected), rel=1e-6)


def test_a_state_is_a_copy_and_holds_no_more_than_it_says() -> None:
    residuals = make()
    state = residuals.state()
    for name, each in state.items():
        assert each.untyped_storage().nbytes() == 4 * NUMELS[name]
    kept = {name: each.clone() for name, each in state.items()}
    for name in residuals:
        residuals[name].zero_()
    assert all(state[name].equal(kept[name]) for name in NUMELS)


def test_float64_is_kept_apart_and_may_come_later() -> None:
    residuals = Residuals()
    residuals.ensure({"a": 5, "wide": 3}, CPU, wide=["wide"])
    residuals["wide"][0], residuals["a"][0] = 1 + 1e-12, 2.0
    other = Residuals()
    other.load(residuals.state())
    assert [other[name].dtype for name in other] == [torch.float32, torch.float64]
    assert float(other["wide"][0]) == 1 + 1e-12
    other.ensure({"a": 5, "wide": 3}, CPU, wide=["a", "wide"])  # a model in double precision goes on
    assert other["a"].dtype == torch.float64
    assert other["a"].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]


def test_loading_takes_the_place_of_what_was_there() -> None:
    state, other = make().state(), Residuals()
    other.ensure({"old": 3}, CPU)
    other.load({**state, "square": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert list(other) == [*NUMELS, "square"]
    assert all(other[name].equal(state[name]) for name in NUMELS)
    assert other["square"].equal(torch.ones(6))
    assert len({storage(other[name]) for name in other}) == 1
    assert all(other[name].dtype == torch.float32 for name in other)
    other["a"].zero_()
    assert state["a"].any()
    other.load({})
    assert len(other) == 0
