"""The mean of sparse vectors, compiled by numba, against its specification: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops import averages, compiled_averages, compiler
from lightning_lowbw.ops.averages import Arrival
from tests.ops.bits import equal_bits

pytestmark = pytest.mark.skipif(not compiler.is_available(), reason="needs numba")

NUMELS, COUNTS = [1, 50, 3000, 70, 3000], [1, 20, 1001, 70, 0]
FIRST, ROWS = [0, 1, 21, 0, 70], [0, 0, 0, 1, 1]


def messages(num_participants: int) -> tuple[Tensor, Tensor]:
    """Return positions that several have sent and others, and values of many magnitudes, zeros among them."""
    shape = 2, num_participants, sum(COUNTS)
    positions = torch.zeros(shape, dtype=torch.int64)
    values = torch.randn(shape) * 1000.0 ** torch.arange(num_participants).view(-1, 1)
    values[..., ::5] = 0.0
    for numel, count, first, row in zip(NUMELS, COUNTS, FIRST, ROWS, strict=True):
        for participant in range(num_participants):
            chosen = torch.randperm(numel)[:count].sort().values
            positions[row, participant, first : first + count] = chosen
    return positions, values


def arrivals(*, steps: bool, sign: int = 1) -> list[Arrival]:
    columns = zip(NUMELS, ROWS, FIRST, COUNTS, strict=True)
    return [
        Arrival(
            torch.full((numel,), float("nan")), row, first, count, torch.linspace(1, 2, numel) if steps else None, rate
        )
        for (numel, row, first, count), rate in zip(columns, [sign * 0.1, 3.0, 1e-3, 0.0, 1.0], strict=True)
    ]


@pytest.mark.parametrize("num_participants", [1, 2, 3, 8])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("steps", [False, True])
def test_average(steps: bool, sign: int, num_participants: int) -> None:
    positions, values = messages(num_participants)
    found, expected, other = (arrivals(steps=steps, sign=sign) for _ in range(3))
    compiled_averages.average_many_(found, positions, values)
    averages.average_many_(expected, positions, values)
    results = [[each.weight if steps else each.out for each in many] for many in (found, expected)]
    assert all(equal_bits(*pair) for pair in zip(*results, strict=True))
    if num_participants > 2:  # else the order would not have been tested
        compiled_averages.average_many_(other, positions.flip(1), values.flip(1))
        turned = [each.weight if steps else each.out for each in other]
        assert not all(equal_bits(*pair) for pair in zip(turned, results[1], strict=True))


def test_messages_need_not_be_contiguous() -> None:
    positions, values = messages(2)
    found, expected = arrivals(steps=True), arrivals(steps=True)
    wide = [torch.cat([each, each], dim=2)[..., : each.shape[2]] for each in (positions, values)]
    compiled_averages.average_many_(found, *wide)
    averages.average_many_(expected, positions, values)
    assert all(equal_bits(a.weight, b.weight) for a, b in zip(found, expected, strict=True))


def test_what_was_in_the_room_plays_no_part_and_the_gradient_is_not_asked_for() -> None:
    """A weight that is a parameter; a room full of NaN."""
    weight = torch.nn.Parameter(torch.ones(4))
    arrival = Arrival(torch.full((4,), float("nan")), 0, 0, 2, weight, 0.5)
    compiled_averages.average_many_([arrival], torch.tensor([[[0, 3]]]), torch.tensor([[[1.0, 2.0]]]))
    assert weight.tolist() == [0.5, 1.0, 1.0, 0.0]


def test_what_is_not_finite_arrives() -> None:
    values = torch.tensor([[[float("inf"), float("nan")], [float("-inf"), 1.0]]])
    positions = torch.tensor([[[0, 3], [0, 3]]])
    weights = [torch.ones(4), torch.ones(4)]
    for module, weight in zip((averages, compiled_averages), weights, strict=True):
        module.average_many_([Arrival(torch.zeros(4), 0, 0, 2, weight, 0.5)], positions, values)
    assert all(weight.isnan().tolist() == [True, False, False, True] for weight in weights)


@pytest.mark.parametrize("steps", [False, True])
def test_positions_over_many_blocks(steps: bool) -> None:
    """More elements than a block of means has, a few of them in each; one block that nobody sends anything of."""
    numel = 5 * compiled_averages.BLOCK + 3
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(numel, generator=generator)[:300].sort().values for _ in range(2)]
    chosen = [each.where(each // compiled_averages.BLOCK != 2, 0).sort().values.unique()[:200] for each in chosen]
    positions, values = torch.stack(chosen).unsqueeze(0), torch.randn((1, 2, 200), generator=generator)
    results = []
    for module in (averages, compiled_averages):
        arrival = Arrival(torch.full((numel,), 7.0), 0, 0, 200, torch.ones(numel) if steps else None, 0.5)
        module.average_many_([arrival], positions, values)
        results.append(arrival.weight if steps else arrival.out)
    assert equal_bits(*results)


@pytest.mark.parametrize("steps", [False, True])
def test_nothing_is_written_beside_a_tensor_where_positions_do_not_ascend(steps: bool) -> None:
    """Such a message is damaged, but each of its positions is inside its tensor."""
    block, beside = compiled_averages.BLOCK, 1 << 15
    room = torch.full((beside + 3 * block + beside,), 5.0)
    tensor = room[beside:-beside]
    positions = torch.tensor([[[2 * block + 5, 3, block, 0], [block + 1, 2, 3 * block - 1, 1]]])
    arrival = Arrival(torch.zeros(3 * block) if steps else tensor, 0, 0, 4, tensor if steps else None, 0.5)
    compiled_averages.average_many_([arrival], positions, torch.ones(1, 2, 4))
    assert (room[:beside] == 5).all()
    assert (room[-beside:] == 5).all()
    expected = torch.full((3 * block,), 5.0) if steps else torch.zeros(3 * block)
    for place, mean in {block: 0.5, block + 1: 0.5, 2 * block: 2.0, 2 * block + 5: 0.5, 3 * block - 1: 0.5}.items():
        expected[place] += -0.5 * mean if steps else mean
    assert tensor.equal(expected)
