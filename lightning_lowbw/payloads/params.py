"""The tensors of one optimizer in one order: names, groups, sizes, and what kernels take of each."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.arguments import names_of
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels.table import DTYPES
from lightning_lowbw.kernels.tensors import Order, as_real, cut, has_gaps, order_of
from lightning_lowbw.payloads.payload import Payload

SMALL_SHARE, LEAST_NUMEL, MOST_NUMEL = 0.03, 1024, 16384  # see `small_numel`


@dataclass(frozen=True)
class Row:
    """A parameter that is trained in this step.

    Attributes:
        name: by which its state is kept.
        parameter: of the optimizer.
        group: its param group.
        is_compressed: whether the largest elements are sent; else it is sent whole.
        order: of its elements in memory.
        is_plain: whether it is real and contiguous, so that `in_order` has nothing to do.
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

    @property
    def gradient(self) -> Tensor:
        """The gradient, which is there."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def in_order(self, tensor: Tensor) -> Tensor:
        """Return a real view of a tensor of the parameter's shape; contiguous where laid out as the parameter is."""
        return tensor if self.is_plain else as_real(tensor).permute(self.order)

    def cut(self, tensor: Tensor, own: slice) -> Tensor:
        """Return a part of a tensor in the parameter's order: contiguous, a copy where it is laid out unlike it.

        The whole in its own shape: views of hundreds of tensors take as long as all else that a step does on the host.
        """
        ordered = self.in_order(tensor)
        if own.stop - own.start == tensor.numel() and ordered.is_contiguous():
            return ordered
        return cut(ordered, own)

    @property
    def is_steppable(self) -> bool:
        """Whether kernels can step the parameter, in float32, with the memory of its gradient as workspace."""
        parameter, gradient = self.parameter, self.gradient
        if not parameter.dtype == gradient.dtype == torch.float32:
            return False
        if self.is_plain:
            return gradient.is_contiguous()
        return self.in_order(gradient).is_contiguous() and self.in_order(parameter).is_contiguous()


class Rows(tuple[Row, ...]):
    """The rows of a step, and properties derived from these rows: made once for all steps with the same rows."""

    @functools.cached_property
    def parameters(self) -> list[Parameter]:
        """Their parameters."""
        return [row.parameter for row in self]

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of this moment."""
        return [parameter.grad for parameter in self.parameters]

    @functools.cached_property
    def compressed(self) -> list[Row]:
        """The rows whose largest elements are sent; also rows of empty shards."""
        return [row for row in self if row.is_compressed]

    @functools.cached_property
    def filled(self) -> list[Row]:
        """The compressed rows that have elements."""
        return [row for row in self.compressed if row.parameter.numel()]

    @functools.cached_property
    def numels(self) -> list[int]:
        """The number of elements of each filled row."""
        return [row.parameter.numel() for row in self.filled]

    @functools.cached_property
    def whole(self) -> list[Row]:
        """Those that are sent whole."""
        return [row for row in self if not row.is_compressed]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(row.parameter.nbytes for row in self)

    @functools.cached_property
    def orders(self) -> dict[str, Order]:
        """The order of each, by name."""
        return {row.name: row.order for row in self}


def by_group(rows: Iterable[Row]) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Yield each param group with its rows; the rows of a group are contiguous."""
    for _, of_group in groupby(rows, key=lambda row: id(row.group)):
        mine = list(of_group)
        yield mine[0].group, mine


class Params:
    """All parameters of an optimizer.

    Args:
        optimizer: the user's own.
        named_parameters: of the model.

    Attributes:
        whole_numels: numbers of elements of the whole parameters, for parameters whose shards this rank has.
        orders: the order of a parameter's elements in its residual, by name: that in memory.
    """

    def __init__(self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self.optimizer = optimizer
        self._names = names_of(named_parameters)
        self.whole_numels: Mapping[Parameter, int] = {}
        self.orders: dict[str, Order] = {}
        self._rows = Rows()  # of the last step; the key from which they were made; the objects whose ids are in the key
        self._key: tuple[Any, ...] = ()
        self._reduced: tuple[Any, ...] | None = None  # of a step all of whose gradients DDP has reduced: no rows
        self._members: list[tuple[Parameter, dict[str, Any]]] = []

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

    def trained(self, what: Payload | None, skipped: frozenset[Parameter]) -> Rows:
        """Return the rows of a step; the same on all ranks, whatever gradients they happen to have.

        In place:
            `.grad` of frozen parameters is dropped.

        Args:
            what: chooses the compressed parameters; None in a step that compresses none.
            skipped: parameters that are left out.
        """
        groups = self.optimizer.param_groups
        parameters: list[Parameter] = [parameter for group in groups for parameter in group["params"]]
        are_trained = [parameter.requires_grad for parameter in parameters]
        if not all(are_trained):
            for parameter, is_trained in zip(parameters, are_trained, strict=True):
                if not is_trained:
                    parameter.grad = None  # frozen since the backward: torch would step it, each rank on its own
        ids = [*map(id, parameters)]
        if what is None and self._reduced == (skipped, are_trained, ids):
            return self._rows
        # All that rows are made of: of 300 tensors it takes a tenth of a millisecond, and rows take two.
        layouts = [*map(Tensor.size, parameters)], [*map(Tensor.stride, parameters)], [p.dtype for p in parameters]
        sizes = [(id(group), len(group["params"])) for group in groups]
        key = what, skipped, vars(self).get("small_numel"), id(self.whole_numels), sizes, ids, are_trained, layouts
        if key != self._key:
            members, rows = [(parameter, group) for group in groups for parameter in group["params"]], list[Row]()
            for parameter, group in members:
                if parameter.requires_grad and parameter not in skipped:
                    is_compressed = what is not None and self.is_compressed(what, parameter)
                    rows.append(Row.of(self.name_of(parameter), parameter, group, is_compressed=is_compressed))
            self._key, self._members, self._rows = key, members, Rows(rows)
            self._reduced = None if rows else (skipped, are_trained, ids)
        return self._rows

    def note_orders(self, rows: Rows, step: int, kept: Collection[str]) -> None:
        """Note the order of each parameter's elements in memory, in which its residual will be.

        Raises:
            ConfigurationError: something is kept of one already, in another order.
        """
        if rows.orders.items() <= self.orders.items():
            return
        for row in rows:
            if row.name in kept and self.orders.get(row.name) != row.order:
                raise ConfigurationError(
                    f"Step {step}: the memory format of {row.name!r} has changed (the order of its dimensions was "
                    f"{self.orders.get(row.name)}, and is {row.order}), and gradients that have not been sent are kept "
                    "in that order. Change the memory format before training: model.to(memory_format=...) in __init__ "
                    f"or configure_model. Or {WITHOUT_RESIDUALS}."
                )
        self.orders |= rows.orders


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
