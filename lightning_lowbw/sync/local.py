"""Every k steps: each rank steps with its own gradient, and the weights are averaged after k steps.

Source: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Lin et al., "Don't use large
mini-batches, use local SGD", arXiv 1808.07217 (post-local); adaptive periods, outer optimizers: `schedules.every_k`.

Steps 1 to `begin_step` are synchronous: gradients are all-reduced. After it each rank i steps alone, and after every k
steps, counted from there, there is a round:

    due         the fragments whose average is applied now, and the fragments whose average begins
    signal      D = x - x0, the change of the weights since the last average (or x itself, whole)
    exchange    the payload's, as for gradients; a node is one participant
    wait        the means and the status; by the status all ranks go on, or no rank does
    outer       x0 = outer(x0, mean)
    apply       x = x0, or with a delay the steps taken meanwhile are kept

for parameters and for the running statistics of batch norm (`sync.buffers`). A running variance gets the variance
between the ranks' means, too.

With fragments, each part of the parameters has its own turn: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.agreement import agree
from lightning_lowbw.comm.peers import Peers, average_gradients_
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import Rates, as_real, device_of, download, laid_out, part, relative_distance
from lightning_lowbw.payloads.payload import FLOAT_BYTES
from lightning_lowbw.schedules.every_k import EveryK, Period, RunningLoss, steps_before
from lightning_lowbw.sync.checks import (
    agree_on_end,
    raise_at_other_batches,
    refuse_second_weights,
    refuse_shared_steps,
)
from lightning_lowbw.sync.fragments import (
    Average,
    Fragment,
    Sums,
    apply_means_,
    average_status,
    check_marks,
    differing,
    due,
    nonfinite_weight,
)
from lightning_lowbw.sync.replica import COPY, Replica
from lightning_lowbw.sync.state import check_replica, load_replica_, replica_state
from lightning_lowbw.sync.status import (
    Faults,
    Status,
    first_fault,
    flags_of_node,
    make_mark,
    status_message,
)
from lightning_lowbw.sync.step_plan import StepPlan
from lightning_lowbw.sync.synchronizer import Configuration, Synchronizer, raise_fault

SPARE = 0.0  # a number without a meaning, in each status: with it messages have the recorded sizes


SYNCHRONOUS, LOCAL = StepPlan(), StepPlan(is_local=True, reduce="none")
LOCAL_IN_NODES = StepPlan(is_local=True, reduce="node")


class LocalSync(Synchronizer):
    """One rank's replica for one optimizer; see `Synchronizer` for a step.

    Attributes:
        replica: the weights, the anchor, the residuals, and what the model shows.
        buffers, fragments: the buffers and fragments of the replica.
        loss: the mean loss since the last average, for the adaptive rules.
        measures_distance: whether averages measure `consensus_distance`: set it. `metrics` sets it, too.
        consensus_distance: ``||x_i - mean|| / ||mean||`` at the last average, of large tensors from a sample; a scalar.
            None until an average has measured it.
        num_averages: averages done; each fragment's average counts.
        has_communicated: whether all ranks communicated in the last step: it was synchronous, or an average began or
            arrived.
    """

    def __init__(
        self,
        method: Configuration,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
        named_buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        super().__init__(method, optimizer, named_parameters, peers)
        is_one = peers.num_participants == 1 and not peers.may_grow
        # One replica is its own mean. On one rank alone an outer optimizer still steps with it (SNOO).
        is_outer = method.acts_alone and peers.num_ranks == 1 and not peers.are_shards
        self._is_plain = is_one and not is_outer
        if not self._is_plain:
            refuse_second_weights(optimizer)
        if not (is_one or peers.may_grow or peers.are_shards):  # the ranks of an elastic group or a node step alike
            refuse_shared_steps(optimizer)
        self.num_averages = 0
        self.has_communicated = False
        self._reduced: frozenset[Parameter] = frozenset()
        self._unread: Callable[[], Status] | None = None  # waits for the status of the last synchronous step
        self._local_since: int | None = None  # the first local step, once that has come
        self._period: Period | None = None  # of an adaptive rule, once an average has been applied
        self.loss = RunningLoss()
        self._rate_of = Rates()
        self.replica = Replica(self.params, self.compressed, peers, named_buffers, self.when)
        self.buffers, self.fragments = self.replica.buffers, self.replica.fragments
        self.consensus_distance: Tensor | None = None
        self.measures_distance = False

    def agree_on_buffers(self) -> None:
        self.buffers.agree_on_shapes(self.peers)

    # Read by the strategies -----------------------------------------------------------------------------------------

    @property
    def when(self) -> EveryK:
        """The schedule."""
        return cast("EveryK", self.method.when)

    def _is_local_at(self, step: int) -> bool:
        begin = self.when.begin_step if self._local_since is None else self._local_since
        is_after = isinstance(begin, int) and step >= begin
        return is_after and not (self._is_plain or self.when.is_always_synchronous)

    @property
    def plan(self) -> StepPlan:
        """The plan of the coming step. A rank clips the gradient with which it steps."""
        if not self._is_local_at(self.step):
            return SYNCHRONOUS
        return LOCAL_IN_NODES if self.peers.is_two_level else LOCAL

    @property
    def k_steps(self) -> int:
        """The period in use; 1 while synchronous."""
        if not self.plan.is_local:
            return 1
        return self.when.k_steps if self.when.rule == "fixed" or self._period is None else self._period.k

    @property
    def parameters_agree(self) -> bool:  # type: ignore[override]
        return self.replica.parameters_agree

    @property
    def needs_start(self) -> bool:
        """Whether changes are measured from the anchor, on the device; a member that joins takes it."""
        return self.when.outer != "none" or self.compressed is not None or self.peers.may_grow

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        shown: dict[str, float | Tensor] = {"k_steps": float(self.k_steps), "averages": float(self.num_averages)}
        self.measures_distance = True
        distance = self.consensus_distance
        return shown if distance is None else {**shown, "consensus_distance": distance}

    def check_schedule(self) -> None:
        """Raise if a fraction of a run of unknown length is to be synchronous."""
        if isinstance(self.when.begin_step, float):
            raise ConfigurationError(
                f"begin_step={self.when.begin_step}: how many steps the run has is not known here; give a number of "
                "steps."
            )

    def observe_loss(self, loss: Tensor) -> None:
        if self.when.needs_loss:
            self.loss.observe(loss)

    # One step -------------------------------------------------------------------------------------------------------

    def list_gradients(self, *, reduced: Collection[Parameter] = ()) -> None:
        self.check_method()
        self.is_prepared, self._reduced = True, frozenset(reduced)

    @torch.no_grad()
    def exchange(self, *, skip_nonfinite: bool = False, applies: bool = False) -> bool:
        """Make the gradients the mean: over all ranks in a synchronous step, over the node in a local step.

        Inf and NaN are all-reduced as in DDP; a sparse gradient becomes dense.

        Collective: all ranks in a synchronous step, the ranks of a node in a local step on two levels; one all-reduce,
            blocking. Else nothing is communicated.
        """
        if not self.is_prepared:
            self.list_gradients()
        self.is_prepared = False
        if self.peers.num_ranks > 1 or self.plan.is_local:
            self._average_gradients()
        self.is_exchanged = True
        return True

    def _average_gradients(self) -> None:
        for parameter in self.params:
            if not parameter.requires_grad:
                parameter.grad = None  # frozen since the backward: torch would step it, each rank on its own
        averaged = [p for p in self.params if p.requires_grad and p not in self._reduced]
        for parameter in averaged if self.plan.reduce != "none" else ():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.to_dense()
        if self.plan.is_local:
            self._unread = None  # left by a schedule that was replaced; the next average sends its requests
            self.begin_local()
            if averaged and self.plan.reduce == "node":
                average_gradients_(averaged, self.peers.node, self.device)
            return
        before = self._read_status()
        message_of = partial(self._step_status, before)
        read = download(average_gradients_(averaged, self.peers, self.device, message_of))
        self._unread = lambda: Status.read(read(), self.peers.num_ranks)
        self.peers.count_dense(sum(p.nbytes for p in averaged))
        if self._is_local_at(self.step + 1):  # a local step has no status
            self._read_status(before)

    def _step_status(self, before: int, used: list[float]) -> Tensor:
        """Return this rank's status of a synchronous step; its fault bit says that the batches of its node differ.

        Args:
            before: the requests that have been read in this step.
            used: for each parameter, whether this rank has a gradient.
        """
        fault: Tensor | float = 0.0
        requests: Tensor | int = self.requests
        if self.node_flags is not None:
            _, fault, requests = flags_of_node(self.node_flags, before)
        sums = [*used, SPARE, SPARE]
        mark = make_mark(self.batch, None, requests)
        return status_message(sums, fault, mark, self.peers.rank, self.peers.num_ranks, self.device)

    def _read_status(self, before: int = 0) -> int:
        """Read the status of the last synchronous step; return its requests, and note them together with `before`."""
        if self._unread is None:
            return 0
        read, self._unread = self._unread, None
        status = read()
        if status.is_faulty or status.differences()[0]:
            raise_at_other_batches(self.batch, self.step, self.fault_group)
        self.agree_on(before | status.requests)
        return status.requests

    @property
    def _lr(self) -> float:
        """The largest learning rate of the param groups; 1 if there is none, as with Adafactor's relative steps."""
        groups = [group for group in self.optimizer.param_groups if group.get("lr") is not None]
        return max(map(self._rate_of, groups), default=1.0)

    @torch.no_grad()
    def after_step(self) -> None:
        """Count the step; average the replicas after every k-th local one.

        Collective: all ranks, when an average is begun or applied. If it raises, nothing has been averaged.
        """
        was_local = self.plan.is_local
        self.has_communicated = not was_local
        self.step += 1
        self.peers.ledger.steps += 1
        self.loss.end_step()
        if not was_local:
            if self.plan.is_local:
                self.loss.clear()
            self.begin_local()
            return
        self.peers.count_dense(sum(p.nbytes for p in self.params if p.requires_grad))
        self.replica.note_step()
        self.average_due()

    @torch.no_grad()
    def begin_local(self) -> None:
        """Keep the weights from which the next changes are measured, if the next step is local.

        Collective: all ranks, the first time; the buffers are compared. `exchange` calls it, too.
        """
        if not self.plan.is_local:
            return
        if self._local_since is None:
            self._local_since = self.step
        for number, fragment in enumerate(self.fragments):
            if fragment.steps is None:
                fragment.steps = steps_before(number, len(self.fragments), self.k_steps)
        self.replica.keep_starts(on_host=not self.needs_start)
        self.buffers.begin(self.peers, self.device)

    # A round --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_due(self) -> None:
        """Apply and begin the averages that are due after a local step.

        Collective: all ranks, if averages are due. All ranks raise NonFiniteGradientError if a rank has an inf or NaN,
            DisagreementError if they are at different steps or batches.
        """
        # due: `>=`, because after a resume with a shorter delay an average is older than the delay.
        delay = self.when.delay_steps
        in_progress = [fragment for fragment in self.fragments if fragment.work is not None]
        arriving = [fragment for fragment in in_progress if (fragment.steps or 0) >= delay]
        if arriving or due(self.fragments, self.k_steps, delay):
            self._agree_with_shards()
        for fragment in arriving:
            self._end_average(fragment)
        begun = due(self.fragments, self.k_steps, delay)
        for fragment in begun:
            fragment.work = self._begin_average(fragment)
            if not delay:
                self._end_average(fragment)  # an average that has not arrived has changed nothing
            fragment.steps = 0
            fragment.moved.clear()
            self.loss.clear()
        self.has_communicated = bool(arriving or begun)

    def _agree_with_shards(self) -> None:
        """Agree on requests, and report faults of the weights, before an average of a sharded model.

        Collective: all ranks; as `agree_in_world`.
        """
        if self.peers.are_shards:
            faults = self.faults_of([each for each in self.params if each.requires_grad])
            self.requests = self.agree_in_world(faults, self.requests)

    @part("begin average")
    def _begin_average(self, fragment: Fragment) -> Average:
        """Begin the average of a fragment, with a status that tells all ranks whether they may apply it.

        Wire:
            The parameters that the payload does not send and the running statistics that differ, in float32 or wider,
            with a status of 5 numbers and 2 per rank; and the messages of the payload. These contain the status if
            nothing else is sent.
        """
        if fragment.takes_buffers:
            self.buffers.begin_average(self.peers, self.device)
        parameters = [p for p in fragment.parameters if p in fragment.moved and p.numel()]
        faults = self.faults_of(parameters)
        self.forget_late_faults()  # the status of this average has them
        # A mean of weights makes replicas equal from any start; changes need the same anchor on all ranks.
        starts = (self.replica.start[p] for p in parameters) if self.needs_start else None
        mark = make_mark(self.step + self.batch, starts, self.requests)
        is_resized = fragment.takes_buffers and bool(self.buffers.changed())
        own = Sums(lr=self._lr, num_resized=float(is_resized))
        status = average_status(own, self.loss.mean(), faults.any(self.device), mark, self.peers, self.device)
        prepared = self.replica.prepare_average(self.step, parameters, takes_buffers=fragment.takes_buffers)
        average = self.replica.send_average(*prepared, status)
        average.faults = faults
        return average

    @part("end average")
    def _end_average(self, fragment: Fragment) -> None:
        """Wait for the average of a fragment, and apply it: on all ranks, or on no rank."""
        average, num_ranks = fragment.work, self.peers.num_ranks
        assert average is not None
        # wait: the status first, because an inf of one rank must change no weight of another rank
        means, numbers = average.wait_for_whole()
        status = Status.read(numbers.tolist(), num_ranks)
        sums = Sums(*status.sums)
        check_marks(status, average, batch=self.batch, step=self.step, group=self.peers.group)
        if status.is_faulty:
            raise_fault(first_fault(average.faults.first(), self.fault_group))
        self.apply_average(average, means, sums, fragment.moved)
        fragment.work = None
        self.agree_on(status.requests)
        if self.when.rule != "fixed":
            loss = sums.loss / num_ranks if sums.num_losses == num_ranks else None
            period = self._period or Period(self.when.k_steps)
            self._period = self.when.next_period(period, sums.lr / num_ranks, loss)

    def apply_average(
        self, average: Average, means: dict[str, Tensor], sums: Sums, moved: Collection[Parameter] = ()
    ) -> None:
        """Step from the anchor to the mean.

        Collective: all ranks, if buffers differ that are not averaged, or the shape of a buffer has changed.

        Args:
            average: the average; `wait_for_whole` has been called.
            means: the means of the tensors that are averaged whole, by name; used up.
            sums: the sums over the ranks in the status.
            moved: parameters that have been trained since the average was begun.
        """
        changes = average.wait_for_changes()
        if average.takes_buffers:
            if sums.num_resized:
                self.buffers.agree_on_shapes(self.peers)
            self.buffers.take_first_(self.peers)
        # Nothing is communicated from here on: an exchange that fails does so before a weight changes.
        names = {p: self.name_of(p) for p in average.parameters}
        starts = {name: self.replica.start[p] for p, name in names.items() if name in changes}
        moves = [laid_out(changes[name], start.shape) for name, start in starts.items()]
        means |= zip(starts, torch._foreach_add(list(starts.values()), moves) if moves else (), strict=True)
        for parameter, name in names.items() if self.needs_start else ():
            if name not in changes and (dtype := as_real(parameter).dtype).itemsize < FLOAT_BYTES:
                # The weight began as its rounded anchor: the rounding error is no change of the weight.
                start = self.replica.start[parameter]
                means[name].add_(start).sub_(start.to(dtype))
        self._move_weights(average, [means[name] for name in names.values()], sums.lr / self.peers.num_ranks, moved)
        self.buffers.apply(means, average.buffer_snapshots)
        self.num_averages += 1

    def _move_weights(self, average: Average, means: list[Tensor], lr: float, moved: Collection[Parameter]) -> None:
        parameters, replica, when = average.parameters, self.replica, self.when
        now = list(map(as_real, parameters))
        before = average.snapshots or now
        self.consensus_distance = relative_distance(before, means) if now and self.measures_distance else None
        # outer: x0 = outer(x0, mean)
        if self.needs_start and now:
            starts = [replica.start[p] for p in parameters]
            if when.outer != "none":
                new = [p for p in parameters if p not in replica.velocity]
                replica.velocity |= {p: torch.zeros_like(replica.start[p]) for p in new}
            when.outer_step_(starts, means, [replica.velocity[p] for p in parameters if p in replica.velocity], lr)
        # apply: x = x0; with a delay the steps taken meanwhile are kept.
        have_moved = [average.snapshots is not None and p in moved for p in parameters]
        is_shown_only = not self.needs_start
        if is_shown_only and when.delay_steps:
            replica.copy_to_host(parameters, means)
            device_of(self.device).join(COPY)  # the next line changes the means
        apply_means_(now, before, means, have_moved, when.mixing)
        if is_shown_only and not when.delay_steps:
            replica.copy_to_host(parameters, now)

    # Faults ---------------------------------------------------------------------------------------------------------

    def faults_of(self, parameters: Sequence[Parameter]) -> Faults:
        """Return the late faults, and whether each parameter has an inf or NaN after this step."""
        faults = self.late_faults()
        if parameters:
            flags = are_not_finite(parameters)
            faults.add(flags, list(map(self.name_of, parameters)), partial(nonfinite_weight, self.peers, self.step))
        return faults

    def to(self, device: torch.device) -> None:
        self.replica.to(device)

    # The anchor, which validation and saves see ---------------------------------------------------------------------

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Put the last average into the model inside a `with` block, to evaluate or to save it in a plain loop.

        Changes made to the weights inside the block are dropped.

        Collective: all ranks; as `check_late_faults`.
        """
        self.check_late_faults()
        self.replica.show()
        self.ending.step = None  # all ranks evaluate and save the same weights now
        try:
            yield
        finally:
            self.replica.hide()

    @torch.no_grad()
    def finish(self) -> None:
        """End the training: average the weights once more if they differ, without a step of the outer optimizer.

        Collective: all ranks, blocking. If weights are equal already, they are compared.

        Raises:
            NonFiniteGradientError: on all ranks; a rank has an inf or NaN.
            DisagreementError: on all ranks; the numbers of steps differ, or weights differ after an average.
        """
        if not self.replica.is_equal:
            self._agree_with_shards()
        agree("end of the training", {"worker.step": self.step}, self.peers.group)
        self._read_status()
        self.replica.hide()
        if self.replica.is_equal:
            self.check_late_faults()
            agree_on_end(self.step, self.params.by_name(), self.peers.group)
        else:
            self.replica.average(self.faults_of(differing(self.fragments)), self.fault_group)
        self.replica.drop_averages()
        self.ending.step = None

    # State ----------------------------------------------------------------------------------------------------------

    def equal_state(self) -> dict[str, Any]:
        # A dictionary: a checkpoint holds only tensors and primitives.
        period = None if self._period is None else asdict(self._period)
        here = {"local_since": self._local_since, "period": period, "num_averages": self.num_averages}
        return super().equal_state() | here

    def load_equal_state(self, state: Mapping[str, Any]) -> None:
        super().load_equal_state(state)
        self._unread = None
        self._local_since = state["local_since"]
        self._period = None if state["period"] is None else Period(**state["period"])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, without averages in progress; nothing is communicated."""
        self.ending.step = None  # a training can go on from the state
        return {
            **self.equal_state(),
            "steps_since_average": min(fragment.steps or 0 for fragment in self.fragments),  # for readers of the file
            **replica_state(self.replica, self.optimizer, self.k_steps, needs_start=self.needs_start),
            "loss": self.loss.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` or `merge_states` returned, also into the model."""
        check_replica(self.replica, state, self.method)
        self.is_compared = False
        self.forget_late_faults()
        self.load_equal_state(state)
        self.num_averages = state["num_averages"]
        self.loss.load_state_dict(state["loss"], self.device)
        load_replica_(self.replica, self.optimizer, state, needs_start=self.needs_start)
