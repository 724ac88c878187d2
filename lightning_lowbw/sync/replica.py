"""One rank's replica: its weights, the consensus that they are measured from, and what of their change is unsent.

What a round does with a replica is in `sync.local`, what of it is saved is in `sync.state`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.collectives import all_reduce_bytes, sent_bytes
from lightning_lowbw.comm.peers import Peers, wide_dtype
from lightning_lowbw.compress.params import Params
from lightning_lowbw.kernels.tensors import as_real, copy_all_
from lightning_lowbw.schedules.every_k import EveryK
from lightning_lowbw.sync.buffers import ReplicaBuffers, wide_copies
from lightning_lowbw.sync.consensus import ConsensusView, means_by_bucket, saved
from lightning_lowbw.sync.exchange import Exchange
from lightning_lowbw.sync.fragments import differing, make_fragments, unsent_of
from lightning_lowbw.sync.status import Faults, first_fault
from lightning_lowbw.sync.synchronizer import raise_fault


class Replica:
    """What a rank keeps between averages.

    Args:
        params: of its optimizer.
        exchange: of what the payload compresses; None if all is sent whole.
        peers: say which part of each tensor this rank keeps.
        named_buffers: of the model.
        when: says how many fragments there are.

    Attributes:
        start: x0, the last consensus of each parameter, where something needs it: float32 (or wider).
        velocity: of the outer optimizer.
        buffers: of the model.
        fragments: the parameters, by the averages that they belong to.
        view: the consensus that is in the model now, to be looked at.
    """

    def __init__(
        self,
        params: Params,
        exchange: Exchange | None,
        peers: Peers,
        named_buffers: Mapping[str, Tensor],
        when: EveryK,
    ) -> None:
        self.params, self.exchange, self.peers, self._when = params, exchange, peers, when
        self._is_alone = peers.num_ranks == 1 and not (peers.may_grow or peers.are_shards)
        self.start: dict[Parameter, Tensor] = {}
        self.velocity: dict[Parameter, Tensor] = {}
        self.buffers = ReplicaBuffers(named_buffers)
        self.view = ConsensusView()
        parameters = list(params)
        self.fragments = make_fragments(parameters, when.num_fragments_of(len(parameters)), self.sent_bytes)

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """What has not been sent of this rank's changes, by name; flat."""
        return {} if self.exchange is None else self.exchange.residuals

    @property
    def parameters_agree(self) -> bool:
        """Whether the parameters are the same on all ranks; known without communication."""
        return self._is_alone or not any(fragment.moved or fragment.work for fragment in self.fragments)

    @property
    def is_consensus(self) -> bool:
        """Whether there is nothing to average. Any forward pass may change buffers."""
        return self._is_alone or (self.parameters_agree and not self.buffers.may_differ)

    # What is sent ---------------------------------------------------------------------------------------------------

    def compresses(self, parameter: Parameter) -> bool:
        """Whether the payload sends a parameter's change; otherwise it is averaged whole."""
        return self.exchange is not None and self.params.is_compressed(self.exchange.payload, parameter)

    @property
    def sends_changes_only(self) -> bool:
        """Whether an average consists of the payload's messages; equal on all ranks."""
        if self.exchange is None or self.buffers.may_average:
            return False
        # One small tensor that is sent whole takes a second message, and the status goes on that.
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

    def keep_starts(self) -> None:
        """Measure changes from now on, of parameters that have not been trained before; of frozen ones later."""
        new = [p for p in self.params if p.requires_grad and p not in self.start]
        self.start.update(zip(new, wide_copies(new), strict=True))

    # Averages that are not applied ----------------------------------------------------------------------------------

    def drop_averages(self) -> None:
        """Forget what the next averages would have made equal, because it is; wait for those that have been begun.

        In place:
            Residuals: what of an average's changes has not arrived is unsent again, as in `merge_replicas`.
        """
        for fragment in self.fragments:
            if (average := fragment.work) is not None:
                average.wait_for_whole()
                changes = average.changes.wait().mean.dense()
                for parameter, snapshot in zip(average.parameters, average.snapshots or (), strict=True):
                    if (name := self.params.name_of(parameter)) in changes:
                        dtype, residual = as_real(parameter).dtype, self.residuals[name]
                        unsent = unsent_of(changes[name], snapshot, self.start[parameter], dtype)
                        keeps_parts = residual.numel() < unsent.numel()
                        residual.add_(unsent[self.peers.part(unsent.numel())] if keeps_parts else unsent)
            fragment.work = None
            fragment.moved.clear()

    # What the model shows -------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the consensus has, by name: parameters and buffers."""
        return {**self.params.by_name(), **self.averaged_buffers()}

    def averaged_buffers(self) -> dict[str, Tensor]:
        """Return the buffers, by name."""
        return (self.view.buffers or self.buffers).now()

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's own tensors that are averaged, without frozen parameters that were never trained."""
        tensors = self.tensors()
        if self.view.own is not None:
            return self.view.own_values(tensors)
        # Frozen ones that have moved before they were frozen are still to be averaged.
        frozen = {p for p in self.params if not p.requires_grad}.difference(differing(self.fragments))
        return {name: tensor for name, tensor in tensors.items() if tensor not in frozen}

    @torch.no_grad()
    def show(self, values: Mapping[str, Tensor], shown: int | None = None) -> None:
        """Put a consensus into the model, until `hide`.

        Args:
            values: for `tensors`.
            shown: the checksum of the parameters' consensus, if they have been replaced by others since.
        """
        self.view = ConsensusView(saved(self.own_tensors()))
        for name, tensor in self.tensors().items():  # in place: optimizer and user hold these tensors
            tensor.copy_(values[name])
        self.note_shown(shown)

    def note_shown(self, shown: int | None = None) -> None:
        """Note what parameters and buffers have now, with the consensus in the model; see `ConsensusView.noted`."""
        self.view = self.view.noted(list(self.params), self.averaged_buffers(), shown)

    @torch.no_grad()
    def hide(self, *, keeps_parameters: bool = False) -> None:
        """Put this rank's own parameters and buffers back, except buffers that have been changed meanwhile.

        Args:
            keeps_parameters: whether what is in the model stays there.
        """
        tensors, kept = self.tensors(), self.params.by_name() if keeps_parameters else {}
        for name, value in self.view.unchanged(tensors).items():
            if name not in kept:
                tensors[name].copy_(value)
        self.view = ConsensusView()

    @torch.no_grad()
    def show_mean(self, faults: Faults, group: dist.ProcessGroup | None) -> None:
        """Put the mean of all replicas into the model, until `hide`; what is averaged next stays as it is.

        Collective: all ranks, blocking; the comparison of the buffers, and all-reduces.

        Args:
            faults: of this rank.
            group: the ranks that are told of them.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks, before anything changes; a rank has a fault.
        """
        device, agreed = next(iter(self.params)).device, self.buffers.for_view()
        agreed.compare(self.peers, device)  # a forward pass may have changed them since the last average
        parameters, buffers = {self.params.name_of(p): p for p in differing(self.fragments)}, dict[str, Tensor]()
        fault = faults.any(device).float().reshape(1)
        for means, num_faulty in means_by_bucket({**parameters, **agreed.changes()}, fault, self.peers):
            if self.view.own is None:  # the first
                if float(num_faulty):
                    raise_fault(first_fault(faults.first(), group))
                # On the CPU, for as long as it takes: what is shown would need the memory of the model twice.
                self.view = ConsensusView(saved(self.own_tensors()), agreed)
            for name, mean in means.items():
                if name in parameters:
                    as_real(parameters[name]).copy_(mean)
                else:
                    buffers[name] = mean.clone()  # else the bucket would stay
        agreed.apply(buffers, {})
        agreed.take_first_(self.peers)
        self.note_shown()

    @torch.no_grad()
    def adopt(self) -> None:
        """Measure changes from what is in the model, which all ranks have; what is kept back stays."""
        self.hide(keeps_parameters=True)
        self.drop_averages()
        copy_all_(list(self.start.values()), [as_real(p.detach()) for p in self.start])

    # Other places ---------------------------------------------------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Move what is kept beside the model."""
        # By parameter, which stays the same object when the model moves.
        self.start = {parameter: tensor.to(device) for parameter, tensor in self.start.items()}
        self.velocity = {parameter: tensor.to(device) for parameter, tensor in self.velocity.items()}
        self.buffers.start = {name: tensor.to(device) for name, tensor in self.buffers.start.items()}
        if self.exchange is not None:
            self.exchange.to(device)
