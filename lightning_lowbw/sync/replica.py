"""One rank's replica: its weights, the anchor, which is the last average, and the residuals of their changes.

The round is in `sync.local`; `sync.state` saves and loads a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter
from torch.nn import Parameter

from lightning_lowbw.comm.collectives import all_reduce_bytes, sent_bytes
from lightning_lowbw.comm.peers import Peers, fill_buckets, wide_dtype
from lightning_lowbw.kernels.tensors import as_real, checksum, device_of, laid_out, relative_distance, saved
from lightning_lowbw.payloads.exchange import Exchange
from lightning_lowbw.payloads.params import Params
from lightning_lowbw.payloads.payload import FLOAT_BYTES
from lightning_lowbw.payloads.whole import WholeExchange
from lightning_lowbw.schedules.every_k import EveryK, balance
from lightning_lowbw.sync.buffers import ReplicaBuffers, wide_copies
from lightning_lowbw.sync.fragments import Average, Sums, apply_means_, changes_of, differing, make_fragments, unsent_of
from lightning_lowbw.sync.status import Faults, raise_first

COPY = "anchor"  # the purpose of the side stream that copies an anchor to the host


class Replica:
    """The state that a rank keeps between averages.

    Args:
        params: the parameters of its optimizer.
        exchange: the exchange of the changes that the payload compresses; None if all tensors are sent whole.
        peers: the participants; they say which part of each tensor this rank keeps.
        named_buffers: returns the current buffers of the model, by name.
        when: the schedule; it says how many fragments there are.

    Attributes:
        needs_start: whether changes are measured from the anchor; a member that joins takes it. If not, the anchor is
            only shown.
        start: the anchor x0, the last average of each parameter: float32 (or wider). On the device if changes are
            measured from it; else in pinned memory of the host.
        velocity: the momentum buffers of the outer optimizer.
        buffers: the buffers of the model.
        fragments: the parameters, grouped by the averages that they belong to.
        own: the tensors of this rank that `show` has replaced, by name, on the CPU; None if nothing is shown.
    """

    def __init__(
        self,
        params: Params,
        exchange: Exchange | None,
        peers: Peers,
        named_buffers: Callable[[], Mapping[str, Tensor]],
        when: EveryK,
    ) -> None:
        self.params, self.exchange, self.peers, self._when = params, exchange, peers, when
        self.needs_start = when.outer != "none" or exchange is not None or peers.may_grow
        self._is_alone = peers.num_ranks == 1 and not (peers.may_grow or peers.are_shards)
        self.start: dict[Parameter, Tensor] = {}
        self.velocity: dict[Parameter, Tensor] = {}
        self.buffers = ReplicaBuffers(named_buffers, peers)
        self.own: dict[str, Tensor] | None = None
        self._shown: Tensor | int = 0  # the checksum of the parameters while the anchor is shown
        parameters = list(params)
        self.fragments = make_fragments(parameters, when.num_fragments_of(len(parameters)), self.sent_bytes)

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """The residuals: the changes of this rank that have not been sent, by name; flat."""
        return {} if self.exchange is None else self.exchange.residuals

    @property
    def parameters_agree(self) -> bool:
        """Whether the parameters are the same on all ranks; known without communication."""
        return self._is_alone or not any(fragment.moved or fragment.work for fragment in self.fragments)

    @property
    def is_equal(self) -> bool:
        """Whether there is nothing to average. Buffers that may differ count as different."""
        may_differ = self.buffers.is_begun and bool(self.buffers.specs)
        return self._is_alone or (self.parameters_agree and not may_differ)

    # Messages of an average -----------------------------------------------------------------------------------------

    def compresses(self, parameter: Parameter) -> bool:
        """Whether the payload sends a parameter's change; otherwise it is averaged whole."""
        return self.exchange is not None and self.params.is_compressed(self.exchange.payload, parameter)

    @property
    def sends_changes_only(self) -> bool:
        """Whether an average consists of the payload's messages; equal on all ranks."""
        if self.exchange is None or any(map(self.buffers.is_averaged, self.buffers.specs)):
            return False
        # One small tensor that is sent whole needs a second message, which then contains the status.
        trained = [p for fragment in self.fragments for p in fragment.parameters if p.requires_grad and p.numel()]
        return all(map(self.compresses, trained))

    def sent_bytes(self, parameter: Parameter) -> int:
        """Return the bytes that an average sends for a parameter, by the formulas of the flat collectives."""
        if not parameter.requires_grad:
            return 0
        real, num_participants = as_real(parameter), self.peers.num_participants
        if self.exchange is not None and self.compresses(parameter):
            messages = self.exchange.payload.messages([real.shape], num_participants, when=self._when)
            return sent_bytes(messages, num_participants)
        return all_reduce_bytes(real.numel() * wide_dtype(parameter).itemsize, num_participants)

    def prepare_average(
        self, step: int, parameters: list[Parameter], *, takes_buffers: bool
    ) -> tuple[Average, dict[str, Tensor], dict[str, Tensor]]:
        """Return an average, the tensors to be sent whole, and the changes that the payload sends.

        Args:
            step: optimizer steps completed.
            parameters: have elements.
            takes_buffers: whether the buffers are averaged, too.
        """
        # signal: D = x - x0 of the parameters that the payload sends; x of the other ones, and the changes of buffers.
        is_delayed, name_of = self._when.delay_steps > 0, self.params.name_of
        average = Average(step, parameters, takes_buffers=takes_buffers)
        average.snapshots = wide_copies(parameters) if is_delayed else None
        average.buffer_snapshots = self.buffers.snapshot() if takes_buffers and is_delayed else {}
        sent = list(filter(self.compresses, parameters))
        moves = changes_of(list(map(as_real, sent)), [self.start[p] for p in sent])
        changes = dict(zip(map(name_of, sent), moves, strict=True))
        named = zip(map(name_of, parameters), average.snapshots or parameters, strict=True)
        whole = {name: value for name, value in named if name not in changes}
        return average, whole | (self.buffers.changes() if takes_buffers else {}), changes

    def send_average(
        self, average: Average, whole: dict[str, Tensor], changes: dict[str, Tensor], status: Tensor
    ) -> Average:
        """Send the tensors that `prepare_average` has returned.

        Collective: all ranks, with the same parameters.
        """
        # exchange: the status is part of the message of the changes if no fragment sends anything else. Ranks at
        # different steps must issue the same collectives, so that the status shows the difference.
        is_alone = not whole and bool(changes) and self.sends_changes_only
        if not is_alone:
            average.whole = WholeExchange(self.peers, in_memory_order=True).prepare(whole).send(status)
        if changes:
            assert self.exchange is not None
            average.changes = self.exchange.prepare(changes).send(status if is_alone else None)
        return average

    def apply_average(
        self,
        average: Average,
        means: dict[str, Tensor],
        sums: Sums,
        when: EveryK,
        moved: Collection[Parameter],
        *,
        measures: bool,
    ) -> Tensor | None:
        """Step from the anchor to the mean; return the distance of the weights from the mean, if it is measured.

        Collective: all ranks, if buffers differ that are not averaged, or the shape of a buffer has changed.

        Args:
            average: the average; `wait_for_whole` has been called.
            means: the means of the tensors that are averaged whole, by name; used up.
            sums: the sums over the ranks in the status.
            when: the schedule of this step.
            moved: parameters that have been trained since the average was begun.
            measures: whether the distance is measured.
        """
        x, now = self.means_of(average, means, sums), list(map(as_real, average.parameters))
        before = average.snapshots or now
        distance = relative_distance(before, x) if now and measures else None
        self.move_anchor_(average.parameters, x, sums, when)
        # apply: x = x0; with a delay the steps taken meanwhile are kept.
        have_moved = [average.snapshots is not None and p in moved for p in average.parameters]
        if not self.needs_start and when.delay_steps:
            self.copy_to_host(average.parameters, x)
            device_of(self.params.device).join(COPY)  # the next line changes the means
        apply_means_(now, before, x, have_moved, when.mixing)
        if not (self.needs_start or when.delay_steps):
            self.copy_to_host(average.parameters, now)
        self.buffers.apply(means, average.buffer_snapshots)
        return distance

    def means_of(self, average: Average, means: dict[str, Tensor], sums: Sums) -> list[Tensor]:
        """Return the mean of each parameter of an average, in float32 or wider; arguments as for `apply_average`.

        Collective: as `apply_average`. Nothing is communicated after it: an exchange that fails changes no weight.
        """
        changes = average.wait_for_changes()
        if average.takes_buffers:
            if sums.num_resized:
                self.buffers.agree_on_shapes()
            self.buffers.take_first_()
        names, now = list(map(self.params.name_of, average.parameters)), list(map(as_real, average.parameters))
        starts = [self.start[p] for p in average.parameters] if self.needs_start else []
        sent = {name: start for name, start in zip(names, starts, strict=False) if name in changes}
        moves = [laid_out(changes[name], start.shape) for name, start in sent.items()]
        means |= zip(sent, torch._foreach_add(list(sent.values()), moves) if moves else (), strict=True)
        for name, weight, start in zip(names, now, starts, strict=False):
            if name not in changes and weight.dtype.itemsize < FLOAT_BYTES:
                # The weight began as its rounded anchor: the rounding error is no change of the weight.
                means[name].add_(start).sub_(start.to(weight.dtype))
        return [means[name] for name in names]

    def move_anchor_(self, parameters: Sequence[Parameter], x: list[Tensor], sums: Sums, when: EveryK) -> None:
        """Move the anchor: x0 = outer(x0, mean).

        In place:
            The anchor and the velocity; `x`, the means of the parameters, which become x0.
        """
        if not self.needs_start or not parameters:
            return
        if when.outer != "none":
            new = [p for p in parameters if p not in self.velocity]
            self.velocity |= {p: torch.zeros_like(self.start[p]) for p in new}
        velocities = [self.velocity[p] for p in parameters if p in self.velocity]
        when.outer_step_([self.start[p] for p in parameters], x, velocities, sums.lr / self.peers.num_ranks)

    def keep_starts(self) -> None:
        """Keep the anchor of each parameter that has none yet; a frozen parameter gets its anchor once it trains."""
        new = [p for p in self.params if p.requires_grad and p not in self.start]
        if self.needs_start:
            self.start.update(zip(new, wide_copies(new), strict=True))
        else:
            device_of(self.params.device).join(COPY)  # before a step changes the weights that are copied
            self.copy_to_host(new, list(map(as_real, new)))

    def copy_to_host(self, parameters: Sequence[Parameter], values: Sequence[Tensor]) -> None:
        """Begin to copy the anchor of parameters to the host, on a side stream; keep `values` until it is joined."""
        if not parameters:
            return
        for parameter, value in zip(parameters, values, strict=True):
            if parameter not in self.start:
                dtype = wide_dtype(parameter)
                self.start[parameter] = torch.empty_like(value, dtype=dtype, device="cpu", pin_memory=value.is_cuda)
        with device_of(self.params.device).fork(COPY)(tuple(values), False):
            torch._foreach_copy_([self.start[p] for p in parameters], list(values), non_blocking=True)

    def note_step(self) -> None:
        """Note that a local step has trained parameters; new ones join the fragment that sends the fewest bytes."""
        # A layer that is unfrozen, or added, gets the same fragment on all ranks: it depends on sizes, which are equal.
        owner = {p: fragment for fragment in self.fragments for p in fragment.parameters}
        new = [p for p in self.params if p not in owner]
        loads = [sum(map(self.sent_bytes, fragment.parameters)) for fragment in self.fragments] if new else []
        for parameter, number in zip(new, balance(list(map(self.sent_bytes, new)), loads), strict=True):
            self.fragments[number].parameters.append(parameter)
            owner[parameter] = self.fragments[number]
        for fragment in self.fragments:
            assert fragment.steps is not None
            fragment.steps += 1
        for parameter in self.params:
            if parameter.requires_grad:
                owner[parameter].moved[parameter] = None

    # Averages that are not applied ----------------------------------------------------------------------------------

    def drop_averages(self) -> None:
        """Drop the averages in progress, and mark no parameter as trained since: the weights are equal already.

        In place:
            The residuals; see `unapplied`.
        """
        for name, unsent in self.unapplied():
            self.residuals[name].add_(unsent)
        for fragment in self.fragments:
            if fragment.work is not None:
                fragment.work.wait_for_whole()
            fragment.work = None
            fragment.moved.clear()

    def unapplied(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the averages in progress; yield the tensor to add to each residual if they are not applied.

        The weights keep the changes of this rank, and the next average sends them anew. So the mean of residuals plus
        changes over the participants stays the same.
        """
        for average in (fragment.work for fragment in self.fragments if self.residuals and fragment.work is not None):
            changes = average.wait_for_changes()
            for parameter, snapshot in zip(average.parameters, average.snapshots or (), strict=True):
                if (name := self.params.name_of(parameter)) in changes:
                    dtype, residual = as_real(parameter).dtype, self.residuals[name]
                    unsent = unsent_of(changes[name], snapshot, self.start[parameter], dtype)
                    keeps_parts = residual.numel() < unsent.numel()
                    yield name, unsent[self.peers.part(unsent.numel())] if keeps_parts else unsent

    # The anchor in the model ----------------------------------------------------------------------------------------

    def _anchored(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the tensors of the model that have an anchor, each with its anchor, by name."""
        if self._is_alone:  # its replica is the mean
            return {}
        buffers = self.buffers.now()
        return {
            **{self.params.name_of(p): (as_real(p.detach()), start) for p, start in self.start.items()},
            **{name: (as_real(buffers[name]), start) for name, start in self.buffers.start.items() if name in buffers},
        }

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's own tensors that averages make equal, also while the anchor is shown."""
        # Parameters that were trained before they were frozen are still to be averaged.
        frozen = {p for p in self.params if not p.requires_grad}.difference(differing(self.fragments))
        tensors = {**self.params.by_name(), **self.buffers.now()}
        return {name: tensor for name, tensor in tensors.items() if tensor not in frozen} | (self.own or {})

    @torch.inference_mode(False)  # tensors made here outlive an evaluation
    @torch.no_grad()
    def show(self) -> None:
        """Put the anchor into the model, until `hide`: validation and saves see the last average.

        Nothing is communicated, and the training is unaffected.
        """
        anchored = self._anchored()
        if self.own is not None or not anchored:
            return
        device_of(self.params.device).join(COPY, on_host=True)
        # On the CPU: the device need not have room for a second model.
        now = {**self.params.by_name(), **self.buffers.now()}
        self.own = saved({name: now[name] for name in anchored})
        equal = {self.params.name_of(p) for p in self.start} if self.parameters_agree else set[str]()
        _write_({name: pair for name, pair in anchored.items() if name not in equal})
        self._shown = checksum(self.start)

    @torch.inference_mode(False)
    @torch.no_grad()
    def hide(self) -> bool:
        """Put this rank's own tensors back; return whether the parameters were changed while the anchor was shown."""
        if self.own is None:
            return False
        is_changed = int(checksum(self.start)) != int(self._shown)
        tensors = {**self.params.by_name(), **self.buffers.now()}
        _write_({name: (tensors[name].detach(), own) for name, own in self.own.items()})
        self.own = None
        return is_changed

    @torch.no_grad()
    def average(self, faults: Faults, group: dist.ProcessGroup | None) -> None:
        """Set the weights to the mean of the replicas, without a step of the outer optimizer: the training ends.

        Collective: all ranks, blocking; the comparison of the buffers, and all-reduces.

        Args:
            faults: the faults of this rank.
            group: the ranks that are told of the faults.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks, before anything changes; a rank has a fault.
        """
        buffers = self.buffers
        buffers.compare(self.params.device)  # a forward pass may have changed them since the last average
        parameters = {self.params.name_of(p): p for p in differing(self.fragments)}
        tensors, fault = {**parameters, **buffers.changes()}, faults.any(self.params.device).float().reshape(1)
        names, exchange = list(tensors), WholeExchange(self.peers, in_memory_order=True)
        of_buffers = dict[str, Tensor]()
        for bucket in fill_buckets(tuple((real.dtype, real.numel()) for real in map(as_real, tensors.values()))):
            # Bucket by bucket: the device may have room for the means of one bucket only. Each has the status.
            arrived = exchange.prepare({names[i]: tensors[names[i]] for i in bucket.members}).send(fault).wait()
            if float(arrived.status):
                raise_first(faults, group)
            for name, mean in arrived.mean.dense().items():
                if name in parameters:
                    as_real(parameters[name]).copy_(mean)
                else:
                    of_buffers[name] = mean.clone()  # else the bucket would stay
            del arrived
        buffers.apply(of_buffers, {})
        buffers.take_first_()

    # Other places ---------------------------------------------------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Move the anchor, the momentum buffers and the residuals."""
        # The keys stay valid: a parameter stays the same object when the model moves.
        self.start = {parameter: tensor.to(device) for parameter, tensor in self.start.items()}
        self.velocity = {parameter: tensor.to(device) for parameter, tensor in self.velocity.items()}
        self.buffers.start = {name: tensor.to(device) for name, tensor in self.buffers.start.items()}
        if self.exchange is not None:
            self.exchange.to(device)


def _write_(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first.

    Autograd does not count the write: a save may come between a forward pass and its backward pass, and the weights of
    this rank are back before the backward pass.
    """
    with _unsafe_preserve_version_counter(tuple(tensor for tensor, _ in pairs.values() if not tensor.is_inference())):
        for tensor, value in pairs.values():
            tensor.copy_(value)
