"""The largest elements of each tensor in few bits, the rest kept for later: one payload for gradients and for weights.

Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887 (the k largest of a tensor, every step); Sarfi,
Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, algorithm 1
(the k largest of each chunk of what the local steps have done). With e the residual of a participant, D its signal:

    accumulate   e = beta e + D        (or a correction of D; `payloads.corrections`)
    send         Q(the k largest of e, per tensor or chunk)
    keep         e = e - the sent values
    average      the sum over all N participants, each element divided by N, or by the number that sent it

Deviation: a chunk is a number of consecutive elements of a tensor, row by row, and the rest; SparseLoCo's authors cut
matrices into square tiles and vectors into divisors of their length, and as here send as many of a small chunk as of a
whole one. Their paper divides by N, their published code by the number of participants that sent the element, which is
better by far for local SGD (docs/methods/local_sgd.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import accumulate, groupby
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.arguments import check_one_of, is_count, is_number
from lightning_lowbw.comm.peers import Peers, part_of
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels import dispatch, gpu, reference
from lightning_lowbw.kernels.dispatch import averages_for, kernels_for
from lightning_lowbw.kernels.reference import Arrival, Segment, sample_accumulated
from lightning_lowbw.kernels.table import DTYPES, FOLLOWED, Workspace
from lightning_lowbw.kernels.tensors import allocate, cut, flat
from lightning_lowbw.payloads.codec import MAX_NUMEL, VALUE_NAMES, SparseCodec
from lightning_lowbw.payloads.corrections import Fields
from lightning_lowbw.payloads.exchange import Arrived, Beside, Exchange, Pending, Prepared, Residuals, Signal, Step
from lightning_lowbw.payloads.payload import Message, Payload, Shapes
from lightning_lowbw.schedules.schedule import Schedule

MeanOver = Literal["ranks", "senders"]
Sparse = tuple[Tensor, Tensor]  # positions, ascending, and values
MIN_PER_CANDIDATE = 4  # elements: if more than one in this many is a candidate, searching all takes no longer
LEAST_OF = 4096  # elements: of fewer as many are sent as of this many, or a norm or a bias would wait for ever


def num_selected(numel: int, density: float) -> int:
    """Return k, how many of `numel` elements are sent at `density`: at least one, at most all.

    In Python's double precision: float32 makes 999 of 1e6 x 0.001.
    """
    return min(numel, max(1, round(numel * density)))


@dataclass(frozen=True)
class ChunkLayout:
    """How many elements are sent of a tensor.

    Attributes:
        num_full: whole chunks.
        k: elements sent of each whole chunk.
        k_last: elements sent of the rest; of the tensor, where it is not cut into chunks.
    """

    num_full: int
    k: int
    k_last: int

    @property
    def num_sent(self) -> int:
        """Elements sent of the whole tensor."""
        return self.num_full * self.k + self.k_last


@dataclass(frozen=True, kw_only=True)
class TopK(Payload, key="top_k"):
    """The largest elements of each tensor.

    Args:
        density: the fraction of elements sent, in (0, 1); where the schedule has stairs of sparsity these say it.
        chunk: the largest are sought among this many neighbouring elements of a tensor; None: in the whole tensor. Of
            the rest of a tensor, and of a small one, as many are sent as of a chunk, or of 4096 elements of a larger
            one: all where there are fewer.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; rounding
            errors are sent later. The integers number levels between the extremes of a block, see `payloads.codec`;
            under the same names `Quantized` sends multiples of a scale.
        min_numel: tensors with fewer elements are sent dense, fused together, in the same message if that is not
            dear (`comm.peers.is_apart`). None: as `small_numel` says.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        decay: the factor of the residual from one round to the next, in [0, 1]; 1: no decay.
        mean_over: what a sum is divided by: all N participants ("ranks"), or the number that sent this element
            ("senders"). An element that a single participant has sent changes by the whole value with "senders", by
            1/N of the value with "ranks".
        momentum_masking: whether the velocity of sent elements is cleared (momentum factor masking). None: for SGD, as
            in the paper, at densities up to (1 - momentum) / 2, 5 % with 0.9. Above, an element is sent again before
            its momentum has faded, and would lose most of the momentum. Not for Adam.

    Raises:
        ConfigurationError: a value is out of range.

    Examples:
        >>> TopK(density=0.01).num_sent(1 << 20), TopK(density=1 / 64, chunk=4096).num_sent(1 << 20)
        (10486, 16384)
    """

    density: float = 0.001
    chunk: int | None = None
    value_dtype: str = "bfloat16"
    min_numel: int | None = None
    exclude: Sequence[str] = ()
    decay: float = 1.0
    mean_over: MeanOver = "ranks"
    momentum_masking: bool | None = None

    takes_density = corrects = can_be_hidden = takes_weights = True
    fixed = ("mean_over",)

    def __post_init__(self) -> None:
        if not is_number(self.density) or not 0 < self.density < 1:
            raise ConfigurationError(
                f"density={self.density!r}: give a number between 0 and 1; without compression all is sent."
            )
        if not is_number(self.decay) or not 0 <= self.decay <= 1:
            raise ConfigurationError(f"decay={self.decay!r}: give a number in [0, 1].")
        is_list = isinstance(self.exclude, Sequence) and not isinstance(self.exclude, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigurationError(f"exclude={self.exclude!r}: give a list of parameter name patterns.")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        check_one_of("value_dtype", self.value_dtype, VALUE_NAMES)
        check_one_of("mean_over", self.mean_over, get_args(MeanOver))
        if not isinstance(self.momentum_masking, bool | None):
            raise ConfigurationError(f"momentum_masking={self.momentum_masking!r}: give True, False or None.")
        for name in ("chunk", "min_numel"):
            value = getattr(self, name)
            if not is_count(value) and value is not None:
                choices_of = "for whole tensors" if name == "chunk" else "for a share of the trained elements"
                raise ConfigurationError(
                    f"{name}={value!r}: give a number of elements, an integer >= 1, or None {choices_of}."
                )

    def check(self, when: Schedule) -> None:
        super().check(when)
        if when.averages_weights and self.momentum_masking is not None:
            raise ConfigurationError(
                f"momentum_masking={self.momentum_masking!r} every k steps: the knob is about gradients, which are "
                "exchanged every step. Leave it out, or use when=EveryStep()."
            )

    def check_names(self, names: Iterable[str]) -> None:
        names = list(names)
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigurationError(
                    f"exclude={list(self.exclude)}: {pattern!r} matches no parameter of the model; they are named "
                    f"{', '.join(names[:8])}{', ...' if len(names) > 8 else '.'}"
                )

    def at(self, density: float) -> TopK:
        return self if density == self.density else _at(self, density)

    def masks(self, momenta: Iterable[float], *, by_default: bool) -> bool:
        if self.momentum_masking is not None:
            return self.momentum_masking
        largest = 1.0 - 2.0 * self.density + 1e-6  # 1 - 0.9 is not 0.1
        return by_default and all(momentum <= largest for momentum in momenta)

    def uses_kernels(self, device: torch.device) -> bool:
        return True

    def sample(self, min_numel: int) -> TopK:
        return replace(self, min_numel=min_numel, exclude=())

    def exchange(self, peers: Peers, when: Schedule) -> TopKExchange:
        return TopKExchange(self, peers)

    @property
    def codec(self) -> SparseCodec:
        """The wire format."""
        return SparseCodec(self.value_dtype)

    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        nbytes = self.nbytes([-(-math.prod(shape) // num_parts) for shape in shapes])
        return [
            Message("all_gather", nbytes),
            Message("gather_in_node", num_participants * nbytes),
        ]

    def compresses(self, name: str, numel: int, small_numel: int) -> bool:
        is_excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return numel >= (self.min_numel or small_numel) and not is_excluded

    def layout(self, numel: int) -> ChunkLayout:
        """Return how many elements are sent of a tensor."""
        density = self.density
        if numel == 0:
            return ChunkLayout(0, 0, 0)
        if self.chunk is None:
            return ChunkLayout(0, 0, num_selected(numel, density))
        num_full, rest = divmod(numel, self.chunk)
        least = num_selected(min(self.chunk, LEAST_OF), density)
        # As many of the rest as of a whole chunk, or of LEAST_OF elements of a larger one.
        k_last = min(rest, max(num_selected(rest, density), least))
        return ChunkLayout(num_full, num_selected(self.chunk, density), k_last)

    def selected(self, numels: Sequence[int]) -> list[dict[str, Any]]:
        """Return the fields of each segment (`kernels.reference.Segment`) that say how many elements are selected."""
        layouts = _layouts(self, tuple(numels))
        if self.chunk is None:
            return [{"k": layout.k_last} for layout in layouts]
        return [{"k": layout.k, "chunk": self.chunk, "k_last": layout.k_last} for layout in layouts]

    def nums_sent(self, numels: Sequence[int]) -> list[int]:
        """Return how many elements are sent of each tensor."""
        return [layout.num_sent for layout in _layouts(self, tuple(numels))]

    def num_sent(self, numel: int) -> int:
        """Return how many of a tensor's elements are sent."""
        return self.layout(numel).num_sent

    def nbytes(self, numels: Sequence[int]) -> int:
        """Return the size of a participant's message about tensors with these numbers of elements, in bytes."""
        numels = [numel for numel in numels if numel]
        return self.codec.nbytes(self.nums_sent(numels), numels) if numels else 0


