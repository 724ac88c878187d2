"""The control message: sums, faults and marks of all ranks in one row of numbers."""

from __future__ import annotations

import math

import pytest
import torch
from lightning_lowbw.engine.control import (
    MODULUS,
    SAVE,
    STOP,
    Control,
    control_message,
    counts_of,
    flags,
    make_mark,
    read_flags,
    requests_of,
)
from lightning_lowbw.engine.faults import (
    OF_GRADIENTS,
    OF_LAST,
    OF_WEIGHTS,
    Kind,
    first_fault,
    first_reported,
    numbers_of,
)
from torch import Tensor

from lightning_lowbw.ops.reference import is_finite

CPU = torch.device("cpu")


def messages(faults: list[float], marks: list[Tensor | int]) -> list[Tensor]:
    num_ranks = len(faults)
    return [
        control_message([1.0, 0.5 * rank], faults[rank], marks[rank], rank, num_ranks, CPU) for rank in range(num_ranks)
    ]


def test_it_is_summed_and_read() -> None:
    rows = messages([0.0, 3.0, -2.0], [7, 7, torch.tensor(8)])
    assert all(row.dtype == torch.float32 and row.shape == (2 + 2 * 3,) for row in rows)
    control = Control.read(sum(rows, torch.zeros(8)), 3)
    assert control == Control([3.0, 1.5], [0, 3, -2], [7, 7, 8])


def test_a_rank_writes_only_numbers_of_its_own() -> None:
    for rank, row in enumerate(messages([5.0, 5.0], [9, 9])):
        own = torch.zeros(4).index_fill_(0, torch.tensor([rank, rank + 2]), 1.0).bool()
        assert torch.equal(row[2:] != 0, own)


def test_marks_are_exact_in_float32() -> None:
    largest = max(int(make_mark(MODULUS - 1, [torch.tensor([float(number)])])) for number in range(8 * MODULUS))
    assert largest == MODULUS**2 - 1
    assert Control.read(sum(messages([0.0] * 2, [largest] * 2), torch.zeros(6)), 2).marks == [MODULUS**2 - 1] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_requests_are_told_beside_the_largest_mark_at_no_cost(rank: int) -> None:
    mark = MODULUS**2 - 1
    rows = [control_message([], 0.0, mark, 0, 2, CPU), control_message([], 0.0, torch.tensor(mark), 1, 2, CPU)]
    quiet = rows[0] + rows[1]
    rows[rank] = control_message([], 0.0, [mark, torch.tensor(mark)][rank], rank, 2, CPU, STOP | SAVE)
    control = Control.read(rows[0] + rows[1], 2)
    assert control == Control([], [0, 0], [mark, mark], STOP | SAVE)
    assert Control.read(quiet, 2).requests == 0
    assert len(quiet) == len(rows[rank])


@pytest.mark.parametrize("requests", [0, STOP, SAVE, STOP | SAVE])
def test_requests_are_told_as_counts_and_as_flags(requests: int) -> None:
    assert requests_of(*(sum(each) for each in zip(counts_of(requests), counts_of(0), strict=True))) == requests
    rows = [flags(0, CPU), flags(requests, CPU, torch.tensor(5)), flags(0, CPU, torch.tensor(3.0))]
    assert all(row.dtype == torch.float32 and row.shape == (5,) for row in rows)
    assert read_flags(torch.stack(rows).amax(0)) == (5, requests, True)
    batches = [flags(requests, CPU, batch=batch) for batch in (MODULUS - 1, MODULUS - 1, MODULUS)]
    assert read_flags(torch.stack(batches[:2]).amax(0)) == (0, requests, True)
    assert read_flags(torch.stack(batches).amax(0)) == (0, requests, False)


def test_marks_tell_counts_and_weights_apart() -> None:
    weights = [torch.randn(5), torch.randn(3, 2), torch.randn(2, dtype=torch.complex64)]
    mark = int(make_mark(3, weights))
    assert mark == int(make_mark(3 + MODULUS, [weight.clone() for weight in weights])) != int(make_mark(4, weights))
    assert divmod(mark, MODULUS)[1] == 3 == make_mark(3, None)
    weights[1][2, 1] = torch.nextafter(weights[1][2, 1], torch.tensor(math.inf))
    assert int(make_mark(3, weights)) != mark


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_finite_tensors_are_told_from_others(dtype: torch.dtype) -> None:
    assert is_finite(torch.zeros(0, 3, dtype=dtype)).item()
    assert is_finite(torch.zeros((), dtype=dtype)).item()
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((4, 3), largest, dtype=dtype)).item(), "a norm would overflow"
    for bad in (math.nan, math.inf, -math.inf):
        tensor = torch.full((4, 3), -largest, dtype=dtype)
        tensor[2, 1] = complex(0, bad) if dtype.is_complex else bad
        assert not is_finite(tensor).item()


@pytest.mark.parametrize("kinds", [OF_GRADIENTS, OF_WEIGHTS, OF_LAST])
def test_each_number_is_of_one_fault(kinds: tuple[Kind, ...]) -> None:
    """In the order of the kinds, whose number of flags is that of `first_fault`."""
    for num_tensors in (0, 1, 5):
        numbers = numbers_of(kinds, num_tensors)
        negative = list(numbers.pop(Kind.LAYOUT, []))
        assert negative in ([], [-1 - index for index in range(num_tensors)])
        positive = [number for of_kind in numbers.values() for number in of_kind]
        assert positive == list(range(1, len(positive) + 1))
        assert {kind for kind, mine in numbers.items() if len(mine) == 1} >= {Kind.DAMAGED, Kind.ROUNDED}
    assert list(kinds) == sorted(kinds, key=list(Kind).index)


def test_the_fault_that_may_have_caused_the_others_is_reported() -> None:
    """Rank 0 has a weight that is not finite, ranks 2 and 3 a residual: the message names rank 2."""
    numbers = numbers_of(OF_WEIGHTS, 4)
    residual, weight = numbers[Kind.ROUNDED][0], numbers[Kind.WEIGHT][3]
    assert first_reported([weight, 0, residual, residual], numbers) == (residual, 2)
    assert first_reported([0, weight, weight - 1], numbers) == (weight, 1)
    assert first_reported([weight, residual, weight + 1], numbers) == (weight + 1, 2), "a number that no rank can have"
    assert first_reported([0, 0], numbers) is None


@pytest.mark.parametrize(
    ("are_finite", "fault"), [([True], 0), ([True] * 3, 0), ([False], 1), ([True, True, False, False], 3)]
)
def test_the_first_that_is_not_finite_is_named(are_finite: list[bool], fault: int) -> None:
    told = first_fault([torch.tensor(not each) for each in are_finite], CPU)
    assert told.dtype == torch.int64
    assert told.item() == fault
