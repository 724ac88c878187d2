"""Every k steps: each rank steps on its own gradient, and the weights are averaged after k of them.

Source: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Lin et al., "Don't use large
mini-batches, use local SGD", arXiv 1808.07217 (post-local); adaptive periods and outer optimizers as in `when`.

Steps 1 to `begin_step` are synchronous: gradients are all-reduced. After it each rank i steps alone, and after every k
steps, counted from there,

    x_i = mean over ranks of x_i          (or what payload and outer optimizer make of it; `engine.averaging`)

for parameters and floating buffers. Batch norm's running variance gets the variance between the ranks' means, too.

With fragments, each part of the parameters has its own turn: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, algorithm 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.engine import state
from lightning_lowbw.engine.average import (
    LOSS,
    LR,
    NUM_LOSSES,
    NUM_SAVE,
    NUM_STOP,
    WEIGHT,
    Fragment,
    due,
    make_fragments,
    note_steps,
    uncount_step,
)
from lightning_lowbw.engine.averaging import Averaging
from lightning_lowbw.engine.checks import check_replaced
from lightning_lowbw.engine.consensus import Consensus
from lightning_lowbw.engine.control import EXACT, Control, counts_of, requests_of
from lightning_lowbw.engine.delay import Delay
from lightning_lowbw.engine.phase import Phase
from lightning_lowbw.engine.running_loss import RunningLoss
from lightning_lowbw.engine.same_training import agree_on_end, raise_at_other_batches
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_k import AUTO, EveryK
from lightning_lowbw.when.fragments import steps_before
from lightning_lowbw.where.agreement import agree
from lightning_lowbw.where.mean import average_gradients_
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.method import Method


class ReplicaWorker(Worker):
    """One rank's replica for one optimizer; see `Worker` for a step.

    Attributes:
        averaging: what is kept between averages.
        phase: where it is in its schedule.
        loss: the mean since the last average, for the adaptive rules.
        delay: how many steps hide an average.
        fragments: the parameters, by the averages that they belong to.
        consensus_view: the mean of the replicas, shown in the model.
        steps_since_average: local steps since the last average was begun, of any fragment.
        num_averages: averages done, each of a fragment.
        num_samples: seen since the last average; the weight of this rank where `weighs_samples`.
        weighs_samples: whether replicas are weighted by their samples; equal on all ranks.
        has_met: whether all ranks have communicated in the last step: it was synchronous, or an average was begun or
            applied.
        meet: called before ranks average, or apply a delayed average, if they must first agree on who does so; a rank
            that is out of data takes part by `idle` and `average_due`. None if all ranks always take part.
    """

    clips_before_exchange = False
    clip_factor = 1.0  # a rank clips the gradient it steps with

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
        named_buffers: Mapping[str, Tensor],
    ) -> None:
        super().__init__(method, optimizer, named_parameters, peers)
        # One node, or one rank on each, is what a topology may turn out to be: that trains.
        self.when.check_levels(method.where.topology != "flat" or peers.topology is not None or peers.num_ranks == 1)
        self.steps_since_average = self.num_averages = 0
        self.num_samples = 0.0
        self.weighs_samples = False
        self.has_met = False
        self.meet: Callable[[ReplicaWorker], None] | None = None
        self._reduced: frozenset[Parameter] = frozenset()
        self.phase, self.loss, self.delay = Phase(self), RunningLoss(), Delay(self)
        if isinstance(method.what, TopK):
            method.what.check_names(self._names.values())
        self.averaging = Averaging(self, named_buffers)
        self.sparse, self.narrow = self.averaging.sparse, self.averaging.narrow
        num_fragments = self.when.num_fragments_of(len(self.parameters()))
        self.fragments = make_fragments(self.parameters(), num_fragments, self.averaging.sent_bytes)
        self.consensus_view = Consensus(self)

    # Read by the strategies -----------------------------------------------------------------------------------------

    @property
    def when(self) -> EveryK:
        """The schedule."""
        assert isinstance(self.method.when, EveryK)
        return self.method.when

    @property
    def is_local(self) -> bool:
        """Whether the coming step communicates nothing before the optimizer has stepped."""
        return self.peers.num_participants > 1 and self.phase.is_local

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are all-reduced during backward in the coming step, as DDP does."""
        return not self.is_local

    @property
    def reduces_in_node(self) -> bool:
        """Whether gradients are all-reduced inside each node in the coming step: in local ones on two levels."""
        return self.is_local and self.peers.is_two_level and self.when.node_k_steps == 1

    @property
    def common_batch(self) -> int:
        """The number of the batch, which ranks have in common unless their data are uneven; then 0."""
        return self.batch if self.meet is None else 0

    @property
    def k_steps(self) -> int:
        """The period in use; 1 while synchronous."""
        return self.phase.k_steps if self.is_local else 1

    @property
    def delay_steps(self) -> int:
        """Local steps that hide an average; 0 while "auto" measures."""
        return self.delay.steps

    @property
    def parameters_agree(self) -> bool:  # type: ignore[override]
        """Whether the parameters are the same on all ranks; known without communication."""
        return not any(fragment.moved or fragment.work for fragment in self.fragments)

    @property
    def consensus_distance(self) -> Tensor | None:
        """``||x_i - mean|| / ||mean||`` at the last average; a scalar."""
        return self.averaging.consensus_distance

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return metrics to log; nothing is communicated."""
        shown: dict[str, float | Tensor] = {
            "k_steps": float(self.k_steps),
            "averages": float(self.num_averages),
        }
        if self.when.delay_steps == AUTO:
            shown["delay_steps"] = float(self.delay_steps)
        if self.consensus_distance is not None:
            shown["consensus_distance"] = self.consensus_distance
        return shown

    def check_schedule(self) -> None:
        """Check that it is known when the local phase begins.

        Raises:
            ConfigurationError: on all ranks; a fraction of the run, and it is not known how long that is.
        """
        if isinstance(self.when.begin_step, float):
            raise ConfigurationError(
                f"begin_step={self.when.begin_step}: how many steps the run has is not known here; give a number "
                "of steps."
            )

    def observe_loss(self, loss: Tensor) -> None:
        """Add to the loss of the coming step, for the adaptive rules; a scalar, any device. Does not wait."""
        if self.when.rule in ("fleet", "adacomm"):
            self.loss.observe(loss)

    # One step -------------------------------------------------------------------------------------------------------

    def list_gradients(self, *, reduced: Collection[Parameter] = (), by_clipping: bool = False) -> None:
        self.check_schedule()
        check_replaced(self.method.what, self._made_for)
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

        Returns:
            True.

        Raises:
            ConfigurationError: on all ranks that average; a gradient is sparse.
            DisagreementError: on all ranks; they are at different batches.
        """
        if not self.is_prepared:
            self.list_gradients()
        self.is_prepared, self.is_exchanged = False, True
        if self.peers.num_ranks == 1:
            return True
        mine = [p for p in self.parameters() if p.requires_grad and p not in self._reduced]
        if self.is_local:
            self.begin_local()
            if self.reduces_in_node and mine:
                average_gradients_(mine, [], self.peers.node, self.device, dense_only=True)
            return True
        own_batch = [0.0] * self.peers.num_ranks
        own_batch[self.peers.rank] = float(self.common_batch % EXACT)
        flags = [*counts_of(self.requests), float(self.phase.note_lr()), *own_batch]
        num_stop, num_save, num_decayed, *batches = average_gradients_(
            mine, flags, self.peers, self.device, dense_only=True
        )
        if len(set(batches)) > 1:
            raise_at_other_batches(self, self.peers.group)
        self.peers.count_dense(sum(p.nbytes for p in mine))
        self.agree_on(requests_of(num_stop, num_save))
        if num_decayed:
            self.phase.lr_has_decayed()
        return True

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
        if self.peers.num_ranks == 1:
            return
        self.loss.end_step()
        if not was_local:
            self.num_samples = 0.0
            if self.is_local:
                self.loss.clear()
            self.begin_local()
            return
        self.delay.begin_after_step()
        self.peers.count_dense(sum(p.nbytes for p in self.parameters() if p.requires_grad))
        self.steps_since_average += 1
        note_steps(self.fragments, self.parameters(), self.averaging.sent_bytes)
        try:
            has_begun = self.average_due()
            node_k_steps = self.when.node_k_steps if self.peers.is_two_level else 1  # 1: gradients have been averaged
            if not has_begun and node_k_steps > 1 and self.steps_since_average % node_k_steps == 0:
                self.averaging.average_in_node(*self.fragments)
        except BaseException:  # Lightning has not counted the step, and a resume takes it again
            self.torn = f"the average after step {self.step}"
            self.step, self.steps_since_average = self.step - 1, self.steps_since_average - 1
            uncount_step(self.fragments)
            raise
        self.delay.end_after_step()

    @torch.no_grad()
    def begin_local(self) -> None:
        """Agree on the weights from which the next changes are measured, if the coming step is local.

        Collective: all ranks, the first time; a broadcast of the floating buffers. `exchange` calls it where the
        caller has not.
        """
        if not self.is_local:
            return
        self.phase.begin_local()
        for number, fragment in enumerate(self.fragments):
            if fragment.steps is None:
                fragment.steps = steps_before(number, len(self.fragments), self.k_steps)
                self.delay.restart()
        self.averaging.begin_local()
        self.averaging.offload.put_away()

    # Averaging ------------------------------------------------------------------------------------------------------

    def idle(self, num_steps: int) -> None:
        """Count local steps that others have taken while this rank is out of data."""
        self.step += num_steps
        self.steps_since_average += num_steps
        note_steps(self.fragments, self.parameters(), self.averaging.sent_bytes, num_steps)

    @torch.no_grad()
    def average_due(self, *, finished: bool = False) -> bool:
        """Apply and begin the averages that are due after a local step; return whether one was begun.

        Collective: all ranks, where there are any.

        Args:
            finished: this rank is out of data, and takes part in the averages of the others, whom it has met.

        Raises:
            NonFiniteGradientError, DisagreementError, ConfigurationError: as `after_step`.
        """
        # More than the delay after a resume with a shorter one.
        hidden = [each for each in self.fragments if each.work is not None and (each.steps or 0) >= self.delay_steps]
        if self.meet is not None and not finished and (hidden or due(self.fragments, self.k_steps, self.delay_steps)):
            self.meet(self)
        for fragment in hidden:
            self._apply(fragment)
        begun = due(self.fragments, self.k_steps, self.delay_steps)
        for fragment in begun:
            self._average(fragment)
        self.has_met = bool(hidden or begun)
        return bool(begun)

    @torch.no_grad()
    def average(self) -> None:
        """Average the replicas now: begin it, and without `delay_steps` wait for it.

        Collective: all ranks.

        Raises:
            NonFiniteGradientError, DisagreementError, ConfigurationError: as `after_step`.
        """
        for fragment in self.fragments:
            if fragment.work is not None:
                self._apply(fragment)
            self._average(fragment)

    def _average(self, fragment: Fragment) -> None:
        step_s, begun_s, is_hidden = self.delay.step_s, time.perf_counter(), self.delay_steps > 0
        with self.averaging.offload.at_hand(self.device):
            fragment.work = self.averaging.begin(fragment, self.fragments)
            if not is_hidden:
                self._apply(fragment)  # an average that has not arrived has changed nothing
        fragment.steps = self.steps_since_average = 0
        fragment.moved.clear()
        self.num_samples = 0.0
        self.loss.clear()
        if not is_hidden:
            self.delay.choose(self.fragments.index(fragment), time.perf_counter() - begun_s, step_s)
        self.delay.restart()

    def _apply(self, fragment: Fragment) -> None:
        assert fragment.work is not None
        try:
            with self.averaging.offload.at_hand(self.device):
                control = self.averaging.apply(fragment, fragment.work)
        except BaseException:
            self.recall()
            raise
        fragment.work = None
        self._read(control)

    @torch.no_grad()
    def recall(self) -> None:
        for fragment in self.fragments:
            if fragment.work is not None:
                self.torn = self.torn or f"the average that was begun after step {fragment.work.step}"
                with self.averaging.offload.at_hand(self.device):
                    self.averaging.take_back(fragment.work)
                fragment.drop()

    def _read(self, control: Control) -> None:
        """Read the control message of an average."""
        sums, num_ranks = control.sums, self.peers.num_ranks
        self.agree_on(requests_of(sums[NUM_STOP], sums[NUM_SAVE]))
        if not sums[WEIGHT]:  # no rank has trained since the last average
            return
        self.num_averages += 1
        has_losses = self.weighs_samples or sums[NUM_LOSSES] >= num_ranks
        self.phase.adapt(sums[LR] / num_ranks, sums[LOSS] / max(sums[NUM_LOSSES], 1.0), has_losses)

    # Consensus and state --------------------------------------------------------------------------------------------

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Copy the consensus into the model inside a `with` block, to evaluate or to save it in a plain loop.

        Collective: all ranks, blocking; see `Consensus.show`, also for what it raises.
        """
        self.consensus_view.show()
        self.ending.step = None  # what is evaluated and saved now is that of all ranks
        try:
            yield
        finally:
            self.consensus_view.hide()

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the consensus in the model: the end of the training. Weights that are equal already are compared.

        Collective: all ranks, blocking; see `Consensus.show`, also for what it raises.

        Raises:
            DisagreementError: on all ranks; a rank has taken another number of steps, or nothing has been averaged and
                it has other weights.
        """
        if self.meet is None:  # else ranks may have different numbers of batches
            agree("end of the training", {"worker.step": self.step}, self.peers.group)
        was_there = self.consensus_view.is_there
        self.consensus_view.keep()
        if was_there:
            agree_on_end(self)
        for fragment in self.fragments:
            if fragment.work is not None:
                with self.averaging.offload.at_hand(self.device):
                    self.averaging.drop(fragment.work)
                fragment.work = None
            fragment.moved.clear()
        self.steps_since_average = 0

    def to(self, device: torch.device) -> None:
        self.averaging.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: its weights, the optimizer's state, where it is in the interval.

        An average that has been begun is waited for; nothing is communicated.
        """
        return state.of_replica(self)

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, or `merge_states`.

        In place:
            The model's parameters and buffers, the optimizer's state.

        Raises:
            ConfigurationError: a tensor is missing in the model, or has another shape; or the state does not fit the
                method.
        """
        state.load_replica(self, values)
