"""How much of each tensor is sent, and the mean of what arrives; that it is the largest is in `tests/sync`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.reference import largest
from lightning_lowbw.payloads import top_k
from lightning_lowbw.payloads.params import small_numel
from lightning_lowbw.payloads.top_k import ELEMENT_BYTES, ChunkLayout, Messages, SparseMean, TopK
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.presets import Compression, LocalSGD


def test_how_many_of_each_chunk_are_sent() -> None:
    """Of the last one, which is shorter, not fewer than its share of a whole one."""
    cases = {
        (1 / 16, 64): ChunkLayout(15, 4, 4),
        (1 / 16, None): ChunkLayout(0, 0, 62),
        (1e-6, 64): ChunkLayout(15, 1, 1),
        (0.99, 64): ChunkLayout(15, 63, 40),
        (1 / 256, 1 << 20): ChunkLayout(0, 4096, 16),
    }
    for (density, chunk), expected in cases.items():
        assert TopK(density=density, chunk=chunk).layout(1000) == expected


def test_bits_per_parameter_and_step_of_the_preset() -> None:
    """A transformer's matrices in 15 local steps: at most 0.02 bits; the positions take under a bit above entropy."""
    numels = [256 * 256] * 16 + [256 * 1024] * 8 + [50_000 * 256]
    bits = 8 * Compression().nbytes(numels)
    assert bits / sum(numels) / 15 < 0.02
    entropy = (math.lgamma(4097) - math.lgamma(65) - math.lgamma(4033)) / math.log(2) / 64
    assert bits / sum(map(Compression().num_sent, numels)) == pytest.approx(10.25, abs=0.01)  # as the card says
    assert entropy + 1 + 2.25 > 10.25


def test_what_is_small_depends_on_what_is_trained() -> None:
    assert small_numel([]) == small_numel([10, 20]) == 1024
    assert small_numel([32 * 32] * 40 + [32] * 40) == 1024
    assert small_numel([6144] * 24) == 6144
    assert small_numel([100_000, 2000, 1000]) == 16384, "the small ones are 2.9 %"
    assert small_numel([90_000, 2000, 1000]) == 2000, "3.2 %: not all of them"
    assert TopK().compresses("", 6144, 6144)
    assert not TopK().compresses("", 6143, 6144)
    assert TopK(min_numel=5000).compresses("", 5000, 6144)


def test_a_mapping_says_the_same_as_a_value() -> None:
    assert LocalSGD(compression={"value_dtype": "int4"}) == LocalSGD(compression=Compression(value_dtype="int4"))
    assert LocalSGD(compression={}).what == Compression()
    assert LocalSGD(compression=None).what == Whole()


# The mean: what has been received is decoded in groups; however small these are, it has the same bits ---------------

NUMELS = {"a": 90, "b": 18, "c": 400, "d": 4, "e": 64}
NUM_PARTICIPANTS = 3


def draw_message(payload: TopK, numels: list[int]) -> Tensor:
    parts = []
    for numel in numels:
        values = torch.randn(numel) * 100.0
        positions = largest(values, payload.num_sent(numel))
        parts.append((positions, values[positions]))
    return payload.codec.encode(parts, numels)


def means_of(layout: Messages, gathered: Tensor) -> list[Tensor]:
    """Return the mean of each tensor, then weights that have been stepped by it, then means of several dtypes."""
    mean = SparseMean(layout, lambda: layout.decode(gathered), gathered.device)
    steps = {name: (torch.empty(numel), torch.linspace(1, 2, numel), 0.3) for name, numel in NUMELS.items()}
    mean.step_(steps)
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float16
    pairs = zip(NUMELS.items(), dtypes, strict=True)
    outs = {name: torch.empty(numel, dtype=dtype) for (name, numel), dtype in pairs}
    mean.step_({name: (out, None, 0.0) for name, out in outs.items()})
    means = mean.dense()
    assert all(out.equal(means[name].to(out.dtype)) for name, out in outs.items())
    return [*means.values(), *(weight for _, weight, _ in steps.values()), *outs.values()]


@pytest.mark.parametrize(
    ("options", "is_compiled", "num_local_ranks"),
    [
        *[({}, True, 1), ({"value_dtype": "int4"}, False, 2)],
        *[({"mean_over": "senders", "value_dtype": "int2"}, *how) for how in ((True, 2), (False, 1))],
    ],
)
def test_groups_of_any_size_have_the_same_mean(
    options: dict[str, Any], is_compiled: bool, num_local_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(dispatch, "_disabled", {"cpu"})
    payload = TopK(density=0.3, **options)
    numels = [numel // num_local_ranks for numel in NUMELS.values()]  # of the part of each local rank
    messages = [[draw_message(payload, numels) for _ in range(NUM_PARTICIPANTS)] for _ in range(num_local_ranks)]
    gathered = torch.stack([torch.stack(of_rank) for of_rank in messages])
    peers: Any = SimpleNamespace(num_local_ranks=num_local_ranks, num_participants=NUM_PARTICIPANTS)
    expected = means_of(Messages.of(payload, NUMELS, peers), gathered)
    for num_elements in (1, 30, 100, 300):
        monkeypatch.setattr(top_k, "DECODED_BYTES", ELEMENT_BYTES * num_elements)
        layout = Messages.of(payload, NUMELS, peers)
        found = list(layout.decode(gathered))
        assert len(found) > 1
        assert all(each.values.numel() <= num_elements or len(each.spans) == 1 for each in found)
        assert all(a.equal(b) for a, b in zip(means_of(layout, gathered), expected, strict=True))
