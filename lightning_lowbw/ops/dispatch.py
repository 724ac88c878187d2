"""Which twin of `reference` runs: the fastest that there is for a device and dtype."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, cpu, reference


def kernels_for(*tensors: Tensor | None) -> ModuleType:
    """Return the module to take `reach`, `accumulate_` and `sample_accumulated` from, for these arguments."""
    present = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.device.type != "cpu" for tensor in present):
        return reference
    is_plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in present)
    return compiled if is_plain and compiled.is_available() else cpu
