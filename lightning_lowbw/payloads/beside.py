"""The end of a message, after the elements: the status of a step, and the tensors that are sent whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, repeat

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.comm.peers import BUCKET_BYTES, MeanWork, Peers, fill_, fill_buckets, is_apart
from lightning_lowbw.kernels import dispatch, gpu
from lightning_lowbw.kernels.table import DTYPES, JoinedTable
from lightning_lowbw.kernels.tensors import allocate, constant, split_front
from lightning_lowbw.payloads.payload import FLOAT_BYTES

_KINDS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Gathered:
    """Tensors that are sent whole, as one: kernels of a GPU gather them, and write the mean, in one launch each.

    Args:
        tensors: with elements, contiguous, in `table.DTYPES`.
        table: kept from step to step.

    Attributes:
        joined: all tensors as one: float32, 1-d.
        flags: for each tensor, whether it has an inf or NaN: bool.
    """

    def __init__(self, tensors: Sequence[Tensor], table: JoinedTable) -> None:
        numels, device = [*map(Tensor.numel, tensors)], tensors[0].device
        kinds, addresses = [_KINDS[tensor.dtype] for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        columns = addresses, repeat(0), accumulate(numels, initial=0), numels, kinds  # of `JoinedRow`
        self._table, numel = table.update(zip(*columns, strict=False), device), sum(numels)
        flags = torch.zeros(len(tensors) + 1, dtype=torch.bool, device=device)
        self.joined, self.flags = torch.empty(numel, dtype=torch.float32, device=device), flags[:-1]
        gpu.encode_(self._table, _message(self.joined), numel, torch.float32, flags)

    @staticmethod
    def takes(tensors: Sequence[Tensor]) -> bool:
        """Return whether kernels gather these tensors: they must fit into a bucket, because gathering copies them."""
        if not tensors or not dispatch.uses_triton(tensors[0].device):
            return False
        are_known = {tensor.dtype for tensor in tensors} <= _KINDS.keys() and all(map(Tensor.is_contiguous, tensors))
        return are_known and FLOAT_BYTES * sum(map(Tensor.numel, tensors)) <= BUCKET_BYTES

    def write_(self, mean: Tensor) -> None:
        """Write the mean of `joined` into the tensors, rounded to their dtypes."""
        gpu.decode_(self._table, _message(mean), mean.numel(), torch.float32, num_messages=1)


def _message(vector: Tensor) -> Tensor:
    return vector.view(torch.uint8).unsqueeze(0)


class Beside:
    """The end of a message, after the elements: a status, and tensors that are sent whole.

    Whole tensors that would be too large for the message (`comm.peers.is_apart`) are all-reduced instead. This begins
    before the wait for the message.

    Args:
        status: see `Prepared.send`; None: there is nothing after the elements.
        whole: real tensors of any floating dtypes and layouts; read now. On two levels equal on the ranks of a node.
        peers: the participants.
        device: the device of the message.

    Attributes:
        parts: the parts of the message: uint8, 1-d: the status, and 1/N of this rank's part of the whole tensors in
            `wide_dtype`, padded to the longest part of the node.
    """

    def __init__(
        self, status: Tensor | None, whole: Mapping[str, Tensor] | None, peers: Peers, device: torch.device
    ) -> None:
        whole, num = whole or {}, peers.num_participants
        self._shapes, values = {name: tensor.shape for name, tensor in whole.items()}, list(whole.values())
        self._peers, self._apart = peers, list[Tensor]()
        self._work: MeanWork | None = None
        kinds = tuple([(value.dtype, value.numel()) for value in values])
        if values and is_apart(sum(map(Tensor.numel, values)) * FLOAT_BYTES, num):
            self._apart, values = values, []
        sections = [] if status is None else [status]
        self._buckets = fill_buckets(kinds) if values else []
        for dtype, members, sizes in self._buckets:
            joined = allocate(sum(sizes), dtype, device)
            fill_(joined, sizes, [values[index] for index in members], 1.0 / num)
            part, longest = joined[peers.part(joined.numel())], peers.part(joined.numel(), 0).stop
            sections.append(pad(part, (0, longest - part.numel())) if longest > part.numel() else part)
        self._sections = [(section.dtype, section.numel()) for section in sections]
        self.parts = [section.view(torch.uint8) for section in sections]

    def begin(self) -> None:
        """Begin the all-reduce, if there is one: after the message, because that contains the status."""
        if self._apart:
            control = constant((0.0,), torch.float32, self._apart[0].device)
            self._work = MeanWork(self._apart, control, self._peers)

    def read(self, received: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the statuses, and the means by name: `wide_dtype`, in the shapes of the tensors.

        Args:
            received: `parts` of all ranks: uint8, shape (local ranks, participants, bytes).
        """
        sums, begin = list[Tensor](), 0
        for dtype, group in groupby(self._sections, key=lambda section: section[0]):
            numels = [numel for _, numel in group]
            end = begin + sum(numels) * dtype.itemsize
            rows = received[..., begin:end]
            if any(number % dtype.itemsize for number in (rows.storage_offset(), *rows.stride()[:-1])):
                rows = rows.clone(memory_format=torch.contiguous_format)
            sums += rows.view(dtype).sum(1).split(numels, dim=1)
            begin = end
        if not sums:
            return torch.empty(0), {}
        status, *joined = sums
        status = status[0] if len(status) == 1 else status.sum(0)
        if self._work is not None:
            return status, dict(zip(self._shapes, self._work.wait()[0], strict=True))
        means = [status] * len(self._shapes)
        for (_, members, sizes), parts in zip(self._buckets, joined, strict=True):
            for index, mean in zip(members, split_front(parts.flatten(), sizes), strict=True):
                means[index] = mean
        pairs = zip(self._shapes.items(), means, strict=True)
        return status, {name: mean if len(shape) == 1 else mean.view(shape) for (name, shape), mean in pairs}
