"""Peers that are echoes of this rank: what an exchange computes, without a network."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowbw.comm.collectives import Collectives, TensorWork
from lightning_lowbw.comm.peers import Peers


class EchoCollectives(Collectives):
    """Ranks that all send the messages of this rank; nothing leaves the device. A sum stays the tensor of one rank.

    Args:
        num_ranks: how many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(is_alone=True)
        self.num_ranks = num_ranks

    @override
    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        return TensorWork(tensor)

    begin_sum_ = begin_all_reduce_

    @override
    def begin_all_gather(self, message: Tensor, out: Tensor | None = None) -> TensorWork:
        out = message.new_empty((self.num_ranks, message.numel())) if out is None else out
        out.view(self.num_ranks, -1).copy_(message)
        return TensorWork(out)

    @override
    def begin_all_to_all(self, message: Tensor) -> TensorWork:
        return TensorWork(message.view(self.num_ranks, -1)[:1].repeat(self.num_ranks, 1).view(-1))


def echo(num_ranks: int) -> Peers:
    """Return peers that are echoes of this rank."""
    peers = Peers()
    peers._all = peers.between = EchoCollectives(num_ranks)
    peers.rank, peers.num_ranks, peers.num_participants = 0, num_ranks, num_ranks
    return peers
