"""All elements in few bits per value with error feedback: one implementation for gradients and for weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.engine.slots import Slot
from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.what.narrow_values import make_narrow_format
from lightning_lowbw.what.residuals import Residuals
from lightning_lowbw.where.narrow import narrow_mean
from lightning_lowbw.where.peers import Peers


@dataclass
class NarrowExchange:
    """Averages tensors between peers in few bits per value; what is rounded away is added to the next ones.

    Args:
        value_dtype: one of `what.narrow_values.NARROW_NAMES`.
        peers: who takes part; on two levels the tensors are those of nodes, equal on the ranks of each.

    Attributes:
        residuals: what this rank has rounded away of each tensor. On two levels that of its part, and zeros elsewhere.
    """

    value_dtype: str
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals, init=False)

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
        if not tensors:
            return {}
        flats = []
        for name, tensor in tensors.items():
            flat = tensor.reshape(-1).to(torch.promote_types(tensor.dtype, torch.float32))
            flats.append(flat + self.residuals[name] if name in self.residuals else flat)
        sizes = [flat.numel() for flat in flats]
        joined = _join_parts(flats, self.peers)
        means, unsent = (
            _split_parts(vector, sizes, self.peers)
            for vector in narrow_mean(joined, make_narrow_format(self.value_dtype), self.peers)
        )
        self.residuals.ensure(dict(zip(tensors, sizes, strict=True)), joined.device)
        for name, rounded in zip(tensors, unsent, strict=True):
            self.residuals[name].copy_(rounded)
        return dict(zip(tensors, means, strict=True))

    def average_gradients_(self, slots: Sequence[Slot]) -> None:
        """Replace the gradients of some tensors by their mean; see `average`.

        In place:
            `.grad`, and the residuals.
        """
        slots = [slot for slot in slots if slot.parameter.numel() > 0]
        means = self.average({slot.name: as_real(slot.gradient) for slot in slots})
        for slot in slots:
            target = as_real(slot.gradient)
            target.copy_(means[slot.name].view(target.shape))

    def to(self, device: torch.device) -> None:
        """Move the residuals."""
        self.residuals.to(device)


def _join_parts(flats: Sequence[Tensor], peers: Peers) -> Tensor:
    """Return a vector of which the part of each local rank consists of its parts of all tensors.

    So what a rank keeps of a tensor is the same part whichever tensors are there.
    """
    num_local = peers.num_local_ranks
    rows = [torch.cat([flat[peers.part(flat.numel(), each)] for flat in flats]) for each in range(num_local)]
    longest = max(row.numel() for row in rows)
    return torch.cat([pad(row, (0, longest - row.numel())) for row in rows])


def _split_parts(vector: Tensor, sizes: Sequence[int], peers: Peers) -> list[Tensor]:
    """Return the tensors of which a vector has been joined; with memory of their own."""
    parts: list[list[Tensor]] = [[] for _ in sizes]
    for local_rank, row in enumerate(vector.view(peers.num_local_ranks, -1)):
        offset = 0
        for number, size in enumerate(sizes):
            own = peers.part(size, local_rank)
            parts[number].append(row[offset : offset + own.stop - own.start])
            offset += own.stop - own.start
    return [torch.cat(of_tensor) for of_tensor in parts]
