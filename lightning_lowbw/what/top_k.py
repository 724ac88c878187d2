"""Sparse pseudo-gradients: which part of what the local steps have done is sent, and how the parts of all are averaged.

Source: Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706,
algorithm 1. With D the pseudo-gradient of a rank (last consensus minus its weights), e its residual, beta the decay:

    accumulate   e = beta e + D
    send         Q(top-k of each chunk of e)
    keep         e = e - what was sent
    average      D = the sum of what all N ranks sent, each element divided by the number of ranks that sent it, or by N

Everything here is odd in D, so it works alike on the change of the weights, -D. The outer step is `what.outer`'s.

Deviation: a chunk is so many consecutive elements of a tensor, row by row, and the rest; the authors cut matrices into
square tiles and vectors into divisors of their length, and as here send as many of a small chunk as of a whole one.
The paper divides by N, the authors' published code by the number of ranks that sent the element, which is better by far
(docs/methods/sparse_local_sgd.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_lowbw.arguments import from_mapping, is_number
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.selection import SampledSelector, exact_top_k, num_selected
from lightning_lowbw.what.values import VALUE_NAMES

MeanOver = Literal["senders", "ranks"]
LEAST_OF = 4096  # elements: of fewer as many are sent as of so many, for a norm or a bias is not to wait for ever


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What is sent of a pseudo-gradient, as a value.

    Args:
        density: the fraction of elements sent, in (0, 1).
        chunk: the largest are sought among so many neighbouring elements of a tensor; None: in the whole tensor. By
            default 64 of 4096. Of the rest of a tensor, and of a small one, as many are sent as of a chunk, or of 4096
            elements of a larger one: all where there are not so many.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; what is
            rounded away is kept.
        decay: of what has been kept, from one average to the next, in [0, 1]; 1 forgets nothing.
        clip_to_median: whether a rank's part of a chunk is scaled down where its norm is above the median of all
            ranks. What that takes away is lost: it is meant for ranks that cannot be trusted.
        mean_over: what a sum is divided by: the number of ranks that sent this element ("senders"), or of all of them
            ("ranks"). One that a single rank sent moves as far as that rank wants, or an N-th of it.
        min_numel: tensors with fewer elements are averaged whole.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> Compression().num_sent(1 << 20), Compression(density=0.01, chunk=None).num_sent(1 << 20)
        (16384, 10486)
    """

    density: float = 1 / 64
    chunk: int | None = 4096
    value_dtype: str = "int2"
    decay: float = 0.95
    clip_to_median: bool = False
    mean_over: MeanOver = "senders"
    min_numel: int = 4096

    def __post_init__(self) -> None:
        if not is_number(self.density) or not 0 < self.density < 1:
            raise ConfigurationError(
                f"density={self.density!r}: give a number between 0 and 1; without compression all is sent."
            )
        if not is_number(self.decay) or not 0 <= self.decay <= 1:
            raise ConfigurationError(f"decay={self.decay!r}: give a number in [0, 1].")
        if self.value_dtype not in VALUE_NAMES:
            raise ConfigurationError(f"value_dtype={self.value_dtype!r}: choose one of {', '.join(VALUE_NAMES)}.")
        if self.mean_over not in get_args(MeanOver):
            raise ConfigurationError(f"mean_over={self.mean_over!r}: choose one of {', '.join(get_args(MeanOver))}.")
        if not isinstance(self.clip_to_median, bool):
            raise ConfigurationError(f"clip_to_median={self.clip_to_median!r}: give True or False.")
        for name in ("chunk", "min_numel"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not is_count and not (name == "chunk" and value is None):
                choices = ", or None for whole tensors" if name == "chunk" else ""
                raise ConfigurationError(f"{name}={value!r}: give a number of elements, an integer >= 1{choices}.")

    def num_sent(self, numel: int) -> int:
        """Return how many of a tensor's elements are sent."""
        num_full, k, k_last = self._layout(numel)
        return num_full * k + k_last

    def nbytes(self, numels: Sequence[int]) -> int:
        """Return the size of a rank's message about tensors with so many elements, in bytes."""
        return self._codec.nbytes([self.num_sent(numel) for numel in numels], numels)

    def prepare_(self, residuals: Sequence[Tensor], changes: Sequence[Tensor]) -> Tensor:
        """Accumulate the changes; return a message with the largest elements of the residuals.

        In place:
            The residuals, from which is taken what the message says.

        Args:
            residuals: e of each tensor; float32, flat, contiguous, not empty.
            changes: of each tensor since the last consensus; float32, flat.

        Returns:
            uint8, shape (nbytes,).
        """
        parts, numels = [], [residual.numel() for residual in residuals]
        for residual, change in zip(residuals, changes, strict=True):
            positions = self._select(residual.mul_(self.decay).add_(change))
            parts.append((positions, residual[positions]))
        message = self._codec.encode(parts, numels)
        sent = self._codec.decode_values(message, [values.numel() for _, values in parts], numels)
        for residual, (positions, values), rounded in zip(residuals, parts, sent, strict=True):
            residual[positions] = values - rounded
        return message

    def combine(self, messages: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """Average the messages of all ranks: flat float32 tensors, the same bits wherever it is done.

        Args:
            messages: in the order of the ranks, in which is summed.
            numels: elements of each tensor.
        """
        counts = [self.num_sent(numel) for numel in numels]
        decoded = [self._codec.decode(message, counts, numels) for message in messages]
        means = []
        for number, numel in enumerate(numels):
            parts = [of_rank[number] for of_rank in decoded]
            if self.clip_to_median:
                values = self._clip(torch.stack([values for _, values in parts]), numel)
                parts = [(positions, each) for (positions, _), each in zip(parts, values, strict=True)]
            means.append(self._mean(parts, numel, messages[0].device))
        return means

    def _mean(self, parts: Sequence[tuple[Tensor, Tensor]], numel: int, device: torch.device) -> Tensor:
        divisors = torch.full((numel,), float(len(parts)) if self.mean_over == "ranks" else 0.0, device=device)
        for positions, values in parts if self.mean_over == "senders" else ():
            divisors[positions] += (values != 0).float()  # a dead chunk sends zeros, for it has to send something
        divisors.clamp_(min=1.0)
        mean = torch.zeros(numel, device=device)
        for positions, values in parts:  # distinct within a rank; summed in the order of the ranks
            mean[positions] += values / divisors[positions]
        return mean

    @property
    def _codec(self) -> SparseCodec:
        return SparseCodec(self.value_dtype)

    def _layout(self, numel: int) -> tuple[int, int, int]:
        """Return how many whole chunks a tensor has, k of each, and k of the rest."""
        if self.chunk is None:
            return 0, 0, num_selected(numel, self.density)
        num_full, rest = divmod(numel, self.chunk)
        k = num_selected(self.chunk, self.density)
        least = num_selected(min(self.chunk, LEAST_OF), self.density)
        return num_full, k, min(rest, max(num_selected(rest, self.density), least))

    def _select(self, values: Tensor) -> Tensor:
        """Return the positions of the k largest |values| of each chunk: int64, ascending."""
        if self.chunk is None:
            return SampledSelector()(values, num_selected(values.numel(), self.density))
        num_full, k, k_last = self._layout(values.numel())
        split = num_full * self.chunk
        chunks = values[:split].abs().view(num_full, self.chunk)
        firsts = torch.arange(0, split, self.chunk, device=values.device).unsqueeze(1)
        positions = chunks.topk(k, sorted=False).indices.sort().values.add_(firsts).view(-1)
        return torch.cat([positions, exact_top_k(values[split:], k_last).add_(split)]) if k_last else positions

    def _clip(self, values: Tensor, numel: int) -> Tensor:
        """Scale each rank's values of a chunk down to the median of the ranks' norms; shape (ranks, num_sent)."""
        num_full, k, k_last = self._layout(numel)
        squares = values.double().square_()  # of few bits each, so that their sums are exact but for "float32"
        norms = squares[:, : num_full * k].view(len(values), num_full, k).sum(2)
        if k_last:
            norms = torch.cat([norms, squares[:, num_full * k :].sum(1, keepdim=True)], 1)
        ordered = norms.sqrt_().sort(0).values
        median = (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
        scale = torch.where(norms > median, median / norms, 1.0).float()
        counts = torch.tensor([k] * num_full + [k_last] * bool(k_last), device=values.device)
        return values * scale.repeat_interleave(counts, dim=1)


def as_compression(choice: Compression | Mapping[str, Any] | None) -> Compression | None:
    """Return a choice of the user's as a value.

    Raises:
        ConfigurationError: it is something else, or an argument is unknown or out of range.
    """
    if choice is None or isinstance(choice, Compression):
        return choice
    if not isinstance(choice, Mapping):
        raise ConfigurationError(
            f"compression={choice!r}: give a Compression, a mapping such as {{'value_dtype': 'int4'}}, or None."
        )
    return from_mapping(Compression, choice, "compression")
