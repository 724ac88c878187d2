"""Segments for tests of the kernels, and what compares a backend with the reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.kernels import gpu, reference
from lightning_lowbw.kernels.reference import Segment
from lightning_lowbw.kernels.table import GPU_BLOCK, Workspace
from lightning_lowbw.payloads.top_k import Selection
from tests.kernels.bits import BFLOAT16, DEVICE, FLOAT16, FLOAT32, IS_TRITON, equal_bits

LARGE = (2 * GPU_BLOCK, 4)


def draw_parts(sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    positions = [torch.randint(numel, (4 * k,)).unique()[:k] if k < numel // 2 else torch.randperm(numel)[:k].sort()[0]
                 for numel, k in sizes]  # fmt: skip
    return [(each.to(DEVICE), torch.randn(each.numel()).mul_(1e3).to(DEVICE)) for each in positions]


def make(
    numel: int,
    k: int,
    gradient: torch.dtype = FLOAT32,
    momentum_buffer: torch.dtype | None = FLOAT32,
    weight: torch.dtype | None = None,
    **factors: Any,
) -> Segment:
    def draw(dtype: torch.dtype | None) -> Any:
        return None if dtype is None else torch.randn(numel).to(dtype).to(DEVICE)

    tensors = {"residual": draw(FLOAT32), "momentum_buffer": draw(momentum_buffer)}
    return Segment(**tensors, gradient=draw(gradient), weight=draw(weight), k=k, **factors)


def tensors_of(segment: Segment) -> list[Tensor]:
    """Return all tensors of a segment except the fault."""
    moment = segment.second_moment
    squares = () if moment is None else (moment.square, moment.largest)
    tensors = segment.residual, segment.momentum_buffer, segment.gradient, segment.weight, *squares
    return [each for each in tensors if each is not None]


def state(segments: Sequence[Segment]) -> list[Tensor]:
    return [tensor for segment in segments for tensor in tensors_of(segment) if tensor is not segment.weight]


def redraw(segments: Sequence[Segment]) -> None:
    """Replace the state by one of the same distribution, as that of a long run is: thresholds go on fitting."""
    for segment in segments:
        for tensor in (segment.residual, segment.momentum_buffer):
            if tensor is not None:
                tensor.normal_()


def compress(segments: Sequence[Segment], memory: Any, masking: bool = True) -> tuple[Tensor, Tensor]:
    """Compress by the backend; the memory is `memory()`."""
    if isinstance(memory, Workspace):
        return gpu.compress_many_(segments, masking=masking, workspace=memory)
    parts = memory.compress_({str(number): each for number, each in enumerate(segments)}, masking=masking)
    positions, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return positions, values


def memory() -> Any:
    return Workspace() if IS_TRITON else Selection()


def check(segments: Sequence[Segment], of_backend: Any, masking: bool = True) -> None:
    """Compress; compare all results with the reference."""
    twins = copy.deepcopy(list(segments))
    positions, values = compress(segments, of_backend, masking)
    expected = reference.compress_many_(twins, masking=masking)
    assert equal_bits(positions, expected[0])
    assert equal_bits(values, expected[1])
    pairs = zip(state(segments), state(twins), strict=True)
    assert all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)


# Correct, select, take ------------------------------------------------------------------------------------------------

DECAY = {"weight": FLOAT32, "weight_decay": 2.0**-6}
ALL: dict[str, Any] = {"momentum": 0.5, "nesterov": True, "sign": -1.0, **DECAY, "ahead": 2.0**-5}
FORMS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "error feedback": {"momentum_buffer": None},
    "nesterov without momentum": {"momentum_buffer": None, "nesterov": True},
    "decay of nothing": {"momentum": 0.9, "weight": FLOAT32, "weight_decay": 0.0},
    "dampened": {"momentum": 0.5, "dampening": 0.5},
    "all": ALL,
    "bfloat16": {"momentum": 0.75, "gradient": BFLOAT16, "momentum_buffer": BFLOAT16},
    "float16 gradient": {"momentum": 0.9, "gradient": FLOAT16},
    "all bfloat16": {**ALL, **dict.fromkeys(("gradient", "momentum_buffer", "weight"), BFLOAT16), "ahead": 0.0},
}
