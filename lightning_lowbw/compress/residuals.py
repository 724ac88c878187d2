"""The residuals of all tensors: elements and rounding errors that have not been sent yet."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

ALIGNMENT = 64  # elements between the starts of tensors in a buffer: 256 bytes, enough for every vector load


class Residuals(Mapping[str, Tensor]):
    """Residuals by the name of their parameter: flat views into one buffer; float32, float64 into another.

    Where tensors are contiguous, a pass over all of them is a pass over one piece of memory. Tensors that come
    later get a buffer of their own, until `to` or `load` puts all into one again.

    Example:
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
        """Return the residual of a tensor, to be changed in place: float32 or float64, shape (numel,)."""
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def ensure(self, numels: Mapping[str, int], device: torch.device, wide: Collection[str] = ()) -> None:
        """Allocate zeros for the names that are not there yet, in one buffer, and move the others to the device.

        Args:
            numels: elements of each tensor, by name.
            device: where they are to be.
            wide: names of those in float64.

        Raises:
            ValueError: a residual is there with another number of elements; nothing has changed then.
        """
        views = self._views
        for name, numel in numels.items():
            if name in views and views[name].numel() != numel:
                raise ValueError(
                    f"The residual of {name!r} has {views[name].numel()} elements, and {numel} are asked for: take it "
                    "out (pop) before the parameter changes its size."
                )
        if device.index is None:  # "cuda" is some "cuda:0"
            device = torch.empty(0, device=device).device
        dtypes = {name: torch.float64 if name in wide else torch.float32 for name in numels}
        apart = {
            name: numel
            for name, numel in numels.items()
            if name not in views or (views[name].device, views[name].dtype) != (device, dtypes[name])
        }
        leaving = {views[name].device for name in apart if name in views and views[name].is_cuda}
        is_offloaded = device.type == "cpu" and bool(leaving)
        for name, view in _allocate(apart, device, dtypes, pin_memory=is_offloaded).items():
            if name in views:
                view.copy_(views[name], non_blocking=is_offloaded or views[name].is_pinned())
            views[name] = view
        for gpu in leaving if is_offloaded else ():  # once, not for each tensor
            torch.cuda.synchronize(gpu)

    def to(self, device: torch.device) -> None:
        """Move all of them, into one buffer; those that are there already stay."""
        wide = [name for name, view in self._views.items() if view.dtype == torch.float64]
        self.ensure({name: view.numel() for name, view in self._views.items()}, device, wide)

    def norm(self) -> float:
        """Return the 2-norm of all of them together; waits for the device."""
        norms = [view.norm().double() for view in self._views.values()]
        by_device = {norm.device: [other for other in norms if other.device == norm.device] for norm in norms}
        return math.sqrt(sum(float(torch.stack(each).square().sum()) for each in by_device.values()))

    def pop(self, name: str) -> Tensor:
        """Take a residual out and return it; its memory is free again when the whole buffer is."""
        return self._views.pop(name)

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU, by name, each with memory of its own: a checkpoint holds no more than that."""
        return {name: view.to("cpu", copy=True) for name, view in self._views.items()}

    def load(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Take over what `state` returned, instead of what is there.

        Args:
            state: by name; of any shape and dtype, kept flat and in float32, or float64 as they are.
            device: where they are to be; the CPU by default.
        """
        dtypes = {name: torch.promote_types(each.dtype, torch.float32) for name, each in state.items()}
        numels = {name: each.numel() for name, each in state.items()}
        self._views = _allocate(numels, device or torch.device("cpu"), dtypes)
        for name, view in self._views.items():
            view.copy_(state[name].reshape(-1))


def _allocate(
    numels: Mapping[str, int], device: torch.device, dtypes: Mapping[str, torch.dtype], *, pin_memory: bool = False
) -> dict[str, Tensor]:
    """Return flat views of zeros into a new buffer per dtype, each of which starts at a multiple of the alignment."""
    views: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(dtypes[name] for name in numels):
        mine = {name: numel for name, numel in numels.items() if dtypes[name] == dtype}
        sizes = [-(-numel // ALIGNMENT) * ALIGNMENT for numel in mine.values()]
        parts = torch.zeros(sum(sizes), dtype=dtype, device=device, pin_memory=pin_memory).split(sizes)
        views |= {name: part[:numel] for (name, numel), part in zip(mine.items(), parts, strict=True)}
    return {name: views[name] for name in numels}
