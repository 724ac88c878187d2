"""Keeps the state between averages on the parameters' device, or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_lowbw.engine.averaging import Averaging

HOST = torch.device("cpu")


class Offload:
    """Keeps the last consensus, the outer momentum and the residuals of a worker in the host's memory.

    They are needed only during an average, when there are no activations on the device. From a GPU they are moved to
    pinned memory, which is copied at the speed of the bus.

    Attributes:
        is_on: whether it does; else they stay on the device.
    """

    def __init__(self, averaging: Averaging) -> None:
        self._averaging, self.is_on, self._num_users = averaging, False, 0

    @contextmanager
    def at_hand(self, device: torch.device) -> Iterator[None]:
        """Have everything on the device inside a `with` block."""
        if self.is_on and not self._num_users:
            self.move(device)
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self.put_away()

    def put_away(self) -> None:
        """Move to the host what is on the device and not in use."""
        if self.is_on and not self._num_users:
            self.move(HOST)

    def move(self, device: torch.device) -> None:
        """Move everything; what is there already stays."""
        averaging = self._averaging
        for kept in (averaging.start, averaging.velocity):
            leaving = {tensor.device for tensor in kept.values() if tensor.is_cuda} if device.type == "cpu" else ()
            kept.update({parameter: moved(tensor, device) for parameter, tensor in kept.items()})
            for gpu in leaving:  # once, not for each tensor
                torch.cuda.synchronize(gpu)
        for exchange in (averaging.sparse, averaging.narrow):
            if exchange is not None:
                exchange.to(device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from a GPU to the host in pinned memory, not before the GPU has come to it."""
    if device.type == "cpu" and tensor.is_cuda:
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.to(device, non_blocking=tensor.device.type == "cpu" and tensor.is_pinned())
