"""How tensors of all ranks become their mean: one interface, an implementation for each payload.

    prepared = exchange.prepare(signal)       # e = e + (corrected) signal; choose elements, and take them out of e
    pending = prepared.send(status, whole)    # encode; one message
    arrived = pending.wait()                  # 1/N of the sum, in one order: the same bits on all ranks
    arrived.mean.step_(steps)                 # w = w - rate mean; or mean.dense()

A signal is the gradients of a step, or the changes of the weights since the last average: by name, in one order on all
ranks. A status (`sync.status`) and small tensors that are sent whole go in the same message: then the step waits for
one message, and no weight has changed when the host reads the status. Elements that are not sent and rounding errors
stay in the residuals e. A mean does not communicate: `wait` has exchanged all messages.

Each payload has its file: `whole`, `quantized`, `top_k`, `low_rank`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.comm.peers import MeanWork, Peers, fill_, fill_buckets, is_apart
from lightning_lowbw.kernels.tensors import allocate, constant, copy_all_, split_front
from lightning_lowbw.payloads.corrections import Fields
from lightning_lowbw.payloads.payload import FLOAT_BYTES

ALIGNMENT = 64  # elements between the starts of tensors in a buffer: 256 bytes, enough for every vector load
Signal = Mapping[str, Tensor]
Step = tuple[Tensor, Tensor | None, float]  # room, the weight that is stepped, the rate


class Mean(Protocol):
    """The mean of a signal over the participants."""

    def dense(self) -> dict[str, Tensor]:
        """Return the mean by name, flat or in the shape of the signal; new memory, or that of the signal."""
        ...

    def step_(self, steps: Mapping[str, Step]) -> None:
        """Step weights: ``w = w - rate mean``; or write the mean, of tensors without a weight.

        In place:
            The weights, and the room: the mean where there is no weight, else undefined afterwards.

        Args:
            steps: of each tensor a room of its size, its weight, and the rate. With a weight both are float32 and
                contiguous; without one the room is real, of any dtype and layout.
        """
        ...


@dataclass(frozen=True)
class DenseMean:
    """A mean whose elements have all been sent: tensors by name.

    Examples:
        >>> room, weight = torch.zeros(2), torch.ones(2)
        >>> DenseMean({"w": torch.tensor([1.0, 2.0])}).step_({"w": (room, weight, 0.5)})
        >>> DenseMean({"w": torch.tensor([1.0, 2.0])}).step_({"w": (room, None, 0.0)})
        >>> weight, room
        (tensor([0.5000, 0.0000]), tensor([1., 2.]))
    """

    tensors: dict[str, Tensor]

    def dense(self) -> dict[str, Tensor]:
        return self.tensors

    def step_(self, steps: Mapping[str, Step]) -> None:
        targets, sources = [], []
        for name, (out, weight, rate) in steps.items():
            mean = self.tensors[name]
            if weight is not None:
                weight.sub_(mean.view(out.shape).to(weight.dtype), alpha=rate)
            elif mean.data_ptr() != out.data_ptr():  # else it has been written where it belongs
                targets.append(out)
                sources.append(mean.view(out.shape))
        copy_all_(targets, sources)


class Arrived(NamedTuple):
    """The content of the messages of all ranks.

    Attributes:
        mean: the mean of the tensors that the payload compresses.
        status: the sum of the statuses; empty if none was sent.
        whole: means of the tensors that were sent whole in this message: `wide_dtype`, in the shapes of the tensors.
    """

    mean: Mean
    status: Tensor
    whole: Mapping[str, Tensor] = MappingProxyType({})


class Pending(ABC):
    """A message that has been sent."""

    _arrived: Arrived | None = None

    def answer(self) -> None:  # noqa: B027 - most payloads have one message
        """Begin the second message, which depends on the first messages; `wait` does so, too.

        For several messages in progress: call it for each, then `wait` for each. Collective: all ranks.
        """

    def wait(self) -> Arrived:
        """Wait for the messages of all ranks, once; then return the same again."""
        self._arrived = self._arrived or self._receive()
        return self._arrived

    @abstractmethod
    def _receive(self) -> Arrived:
        """Wait for the messages of all ranks."""


Faulty = tuple[Sequence[str], Tensor]  # names, and of each whether an inf or NaN was found: bool


@dataclass(frozen=True)
class Prepared:
    """A signal whose elements have been chosen.

    Attributes:
        send: sends the chosen elements. Collective: all ranks, with the same names. Arguments: a status (float32,
            1-d), and with a status real tensors by name, which are sent whole in the same message.
        faults: if tensors were checked: whether one has an inf or NaN, or has left one in its residual.
    """

    send: Callable[..., Pending]  # (status: Tensor | None = None, whole: Signal | None = None)
    faults: Faulty | None = None


class Residuals(Mapping[str, Tensor]):
    """Residuals by the name of their parameter: flat float32 views into one buffer.

    A pass over all tensors is a pass over one piece of memory. Tensors that come later get a buffer of their own, until
    `to` or `load` puts all tensors into one buffer again.

    Examples:
        >>> residuals = Residuals()
        >>> _ = residuals.ensure({"weight": 4, "bias": 1}, torch.device("cpu"))
        >>> residuals["weight"][0] = 3.0
        >>> residuals["bias"][0] = 4.0
        >>> residuals.norm(), list(residuals)
        (5.0, ['weight', 'bias'])
    """

    def __init__(self) -> None:
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return the residual of a tensor, to be changed in place: float32, shape (numel,)."""
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def ensure(self, numels: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
        """Return the residuals of some names, on the device; new ones are zeros, in one buffer.

        Args:
            numels: elements of each tensor, by name.
            device: of the residuals.

        Raises:
            ValueError: there is a residual with another number of elements; nothing has changed then.
        """
        views = self._views
        if device.index is None and device.type != "cpu":  # "cuda" is some "cuda:0"
            device = torch.empty(0, device=device).device
        apart = dict[str, int]()
        for name, numel in numels.items():
            view = views.get(name)
            if view is not None and view.numel() != numel:
                raise ValueError(
                    f"The residual of {name!r} has {view.numel()} elements, and {numel} are asked for: take it "
                    "out (pop) before the parameter changes its size."
                )
            if view is None or view.device != device:
                apart[name] = numel
        for name, view in _allocate(apart, device).items() if apart else ():
            if name in views:
                view.copy_(views[name])
            views[name] = view
        return {name: views[name] for name in numels}

    def together(self, names: Sequence[str]) -> Tensor | None:
        """View residuals of one size as one tensor, of shape (names, numel); None if they do not lie at equal distances
        in one buffer."""
        views = [self._views[name] for name in names]
        starts, numel = [view.storage_offset() for view in views], views[0].numel()
        step = starts[1] - starts[0] if len(names) > 1 else numel
        is_even = all(start == starts[0] + step * number for number, start in enumerate(starts))
        if step < numel or not is_even or len({view.untyped_storage()._cdata for view in views}) > 1:
            return None
        return torch.as_strided(views[0], (len(names), numel), (step, 1), starts[0])

    def to(self, device: torch.device) -> None:
        """Move all tensors into one buffer; tensors that are on the device already stay."""
        self.ensure({name: view.numel() for name, view in self._views.items()}, device)

    def norm(self) -> float:
        """Return the 2-norm of all tensors together; waits for the device."""
        norms = [view.norm().double() for view in self._views.values()]
        return math.sqrt(torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()) if norms else 0.0

    def pop(self, name: str) -> Tensor:
        """Take a residual out and return it; its memory is free again when the whole buffer is."""
        return self._views.pop(name)

    def load(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Replace the tensors by copies of other tensors.

        Args:
            state: by name; of any shape and dtype, kept flat and in float32.
            device: of the residuals; the CPU by default.
        """
        numels = {name: each.numel() for name, each in state.items()}
        self._views = _allocate(numels, device or torch.device("cpu"))
        for name, view in self._views.items():
            view.copy_(state[name].reshape(-1))


def _allocate(numels: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Return flat views of zeros into a new buffer, which start at multiples of the alignment."""
    sizes = [-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels.values()]
    buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    return {name: part[:numel] for (name, numel), part in zip(numels.items(), buffer.split(sizes), strict=True)}


class Exchange(Protocol):
    """Exchanges the signals of one optimizer, step after step, or average after average.

    Attributes:
        residuals: the elements that are kept back of this rank's part of each tensor, by name; flat.
        fault: flags on the device: whether the last exchange has left an inf or NaN in a mean or a residual, after its
            status had gone; the next status reports it. None: nothing is left to report.
        payload: the payload; may be replaced between steps, on all ranks.
    """

    residuals: Residuals
    fault: Tensor | None = None
    payload: Any

    def prepare(self, signal: Signal, fields: Fields | None = None) -> Prepared:
        """Choose the elements to send; communicates nothing.

        In place:
            The residuals, unless `send` changes them.

        Args:
            signal: tensors with elements, in one order on all ranks: real, of any floating dtype and shape, read in C
                order; on two levels equal on the ranks of a node.
            fields: for `TopK` of gradients, which are then checked for inf and NaN; what a correction adds.
        """
        ...

    def to(self, device: torch.device) -> None:
        """Move the state of the exchange."""
        self.residuals.to(device)
        self.fault = None if self.fault is None else self.fault.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state apart from residuals and the user's settings."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the same ranks; the state of another payload changes nothing."""
        return


# The end of a message -------------------------------------------------------------------------------------------------


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
            part, longest = joined[peers.part(joined.numel())], -(-joined.numel() // peers.num_local_ranks)
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
