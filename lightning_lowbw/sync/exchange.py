"""How tensors of all ranks become their mean: one interface, an implementation for each payload.

    prepared = exchange.prepare(signal)       # e = e + signal, or a correction of it; choose, and take out of e
    pending = prepared.send(status, whole)    # encode; one message
    arrived = pending.wait()                  # 1/N of the sum, in one order: the same bits on all ranks
    arrived.mean.step_(steps)                 # w = w - rate mean; or mean.dense()

A signal is the gradients of a step, or the changes of the weights since the last average: by name, in one order on all
ranks. A status (`sync.status`), and small tensors that are sent whole, go in the same message where they are given:
then the step waits for one message, and nothing has been applied when the status is read. What is not sent, and
rounding errors, stay in the residuals e.

`Whole` sends every element (`WholeExchange`), `TopK` the k largest (`TopKExchange`); others are a file each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate, groupby, product
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.comm.peers import MeanWork, Peers, part_of
from lightning_lowbw.compress.codec import MAX_NUMEL
from lightning_lowbw.compress.corrections import Sources
from lightning_lowbw.compress.payload import Payload
from lightning_lowbw.compress.selection import Residuals, Selection
from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.dispatch import averages_for
from lightning_lowbw.kernels.reference import Arrival, Segment, add_
from lightning_lowbw.kernels.table import DTYPES
from lightning_lowbw.kernels.tensors import allocate, copy_all_, cut, flat
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.beside import Beside

Signal = Mapping[str, Tensor]
Step = tuple[Tensor, Tensor | None, float]  # room, the weight that is stepped, the rate
Sparse = tuple[Tensor, Tensor]  # positions, ascending, and values
Made = TypeVar("Made")


class Mean(Protocol):
    """The mean of a signal over the participants."""

    def dense(self) -> dict[str, Tensor]:
        """Return it by name, flat (that of `WholeExchange` in its shapes); new memory, or that of the signal."""
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


class Arrived(NamedTuple):
    """What the messages of all ranks have brought.

    Attributes:
        mean: of what the payload compresses.
        status: the sum of the statuses; empty where none was given.
        whole: means of what was sent whole in the same message: `wide_dtype`, in the shapes of the tensors.
    """

    mean: Mean
    status: Tensor
    whole: Mapping[str, Tensor] = MappingProxyType({})


class Pending(Protocol):
    """A message that has been sent."""

    def wait(self) -> Arrived:
        """Wait for the messages of all ranks."""
        ...


Faulty = tuple[Sequence[str], Tensor]  # names, and of each whether an inf or NaN was found: bool


class Prepared(Protocol):
    """A signal, of which everything has been chosen that is sent.

    Attributes:
        faults: where tensors were checked: whether one has an inf or NaN, or has left one in its residual.
    """

    faults: Faulty | None

    def send(self, status: Tensor | None = None, whole: Signal | None = None) -> Pending:
        """Send what has been prepared.

        Collective: all ranks, with the same names.

        Args:
            status: float32, 1-d.
            whole: real tensors that are sent whole in the same message; only with a status.
        """
        ...


class Correction(Protocol):
    """What an optimizer's correction (`compress.corrections`) adds to the signal on its way into the residuals."""

    @property
    def clears(self) -> bool:
        """Whether velocities are cleared where elements are sent."""
        ...

    @property
    def has_copies(self) -> bool:
        """Whether a segment of this step has a copy of the parameter, or of the optimizer's state."""
        ...

    def sources(self) -> Sources | None:
        """Return what the segments of this step are made of; None where they are others in each step."""
        ...

    def refresh_(self, segments: Mapping[str, Segment]) -> None:
        """Write the constants of this step into the segments of an earlier one, by name."""
        ...

    def segment(self, name: str) -> Mapping[str, Any]:
        """Return more fields of the segment (`kernels.reference.Segment`) that is this rank's part of a tensor."""
        ...

    def write_back_(self) -> None:
        """Write into the optimizer's state what kernels have changed in copies of it."""
        ...


