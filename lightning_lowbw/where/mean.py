"""The mean of tensors over ranks: fused into flat buckets, in float32 or wider, blocking or in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.where.collectives import Exchange

BUCKET_BYTES = 25 * 2**20  # as DDP's


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is summed: float32, or float64 for itself; complex numbers as two of these."""
    return torch.promote_types(as_real(tensor).dtype, torch.float32)


@dataclass(frozen=True)
class _Bucket:
    members: list[int]  # indices into the tensors
    message: Tensor
    work: Any  # has a wait()


class MeanInFlight:
    """A mean over ranks that has been begun.

    Wire:
        Each tensor in `wide_dtype`, in buckets of about `BUCKET_BYTES`; the tail rides in the first one.

    Collective: all ranks, with tensors of the same shapes and dtypes in the same order; the constructor returns at
    once, `wait` blocks.

    Args:
        tensors: any floating or complex dtypes and layouts; read, not written. Copied now.
        tail: numbers to be summed over the ranks beside it; float32, 1-d, at least one.
        weight: of this rank; the weights of all ranks add up to 1 (or, see `wait`, to what the tail says).
        exchange: the process group and its ledger.
    """

    def __init__(self, tensors: Sequence[Tensor], tail: Tensor, weight: float, exchange: Exchange) -> None:
        self._exchange = exchange
        self._shapes = [as_real(tensor).shape for tensor in tensors]
        self._num_extra = tail.numel()
        self._buckets: list[_Bucket] = []
        for members in _fill_buckets(tensors):
            parts = [as_real(tensors[index].detach()).reshape(-1) for index in members]
            dtype = wide_dtype(tensors[members[0]]) if members else torch.float32
            extra = 0 if self._buckets else tail.numel()
            message = torch.empty(sum(part.numel() for part in parts) + extra, dtype=dtype, device=tail.device)
            offset = 0
            for part in parts:
                view = message[offset : offset + part.numel()]
                if part.dtype == dtype:
                    torch.mul(part, weight, out=view)
                else:  # which would multiply in the narrow type
                    view.copy_(part).mul_(weight)
                offset += part.numel()
            if extra:
                message[offset:] = tail
            self._buckets.append(_Bucket(members, message, exchange.begin_all_reduce_(message)))

    def wait(self) -> tuple[list[Tensor], Tensor]:
        """Wait for it (on CUDA the stream does).

        Returns:
            The weighted sums, in the shapes of the tensors (of their real views), `wide_dtype`, new memory; and the
            sum of the tails, float32.
        """
        device = self._buckets[0].message.device
        with self._exchange.ledger.waiting(device):
            for bucket in self._buckets:
                bucket.work.wait()
        means: list[Tensor] = [torch.empty(0)] * len(self._shapes)
        for bucket in self._buckets:
            offset = 0
            for index in bucket.members:
                numel = self._shapes[index].numel()
                means[index] = bucket.message[offset : offset + numel].view(self._shapes[index])
                offset += numel
        return means, self._buckets[0].message[-self._num_extra :].to(torch.float32)


def average_gradients_(
    parameters: Sequence[Parameter], flags: Sequence[float], exchange: Exchange, device: torch.device
) -> list[float]:
    """Replace the gradients of some parameters by their mean over ranks; one that nobody has stays None, as in DDP.

    In place:
        `.grad`; one that is not strided counts as zeros, and stays.

    Collective: all ranks, with the same parameters; blocking.

    Args:
        flags: numbers to be summed over the ranks beside it; returned.
    """
    gradients = [
        torch.zeros_like(p) if p.grad is None or p.grad.layout != torch.strided else p.grad for p in parameters
    ]
    used = [float(p.grad is not None) for p in parameters]
    tail = torch.tensor([*flags, *used, 0.0], device=device)
    means, tail = MeanInFlight(gradients, tail, 1.0 / exchange.num_ranks, exchange).wait()
    sums: list[float] = tail.tolist()
    for parameter, mean, num_used in zip(parameters, means, sums[len(flags) : -1], strict=True):
        if num_used and (parameter.grad is None or parameter.grad.layout == torch.strided):
            parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
            as_real(parameter.grad).copy_(mean)
    return sums[: len(flags)]


