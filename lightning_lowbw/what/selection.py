"""Which elements are sent: the k largest of a tensor in absolute value.

`exact` sorts; `sampled` finds the same set with a threshold from a sample, in one cheap pass. Both return exactly k
positions in ascending order, so that all ranks send messages of one size and the payload does not depend on the way
it was found (but for ties).
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_lowbw.ops.dispatch import kernels_for
from lightning_lowbw.ops.reference import Segment

Selection = Literal["sampled", "exact"]
SELECTIONS: tuple[str, ...] = get_args(Selection)


def num_selected(numel: int, density: float) -> int:
    """Return k, how many of `numel` elements are sent at `density`: at least one, at most all.

    In Python's double precision: float32 makes 999 of 1e6 x 0.001.
    """
    return min(numel, max(1, round(numel * density)))


class Selector(Protocol):
    """Finds the k largest of one tensor, step after step."""

    def __call__(self, values: Tensor, k: int) -> Tensor:
        """Return the positions of the k largest |values|: int64, shape (k,), ascending; `values` is flat."""
        ...

    def accumulate_(self, segment: Segment) -> Tensor:
        """Accumulate a gradient, then return what a call with the residual would: the positions of its k largest.

        In place:
            its residual and momentum buffer.

        Args:
            segment: flat.
        """
        ...

    @property
    def threshold(self) -> float:
        """The last threshold, kept in checkpoints; 0 where there is none."""
        ...

    @threshold.setter
    def threshold(self, value: float) -> None: ...


def exact_top_k(values: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest |values|: int64, shape (k,), ascending."""
    return values.abs().topk(k, sorted=False).indices.sort().values


class ExactSelector:
    """Sort the whole tensor each time. Slow (over 20 ns per element on a CPU); the specification of the other."""

    def __init__(self) -> None:
        self.threshold = 0.0

    def __call__(self, values: Tensor, k: int) -> Tensor:
        return exact_top_k(values, k)

    def accumulate_(self, segment: Segment) -> Tensor:
        kernels_for(*segment.tensors).accumulate_(segment, 0.0)
        return exact_top_k(segment.residual, segment.k)


class SampledSelector:
    """Find the k largest among the candidates above a threshold, and steer the threshold by what is found.

    The threshold aims at twice k candidates. The surplus is then dropped by an exact top-k over the candidates, so
    what is dropped is the smallest, wherever it lies (the published implementations cut by position, or take what an
    unlucky sample gives: recall down to 15 %). Too few candidates: estimate anew from a sample, and in the end sort.

    The threshold influences only the time, never which elements are selected.
    """

    SAMPLE = 1 << 15  # elements; at density 1e-3 some 65 of them lie above the threshold
    SMALL = 1 << 16  # elements; below this, sorting is as fast
    SURPLUS = 2.0  # candidates aimed at, in units of k

    def __init__(self) -> None:
        self.threshold = 0.0

    def __call__(self, values: Tensor, k: int) -> Tensor:
        if self._sorts(values.numel(), k):
            return exact_top_k(values, k)
        reach = kernels_for(values).reach
        for estimate in (False, True):
            if estimate:
                self.threshold = self._estimate(values[:: self._stride(values.numel())].abs(), values.numel(), k)
            if self.threshold <= 0.0:  # no estimate yet, or a dead tensor: everything would be a candidate
                continue
            positions = self._narrow(values, reach(values, self.threshold), k)
            if positions is not None:
                return positions
        self.threshold = 0.0
        return exact_top_k(values, k)

    def accumulate_(self, segment: Segment) -> Tensor:
        residual, k, numel = segment.residual, segment.k, segment.residual.numel()
        kernels = kernels_for(*segment.tensors)
        if self._sorts(numel, k):
            kernels.accumulate_(segment, 0.0)
            return exact_top_k(residual, k)
        if self.threshold <= 0.0:
            sample = kernels.sample_accumulated(segment, self._stride(numel))
            self.threshold = self._estimate(sample, numel, k)
        positions = self._narrow(residual, kernels.accumulate_(segment, self.threshold), k)
        if positions is None:
            self.threshold = 0.0
            positions = self(residual, k)
        return positions

    def _sorts(self, numel: int, k: int) -> bool:
        return numel <= self.SMALL or self.SURPLUS * k >= numel / 4

    def _stride(self, numel: int) -> int:
        """Return the distance of the elements in a sample; odd, so that it does not fall into step with rows whose
        length is a power of two."""
        return max(1, numel // self.SAMPLE) | 1

    def _estimate(self, sample: Tensor, numel: int, k: int) -> float:
        """Return the magnitude that about SURPLUS * k of `numel` elements reach, from a sample of the magnitudes."""
        rank = max(1, round(self.SURPLUS * k * sample.numel() / numel))
        return float(sample.topk(rank, sorted=False).values.min())

    def _narrow(self, values: Tensor, candidates: Tensor, k: int) -> Tensor | None:
        """Return the k largest of the candidates and set the threshold for the next step; None if there are too few,
        or far too many: then the distribution has moved, and to estimate again costs less than to sort them."""
        count = candidates.numel()
        if not k <= count <= 8 * self.SURPLUS * k:
            return None
        largest = values[candidates].abs().topk(k, sorted=False)
        least = float(largest.values.min())
        if count > k and least > self.threshold:
            # The power law through two points, (threshold, count) and (least, k). How steep it is has to be measured:
            # error feedback cuts the tail off at the last step's `least`, and all that comes lies close behind it.
            exponent = math.log(least / self.threshold) / math.log(count / k)
            self.threshold *= (count / (self.SURPLUS * k)) ** exponent
        is_largest = torch.zeros(count, dtype=torch.bool, device=values.device)
        is_largest[largest.indices] = True
        return candidates[is_largest]


def make_selector(selection: str) -> Selector:
    """Return a new selector by its public name, one of `SELECTIONS`."""
    selectors: dict[str, type[Selector]] = {"exact": ExactSelector, "sampled": SampledSelector}
    return selectors[selection]()
