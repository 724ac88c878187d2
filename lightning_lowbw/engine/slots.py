"""The tensors of one step of gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.orders import check_order
from lightning_lowbw.engine.velocities import Velocities
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.ops.layout import flat_in_order, in_order
from lightning_lowbw.ops.reference import Segment, as_real
from lightning_lowbw.what.momentum import ErrorFeedback
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker
    from lightning_lowbw.engine.worker import Worker


@dataclass(frozen=True)
class Slot:
    """A parameter in this step: its name, its param group, and whether it is sent sparse."""

    name: str
    parameter: Parameter
    group: dict[str, Any]
    is_sparse: bool

    @property
    def gradient(self) -> Tensor:
        """The gradient, which is there."""
        assert self.parameter.grad is not None
        return self.parameter.grad

    def in_order(self, tensor: Tensor) -> Tensor:
        """Return a real view of a tensor of the parameter's shape; contiguous where laid out as the parameter is."""
        return in_order(as_real(tensor), as_real(self.parameter))

    @property
    def has_sparse_layout(self) -> bool:
        """Whether the gradient is a sparse tensor, which cannot be summed."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout != torch.strided

    @property
    def is_missing(self) -> bool:
        """Whether there is no gradient that could be summed."""
        return self.parameter.grad is None or self.has_sparse_layout

    @property
    def flat_target(self) -> Tensor:
        """Where a mean is written, float32 and flat: the gradient itself, where it is laid out for that."""
        if self.is_flat_target:
            return flat_in_order(self.gradient, self.parameter)
        return torch.empty(self.gradient.numel(), dtype=torch.float32, device=self.gradient.device)

    @property
    def flat_pair(self) -> tuple[Tensor, Tensor]:
        """The gradient and the parameter, flat; to be changed in place, where both are laid out alike."""
        return flat_in_order(self.gradient, self.parameter), flat_in_order(self.parameter.detach(), self.parameter)

    @property
    def is_flat_target(self) -> bool:
        """Whether a mean is written into the gradient itself."""
        return self.gradient.dtype == torch.float32 and self.in_order(self.gradient).is_contiguous()


def sparse_of(slots: Sequence[Slot]) -> list[Slot]:
    """Return those that are sent sparse."""
    return [slot for slot in slots if slot.is_sparse]


def by_group(slots: Iterable[Slot]) -> Iterator[tuple[dict[str, Any], list[Parameter]]]:
    """Yield each param group with its parameters; those of a group are contiguous."""
    for _, of_group in groupby(slots, key=lambda slot: id(slot.group)):
        mine = list(of_group)
        yield mine[0].group, [slot.parameter for slot in mine]


def numels_of(slots: Sequence[Slot]) -> dict[str, int]:
    """Return the elements of each tensor, by name."""
    return {slot.name: slot.parameter.numel() for slot in slots}


def is_taken(worker: Worker, what: TopK, name: str, parameter: Parameter) -> bool:
    """Return whether a parameter is sent sparse in sparse steps."""
    return parameter.is_floating_point() and what.takes(name, worker.numel_of(parameter), worker.small_numel)


def numels_by_kind(worker: Worker, what: TopK) -> tuple[list[int], list[int]]:
    """Return the elements of each trained parameter that is sent sparse in sparse steps, and of each other one."""
    numels: tuple[list[int], list[int]] = [], []
    for name, parameter in worker.by_name().items():
        if parameter.requires_grad:
            numels[not is_taken(worker, what, name, parameter)].append(parameter.numel())
    return numels


def list_slots(worker: GradientWorker, what: TopK | None, skipped: Collection[Parameter]) -> list[Slot]:
    """Return the parameters of a step; the same on all ranks, whatever gradients they happen to have.

    In place:
        `.grad` of frozen parameters is dropped.

    Args:
        worker: of the optimizer.
        what: chooses those that are sent sparse; None in a step that has none.
        skipped: parameters that are left out.

    Raises:
        ConfigurationError: a tensor would be sent dense, and gradients are kept for it.
    """
    slots = []
    for group in worker.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in skipped:
                continue
            if not parameter.requires_grad:
                parameter.grad = None  # frozen since the backward: torch would step it, each rank on its own
                continue
            name = worker.name_of(parameter)
            is_sparse = what is not None and is_taken(worker, what, name, parameter)
            check_order(worker, name, parameter)
            if name in worker.residuals and not is_sparse and worker.peers.num_participants > 1:
                raise ConfigurationError(
                    f"Step {worker.step} would send {name!r} dense, but gradients that earlier sparse steps did not "
                    "send are kept for it. Go on with the schedule, min_numel and exclude that it was trained with, or "
                    f"{WITHOUT_RESIDUALS}."
                )
            slots.append(Slot(name, parameter, group, is_sparse))
    return slots


def segment_fields(slot: Slot, correction: ErrorFeedback, velocities: Velocities, peers: Peers) -> dict[str, Any]:
    """Return what a segment holds beside gradient and residual: velocity, weight, second moment and constants."""
    parameter, own = slot.parameter, peers.part(slot.parameter.numel())
    second_moment = correction.second_moment(parameter, slot.group, own)
    constants = correction.constants(parameter, slot.group)
    # Adam without momentum has a velocity, too, because the velocity is divided.
    has_velocity = constants.momentum != 0 or second_moment is not None
    return {
        "momentum_buffer": velocities.part(parameter) if has_velocity else None,
        "weight": flat_in_order(parameter.detach(), parameter)[own] if constants.weight_decay != 0 else None,
        "second_moment": second_moment,
        "elsewhere": correction.elsewhere(parameter, slot.group, own),
        **vars(constants),
    }


def keep_fields(slot: Slot, segment: Segment, correction: ErrorFeedback, velocities: Velocities, peers: Peers) -> None:
    """Write back what `segment_fields` has returned, where it was a copy."""
    velocities.keep(slot.parameter, segment.momentum_buffer)
    if segment.second_moment is not None:
        correction.keep_second_moment(slot.parameter, peers.part(slot.parameter.numel()), segment.second_moment)
