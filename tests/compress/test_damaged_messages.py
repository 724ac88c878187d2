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
from lightning_lowbw.compress.sparse_sum import Sparse, SparseSum
from lightning_lowbw.kernels import dispatch

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
            patch.setattr(dispatch, "_faults", {"cpu": "not now"})
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


# The sparse reduce-scatter --------------------------------------------------------------------------------------------

NUM_RANKS, SELECTED = 3, 45


def of_size(message: Tensor, nbytes: int) -> Tensor:
    """Return what arrives of a message: collectives have room for one size."""
    return torch.cat([message[:nbytes], message.new_zeros(max(0, nbytes - message.numel()))])


def sum_plan() -> tuple[SparseSum, list[Sparse]]:
    plan = SparseSum(tuple(NUMELS), SELECTED, (0, 120, 300, sum(NUMELS)), SparseCodec("bfloat16"))
    generator = torch.Generator().manual_seed(1)
    selected = []
    for _ in range(NUM_RANKS):
        positions = torch.randperm(sum(NUMELS), generator=generator)[:SELECTED].sort().values
        selected.append((positions, torch.randn(SELECTED, generator=generator)))
    return plan, selected


@fuzz
@given(damage=damages(), sender=st.integers(1, 2))
def test_an_owner_adds_up_nothing_outside_its_part(damage: tuple[str, list[tuple[int, int]]], sender: int) -> None:
    plan, selected = sum_plan()
    outgoing = [plan.prepare(rank, each) for rank, each in enumerate(selected)]
    received = torch.stack([each.message[0] for each in outgoing])
    received[sender] = of_size(damaged(received[sender], damage), received.shape[1])
    try:
        owned = plan.combine(0, outgoing[0].own, received)
    except ValueError as error:
        return assert_said(error)
    assert ((owned.unsent[0] >= 0) & (owned.unsent[0] < plan.boundaries[1])).all()


@fuzz
@given(damage=damages(), owner=st.integers(0, 2))
def test_the_sums_of_owners_lie_in_their_tensors(damage: tuple[str, list[tuple[int, int]]], owner: int) -> None:
    plan, selected = sum_plan()
    outgoing = [plan.prepare(rank, each) for rank, each in enumerate(selected)]
    gathered = torch.stack(
        [
            plan.combine(rank, outgoing[rank].own, torch.stack([each.message[rank] for each in outgoing])).message
            for rank in range(NUM_RANKS)
        ]
    )
    gathered[owner] = of_size(damaged(gathered[owner], damage), gathered.shape[1])
    try:
        reduced = plan.finish(gathered)
    except ValueError as error:
        return assert_said(error)
    assert list(reduced.boundaries) == sorted(reduced.boundaries)
    assert (reduced.boundaries[0], reduced.boundaries[-1]) == (0, sum(NUMELS))
    for numel, (positions, values) in zip(NUMELS, *plan.split(reduced.mean), strict=True):
        assert positions.shape == values.shape
        assert ((positions >= 0) & (positions < numel)).all()
        assert (positions.diff() > 0).all()


@pytest.mark.parametrize("position", [120, 179])
def test_a_position_in_the_part_of_another_owner_is_refused(position: int) -> None:
    """There is one format for parts of all sizes, and the first is not the widest."""
    plan, selected = sum_plan()
    received = torch.stack([plan.prepare(rank, each).message[0] for rank, each in enumerate(selected)])
    message, _ = plan._pack(torch.tensor([7, position]), torch.ones(2), plan.scatter_capacity)
    received[1] = torch.cat([torch.tensor([2], dtype=torch.int32).view(torch.uint8), message])
    with pytest.raises(ValueError, match="damaged message: positions that are outside of their owner's part"):
        plan.combine(0, plan.prepare(0, selected[0]).own, received)
