"""The consensus view: the mean of the replicas is put into the model, to be looked at, and taken out again.

A view takes tensors and returns tensors. Who shows a mean, and when, is the worker's part (`sync.local`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter

from lightning_lowbw.comm.peers import Peers, fill_buckets
from lightning_lowbw.kernels.tensors import as_real, checksum
from lightning_lowbw.sync.buffers import ReplicaBuffers
from lightning_lowbw.sync.exchange import WholeExchange


@contextmanager
def unseen_by_autograd(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Write to tensors without a new version of them: what a view puts in is out again before a backward pass.

    A save may come between a forward pass and its backward pass, as one in `training_step`.
    """
    with ExitStack() as stack:
        for tensor in tensors:
            if not tensor.is_inference():
                stack.enter_context(_unsafe_preserve_version_counter(tensor))
        yield


@dataclass(frozen=True)
class ConsensusView:
    """What a model has in the place of a rank's own tensors; nothing is shown by default.

    Attributes:
        own: the rank's own tensors by name, on the CPU, where those that are shown differ from them; else None.
        buffers: on which the ranks have agreed for this view; None where it shows those of the training.
        parameters: that are shown.
        checksum: of what they were when they were put in; None if nothing is shown.
        shown_buffers: copies of the buffers that are shown, which a forward pass may change; by name.
    """

    own: Mapping[str, Tensor] | None = None
    buffers: ReplicaBuffers | None = None
    parameters: Sequence[Tensor] = ()
    checksum: int | None = None
    shown_buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def noted(
        self, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor], shown: int | None = None
    ) -> ConsensusView:
        """Return the view of what is in the model now.

        Args:
            parameters: of the model.
            buffers: of the model, that are averaged; by name.
            shown: the checksum of the parameters' consensus, if the model has other values.
        """
        # A checkpoint's is given: the user's code may have replaced the consensus before it was saved.
        number = int(checksum(parameters)) if shown is None else shown
        shown_buffers = {} if self.own is None else copies(buffers)
        return replace(self, parameters=parameters, checksum=number, shown_buffers=shown_buffers)

    @property
    def is_shown(self) -> bool:
        """Whether the consensus has been put into the model; perhaps this rank's weights are the same."""
        return self.checksum is not None

    @property
    def is_changed(self) -> bool:
        """Whether the user's code has put other parameters in the place of the consensus; waits for the device.

        Tensors are compared by their bits: `p.data.copy_(...)` leaves no trace, and a moving average is often put in
        and taken out again.
        """
        return self.is_shown and int(checksum(self.parameters)) != self.checksum

    def unchanged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rank's own values of what the user's code has not changed meanwhile.

        Args:
            tensors: of the model, by name.
        """
        return {
            name: value
            for name, value in (self.own or {}).items()
            if name not in self.shown_buffers or (name in tensors and _is_same(tensors[name], self.shown_buffers[name]))
        }

    def own_values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a rank has of the tensors of its model: its own values, or what the user's code has put in."""
        kept = self.unchanged(tensors)
        return {name: kept.get(name, tensors[name]) for name in self.own or {} if name in tensors}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each tensor, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each tensor on the CPU, by name."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    # NaN is not equal to itself, and a metric's buffer may have one from the begin.
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def means_by_bucket(
    tensors: Mapping[str, Tensor], status: Tensor, peers: Peers
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield the means of tensors over ranks, bucket by bucket: the device has those of one at a time.

    Collective: all ranks, with the same names; at least one all-reduce, each blocking.

    Args:
        tensors: by name; laid out alike on all ranks.
        status: summed beside each.

    Yields:
        The means by name, and the sum of the statuses.
    """
    names, exchange = list(tensors), WholeExchange(peers, in_memory_order=True)
    for bucket in fill_buckets(tuple((real.dtype, real.numel()) for real in map(as_real, tensors.values()))):
        arrived = exchange.prepare({names[i]: tensors[names[i]] for i in bucket.members}).send(status).wait()
        yield arrived.mean.dense(), arrived.status
        del arrived  # memory for the next
