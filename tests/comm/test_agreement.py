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
from tests.ranks import on_ranks

DIFFERENT: list[dict[str, object]] = [
    {"same": 1, "momentum": 0.9, "type": 1},
    {"same": 1, "momentum": 0.95, "type": 1.0, "extra": "only here"},
]
TOLD = (
    "The ranks disagree about the recipe; make it the same everywhere:\n"
    "  momentum: rank 0 has 0.9, rank 1 has 0.95\n"
    "  type: rank 0 has 1, rank 1 has 1.0\n"
    "  extra: rank 0 has nothing, rank 1 has 'only here'"
)


@on_ranks()
def test_what_differs_is_named_on_all_ranks_and_equal_facts_pass() -> None:
    rank, settings = dist.get_rank(), {"sparsity": (0.9, 0.999), "name": "dgc", "nothing": None}
    agree("recipe", dict(reversed(settings.items())) if rank else settings)
    with pytest.raises(DisagreementError) as caught:
        agree("recipe", DIFFERENT[rank])
    assert str(caught.value) == TOLD
    with pytest.raises(DisagreementError) as caught:
        agree("recipe", {f"fact {i}": (rank, i) for i in range(50)})
    assert str(caught.value).count("rank 0 has") == MAX_DIFFERENCES
    assert str(caught.value).endswith(f"and {50 - MAX_DIFFERENCES} more")


@on_ranks()
def test_ranks_at_another_call_are_told() -> None:
    assert gather(dist.get_rank(), "rank") == [0, 1]
    call = partial(gather, 1, "dictionary") if dist.get_rank() == 1 else partial(agree, "settings", {"lr": 0.1})
    with pytest.raises(DisagreementError, match=r"They have sent: rank 0 its settings, rank 1 its dictionary\."):
        call()


@on_ranks(3)
def test_failures_of_some_are_everybodys() -> None:
    """With an own one's traceback."""
    culprits = {0: "first", 2: "last"}
    mine = culprits.get(dist.get_rank())
    told = "Other ranks cannot go on:\n  rank 0: KeyError: 'first'\n  rank 2: KeyError: 'last'"

    def fail() -> None:
        with failing_together():
            if mine:
                raise KeyError(mine)

    with pytest.raises(KeyError if mine else ConfigurationError) as caught:
        fail()
    assert str(caught.value) == (f"'{mine}'" if mine else told)


def test_one_process_agrees_and_fails_with_itself() -> None:
    agree("recipe", {"name": "dgc"})
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
