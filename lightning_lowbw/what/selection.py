"""Which elements are sent: the k largest of a tensor in absolute value, or of each of its chunks.

`Selection` does it for all tensors of an optimizer together. `exact` sorts; `sampled` finds the same set with a
threshold from a sample, in one cheap pass. Both return exactly as many positions as they are asked for, in ascending
order, so that all ranks send messages of one size; of equal magnitudes the first, so that the payload does not depend
on the way it was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_lowbw.ops import gpu
from lightning_lowbw.ops.candidates import MIN_PER_CANDIDATE
from lightning_lowbw.ops.dispatch import kernels_for
from lightning_lowbw.ops.reference import Segment

SELECTIONS = ("sampled", "exact")


def num_selected(numel: int, density: float) -> int:
    """Return k, how many of `numel` elements are sent at `density`: at least one, at most all.

    In Python's double precision: float32 makes 999 of 1e6 x 0.001.
    """
    return min(numel, max(1, round(numel * density)))


def exact_top_k(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest |values|, see `ops.candidates.top_k`: int64, shape (k,), ascending."""
    return kernels_for(values).top_k(values, k)


def exact_top_k_of(segment: Segment) -> Tensor:
    """Return the positions of the largest |v| of a tensor, or of each of its chunks; twin of `reference.largest`.

    Returns:
        int64, ascending, shape (num_sent,).
    """
    if segment.chunk is None:
        return exact_top_k(segment.residual, segment.k)
    top_k_of_chunks = kernels_for(segment.residual).top_k_of_chunks
    return top_k_of_chunks(segment.residual, segment.chunk, segment.k, segment.k_last)


class Selection:
    """Compress all tensors of an optimizer in one call: correct them, find their largest elements, take these out.

    The backend is chosen here: Triton's kernels, one launch of each for all tensors that they take; else, tensor by
    tensor, a pass compiled by numba, or one in torch. All do what `ops.reference.compress_many_` specifies, for finite
    residuals; of one that has overflowed, which is reported in any case, the kernels send the largest finite number.

    Args:
        kind: one of `SELECTIONS`.

    Example:
        >>> segment = Segment(
        ...     residual=torch.tensor([0.0, 5.0, 1.0]), momentum_buffer=None, gradient=torch.ones(3), weight=None, k=1
        ... )
        >>> Selection("exact").compress_({"weight": segment}, masking=True)
        [(tensor([1]), tensor([6.]))]
        >>> segment.residual
        tensor([1., 0., 2.])
    """

    def __init__(self, kind: str = "sampled") -> None:
        self.kind = kind
        self._selectors: dict[str, SampledSelector] = {}
        self._workspaces: dict[tuple[str, ...], gpu.Workspace] = {}

    @property
    def thresholds(self) -> dict[str, float]:
        """The last threshold of each tensor, by name; 0 where none is known. Reading them waits for a GPU.

        They influence only the time, never which elements are selected. On a GPU those that are set are estimated anew.
        """
        known = {name: selector.threshold for name, selector in self._selectors.items()}
        for names, workspace in self._workspaces.items():
            known.update(zip(names, workspace.thresholds[: len(names)].tolist(), strict=True))
        return known

    @thresholds.setter
    def thresholds(self, thresholds: Mapping[str, float]) -> None:
        self._workspaces.clear()
        self._selectors = {name: SampledSelector(threshold) for name, threshold in thresholds.items()}

    @torch.no_grad()
    def compress_(self, segments: Mapping[str, Segment], *, masking: bool) -> list[tuple[Tensor, Tensor]]:
        """Accumulate the gradients, and take the largest elements out of the residuals.

        In place:
            The residuals and momentum buffers of all segments. After an exception nothing has been taken out of the
            residuals; those of some tensors have this step's gradients.

        Args:
            segments: by the name of the parameter, all on one device.
            masking: whether the velocity of what is taken is cleared.

        Returns:
            Of each segment: positions, int64, ascending, and their exact values, float32; both of shape (num_sent,).
        """
        for_kernels = {name: each for name, each in segments.items() if self._suits_kernels(each)}
        parts = self._compress_together_(for_kernels, masking) if for_kernels else {}
        try:
            for name, segment in segments.items():
                if name not in parts:
                    for other in segment.elsewhere:
                        other.take_()
                    positions = self._accumulate_(name, segment)
                    take_out_ = kernels_for(*segment.tensors).take_out_
                    values = take_out_(segment.residual, segment.momentum_buffer, positions, masking=masking)
                    parts[name] = positions, values
        except BaseException:  # no memory, or Ctrl-C: nobody would send these
            for name, (positions, values) in parts.items():
                segments[name].residual.index_add_(0, positions, values.to(segments[name].residual.dtype))
            raise
        return [parts[name] for name in segments]

    def _suits_kernels(self, segment: Segment) -> bool:
        return self.kind == "sampled" and gpu.is_available(segment.residual.device) and gpu.takes(segment)

    def _compress_together_(self, segments: Mapping[str, Segment], masking: bool) -> dict[str, tuple[Tensor, Tensor]]:
        names = tuple(segments)
        if names not in self._workspaces:
            # Their memory is bounded only if each tensor is in one.
            apart = {n: workspace for n, workspace in self._workspaces.items() if segments.keys().isdisjoint(n)}
            self._workspaces = {**apart, names: gpu.Workspace()}
        positions, values = gpu.compress_many_(
            list(segments.values()), masking=masking, workspace=self._workspaces[names]
        )
        counts = [segment.num_sent for segment in segments.values()]
        return dict(zip(names, zip(positions.split(counts), values.split(counts), strict=True), strict=True))

    def _accumulate_(self, name: str, segment: Segment) -> Tensor:
        """Accumulate a gradient; return the positions of the largest elements."""
        if self.kind == "exact" or segment.chunk is not None:
            kernels_for(*segment.tensors).accumulate_(segment, 0.0)
            return exact_top_k_of(segment)
        return self._selectors.setdefault(name, SampledSelector()).accumulate_(segment)


