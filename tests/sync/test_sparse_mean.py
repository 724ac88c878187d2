"""What has been received is decoded in groups: however small these are, the mean has the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.reference import largest
from lightning_lowbw.payloads import top_k
from lightning_lowbw.payloads.top_k import ELEMENT_BYTES, Messages, SparseMean, TopK

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
