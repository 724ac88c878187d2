"""The parameters of one optimizer: their names, sizes and groups, and which parameters a payload compresses."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.arguments import names_of
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels.table import DTYPES
from lightning_lowbw.kernels.tensors import Order, as_real, has_gaps, order_of
from lightning_lowbw.payloads.payload import Payload

SMALL_SHARE, LEAST_NUMEL, MOST_NUMEL = 0.03, 1024, 16384  # see `small_numel`


@dataclass(frozen=True, eq=False)
class Row:
    """A parameter that is trained in this step.

    Attributes:
        name: by which its state is kept.
        parameter: of the optimizer.
        group: its param group.
        is_compressed: whether the payload compresses it; else it is sent whole.
        order: of its elements in memory.
        is_plain: whether it is real and contiguous, so that `all_in_order` has nothing to do.
    """

    name: str
    parameter: Parameter
    group: dict[str, Any]
    is_compressed: bool
    order: Order
    is_plain: bool

    @classmethod
    def of(cls, name: str, parameter: Parameter, group: dict[str, Any], *, is_compressed: bool) -> Row:
        is_plain = not parameter.is_complex() and parameter.is_contiguous()
        return cls(name, parameter, group, is_compressed, order_of(as_real(parameter)), is_plain)


# These functions take many rows: a call for each of hundreds of tensors takes as long as all else on the host.


def gradients_of(rows: Iterable[Row]) -> list[Tensor]:
    """Return the gradients of rows; each row has a gradient."""
    return [gradient for row in rows if (gradient := row.parameter.grad) is not None]


def all_in_order(rows: Iterable[Row], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return real views of tensors in the shapes of rows; contiguous where laid out as the parameter is."""
    pairs = zip(rows, tensors, strict=True)
    return [each if row.is_plain else as_real(each).permute(row.order) for row, each in pairs]


def gradients_in_order(rows: Sequence[Row]) -> list[Tensor]:
    """Return the gradients of rows as `all_in_order` does; each row has a gradient."""
    return all_in_order(rows, gradients_of(rows))


def by_group(rows: Iterable[Row]) -> list[tuple[dict[str, Any], list[Row]]]:
    """Return each param group with its rows."""
    groups: dict[int, tuple[dict[str, Any], list[Row]]] = {}
    for row in rows:
        groups.setdefault(id(row.group), (row.group, []))[1].append(row)
    return list(groups.values())


class Params:
    """All parameters of an optimizer.

    Args:
        optimizer: the user's own.
        named_parameters: of the model.

    Attributes:
        whole_numels: numbers of elements of the whole parameters, for parameters whose shards this rank has.
    """

    def __init__(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self.optimizer = optimizer
        self._names = names_of(named_parameters)
        self.whole_numels: Mapping[Parameter, int] = {}

    def __iter__(self) -> Iterator[Parameter]:
        """Yield all parameters, also frozen ones; once each, in order."""
        yield from dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"])

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(p for group in self.optimizer.param_groups for p in group["params"]).device

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter, by which its state is kept."""
        if parameter not in self._names:  # not in the module, for example a parameter of the loss
            number = next(number for number, each in enumerate(self) if each is parameter)
            name = f"optimizer.{number}"
            while name in self._names.values():  # what another has kept, which was at this place before, is its own
                name += "'"
            self._names[parameter] = name
        return self._names[parameter]

    def take_name(self, parameter: Parameter, name: str) -> None:
        """Take the name of a parameter that the optimizer gets in mid-fit."""
        self._names[parameter] = name

    def by_name(self) -> dict[str, Parameter]:
        """Return all parameters by name."""
        return {self.name_of(parameter): parameter for parameter in self}

    def names(self) -> Collection[str]:
        """Return the names of the whole model."""
        return self._names.values()

    @functools.cached_property
    def small_numel(self) -> int:
        """The number of elements below which a tensor is small; computed once, for the tensors trained then."""
        return small_numel(self.numel_of(parameter) for parameter in self if parameter.requires_grad)

    def numel_of(self, parameter: Parameter) -> int:
        """Return the elements of a parameter; of a sharded one, of the whole."""
        return self.whole_numels.get(parameter, as_real(parameter).numel())

    def is_compressed(self, what: Payload, parameter: Parameter) -> bool:
        """Return whether a parameter is sent compressed; it is sent whole if it is not `is_compressible`."""
        return is_compressible(parameter) and what.compresses(
            self.name_of(parameter), self.numel_of(parameter), self.small_numel
        )

    def numels_by_kind(self, what: Payload) -> tuple[list[int], list[int]]:
        """Return the elements of each trained parameter that is compressed, and of each other one."""
        sparse, others = self.by_kind(what)
        return [parameter.numel() for parameter in sparse], [parameter.numel() for parameter in others]

    def by_kind(self, what: Payload) -> tuple[list[Parameter], list[Parameter]]:
        """Return the trained parameters that are compressed, and the other ones."""
        kinds: tuple[list[Parameter], list[Parameter]] = [], []
        for parameter in self:
            if parameter.requires_grad:
                kinds[not self.is_compressed(what, parameter)].append(parameter)
        return kinds

    def trained(self, skipped: Collection[Parameter] = ()) -> list[tuple[Parameter, dict[str, Any]]]:
        """Return the parameters that are trained, each with its param group.

        In place:
            `.grad` of frozen parameters is dropped.

        Args:
            skipped: parameters that are left out.
        """
        members = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    parameter.grad = None  # frozen since the backward: torch would step it, each rank on its own
                elif not skipped or parameter not in skipped:
                    members.append((parameter, group))
        return members


def is_compressible(parameter: Tensor) -> bool:
    """Return whether a parameter has 32 or 16 bits per element, is real, and has no gaps between its elements."""
    return parameter.dtype in DTYPES and not has_gaps(parameter)


def check_shapes(saved: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors have the shapes that a state has saved, by name.

    Raises:
        ConfigurationError: one is missing, or has another shape.
    """
    for name, shape in saved.items():
        there = tuple(tensors[name].shape) if name in tensors else None
        if there != tuple(shape):
            raise ConfigurationError(
                f"The checkpoint has {name!r} of shape {tuple(shape)}, and here it "
                f"{'is missing' if there is None else f'has shape {there}'}. Resume with the model it was written "
                f"with, or {WITHOUT_RESIDUALS}."
            )


def small_numel(numels: Iterable[int]) -> int:
    """Return the number of elements below which a tensor is small: the small tensors together are 3 % of the model.

    Sending these whole costs little, and norms, biases and the last layer do not wait. It is a fraction, because all
    matrices of a small model are small; but not below 1,024 elements, where sending all costs less than the work for
    one more tensor, nor above 16,384, or 3 % of a large model would be most of the message.

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
