"""Every k steps: each rank steps on its own gradient, and the weights are averaged after k of them.

Source: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Lin et al., "Don't use large
mini-batches, use local SGD", arXiv 1808.07217 (post-local); adaptive periods, outer optimizers: `schedules.every_k`.

Steps 1 to `begin_step` are synchronous: gradients are all-reduced. After it each rank i steps alone, and after every k
steps, counted from there,

    signal      D = x - x0, the change of the weights since the last consensus (or x itself, whole)
    exchange    the payload's, as for gradients; a node is one participant
    apply       x0 = outer(x0, mean);  x = x0, or with a delay the steps taken meanwhile are kept

for parameters and for the floating buffers that differ between ranks (`sync.buffers`). Batch norm's running variance
gets the variance between the ranks' means, too.

With fragments, each part of the parameters has its own turn: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, algorithm 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import compress
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from lightning_lowbw.comm.agreement import agree
from lightning_lowbw.comm.collectives import all_reduce_bytes, sent_bytes
from lightning_lowbw.comm.peers import Peers, average_gradients_, fill_buckets, wide_dtype
from lightning_lowbw.errors import ConfigurationError, DisagreementError, NonFiniteGradientError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import Rates, as_real, checksum, copy_all_, download, relative_distance
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.schedules.every_k import FIRST_LR_DECAY, EveryK, Phase, RunningLoss, steps_before
from lightning_lowbw.sync.buffers import ReplicaBuffers, wide_copies
from lightning_lowbw.sync.checks import (
    agree_on_end,
    raise_at_other_batches,
    refuse_second_weights,
    refusing_collectives,
)
from lightning_lowbw.sync.consensus import copies, unchanged
from lightning_lowbw.sync.exchange import Deferred, DenseMean, TopKExchange, WholeExchange, exchange_for
from lightning_lowbw.sync.fragments import (
    LOSS,
    LR,
    NUM_ENDED,
    NUM_LOSSES,
    NUM_RESIZED,
    NUM_SAVE,
    NUM_STOP,
    Average,
    Fragment,
    change_of,
    due,
    make_fragments,
    note_steps,
)
from lightning_lowbw.sync.state import (
    check_replica,
    fragment_state,
    load_fragments_,
    load_optimizer_,
    optimizer_state,
    origin,
    own_part,
    saved,
)
from lightning_lowbw.sync.status import (
    EXACT,
    SAVE,
    Fault,
    Faults,
    Status,
    counts_of,
    first_fault,
    make_mark,
    requests_of,
    status_message,
)
from lightning_lowbw.sync.synchronizer import Configuration, Synchronizer, raise_fault

_logger = logging.getLogger(LOGGER)
COUNTERS = ("steps_since_average", "num_averages")
BUFFER = "buffer "


class LocalSync(Synchronizer):
    """One rank's replica for one optimizer; see `Synchronizer` for a step.

    Attributes:
        start: x0, the last consensus of each parameter, where something needs it: float32 (or wider).
        velocity: of the outer optimizer.
        buffers: of the model.
        phase: where it is in its schedule.
        loss: the mean since the last average, for the adaptive rules.
        fragments: the parameters, by the averages that they belong to.
        own: this rank's tensors by name, on the CPU, while a consensus that differs from them is shown in the model;
            else None.
        consensus_distance: ``||x_i - mean|| / ||mean||`` at the last average, of large tensors from a sample; a scalar
            tensor, None before it.
        steps_since_average: local steps since the last average was begun, of any fragment.
        num_averages: averages done, each of a fragment.
        has_met: whether all ranks have communicated in the last step: it was synchronous, or an average was begun or
            applied.
        meet: called before ranks average or apply a delayed average, where others than the peers must agree on it.
        has_ended: whether the data of this rank have ended, in this epoch.
        all_have_ended: whether those of all ranks have, by the last exchange with all ranks.
    """

    clips_before_exchange = False
    clip_factor = 1.0  # a rank clips the gradient it steps with

    def __init__(
        self,
        method: Configuration,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
        named_buffers: Mapping[str, Tensor],
    ) -> None:
        super().__init__(method, optimizer, named_parameters, peers)
        is_one = peers.num_participants == 1 and not peers.may_grow
        if not is_one:
            refuse_second_weights(optimizer)
        # Inside of an elastic group, or of a sharded model, an optimizer may communicate: these ranks step alike.
        self._is_watched = is_one or peers.may_grow or peers.nodes is not None
        self.steps_since_average = self.num_averages = 0
        self.has_met = self._has_been_local = False
        self.begin_epoch()
        self.meet: Callable[[LocalSync], None] | None = None
        self._reduced: frozenset[Parameter] = frozenset()
        self._unread: tuple[int, Callable[[], list[float]]] | None = None  # a synchronous step, and its status
        self.phase, self.loss = Phase(), RunningLoss()
        self._rate_of = Rates()
        method.what.check_names(self.params.names())
        self.compressed = exchange_for(method.what, peers, method.when)
        if self.compressed is not None:
            peers.check_parts()
        self.start: dict[Parameter, Tensor] = {}
        self.velocity: dict[Parameter, Tensor] = {}
        self.buffers = ReplicaBuffers(named_buffers)
        self.consensus_distance: Tensor | None = None
        self.own: dict[str, Tensor] | None = None
        self._shown: dict[str, Tensor] = {}  # copies of the buffers' consensus, while it is shown
        self._shown_parameters: tuple[list[Parameter], int] | None = None  # with their checksum, while it is shown
        self._look: ReplicaBuffers | None = None  # what the ranks have found out for that
        num_fragments = self.when.num_fragments_of(len(self.parameters()))
        self.fragments = make_fragments(self.parameters(), num_fragments, self.sent_bytes)

    # Read by the strategies -----------------------------------------------------------------------------------------

    @property
    def when(self) -> EveryK:
        """The schedule."""
        assert isinstance(self.method.when, EveryK)
        return self.method.when

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and never will be."""
        return self.peers.num_ranks == 1

    @property
    def is_local(self) -> bool:
        """Whether the coming step communicates nothing before the optimizer has stepped."""
        return self.peers.num_participants > 1 and self.phase.is_local(self.when, self.step)

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are all-reduced during backward in the coming step, as DDP does."""
        return not self.is_local

    @property
    def reduces_in_node(self) -> bool:
        """Whether gradients are all-reduced inside each node in the coming step: in local ones on two levels."""
        return self.is_local and self.peers.is_two_level

    @property
    def _averages_gradients(self) -> bool:
        return not self.is_local or self.reduces_in_node

    @property
    def k_steps(self) -> int:
        """The period in use; 1 while synchronous."""
        return self.phase.k_steps(self.when) if self.is_local else 1

    @property
    def parameters_agree(self) -> bool:  # type: ignore[override]
        """Whether the parameters are the same on all ranks; known without communication."""
        return not any(fragment.moved or fragment.work for fragment in self.fragments)

    @property
    def needs_start(self) -> bool:
        """Whether the last consensus is kept."""
        return self.when.outer != "none" or self.compressed is not None

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return metrics to log; nothing is communicated."""
        shown: dict[str, float | Tensor] = {"k_steps": float(self.k_steps), "averages": float(self.num_averages)}
        if self.consensus_distance is not None:
            shown["consensus_distance"] = self.consensus_distance
        return shown

    def check_schedule(self) -> None:
        """Check that it is known when the local phase begins, and that the optimizer can take the coming step.

        Raises:
            ConfigurationError: on all ranks; a fraction of a run of unknown length, or SparseAdam.
        """
        if isinstance(self.optimizer, SparseAdam) and self.peers.num_ranks > 1 and self._averages_gradients:
            raise ConfigurationError(
                f"SparseAdam in step {self.step}, which averages gradients: it takes sparse ones only, and the mean is "
                "dense. Give begin_step=0, on one level, or another optimizer."
            )
        if isinstance(self.when.begin_step, float):
            raise ConfigurationError(
                f"begin_step={self.when.begin_step}: how many steps the run has is not known here; give a number "
                "of steps."
            )

    def observe_loss(self, loss: Tensor) -> None:
        if self.when.needs_loss:
            self.loss.observe(loss)

    def begin_epoch(self) -> None:
        """Begin an epoch, for which no rank's data have ended."""
        self.has_ended = self.all_have_ended = False
        self._epoch_start = self.step

    # One step -------------------------------------------------------------------------------------------------------

    def list_gradients(self, *, reduced: Collection[Parameter] = ()) -> None:
        self.check_schedule()
        self.check_payload()
        self.is_prepared, self._reduced = True, frozenset(reduced)

    @torch.no_grad()
    def exchange(self, *, skip_nonfinite: bool = False, applies: bool = False) -> bool:
        """Make the gradients of a synchronous step the mean over ranks, of a local one the mean over the node.

        In place:
            `.grad` of the optimizer's parameters that are not in `list_gradients`' `reduced`.

        Collective: all ranks in synchronous steps, those of a node in local ones if there are two levels; one
        all-reduce, blocking. Else a local step communicates nothing.

        Args:
            skip_nonfinite: unused; inf and NaN are all-reduced as in DDP.
            applies: unused; all gradients are dense.

        The status of a synchronous step is read in the next one, so that the host waits for none; that of the last
        one at once. A sparse gradient becomes dense.

        Returns:
            True.

        Raises:
            DisagreementError: on all ranks; they were at different batches in the last synchronous step.
        """
        if not self.is_prepared:
            self.list_gradients()
        self.is_prepared = False
        if not self.is_alone:
            self._average_gradients()
        self.is_exchanged = True
        return True

    def _average_gradients(self) -> None:
        for parameter in self.params:
            if not parameter.requires_grad:
                parameter.grad = None  # frozen since the backward: torch would step it, each rank on its own
        mine = [p for p in self.params if p.requires_grad and p not in self._reduced]
        if self._averages_gradients:
            for parameter in mine:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    parameter.grad = parameter.grad.to_dense()
        if self.is_local:
            self._unread = None  # a schedule that was replaced; its requests go with the next average
            self.begin_local()
            if self.reduces_in_node and mine:
                average_gradients_(mine, [], self.peers.node, self.device)
            return
        before = self._read_status()
        own_batch = [0.0] * self.peers.num_ranks
        # Negative if this rank's data have ended.
        own_batch[self.peers.rank] = float(self.batch % EXACT) * (-1.0 if self.has_ended else 1.0)
        requests, of_node = self.requests, None
        if self.node_flags is not None:
            _, stop, save, last, minus_first = self.node_flags.unbind()
            save = save * (not before & SAVE)  # the node had not read that yet
            requests, of_node = 0, torch.stack([stop, save]) / (last == -minus_first)  # not finite where these differ
        flags = [*counts_of(requests), float(self.phase.has_decayed(self._lr)), *own_batch]
        self._unread = self.step, download(average_gradients_(mine, flags, self.peers, self.device, of_node))
        self.peers.count_dense(sum(p.nbytes for p in mine))
        # The epoch ends with this step if the data of all ranks have: a rank whose own have not need not wait.
        self.all_have_ended = self.has_ended and max(self._unread[1]()[-self.peers.num_ranks :]) < 0
        if self.phase.is_local(self.when, self.step + 1):  # a local step has no status
            self._read_status(before)

    def _read_status(self, before: int = 0) -> int:
        """Read what the ranks have said in the last synchronous step.

        Args:
            before: requests that have been read in this step already; who made them does not repeat them.

        Returns:
            Their requests.
        """
        if self._unread is None:
            return 0
        num_stop, num_save, _, *batches = self._unread[1]()
        self._note_decay()
        self._unread = None
        if not isfinite(num_stop) or len(set(map(abs, batches))) > 1:
            raise_at_other_batches(self.batch, self.step, self.fault_group)
        requests = requests_of(num_stop, num_save)
        self.agree_on(before | requests)
        return requests

    def _note_decay(self) -> None:
        """Begin the local steps after the coming one, if the learning rate had fallen in the last synchronous one."""
        if self.when.begin_step != FIRST_LR_DECAY or self._unread is None:
            return
        step, sums = self._unread
        _, _, num_decayed, *_ = sums()
        if num_decayed and self.phase.begin_at(step + 2) and self.peers.rank == 0:
            _logger.info("The learning rate has fallen: synchronous up to step %d, then local.", step + 2)

    @property
    def _lr(self) -> float:
        """The largest learning rate of the param groups; 1 where there is none."""
        return max((self._rate_of(group) for group in self.optimizer.param_groups if "lr" in group), default=1.0)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with super().stepping():
            if self._is_watched:
                yield
            else:
                with refusing_collectives(self.optimizer) as stepped:
                    yield
                self._is_watched = bool(stepped)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the step; average the replicas after every k-th local one.

        Collective: all ranks, when an average is begun or applied.

        Raises:
            NonFiniteGradientError: on all ranks; names the rank and the parameter. Nothing was averaged.
            DisagreementError: on all ranks; they are at different steps or batches.
            ConfigurationError: on all ranks; an adaptive rule has seen no loss.
        """
        was_local = self.is_local
        self.has_met = not was_local
        self.torn = ""
        self.step += 1
        self.peers.ledger.steps += 1
        if self.is_alone:
            return
        self.loss.end_step()
        if not was_local:
            if self.is_local:
                self.loss.clear()
            self.begin_local()
            return
        self.peers.count_dense(sum(p.nbytes for p in self.params if p.requires_grad))
        self.steps_since_average += 1
        self._has_been_local = True
        note_steps(self.fragments, self.parameters(), self.sent_bytes)
        try:
            self.average_due()
        except BaseException:  # Lightning has not counted the step, and a resume takes it again
            self.torn = f"the average after step {self.step}"
            self.step, self.steps_since_average = self.step - 1, self.steps_since_average - 1
            for fragment in self.fragments:
                fragment.steps = (fragment.steps or 0) - 1
            raise

    @torch.no_grad()
    def begin_local(self) -> None:
        """Agree on the weights from which the next changes are measured, if the coming step is local.

        Collective: all ranks, the first time; a comparison of the buffers, and a broadcast of the floating ones that
        differ. `exchange` calls it where the caller has not.
        """
        if not self.is_local:
            return
        self.phase.begin_local(self.when)
        for number, fragment in enumerate(self.fragments):
            if fragment.steps is None:
                fragment.steps = steps_before(number, len(self.fragments), self.k_steps)
        if self.needs_start:  # of frozen parameters not before they train
            new = [p for p in self.params if p.requires_grad and p not in self.start]
            self.start.update(zip(new, wide_copies(new), strict=True))
        self.buffers.begin(self.peers, self.device)

    # When averages are due ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_due(self) -> bool:
        """Apply and begin the averages that are due after a local step; return whether one was begun.

        Collective: all ranks, where there are any.

        Raises:
            NonFiniteGradientError, DisagreementError, ConfigurationError: as `after_step`.
        """
        # More than the delay after a resume with a shorter one.
        delay = self.when.delay_steps
        hidden = [each for each in self.fragments if each.work is not None and (each.steps or 0) >= delay]
        if self.meet is not None and (hidden or due(self.fragments, self.k_steps, delay)):
            self.meet(self)
        for fragment in hidden:
            self._apply(fragment)
        begun = due(self.fragments, self.k_steps, delay)
        for fragment in begun:
            self._average(fragment)
        self.has_met = bool(hidden or begun)
        return bool(begun)

    def _average(self, fragment: Fragment) -> None:
        try:
            fragment.work = self._begin(fragment)
        except BaseException:
            self._lose(fragment)  # the changes may have been accumulated
            raise
        if not self.when.delay_steps:
            self._apply(fragment)  # an average that has not arrived has changed nothing
        fragment.steps = self.steps_since_average = 0
        fragment.moved.clear()
        self.loss.clear()

    # One average: begin ---------------------------------------------------------------------------------------------

    def _begin(self, fragment: Fragment) -> Average:
        """Begin to average a fragment.

        Collective: all ranks.

        Wire:
            The parameters trained since the last average and the floating buffers that differ, in float32 (or wider),
            with a status of 7 numbers and 2 per rank; integer buffers that differ separately; and the messages of the
            payload, which contain the status if nothing else is sent.
        """
        is_hidden = self.when.delay_steps > 0
        if fragment.takes_buffers:
            self.buffers.begin_average(self.peers, self.device)
        parameters = [p for p in fragment.parameters if p in fragment.moved and p.numel()]
        faults = self.faults_of(parameters)
        status = self._status(parameters, faults)
        # D = x - x0 of what the payload sends; x of the rest, and the changes of buffers.
        changes = self._changes([p for p in parameters if self.takes(p)])
        whole: dict[str, Tensor] = {self.name_of(p): p for p in parameters if not self.takes(p)}
        unsent: Sequence[str] = ()
        if fragment.takes_buffers:
            whole |= _of_buffers(self.buffers.changes())
            unsent = self.buffers.unsent()
            if self.buffers.changed():  # what it sends of them is of the agreed shapes
                status[NUM_RESIZED] = 1.0
        # The status is part of the message of the changes if no fragment sends anything else: ranks at different
        # steps must issue the same collectives, so that the difference is detected.
        is_alone = not whole and bool(changes) and self._sends_changes_only()
        pending = None if is_alone else WholeExchange(self.peers).prepare(whole).send(status)
        return Average(
            self.step,
            parameters,
            pending,
            self._begin_changes(changes, status if is_alone else None) if changes else Deferred(lambda: DenseMean({})),
            faults,
            wide_copies(parameters) if is_hidden else None,
            self.buffers.snapshot() if is_hidden and fragment.takes_buffers else {},
            unsent,
        )

    def _begin_changes(self, changes: Mapping[str, Tensor], status: Tensor | None) -> Any:
        exchange, what = self.compressed, self.method.what
        assert exchange is not None
        exchange.payload = what  # may have been replaced
        return exchange.prepare(changes).send(status)

    def takes(self, parameter: Parameter) -> bool:
        """Whether the payload sends a parameter's change; otherwise it is averaged whole."""
        if as_real(parameter).dtype == torch.float64:  # which would be rounded
            return False
        return self.params.is_compressed(self.method.what, parameter)

    def _sends_changes_only(self) -> bool:
        if not self.method.what.carries_status or self.buffers.start:
            return False
        return all(
            self.takes(p) or not (p.requires_grad and p.numel()) for each in self.fragments for p in each.parameters
        )

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
        return {self.name_of(p): changes[p] for p in parameters}

    def _status(self, parameters: Sequence[Parameter], faults: Faults) -> Tensor:
        # A mean of weights makes replicas equal from any start; changes need the same consensus on all ranks.
        mark = make_mark(self.step + self.batch, (self.start[p] for p in parameters) if self.needs_start else None)
        sums = [float(self.has_ended), 0.0, 0.0, self._lr, *counts_of(self.requests), 0.0]
        message = status_message(
            sums, faults.any(self.device), mark, self.peers.rank, self.peers.num_ranks, self.device
        )
        loss = self.loss.mean()
        if loss is not None:
            is_positive = torch.isfinite(loss) & (loss > 0)
            message[NUM_LOSSES], message[LOSS] = 1.0, torch.where(is_positive, loss, float("inf"))
        return message

    def sent_bytes(self, parameters: Sequence[Parameter]) -> list[int]:
        """Return the bytes that an average sends for each parameter, by the formulas of the flat collectives."""
        return [self._sent_bytes(parameter) if parameter.requires_grad else 0 for parameter in parameters]

    def _sent_bytes(self, parameter: Parameter) -> int:
        real, num_participants = as_real(parameter), self.peers.num_participants
        if self.takes(parameter):
            return sent_bytes(
                self.method.what.messages([real.shape], num_participants, when=self.when), num_participants
            )
        return all_reduce_bytes(real.numel() * wide_dtype(parameter).itemsize, num_participants)

    # One average: wait and apply ------------------------------------------------------------------------------------

    def _apply(self, fragment: Fragment) -> None:
        work = fragment.work
        assert work is not None
        try:
            status = self._wait_and_apply_(fragment, work)
        except BaseException:
            self.abandon()
            raise
        fragment.work = None
        sums, num_ranks = status.sums, self.peers.num_ranks
        self.agree_on(requests_of(sums[NUM_STOP], sums[NUM_SAVE]))
        # Fragments of the last epoch may arrive in this one.
        self.all_have_ended = sums[NUM_ENDED] >= num_ranks and work.step > self._epoch_start
        self.num_averages += 1
        loss = sums[LOSS] / max(sums[NUM_LOSSES], 1.0)
        self.phase.adapt(self.when, sums[LR] / num_ranks, loss, has_losses=sums[NUM_LOSSES] >= num_ranks)

    def _wait_and_apply_(self, fragment: Fragment, average: Average) -> Status:
        """Wait for an average, and apply it. Return the status.

        Collective: all ranks, where there are integer buffers that differ, or the shape of a buffer has changed.

        In place:
            Parameters, buffers, `start`.

        Raises:
            NonFiniteGradientError, DisagreementError: on all ranks.
        """
        means, numbers = average.wait_for_whole()
        # Not a step late, as in synchronous steps: an inf of one rank must change no weight of the others.
        status = Status.read(numbers, self.peers.num_ranks)
        self._check(status, average)
        changes = average.changes.wait()[0].dense()
        changed: Collection[str] = ()
        if fragment.takes_buffers:
            if any(status.sums[NUM_RESIZED:]):
                changed = self.buffers.compare(self.peers, self.device, average.unsent)
            self.buffers.agree_integers(self.peers, self.device)
        # From here on nothing is communicated: an exchange that fails, fails before a weight changes.
        names = {p: self.name_of(p) for p in average.parameters}
        starts = {name: self.start[p] for p, name in names.items() if name in changes}
        moves = [changes[name].view(start.shape) for name, start in starts.items()]
        means |= zip(starts, torch._foreach_add(list(starts.values()), moves) if moves else (), strict=True)
        of_parameters = [means[name] for name in names.values()]
        self._apply_(average, of_parameters, status.sums[LR] / self.peers.num_ranks, fragment.moved)
        self.buffers.apply(_buffers_in(means), average.buffer_snapshots, changed)
        return status

    def _check(self, status: Status, average: Average) -> None:
        counts, checksums = status.differences()
        if counts:
            settings = {"average begun after steps": average.step}
            raise_at_other_batches(self.batch, self.step, self.peers.group, settings)
        if checksums:
            raise DisagreementError(
                f"The ranks measure their changes from different weights; checksums of these are {checksums}. Begin "
                "with the same weights on all ranks, also of parameters that are added later."
            )
        if status.is_faulty:
            faults = average.faults or self.faults_of(average.parameters)  # not in a state
            raise_fault(first_fault(faults.first(), self.fault_group))

    def _apply_(self, average: Average, means: list[Tensor], lr: float, moved: Collection[Parameter]) -> None:
        """Step from x0 to the mean, or as the outer optimizer says; of what has moved meanwhile keep these steps."""
        when = self.when
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
            when.outer_step_(starts, means, velocities, lr)
        is_still = [before is None or p not in moved for p in average.parameters]
        copy_all_(list(compress(now, is_still)), list(compress(means, is_still)))
        has_moved = [not each for each in is_still]
        now, means, before = (list(compress(each, has_moved)) for each in (now, means, before or now))
        if now and when.mixing is None:  # x = x + (mean - x at the begin)
            torch._foreach_sub_(means, before)
            torch._foreach_add_(now, means)
        elif when.mixing is not None:  # x = mixing x + (1 - mixing) mean; one by one: half types are copied for it
            for mean, each in zip(means, now, strict=True):
                mean.lerp_(each.to(mean.dtype), when.mixing)
            copy_all_(now, means)

    @torch.no_grad()
    def abandon(self) -> None:
        for fragment in self.fragments:
            if fragment.work is not None:
                self.torn = self.torn or f"the average that was begun after step {fragment.work.step}"
                self._lose(fragment)

    def _lose(self, fragment: Fragment) -> None:
        """Forget an average that will not be applied, with the residuals of its tensors.

        The weights still have the changes that the residuals have accumulated, and the next average measures them anew.
        """
        residuals = {} if self.compressed is None else self.compressed.residuals
        for parameter in fragment.parameters if fragment.work is None else fragment.work.parameters:
            if self.name_of(parameter) in residuals:
                residuals[self.name_of(parameter)].zero_()
        fragment.abandon()

    # Faults ---------------------------------------------------------------------------------------------------------

    def faults_of(self, parameters: Sequence[Parameter]) -> Faults:
        """Return the late faults, and of each parameter whether it has an inf or NaN."""
        faults = self.late_faults()
        if parameters:
            flags = are_not_finite([parameter.detach() for parameter in parameters])
            faults.add(flags, [self.name_of(p) for p in parameters], partial(self._describe_weight, self.step))
        return faults

    def _describe_weight(self, step: int, name: str) -> Fault:
        rank, shard = self.peers.rank, "" if self.peers.nodes is None else f", in the shard of rank {dist.get_rank()}"
        return Fault(
            4,
            NonFiniteGradientError,
            f"The local steps of {'node' if shard else 'rank'} {rank} up to step {step} left parameter {name!r} "
            f"infinite or NaN{shard}. Nothing was averaged. Lower the learning rate, or clip gradients.",
        )

    @property
    def may_have_late_faults(self) -> bool:
        if self.compressed is None or self.compressed.fault is None:
            return False
        return not isinstance(self.compressed, TopKExchange) or self.device.type != "cpu"  # there decoding raises

    def to(self, device: torch.device) -> None:
        self.start = {parameter: tensor.to(device) for parameter, tensor in self.start.items()}
        self.velocity = {parameter: tensor.to(device) for parameter, tensor in self.velocity.items()}
        self.buffers.start = {name: tensor.to(device) for name, tensor in self.buffers.start.items()}
        if self.compressed is not None:
            self.compressed.to(device)

    # The consensus: the mean of the replicas, copied into the model for validation and saving -------------------------

    @property
    def is_consensus(self) -> bool:
        """Whether there is nothing to average. Any forward pass may change buffers."""
        return self.parameters_agree and not self.buffers.may_differ

    def averaged_tensors(self) -> dict[str, Tensor]:
        """Return everything that the consensus has, by name: parameters, and buffers of one shape on all ranks."""
        return {**self.by_name(), **self.averaged_buffers()}

    def averaged_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that all ranks have in one shape, by name."""
        return (self._look or self.buffers).now()

    def _unequal(self) -> list[Parameter]:
        """Return the parameters that may differ between ranks: those trained since their last average."""
        unequal: dict[Parameter, None] = {}
        for fragment in self.fragments:
            unequal.update(dict.fromkeys([] if fragment.work is None else fragment.work.parameters))
            unequal.update(fragment.moved)
        return list(unequal)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's own tensors that are averaged, without frozen parameters that were never trained."""
        if self.own is not None:
            now, kept = self.averaged_tensors(), self._unchanged()
            return {name: kept.get(name, now[name]) for name in self.own if name in now}
        frozen = {p for p in self.params if not p.requires_grad}.difference(self._unequal())
        return {name: tensor for name, tensor in self.averaged_tensors().items() if tensor not in frozen}

    def _unchanged(self) -> dict[str, Tensor]:
        """Return this rank's own of what has not been changed while the consensus was shown."""
        return unchanged(self.averaged_tensors(), self.own or {}, self._shown)

    def show_consensus(self) -> None:
        """Put the mean of the replicas into the model, until `hide_consensus`; the training is unaffected.

        Collective: all ranks; blocking. If they are equal already, as `check_late_faults`.

        Raises:
            NonFiniteGradientError: on all ranks; names the rank and the parameter. Nothing is shown.
            ValueError: on all ranks; a message that a rank has received was damaged.
        """
        if self.is_shown:
            return
        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive an evaluation
            if self.is_consensus:
                self.check_late_faults()
                self.note_shown()
                return
            try:
                self._show_mean()
            except BaseException:  # a rank is lost, and the means of some buckets are in the model already
                self.hide_consensus()
                raise

    def _show_mean(self) -> None:
        look = self.buffers.for_a_look()
        look.compare(self.peers, self.device)
        parameters, changes = self._unequal(), _of_buffers(look.changes())
        faults = self.faults_of(parameters)
        fault = faults.any(self.device).float().reshape(1)
        signal = {**{self.name_of(p): p for p in parameters}, **changes}
        buckets = fill_buckets(tuple((each.dtype, each.numel()) for each in map(as_real, signal.values())))
        exchange, means = WholeExchange(self.peers), {}
        names, unequal = list(signal), {self.name_of(p): p for p in parameters}
        for number, bucket in enumerate(buckets):  # one after the other: the device has the means of one
            mean, num_faulty = exchange.prepare({names[i]: signal[names[i]] for i in bucket.members}).send(fault).wait()
            if not number and float(num_faulty):  # before anything changes
                raise_fault(first_fault(faults.first(), self.fault_group))
            if not number:
                self._look = look
                self.own = saved(self.own_tensors())  # on the CPU, for as long as it takes
            for name, each in mean.dense().items():
                if name in unequal:
                    as_real(unequal[name]).copy_(each)
                else:
                    means[name] = each.clone()  # of buffers; else the bucket would stay
        look.apply(_buffers_in(means), {})
        look.agree_integers(self.peers, self.device)
        self.note_shown()

    def note_shown(self, shown: int | None = None) -> None:
        """Note what parameters and buffers have now, with the consensus in the model.

        Args:
            shown: the checksum of the parameters' consensus, if the model has other values.
        """
        self._shown = {} if self.own is None else copies(self.averaged_buffers())
        parameters = self.parameters()
        self._shown_parameters = parameters, int(checksum(parameters)) if shown is None else shown

    @property
    def is_shown(self) -> bool:
        """Whether the consensus has been put into the model; perhaps this rank's weights are the same."""
        return self._shown_parameters is not None

    @property
    def is_changed(self) -> bool:
        """Whether the user's code has put other parameters in the place of the consensus; waits for the device.

        Tensors are compared by their bits: `p.data.copy_(...)` leaves no trace, and a moving average is often put in
        and taken out again.
        """
        if self._shown_parameters is None:
            return False
        parameters, shown = self._shown_parameters
        return int(checksum(parameters)) != shown

    @torch.no_grad()
    def show(self, values: Mapping[str, Tensor], shown: int | None = None) -> None:
        """Put a consensus into the model, until `hide_consensus`; one of a checkpoint that has just been loaded.

        Args:
            values: for `averaged_tensors`.
            shown: as in `note_shown`.
        """
        self.own = saved(self.own_tensors())
        for name, tensor in self.averaged_tensors().items():
            tensor.copy_(values[name])
        self.note_shown(shown)

    @torch.no_grad()
    def hide_consensus(self, *, keeps_parameters: bool = False) -> None:
        """Put this rank's own parameters and buffers back, except buffers that have been changed meanwhile.

        Args:
            keeps_parameters: whether what is in the model stays there.
        """
        if self.own is not None:
            tensors, back = self.averaged_tensors(), self._unchanged()
            for name in self.by_name() if keeps_parameters else ():
                back.pop(name, None)
            for name, value in back.items():
                tensors[name].copy_(value)
        self._forget_shown()

    def _forget_shown(self) -> None:
        self.own, self._shown, self._shown_parameters, self._look = None, {}, None, None

    @torch.no_grad()
    def adopt_parameters(self) -> None:
        """Go on from parameters that the user's code has put in the place of the consensus: they are the next one.

        What is kept back and the outer velocity stay. Averages in progress are of other weights, and are dropped.

        Collective: all ranks, which have the same parameters in the model; waits for averages in progress.
        """
        self.hide_consensus(keeps_parameters=True)
        self._drop_averages()
        copy_all_(list(self.start.values()), [as_real(p.detach()) for p in self.start])

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Copy the consensus into the model inside a `with` block, to evaluate or to save it in a plain loop.

        Collective: all ranks, blocking; see `show_consensus`, also for what it raises.
        """
        self.show_consensus()
        self.ending.step = None  # what is evaluated and saved now is that of all ranks
        try:
            yield
        finally:
            self.hide_consensus()

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the consensus in the model: the end of the training. Weights that are equal already are compared.

        Collective: all ranks, blocking; see `show_consensus`, also for what it raises.

        Raises:
            DisagreementError: on all ranks; a rank has taken another number of steps, was at another batch in the last
                one, or nothing has been averaged and it has other weights.
        """
        agree("end of the training", {"worker.step": self.step}, self.peers.group)
        self._read_status()
        was_consensus = self.is_consensus
        self.show_consensus()
        self._forget_shown()
        self.ending.step = None
        if was_consensus:
            agree_on_end(self.step, self.by_name(), self.peers.group)
        self._drop_averages()
        self.steps_since_average = 0

    def _drop_averages(self) -> None:
        """Forget what the next average would have made equal: it is."""
        for fragment in self.fragments:
            if fragment.work is not None:
                self._cancel(fragment, fragment.work)
            fragment.moved.clear()

    def _cancel(self, fragment: Fragment, average: Average) -> None:
        """Wait for an average that has been begun, and will not be applied.

        In place:
            Residuals: the weights have this rank's change, and their mean that of all ranks. So the difference to what
            has arrived is unsent again, as in `merge_replicas`.
        """
        average.wait_for_whole()
        changes = average.changes.wait()[0].dense()
        for parameter, snapshot in zip(average.parameters, average.snapshots or (), strict=True):
            if (name := self.name_of(parameter)) in changes:
                assert self.compressed is not None
                change = change_of(snapshot, self.start[parameter], as_real(parameter).dtype)
                unsent, residual = changes[name] - change.reshape(-1), self.compressed.residuals[name]
                residual.add_(unsent[self.peers.part(unsent.numel())] if self.method.what.keeps_parts else unsent)
        fragment.abandon()

    # State ----------------------------------------------------------------------------------------------------------

    @property
    def has_own_state(self) -> bool:
        return self._has_been_local

    def inherit(self, before: Synchronizer, replaced: Sequence[Synchronizer]) -> None:
        """Go on from the consensus, with the outer optimizer and what has not been sent of earlier changes."""
        super().inherit(before, replaced)
        assert isinstance(before, LocalSync)
        self.phase, self.num_averages = deepcopy(before.phase), before.num_averages
        self.has_ended, self.all_have_ended = before.has_ended, before.all_have_ended
        self._epoch_start = before._epoch_start
        self._has_been_local = any(each.has_own_state for each in replaced)  # one of them may have this optimizer
        kept: dict[str, Tensor] = {}
        for each in replaced:
            assert isinstance(each, LocalSync)
            self.start |= {p: each.start[p] for p in self.params if p in each.start}
            self.velocity |= {p: each.velocity[p] for p in self.params if p in each.velocity}
            residuals = {} if each.compressed is None else each.compressed.residuals
            kept |= {name: residuals[name] for name in self.by_name() if name in residuals}
        if kept:
            assert self.compressed is not None
            self.params.small_numel = before.params.small_numel  # which tells what is compressed
            self.compressed.residuals.load(kept, self.device)

    def equal_state(self) -> dict[str, Any]:
        self._note_decay()
        return {**super().equal_state(), **self.phase.state_dict(), "num_averages": self.num_averages}

    def load_equal_state(self, state: Mapping[str, Any]) -> None:
        super().load_equal_state(state)
        self._unread = None
        self.phase.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: its weights, the optimizer's state, where it is in the interval.

        An average that has been begun is waited for; nothing is communicated.
        """
        self.ending.step = None  # whoever has the state can go on
        return {
            **self.equal_state(),
            **origin(self.peers),
            **{name: getattr(self, name) for name in COUNTERS},
            "torn": self.torn,
            "loss": self.loss.state_dict(),
            "own": {} if self.parameters_agree else saved(self.own_tensors()),
            "shown": None if self._shown_parameters is None else self._shown_parameters[1],
            "buffers": saved(self.buffers.start),
            "layout": self.buffers.state_dict(),
            "start": saved({self.name_of(p): start for p, start in self.start.items()}),
            "velocity": saved({self.name_of(p): u for p, u in self.velocity.items()}),
            "residuals": {} if self.compressed is None else self.compressed.residuals.state(),
            "exchange": None if self.compressed is None else self.compressed.state_dict(),
            "fragments": [fragment_state(fragment, self.name_of) for fragment in self.fragments],
            "optimizer": optimizer_state(self.optimizer),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, or `merge_states`.

        In place:
            The model's parameters and buffers, the optimizer's state.

        Raises:
            ConfigurationError: a tensor is missing in the model, or has another shape; or the state does not fit the
                method.
        """
        parameters, device, before = self.by_name(), self.device, self.params.small_numel
        self.params.small_numel = state["small_numel"]  # which tells what is sent
        try:
            check_replica(
                *(state, self.peers, parameters, self.method),
                num_fragments=len(self.fragments),
                needs_start=self.needs_start,
                sends=self.takes,
            )
        except ConfigurationError:
            self.params.small_numel = before
            raise
        self.is_compared = False
        self.forget_late_faults()
        self.load_equal_state(state)
        self.buffers.load_state_dict(
            state.get("layout"), {name: start.to(device, copy=True) for name, start in state["buffers"].items()}
        )
        targets: dict[str, Tensor] = {**parameters, **dict(self.buffers.named.items())}
        for name, own in state["own"].items():
            if name in targets and targets[name].shape == own.shape:  # else a buffer, which the next average compares
                targets[name].copy_(own)
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.loss.load_state_dict(state["loss"], device)
        self.start = {parameters[name]: start.to(device, copy=True) for name, start in state["start"].items()}
        self.velocity = {parameters[name]: u.to(device, copy=True) for name, u in state["velocity"].items()}
        if self.compressed is not None:
            peers = self.peers
            of = (peers.local_rank, peers.num_local_ranks) if self.method.what.keeps_parts else (0, 1)
            numels = {name: as_real(p).numel() for name, p in parameters.items()}
            parts = {name: own_part(kept, numels[name], of) for name, kept in state["residuals"].items()}
            self.compressed.residuals.load(parts, device)
            if state["exchange"] is not None:
                self.compressed.load_state_dict(state["exchange"])
        load_fragments_(self.fragments, state["fragments"], parameters, device)
        load_optimizer_(self.optimizer, state["optimizer"])
        self._has_been_local = bool(state["optimizer"]["state"])


def _of_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return them by names that are those of no parameter."""
    return {f"{BUFFER}{name}": tensor for name, tensor in tensors.items()}


def _buffers_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(BUFFER): tensor for name, tensor in tensors.items() if name.startswith(BUFFER)}
