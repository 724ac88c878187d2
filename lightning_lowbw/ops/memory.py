"""Memory for what is large and lives for one step."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 1 << 22  # from here on numpy asks for huge pages
CPU = torch.device("cpu")


def allocate(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return a tensor of any content, contiguous.

    Where it is large and on a CPU, from numpy, which asks Linux for huge pages. torch.empty does not, and from 32 MiB
    on the C library maps new pages at each call: the page faults then take longer than what is done with the memory.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(dtype).view(shape)