class Exchange(Protocol):
    """Exchanges the signals of one optimizer, step after step, or average after average.

    Attributes:
        residuals: what is kept back of this rank's part of each tensor, by name; flat.
        fault: flags on the device: whether the last exchange has left an inf or NaN in a mean or a residual, after its
            status had gone; the next status reports it. None: nothing is left to report.
        payload: what is sent; may be replaced between steps, on all ranks.
    """

    residuals: Residuals
    fault: Tensor | None
    payload: Any

    def prepare(self, signal: Signal, correction: Correction | None = None) -> Prepared:
        """Begin an exchange; communicates nothing.

        In place:
            The residuals.

        Args:
            signal: tensors with elements, in one order on all ranks: real, of any floating dtype and shape, read in C
                order; on two levels equal on the ranks of a node.
            correction: for `TopK` of gradients, which are then checked for inf and NaN.
        """
        ...

    def to(self, device: torch.device) -> None:
        """Move what is kept."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state apart from residuals and the user's settings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the same ranks; or one of another payload, of which nothing is taken."""
        ...


EXCHANGES: dict[type[Payload], Callable[[Any, Peers, Schedule], Exchange]] = {}


def exchanges(payload: type[Payload]) -> Callable[[type[Made]], type[Made]]:
    """Decorate the class that exchanges what a payload compresses; it is made from the payload and the peers."""

    def register(made: type[Made]) -> type[Made]:
        maker: Any = made
        EXCHANGES[payload] = lambda what, peers, _: maker(what, peers)
        return made

    return register


def exchange_for(what: Payload, peers: Peers, when: Schedule) -> Exchange | None:
    """Return what exchanges the tensors that a payload compresses; None if it sends all of them whole."""
    kind = next((kind for kind in type(what).__mro__ if kind in EXCHANGES), type(what))  # a user's own is a subclass
    return None if what.sends_all else EXCHANGES[kind](what, peers, when)


