"""Which twin of `reference` runs: the fastest that there is for a device and dtype."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, cpu, reference


def kernels_for(*tensors: Tensor) -> ModuleType:
    """Return the module to take `reach`, `accumulate_` and `sample_accumulated` from, for these arguments."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return reference
    is_plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return compiled if is_plain and compiled.is_available() else cpu
