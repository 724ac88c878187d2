"""What has been received is decoded in groups: however small these are, the mean has the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.reference import largest
from lightning_lowbw.sync import exchange
from lightning_lowbw.sync.exchange import ELEMENT_BYTES, Layout, SparseMean

NUMELS = {"a": 90, "b": 18, "c": 400, "d": 4, "e": 64}
WHOLE = [{name: slice(0, numel) for name, numel in NUMELS.items()}]
HALVES = [
    {name: slice(first * numel // 2, (first + 1) * numel // 2) for name, numel in NUMELS.items()} for first in (0, 1)
]
NUM_PARTICIPANTS = 3


def draw_message(payload: TopK, numels: list[int]) -> Tensor:
    parts = []
    for numel in numels:
        values = torch.randn(numel) * 100.0
        positions = largest(values, payload.num_sent(numel))
        parts.append((positions, values[positions]))
    return payload.codec.encode(parts, numels)


def means_of(layout: Layout, gathered: Tensor) -> list[Tensor]:
    """Return the mean of each tensor, then weights that have been stepped by it."""
    damaged = torch.zeros((), dtype=torch.bool)
    mean = SparseMean(layout.payload, layout.numels, lambda: layout.decode(gathered, damaged), damaged.device)
    steps = {name: (torch.empty(numel), torch.linspace(1, 2, numel), 0.3) for name, numel in NUMELS.items()}
    mean.step_(steps)
    return [*mean.dense().values(), *(weight for _, weight, _ in steps.values())]


@pytest.mark.parametrize("parts", [WHOLE, HALVES], ids=["flat", "two levels"])
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"value_dtype": "int4"}, {"mean_over": "senders", "value_dtype": "int2"}], ids=str
)
def test_groups_of_any_size_have_the_same_mean(
    options: dict[str, Any], is_compiled: bool, parts: list[dict[str, slice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(dispatch, "_faults", {"cpu": "not now"})
    payload = TopK(density=0.3, **options)
    numels = [[part.stop - part.start for part in of_rank.values()] for of_rank in parts]
    messages = [[draw_message(payload, each) for _ in range(NUM_PARTICIPANTS)] for each in numels]
    gathered = torch.stack([torch.stack(of_rank) for of_rank in messages])
    layout = Layout(payload, NUMELS, 0.3, parts, [gathered.shape[2]] * len(parts))
    expected = means_of(layout, gathered)
    for num_elements in (1, 30, 100, 300):
        monkeypatch.setattr(exchange, "DECODED_BYTES", ELEMENT_BYTES * num_elements)
        found = list(layout.decode(gathered, torch.zeros((), dtype=torch.bool)))
        assert len(found) > 1
        assert all(each.values.numel() <= num_elements or len(each.spans) == 1 for each in found)
        assert all(a.equal(b) for a, b in zip(means_of(layout, gathered), expected, strict=True))
