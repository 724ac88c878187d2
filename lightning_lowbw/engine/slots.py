"""The tensors of one step of gradients, and the errors for gradients that cannot be exchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.control import control_message, first_fault
from lightning_lowbw.engine.faults import damage_error, unknown_fault
from lightning_lowbw.engine.kept import kept_error, late_error
from lightning_lowbw.engine.orders import check_order
from lightning_lowbw.engine.velocities import Velocities
from lightning_lowbw.errors import ConfigurationError, NonFiniteGradientError
from lightning_lowbw.ops.layout import flat_in_order, in_order
from lightning_lowbw.ops.reference import Segment, are_not_finite, as_real
from lightning_lowbw.ops.table import constant
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
                    "send are kept for it. Go on with the schedule, min_numel and exclude that it was trained with."
                )
            slots.append(Slot(name, parameter, group, is_sparse))
    return slots


def control_of(worker: GradientWorker, slots: Sequence[Slot], fault: Tensor, mark: Tensor | int) -> Tensor:
    """Return the control message of a step; its sums count the ranks that have a gradient of each parameter.

    Args:
        worker: of the optimizer. If the residuals of its exchange in few bits have an inf or NaN, this fault, with the
            last number, replaces those of the gradients, which may be a consequence.
        slots: of the step.
        fault: see `first_fault_of`.
        mark: see `make_mark`.
    """
    peers, narrow = worker.peers, worker.narrow
    if narrow is not None and narrow.left is not None:
        fault = torch.where(narrow.left.isfinite(), fault, 2 * len(slots) + 2)
    used = [float(slot.parameter.grad is not None) for slot in slots]
    return control_message(used, fault, mark, peers.rank, peers.num_ranks, fault.device, worker.requests)


def take_means(
    slots: Sequence[Slot], num_users: Sequence[float], means: Mapping[str, Tensor], begun: Collection[Parameter]
) -> list[Slot]:
    """Take means over the ranks as gradients; return the slots that are stepped.

    In place:
        `.grad`; zeros where this rank has none and another has.

    Args:
        slots: of the step.
        num_users: the number of ranks with a gradient, of each; parameters that no rank has used are not changed, as in
            DDP.
        means: by name, of those that are averaged whole.
        begun: parameters that are sent already.
    """
    kept, targets, sources = [], [], []
    for slot, number in zip(slots, num_users, strict=True):
        if round(number) or slot.parameter in begun:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            if slot.name in means:
                targets.append(slot.in_order(slot.gradient))
                sources.append(means[slot.name])
            kept.append(slot)
    if targets:
        torch._foreach_copy_(targets, sources)
    return kept


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


def first_fault_of(
    slots: Sequence[Slot],
    known: dict[Parameter, Tensor],
    later: Collection[Parameter] = (),
    late: Mapping[Parameter, Tensor] | None = None,
    damaged: Tensor | None = None,
) -> Tensor:
    """Return 1 + the number of the first fault, else 0; a scalar.

    Of so many slots the faults of the step before are numbered first, then a damaged message of an earlier step, then
    the gradients that are not finite. Negative for a gradient that is not dense: that is known on the host, and only on
    the rank that has it.

    Args:
        slots: at least one.
        known: whether gradients have an inf or NaN, of those that have been checked; the others are added.
        later: parameters whose gradients are checked later.
        late: `GradientWorker.late_faults`, of which what is not finite now may be a consequence.
        damaged: `SparseExchange.damaged`, of which the same is true.
    """
    unchecked: dict[Parameter, Tensor] = {}
    for number, slot in enumerate(slots):
        parameter, gradient = slot.parameter, slot.parameter.grad
        if slot.has_sparse_layout:
            return torch.tensor(-1.0 - number, dtype=torch.float32, device=parameter.device)
        if gradient is not None and parameter not in later and parameter not in known:
            unchecked[parameter] = gradient
    known.update(zip(unchecked, are_not_finite(list(unchecked.values())), strict=True))
    nothing = constant((False,), torch.bool, slots[0].parameter.device).squeeze()
    before, now = ([faults.get(slot.parameter, nothing) for slot in slots] for faults in (late or {}, known))
    return first_fault([*before, nothing if damaged is None else damaged, *now])


def of_gradients(slots: Sequence[Slot]) -> range:
    """Return the numbers that `first_fault_of` gives to the gradients that are not finite."""
    return range(len(slots) + 2, 2 * len(slots) + 2)


def fault_error(
    fault: int, slots: Sequence[Slot], rank: int, peers: Peers, *, step: int, is_of_node: bool, is_sent: bool
) -> ValueError | NonFiniteGradientError:
    """Return the error that all ranks raise for a fault of a rank, numbered by `first_fault_of`.

    Args:
        fault: not 0.
        slots: of the step.
        rank: who has the gradient.
        peers: for its node.
        step: optimizer steps completed.
        is_of_node: whether the gradient is the mean of the rank's node already.
        is_sent: whether other gradients have been sent during backward.
    """
    where = f"on rank {rank}"
    late, skippable, of_narrow = len(slots), of_gradients(slots), 2 * len(slots) + 2
    if fault == of_narrow:
        return kept_error(f"what was kept of earlier gradients {where}", step)
    if fault == late + 1:
        return damage_error(rank, step)
    if not -late <= fault < of_narrow:
        return unknown_fault(fault, rank)
    slot = slots[fault - skippable.start if fault in skippable else abs(fault) - 1]
    name = slot.name
    if 0 < fault <= late:
        return late_error(name, rank, step)
    if fault < 0:
        return ConfigurationError(
            f"The gradient of {name!r} {where} is sparse; only dense ones are exchanged. Build the layer with "
            "sparse=False."
        )
    if is_of_node and peers.topology is not None:
        node = peers.topology.node_of(rank)
        where = f"of node {node} (ranks {list(peers.topology.nodes[node])})"
    elif peers.nodes is not None:
        where = f"of node {rank} (ranks {list(peers.nodes[rank])})"
    sent = "What was sent during backward is not applied."  # each rank takes its own back
    return NonFiniteGradientError(
        f"Step {step}: the gradient of {name!r} {where} is not finite"
        f"{', or too large to be added to what earlier ones have left' if slot.is_sparse else ''}. "
        f"{sent if is_sent else 'Nothing was exchanged.'} "
        "Lower the learning rate, clip the gradient, or look at the data there; with precision='16-mixed' such steps "
        "are skipped."
    )
