"""Which elements are sent: the k largest of a tensor in absolute value, or of each of its chunks.

`Selection` does it for all tensors of an optimizer together. A threshold, from a sample and then from step to step,
finds candidates in the pass that accumulates; the k largest candidates are sent. Exactly k elements are selected, in
ascending order, so that all ranks send messages of one size. If magnitudes are equal, the first elements are selected,
so that the payload does not depend on the way it was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowbw.kernels import dispatch, gpu, reference
from lightning_lowbw.kernels.dispatch import kernels_for
from lightning_lowbw.kernels.reference import Segment, sample_accumulated
from lightning_lowbw.kernels.table import FOLLOWED, Workspace
from lightning_lowbw.kernels.tensors import flat

ALIGNMENT = 64  # elements between the starts of tensors in a buffer: 256 bytes, enough for every vector load
MIN_PER_CANDIDATE = 4  # elements: if more than one in this many is a candidate, searching all takes no longer


def num_selected(numel: int, density: float) -> int:
    """Return k, how many of `numel` elements are sent at `density`: at least one, at most all.

    In Python's double precision: float32 makes 999 of 1e6 x 0.001.
    """
    return min(numel, max(1, round(numel * density)))


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
            kernels = kernels_for(residual) if masked is None else kernels_for(residual, masked)
            parts.append((positions, kernels.take_(residual, masked, positions)))
        return parts

    def _accumulate_(self, name: str, segment: Segment) -> Tensor:
        """Accumulate a gradient; return the positions of the largest elements."""
        if segment.chunk is None:
            return self._selectors.setdefault(name, SampledSelector()).accumulate_(segment)
        kernels_for(*segment.tensors).accumulate_(segment, 0.0)
        residual, chunk = segment.residual, segment.chunk
        is_on_gpu = chunk <= gpu.LONGEST_CHUNK and dispatch.uses_triton(residual.device)
        kernels = gpu if is_on_gpu else kernels_for(residual)
        positions: Tensor = kernels.largest(residual, segment.k, chunk, segment.k_last)
        return positions


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
        kernels = kernels_for(*segment.tensors)
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


class Residuals(Mapping[str, Tensor]):
    """Residuals by the name of their parameter: flat float32 views into one buffer.

    A pass over all tensors is a pass over one piece of memory. Tensors that come later get a buffer of their own, until
    `to` or `load` puts all tensors into one buffer again.

    Examples:
        >>> residuals = Residuals()
        >>> residuals.ensure({"weight": 4, "bias": 1}, torch.device("cpu"))
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

    def of(self, names: Iterable[str]) -> list[Tensor]:
        """Return the tensors of some names, without a call for each."""
        return [*map(self._views.__getitem__, names)]

    def ensure(self, numels: Mapping[str, int], device: torch.device) -> None:
        """Allocate zeros for names without a residual, in one buffer, and move the other residuals to the device.

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
        if not apart:
            return
        for name, view in _allocate(apart, device).items():
            if name in views:
                view.copy_(views[name])
            views[name] = view

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

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU, by name, each with memory of its own: a checkpoint has no more than these."""
        return {name: view.to("cpu", copy=True) for name, view in self._views.items()}

    def load(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Replace the tensors by the result of `state`.

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
