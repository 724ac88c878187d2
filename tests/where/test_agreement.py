"""Finding out what differs between ranks, on all of them; failing together; digests of exact bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.control import MODULUS
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.where import agreement
from lightning_lowbw.where.agreement import MAX_DIFFERENCES, agree, checksum, digest, failing_together, gather
from tests.ranks import run_ranks

# agree ----------------------------------------------------------------------------------------------------------------


def try_to_agree(facts_by_rank: list[dict[str, object]]) -> str | None:
    try:
        agree("recipe", facts_by_rank[dist.get_rank()])
    except DisagreementError as error:
        return str(error)
    finally:
        dist.barrier()  # nobody is left behind in a collective of agree
    return None


def test_equal_facts_pass() -> None:
    facts: dict[str, object] = {"sparsity": (0.9, 0.999), "name": "dgc", "nothing": None}
    reordered = dict(reversed(facts.items()))
    assert run_ranks(try_to_agree, 3, [facts, dict(facts), reordered]) == [None, None, None]


def test_what_differs_is_named_on_all_ranks() -> None:
    facts: list[dict[str, object]] = [
        {"same": 1, "momentum": 0.9, "type": 1},
        {"same": 1, "momentum": 0.95, "type": 1.0},
        {"same": 1, "momentum": 0.9, "type": 1, "extra": "only here"},
    ]
    messages = run_ranks(try_to_agree, 3, facts)
    assert messages[0] is not None
    assert len(set(messages)) == 1
    assert "recipe" in messages[0]
    assert "momentum: rank 0 has 0.9, rank 1 has 0.95, rank 2 has 0.9" in messages[0]
    assert "type: rank 0 has 1, rank 1 has 1.0, rank 2 has 1" in messages[0]
    assert "extra: rank 0 has nothing, rank 1 has nothing, rank 2 has 'only here'" in messages[0]
    assert "same" not in messages[0].split("\n", 1)[1]


def test_a_long_list_of_differences_is_cut() -> None:
    facts: list[dict[str, object]] = [{f"fact {i}": (rank, i) for i in range(50)} for rank in range(2)]
    message = run_ranks(try_to_agree, 2, facts)[1]
    assert message is not None
    assert message.count("rank 0 has") == MAX_DIFFERENCES
    assert f"and {50 - MAX_DIFFERENCES} more" in message


def test_one_process_agrees_with_itself() -> None:
    agree("recipe", {"sparsity": 0.9})


# gather ---------------------------------------------------------------------------------------------------------------


def meet_at_another_call() -> str | None:
    rank = dist.get_rank()
    assert gather(rank, "rank") == [0, 1, 2]
    try:
        with failing_together():
            pass
        if rank == 1:
            gather({"a": 1}, "dictionary")
        else:
            agree("settings", {"lr": 0.1})
    except DisagreementError as error:
        return str(error)
    return None


def test_ranks_at_another_call_are_told() -> None:
    for message in run_ranks(meet_at_another_call, 3):
        assert message is not None
        assert "They have sent: rank 0 its settings, rank 1 its dictionary, rank 2 its settings." in message


# failing_together -----------------------------------------------------------------------------------------------------


def fail_on(culprits: dict[int, str]) -> tuple[str, str] | None:
    rank = dist.get_rank()
    try:
        with failing_together():
            if rank in culprits:
                raise KeyError(culprits[rank])
    except (KeyError, ConfigurationError) as error:
        return type(error).__name__, str(error)
    finally:
        dist.barrier()
    return None


def test_one_failure_is_everybodys() -> None:
    results = run_ranks(fail_on, 3, {1: "no such file"})
    assert results[1] == ("KeyError", "'no such file'")  # its own error, with its own traceback
    for other in (results[0], results[2]):
        assert other is not None
        assert other[0] == "ConfigurationError"
        assert "rank 1: KeyError: 'no such file'" in other[1]
        assert "rank 0" not in other[1]


def test_several_failures_are_all_told() -> None:
    results = run_ranks(fail_on, 3, {0: "first", 2: "last"})
    assert results[0] == ("KeyError", "'first'")
    assert results[2] == ("KeyError", "'last'")
    assert results[1] is not None
    assert "rank 0: KeyError: 'first'" in results[1][1]
    assert "rank 2: KeyError: 'last'" in results[1][1]


def test_no_failure_is_none() -> None:
    assert run_ranks(fail_on, 2, {}) == [None, None]


def fail_alone() -> None:
    with failing_together():
        raise KeyError("alone")


def test_one_process_fails_as_without() -> None:
    with pytest.raises(KeyError, match="alone"):
        fail_alone()
    with failing_together():
        pass


# digest ---------------------------------------------------------------------------------------------------------------

TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(5, dtype=torch.float64),
    "bfloat16": torch.randn(7).bfloat16(),
    "float16": torch.randn(7).half(),
    "complex": torch.randn(3, dtype=torch.complex64),
    "int64": torch.arange(5),
    "bool": torch.tensor([True, False, True]),
    "0-d": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 5).t(),
    "strided": torch.randn(10)[::2],
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.randn(4)),
}


def flip_one_bit(tensor: Tensor) -> Tensor:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    flat.view(torch.uint8)[-1] ^= 1
    return flat.view(tensor.shape)


@pytest.mark.parametrize("name", TENSORS)
def test_digest_is_of_the_bits(name: str) -> None:
    tensor = TENSORS[name]
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    assert digest([tensor]) == digest([copied])  # of the logical content, however it lies in memory
    assert digest([torch.ones(2), tensor]) == digest([torch.ones(2), copied])
    if tensor.numel() and name != "bool":
        assert digest([flip_one_bit(tensor)]) != digest([tensor])
        assert digest([torch.ones(2), flip_one_bit(tensor)]) != digest([torch.ones(2), tensor])


def test_digest_sees_what_comparison_does_not() -> None:
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    nan = torch.tensor([float("nan")])
    assert digest([nan]) == digest([nan.clone()])
    assert digest([torch.tensor([1.0, 2.0])]) != digest([torch.tensor([2.0, 1.0])])


def digest_of(seed: int) -> str:
    return digest([torch.randn(100, generator=torch.Generator().manual_seed(seed))])


def test_digests_of_processes_compare() -> None:
    first, second = run_ranks(digest_of, 2, 3)
    assert first == second == digest_of(3) != digest_of(4)


# checksum -------------------------------------------------------------------------------------------------------------


def with_steps(tensor: Tensor, steps: dict[int, int]) -> Tensor:
    """Return a copy, in which elements are this many steps of their format away from what they were."""
    changed = tensor.clone()
    bits = changed.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    for place, number in steps.items():
        bits[place] += number
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "all signs": torch.neg,
    "two signs": lambda t: t * torch.tensor([-1.0, -1.0] + [1.0] * (t.shape[1] - 2)).to(t.dtype),
    "signs of a column": lambda t: torch.cat([-t[:, :1], t[:, 1:]], 1),
    "rows in another order": lambda t: t.flip(0),
    "columns in another order": lambda t: t.flip(1),
    "a row moved by one": lambda t: torch.stack([row.roll(1) if number == 3 else row for number, row in enumerate(t)]),
    "one bit": lambda t: with_steps(t, {99: 1}),
    "roundings that add up to nothing": lambda t: with_steps(t, {5: 1, 99: -1, 700: -2, 701: 2}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_checksum_shows_what_a_sum_of_bits_does_not(change: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    other = CHANGES[change](tensor)
    assert not torch.equal(tensor, other)
    first, second = int(checksum([tensor])), int(checksum([other]))
    assert first != second
    assert first % MODULUS != second % MODULUS, "the part of it that is in a mark"
    assert first == int(checksum([tensor.clone()]))


def test_a_checksum_is_of_all_tensors_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    some = [torch.randn(numel, generator=generator) for numel in (5, 0, 300, 300, 1)]
    some += [torch.arange(9), torch.ones(3, dtype=torch.bool), torch.randn(2, 3, dtype=torch.complex64)]
    for length in (agreement.CHUNK_OF_CPU, 64):
        monkeypatch.setattr(agreement, "CHUNK_OF_CPU", length)
        sums = {int(checksum(some)), int(checksum(some[::-1]))}
        for a, b in ((2, 3), (0, 4)):
            swapped = list(some)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            sums.add(int(checksum(swapped)))
        for number, tensor in enumerate(some):
            other = ~tensor if tensor.dtype == torch.bool else tensor + 1
            sums.add(int(checksum([*some[:number], other, *some[number + 1 :]])))
        assert len(sums) == 4 + 7, "the empty one changes nothing"
    assert checksum([]) == checksum([torch.empty(0)]) == 0
    matrix = torch.randn(7, 5)
    assert int(checksum([matrix.t()])) == int(checksum([matrix])), "no copy is made of a transposed one"
    assert int(checksum([matrix[:, :3]])) == int(checksum([matrix[:, :3].contiguous()]))


def test_checksums_of_many_matrices_differ_in_all_bits_of_a_mark() -> None:
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randn(40, 40, generator=generator)
    marks = []
    for _ in range(4 * MODULUS):
        element = torch.randint(0, 1600, (2,), generator=generator)
        other = tensor.clone().view(-1)
        other[element] = torch.nextafter(other[element], torch.tensor([9.0, -9.0]))  # one up, one down
        marks.append(int(checksum([other])) % MODULUS)
    counts = torch.bincount(torch.tensor(marks), minlength=MODULUS)
    assert (counts == 0).float().mean() < 0.04  # exp(-4) is 0.018
    assert int(counts.max()) < 20