@lru_cache(maxsize=64)
def _layouts(payload: TopK, numels: tuple[int, ...]) -> tuple[ChunkLayout, ...]:
    """Return the layout of each tensor; computed once for the tensors of every step."""
    return tuple(payload.layout(numel) for numel in numels)


@lru_cache(maxsize=64)
def _at(payload: TopK, density: float) -> TopK:
    return replace(payload, density=density)


# The k largest --------------------------------------------------------------------------------------------------------
# Exactly k elements of a tensor or chunk are selected, in ascending order, so that all ranks send messages of one size.
# A threshold, from a sample and then from step to step, finds candidates in the pass that accumulates; the k largest
# candidates are sent. If magnitudes are equal, the first elements are selected, whatever the way they were found.


class Selection:
    """Compress all tensors of an optimizer in one call: correct them, find their largest elements, take these out.

    The backend is chosen here: Triton's kernels, one launch of each for all tensors, unless these are cut into chunks;
    else, tensor by tensor, a pass compiled by numba, or plain torch. `kernels.reference.compress_many_` specifies the
    result.

    Examples:
        >>> segment = Segment(
        ...     residual=torch.tensor([0.0, 5.0, 1.0]), momentum_buffer=None, gradient=torch.ones(3), weight=None, k=1
        ... )
        >>> Selection().compress_({"weight": segment}, masking=True)
        [(tensor([1]), tensor([6.]))]
        >>> segment.residual
        tensor([1., 0., 2.])
    """

    def __init__(self) -> None:
        self._selectors: dict[str, SampledSelector] = {}
        self._names: tuple[str, ...] = ()  # the tensors of the workspace
        self._workspace = Workspace()

    @property
    def thresholds(self) -> dict[str, float]:
        """The last threshold of each tensor, by name; 0 if none is known. Reading them waits for a GPU.

        They influence only the time, never which elements are selected. A GPU estimates thresholds that were set anew.
        """
        known = {name: selector.threshold for name, selector in self._selectors.items()}
        return known | dict(zip(self._names, self._workspace.thresholds.tolist(), strict=False))  # more: other parts

    @thresholds.setter
    def thresholds(self, thresholds: Mapping[str, float]) -> None:
        self._names, self._workspace = (), Workspace()
        self._selectors = {name: SampledSelector(threshold) for name, threshold in thresholds.items()}

    @torch.no_grad()
    def compress_(self, segments: Mapping[str, Segment], *, masking: bool) -> list[tuple[Tensor, Tensor]]:
        """Accumulate the gradients, and take the largest elements out of the residuals.

        In place:
            The residuals and momentum buffers of all segments.

        Args:
            segments: by the name of the parameter, all on one device; their tensors are contiguous, of any shape, with
                elements; k is at least 1. All have the same chunk.
            masking: whether the velocity of taken elements is cleared.

        Returns:
            For each segment: positions, int64, ascending, and their exact values, float32; both of shape (num_sent,).
        """
        table = list(segments.values())
        if table and table[0].chunk is None and dispatch.uses_triton(table[0].residual.device):
            self._names = tuple(segments)
            together = gpu.compress_many_(table, masking=masking, workspace=self._workspace)
            counts = [segment.k for segment in table]
            return list(zip(*(each.unsafe_split_with_sizes(counts) for each in together), strict=True))
        parts = []
        for name, segment in segments.items():
            for other in segment.other_parts:
                other.update_()
            positions = self._accumulate_(name, segment)
            residual, velocity = segment.residual, segment.momentum_buffer if masking else None
            masked = None if velocity is None else flat(velocity)
            parts.append((positions, kernels_for(residual, masked).take_(residual, masked, positions)))
        return parts

    def _accumulate_(self, name: str, segment: Segment) -> Tensor:
        """Accumulate a gradient; return the positions of the largest elements."""
        if segment.chunk is None:
            return self._selectors.setdefault(name, SampledSelector()).accumulate_(segment)
        _kernels_of(segment).accumulate_(segment, 0.0)
        residual, chunk = segment.residual, segment.chunk
        is_on_gpu = chunk <= gpu.LONGEST_CHUNK and dispatch.uses_triton(residual.device)
        kernels = gpu if is_on_gpu else kernels_for(residual)
        positions: Tensor = kernels.largest(residual, segment.k, chunk, segment.k_last)
        return positions


