"""Sparse pseudo-gradients: the largest of each chunk are sent, all else is kept, and the size is known beforehand."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.compress.codec import MAX_NUMEL, VALUE_NAMES
from lightning_lowbw.compress.selection import Selection
from lightning_lowbw.compress.top_k import Compression, TopK, as_compression, small_numel
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels import reference
from lightning_lowbw.kernels.reference import Arrival, Segment

NUMELS = [1, 7, 64, 65, 127, 128, 1000]
CHUNKED = {"density": 1 / 16, "chunk": 64, "min_numel": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "chunked": CHUNKED,
    "per tensor": {**CHUNKED, "chunk": None},
    "one of each": {**CHUNKED, "density": 1e-6},
    "nearly all": {**CHUNKED, "density": 0.99},
    "larger than all": {**CHUNKED, "density": 1 / 256, "chunk": 1 << 20},
}


def make_changes(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def zeros() -> list[Tensor]:
    return [torch.zeros(numel) for numel in NUMELS]


def send_(payload: TopK, residuals: list[Tensor], changes: list[Tensor]) -> Tensor:
    """Return one participant's message, as `sync.exchange` makes it; the rest stays in the residuals."""
    segments = {}
    for number, (residual, change) in enumerate(zip(residuals, changes, strict=True)):
        layout = payload.layout(residual.numel())
        k = layout.k if payload.chunk else layout.k_last
        k_last = layout.k_last if payload.chunk else 0
        residual.mul_(payload.decay)
        segments[str(number)] = Segment(
            residual=residual,
            momentum_buffer=None,
            gradient=change,
            weight=None,
            k=k,
            chunk=payload.chunk,
            k_last=k_last,
        )
    parts = Selection().compress_(segments, masking=False)
    return payload.codec.encode(parts, [residual.numel() for residual in residuals], residuals)


def receive(payload: TopK, messages: list[Tensor], numels: list[int]) -> list[Tensor]:
    """Return the mean of each tensor, from the messages of all participants."""
    means = [torch.empty(numel) for numel in numels]
    counts = [payload.num_sent(numel) for numel in numels]
    firsts = accumulate(counts, initial=0)
    arrivals = [Arrival(mean, 0, first, count) for mean, first, count in zip(means, firsts, counts, strict=False)]
    decoded = payload.decode(torch.stack(messages).unsqueeze(0), numels, None)
    reference.average_many_(arrivals, *decoded, over_senders=payload.mean_over == "senders")
    return means


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value_dtype", VALUE_NAMES)
def test_what_is_sent_and_what_is_kept_are_what_was_there(layout: str, value_dtype: str) -> None:
    """To the bit, except with two levels, which may be far from a value: then to a rounding of the difference."""
    compression = Compression(**{**LAYOUTS[layout], "value_dtype": value_dtype})
    residuals = zeros()
    for step in range(3):
        changes = make_changes(step)
        expected = [residual * 0.95 + change for residual, change in zip(residuals, changes, strict=True)]
        message = send_(compression, residuals, changes)
        assert message.numel() == compression.nbytes(NUMELS)
        sent = receive(compression, [message], NUMELS)
        for kept, each, before in zip(residuals, sent, expected, strict=True):
            if value_dtype == "int2":
                torch.testing.assert_close(kept + each, before, rtol=1e-6, atol=1e-6)
            else:
                assert (kept.double() + each.double()).float().equal(before)
            assert int((each != 0).sum()) == compression.num_sent(each.numel())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_of_each_chunk_are_sent(layout: str) -> None:
    compression = Compression(**{**LAYOUTS[layout], "value_dtype": "float32"})
    changes = make_changes(1)
    sent = receive(compression, [send_(compression, zeros(), changes)], NUMELS)
    for change, each in zip(changes, sent, strict=True):
        chunk = compression.chunk or change.numel()
        for first in range(0, change.numel(), chunk):
            of_chunk, of_sent = change[first : first + chunk], each[first : first + chunk]
            numel, density = of_chunk.numel(), compression.density
            least = 1 if compression.chunk is None else max(1, round(min(compression.chunk, 4096) * density))
            count = min(numel, max(round(numel * density), least))
            assert int((of_sent != 0).sum()) == count
            assert of_sent.abs().sort().values[-count:].equal(of_chunk.abs().sort().values[-count:])


def test_the_mean_is_over_the_senders_of_an_element_in_their_order() -> None:
    compression = Compression(**{**LAYOUTS["nearly all"], "density": 0.5, "value_dtype": "float32"})
    messages = [send_(compression, zeros(), make_changes(rank)) for rank in range(3)]
    alone, seen = [receive(compression, [message], NUMELS) for message in messages], set()
    for number, mean in enumerate(receive(compression, messages, NUMELS)):
        senders = sum((sent[number] != 0).float() for sent in alone)
        seen |= set(senders.tolist())
        parts = [sent[number] / senders.clamp(min=1) for sent in alone]
        assert mean.equal(torch.zeros_like(mean) + parts[0] + parts[1] + parts[2])
    assert seen == {0.0, 1.0, 2.0, 3.0}


def test_a_dead_chunk_is_no_sender() -> None:
    compression = Compression(**{**CHUNKED, "value_dtype": "float32"})
    dead, alive = torch.zeros(1000), torch.zeros(1000)
    alive[0] = 1.0
    messages = [send_(compression, [torch.zeros(1000)], [each]) for each in (dead, alive)]
    (mean,) = receive(compression, messages, [1000])
    assert mean[0] == 1.0


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
    assert TopK().takes("", 6144, 6144)
    assert not TopK().takes("", 6143, 6144)
    assert TopK(min_numel=5000).takes("", 5000, 6144)


@pytest.mark.parametrize(
    ("num_participants", "density", "numel", "scatters"),
    [
        (9, 0.25, 10**9, False),
        (16, 0.001, 40_000_000, False),
        (16, 0.001, 41_000_000, True),
        (16, 0.25, 1_000_000, True),
        (64, 0.001, 17_000_000, False),
        (64, 0.001, 18_000_000, True),
        (64, 0.001, MAX_NUMEL + 1, False),  # has no positions
    ],
)
def test_auto_scatters_where_it_costs_less_than_half(
    num_participants: int, density: float, numel: int, scatters: bool
) -> None:
    def chosen(is_two_level: bool = False, **options: Any) -> str:
        numels = [numel // 2, numel - numel // 2]
        return TopK(**options).collective(numels, density, num_participants, is_two_level=is_two_level)

    assert chosen() == ("reduce_scatter" if scatters else "all_gather")
    assert chosen(exchange="reduce_scatter") == "reduce_scatter"
    assert {chosen(exchange="all_gather"), chosen(mean_over="senders"), chosen(is_two_level=True)} == {"all_gather"}


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        ({"density": 1.0}, "density=1.0"),
        ({"density": 0}, "density=0"),
        ({"density": math.nan}, "density=nan"),
        ({"chunk": 0}, "chunk=0"),
        ({"chunk": 64.0}, "chunk=64.0"),
        ({"min_numel": True}, "min_numel=True"),
        ({"decay": 1.1}, "decay=1.1"),
        ({"value_dtype": "int3"}, "int2"),
        ({"top_k": 64}, "no top_k: choose among density"),
        ("int2", "compression='int2'"),
        (True, "compression=True"),
    ],
)
def test_what_cannot_be_is_refused(choice: Any, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        as_compression(choice)


def test_a_mapping_says_the_same_as_a_value() -> None:
    assert as_compression({"value_dtype": "int4"}) == as_compression(Compression(value_dtype="int4"))
    assert as_compression({}) == Compression()
    assert as_compression(None) is None
