"""Which elements are sent: the k largest of a tensor in absolute value.

`exact` sorts; `sampled` finds the same set with a threshold from a sample, in one cheap pass. Both return exactly k
positions in ascending order, so that all ranks send messages of one size and the payload does not depend on the way
it was found (but for ties).
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from torch import Tensor

from lightning_lowbw.ops import cpu, reference

Selection = Literal["sampled", "exact"]
SELECTIONS: tuple[str, ...] = get_args(Selection)


class Selector(Protocol):
    """Finds the k largest of one tensor, step after step."""

    def __call__(self, values: Tensor, k: int) -> Tensor:
        """Return the positions of the k largest |values|: int64, shape (k,), ascending; `values` is flat."""
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


class SampledSelector:
    """Find the k largest among the candidates above a threshold, and steer the threshold by the exact counts.

    The threshold aims at twice k candidates. The surplus is then dropped by an exact top-k over the candidates, so
    what is dropped is the smallest, wherever it lies (the published implementations cut by position, or take what an
    unlucky sample gives: recall down to 15 %). Too few candidates: estimate anew from a sample, and in the end sort.

    The threshold influences only the time, never which elements are selected.
    """

    SAMPLE = 1 << 15  # elements; at density 1e-3 some 65 of them lie above the threshold
    SMALL = 1 << 16  # elements; below this, sorting is as fast
    SURPLUS = 2.0  # candidates aimed at, in units of k
    # d log(threshold) / d log(count) in the tail of a normal distribution at one in a thousand; a heavier tail only
    # means that the steering takes more steps, or one more sample.
    GAIN = 0.1

    def __init__(self) -> None:
        self.threshold = 0.0

    def __call__(self, values: Tensor, k: int) -> Tensor:
        numel = values.numel()
        if numel <= self.SMALL or self.SURPLUS * k >= numel / 4:
            return exact_top_k(values, k)
        reach = cpu.reach if values.device.type == "cpu" else reference.reach
        for estimate in (False, True):
            threshold = self._estimate(values, k) if estimate else self.threshold
            if threshold <= 0.0:  # no estimate yet, or a dead tensor: everything would be a candidate
                continue
            candidates = reach(values, threshold)
            count = candidates.numel()
            self.threshold = threshold * (max(count, 1) / (self.SURPLUS * k)) ** self.GAIN
            # Far too many: the distribution has moved; it costs less to estimate again than to sort them.
            if k <= count <= 8 * self.SURPLUS * k:
                largest = values[candidates].abs().topk(k, sorted=False).indices
                return candidates[largest].sort().values
        self.threshold = 0.0
        return exact_top_k(values, k)

    def _estimate(self, values: Tensor, k: int) -> float:
        """Return the magnitude that about SURPLUS * k elements reach, from a strided sample."""
        # An odd stride does not fall into step with rows whose length is a power of two.
        sample = values[:: max(1, values.numel() // self.SAMPLE) | 1].abs()
        rank = max(1, round(self.SURPLUS * k * sample.numel() / values.numel()))
        return float(sample.topk(rank, sorted=False).values.min())


def make_selector(selection: str) -> Selector:
    """Return a new selector by its public name, one of `SELECTIONS`."""
    selectors: dict[str, type[Selector]] = {"exact": ExactSelector, "sampled": SampledSelector}
    return selectors[selection]()