# Whole ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseMean:
    """Means of whole tensors, by name.

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


class LateMean(ABC):
    """A mean for which another message is exchanged when it is asked for, once: after the status has been read."""

    _mean: DenseMean | None = None

    def begin(self) -> None:  # noqa: B027 - most wait for it at once
        """Begin that message, where others can be begun before it is waited for; collective."""

    @abstractmethod
    def finish(self) -> DenseMean:
        """Exchange that message, and return the mean; collective."""

    def dense(self) -> dict[str, Tensor]:
        return self._finished().dense()

    def step_(self, steps: Mapping[str, Step]) -> None:
        self._finished().step_(steps)

    def _finished(self) -> DenseMean:
        self._mean = self._mean or self.finish()
        return self._mean


@dataclass(frozen=True)
class Deferred:
    """A message that is exchanged when it is waited for; or has been waited for."""

    run: Callable[[], Mean]
    status: Tensor = field(default_factory=partial(torch.empty, 0))

    def wait(self) -> Arrived:
        return Arrived(self.run(), self.status)


@dataclass(frozen=True)
class PreparedWhole:
    """A signal that is sent whole.

    Args:
        signal: see `Exchange.prepare`.
        begin: sends the signal, a status, and other tensors whole.
        faults: see `Prepared`.
    """

    signal: Signal
    begin: Callable[[Signal, Tensor | None, Signal | None], Pending]
    faults: Faulty | None = None

    def send(self, status: Tensor | None = None, whole: Signal | None = None) -> Pending:
        return self.begin(self.signal, status, whole)


@dataclass(frozen=True)
class PendingWhole:
    """All-reduces in progress."""

    names: list[str]
    work: MeanWork

    def wait(self) -> Arrived:
        means, status = self.work.wait()
        return Arrived(DenseMean(dict(zip(self.names, means, strict=True))), status)


class WholeExchange:
    """Averages whole tensors, and a status beside them: an all-reduce over all ranks. Keeps nothing back.

    Args:
        peers: who takes part.
        options: of `MeanWork`.
    """

    def __init__(self, peers: Peers, **options: Any) -> None:
        self._peers, self._options = peers, options

    def prepare(self, signal: Signal) -> PreparedWhole:
        return PreparedWhole(signal, self._send)

    def _send(self, signal: Signal, status: Tensor | None, whole: Signal | None) -> PendingWhole:
        assert status is not None
        return PendingWhole(list(signal), MeanWork(list(signal.values()), status, self._peers, **self._options))


# The k largest --------------------------------------------------------------------------------------------------------


@exchanges(TopK)
class TopKExchange:
    """Exchanges the largest elements of tensors between peers, and keeps the rest of each.

        prepare   e = beta e + signal, or a correction of it; the k largest of e   | `compress.selection`
        send      encode them, an all-gather between peers                         | `compress.codec`, `comm.peers`
        wait      1/N of the sum, in one order                                     | `SparseMean`

    On two levels each rank of a node does this for its part of every tensor, among the ranks that have this part in
    the other nodes; inside the node the messages are gathered.

    Args:
        payload: what is sent; may be replaced between steps, on all ranks.
        peers: who takes part.
    """

    def __init__(self, payload: TopK, peers: Peers) -> None:
        self.payload, self.peers = payload, peers
        self.residuals = Residuals()
        self.selection = Selection()
        self.fault: Tensor | None = None
        self._plan: Plan | None = None
        self._flags = torch.empty(0, dtype=torch.bool)  # for each tensor, and views of these flags
        self._views: tuple[Tensor, ...] = ()

    def prepare(self, signal: Signal, correction: Correction | None = None) -> PreparedTopK:
        """Accumulate a signal into the residuals, and take the largest elements out of them.

        In place:
            The residuals; with a correction the velocities, and Adam's second moments.

        Raises:
            ConfigurationError: a part has more elements than there are positions.
        """
        return PreparedTopK(self, signal, correction)

    def flags_for(self, num: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        """Return one flag per tensor, as a vector and as views of it.

        They stay in one place, or the table of the kernels would change in each step. Nothing clears a flag: it ends
        the training.
        """
        if self._flags.numel() != num or self._flags.device != device:
            self._flags = torch.zeros(num, dtype=torch.bool, device=device)
            self._views = self._flags.unbind()
        return self._flags, self._views

    def segments(
        self, parts: Mapping[str, Tensor], flags: Sequence[Tensor | None], correction: Correction | None
    ) -> Mapping[str, Segment]:
        """Return the segments of tensors with elements: those of the last step, if only gradients and constants differ.

        Args:
            parts: this rank's of each tensor, contiguous.
            flags: where inf and NaN are noted, of each.
            correction: see `prepare`.
        """
        plan, self._plan = self._plan, None
        sources = Sources() if correction is None else correction.sources()
        if sources is None:
            return self._make_segments(parts, flags, correction)
        objects = [*self.residuals.of(parts), *flags, *sources.objects]
        gradients = [*filter(Tensor.numel, parts.values())]
        sizes = [*map(Tensor.numel, parts.values())], [gradient.dtype for gradient in gradients]
        kinds = self.payload, sources.kinds, [*parts], sizes
        addresses = [each.data_ptr() for each in objects if isinstance(each, Tensor)]
        if plan is None or not plan.is_of(kinds, objects, addresses):
            segments = self._make_segments(parts, flags, correction)
            if correction is None or not correction.has_copies:
                self._plan = Plan(kinds, objects, addresses, sources.constants, segments)
            return segments
        self._plan = plan
        if correction is not None and (plan.constants != sources.constants or not sources.constants):
            correction.refresh_(plan.segments)
            plan.constants = sources.constants
        for segment, gradient in zip(plan.segments.values(), gradients, strict=True):
            segment.gradient = gradient
        return plan.segments

    def _make_segments(
        self, parts: Mapping[str, Tensor], flags: Sequence[Tensor | None], correction: Correction | None
    ) -> dict[str, Segment]:
        counts = iter(self.payload.selected([*filter(None, map(Tensor.numel, parts.values()))]))
        segments = dict[str, Segment]()
        for (name, part), flag in zip(parts.items(), flags, strict=True):
            fields = {} if correction is None else correction.segment(name)
            if part.numel():
                residual = self.residuals[name]
                segments[name] = Segment(residual=residual, gradient=part, fault=flag, **fields, **next(counts))
                continue
            # Nothing of it is this rank's, except that all keep Adam's second moment of all.
            for other in fields.get("other_parts", ()):
                other.update_()
        return segments

    def send(
        self, selected: dict[str, Sparse], numels: Mapping[str, int], status: Tensor | None, whole: Signal | None
    ) -> Pending:
        """Send elements.

        In place:
            The residuals: what is rounded away goes back into them.

        Wire:
            `TopK.nbytes` of this rank's parts, padded to the longest of the ranks of a node; then the status, and this
            rank's part of the whole tensors (`Beside`). An all-gather, on two levels another one inside the node.

        Args:
            selected: elements by tensor, already subtracted from the residual; empty parts are absent.
            numels: elements of each whole tensor.
            status: see `Prepared.send`.
            whole: see `Prepared.send`; on two levels equal on the ranks of a node.
        """
        message = torch.empty(0, dtype=torch.uint8, device=self._device)
        if selected:
            residuals = [residual for residual in self.residuals.of(selected) if residual is not None]
            message = self.payload.codec.encode(list(selected.values()), _numels(residuals), residuals)
            selected.clear()  # memory for the messages of all
        messages = Messages.of(self.payload, numels, self.peers)
        if missing := max(messages.sizes) - message.numel():
            message = pad(message, (0, missing))
        beside = Beside(status, whole, self.peers, self._device)
        if beside.parts:
            message = torch.cat([message, *beside.parts])
            beside.parts.clear()
        work = self.peers.begin_gather(message)
        beside.begin()
        return PendingTopK(messages, self.peers, work, beside, message.device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.residuals.values())).device

    def to(self, device: torch.device) -> None:
        """Move the residuals; the kernels' workspaces are made anew, except the thresholds."""
        self.residuals.to(device)
        self.selection.thresholds, self._plan = self.selection.thresholds, None
        self.fault = None if self.fault is None else self.fault.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"thresholds": dict(self.selection.thresholds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.selection.thresholds = state.get("thresholds", {})  # none of another payload
        self._flags = torch.empty(0, dtype=torch.bool)


_NOTHING = torch.empty(0)


@dataclass
class Plan:
    """The segments of a step, for later ones that are made of the same.

    Args:
        kinds: values that must be equal.
        objects: that must be the same ones; among them tensors.
        addresses: of these tensors, which are others where `.data` has been replaced.
        constants: of the param groups, as they are in the segments now.
        segments: by name.
    """

    kinds: tuple[Any, ...]
    objects: list[Any]
    addresses: list[int]
    constants: Any
    segments: dict[str, Segment]

    def is_of(self, kinds: tuple[Any, ...], objects: list[Any], addresses: list[int]) -> bool:
        """Return whether it is made of these."""
        is_same = len(objects) == len(self.objects) and all(map(is_, objects, self.objects))
        return is_same and addresses == self.addresses and kinds == self.kinds


class PreparedTopK:
    """The largest elements of a signal, taken out of the residuals.

    Args:
        exchange: sends these elements.
        signal: see `Exchange.prepare`; the message has the same order.
        correction: see `Exchange.prepare`.
    """

    faults: Faulty | None

    def __init__(self, exchange: TopKExchange, signal: Signal, correction: Correction | None) -> None:
        self._exchange, self.faults = exchange, None
        self._numels = dict(zip(signal, map(Tensor.numel, signal.values()), strict=True))  # of the whole tensors
        # Selected elements by tensor, already subtracted from the residual; empty parts are absent.
        self._selected: dict[str, Sparse] = {}
        if not signal:
            return
        payload, residuals, device = exchange.payload, exchange.residuals, next(iter(signal.values())).device
        names, tensors, is_whole = list(signal), list(signal.values()), exchange.peers.num_local_ranks == 1
        # The whole in its own shape: views of hundreds of tensors take as long as all else on the host.
        if not (is_whole and all(map(Tensor.is_contiguous, tensors))):
            tensors = [_part(tensor, exchange.peers) for tensor in tensors]
        parts, numels = dict(zip(names, tensors, strict=True)), [*map(Tensor.numel, tensors)]
        if (most := max(numels)) > MAX_NUMEL:
            name = names[numels.index(most)]
            raise ConfigurationError(
                f"{name!r} has {most} elements, positions go up to {MAX_NUMEL}: exclude=[{name!r}]."
            )
        residuals.ensure(dict(zip(names, numels, strict=True)), device)
        flags: Sequence[Tensor | None] = [None] * len(names)
        if correction is not None:
            found, flags = exchange.flags_for(len(names), device)
            self.faults = names, found
        table = exchange.segments(parts, flags, correction)
        if payload.decay != 1.0 and table:
            torch._foreach_mul_([segment.residual for segment in table.values()], payload.decay)
        clears = correction is not None and correction.clears
        self._selected.update(zip(table, exchange.selection.compress_(table, masking=clears), strict=True))
        for segment in table.values():
            segment.gradient, segment.other_parts = _NOTHING, ()  # memory: they are kept
        if correction is not None:
            correction.write_back_()

    def send(self, status: Tensor | None = None, whole: Signal | None = None) -> Pending:
        return self._exchange.send(self._selected, self._numels, status, whole)


def _part(tensor: Tensor, peers: Peers) -> Tensor:
    """Return this rank's part of a tensor: contiguous, a copy where its elements are in another order in memory."""
    return tensor if peers.num_local_ranks == 1 and tensor.is_contiguous() else cut(tensor, peers.part(tensor.numel()))


class Piece(NamedTuple):
    """What is decoded together, within DECODED_BYTES.

    Several local ranks with parts of equal sizes, where all tensors of one fit; else some tensors of one; of a tensor
    that is too large some participants.
    """

    ranks: slice  # of the node
    participants: slice
    tensors: slice
    numels: list[int]  # of all parts of one of these ranks
    spans: Spans


@dataclass(frozen=True)
class Messages:
    """What the messages of an all-gather contain.

    Two nodes of two ranks, a tensor w of 5 elements and one b of 2: each rank sends what is selected of its part of
    both, and gets all four messages.

                    local rank 0                        local rank 1
        node 0      [w[0:3], b[0:1] | status]           [w[3:5], b[1:2], padding | status]
        node 1      [w[0:3], b[0:1] | status]           [w[3:5], b[1:2], padding | status]

    `sizes` are the bytes before the padding, of local rank 0 and 1. A piece with `ranks=0:1, participants=0:2` is what
    both nodes have sent of w[0:3] and b[0:1].

    Attributes:
        payload: with which they were sent.
        numels: elements of each whole tensor, by name.
        num_participants: that have sent.
        sizes: bytes of the elements in the message of each rank of a node.
        pieces: of all messages, participants in their order.
    """

    payload: TopK
    numels: Mapping[str, int]
    num_participants: int
    sizes: list[int]
    pieces: list[Piece]

    @classmethod
    def of(cls, payload: TopK, numels: Mapping[str, int], peers: Peers) -> Messages:
        of_ranks = peers.num_local_ranks, peers.num_participants
        return _messages(payload, tuple(numels.items()), *of_ranks, DECODED_BYTES // ELEMENT_BYTES)

    @property
    def is_once(self) -> bool:
        """Whether all is decoded at once, and may be used several times; over senders a mean uses it up."""
        return len(self.pieces) == 1 and self.payload.mean_over != "senders"

    def decode(self, gathered: Tensor) -> Iterator[Decoded]:
        """Yield the elements in the messages of all, piece by piece."""
        for piece in self.pieces:
            messages = gathered[piece.ranks, piece.participants, : self.sizes[piece.ranks.start]]
            # Not kept here: the next ones need the memory.
            yield Decoded(
                *self.payload.decode(messages, piece.numels, piece.tensors),
                piece.spans,
                piece.participants.start,
                self.num_participants,
            )


@lru_cache(maxsize=16)
def _messages(
    payload: TopK,
    numels: tuple[tuple[str, int], ...],
    num_local_ranks: int,
    num_participants: int,
    most: int,
) -> Messages:
    """Return what messages contain, so many elements at a time; once for those of every step."""
    parts = [
        {name: part for name, numel in numels if (part := part_of(numel, each, num_local_ranks)).stop > part.start}
        for each in range(num_local_ranks)
    ]
    lengths = [[part.stop - part.start for part in of_rank.values()] for of_rank in parts]
    pieces = []
    for of_one, ranks in groupby(range(num_local_ranks), key=lambda each: lengths[each]):
        if not of_one:
            continue
        alike, counts = list(ranks), payload.nums_sent(of_one)
        for tensors in _groups(counts, most // num_participants):
            num_sent = sum(counts[tensors])
            ranks_at_once = max(1, most // (num_participants * num_sent))
            # The senders of an element are counted among the participants that are there.
            at_once = num_participants if payload.mean_over == "senders" else max(1, most // num_sent)
            for rank, first in product(range(0, len(alike), ranks_at_once), range(0, num_participants, at_once)):
                mine = alike[rank : rank + ranks_at_once]
                spans = _spans([[*parts[each].items()][tensors] for each in mine], counts[tensors])
                participants = slice(first, min(first + at_once, num_participants))
                pieces.append(Piece(slice(mine[0], mine[-1] + 1), participants, tensors, of_one, spans))
    sizes = [payload.nbytes(of_rank) for of_rank in lengths]
    return Messages(payload, dict(numels), num_participants, sizes, pieces)


class PendingTopK:
    """Messages of all participants, in progress.

    Args:
        messages: what they contain.
        peers: who takes part.
        work: the all-gather.
        beside: the status and the whole tensors, which follow the elements.
        device: of the messages.
    """

    def __init__(self, messages: Messages, peers: Peers, work: Any, beside: Beside, device: torch.device) -> None:
        self._messages, self._peers, self._work, self._beside, self._device = messages, peers, work, beside, device
        self._gathered: list[Tensor] = []

    def wait(self) -> Arrived:
        if not self._gathered:
            with self._peers.ledger.waiting(self._device):
                self._gathered.append(self._work.wait())
        (gathered,), messages = self._gathered, self._messages
        status, whole = self._beside.read(gathered[..., max(messages.sizes) :])
        decode: Callable[[], Iterable[Decoded]] = partial(messages.decode, gathered)
        if status.numel() and messages.is_once:  # launched before the host waits for the status
            decode = partial(iter, list(decode()))
        return Arrived(
            SparseMean(messages.payload, messages.numels, decode, self._device, self._peers.weights), status, whole
        )


def _numels(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


ELEMENT_BYTES = 8  # a position in int32, a value in float32
DECODED_BYTES = 1 << 28  # 256 MiB of decoded elements at once, or those of one tensor in one message


class Span(NamedTuple):
    """The position of the elements of a tensor, or a part of one, among those received."""

    part: slice  # of the tensor
    row: int
    first: int
    num_sent: int


Spans = Mapping[str, Sequence[Span]]


@dataclass(frozen=True)
class Decoded:
    """The elements that participants have sent for parts of equal sizes.

    Attributes:
        positions: in the part: int32, shape (local ranks, participants, elements).
        values: float32, of the same shape.
        spans: of the tensors, by name; one, where not all participants are here.
        first: participant that is here.
        num_participants: of which some or all are here.
    """

    positions: Tensor
    values: Tensor
    spans: Spans
    first: int
    num_participants: int

    def scaled(self, scales: Tensor) -> Decoded:
        """Return it with the values of each participant times a number of its own."""
        here = scales[self.first : self.first + self.values.shape[1]]
        return replace(self, values=self.values * here[:, None])

    def ones(self) -> Decoded:
        """Return it with 1 for each value that is not 0, which counts as sent."""
        return replace(self, values=(self.values != 0).to(self.values.dtype))

    def arrivals(self, steps: Mapping[str, Step]) -> list[Arrival]:
        """Return what a kernel takes."""
        arrivals = list[Arrival]()
        for name, spans in self.spans.items():
            if name not in steps:
                continue
            out, weight, rate = steps[name]
            (part, row, first, num_sent), *others = spans
            if not others and part.stop - part.start == out.numel():
                arrivals.append(Arrival(out, row, first, num_sent, weight, rate))
                continue
            weights = [None] * len(spans) if weight is None else _pieces(weight, spans)
            for at, room, stepped in zip(spans, _pieces(out, spans), weights, strict=True):
                arrivals.append(Arrival(room, at.row, at.first, at.num_sent, stepped, rate))
        return arrivals

    def add_(self, arrival: Arrival, mean: Tensor) -> None:
        """Do what `average_many_` does where not all participants are here: the first clear, the last step, or round.

        Args:
            arrival: of the tensor.
            mean: float32, of all of these calls; `arrival.out` where that is float32.
        """
        positions, values = self.positions[0], self.values[0]
        if self.first == 0:
            mean.zero_()
        add_(flat(mean), list(zip(positions, values, strict=True)), 1.0 / self.num_participants)
        if self.first + len(positions) < self.num_participants:
            return
        if arrival.weight is not None:
            arrival.weight.add_(mean, alpha=-arrival.rate)  # where nothing was sent, zero
        elif arrival.out.dtype != mean.dtype:
            arrival.out.copy_(mean)


class SparseMean:
    """The mean of the largest elements of tensors: positions and values, decoded when they are used.

    Args:
        payload: with which they were sent.
        numels: elements of each whole tensor, by name.
        decode: returns the elements, of some parts after the other: they take more memory than messages.
        device: where they are.
        weights: of the participants, for `dense`; empty where they are equal.
    """

    def __init__(
        self,
        payload: TopK,
        numels: Mapping[str, int],
        decode: Callable[[], Iterable[Decoded]],
        device: torch.device,
        weights: Sequence[float] = (),
    ) -> None:
        self._payload, self._numels, self._decode, self._device = payload, numels, decode, device
        self._weights = weights

    def dense(self) -> dict[str, Tensor]:
        """Return it flat, float32, 0 where nobody has sent an element."""
        if not self._weights:
            return self._dense(self._decode)
        # Times N, as the kernels divide by N, or by the number of senders: then also by the mean of their weights.
        scales = len(self._weights) * torch.tensor(self._weights, device=self._device)
        means = self._dense(lambda: (each.scaled(scales) for each in self._decode()))
        if self._payload.mean_over == "senders":
            norms = self._dense(lambda: (each.ones().scaled(scales) for each in self._decode()))
            for name, norm in norms.items():
                means[name].div_(norm).masked_fill_(norm == 0, 0.0)
        return means

    def _dense(self, decode: Callable[[], Iterable[Decoded]]) -> dict[str, Tensor]:
        outs = {name: allocate(numel, torch.float32, self._device) for name, numel in self._numels.items()}
        self._step_(decode, {name: (out, None, 0.0) for name, out in outs.items()})
        return outs

    def step_(self, steps: Mapping[str, Step]) -> None:
        # Kernels write float32 and 16 bits, contiguous.
        outs = {
            name: (room.new_empty(self._numels[name], dtype=torch.float32), weight, rate)
            for name, (room, weight, rate) in steps.items()
            if not (room.dtype in DTYPES and room.is_contiguous())
        }
        self._step_(self._decode, {**steps, **outs} if outs else steps)
        for name, (out, _, _) in outs.items():
            steps[name][0].copy_(out.view(steps[name][0].shape))

    def _step_(self, decode: Callable[[], Iterable[Decoded]], steps: Mapping[str, Step]) -> None:
        over_senders, mean = self._payload.mean_over == "senders", torch.empty(0)
        for each in decode() if steps else ():
            if not (arrivals := each.arrivals(steps)):
                continue
            if each.positions.shape[1] < each.num_participants:
                mean = arrivals[0].out.float() if each.first == 0 else mean
                each.add_(arrivals[0], mean)
            else:
                averages, dtypes = averages_for(each.values.device), [arrival.out.dtype for arrival in arrivals]
                for dtype in dict.fromkeys(dtypes):
                    mine = [arrival for arrival, other in zip(arrivals, dtypes, strict=True) if other == dtype]
                    averages.average_many_(mine, each.positions, each.values, over_senders=over_senders)
            del each  # memory for the next


def _pieces(tensor: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    """Return the parts of a contiguous tensor that spans are of, which are of one size and follow each other."""
    part = slice(spans[0].part.start, spans[-1].part.stop)
    return cut(tensor, part).split(spans[0].part.stop - part.start)


def _groups(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Cut tensors into groups with at most so many elements, or of one tensor."""
    first = together = 0
    for number, count in enumerate(counts):
        if together and together + count > most:
            yield slice(first, number)
            first, together = number, 0
        together += count
    yield slice(first, len(counts))


def _spans(of_ranks: Iterable[Iterable[tuple[str, slice]]], counts: Sequence[int]) -> Spans:
    spans = dict[str, list[Span]]()
    for row, parts in enumerate(of_ranks):
        for (name, part), end, count in zip(parts, accumulate(counts), counts, strict=True):
            spans.setdefault(name, []).append(Span(part, row, end - count, count))
    return spans
