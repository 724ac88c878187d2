"""One average of replicas: the tensors and the control message that are sent, and how the mean is applied.

signal      x - x0, the change of the weights since the last consensus (or x itself, whole)
exchange    the payload's, as for gradients
apply       x0 = outer(x0, mean);  x = x0, or with a delay the steps taken meanwhile are kept
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

from lightning_lowbw.engine.average import LOSS, LR, NUM_LOSSES, WEIGHT, Average, Done, Fragment
from lightning_lowbw.engine.buffers import ReplicaBuffers, wide_copies
from lightning_lowbw.engine.control import Control, control_message, counts_of, make_mark
from lightning_lowbw.engine.faults import OF_WEIGHTS, check_faults, weight_fault
from lightning_lowbw.engine.narrow_exchange import NarrowExchange
from lightning_lowbw.engine.offload import Offload
from lightning_lowbw.engine.same_training import raise_at_other_batches
from lightning_lowbw.engine.sparse_exchange import SparseExchange
from lightning_lowbw.engine.sparse_work import GatheredWork
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.ops.lists import copy_all_, relative_distance
from lightning_lowbw.ops.memory import allocate
from lightning_lowbw.ops.reference import as_real, flat
from lightning_lowbw.what.narrow_values import make_narrow_format
from lightning_lowbw.what.payloads import Narrow
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.mean import MeanWork, mean_over, wide_dtype
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes, narrow_mean_bytes

if TYPE_CHECKING:
    from lightning_lowbw.engine.replicas import ReplicaWorker

_logger = logging.getLogger(LOGGER)


class Averaging:
    """Begins and applies averages of one worker's parameters and buffers.

    Args:
        worker: whose they are.
        named_buffers: as of `Method.attach`.

    Attributes:
        start: the last consensus of each parameter, where something needs it: float32 (or wider).
        velocity: of the outer optimizer.
        buffers: of the model.
        sparse: the exchange of changes by their largest elements; None unless the payload is `TopK`.
        narrow: that of changes in few bits; None unless the payload is `Narrow`.
        offload: where what is kept between averages lies.
        consensus_distance: ``||x_i - mean|| / ||mean||`` at the last average, of large tensors from a sample; a scalar
            tensor, None before it.
    """

    def __init__(self, worker: ReplicaWorker, named_buffers: Mapping[str, Tensor]) -> None:
        self._worker, self._peers = worker, worker.peers
        self.start: dict[Parameter, Tensor] = {}
        self.velocity: dict[Parameter, Tensor] = {}
        self.buffers = ReplicaBuffers(named_buffers)
        what = worker.method.what
        self.sparse = SparseExchange(what, worker.peers) if isinstance(what, TopK) else None
        self.narrow = NarrowExchange(what.value_dtype, worker.peers) if isinstance(what, Narrow) else None
        self.consensus_distance: Tensor | None = None
        self.offload = Offload(self)
        if worker.when.inner_momentum != "local":
            self._moment_names()
        if worker.method.sends_changes:
            worker.peers.check_parts()

    @property
    def needs_start(self) -> bool:
        """Whether the last consensus is kept."""
        return self._worker.when.outer != "none" or self._worker.method.sends_changes

    def takes(self, parameter: Parameter) -> bool:
        """Whether the payload sends a parameter's change; otherwise it is averaged whole."""
        if as_real(parameter).dtype == torch.float64:  # which would be rounded
            return False
        if self.sparse is not None:
            worker = self._worker
            return self.sparse.payload.takes(worker.name_of(parameter), worker.numel_of(parameter), worker.small_numel)
        return self.narrow is not None and parameter.numel() > 0

    def begin_local(self) -> None:
        """Note the tensors from which the next changes are measured.

        Collective: all ranks, the first time; a broadcast of each floating buffer.
        """
        self._note_start(self._worker.parameters())
        self.buffers.begin(self._peers)

    def _note_start(self, parameters: Sequence[Parameter]) -> None:
        """Note the last consensus of parameters that have not moved since; frozen ones need none before they train."""
        new = [p for p in parameters if p.requires_grad and p not in self.start] if self.needs_start else []
        self.start.update(zip(new, wide_copies(new), strict=True))

    # Begin ----------------------------------------------------------------------------------------------------------

    def begin(self, fragment: Fragment, fragments: list[Fragment]) -> Average:
        """Begin to average a fragment.

        Collective: all ranks.

        Wire:
            The parameters trained since the last average and the floating buffers, in float32 (or wider), with a
            control message of 6 numbers and 2 per rank; integer buffers separately; and the messages of the payload,
            which contain the control message if nothing else is sent.
        """
        worker, is_hidden = self._worker, self._worker.delay_steps > 0
        # A rank that is out of data has changed nothing since the last average, but takes part, too.
        moved = [p for p in fragment.parameters if p in fragment.moved or (worker.weighs_samples and p.requires_grad)]
        parameters = [p for p in moved if p.numel()]
        self._note_start(parameters)  # of those that the others have begun to train, where this rank is out of data
        weight = worker.num_samples if worker.weighs_samples else 1.0 / self._peers.num_ranks
        control = self._control(parameters, weight)
        moments = self.moments(parameters) if worker.when.inner_momentum == "average" else []
        buffers = self.buffers.changes() if fragment.takes_buffers else []
        changes = self._changes([p for p in parameters if self.takes(p)])
        rest: list[Tensor] = [*(p for p in parameters if not self.takes(p)), *moments, *buffers]
        # The control message is part of the message of the changes if no fragment sends anything else: ranks at
        # different steps must issue the same collectives, so that the difference is detected.
        is_alone = not rest and bool(changes) and self._sends_changes_only(fragments)
        whole = None if is_alone else MeanWork(rest, control, weight, self._peers)
        work = self._begin_changes(changes, control if is_alone else None)
        return Average(
            worker.step,
            parameters,
            whole or _ControlWork(work),
            work if not isinstance(work, GatheredWork) else _MeanChanges(work),
            moments,
            wide_copies(parameters) if is_hidden else None,
            self.buffers.snapshot() if is_hidden and fragment.takes_buffers else {},
        )

    def _begin_changes(self, changes: dict[str, Tensor], control: Tensor | None) -> Any:
        if not changes:
            return Done({})
        what = self._worker.method.what
        if isinstance(what, Narrow):
            assert self.narrow is not None
            self.narrow.value_dtype = what.value_dtype
            return _NarrowWork(self.narrow, changes)
        assert self.sparse is not None
        assert isinstance(what, TopK)
        self.sparse.payload = what
        numels = {name: change.numel() for name, change in changes.items()}
        flats = {name: flat(change) for name, change in changes.items()}
        # A node is one participant: its change is the mean of its ranks'.
        parts = self.sparse.parts_of_node_mean(flats)
        selected = self.sparse.compress(self.sparse.segments(parts, what.density))
        try:
            return self.sparse.gather(selected, numels, what.density, control)
        except BaseException:
            self._take_out(parts, what.decay)
            raise

    def _take_out(self, parts: Mapping[str, Tensor], decay: float) -> None:
        """Subtract the changes from the residuals, after the selected elements have been put back.

        The weights still contain the changes, and the next average measures them again.
        """
        assert self.sparse is not None
        for name, part in parts.items():
            residual = self.sparse.residuals[name]
            residual.sub_(part).div_(decay) if decay else residual.zero_()  # with 0 nothing is kept

    def _sends_changes_only(self, fragments: list[Fragment]) -> bool:
        if self.sparse is None or self._worker.when.inner_momentum == "average" or self.buffers.floating:
            return False
        return all(self.takes(p) or not (p.requires_grad and p.numel()) for each in fragments for p in each.parameters)

    def _changes(self, parameters: Sequence[Parameter]) -> dict[str, Tensor]:
        """Return each parameter's change since the last consensus, rounded to the parameter's type, in float32."""
        now = {p: as_real(p.detach()) for p in parameters}
        whole = [p for p, each in now.items() if each.dtype == torch.float32]
        changes: dict[Parameter, Tensor] = {}
        if whole:
            moved = torch._foreach_sub([now[p] for p in whole], [self.start[p] for p in whole])
            changes.update(zip(whole, moved, strict=True))
        for p, each in now.items():
            if p not in changes:  # of a half type, one by one: it takes a copy
                changes[p] = change_of(each, self.start[p], each.dtype)
        return {self._worker.name_of(p): changes[p] for p in parameters}

    def _control(self, parameters: list[Parameter], weight: float) -> Tensor:
        worker = self._worker
        device = worker.device
        fault = weight_fault(worker, parameters)
        # A mean of weights makes replicas equal from any start; changes need the same consensus on all ranks.
        count = 0 if worker.weighs_samples else worker.step + worker.common_batch
        mark = make_mark(count, (self.start[p] for p in parameters) if self.needs_start else None)
        sums = [weight, 0.0, 0.0, worker.phase.lr, *counts_of(worker.requests)]
        message = control_message(sums, fault, mark, self._peers.rank, self._peers.num_ranks, device)
        loss = worker.loss.mean()
        if loss is not None:
            is_positive = torch.isfinite(loss) & (loss > 0)
            message[NUM_LOSSES], message[LOSS] = 1.0, torch.where(is_positive, loss, float("inf"))
        return message

    def sent_bytes(self, parameters: Sequence[Parameter]) -> list[int]:
        """Return the bytes that an average sends for each parameter, by the formulas of the flat collectives."""
        return [self._sent_bytes(parameter) if parameter.requires_grad else 0 for parameter in parameters]

    def _sent_bytes(self, parameter: Parameter) -> int:
        num, numel = self._peers.num_participants, as_real(parameter).numel()
        if not self.takes(parameter):
            return all_reduce_bytes(numel * wide_dtype(parameter).itemsize, num)
        if self.sparse is not None:
            return all_gather_bytes(self.sparse.payload.nbytes([numel]), num)
        assert self.narrow is not None
        return narrow_mean_bytes(numel, num, make_narrow_format(self.narrow.value_dtype))

    # Apply ----------------------------------------------------------------------------------------------------------

    def apply(self, fragment: Fragment, average: Average) -> Control:
        """Wait for an average, and apply it, unless no rank has trained. Return the control message.

        Collective: all ranks, where there are integer buffers.

        In place:
            Parameters, buffers, `start`, the moments of the optimizer.

        Raises:
            NonFiniteGradientError, DisagreementError: on all ranks.
        """
        worker, num_ranks = self._worker, self._peers.num_ranks
        means, numbers = average.whole.wait()
        control = Control.read(numbers, num_ranks)
        self._check(control, average.parameters, average.step)
        if worker.weighs_samples:
            if not control.sums[WEIGHT]:
                return control
            if means:
                torch._foreach_div_(means, control.sums[WEIGHT])
        changes, remaining = average.changes.wait(), iter(means)
        if fragment.takes_buffers:
            self.buffers.agree_counts(self._peers)
        # From here on nothing is communicated: an exchange that fails, fails before a weight changes.
        names = {p: worker.name_of(p) for p in average.parameters}
        starts = {name: self.start[p] for p, name in names.items() if name in changes}
        moves = [changes[name].view(start.shape) for name, start in starts.items()]
        moved = dict(zip(starts, torch._foreach_add(list(starts.values()), moves) if moves else (), strict=True))
        of_parameters = [moved[name] if name in moved else next(remaining) for name in names.values()]
        self._apply_parameters(average, of_parameters, control.sums[LR] / num_ranks)
        for moment in average.moments:
            as_real(moment).copy_(next(remaining))
        if worker.when.inner_momentum == "reset":
            for moment in self.moments(average.parameters):
                moment.zero_()
        if fragment.takes_buffers:
            self.buffers.apply(list(remaining), average.buffer_snapshots)
        return control

    def _check(self, control: Control, parameters: list[Parameter], begun_at: int) -> None:
        counts, checksums = control.differences()
        if counts:
            raise_at_other_batches(self._worker, self._peers.group, {"average begun after steps": begun_at})
        if checksums:
            raise DisagreementError(
                f"The ranks measure their changes from different weights; checksums of these are {checksums}. Begin "
                "with the same weights on all ranks, also of parameters that are added later."
            )
        check_faults(control, self._worker, OF_WEIGHTS, parameters, begun_at)

    def _apply_parameters(self, average: Average, means: list[Tensor], lr: float) -> None:
        when = self._worker.when
        if not average.parameters:
            self.consensus_distance = None
            return
        now, before = [as_real(p.detach()) for p in average.parameters], average.snapshots
        self.consensus_distance = relative_distance(now if before is None else before, means)
        if self.needs_start:
            starts, velocities = [self.start[p] for p in average.parameters], []
            if when.outer != "none":
                for p, start in zip(average.parameters, starts, strict=True):
                    if p not in self.velocity:
                        self.velocity[p] = torch.zeros_like(start)
                velocities = [self.velocity[p] for p in average.parameters]
            when.outer_optimizer.step_(starts, means, velocities, lr)
        if before is not None:
            if when.mixing is None:
                torch._foreach_sub_(means, before)
                torch._foreach_add_(now, means)
                return
            for mean, each in zip(means, now, strict=True):  # one by one: half types are copied for it
                mean.lerp_(each.to(mean.dtype), when.mixing)
        copy_all_(now, means)

    def drop(self, average: Average) -> None:
        """Drop an average that will not be applied; elements taken from residuals are put back.

        Collective: the ranks of a node.
        """
        average.whole.wait()
        changes, backs = average.changes.wait(), {}
        for parameter, snapshot in zip(average.parameters, average.snapshots or [], strict=True):
            name = self._worker.name_of(parameter)
            if name in changes:
                moved = change_of(snapshot, self.start[parameter], as_real(parameter).dtype)
                backs[name] = changes[name] - moved.reshape(-1)
        if self.sparse is not None and backs:
            for name, back in self.sparse.parts_of_node_mean(backs).items():
                self.sparse.residuals[name].add_(back)

    def take_back(self, average: Average) -> None:
        """Take back an average that could not be applied, or has not arrived, on this rank.

        In place:
            The residuals, which get back the elements of the message; on two levels up to the differences in the node.
            Rounding errors of narrow values stay as they are.

        Nothing is communicated, and nothing waited for.
        """
        changes = average.changes
        if self.sparse is None:
            return
        reals = [as_real(p.detach()) for p in average.parameters]
        then = {
            self._worker.name_of(p): (now, self.start[p], real.dtype)
            for p, now, real in zip(average.parameters, average.snapshots or reals, reals, strict=True)
        }
        if isinstance(changes, _MeanChanges):
            changes.work.take_back()
            moved = {name: change_of(*then[name]).reshape(-1) for name in changes.work.numels}
            parts = {name: self.sparse.part(each) for name, each in moved.items()}
            self._take_out(parts, changes.work.payload.decay)
        elif isinstance(changes, Done):  # nothing, or after a resume, which does not have this rank's own message
            for name, change in changes.value.items():
                back = change - change_of(*then[name]).reshape(-1)
                self.sparse.residuals[name].add_(self.sparse.part(back))

    def average_in_node(self, fragment: Fragment) -> None:
        """Average the trained parameters over the ranks of the node, which have stepped alone.

        In place:
            The parameters; the snapshots of an average in progress, because the change that it brings is measured
            from there.

        Collective: the ranks of a node, blocking.
        """
        tensors = [as_real(p.detach()) for p in fragment.moved]
        if fragment.work is not None:
            tensors += fragment.work.snapshots or []
        copy_all_(tensors, mean_over(tensors, self._peers.node, self._worker.device))

    # Momentum of the inner optimizer --------------------------------------------------------------------------------

    def _moment_names(self) -> tuple[str, ...]:
        optimizer, choice = self._worker.optimizer, self._worker.when.inner_momentum
        if isinstance(optimizer, SGD):
            return ("momentum_buffer",)
        if isinstance(optimizer, (Adam, AdamW)):
            return ("exp_avg",) if choice == "reset" else ("exp_avg", "exp_avg_sq")
        raise ConfigurationError(
            f"inner_momentum={choice!r} supports only SGD, Adam and AdamW, not {type(optimizer).__name__}: leave it "
            "'local'."
        )

    def moments(self, parameters: list[Parameter]) -> list[Tensor]:
        """Return the optimizer's moments in a fixed order; zeros, to be forgotten, for those it does not have yet."""
        state = self._worker.optimizer.state
        return [
            moment if isinstance(moment := state[p].get(name), Tensor) else torch.zeros_like(p)
            for p in parameters
            for name in self._moment_names()
        ]

    def to(self, device: torch.device) -> None:
        """Move what is kept between averages."""
        self.offload.move(device)
        self.buffers.start = {name: tensor.to(device) for name, tensor in self.buffers.start.items()}


