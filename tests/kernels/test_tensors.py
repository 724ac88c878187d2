"""Lists of tensors in one call each, against a loop over them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.kernels.tensors import (
    NUM_SAMPLED,
    copy_all_,
    differences,
    download,
    has_gaps,
    in_flats,
    relative_distance,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(device: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor]:
    shapes = ((3,), (), (0, 2), (2, 3, 4, 5), (7, 1, 1, 1), (6, 5, 1, 1))
    some = [torch.randn(shape, device=device).to(dtype) for dtype in dtypes for shape in shapes]
    return [each.to(memory_format=torch.channels_last) if each.dim() == 4 else each for each in some]


def test_tensors_are_joined_by_dtype_and_device() -> None:
    """A model on a GPU may have a buffer on the host."""
    some = [torch.ones(3), torch.ones(2, device="meta"), torch.full((2, 2), 2.0, dtype=torch.bfloat16), torch.zeros(4)]
    doubled = in_flats(lambda flat: 2 * flat, some)
    assert [(each.device, each.dtype, each.shape) for each in doubled] == [(t.device, t.dtype, t.shape) for t in some]
    assert [doubled[0].tolist(), doubled[2].tolist()] == [[2.0] * 3, [[4.0] * 2] * 2]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_those_of_a_loop(device: str) -> None:
    sources = [each.float().contiguous() for each in tensors(device)]
    targets = [torch.zeros_like(each) for each in tensors(device)]
    targets.append(torch.zeros(4, 3, device=device).t())  # neither contiguous nor alike
    sources.append(torch.randn(3, 4, device=device))
    copy_all_(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))


def test_each_call_has_lists_of_one_dtype_and_equal_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch copies a list of several dtypes in a wrong dtype in some releases, or tensor by tensor."""
    calls = []

    def spy(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append(targets)
        assert len({each.dtype for each in targets}) == len({each.dtype for each in sources}) == 1
        assert [each.stride() for each in targets] == [each.stride() for each in sources]
        assert not any(map(has_gaps, targets))

    monkeypatch.setattr(torch, "_foreach_copy_", spy)
    some, gaps = tensors("cpu"), torch.empty(5, 4)[:, ::2]
    assert has_gaps(gaps)
    copy_all_([*some, gaps], [*(each.float().contiguous() for each in some), torch.empty(5, 4)[:, ::2]])
    assert len(calls) == len(DTYPES)
    copy_all_([torch.empty(8, 4, 1, 1)], [torch.empty(8, 4, 1, 1, memory_format=torch.channels_last)])
    assert [each.shape for each in calls[-1]] == [(32,)]


@pytest.mark.parametrize("device", DEVICES)
def test_differences_are_those_of_a_loop(device: str) -> None:
    now, before = tensors(device, DTYPES[::2]), tensors(device, DTYPES[::2])
    now[0][:2] = before[0][:2] = torch.tensor([math.inf, -math.inf])
    found = differences(now, before)
    assert torch.equal(found[0][:2], torch.zeros(2, device=device))
    for each, mine, theirs in zip(found, now, before, strict=True):
        assert (each.dtype, each.stride()) == (mine.dtype, mine.stride())
        assert torch.equal(each, torch.where(mine == theirs, 0.0, mine - theirs))
    assert differences([], []) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [5, 2 * NUM_SAMPLED])
def test_the_distance_is_that_of_all_elements_or_of_a_sample(device: str, numel: int) -> None:
    means = [torch.randn(numel, device=device), torch.randn(2, 3, 4, 5, device=device)]
    own: list[Any] = [(means[0] + 0.1).bfloat16(), (means[1] - 0.3).to(memory_format=torch.channels_last)]
    stride = max(1, numel // NUM_SAMPLED)
    pairs = [(own[0][::stride].double(), means[0][::stride].double(), stride), (own[1].double(), means[1].double(), 1)]
    apart = sum(scale * (mine - mean).square().sum() for mine, mean, scale in pairs)
    norm = sum(scale * mean.square().sum() for _, mean, scale in pairs)
    torch.testing.assert_close(relative_distance(own, means).double(), (apart / norm).sqrt(), rtol=1e-5, atol=0.0)


def test_numbers_that_wait_to_be_read_keep_no_bucket() -> None:
    bucket = torch.arange(1000.0)
    read: Any = download(bucket[-2:])
    assert read.__self__.untyped_storage().nbytes() == 2 * 4
    assert read() == [998.0, 999.0]
