"""The largest elements of each tensor in few bits, the rest kept for later: one payload for gradients and for weights.

Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887 (the k largest of a tensor, every step); Sarfi,
Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, algorithm 1
(the k largest of each chunk of what the local steps have done). With e the residual of a participant, D its signal:

    accumulate   e = beta e + D        (or a correction of D; `compress.corrections`)
    send         Q(the k largest of e, per tensor or chunk)
    keep         e = e - the sent values
    average      the sum of what all N sent, each element divided by N, or by the number that sent it

Deviation: a chunk is a number of consecutive elements of a tensor, row by row, and the rest; SparseLoCo's authors cut
matrices into square tiles and vectors into divisors of their length, and as here send as many of a small chunk as of a
whole one. Their paper divides by N, their published code by the number of participants that sent the element, which is
better by far for local SGD (docs/methods/local_sgd.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_lowbw.arguments import check_one_of, from_mapping, is_count, is_number, names_arguments
from lightning_lowbw.compress.codec import ALL, VALUE_NAMES, SparseCodec
from lightning_lowbw.compress.payload import Message, Payload, Shapes
from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.schedule import Schedule

MeanOver = Literal["ranks", "senders"]
LEAST_OF = 4096  # elements: of fewer as many are sent as of this many, or a norm or a bias would wait for ever
SMALL_SHARE, LEAST_NUMEL, MOST_NUMEL = 0.03, 1024, 16384  # see `small_numel`


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


@names_arguments
@dataclass(frozen=True, kw_only=True)
class TopK(Payload, key="top_k"):
    """The largest elements of each tensor.

    Args:
        density: the fraction of elements sent, in (0, 1); where the schedule has stairs of sparsity these say it.
        chunk: the largest are sought among this many neighbouring elements of a tensor; None: in the whole tensor. Of
            the rest of a tensor, and of a small one, as many are sent as of a chunk, or of 4096 elements of a larger
            one: all where there are fewer.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; rounding
            errors are sent later. The integers number levels between the extremes of a block, see `compress.codec`;
            under the same names `Quantized` sends multiples of a scale.
        min_numel: tensors with fewer elements are sent dense, fused together, in the same message if that is not
            dear (`comm.peers.is_apart`). None: as `small_numel` says.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        decay: the factor of the residual from one round to the next, in [0, 1]; 1: no decay.
        mean_over: what a sum is divided by: all N participants ("ranks"), or the number that sent this element
            ("senders"). An element that a single participant has sent changes by the whole value with "senders", by 1/N
            of it with "ranks".
        momentum_masking: whether the velocity of sent elements is cleared (momentum factor masking). None: for SGD, as
            in the paper, at densities up to (1 - momentum) / 2, 5 % with 0.9. Above, an element is sent again before
            its momentum has faded, and would lose most of it. Not for Adam.

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

    takes_density = corrects = can_be_hidden = takes_weights = replaces_step = True
    steps_to_loss = 1.0  # at the densities of `cost_model`: benchmarks/results/headline.md
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
                choices_of = "for whole tensors" if name == "chunk" else "for a share of what is trained"
                raise ConfigurationError(
                    f"{name}={value!r}: give a number of elements, an integer >= 1, or None {choices_of}."
                )

    def check(self, when: Schedule, *, has_levels: bool | None = None) -> None:
        super().check(when, has_levels=has_levels)
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

    def decode(self, messages: Tensor, numels: Sequence[int], tensors: slice = ALL) -> tuple[Tensor, Tensor]:
        """Return the elements that participants have sent: positions int32, values float32, shape (groups,
        participants, elements).

        Args:
            messages: one row for each group of equal parts and each participant: uint8, shape (groups, participants,
                nbytes).
            numels: elements of each tensor that is not empty.
            tensors: consecutive tensors whose elements are returned.

        Raises:
            ValueError: a message is damaged; see `SparseCodec.decode`.
        """
        counts = self.nums_sent(numels)
        # One row for each message: the codec does not know of groups and participants.
        shape = *messages.shape[:2], sum(counts[tensors])
        decoded = self.codec.decode(messages.flatten(0, 1), counts, numels, tensors)
        positions, values = (each.view(shape) for each in decoded)
        return positions, values


@lru_cache(maxsize=64)
def _layouts(payload: TopK, numels: tuple[int, ...]) -> tuple[ChunkLayout, ...]:
    """Return the layout of each tensor; computed once for the tensors of every step."""
    return tuple(payload.layout(numel) for numel in numels)


@lru_cache(maxsize=64)
def _at(payload: TopK, density: float) -> TopK:
    return replace(payload, density=density)


def small_numel(numels: Iterable[int]) -> int:
    """Return the elements below which a tensor is small for a model: the smallest are 3 % of it, together.

    Sending these whole costs little, and norms, biases and the last layer do not wait. It is a fraction, because all
    matrices of a small model are small; but not below 1,024 elements, where sending all costs less than the work for
    one more tensor, nor above 16,384, or 3 % of a large model would be most of what is sent.

    Args:
        numels: elements of each tensor that is trained.

    Examples:
        >>> small_numel([6144] * 24), small_numel([64 * 512, 512, 512 * 512, 512, 5120, 10]), small_numel([10**9])
        (6144, 16384, 16384)
    """
    ordered = sorted(numels)
    left = SMALL_SHARE * sum(ordered)
    for numel in ordered:
        left -= numel
        if left < 0:
            return min(max(numel, LEAST_NUMEL), MOST_NUMEL)
    return LEAST_NUMEL


SPARSE_LOCO: dict[str, Any] = {
    "density": 1 / 64,
    "chunk": 4096,
    "value_dtype": "int2",
    "min_numel": 4096,
    "decay": 0.95,
    "mean_over": "senders",
}


def Compression(**changes: Any) -> TopK:
    """Return SparseLoCo's payload: the 64 largest of each 4096 elements in two bits, with a decay of 0.95.

    Args:
        **changes: arguments of `TopK`.

    Raises:
        ConfigurationError: an argument is unknown, or out of range.
    """
    return from_mapping(TopK, {**SPARSE_LOCO, **changes}, "compression")


def as_compression(choice: TopK | Mapping[str, Any] | None) -> TopK | None:
    """Return a choice of the user's as a value; a mapping changes SparseLoCo's payload.

    Raises:
        ConfigurationError: it is something else, or an argument is unknown or out of range.
    """
    if choice is None or isinstance(choice, TopK):
        return choice
    if not isinstance(choice, Mapping):
        raise ConfigurationError(
            f"compression={choice!r}: give a Compression, a mapping such as {{'value_dtype': 'int4'}}, or None."
        )
    return from_mapping(TopK, {**SPARSE_LOCO, **choice}, "compression")
