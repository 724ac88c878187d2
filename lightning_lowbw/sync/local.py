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
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import download, part
from lightning_lowbw.payloads.corrections import Rates
from lightning_lowbw.schedules.every_k import EveryK, Period, RunningLoss, steps_before
from lightning_lowbw.sync.checks import (
    agree_on_end,
    compare_batches,
    refuse_second_weights,
    refuse_shared_steps,
)
from lightning_lowbw.sync.fragments import (
    Average,
    Fragment,
    Sums,
    average_status,
    differing,
    due,
    nonfinite_weight,
)
from lightning_lowbw.sync.replica import Replica
from lightning_lowbw.sync.state import check_replica, load_replica_, replica_state
from lightning_lowbw.sync.status import (
    Faults,
    Status,
    agree_in_world,
    flags_of_node,
    make_mark,
    raise_first,
    status_message,
    too_many_skipped,
)
from lightning_lowbw.sync.step_plan import StepPlan
from lightning_lowbw.sync.synchronizer import MOST_SKIPPED, Configuration, Synchronizer

SPARE = 0.0  # a number without a meaning, in each status: with it messages have the recorded sizes


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
        self.replica = Replica(self.params, self.compressed, peers, named_buffers, self._when)
        self.buffers, self.fragments = self.replica.buffers, self.replica.fragments
        self.consensus_distance: Tensor | None = None
        self.measures_distance = False
        self._num_uncounted = 0  # skipped local steps, for the status of the next average

    # Read by the strategies -----------------------------------------------------------------------------------------

    @property
    def _when(self) -> EveryK:
        """The schedule."""
        return cast("EveryK", self.method.when)

    def _is_local_at(self, step: int) -> bool:
        begin = self._when.begin_step if self._local_since is None else self._local_since
        is_after = isinstance(begin, int) and step >= begin
        return is_after and not (self._is_plain or self._when.is_always_synchronous)

    @property
    def plan(self) -> StepPlan:
        """The plan of the coming step. A rank clips the gradient with which it steps."""
        if not self._is_local_at(self.step):
            return StepPlan()
        k_steps = self._when.k_steps if self._when.rule == "fixed" or self._period is None else self._period.k
        return StepPlan(is_local=True, reduce="node" if self.peers.is_two_level else "none", k_steps=k_steps)

    @property
    def parameters_agree(self) -> bool:  # type: ignore[override]
        return self.replica.parameters_agree

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        shown = {name: number + self._num_uncounted for name, number in super().metrics(is_due).items()}
        shown |= {"k_steps": float(self.plan.k_steps), "averages": float(self.num_averages)}
        self.measures_distance = True
        distance = self.consensus_distance
        return shown if distance is None else {**shown, "consensus_distance": distance}

    def observe_loss(self, loss: Tensor) -> None:
        """Take in the loss of the coming step; a scalar, any device. Only adaptive rules use it. Does not wait."""
        if self._when.needs_loss:
            self.loss.observe(loss)

    # One step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """Keep the weights from which the next changes are measured, if the next step is local.

        Collective: all ranks, before the first local step; the buffers are compared.
        """
        if isinstance(self._when.begin_step, float):
            raise ConfigurationError(
                f"begin_step={self._when.begin_step}: how many steps the run has is not known here; give a number of "
                "steps."
            )
        if not self.plan.is_local:
            return
        if self._local_since is None:
            self._local_since = self.step
        for number, fragment in enumerate(self.fragments):
            if fragment.steps is None:
                fragment.steps = steps_before(number, len(self.fragments), self.plan.k_steps)
        self.replica.keep_starts()
        self.buffers.begin(self.params.device)

    def _list_gradients(self, reduced: Collection[Parameter]) -> None:
        self.begin()
        self.is_prepared, self._is_checked, self._reduced = True, False, frozenset(reduced)
        if self.plan.is_local:
            self._unread = None  # left by a schedule that was replaced; the next average sends its requests
        else:
            self.requests.agree_on(self._read_status())

    @torch.no_grad()
    def _exchange(self, skip_nonfinite: bool, applies: bool) -> bool:
        """Make the gradients the mean: over all ranks in a synchronous step, over the node in a local step.

        Inf and NaN are all-reduced as in DDP; a sparse gradient becomes dense.

        Collective: all ranks in a synchronous step, the ranks of a node in a local step on two levels; one all-reduce,
            blocking. Else nothing is communicated.
        """
        if self.peers.num_ranks > 1 or self.plan.is_local:
            self._average_gradients()
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
            if averaged and self.plan.reduce == "node":
                average_gradients_(averaged, self.peers.node, self.params.device)
            return
        read = download(average_gradients_(averaged, self.peers, self.params.device, self._step_status))
        self._unread = lambda: Status.read(read(), self.peers.num_ranks)
        self.peers.count_dense(sum(p.nbytes for p in averaged))
        if self._is_local_at(self.step + 1):  # a local step has no status
            self.requests.agree_on(self.requests.agreed | self._read_status())

    def _step_status(self, used: list[float]) -> Tensor:
        """Return this rank's status of a synchronous step; its fault bit says that the batches of its node differ.

        Args:
            used: for each parameter, whether this rank has a gradient.
        """
        fault: Tensor | float = 0.0
        requests: Tensor | int = self.requests.asked
        if self._node_flags is not None:
            _, fault, requests = flags_of_node(self._node_flags)
        sums = [*used, SPARE, SPARE]
        mark = make_mark(self.batch, None, requests)
        return status_message(sums, fault, mark, self.peers.rank, self.peers.num_ranks, self.params.device)

    def _read_status(self) -> int:
        """Read the status of the last synchronous step, if it has not been read; return its requests."""
        if self._unread is None:
            return 0
        read, self._unread = self._unread, None
        status = read()
        if status.is_faulty or status.differences()[0]:
            compare_batches(self.batch, self.step, self._fault_group)
        return status.requests

    @property
    def _lr(self) -> float:
        """The largest learning rate of the param groups; 1 if there is none, as with Adafactor's relative steps."""
        groups = [group for group in self.optimizer.param_groups if group.get("lr") is not None]
        return max(map(self._rate_of, groups), default=1.0)

    @torch.no_grad()
    def _end_step(self) -> None:
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
            self.begin()
            return
        self.peers.count_dense(sum(p.nbytes for p in self.params if p.requires_grad))
        self.replica.note_step()
        self._average_due()

    def _count_skipped(self) -> None:
        """Count a skipped step: a local step for the next average, which also tells all ranks of too many."""
        if self.plan.is_local and not self.peers.may_grow:
            self._num_uncounted += 1
        else:
            super()._count_skipped()

    # A round --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _average_due(self) -> None:
        """Apply and begin the averages that are due after a local step.

        Collective: all ranks, if averages are due. All ranks raise NonFiniteGradientError if a rank has an inf or NaN,
            DisagreementError if they are at different steps or batches.
        """
        # due: `>=`, because after a resume with a shorter delay an average is older than the delay.
        delay = self._when.delay_steps
        in_progress = [fragment for fragment in self.fragments if fragment.work is not None]
        arriving = [fragment for fragment in in_progress if (fragment.steps or 0) >= delay]
        if arriving or due(self.fragments, self.plan.k_steps, delay):
            self._agree_with_shards()
        for fragment in arriving:
            with part("end average"):
                self._end_average(fragment)
        begun = due(self.fragments, self.plan.k_steps, delay)
        for fragment in begun:
            with part("begin average"):
                fragment.work = self._begin_average(fragment)
            if not delay:
                with part("end average"):  # an average that has not arrived has changed nothing
                    self._end_average(fragment)
            fragment.steps = 0
            fragment.moved.clear()
            self.loss.clear()
        self.has_communicated = bool(arriving or begun)

    def _agree_with_shards(self) -> None:
        """Agree on requests, and report faults of the weights, before an average of a sharded model.

        Collective: all ranks; as `agree_in_world`.
        """
        if self.peers.are_shards:
            faults = self._faults_of([each for each in self.params if each.requires_grad])
            self.requests.asked = agree_in_world(faults, self.requests.asked, self.batch, self.step, self.params.device)

    def _begin_average(self, fragment: Fragment) -> Average:
        """Begin the average of a fragment, with a status that tells all ranks whether they may apply it.

        Wire:
            The parameters that the payload does not send and the running statistics that differ, in float32 or wider,
            with a status of 5 numbers and 2 per rank; and the messages of the payload. These contain the status if
            nothing else is sent.
        """
        if fragment.takes_buffers:
            self.buffers.begin_average(self.params.device)
        parameters, device = [p for p in fragment.parameters if p in fragment.moved and p.numel()], self.params.device
        faults = self._faults_of(parameters)
        self._forget_late_faults()  # the status of this average has them
        # A mean of weights makes replicas equal from any start; changes need the same anchor on all ranks.
        starts = (self.replica.start[p] for p in parameters) if self.replica.needs_start else None
        mark = make_mark(self.step + self.batch, starts, self.requests.asked)
        is_resized = fragment.takes_buffers and bool(self.buffers.changed())
        num_skipped = self._num_uncounted / self.peers.num_local_ranks  # the ranks of a node skip a step together
        own = Sums(lr=self._lr, num_resized=float(is_resized), num_skipped=num_skipped)
        self._num_uncounted = 0
        status = average_status(own, self.loss.mean(), faults.any(device), mark, self.peers, device)
        prepared = self.replica.prepare_average(self.step, parameters, takes_buffers=fragment.takes_buffers)
        average = self.replica.send_average(*prepared, status)
        average.faults = faults
        return average

    def _end_average(self, fragment: Fragment) -> None:
        """Wait for the average of a fragment, and apply it: on all ranks, or on no rank."""
        average, num_ranks = fragment.work, self.peers.num_ranks
        assert average is not None
        # wait: the status first, because an inf of one rank must change no weight of another rank
        means, numbers = average.wait_for_whole()
        status = Status.read(numbers.tolist(), num_ranks)
        sums = Sums(*status.sums)
        counts, checksums = status.differences()
        if counts:  # a rank that is at another step has other weights, too: the step is the reason
            at = {"average begun after steps": average.step}
            compare_batches(self.batch, self.step, self.peers.group, at)
        if checksums:
            raise DisagreementError(
                f"The ranks measure their changes from different weights; their checksums are {checksums}. Begin "
                "with the same weights on all ranks, also of parameters that are added later."
            )
        if status.is_faulty:
            raise_first(average.faults, self._fault_group)
        self._apply_average(average, means, sums, fragment.moved)
        fragment.work = None
        self.requests.agree_on(status.requests)
        self.skipped_steps += round(sums.num_skipped)
        if self._when.rule != "fixed":
            loss = sums.loss / num_ranks if sums.num_losses == num_ranks else None
            period = self._period or Period(self._when.k_steps)
            self._period = self._when.next_period(period, sums.lr / num_ranks, loss)

    def _apply_average(
        self, average: Average, means: dict[str, Tensor], sums: Sums, moved: Collection[Parameter]
    ) -> None:
        """Count an average, and apply it; see `Replica.apply_average`."""
        distance = self.replica.apply_average(average, means, sums, self._when, moved, measures=self.measures_distance)
        self.consensus_distance, self.num_averages = distance, self.num_averages + 1

    # Faults ---------------------------------------------------------------------------------------------------------

    def _faults_of(self, parameters: Sequence[Parameter]) -> Faults:
        """Return the late faults, and whether each parameter has an inf or NaN after this step."""
        faults = self._late_faults()
        if self.skip_norm is not None and self._num_in_a_row >= MOST_SKIPPED:
            fault = too_many_skipped(self._here, self.step, self._num_in_a_row)
            faults.add(torch.ones(1, dtype=torch.bool), [""], lambda _: fault)
        if parameters:
            names = list(map(self.params.name_of, parameters))
            faults.add(are_not_finite(parameters), names, partial(nonfinite_weight, self.peers, self.step))
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
        self.loop.differs_after = None  # all ranks evaluate and save the same weights now
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
        self.requests.agree_on(self._read_status())
        self.replica.hide()
        if self.replica.is_equal:
            self.check_late_faults()
            agree_on_end(self.step, self.params.by_name(), self.peers.group)
        else:
            self.replica.average(self._faults_of(differing(self.fragments)), self._fault_group)
        self.replica.drop_averages()
        self.loop.differs_after = None

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state, without averages in progress; nothing is communicated."""
        self.loop.differs_after = None  # a training can go on from the state
        return {
            "step": self.step,
            "small_numel": self.params.small_numel,
            "local_since": self._local_since,
            "period": None if self._period is None else asdict(self._period),  # a file has only tensors and primitives
            "num_averages": self.num_averages,
            "steps_since_average": min(fragment.steps or 0 for fragment in self.fragments),  # for readers of the file
            **replica_state(self.replica, self.optimizer, self.plan.k_steps),
            "loss": self.loss.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._unread = None
        self._local_since, self.num_averages = state["local_since"], state["num_averages"]
        self._period = None if state["period"] is None else Period(**state["period"])

    @torch.no_grad()
    def _load_own(self, state: Mapping[str, Any]) -> None:
        check_replica(self.replica, state, self.method)
        self.loss.load_state_dict(state["loss"], self.params.device)
        load_replica_(self.replica, self.optimizer, state)
