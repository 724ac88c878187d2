"""Finding out what differs between ranks, on all of them; failing together; digests of exact bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import MAX_DIFFERENCES, agree, digest, failing_together, gather
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.kernels import tensors
from lightning_lowbw.kernels.tensors import checksum
from lightning_lowbw.sync.status import MODULUS
from tests.ranks import run_ranks


def try_to_agree(cases: list[list[dict[str, object]]]) -> list[str | None]:
    """Return, of each case, what is said about the facts of two ranks."""
    said: list[str | None] = []
    for facts_by_rank in cases:
        try:
            agree("recipe", facts_by_rank[dist.get_rank()])
            said.append(None)
        except DisagreementError as error:
            said.append(str(error))
    return said


def test_what_differs_is_named_on_all_ranks_and_equal_facts_pass() -> None:
    settings: dict[str, object] = {"sparsity": (0.9, 0.999), "name": "dgc", "nothing": None}
    different: list[dict[str, object]] = [
        {"same": 1, "momentum": 0.9, "type": 1},
        {"same": 1, "momentum": 0.95, "type": 1.0, "extra": "only here"},
    ]
    long: list[dict[str, object]] = [{f"fact {i}": (rank, i) for i in range(50)} for rank in range(2)]
    first, second = run_ranks(try_to_agree, 2, [[settings, dict(reversed(settings.items()))], different, long])
    assert first == second
    equal, message, shortened = first
    assert equal is None
    assert message == (
        "The ranks disagree about the recipe; make it the same everywhere:\n"
        "  momentum: rank 0 has 0.9, rank 1 has 0.95\n"
        "  type: rank 0 has 1, rank 1 has 1.0\n"
        "  extra: rank 0 has nothing, rank 1 has 'only here'"
    )
    assert shortened.count("rank 0 has") == MAX_DIFFERENCES
    assert shortened.endswith(f"and {50 - MAX_DIFFERENCES} more")
    agree("recipe", settings)  # one process, with itself


def meet_at_another_call() -> str:
    assert gather(dist.get_rank(), "rank") == [0, 1]
    call = partial(gather, 1, "dictionary") if dist.get_rank() == 1 else partial(agree, "settings", {"lr": 0.1})
    with pytest.raises(DisagreementError) as caught:
        call()
    return str(caught.value)


def test_ranks_at_another_call_are_told() -> None:
    for message in run_ranks(meet_at_another_call, 2):
        assert "They have sent: rank 0 its settings, rank 1 its dictionary." in message


def fail_on(culprits: dict[int, str]) -> tuple[str, str] | None:
    try:
        with failing_together():
            if dist.get_rank() in culprits:
                raise KeyError(culprits[dist.get_rank()])
    except (KeyError, ConfigurationError) as error:
        return type(error).__name__, str(error)
    return None


def test_failures_of_some_are_everybodys() -> None:
    first, second, last = run_ranks(fail_on, 3, {0: "first", 2: "last"})
    assert (first, last) == (("KeyError", "'first'"), ("KeyError", "'last'"))  # its own, with its own traceback
    told = "Other ranks cannot go on:\n  rank 0: KeyError: 'first'\n  rank 2: KeyError: 'last'"
    assert second == ("ConfigurationError", told)
    with pytest.raises(KeyError, match="alone"), failing_together():
        raise KeyError("alone")


# Digests and checksums ------------------------------------------------------------------------------------------------

TENSORS = [
    *(torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.randn(7).bfloat16(), torch.arange(5)),
    *(torch.randn(3, dtype=torch.complex64), torch.tensor(1.5), torch.randn(3, 5).t(), torch.randn(10)[::2]),
    *(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), torch.nn.Parameter(torch.randn(4))),
]


def test_a_digest_is_of_the_bits() -> None:
    for tensor in TENSORS:
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        assert digest([torch.ones(2), tensor]) == digest([torch.ones(2), copied])  # however it lies in memory
        copied.view(-1).view(torch.uint8)[-1] ^= 1
        assert digest([torch.ones(2), copied]) != digest([torch.ones(2), tensor])


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
    "a row moved by one": lambda t: torch.stack([row.roll(1) if number == 3 else row for number, row in enumerate(t)]),
    "one bit": lambda t: with_steps(t, {99: 1}),
    "roundings that add up to nothing": lambda t: with_steps(t, {5: 1, 99: -1, 700: -2, 701: 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_checksum_shows_what_a_sum_of_bits_does_not(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    first = int(checksum([tensor]))
    assert first == int(checksum([tensor.clone()]))
    for name, change in CHANGES.items():
        second = int(checksum([change(tensor)]))
        assert first % MODULUS != second % MODULUS, f"{name}: the part of it that is in a mark"


def test_a_checksum_is_of_all_tensors_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    some = [torch.randn(numel, generator=generator) for numel in (5, 0, 300, 300, 1)]
    some += [torch.arange(9), torch.ones(3, dtype=torch.bool), torch.randn(2, 3, dtype=torch.complex64)]
    for length in (tensors.CHUNK_OF_CPU, 64):
        monkeypatch.setattr(tensors, "CHUNK_OF_CPU", length)
        sums = {int(checksum(some)), int(checksum(some[::-1])), int(checksum([*some[:2], some[3], some[2], *some[4:]]))}
        for number, tensor in enumerate(some):
            other = ~tensor if tensor.dtype == torch.bool else tensor + 1
            sums.add(int(checksum([*some[:number], other, *some[number + 1 :]])))
        assert len(sums) == 3 + 7, "the empty one changes nothing"
    assert checksum([]) == checksum([torch.empty(0)]) == 0
    matrix = torch.randn(7, 5)
    assert int(checksum([matrix[:, :3]])) == int(checksum([matrix[:, :3].contiguous()]))
