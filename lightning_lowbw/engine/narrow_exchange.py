"""All elements in few bits per value with error feedback: one implementation for gradients and for weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_lowbw.engine.slots import Slot
from lightning_lowbw.ops.reference import flat
from lightning_lowbw.what.narrow_values import make_narrow_format
from lightning_lowbw.what.residuals import Residuals
from lightning_lowbw.where.narrow import narrow_mean_
from lightning_lowbw.where.peers import Peers


@dataclass
class NarrowExchange:
    """Averages tensors between peers in few bits per value; rounding errors are added to the next ones.

    Args:
        value_dtype: one of `what.narrow_values.NARROW_NAMES`.
        peers: who takes part; on two levels the tensors are those of nodes, equal on the ranks of each.

    Attributes:
        residuals: the rounding errors of this rank's part of each tensor, by name; float32, float64 of tensors in
            float64; flat.
        overflowed: whether a residual has become inf or NaN in the last exchange: bool, a scalar on the device; None
            before the first. The next control message reports it, because that of this step has been sent already.
    """

    value_dtype: str
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals, init=False)
    overflowed: Tensor | None = field(default=None, init=False)

    def average(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of tensors over the participants: float32 (or wider), flat, the same bits on all ranks.

        In place:
            The residuals.

        Collective: all ranks, with the same names; an all-to-all and an all-gather; blocking.

        Wire:
            `where.volume.narrow_mean_bytes` of all elements together.

        Args:
            tensors: by name; any floating dtype, not empty.
        """
        flats = {name: flat(tensor) for name, tensor in tensors.items()}
        means = {
            name: torch.empty_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
            for name, each in flats.items()
        }
        self._average(flats, means)
        return means

    def average_gradients_(self, slots: Sequence[Slot]) -> None:
        """Replace the gradients of some tensors by their mean; see `average`.

        In place:
            `.grad`, and the residuals.
        """
        gradients = {slot.name: slot.in_order(slot.gradient) for slot in slots if slot.parameter.numel() > 0}
        flats = {name: flat(gradient) for name, gradient in gradients.items()}
        self._average(flats, flats)
        for name, gradient in gradients.items():
            if flats[name].data_ptr() != gradient.data_ptr():  # laid out otherwise: a copy
                gradient.copy_(flats[name].view(gradient.shape))

    def _average(self, signals: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> None:
        if not signals:
            return
        numels = {name: signal[self.peers.part(signal.numel())].numel() for name, signal in signals.items()}
        wide = [name for name, signal in signals.items() if signal.dtype == torch.float64]
        self.residuals.ensure(numels, next(iter(signals.values())).device, wide)
        residuals = [self.residuals[name] for name in signals]
        value_format = make_narrow_format(self.value_dtype)
        left = narrow_mean_(list(signals.values()), residuals, list(means.values()), value_format, self.peers)
        self.overflowed = left * 0 != 0  # NaN of a NaN, and of an infinity

    def to(self, device: torch.device) -> None:
        """Move the residuals."""
        self.residuals.to(device)
        self.overflowed = None if self.overflowed is None else self.overflowed.to(device)
