"""The state that a group shares with other groups, on the host of its leader, and its rounds.

The anchor, the outer velocity and the residuals are whole tensors in memory of the host, as is a copy of the weights
with which a round begins. Processes of a group with a sharded model bring their shards, so that no GPU, and no other
host, holds the whole model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.collectives import (
    Collectives,
    TensorWork,
    TrafficLedger,
    all_gather_bytes,
    all_reduce_bytes,
)
from lightning_lowbw.comm.peers import Peers, wide_dtype
from lightning_lowbw.elastic.membership import GivesUp, Membership, Quorum, Row
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import as_real, checksum, order_of
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.payloads.params import Params
from lightning_lowbw.schedules.every_k import EveryK
from lightning_lowbw.sync.buffers import BUFFER, wide_copies
from lightning_lowbw.sync.fragments import Average, Sums, average_status
from lightning_lowbw.sync.replica import Replica
from lightning_lowbw.sync.state import Named, check_replica, load_replica_, replica_state
from lightning_lowbw.sync.status import Status

_logger = logging.getLogger(LOGGER)
ANCHORS = 1 << 32  # checksums are compared modulo this
CHUNK = 1 << 18  # elements of a checksum at a time, the same on all devices: the result depends on it
ROUND_BYTES = 24  # per parameter, at most, in a round: six tensors in float32
OTHER_BYTES = 8  # the same, of each other process: its anchor, and its weights with which the round began


class MemberCollectives(Collectives):
    """Collectives of the members of the current round, on the CPU; blocking.

    A lost member fails the round: nothing is communicated from then on, the returned values have no meaning, and
    `Membership.commit` returns False.

    Attributes:
        has_failed: whether a collective of this round has failed.
    """

    def __init__(self, membership: Membership, ledger: TrafficLedger) -> None:
        super().__init__(None, ledger, "inter")
        self._membership = membership

    def begin(self, quorum: Quorum) -> None:
        """Begin a round of the members of a quorum."""
        self.has_failed = False
        self.num_ranks, self.rank = len(quorum.members), quorum.rank

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        self._run(lambda group: group.allreduce([tensor]), all_reduce_bytes(tensor.nbytes, self.num_ranks))
        return TensorWork(tensor)

    begin_sum_ = begin_all_reduce_

    def begin_all_gather(self, message: Tensor, out: Tensor | None = None) -> TensorWork:
        sent = message.contiguous()
        rows = sent.new_zeros(self.num_ranks, sent.numel())
        rows[self.rank] = sent
        nbytes = all_gather_bytes(message.nbytes, self.num_ranks)
        self._run(lambda group: group.allgather([list(rows.unbind())], [sent]), nbytes)
        return TensorWork(rows if out is None else out.copy_(rows.view(out.shape)))

    def _run(self, begin: Callable[[dist.ProcessGroup], Any], nbytes: int) -> None:
        if self.num_ranks == 1 or self.has_failed:
            return
        try:
            self._membership.collective(begin)
        except RuntimeError as error:
            _logger.warning("The round has failed and is repeated, because a member was lost: %s", error)
            self.has_failed = True
        self._record(nbytes)


class Members(Peers):
    """The members of a round, each with a whole replica on the host of its leader.

    Args:
        membership: finds the members.
        ledger: counts the traffic.

    Attributes:
        between: their collectives.
        weights: weights of the members in the mean of this round.
    """

    may_grow = True
    between: MemberCollectives

    def __init__(self, membership: Membership, ledger: TrafficLedger | None = None) -> None:
        super().__init__(None, ledger)
        self._all = self.between = MemberCollectives(membership, self.ledger)
        self.begin(Quorum(0, ("",)))

    def begin(self, quorum: Quorum) -> None:
        """Begin a round of the members of a quorum, at first of this group alone; nothing is communicated."""
        self.between.begin(quorum)
        self.num_ranks = self.num_participants = self.between.num_ranks
        self.rank, weights = self.between.rank, quorum.weights
        self.weights = weights if len({*weights}) > 1 else ()

    @property
    def weight(self) -> float:
        return self.weights[self.rank] if self.weights else super().weight


class Site:
    """The state of a group, and its exchange with other groups.

    Args:
        method: see `sync.check_elastic`.
        parameters: the parameters of the leader, by name: shards, if the model is sharded.
        shapes: the shapes of the whole parameters, of shards; by name.
        membership: finds the other groups.
        ledger: counts the traffic.

    Attributes:
        members: the groups of the present round.
        replica: the replica of the group: its parameters are the weights with which a round begins.
        wait_s: seconds that the last quorum has taken.
    """

    def __init__(
        self,
        method: Method,
        parameters: Mapping[str, Parameter],
        shapes: Mapping[str, Sequence[int]],
        membership: Membership,
        ledger: TrafficLedger,
    ) -> None:
        self.members, self._membership, self._shapes = Members(membership, ledger), membership, shapes
        self._method = method
        # The weights of the site do not move while a round is hidden.
        self._when: EveryK = replace(cast("EveryK", method.when), delay_steps=0)
        self.wait_s, self._buffers = 0.0, Named()
        self._residuals_before: Named = {}
        self._mine = {name: self._like(name, parameter) for name, parameter in parameters.items()}
        self._holder = torch.optim.SGD(list(self._mine.values()), lr=0.0)  # only has their groups
        exchange = method.what.exchange(self.members, self._when)
        params = Params(self._holder, self._mine.items())
        self.replica = Replica(params, exchange, self.members, lambda: self._buffers, self._when)

    def _like(self, name: str, parameter: Parameter) -> Parameter:
        """Return a whole parameter on the host; the memory is the system's until it is written to."""
        options: Any = {"pin_memory": parameter.is_cuda and parameter.requires_grad}
        if name in self._shapes:
            whole = torch.empty(self._shapes[name], dtype=parameter.dtype, **options)
        else:
            whole = torch.empty_like(parameter.detach(), device="cpu", **options)
        return Parameter(whole, requires_grad=parameter.requires_grad)

    # Tensors, by name -----------------------------------------------------------------------------------------------

    def look(self, parameters: Mapping[str, Parameter], buffers: Mapping[str, Tensor]) -> list[str]:
        """Take in which parameters are trained, and floating buffers; return the parameters without an anchor.

        Args:
            parameters: of the leader, by name.
            buffers: of the leader, by name.
        """
        for name, parameter in parameters.items():
            if name not in self._mine:  # added in mid-fit
                self._mine[name] = self._like(name, parameter)
                self.replica.params.take_name(self._mine[name], name)
                self._holder.add_param_group({"params": [self._mine[name]]})
            self._mine[name].requires_grad_(parameter.requires_grad)
        self._buffers |= {name: buffer.cpu().clone() for name, buffer in buffers.items()}
        now, start, of_buffers = self.weights(), self.replica.start, self.replica.buffers
        new = [name for name, mine in self._mine.items() if mine.requires_grad and mine not in start]
        for name in new:
            room = torch.empty_like(now[name], dtype=wide_dtype(now[name]), pin_memory=now[name].is_pinned())
            start[self._mine[name]] = room
        lacking = [name for name in self._buffers if name not in of_buffers.start]
        starts = dict(zip(lacking, wide_copies([self._buffers[name] for name in lacking]), strict=True))
        of_buffers.load_state_dict({"differing": [*self._buffers], "averages": 0}, of_buffers.start | starts)
        return new

    def trained(self) -> list[str]:
        """Return the names of the tensors of a round."""
        names = [name for name, mine in self._mine.items() if mine.requires_grad and mine.numel()]
        return [*names, *(f"{BUFFER}{name}" for name in self._buffers)]

    def anchors(self) -> Named:
        """Return the anchor: whole tensors."""
        buffers = {f"{BUFFER}{name}": start for name, start in self.replica.buffers.start.items()}
        return {self.replica.params.name_of(p): start for p, start in self.replica.start.items()} | buffers

    def weights(self) -> Named:
        """Return the weights with which a round begins: whole parameters, as real tensors."""
        return {name: as_real(parameter.detach()) for name, parameter in self._mine.items()}

    def check_memory(self, num_others: float) -> None:
        """Check that the host has the memory that a round needs.

        Args:
            num_others: how many models the other processes of the group have on this host, whole or in shards.

        Raises:
            ConfigurationError: it has not.
        """
        numel = sum(mine.numel() for mine in self._mine.values() if mine.requires_grad)
        needed = (ROUND_BYTES + OTHER_BYTES * num_others) * numel
        held = [*self.replica.start.values(), *self.replica.velocity.values(), *self.replica.residuals.values()]
        there = available_bytes() + sum(tensor.nbytes for tensor in [*held, *self.weights().values()])
        there += OTHER_BYTES / 2 * num_others * numel  # their anchors
        if needed > there:
            raise ConfigurationError(
                f"A round needs up to {needed / 1e9:.3g} GB of memory on the host of the first process of this group, "
                f"{needed / numel:.3g} bytes per trained parameter, and {there / 1e9:.3g} GB are free. Start that "
                "process on a host with more memory, or train fewer parameters (LoRA)."
            )

    # A round --------------------------------------------------------------------------------------------------------

    def ask(self, row: Row, gives_up: GivesUp) -> Quorum | None:
        """Wait for a quorum, with a row that lacks the checksum of the anchor, which takes a pass over memory."""
        anchor = int(checksum(self.replica.start.values(), at_a_time=CHUNK)) % ANCHORS
        began_s = time.monotonic()
        quorum = self._membership.quorum(row._replace(anchor=float(anchor)), gives_up)
        self.wait_s = time.monotonic() - began_s
        return quorum

    def exchange(self, quorum: Quorum, names: Sequence[str], step: int, lr: float) -> Average | None:
        """Exchange the work of a round; if no member has any work, only wait for the members, and return None.

        Args:
            quorum: the members.
            names: the tensors of the round, as `trained` has returned them.
            step: completed optimizer steps.
            lr: the largest learning rate.
        """
        self.members.begin(quorum)
        if not quorum.weights:
            self.members.between.begin_all_gather(torch.zeros(1))
            return None
        self._residuals_before = {name: residual.clone() for name, residual in self.replica.residuals.items()}
        trained = [self._mine[name] for name in names if name in self._mine]
        prepared = self.replica.prepare_average(step, trained, takes_buffers=True)
        # The rows have told everything but the learning rate.
        status = average_status(Sums(lr=lr), None, 0.0, 0, self.members, self.replica.params.device)
        return self.replica.send_average(*prepared, status)

    def move_(self, quorum: Quorum, average: Average) -> None:
        """Move the anchor by the average of a round that counts."""
        if not quorum.weights[quorum.rank]:
            self.restore_residuals_()  # this group has sent no work
        self._residuals_before = {}
        means, numbers = average.wait_for_whole()
        sums = Sums(*Status.read(numbers.tolist(), self.members.num_ranks).sums)
        x = self.replica.means_of(average, means, sums)
        self.replica.move_anchor_(average.parameters, x, sums, self._when)
        self.replica.buffers.apply(means, {})

    def restore_residuals_(self) -> None:
        """Set the residuals to those before the exchange, which counts for nothing; without one to zero."""
        for name, residual in self.replica.residuals.items():
            before = self._residuals_before.get(name)
            residual.zero_() if before is None else residual.copy_(before)
        self._residuals_before = {}
        if self.replica.exchange is not None:
            self.replica.exchange.fault = None

    def has_late_faults(self) -> bool:
        """Return whether the last exchange has left an inf or NaN in a residual."""
        exchange = self.replica.exchange
        return exchange is not None and exchange.fault is not None and bool(exchange.fault.any())

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
