"""The state that a group shares with other groups, on the host of its leader, and its rounds.

The anchor, the outer velocity and the residuals are whole tensors in memory of the host, as is a copy of the weights
with which a round begins. Processes of a group with a sharded model bring their shards, so that no GPU, and no other
host, holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.collectives import TrafficLedger
from lightning_lowbw.comm.peers import wide_dtype
from lightning_lowbw.elastic.group import Places
from lightning_lowbw.elastic.membership import GivesUp, Membership, Quorum, Row, Settings
from lightning_lowbw.elastic.peers import Members
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import as_real, checksum, order_of
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.params import Params
from lightning_lowbw.schedules.every_k import EveryK
from lightning_lowbw.sync.buffers import BUFFER
from lightning_lowbw.sync.fragments import Average, Sums, average_status
from lightning_lowbw.sync.replica import Replica
from lightning_lowbw.sync.state import Named, check_replica, load_replica_, replica_state
from lightning_lowbw.sync.status import Status

ANCHORS = 1 << 32  # checksums are compared modulo this
CHUNK = 1 << 18  # elements of a checksum at a time, the same on all devices: the result depends on it
ROUND_BYTES = 24  # per parameter, at most, in a round: six tensors in float32


class Site:
    """The state of a group, and its exchange with other groups.

    Args:
        method: see `sync.check_elastic`.
        parameters: the parameters of the leader, by name: shards, if the model is sharded.
        shapes: the shapes of the whole parameters.
        membership: finds the other groups.
        ledger: counts the traffic.

    Attributes:
        members: the groups of the present round.
        replica: the replica of the group: its parameters are the weights with which a round begins.
        places: the parts of each tensor that the processes of the group have, by name.
    """

    def __init__(
        self,
        method: Method,
        parameters: Mapping[str, Parameter],
        shapes: Mapping[Parameter, Sequence[int]],
        membership: Membership,
        ledger: TrafficLedger,
    ) -> None:
        self.members, self._membership, self._shapes = Members(membership, ledger), membership, shapes
        self._method = method
        self._when: EveryK = replace(
            cast("EveryK", method.when), delay_steps=0
        )  # its own weights do not move meanwhile
        self._buffers: Named = {}
        self.places: dict[str, Places] = {}
        self._residuals_before: Named = {}
        self._mine = {name: self._like(parameter) for name, parameter in parameters.items()}
        self._holder = torch.optim.SGD(list(self._mine.values()), lr=0.0)  # only has their groups
        exchange = method.what.exchange(self.members, self._when)
        params = Params(self._holder, self._mine.items())
        self.replica = Replica(params, exchange, self.members, lambda: self._buffers, self._when)

    def _like(self, parameter: Parameter) -> Parameter:
        """Return a whole parameter on the host; the memory is the system's until it is written to."""
        options: Any = {"pin_memory": parameter.is_cuda and parameter.requires_grad}
        shape = self._shapes.get(parameter)
        if shape is None:
            whole = torch.empty_like(parameter.detach(), device="cpu", **options)
        else:
            whole = torch.empty(shape, dtype=parameter.dtype, **options)
        return Parameter(whole, requires_grad=parameter.requires_grad)

    def use(self, method: Method) -> None:
        """Take a method with other values."""
        self._when = replace(cast("EveryK", method.when), delay_steps=0)
        if self.replica.exchange is not None:
            self.replica.exchange.payload = method.what

    # Tensors, by name -----------------------------------------------------------------------------------------------

    def place(self, name: str, parameter: Parameter | None, numels: Sequence[int]) -> Places:
        """Take in a parameter or a buffer of the group; return the parts of its processes.

        Args:
            name: its name.
            parameter: of the leader: the shard, if the model is sharded; None for a buffer, which is whole.
            numels: elements, as real numbers, that each process has of it.

        Raises:
            ConfigurationError: the parts are not those of a tensor that is sharded along its first dimension.
        """
        self.places[name] = None
        if parameter is None:
            return None
        if name not in self._mine:  # added in mid-fit
            self._mine[name] = self._like(parameter)
            self.replica.params.take_name(self._mine[name], name)
            self._holder.add_param_group({"params": [self._mine[name]]})
        whole = as_real(self._mine[name]).numel()
        ends = [0, *accumulate(numels)]
        if set(numels) == {whole}:
            return None
        if ends[-1] != whole:
            raise ConfigurationError(
                f"{name!r} has {whole} elements, and the processes of the group have {[*numels]} of them. An elastic "
                "group has whole parameters, or shards along the first dimension, as fully_shard makes them by default."
            )
        self.places[name] = [slice(*each) for each in pairwise(ends)]
        return self.places[name]

    def needs_bytes(self) -> int:
        """Return the memory that a round needs on the host at most."""
        return ROUND_BYTES * sum(parameter.numel() for parameter in self._trained())

    def _trained(self) -> list[Parameter]:
        return [parameter for parameter in self.replica.params if parameter.requires_grad and parameter.numel()]

    def look(self, requires_grad: Mapping[str, bool], buffers: Mapping[str, Tensor]) -> list[str]:
        """Take in which parameters are trained, and buffers of the leader; return the names of a round's tensors."""
        for name, parameter in self._mine.items():
            parameter.requires_grad_(requires_grad[name])
        self._buffers = {name: buffer.cpu().clone() for name, buffer in buffers.items()}
        names = [*map(self.replica.params.name_of, self._trained())]
        return [*names, *(f"{BUFFER}{name}" for name in self._buffers)]

    def anchors(self) -> Named:
        """Return the anchor: whole tensors."""
        buffers = {f"{BUFFER}{name}": start for name, start in self.replica.buffers.start.items()}
        return {self.replica.params.name_of(p): start for p, start in self.replica.start.items()} | buffers

    def weights(self) -> Named:
        """Return the weights with which a round begins: whole parameters, as real tensors."""
        return {name: as_real(parameter.detach()) for name, parameter in self._mine.items()}

    def own(self, name: str, whole: Tensor, like: Tensor) -> Tensor:
        """Return the leader's part of a whole tensor, in a shape."""
        places = self.places[name]
        return whole if places is None else whole.view(-1)[places[0]].view(like.shape)

    def begin(self, starts: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[str]:
        """Make room for anchors; return the names of those that are not known: of a state that was loaded they are.

        Args:
            starts: the leader's part of the anchor, by name, of tensors that have just been placed.
            buffers: the leader's buffers, by name.
        """
        replica, lacking, known, weights = self.replica, list[str](), self.anchors(), self.weights()
        for name, start in starts.items():
            if name in known:
                continue
            lacking.append(name)
            if name.startswith(BUFFER):
                replica.buffers.start = replica.buffers.start | {name.removeprefix(BUFFER): start.clone()}
            else:
                now = weights[name]
                whole = torch.empty_like(now, dtype=wide_dtype(now), pin_memory=now.is_pinned())
                replica.start[self._mine[name]] = whole
                self.own(name, whole, start).copy_(start)
        self._buffers = {name: buffer.cpu().clone() for name, buffer in buffers.items()}
        replica.buffers.load_state_dict({"differing": [*self._buffers], "averages": 0}, replica.buffers.start)
        return lacking

    # A round --------------------------------------------------------------------------------------------------------

    def ask(self, row: Row, settings: Settings, gives_up: GivesUp) -> Quorum | None:
        """Wait for a quorum, with a row that lacks the checksum of the anchor, which takes a pass over memory."""
        anchor = int(checksum(self.replica.start.values(), at_a_time=CHUNK)) % ANCHORS
        return self._membership.quorum(row._replace(anchor=float(anchor)), settings, gives_up)

    def exchange(self, quorum: Quorum, step: int, lr: float) -> Average | None:
        """Exchange the work of a round; if no member has any work, only wait for the members, and return None."""
        self.members.begin(quorum)
        if not quorum.weights:
            self.members.between.begin_all_gather(torch.zeros(1))
            return None
        self._residuals_before = {name: residual.clone() for name, residual in self.replica.residuals.items()}
        prepared = self.replica.prepare_average(step, self._trained(), takes_buffers=True)
        # The rows have told everything but the learning rate.
        status = average_status(Sums(lr=lr), None, 0.0, 0, self.members, self.replica.params.device)
        return self.replica.send_average(*prepared, status)

    def move_(self, quorum: Quorum, average: Average) -> None:
        """Move the anchor by the average of a round that counts."""
        if not quorum.weights[quorum.rank]:
            self.restore_residuals_()  # this group has sent no work
        means, numbers = average.wait_for_whole()
        sums = Sums(*Status.read(numbers.tolist(), self.members.num_ranks).sums)
        x = self.replica.means_of(average, means, sums)
        self.replica.move_anchor_(average.parameters, x, sums, self._when)
        self.replica.buffers.apply(means, {})
        self._residuals_before = {}

    def restore_residuals_(self) -> None:
        """Set the residuals to those before the exchange, which counts for nothing."""
        for name, residual in self._residuals_before.items():
            self.replica.residuals[name].copy_(residual)
        for name in self.replica.residuals.keys() - self._residuals_before.keys():
            self.replica.residuals[name].zero_()
        self._residuals_before = {}

    def has_late_faults(self) -> bool:
        """Return whether the last exchange has left an inf or NaN in a residual."""
        exchange = self.replica.exchange
        return exchange is not None and exchange.fault is not None and bool(exchange.fault.any())

    def drop_residuals_(self) -> None:
        """Set the residuals to zero."""
        for residual in self.replica.residuals.values():
            residual.zero_()
        if self.replica.exchange is not None:
            self.replica.exchange.fault = None

    # State ----------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str]:
        """Return the form of the tensors that are averaged, which is the same on all members, by name."""
        settings, replica = {}, self.replica
        for p in replica.start:
            # Averages send elements in the order of memory, which channels_last changes.
            in_memory = "" if order_of(p) == tuple(range(p.dim())) else f", dimensions in memory {[*order_of(p)]}"
            settings[f"parameter {replica.params.name_of(p)}"] = f"{p.dtype} of shape {[*p.shape]}{in_memory}"
        floating = ((name, self._buffers[name]) for name in replica.buffers.start if name in self._buffers)
        return settings | {f"buffer {name}": f"{t.dtype} of shape {[*t.shape]}" for name, t in floating}

    def shared(self) -> Named:
        """Return the tensors that are the same on all members, in one order."""
        name_of = self.replica.params.name_of
        return {
            **{f"start/{name_of(p)}": start for p, start in self.replica.start.items()},
            **{f"velocity/{name_of(p)}": velocity for p, velocity in self.replica.velocity.items()},
            **{f"buffers/{name}": start for name, start in self.replica.buffers.start.items()},
        }

    def take_(self, tensors: Mapping[str, Tensor], velocity: Iterable[str]) -> None:
        """Take the tensors of another member.

        Args:
            tensors: the result of its `shared`.
            velocity: names of the parameters that have an outer velocity there.
        """
        starts = {self.replica.params.name_of(p): (p, start) for p, start in self.replica.start.items()}
        self.replica.velocity = {p: torch.empty_like(start) for p, start in map(starts.__getitem__, velocity)}
        for key, tensor in self.shared().items():
            tensor.copy_(tensors[key])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, on the CPU."""
        state = replica_state(self.replica, self._holder, 1)
        # Its rank among the members may change in each round.
        return {**state, "rank": (0, 1), "small_numel": self.replica.params.small_numel}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ConfigurationError: this method cannot go on from this state.
        """
        check_replica(self.replica, state, self._method)
        load_replica_(self.replica, self._holder, state)


def available_bytes() -> float:
    """Return the memory of this host that programs may take; infinity if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
    return math.inf