def change_of(now: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a change since the last consensus, rounded as the weights are: one that has not moved has none; float32.

    The mean change minus this one is what is put back into the residual if an average is not applied, because the
    weights still contain the change. This holds for the mean over participants: elements taken from one residual are
    put back by others.

    Args:
        now: a weight, or a wide copy of it.
        start: the consensus; float32 (or wider).
        dtype: of the weight.
    """
    return now.float() - start.to(dtype).float()


@dataclass
class _NarrowWork:
    """Changes whose average begins in `wait`, because its two exchanges depend on each other."""

    narrow: NarrowExchange
    changes: dict[str, Tensor]

    def wait(self) -> dict[str, Tensor]:
        """Called once: such an average has no delay."""
        changes = list(self.changes.values())
        # A node is one participant: its change is the mean of its ranks'.
        of_node = mean_over(changes, self.narrow.peers.node, changes[0].device)
        return self.narrow.average(dict(zip(self.changes, of_node, strict=True)))


@dataclass
class _MeanChanges:
    work: GatheredWork

    def wait(self) -> dict[str, Tensor]:
        device = self.work.wait().device
        means = {name: allocate(numel, torch.float32, device) for name, numel in self.work.numels.items()}
        self.work.average_(means)
        return means


@dataclass
class _ControlWork:
    """A control message that was sent as part of the changes, without its own collective."""

    work: GatheredWork

    def wait(self) -> tuple[list[Tensor], Tensor]:
        return [], self.work.controls()