def _fill_buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return indices by bucket: one dtype each, in order of appearance; at least one bucket, for the tail."""
    full: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        dtype = wide_dtype(tensor)
        members, nbytes = filling.get(dtype, ([], 0))
        if not members:
            full.append(members)
        members.append(index)
        nbytes += as_real(tensor).numel() * dtype.itemsize
        filling[dtype] = ([], 0) if nbytes >= BUCKET_BYTES else (members, nbytes)
    return full or [[]]


class NarrowMean:
    """The mean of flat vectors over ranks, sent in a half type with error feedback; sums are in float32.

    Each rank sends every other one that one's part of its vector, the owners average their parts and send the means
    to all. What the rounding takes away, of the vector and of the mean, is added the next time.

    On two levels only what is sent between nodes is narrow: the vectors are averaged inside each node first, and each
    of its ranks does this for a part of them.

    Wire:
        2 (W - 1) / W elements of `value_dtype` per element, half of the float32 all-reduce.

    Args:
        numel: elements of the vectors.
        value_dtype: bfloat16 or float16.
        exchange: the process group and its ledger.
        device: of the vectors.
    """

    def __init__(self, numel: int, value_dtype: torch.dtype, exchange: Exchange, device: torch.device) -> None:
        self.value_dtype, self.numel = value_dtype, numel
        self._levels = exchange.levels
        if self._levels is not None:
            assert self._levels.peers is not None
            numel = -(-numel // self._levels.node.num_ranks)
            exchange = self._levels.peers
        self._exchange = exchange
        self._part = -(-numel // exchange.num_ranks)
        self.vector_error = torch.zeros(numel, device=device)
        self.mean_error = torch.zeros(self._part, device=device)

    def reduce(self, vector: Tensor) -> Tensor:
        """Return the mean of the ranks' vectors, with the same bits on all of them: float32, shape (numel,).

        In place:
            The errors.

        Collective: all ranks, blocking; one all-to-all, one all-gather.
        """
        if self._levels is None:
            return self._reduce(vector)
        with self._exchange.ledger.waiting(vector.device):
            part = self._levels.reduce_scatter(vector).div_(self._levels.node.num_ranks)
        mean = self._reduce(part)
        with self._exchange.ledger.waiting(vector.device):
            return self._levels.all_gather_parts(mean, vector.numel())

    def _reduce(self, vector: Tensor) -> Tensor:
        num_ranks, numel = self._exchange.num_ranks, vector.numel()
        wanted = self.vector_error.add_(vector)
        narrow = torch.zeros(num_ranks * self._part, dtype=self.value_dtype, device=vector.device)
        narrow[:numel] = self._clamped(wanted)
        wanted.sub_(narrow[:numel])
        received = self._exchange.all_to_all(narrow.view(torch.uint8)).view(self.value_dtype)
        mean = self.mean_error.add_(received.view(num_ranks, self._part).float().mean(0))
        narrow_mean = self._clamped(mean)
        mean.sub_(narrow_mean)
        gathered = self._exchange.all_gather(narrow_mean.view(torch.uint8)).view(-1).view(self.value_dtype)
        return gathered[:numel].float()

    def _clamped(self, values: Tensor) -> Tensor:
        limit = torch.finfo(self.value_dtype).max
        return values.clamp(-limit, limit).to(self.value_dtype)


def narrow_mean(vector: Tensor, value_dtype: torch.dtype, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Average flat vectors over ranks, sent in a half type; sums are in float32, and what is rounded away is returned.

    Each rank sends every other one that one's part of its vector, the owners average their parts and send the means
    to all. On two levels the vectors are those of nodes: each rank of a node does this for a part of its node's.

    Wire:
        2 (W - 1) / W elements of `value_dtype` per element, half of the float32 all-reduce.

    Collective: all ranks with vectors of one length, equal ones inside a node but for what was returned last;
    blocking; one all-to-all, one all-gather.

    Args:
        vector: float32, or wider; 1-d.
        value_dtype: bfloat16 or float16.
        exchange: the process group and its ledger.

    Returns:
        The mean, with the same bits on all ranks, and what is to be added to this rank's next vector: sent and unsent,
        summed over the ranks, are the vectors. Both have the vector's dtype and shape.
    """
    levels = exchange.levels
    if levels is not None:
        assert levels.peers is not None
        size = -(-vector.numel() // levels.node.num_ranks)
        own = slice(levels.place * size, (levels.place + 1) * size)
        part = torch.zeros(size, dtype=vector.dtype, device=vector.device)
        part[: vector[own].numel()] = vector[own]
        mean, part = narrow_mean(part, value_dtype, levels.peers)
        unsent = torch.zeros_like(vector)
        unsent[own] = part[: vector[own].numel()]
        return levels.all_gather_parts(mean, vector.numel()), unsent
    num_ranks, limit = exchange.num_ranks, torch.finfo(value_dtype).max
    size = -(-vector.numel() // num_ranks)
    wanted = torch.zeros(num_ranks * size, dtype=vector.dtype, device=vector.device)
    wanted[: vector.numel()] = vector
    sent = wanted.clamp(-limit, limit).to(value_dtype)
    unsent = wanted - sent
    received = exchange.all_to_all(sent.view(torch.uint8)).view(value_dtype)
    part = received.view(num_ranks, size).to(vector.dtype).mean(0)
    handed_out = part.clamp(-limit, limit).to(value_dtype)
    unsent[exchange.rank * size : (exchange.rank + 1) * size] += num_ranks * (part - handed_out)
    gathered = exchange.all_gather(handed_out.view(torch.uint8)).view(-1).view(value_dtype)
    return gathered[: vector.numel()].to(vector.dtype), unsent[: vector.numel()]