def _kernels_of(segment: Segment) -> ModuleType:
    """Return the module that accumulates a segment."""
    moment = segment.second_moment
    squares = () if moment is None else (moment.square, moment.largest)
    return kernels_for(segment.residual, segment.momentum_buffer, segment.gradient, segment.weight, *squares)


class SampledSelector:
    """Find the k largest of one tensor among the candidates above a threshold, and adapt the threshold to their number.

    The threshold aims at twice k candidates. An exact top-k over the candidates then drops the surplus, which is the
    smallest candidates, wherever they lie (the published implementations cut by position, or take the elements that an
    unlucky sample gives: recall down to 15 %). If there are too few candidates, the threshold is estimated anew from a
    sample, and in the end the whole tensor is searched.

    Attributes:
        threshold: 0 if none is known. It influences only the time, never which elements are selected.
    """

    SAMPLE = 1 << 15  # elements; at density 1e-3 some 65 elements lie above the threshold
    SMALL = 1 << 16  # elements; below this, searching the whole tensor is as fast
    SURPLUS = 2.0  # candidates aimed at, in units of k

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold
        self._last: tuple[int, float] | None = None  # k and the least magnitude that was among the k largest

    def accumulate_(self, segment: Segment) -> Tensor:
        """Accumulate a gradient, then return the positions of the k largest of the residual: int64, ascending.

        In place:
            its residual and momentum buffer.

        Args:
            segment: without chunks.
        """
        residual, k, numel = segment.residual, segment.k, segment.residual.numel()
        kernels = _kernels_of(segment)
        of_residual = kernels_for(residual) if kernels is reference else kernels
        if numel <= self.SMALL or self.SURPLUS * k >= numel / MIN_PER_CANDIDATE:
            kernels.accumulate_(segment, 0.0)
            return of_residual.largest(residual, k)
        stride = max(1, numel // self.SAMPLE) | 1  # odd, not to fall into step with rows of a power of two elements
        # Each candidate has 8 bytes. A tail as heavy as Cauchy's has now and then four times the candidates aimed at.
        # If there are more, mostly in the second step, another pass searches.
        room = int(4 * self.SURPLUS * k)
        if not self.threshold > 0.0:
            self.threshold = self._estimate(sample_accumulated(segment, stride), numel, k)
        positions = self._choose(residual, kernels.accumulate_(segment, self.threshold, room), k)
        if positions is None:  # the distribution has moved; another estimate costs less than a search of the whole
            self.threshold = self._estimate(residual[::stride].abs(), numel, k)
            if self.threshold > 0.0:  # else the tensor is dead, and everything would be a candidate
                positions = self._choose(residual, of_residual.reach(residual, self.threshold, 2 * room), k)
        if positions is None:
            self.threshold, positions = 0.0, of_residual.largest(residual, k)
        return positions

    def _estimate(self, sample: Tensor, numel: int, k: int) -> float:
        """Return the magnitude that about SURPLUS * k of `numel` elements reach, from a sample of the magnitudes."""
        rank = max(1, round(self.SURPLUS * k * sample.numel() / numel))
        return float(sample.topk(rank, sorted=False).values.min())

    def _choose(self, values: Tensor, candidates: Tensor | None, k: int) -> Tensor | None:
        """Return the k largest of the candidates and set the threshold for the next step; None if they do not fit."""
        if candidates is None or candidates.numel() < k:
            return None
        magnitudes = values.index_select(0, candidates).abs_()
        found = kernels_for(magnitudes).largest(magnitudes, k)
        count, least = candidates.numel(), float(magnitudes.index_select(0, found).min())
        if count > k and least > self.threshold:
            # The power law through two points, (threshold, count) and (least, k). How steep it is has to be measured:
            # error feedback cuts the tail off at the last step's `least`, and all that comes lies close behind it.
            exponent = math.log(least / self.threshold) / math.log(count / k)
            self.threshold *= (count / (self.SURPLUS * k)) ** exponent
            # Residuals grow, and `least` with them; the slope above is too flat to follow.
            if self._last is not None and self._last[0] == k:
                self.threshold *= min(max(least / self._last[1], 0.5), 2.0) ** FOLLOWED
        self._last = (k, least) if least > 0.0 else None
        return candidates.index_select(0, found)


# The exchange ---------------------------------------------------------------------------------------------------------


class TopKExchange(Exchange):
    """Exchanges the largest elements of tensors between peers, and keeps the rest of each.

        prepare   e = beta e + (corrected) signal; the k largest elements of e     | `Selection`
        send      encode them, an all-gather between peers                         | `payloads.codec`, `comm.peers`
        wait      1/N of the sum, in one order                                     | `SparseMean`

    On two levels each rank of a node does this for its part of every tensor, among the ranks that have this part in
    the other nodes; inside the node the messages are gathered.

    Args:
        payload: the payload; may be replaced between steps, on all ranks.
        peers: the participants.
    """

    def __init__(self, payload: TopK, peers: Peers) -> None:
        self.payload, self.peers = payload, peers
        self.residuals = Residuals()
        self.selection = Selection()
        # A flag per tensor, and views of the flags. They stay in one place, because a table of the kernels has their
        # addresses. Nothing clears a flag: a fault ends the training.
        self._flags = torch.empty(0, dtype=torch.bool)
        self._views: tuple[Tensor, ...] = ()

    def prepare(self, signal: Signal, fields: Fields | None = None) -> Prepared:
        """Accumulate a signal into the residuals, and take the largest elements out of the residuals.

        In place:
            The residuals; with fields of a correction the velocities, and Adam's second moments.

        Raises:
            ConfigurationError: a part has more elements than there are positions.
        """
        names, tensors, is_whole = list(signal), list(signal.values()), self.peers.num_local_ranks == 1
        device, whole = tensors[0].device, dict(zip(names, map(Tensor.numel, tensors), strict=True))
        # The whole in its own shape: views of hundreds of tensors take as long as all else on the host.
        if not (is_whole and all(map(Tensor.is_contiguous, tensors))):
            tensors = [_part(tensor, self.peers) for tensor in tensors]
        parts, numels = dict(zip(names, tensors, strict=True)), [*map(Tensor.numel, tensors)]
        if (most := max(numels)) > MAX_NUMEL:
            name = names[numels.index(most)]
            raise ConfigurationError(
                f"{name!r} has {most} elements, positions go up to {MAX_NUMEL}: exclude=[{name!r}]."
            )
        kept = self.residuals.ensure(dict(zip(names, numels, strict=True)), device)
        if fields is not None and (self._flags.numel() != len(names) or self._flags.device != device):
            self._flags = torch.zeros(len(names), dtype=torch.bool, device=device)
            self._views = self._flags.unbind()
        segments = self._segments_of(parts, kept, fields)
        residuals = [segment.residual for segment in segments.values()]
        if self.payload.decay != 1.0 and segments:
            torch._foreach_mul_(residuals, self.payload.decay)
        masks = fields is not None and fields.masks
        selected = self.selection.compress_(segments, masking=masks)
        send = partial(self._send, selected, residuals, whole, device)
        return Prepared(send, None if fields is None else (names, self._flags))

    def _segments_of(
        self, parts: Mapping[str, Tensor], residuals: Mapping[str, Tensor], fields: Fields | None
    ) -> dict[str, Segment]:
        """Return the segments of tensors with elements.

        Args:
            parts: this rank's part of each tensor, contiguous.
            residuals: the residual of each part.
            fields: see `prepare`.
        """
        filled = [name for name, part in parts.items() if part.numel()]
        selected = self.payload.selected([parts[name].numel() for name in filled])
        columns = zip(filled, [residuals[name] for name in filled], selected, strict=True)
        if fields is None:
            return {name: Segment(residual=kept, gradient=parts[name], **counts) for name, kept, counts in columns}
        flags, added = dict(zip(parts, self._views, strict=True)), fields.of_tensors
        # No element is this rank's, but each rank keeps Adam's second moment of the whole tensor.
        for name in added.keys() - filled:
            for other in added[name].get("other_parts", ()):
                other.update_()
        return {
            name: Segment(residual=kept, gradient=parts[name], fault=flags[name], **added[name], **counts)
            for name, kept, counts in columns
        }

    def _send(
        self,
        selected: list[Sparse],
        residuals: list[Tensor],
        numels: Mapping[str, int],
        device: torch.device,
        status: Tensor | None = None,
        whole: Signal | None = None,
    ) -> Pending:
        """Send elements.

        In place:
            The residuals: rounding errors go back into them. `selected` is used up.

        Wire:
            `TopK.nbytes` of this rank's parts, padded to the longest of the ranks of a node; then the status, and this
            rank's part of the whole tensors (`Beside`). An all-gather; on two levels also one inside the node.

        Args:
            selected: elements of each tensor, already subtracted from its residual; empty parts are absent.
            residuals: of the same tensors.
            numels: elements of each whole tensor.
            device: of the message.
            status: see `Prepared.send`.
            whole: see `Prepared.send`; on two levels equal on the ranks of a node.
        """
        message = torch.empty(0, dtype=torch.uint8, device=device)
        if selected:
            message = self.payload.codec.encode(selected, [*map(Tensor.numel, residuals)], residuals)
            selected.clear()  # memory for the messages of all
        messages = Messages.of(self.payload, numels, self.peers)
        if missing := max(messages.sizes) - message.numel():
            message = pad(message, (0, missing))
        beside = Beside(status, whole, self.peers, device)
        if beside.parts:
            message = torch.cat([message, *beside.parts])
            beside.parts.clear()
        work = self.peers.begin_gather(message)
        beside.begin()
        return PendingTopK(messages, self.peers, work, beside, device)

    def to(self, device: torch.device) -> None:
        """Move the residuals; the kernels' workspaces are made anew, except the thresholds."""
        super().to(device)
        self.selection.thresholds = self.selection.thresholds

    def state_dict(self) -> dict[str, Any]:
        return {"thresholds": dict(self.selection.thresholds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.selection.thresholds = state.get("thresholds", {})  # none of another payload
        self._flags = torch.empty(0, dtype=torch.bool)


def _part(tensor: Tensor, peers: Peers) -> Tensor:
    """Return this rank's part of a tensor: contiguous, a copy where its elements are in another order in memory."""
    return tensor if peers.num_local_ranks == 1 and tensor.is_contiguous() else cut(tensor, peers.part(tensor.numel()))


ELEMENT_BYTES = 8  # a position in int32, a value in float32
DECODED_BYTES = 1 << 28  # 256 MiB: the limit for the elements that are decoded together; a single tensor may have more


class Span(NamedTuple):
    """The position of the elements of a tensor, or a part of one, among the elements of a piece."""

    part: slice  # of the tensor
    row: int  # of the rank that keeps the part
    first: int
    num_sent: int


class Piece(NamedTuple):
    """Some tensors whose elements are decoded together, on the ranks of a node that keep parts of the same sizes."""

    ranks: slice  # of the node
    tensors: slice
    numels: list[int]  # of all parts of one of these ranks
    spans: dict[str, list[Span]]  # by tensor: a span for each of these ranks


class Decoded(NamedTuple):
    """The elements of a piece.

    Attributes:
        positions: in the part: int32, shape (local ranks, participants, elements).
        values: float32, of the same shape.
        spans: of the piece.
    """

    positions: Tensor
    values: Tensor
    spans: dict[str, list[Span]]

    def arrivals(self, steps: Mapping[str, Step]) -> list[Arrival]:
        """Return the arguments of a kernel for the tensors that are stepped."""
        arrivals = list[Arrival]()
        for name, spans in self.spans.items():
            if name not in steps:
                continue
            out, weight, rate = steps[name]
            (part, row, first, num_sent), *others = spans
            if not others and part.stop - part.start == out.numel():
                arrivals.append(Arrival(out, row, first, num_sent, weight, rate))
                continue
            weights = [None] * len(spans) if weight is None else _parts(weight, spans)
            for at, room, stepped in zip(spans, _parts(out, spans), weights, strict=True):
                arrivals.append(Arrival(room, at.row, at.first, at.num_sent, stepped, rate))
        return arrivals


def _parts(tensor: Tensor, spans: Sequence[Span]) -> Sequence[Tensor]:
    """Return the parts of a contiguous tensor at spans, which are of one size and follow one another: in two calls."""
    part = slice(spans[0].part.start, spans[-1].part.stop)
    return cut(tensor, part).split(spans[0].part.stop - part.start)


@dataclass(frozen=True)
class Messages:
    """The content of the messages of an all-gather.

    Two nodes of two ranks, a tensor w of 5 elements and one b of 2: each rank sends the selected elements of
    its parts of both, and gets all four messages.

                    local rank 0                        local rank 1
        node 0      [w[0:3], b[0:1] | status]           [w[3:5], b[1:2], padding | status]
        node 1      [w[0:3], b[0:1] | status]           [w[3:5], b[1:2], padding | status]

    `sizes` are the bytes before the padding, of local rank 0 and 1. The piece with `ranks=0:1` is what both nodes have
    sent of w[0:3] and b[0:1].

    Attributes:
        payload: the payload of the step.
        numels: elements of each whole tensor, by name.
        sizes: bytes of the elements in the message of each rank of a node.
        pieces: of all messages.
    """

    payload: TopK
    numels: Mapping[str, int]
    sizes: list[int]
    pieces: list[Piece]

    @classmethod
    def of(cls, payload: TopK, numels: Mapping[str, int], peers: Peers) -> Messages:
        of_ranks = peers.num_local_ranks, peers.num_participants
        return _messages(payload, tuple(numels.items()), *of_ranks, DECODED_BYTES // ELEMENT_BYTES)

    def decode(self, gathered: Tensor) -> Iterator[Decoded]:
        """Yield the elements in the messages of all ranks, piece by piece."""
        for ranks, tensors, numels, spans in self.pieces:
            messages = gathered[ranks, :, : self.sizes[ranks.start]]
            # One row for each message: the codec does not know of local ranks and participants.
            decoded = self.payload.codec.decode(messages.flatten(0, 1), self.payload.nums_sent(numels), numels, tensors)
            shape = *messages.shape[:2], -1
            yield Decoded(decoded[0].view(shape), decoded[1].view(shape), spans)
            del decoded  # memory for the next


@lru_cache(maxsize=16)
def _messages(
    payload: TopK, numels: tuple[tuple[str, int], ...], num_local_ranks: int, num_participants: int, most: int
) -> Messages:
    """Return the content of messages, `most` elements in a piece; computed once for the tensors of every step."""
    parts = [
        {name: part for name, numel in numels if (part := part_of(numel, each, num_local_ranks)).stop > part.start}
        for each in range(num_local_ranks)
    ]
    lengths = [[part.stop - part.start for part in of_rank.values()] for of_rank in parts]
    pieces = []
    for of_one, ranks in groupby(range(num_local_ranks), key=lambda each: lengths[each]):
        alike, counts = list(ranks), payload.nums_sent(of_one)
        for tensors in _groups(counts, most // (num_participants * len(alike))):
            spans, sent = dict[str, list[Span]](), counts[tensors]
            for row, of_rank in enumerate(parts[each] for each in alike):
                firsts = accumulate(sent, initial=0)
                for (name, part), first, count in zip([*of_rank.items()][tensors], firsts, sent, strict=False):
                    spans.setdefault(name, []).append(Span(part, row, first, count))
            pieces.append(Piece(slice(alike[0], alike[-1] + 1), tensors, of_one, spans))
    return Messages(payload, dict(numels), [payload.nbytes(of_rank) for of_rank in lengths], pieces)


def _groups(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Cut tensors into groups with at most so many elements, or of one tensor."""
    first = together = 0
    for number, count in enumerate(counts):
        if together and together + count > most:
            yield slice(first, number)
            first, together = number, 0
        together += count
    if counts:
        yield slice(first, len(counts))


class PendingTopK(Pending):
    """Messages of all participants, in progress.

    Args:
        messages: their content.
        peers: the participants.
        work: the all-gather.
        beside: the status and the whole tensors, which follow the elements.
        device: of the messages.
    """

    def __init__(self, messages: Messages, peers: Peers, work: Any, beside: Beside, device: torch.device) -> None:
        self._messages, self._peers, self._work, self._beside, self._device = messages, peers, work, beside, device

    def _receive(self) -> Arrived:
        messages = self._messages
        with self._peers.ledger.waiting(self._device):
            gathered = self._work.wait()
        status, whole = self._beside.read(gathered[..., max(messages.sizes) :])
        decode: Callable[[], Iterable[Decoded]] = partial(messages.decode, gathered)
        # Launched before the host waits for the status. Over senders a mean uses the values up.
        if status.numel() and len(messages.pieces) == 1 and messages.payload.mean_over == "ranks":
            decode = partial(iter, list(decode()))
        return Arrived(SparseMean(messages, decode, self._device, self._peers.weights), status, whole)


class SparseMean:
    """The mean of the largest elements of tensors: positions and values, decoded when they are used.

    Args:
        messages: the content of the messages.
        decode: returns the elements, piece by piece: they take more memory than messages.
        device: of the elements.
        weights: of the participants, for `dense`; empty where they are equal.
    """

    def __init__(
        self,
        messages: Messages,
        decode: Callable[[], Iterable[Decoded]],
        device: torch.device,
        weights: Sequence[float] = (),
    ) -> None:
        self._numels, self._over_senders = messages.numels, messages.payload.mean_over == "senders"
        self._decode, self._device, self._weights = decode, device, weights

    def dense(self) -> dict[str, Tensor]:
        """Return it flat, float32, 0 where no participant has sent an element."""
        if not self._weights:
            return self._dense()
        # Times N, as the kernels divide by N, or by the number of senders: then also by the mean of their weights.
        scales = len(self._weights) * torch.tensor(self._weights, device=self._device).unsqueeze(1)
        means = self._dense(lambda values: values * scales)
        if self._over_senders:
            norms = self._dense(lambda values: (values != 0) * scales)
            for name, norm in norms.items():
                means[name].div_(norm).masked_fill_(norm == 0, 0.0)
        return means

    def _dense(self, change: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        outs = {name: allocate(numel, torch.float32, self._device) for name, numel in self._numels.items()}
        self._step_({name: (out, None, 0.0) for name, out in outs.items()}, change)
        return outs

    def step_(self, steps: Mapping[str, Step]) -> None:
        # Kernels write float32 and 16 bits, contiguous.
        outs = {
            name: (room.new_empty(self._numels[name], dtype=torch.float32), weight, rate)
            for name, (room, weight, rate) in steps.items()
            if not (room.dtype in DTYPES and room.is_contiguous())
        }
        self._step_({**steps, **outs} if outs else steps)
        for name, (out, _, _) in outs.items():
            steps[name][0].copy_(out.view(steps[name][0].shape))

    def _step_(self, steps: Mapping[str, Step], change: Callable[[Tensor], Tensor] | None = None) -> None:
        """Do `step_` with the values as they are, or changed."""
        for each in self._decode() if steps else ():
            arrivals, averages = each.arrivals(steps), averages_for(self._device)
            values = each.values if change is None else change(each.values)
            for dtype in dict.fromkeys([arrival.out.dtype for arrival in arrivals]):
                alike = [arrival for arrival in arrivals if arrival.out.dtype == dtype]
                averages.average_many_(alike, each.positions, values, over_senders=self._over_senders)
            del each, values  # memory for the next
