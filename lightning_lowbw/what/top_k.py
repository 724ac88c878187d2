"""The largest elements of each tensor in few bits, the rest kept for later: one payload for gradients and for weights.

Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887 (the k largest of a tensor, every step); Sarfi,
Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, algorithm 1
(the k largest of each chunk of what the local steps have done). With e the residual of a participant, D its signal:

    accumulate   e = beta e + D        (or a correction of D; `what.momentum`, `what.adam`)
    send         Q(the k largest of e, per tensor or chunk)
    keep         e = e - what was sent
    average      the sum of what all N sent, each element divided by N, or by the number that sent it

Deviation: a chunk is a number of consecutive elements of a tensor, row by row, and the rest; SparseLoCo's authors cut
matrices into square tiles and vectors into divisors of their length, and as here send as many of a small chunk as of a
whole one. Their paper divides by N, their published code by the number of participants that sent the element, which is
better by far for local SGD (docs/methods/sparse_local_sgd.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_lowbw.arguments import check_flag, check_one_of, from_mapping, is_count, is_number, names_arguments
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.averages import scatter_mean_
from lightning_lowbw.ops.table import upload
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.narrow_values import NARROW_NAMES
from lightning_lowbw.what.selection import SELECTIONS, num_selected
from lightning_lowbw.what.sparse_sum import Sparse
from lightning_lowbw.what.values import VALUE_NAMES

MeanOver = Literal["ranks", "senders"]
Correction = Literal["auto", "error_feedback"]
EXCHANGES = ("auto", "all_gather", "reduce_scatter", "dense")
DENSE_NAMES = ("float32", *NARROW_NAMES)
# What may be given where whole tensors are summed: what is sent, and the default.
SUMMED_DENSE = ("float32", "bfloat16")
LEAST_OF = 4096  # elements: of fewer as many are sent as of this many, or a norm or a bias would wait for ever
SMALL_SHARE, LEAST_NUMEL, MOST_NUMEL = 0.03, 1024, 16384  # see `small_numel`


@dataclass(frozen=True)
class ChunkLayout:
    """How many elements are sent of a tensor.

    Attributes:
        num_full: whole chunks.
        k: elements sent of each of these.
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
class TopK:
    """The largest elements of each tensor.

    Args:
        density: the fraction of elements sent, in (0, 1); where the schedule has stairs of sparsity these say it.
        chunk: the largest are sought among this many neighbouring elements of a tensor; None: in the whole tensor. Of
            the rest of a tensor, and of a small one, as many are sent as of a chunk, or of 4096 elements of a larger
            one: all where there are fewer.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; rounding
            errors are sent later.
        min_numel: tensors with fewer elements are sent dense, all of them fused into one all-reduce. None: as
            `small_numel` says.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        selection: "sampled" (a threshold finds the candidates) or "exact" (sorts); both send the k largest.
        decay: the factor of the residual from one round to the next, in [0, 1]; 1: no decay.
        mean_over: what a sum is divided by: all N participants ("ranks"), or the number that sent this element
            ("senders"). An element that a single participant has sent changes by the whole value with "senders", by 1/N
            of it with "ranks".
        clip_to_median: whether a participant's part of a chunk is scaled down if its norm is above the median of all.
            The clipped part is lost: this is meant for participants that cannot be trusted.
        exchange: how the selected elements of gradients are summed. "all_gather": every rank gets those of all,
            (N-1) k elements. "reduce_scatter": below 6 k elements whatever N is; where the selections differ much, some
            of the sums wait at the rank that owns them. "dense": an all-reduce of whole tensors in float32, whatever
            `value_dtype` is, for low sparsities.
            "auto" takes the fastest by the volume formulas and, if these do not decide, by a short measurement of the
            link; rank 0 logs the choice. On two levels, and every k steps, it is the all-gather.
        dense_dtype: "float32", or "bfloat16", "float16", "int8" or "int4": the type in which small tensors of gradients
            are sent in sparse steps; rounding errors are sent later.
        correction: of gradients: "auto" uses momentum correction for SGD, a correction of each rank's Adam step for
            Adam and AdamW, and error feedback for others. "error_feedback" works with any optimizer.
        momentum_masking: whether the velocity of sent elements is cleared (momentum factor masking). None: for SGD, as
            in the paper, not for Adam.
        keep_momentum: whether velocities are not cleared at high densities. These are densities above (1 - momentum) /
            2, 5 % with 0.9, where an element is sent again before its momentum has faded, and would lose most of it.
            None: where "auto" has chosen the density.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> TopK(density=0.01).num_sent(1 << 20), TopK(density=1 / 64, chunk=4096).num_sent(1 << 20)
        (10486, 16384)
    """

    density: float = 0.001
    chunk: int | None = None
    value_dtype: str = "bfloat16"
    min_numel: int | None = None
    exclude: Sequence[str] = ()
    selection: str = "sampled"
    decay: float = 1.0
    mean_over: MeanOver = "ranks"
    clip_to_median: bool = False
    exchange: str = "auto"
    dense_dtype: str = "float32"
    correction: str = "auto"
    momentum_masking: bool | None = None
    keep_momentum: bool | None = None

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
        for name, allowed in (
            ("value_dtype", VALUE_NAMES),
            ("selection", SELECTIONS),
            ("mean_over", get_args(MeanOver)),
            ("exchange", EXCHANGES),
            ("dense_dtype", DENSE_NAMES),
            ("correction", get_args(Correction)),
        ):
            check_one_of(name, getattr(self, name), allowed)
        check_flag("clip_to_median", self.clip_to_median)
        for name in ("momentum_masking", "keep_momentum"):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: give True, False or None.")
        for name in ("chunk", "min_numel"):
            value = getattr(self, name)
            if not is_count(value) and value is not None:
                choices_of = "for whole tensors" if name == "chunk" else "for a share of what is trained"
                raise ConfigurationError(
                    f"{name}={value!r}: give a number of elements, an integer >= 1, or None {choices_of}."
                )
        for name in ("momentum_masking", "keep_momentum"):
            if self.correction == "error_feedback" and getattr(self, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} with correction='error_feedback': it is about the velocities of "
                    "momentum correction, and there are none. Leave one of them out."
                )
        if self.needs_senders and self.exchange in ("reduce_scatter", "dense"):
            raise ConfigurationError(
                f"exchange={self.exchange!r} sums inside the collective, and mean_over='senders' and clip_to_median "
                "need the values of each participant: set exchange='all_gather'."
            )
        if self.exchange == "dense" and self.value_dtype not in SUMMED_DENSE:
            raise ConfigurationError(
                f"value_dtype={self.value_dtype!r} with exchange='dense': whole tensors are summed in float32, and "
                "nothing is rounded. Leave it out, or choose another exchange."
            )

    def check_names(self, names: Iterable[str]) -> None:
        """Check the patterns of `exclude` against the names of the model's parameters.

        Raises:
            ConfigurationError: one matches no parameter.
        """
        names = list(names)
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigurationError(
                    f"exclude={list(self.exclude)}: {pattern!r} matches no parameter of the model; they are named "
                    f"{', '.join(names[:8])}{', ...' if len(names) > 8 else '.'}"
                )

    @property
    def needs_senders(self) -> bool:
        """Whether the average needs the sender of each element, which only an all-gather provides."""
        return self.mean_over == "senders" or self.clip_to_median

    @property
    def sent_dtype(self) -> str:
        """What values are on the wire: `value_dtype`, except of whole tensors, which are summed on the way."""
        return "float32" if self.exchange == "dense" else self.value_dtype

    @property
    def codec(self) -> SparseCodec:
        """The wire format."""
        return SparseCodec(self.value_dtype)

    def takes(self, name: str, numel: int, small_numel: int) -> bool:
        """Return whether a parameter with this name and number of elements is sent sparse.

        Args:
            name: of the parameter.
            numel: its elements.
            small_numel: the least, where `min_numel` is None.
        """
        is_excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return numel >= (self.min_numel or small_numel) and not is_excluded

    def layout(self, numel: int, density: float | None = None) -> ChunkLayout:
        """Return how many elements are sent of a tensor, at the payload's own density or at another one."""
        density = self.density if density is None else density
        if numel == 0:
            return ChunkLayout(0, 0, 0)
        if self.chunk is None:
            return ChunkLayout(0, 0, num_selected(numel, density))
        num_full, rest = divmod(numel, self.chunk)
        least = num_selected(min(self.chunk, LEAST_OF), density)
        k_last = min(rest, max(num_selected(rest, density), least))
        return ChunkLayout(num_full, num_selected(self.chunk, density), k_last)

    def selected(self, numel: int, density: float | None = None) -> dict[str, Any]:
        """Return the fields of a segment (`ops.reference.Segment`) that say how many elements are selected."""
        layout = self.layout(numel, density)
        if self.chunk is None:
            return {"k": layout.k_last}
        return {"k": layout.k, "chunk": self.chunk, "k_last": layout.k_last}

    def num_sent(self, numel: int, density: float | None = None) -> int:
        """Return how many of a tensor's elements are sent."""
        return self.layout(numel, density).num_sent

    def nbytes(self, numels: Sequence[int], density: float | None = None) -> int:
        """Return the size of a participant's message about tensors with these numbers of elements, in bytes."""
        numels = [numel for numel in numels if numel]
        return self.codec.nbytes([self.num_sent(numel, density) for numel in numels], numels) if numels else 0

    def decode(
        self, messages: Tensor, numels: Sequence[int], density: float | None, damaged: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the elements that participants have sent: positions int64, values float32, shape (groups,
        participants, elements).

        Args:
            messages: one row for each group of equal parts and each participant: uint8, shape (groups, participants,
                nbytes).
            numels: elements of each tensor that is not empty.
            density: at which was selected.
            damaged: see `SparseCodec.decode`.

        Raises:
            ValueError: a message is damaged; see `SparseCodec.decode`.
        """
        counts = [self.num_sent(numel, density) for numel in numels]
        shape = *messages.shape[:2], sum(counts)
        decoded = self.codec.decode(messages.flatten(0, 1), counts, numels, damaged)
        positions, values = (each.view(shape) for each in decoded)
        if self.clip_to_median:
            layouts = [self.layout(numel, density) for numel in numels]
            values = torch.stack(
                [
                    torch.cat([self._clip(*each) for each in zip(group.split(counts, dim=1), layouts, strict=True)], 1)
                    for group in values
                ]
            )
        return positions, values

    def average_(self, out: Tensor, parts: Sequence[Sparse]) -> None:
        """Average sparse vectors, one per participant, into a dense one, in the order of the participants.

        In place:
            `out`, which is overwritten.

        Args:
            out: flat, float32.
            parts: (positions int64, distinct; values float32) of each participant. One that has nothing to send of a
                dead chunk sends zeros, and is not counted as a sender.
        """
        if self.mean_over == "ranks":
            scatter_mean_(out, parts)
            return
        counts = torch.zeros_like(out)
        for positions, values in parts:
            counts[positions] += (values != 0).float()
        counts.clamp_(min=1.0)
        out.zero_()
        for positions, values in parts:
            out[positions] += values / counts[positions]

    @staticmethod
    def _clip(values: Tensor, layout: ChunkLayout) -> Tensor:
        """Scale values of a chunk, shape (participants, elements), down to the median of all participants' norms."""
        num_full, k, k_last = layout.num_full, layout.k, layout.k_last
        squares = values.double().square_()  # of few bits each, so that their sums are exact except with "float32"
        norms = squares[:, : num_full * k].reshape(len(values), num_full, k).sum(2)
        if k_last:
            norms = torch.cat([norms, squares[:, num_full * k :].sum(1, keepdim=True)], 1)
        ordered = norms.sqrt_().sort(0).values
        median = (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
        scale = torch.where(norms > median, median / norms, 1.0).float()
        counts = upload([k] * num_full + [k_last] * bool(k_last), torch.int64, values.device)
        return values * scale.repeat_interleave(counts, dim=1, output_size=values.shape[1])


def small_numel(numels: Iterable[int]) -> int:
    """Return the elements below which a tensor is small for a model: the smallest are 3 % of it, together.

    Sending these whole costs little, and norms, biases and the last layer do not wait. It is a fraction, because all
    matrices of a small model are small; but not below 1,024 elements, where sending all costs less than the work for
    one more tensor, nor above 16,384, or 3 % of a large model would be most of what is sent.

    Args:
        numels: elements of each tensor that is trained.

    Example:
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