class SampledSelector:
    """Find the k largest of one tensor among the candidates above a threshold, and adapt the threshold to their number.

    The threshold aims at twice k candidates. The surplus is then dropped by an exact top-k over the candidates, so
    what is dropped is the smallest, wherever it lies (the published implementations cut by position, or take what an
    unlucky sample gives: recall down to 15 %). Too few candidates: estimate anew from a sample, and in the end sort.

    Attributes:
        threshold: 0 where none is known. It influences only the time, never which elements are selected.
    """

    FOLLOWED = 0.8  # of the growth of what is found, from one step to the next; it becomes less from step to step

    SAMPLE = 1 << 15  # elements; at density 1e-3 some 65 of them lie above the threshold
    SMALL = 1 << 16  # elements; below this, sorting is as fast
    SURPLUS = 2.0  # candidates aimed at, in units of k

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold
        self._last: tuple[int, float] | None = None  # k and the least magnitude that was among the k largest

    def __call__(self, values: Tensor, k: int) -> Tensor:
        """Return the positions of the k largest |values|: int64, shape (k,), ascending; `values` is flat."""
        kernels = kernels_for(values)
        if self._sorts(values.numel(), k):
            return exact_top_k(values, k)
        for estimate in (False, True):
            if estimate:
                self.threshold = self._estimate(values[:: self._stride(values.numel())].abs(), values.numel(), k)
            if self.threshold <= 0.0:  # no estimate yet, or a dead tensor: everything would be a candidate
                continue
            positions = self._narrow(values, kernels.reach(values, self.threshold), k)
            if positions is not None:
                return positions
        self.threshold = 0.0
        return exact_top_k(values, k)

    def accumulate_(self, segment: Segment) -> Tensor:
        """Accumulate a gradient, then return what a call with the residual would: the positions of its k largest.

        In place:
            its residual and momentum buffer.

        Args:
            segment: flat, without chunks.
        """
        residual, k, numel = segment.residual, segment.k, segment.residual.numel()
        kernels = kernels_for(*segment.tensors)
        if self._sorts(numel, k):
            kernels.accumulate_(segment, 0.0)
            return exact_top_k(residual, k)
        if self.threshold <= 0.0:
            sample = kernels.sample_accumulated(segment, self._stride(numel))
            self.threshold = self._estimate(sample, numel, k)
        positions = self._narrow(residual, kernels.accumulate_(segment, self.threshold, self._most(k)), k)
        if positions is None:
            self.threshold = 0.0
            positions = self(residual, k)
        return positions

    def _sorts(self, numel: int, k: int) -> bool:
        return numel <= self.SMALL or self.SURPLUS * k >= numel / MIN_PER_CANDIDATE

    def _stride(self, numel: int) -> int:
        """Return the distance of the elements in a sample; odd, so that it does not fall into step with rows whose
        length is a power of two."""
        return max(1, numel // self.SAMPLE) | 1

    def _estimate(self, sample: Tensor, numel: int, k: int) -> float:
        """Return the magnitude that about SURPLUS * k of `numel` elements reach, from a sample of the magnitudes."""
        rank = max(1, round(self.SURPLUS * k * sample.numel() / numel))
        return float(sample.topk(rank, sorted=False).values.min())

    def _most(self, k: int) -> int:
        """Return how many candidates are of use."""
        return int(8 * self.SURPLUS * k)

    def _narrow(self, values: Tensor, candidates: Tensor | None, k: int) -> Tensor | None:
        """Return the k largest of the candidates and set the threshold for the next step; None if there are too few,
        or far too many: then the distribution has moved, and to estimate again costs less than to sort them."""
        if candidates is None or not k <= candidates.numel() <= self._most(k):
            return None
        count = candidates.numel()
        positions, least = kernels_for(values).narrow(values, candidates, k)
        if count > k and least > self.threshold:
            # The power law through two points, (threshold, count) and (least, k). How steep it is has to be measured:
            # error feedback cuts the tail off at the last step's `least`, and all that comes lies close behind it.
            exponent = math.log(least / self.threshold) / math.log(count / k)
            self.threshold *= (count / (self.SURPLUS * k)) ** exponent
            # Residuals grow for some times 1 / density steps, and `least` with them; the slope above is so flat that a
            # threshold which stays where it is has four times as many candidates in the next step.
            if self._last is not None and self._last[0] == k:
                self.threshold *= min(max(least / self._last[1], 0.5), 2.0) ** self.FOLLOWED
        self._last = (k, least) if least > 0.0 else None
        return positions
