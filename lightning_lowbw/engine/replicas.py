"""Local SGD: every rank steps on its own gradient, and the parameters are averaged now and then.

Source: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; Lin et al., "Don't use large
mini-batches, use local SGD", arXiv 1808.07217 (post-local); adaptive periods and outer optimizers as in `core`.

Steps 1 to `begin_step` are synchronous: gradients are all-reduced. After it each rank i steps alone, and after every k
steps, counted from there,

    x_i = mean over ranks of x_i          (or what the outer optimizer makes of it)

for parameters and floating buffers. Batch norm's running variance gets the variance between the ranks' means, too.

With fragments, each part of the parameters has its own turn: Douillard et al., "Streaming DiLoCo with overlapping
communication", arXiv 2501.18512, algorithm 2.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from lightning_lowbw.arguments import is_number, names_of
from lightning_lowbw.engine.buffers import ReplicaBuffers, wide
from lightning_lowbw.engine.in_flight import Flight, Fragment
from lightning_lowbw.engine.payload import NarrowChanges, Payload, SparseChanges, TailInFlight, WholeValues
from lightning_lowbw.errors import ConfigurationError, DisagreementError, NonFiniteGradientError
from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.what.outer import OuterName, OuterOptimizer
from lightning_lowbw.what.top_k import Compression, as_compression
from lightning_lowbw.what.values import FLOAT_NAMES
from lightning_lowbw.when.adaptive import FIRST_LR_DECAY, RELATIVE_CHANGE, Period, PeriodSchedule, Rule
from lightning_lowbw.when.fragments import balance, hiding_steps, steps_before
from lightning_lowbw.where.agreement import checksum
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.mean import MeanInFlight, average_gradients_, wide_dtype
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes

InnerMomentum = Literal["local", "average", "reset"]
LOSS_DECAY = 0.9  # of the running mean of the loss since the last average
MARK_MODULUS = 1 << 10
# What rides with the average: numbers that are summed over the ranks, then a fault and a mark of each rank.
WEIGHT, NUM_LOSSES, LOSS, LR, STOP, SAVE, FINISHED, OVER = range(8)
NUM_SUMS = 8
NUM_SAMPLED = 1 << 16  # elements of a tensor from which its distance is estimated
AUTO = "auto"
TIMED_AVERAGE = 2  # of each fragment, whose time is taken; the first one pays for connections and allocations

_logger = logging.getLogger("lightning.pytorch.lightning_lowbw")  # is shown where Lightning's are


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD, as a value.

    Args:
        k_steps: local steps between two averages; for the adaptive rules the first k. 1 is DDP.
        begin_step: synchronous steps before the first local one, as in `PeriodSchedule`.
        rule: "fixed", "fleet", "adacomm" or "qsr", as in `PeriodSchedule`.
        max_k_steps: the largest k of the adaptive rules.
        qsr_alpha: for "qsr".
        outer: "none", "slowmo" or "nesterov" (DiLoCo), as in `OuterOptimizer`.
        outer_lr: of the outer optimizer.
        outer_momentum: of the outer optimizer.
        inner_momentum: what an average does with the inner optimizer's momentum: leaves it "local", takes the
            "average" (of Adam's second moment, too; SGD, Adam and AdamW), or does a "reset" of the first moment to 0.
        delay_steps: local steps that hide an average: it is begun after step t and applied after t + delay_steps,
            with the progress made meanwhile kept. 0 waits for it. Less than k_steps. "auto" waits for the first two,
            and takes what the second took, in local steps; the same on all ranks, but not from run to run.
        num_fragments: the parameters are averaged in so many parts of nearly one size, each every k steps, one after
            another: the peak of the traffic is divided by it.
        mixing: alpha, the share of its own weights that a rank keeps when a delayed average lands:
            ``x = alpha x + (1 - alpha) average``. None keeps the progress made meanwhile: ``x = x + average - x then``.
        value_dtype: "float32", or "bfloat16" or "float16": what is sent of the parameters is then their change since
            the last average, with error feedback.
        compression: None, or what is sent of that change: its largest elements, in few bits, with error feedback
            (SparseLoCo). A `Compression`, or a mapping of its arguments.
        node_k_steps: on two levels, local steps between two averages inside each node; with 1 its ranks step together,
            on the mean of their gradients.

    Raises:
        ConfigurationError: a value is out of range, or two do not go together.
    """

    k_steps: int = 8
    begin_step: int | float | str = 1
    rule: Rule = "fixed"
    max_k_steps: int = 16
    qsr_alpha: float = 0.01
    outer: OuterName = "none"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    inner_momentum: InnerMomentum = "local"
    delay_steps: int | str = 0
    num_fragments: int = 1
    mixing: float | None = None
    value_dtype: str = "float32"
    compression: Compression | None = None
    node_k_steps: int = 1
    schedule: PeriodSchedule = field(init=False, repr=False, compare=False)
    outer_optimizer: OuterOptimizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        schedule = PeriodSchedule(self.k_steps, self.begin_step, self.rule, self.max_k_steps, self.qsr_alpha)
        object.__setattr__(self, "schedule", schedule)
        outer_optimizer = OuterOptimizer(self.outer, self.outer_lr, self.outer_momentum)
        object.__setattr__(self, "outer_optimizer", outer_optimizer)
        object.__setattr__(self, "compression", as_compression(self.compression))
        for name, allowed in (("inner_momentum", get_args(InnerMomentum)), ("value_dtype", FLOAT_NAMES)):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        for name in ("node_k_steps", "num_fragments"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r}: give an integer >= 1.")
        self._check_delay()
        if self.num_fragments > 1 and (self.rule != "fixed" or self.node_k_steps > 1):
            raise ConfigurationError(
                f"num_fragments={self.num_fragments} wants a fixed period, and one for all ranks: leave out rule and "
                "node_k_steps."
            )
        if self.num_fragments > self.k_steps:
            raise ConfigurationError(
                f"num_fragments={self.num_fragments} with k_steps={self.k_steps}: give at most one fragment per step."
            )
        if self.compression is not None and self.value_dtype != "float32":
            raise ConfigurationError(
                f"value_dtype={self.value_dtype!r} with a compression: give its own value_dtype, as in "
                f"compression={{'value_dtype': {self.value_dtype!r}}}."
            )

    def _check_delay(self) -> None:
        delay, mixing = self.delay_steps, self.mixing
        is_count = isinstance(delay, int) and not isinstance(delay, bool) and 0 <= delay < max(self.k_steps, 1)
        if not is_count and delay != AUTO:
            raise ConfigurationError(
                f"delay_steps={delay!r} with k_steps={self.k_steps}: give an integer from 0 to k_steps - 1, or "
                f"{AUTO!r}."
            )
        if delay and (self.value_dtype != "float32" or self.inner_momentum != "local"):
            raise ConfigurationError(
                "delay_steps > 0 does not go together with value_dtype or inner_momentum: leave one of them out."
            )
        if mixing is not None:
            if not is_number(mixing) or not 0 <= mixing <= 1:
                raise ConfigurationError(f"mixing={mixing!r}: give a number in [0, 1], or None.")
            if not delay:
                raise ConfigurationError(f"mixing={mixing!r} is for averages that land later: give delay_steps.")

    @property
    def sends_changes(self) -> bool:
        """Whether changes since the last average are sent, instead of values."""
        return self.compression is not None or self.value_dtype != "float32"

    def describe(self) -> dict[str, object]:
        """Return the configuration as plain values."""
        values = asdict(self)
        del values["schedule"], values["outer_optimizer"]
        return {"method": "local_sgd", **values}

    def make_payload(self, numels: Mapping[str, int], exchange: Exchange) -> Payload:
        """Return what an average sends of parameters with these names and numbers of elements."""
        if self.compression is not None:
            return SparseChanges(self.compression, exchange)
        if self.value_dtype != "float32":
            return NarrowChanges(numels, getattr(torch, self.value_dtype), exchange)
        return WholeValues()

    def attach(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        exchange: Exchange | None = None,
        named_buffers: Mapping[str, Tensor] | None = None,
    ) -> LocalSGDWorker:
        """Return this rank's worker for an optimizer.

        Args:
            optimizer: any torch optimizer but LBFGS.
            named_parameters: of the whole model; names key the state.
            exchange: the process group; by default the world.
            named_buffers: to be averaged with this optimizer's parameters; a batch norm's ``X.running_var`` belongs
                to its ``X.running_mean``.

        Raises:
            ConfigurationError: the optimizer cannot be used.
        """
        return LocalSGDWorker(self, optimizer, named_parameters, exchange or Exchange(), named_buffers or {})

    def merge_states(self, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state every rank of another world size starts with: no weights of its own, the mean momentum.

        Of what a compression has kept back it is the mean, too: 1/N of the sum over the ranks stays as it is. What a
        half type has rounded away belonged to parts of the old world, and is dropped.
        """
        merged: dict[str, Any] = {}
        residuals: dict[str, Tensor] = {}
        num_states = 0
        totals: dict[tuple[Any, str], Tensor] = {}
        counts: dict[tuple[Any, str], int] = {}
        for state in states:
            num_states += 1
            if not merged:
                merged = {**state, "own": {}, "buffers": {}, "steps_since_average": 0, "delay": None, "average_s": {}}
            for fragment in state["fragments"]:
                flight = fragment["flight"] or {"parameters": [], "snapshots": [], "changes": {}}
                snapshots = dict(zip(flight["parameters"], flight["snapshots"], strict=False))
                for name, residual in fragment["payload"].get("residuals", {}).items():
                    if name in flight["changes"]:
                        residual = _recalled(residual, flight["changes"][name], snapshots[name], state["start"][name])
                    residuals[name] = residuals[name] + residual if name in residuals else residual
            for index, entry in state["optimizer"]["state"].items():
                for name, value in entry.items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        wide = value.to(torch.promote_types(value.dtype, torch.float32))
                        totals[index, name] = totals[index, name] + wide if (index, name) in totals else wide
                        counts[index, name] = counts.get((index, name), 0) + 1
        merged["fragments"] = [
            {
                **fragment,
                "flight": None,
                "moved": [],
                "steps": None,
                "payload": {
                    "residuals": {name: residuals[name] / num_states for name in fragment["names"] if name in residuals}
                },
            }
            for fragment in merged["fragments"]
        ]
        optimizer_state = merged["optimizer"]["state"]
        for (index, name), total in totals.items():
            entry = optimizer_state.setdefault(index, {})
            dtype = entry[name].dtype if isinstance(entry.get(name), Tensor) else total.dtype
            entry[name] = (total / counts[index, name]).to(dtype)
        return merged


def _recalled(residual: Tensor, change: Tensor, snapshot: Tensor, start: Tensor) -> Tensor:
    """Return a residual without the change that its last message was about, for the weights have that change still.

    In the mean over ranks, of which `change` is: what one rank has taken out of its residual, others put back in.
    """
    return residual + (change - (snapshot.float() - start)).reshape(-1)


class LocalSGDWorker:
    """One rank's side of local SGD for one optimizer; it has a counter of its own.

    In a plain loop, after the backward pass::

        with worker.stepping():
            worker.exchange()
            optimizer.step()

    Attributes:
        method: the configuration; may be replaced between steps, on all ranks alike.
        step: optimizer steps completed (a step that a GradScaler skips counts: skipped on one rank only, it must not
            bring the ranks out of step).
        steps_since_average: local steps since the last average was begun, of any fragment.
        num_averages: averages done, each of a fragment.
        consensus_distance: ``||x_i - mean|| / ||mean||`` at the last average, of large tensors from a sample; a
            scalar tensor, None before it.
        stop_requested: to be set on any rank, to ask all to stop.
        stop_agreed: whether a rank has asked for it, as told by the last average; equal on all ranks.
        save_requested: to be set on any rank, to ask all to save.
        save_agreed: as `stop_agreed`.
        num_samples: seen since the last average; the weight of this rank where `weighs_samples`.
        weighs_samples: whether replicas are weighted by their samples; equal on all ranks.
        num_finished: ranks that are out of data, as told by the last average.
        is_over: whether a rank has come to the end of the training, as told by the last average.
    """

    def __init__(
        self,
        method: LocalSGD,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        exchange: Exchange,
        named_buffers: Mapping[str, Tensor],
    ) -> None:
        self.method = method
        self.optimizer = optimizer
        self.step = 0
        self.steps_since_average = 0
        self.num_averages = 0
        self.consensus_distance: Tensor | None = None
        self.stop_requested = self.stop_agreed = False
        self.save_requested = self.save_agreed = False
        self.num_samples = 0.0
        self.weighs_samples = False
        self.num_finished = 0
        self.is_over = False
        self._exchange = exchange
        self._names = names_of(named_parameters)
        self._buffers = ReplicaBuffers(named_buffers)
        self._local_since: int | None = None  # the step from which on it is local, once that has come
        self._period: Period | None = None
        self._highest_lr = 0.0
        self._step_loss: Tensor | None = None
        self._loss: Tensor | None = None
        self._loss_weight = 0.0
        self._start: dict[Parameter, Tensor] = {}  # the last consensus, where something needs it
        self._velocity: dict[Parameter, Tensor] = {}  # of the outer optimizer
        self._fragments = self._make_fragments()
        self._chosen_delay: int | None = None  # tau, once it has been measured
        self._average_s: dict[int, float] = {}  # by fragment
        self._step_s = self._last_s = 0.0  # of the local steps since the last average; the end of the last one
        self._own: list[Tensor] | None = None  # this rank's tensors, while the consensus is shown
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError("LBFGS evaluates its closure several times per step: use strategy='ddp'.")
        if method.inner_momentum != "local":
            self._moment_names()
        if method.sends_changes and exchange.levels is not None and exchange.levels.peers is None:
            _ = exchange.levels.topology.ranks_per_node  # raises where they differ
            raise ConfigurationError("value_dtype and compression want Hierarchy(algorithm='sharded').")

    # What the strategies ask ------------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """Whether the coming step communicates nothing before the optimizer has stepped."""
        return (
            self._exchange.num_senders > 1
            and not self.method.schedule.is_always_synchronous
            and self._begin is not None
            and self.step >= self._begin
        )

    @property
    def _begin(self) -> int | None:
        begin = self.method.begin_step
        return self._local_since if self._local_since is not None else begin if isinstance(begin, int) else None

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are all-reduced during backward in the coming step, as DDP does."""
        return not self.is_local

    @property
    def reduces_in_node(self) -> bool:
        """Whether gradients are all-reduced inside each node in the coming step: in local ones on two levels."""
        return self.is_local and self._exchange.node is not None and self.method.node_k_steps == 1

    @property
    def clip_factor(self) -> float:
        """1: a rank clips the gradient it steps with."""
        return 1.0

    @property
    def k_steps(self) -> int:
        """The period in use; 1 while synchronous."""
        if not self.is_local:
            return 1
        return (self._period or self.method.schedule.first()).k if self.method.rule != "fixed" else self.method.k_steps

    @property
    def delay_steps(self) -> int:
        """Local steps that hide an average; 0 while "auto" measures."""
        delay = self.method.delay_steps
        return delay if isinstance(delay, int) else self._chosen_delay or 0

    @property
    def parameters_agree(self) -> bool:
        """Whether the parameters are the same on all ranks; known without asking them."""
        return not any(fragment.moved or fragment.flight for fragment in self._fragments)

    @property
    def is_consensus(self) -> bool:
        """Whether there is nothing that `show_consensus` would average. A forward pass moves buffers at any time."""
        return self.parameters_agree and not self._buffers.start

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return what is worth logging; nothing is communicated."""
        shown: dict[str, float | Tensor] = {
            "k_steps": float(self.k_steps),
            "averages": float(self.num_averages),
        }
        if self.method.delay_steps == AUTO:
            shown["delay_steps"] = float(self.delay_steps)
        if self.consensus_distance is not None:
            shown["consensus_distance"] = self.consensus_distance
        return shown

    def check_schedule(self) -> None:
        """Check that it is known when the local phase begins.

        Raises:
            ConfigurationError: on all ranks; a fraction of the run, and nobody has said how long that is.
        """
        if isinstance(self.method.begin_step, float):
            raise ConfigurationError(
                f"begin_step={self.method.begin_step}: how many steps the run has is not known here; give a number "
                "of steps."
            )

    def observe_loss(self, loss: Tensor) -> None:
        """Add to the loss of the coming step, for the adaptive rules; a scalar, any device. Waits for nothing."""
        if self.method.rule in ("fleet", "adacomm"):
            loss = loss.detach().float()
            self._step_loss = loss if self._step_loss is None else self._step_loss + loss

    # One step ---------------------------------------------------------------------------------------------------

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Begin nothing: gradients that are averaged at all are averaged by DDP's hook."""

    @torch.no_grad()
    def exchange(
        self,
        *,
        clip: Callable[[], None] | None = None,
        reduced: Collection[Parameter] = (),
        skip_nonfinite: bool = False,
        num_backwards: int = 0,
    ) -> bool:
        """Make the gradients of a synchronous step the mean over ranks, of a local one the mean over the node.

        In place:
            `.grad` of the optimizer's parameters that are not in `reduced`.

        Collective: all ranks in synchronous steps, those of a node in local ones if there are two levels; one
        all-reduce, blocking. Else a local step communicates nothing.

        Args:
            clip: unused; a synchronous step is clipped after the exchange, a local one by its owner.
            reduced: parameters whose `.grad` is that mean already (by DDP).
            skip_nonfinite: unused; what is not finite is all-reduced as DDP does.
            num_backwards: unused.

        Returns:
            True.
        """
        if self._exchange.num_ranks == 1:
            return True
        mine = [p for p in self._parameters() if p.requires_grad and p not in reduced]
        if self.is_local:
            self.begin_local()
            if self.reduces_in_node and mine:
                assert self._exchange.node is not None
                average_gradients_(mine, [], self._exchange.node, self._device())
            return True
        num_ranks = self._exchange.num_ranks
        lr = self._lr()
        has_decayed = 0.0 < lr < self._highest_lr * (1 - RELATIVE_CHANGE)
        self._highest_lr = max(lr, self._highest_lr)
        flags = [float(self.stop_requested), float(self.save_requested), float(has_decayed)]
        num_stop, num_save, num_decayed = average_gradients_(mine, flags, self._exchange, self._device())
        self._exchange.ledger.dense_bytes += all_reduce_bytes(sum(p.nbytes for p in mine), num_ranks)
        self._agree_on_requests(num_stop, num_save)
        if num_decayed and self.method.begin_step == FIRST_LR_DECAY and self._begin is None:
            self._local_since = self.step + 1  # this step's gradients are the mean already
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose `exchange` and the optimizer's own step; at its end the replicas are averaged, if it is time.

        Collective: all ranks, after every k-th local step.

        Raises:
            NonFiniteGradientError: on all ranks; names the rank and the parameter. Nothing was averaged.
            DisagreementError: on all ranks; they are at different steps.
            ConfigurationError: on all ranks; an adaptive rule has seen no loss, or as `check_schedule`.
        """
        self.check_schedule()
        yield
        self._after_step()

    @torch.no_grad()
    def _after_step(self) -> None:
        was_local = self.is_local
        self._step_s += time.perf_counter() - self._last_s
        self.step += 1
        self._exchange.ledger.steps += 1
        if self._exchange.num_ranks == 1:
            return
        if self._step_loss is not None:
            self._loss = self._step_loss if self._loss is None else LOSS_DECAY * self._loss + self._step_loss
            self._loss_weight = LOSS_DECAY * self._loss_weight + 1.0
            self._step_loss = None
        if not was_local:
            self.num_samples = 0.0
            if self.is_local:
                self._loss, self._loss_weight = None, 0.0
            self.begin_local()
            return
        trained = [p for p in self._parameters() if p.requires_grad]
        nbytes = sum(p.nbytes for p in trained)
        self._exchange.ledger.dense_bytes += all_reduce_bytes(nbytes, self._exchange.num_ranks)
        self.steps_since_average += 1
        self._note_moved(trained)
        for fragment in self._fragments:
            assert fragment.steps is not None
            fragment.steps += 1
            # More than the delay after a resume with a shorter one.
            if fragment.flight is not None and fragment.steps >= self.delay_steps:
                self._land(fragment)
        due = [each for each in self._fragments if (each.steps or 0) >= max(self.k_steps, self.delay_steps + 1)]
        for fragment in due:
            self._average(fragment)
        if not due and self._exchange.node is not None and self.steps_since_average % self.method.node_k_steps == 0:
            self._average_in_node()
        self._last_s = time.perf_counter()

    @torch.no_grad()
    def begin_local(self) -> None:
        """Agree on what the differences to come are measured from, if the coming step is local.

        Collective: all ranks, the first time; a broadcast of the floating buffers. `exchange` does it where nobody
        has.
        """
        if not self.is_local:
            return
        self._local_since = self._begin
        for number, fragment in enumerate(self._fragments):
            if fragment.steps is None:
                fragment.steps = steps_before(number, len(self._fragments), self.k_steps)
                self._step_s, self._last_s = 0.0, time.perf_counter()
        if self._needs_start:
            for parameter in self._parameters():
                if parameter not in self._start:
                    self._start[parameter] = wide(parameter)
        self._buffers.begin(self._exchange)

    # Averaging --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average(self, *, finished: bool = False, over: bool = False) -> None:
        """Average the replicas now: begin it, and without `delay_steps` wait for it.

        Collective: all ranks.

        Wire:
            The parameters trained since the last average and the floating buffers, in float32 (or wider), with 8
            numbers and 2 per rank; integer buffers apart, and what the payload takes of the parameters, with the
            numbers where there is nothing else.

        Args:
            finished: this rank is out of data.
            over: this rank is at the end of the training.

        Raises:
            NonFiniteGradientError, DisagreementError, ConfigurationError: as `stepping`.
        """
        for fragment in self._fragments:
            if fragment.flight is not None:
                self._land(fragment)
            self._average(fragment, finished, over)

    def _average(self, fragment: Fragment, finished: bool = False, over: bool = False) -> None:
        step_s, begun_s = self._step_s / max(self.steps_since_average, 1), time.perf_counter()
        fragment.flight = self._take_off(fragment, finished, over)
        fragment.steps = self.steps_since_average = 0
        fragment.moved.clear()
        self._loss, self._loss_weight, self.num_samples = None, 0.0, 0.0
        if not self.delay_steps:
            self._land(fragment)
            if self.method.delay_steps == AUTO and self._chosen_delay is None:
                self._choose_delay(self._fragments.index(fragment), time.perf_counter() - begun_s, step_s)
        self._step_s, self._last_s = 0.0, time.perf_counter()

    def _choose_delay(self, number: int, average_s: float, step_s: float) -> None:
        """Keep the time of an average; choose tau when each fragment has been timed.

        Collective: all ranks, once; an all-reduce of two numbers.
        """
        self._average_s[number] = average_s
        if min(self.num_averages // TIMED_AVERAGE, len(self._average_s)) < len(self._fragments):
            return
        # The rank that comes last waits for nobody: its time is that of the network. The slowest step is everyone's.
        times = torch.tensor([max(self._average_s.values()), -step_s], device=self._device())
        self._exchange.all_reduce_(times, dist.ReduceOp.MIN)
        average_s, step_s = float(times[0]), -float(times[1])
        self._chosen_delay = hiding_steps(average_s, step_s, self.k_steps)
        if self._exchange.rank == 0:
            _logger.info(
                "An average takes %.3g s, a local step %.3g s: it is hidden behind %d steps.",
                *(average_s, step_s, self._chosen_delay),
            )

    def _average_in_node(self) -> None:
        """Average what has moved over the ranks of the node; with a period of 1 their gradients have been."""
        if self.method.node_k_steps == 1:
            return
        assert self._exchange.node is not None
        (fragment,) = self._fragments
        tensors = [as_real(p.detach()) for p in fragment.moved]
        if fragment.flight is not None:  # the change that it will bring is measured from there
            tensors += fragment.flight.snapshots or []
        tail, weight = torch.zeros(1, device=self._device()), 1.0 / self._exchange.node.num_ranks
        means, _ = MeanInFlight(tensors, tail, weight, self._exchange.node).wait()
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)

    def _take_off(self, fragment: Fragment, finished: bool, over: bool) -> Flight:
        num_ranks, rank = self._exchange.num_ranks, self._exchange.rank
        weight = self.num_samples if self.weighs_samples else 1.0 / num_ranks
        # A rank that is out of data has moved nothing since the last average, and takes part all the same.
        parameters = [
            p
            for p in fragment.parameters
            if p.numel() and (p in fragment.moved or (self.weighs_samples and p.requires_grad))
        ]
        tail = torch.zeros(NUM_SUMS + 2 * num_ranks, dtype=torch.float32, device=self._device())
        if self._loss is not None:
            loss = self._loss / self._loss_weight
            is_positive = torch.isfinite(loss) & (loss > 0)
            tail[NUM_LOSSES] = 1.0
            tail[LOSS] = torch.where(is_positive, loss, float("inf"))
        tail[WEIGHT], tail[LR] = weight, self._lr()
        tail[STOP], tail[SAVE] = float(self.stop_requested), float(self.save_requested)
        tail[FINISHED], tail[OVER] = float(finished), float(over)
        tail[NUM_SUMS + rank] = self._first_fault(parameters)
        tail[NUM_SUMS + num_ranks + rank] = self._mark(parameters)
        moments = self._moments(parameters) if self.method.inner_momentum == "average" else []
        buffer_changes = self._buffers.changes() if fragment.takes_buffers else []
        takes = fragment.payload.takes
        whole = [p for p in parameters if not takes(p)]
        changes = {self._name(p): self._change(p) for p in parameters if takes(p)}
        rest, mean = [*whole, *moments, *buffer_changes], None
        if rest or not changes or not self._sends_changes_only:
            mean = MeanInFlight(rest, tail, weight, self._exchange)
        arrival = fragment.payload.begin(changes, tail if mean is None else None)
        is_hidden = self.delay_steps > 0
        return Flight(
            parameters,
            mean or TailInFlight(arrival),
            arrival,
            moments,
            [wide(p) for p in parameters] if is_hidden else None,
            self._buffers.snapshot() if is_hidden and fragment.takes_buffers else {},
        )

    @property
    def _sends_changes_only(self) -> bool:
        """Whether no fragment has anything that is averaged whole, so that the tail can ride with the changes of each.

        Asked of all together: ranks out of turn shall meet in the same collectives, and be told.
        """
        return not (self.method.inner_momentum == "average" or self._buffers.floating) and all(
            fragment.payload.takes_tail and (fragment.payload.takes(p) or not (p.requires_grad and p.numel()))
            for fragment in self._fragments
            for p in fragment.parameters
        )

    def _change(self, parameter: Parameter) -> Tensor:
        """Return what local steps have made of the last consensus, in whose place a narrow parameter began rounded."""
        return as_real(parameter.detach()).float() - self._start[parameter].to(as_real(parameter).dtype).float()

    def _mark(self, parameters: list[Parameter]) -> Tensor | int:
        """Return a number up to 2^20, which float32 carries exactly: the step, and a checksum of the last consensus."""
        mark = 1 + (0 if self.weighs_samples else self.step) % MARK_MODULUS
        if not self._needs_start:  # the mean makes replicas equal, wherever they have begun
            return mark
        return mark + MARK_MODULUS * (checksum(self._start[p] for p in parameters) % MARK_MODULUS)

    def _land(self, fragment: Fragment) -> None:
        flight = fragment.flight
        assert flight is not None
        fragment.flight = None
        means, tail = flight.mean.wait()
        self._land_means(fragment, flight, means, tail.tolist())

    def _land_means(self, fragment: Fragment, flight: Flight, means: list[Tensor], tail: list[float]) -> None:
        num_ranks = self._exchange.num_ranks
        self._read_tail(tail, flight.parameters, self.step - (fragment.steps or 0))
        if self.weighs_samples:
            if not tail[WEIGHT]:  # nobody has trained since the last average
                return
            for mean in means:
                mean.div_(tail[WEIGHT])
        lr = tail[LR] / num_ranks
        changes, remaining = flight.changes.wait(), iter(means)
        names = {p: self._name(p) for p in flight.parameters}
        of_parameters = [
            self._start[p] + changes[name] if name in changes else next(remaining) for p, name in names.items()
        ]
        self._apply_parameters(flight, of_parameters, lr)
        for moment in flight.moments:
            as_real(moment).copy_(next(remaining))
        if self.method.inner_momentum == "reset":
            for moment in self._moments(flight.parameters):
                moment.zero_()
        if fragment.takes_buffers:
            self._buffers.apply(list(remaining), flight.buffer_snapshots)
            self._buffers.agree_counts(self._exchange)
        if self.method.rule != "fixed":
            if self.method.rule != "qsr" and tail[NUM_LOSSES] < num_ranks and not self.weighs_samples:
                raise ConfigurationError(
                    f"rule={self.method.rule!r} chooses k by the training loss, and there was none: return it from "
                    "training_step, or call worker.observe_loss(loss) in a loop of your own; or use rule='qsr'."
                )
            loss = tail[LOSS] / max(tail[NUM_LOSSES], 1.0)
            self._period = self.method.schedule.next(self._period or self.method.schedule.first(), lr, loss)
        self.num_averages += 1

    def _read_tail(self, tail: list[float], parameters: list[Parameter], begun_at: int) -> None:
        num_ranks = self._exchange.num_ranks
        self._agree_on_requests(tail[STOP], tail[SAVE])
        self.is_over = tail[OVER] > 0
        self.num_finished = round(tail[FINISHED])
        faults = tail[NUM_SUMS : NUM_SUMS + num_ranks]
        marks = [divmod(round(mark) - 1, MARK_MODULUS) for mark in tail[NUM_SUMS + num_ranks :]]
        if len({step for _, step in marks}) > 1:
            raise DisagreementError(
                f"The ranks average after different steps: their counts are, modulo {MARK_MODULUS}, "
                f"{', '.join(f'{step} on rank {rank}' for rank, (_, step) in enumerate(marks))}. Each rank must "
                "take the same optimizer steps."
            )
        if len(set(marks)) > 1:
            raise DisagreementError(
                "The ranks measure their changes from different weights; checksums of these are "
                f"{', '.join(f'{bits} on rank {rank}' for rank, (bits, _) in enumerate(marks))}. Begin with the same "
                "weights on all ranks, also of parameters that are added later."
            )
        for rank, fault in enumerate(faults):
            if fault:
                name = self._name(parameters[round(fault) - 1])
                raise NonFiniteGradientError(
                    f"The local steps of rank {rank} up to step {begun_at} left parameter {name!r} infinite or NaN. "
                    "Nothing was averaged. Lower the learning rate, or clip gradients."
                )

    def _agree_on_requests(self, num_stop: float, num_save: float) -> None:
        self.stop_agreed, self.save_agreed = num_stop > 0, num_save > 0
        if self.save_agreed:
            self.save_requested = False

    def _first_fault(self, parameters: list[Parameter]) -> Tensor:
        """Return the number, from 1, of the first parameter that is not finite; 0 where all are; on the device."""
        fault = torch.zeros((), device=self._device())
        for number, parameter in reversed(list(enumerate(parameters, start=1))):
            if parameter.numel():
                extremes = torch.stack(as_real(parameter.detach()).aminmax())
                fault = torch.where(torch.isfinite(extremes).all(), fault, float(number))
        return fault

    def _apply_parameters(self, flight: Flight, means: list[Tensor], lr: float) -> None:
        distance = torch.zeros((), dtype=torch.float64, device=self._device())
        norm = torch.zeros_like(distance)
        for index, (parameter, mean) in enumerate(zip(flight.parameters, means, strict=True)):
            own = as_real(parameter.detach()) if flight.snapshots is None else flight.snapshots[index]
            stride = max(1, mean.numel() // NUM_SAMPLED)
            sample = mean.reshape(-1)[::stride]
            distance += stride * torch.linalg.vector_norm(own.reshape(-1)[::stride] - sample).double() ** 2
            norm += stride * torch.linalg.vector_norm(sample).double() ** 2
            if self._needs_start:
                start = self._start[parameter]
                if self.method.outer != "none":
                    velocity = self._velocity.setdefault(parameter, torch.zeros_like(start))
                    self.method.outer_optimizer.step_(mean, start, velocity, lr)
                start.copy_(mean)
            if flight.snapshots is None:
                as_real(parameter).copy_(mean)
            elif self.method.mixing is None:
                as_real(parameter).add_((mean - own).to(own.dtype))
            else:
                as_real(parameter).copy_(mean.lerp_(wide(parameter), self.method.mixing))
        self.consensus_distance = (distance / norm).sqrt().float() if flight.parameters else None

    @property
    def _needs_start(self) -> bool:
        return self.method.outer != "none" or self.method.sends_changes

    # Momentum of the inner optimizer ----------------------------------------------------------------------------

    def _moment_names(self) -> tuple[str, ...]:
        if isinstance(self.optimizer, SGD):
            return ("momentum_buffer",)
        if isinstance(self.optimizer, (Adam, AdamW)):
            return ("exp_avg",) if self.method.inner_momentum == "reset" else ("exp_avg", "exp_avg_sq")
        raise ConfigurationError(
            f"inner_momentum={self.method.inner_momentum!r} knows SGD, Adam and AdamW, not "
            f"{type(self.optimizer).__name__}: leave it 'local'."
        )

    def _moments(self, parameters: list[Parameter]) -> list[Tensor]:
        """Return the optimizer's moments in a fixed order; zeros, to be forgotten, for those it does not have yet."""
        return [
            moment if isinstance(moment := self.optimizer.state[p].get(name), Tensor) else torch.zeros_like(p)
            for p in parameters
            for name in self._moment_names()
        ]

    # Looking at the consensus -----------------------------------------------------------------------------------

    def show_consensus(self) -> None:
        """Put the mean of the replicas into the model, until `hide_consensus`. The training does not notice.

        Collective: all ranks, unless they are equal already; blocking.
        """
        if self.is_consensus or self._own is not None:
            return
        with torch.inference_mode(False), torch.no_grad():  # what is made here outlives an evaluation
            self._show_consensus()

    def _show_consensus(self) -> None:
        tensors = self._all_tensors()
        self._own = [tensor.detach().clone() for tensor in tensors]
        unequal: dict[Parameter, None] = {}
        for fragment in self._fragments:
            unequal.update(dict.fromkeys([] if fragment.flight is None else fragment.flight.parameters))
            unequal.update(fragment.moved)
        parameters = list(unequal)
        weight = 1.0 / self._exchange.num_ranks
        tail = torch.zeros(1, device=self._device())
        means, _ = MeanInFlight([*parameters, *self._buffers.changes()], tail, weight, self._exchange).wait()
        for parameter, mean in zip(parameters, means[: len(parameters)], strict=True):
            as_real(parameter).copy_(mean)
        kept = {name: start.clone() for name, start in self._buffers.start.items()}
        self._buffers.apply(means[len(parameters) :], {})
        self._buffers.start = kept
        self._buffers.agree_counts(self._exchange)

    @torch.no_grad()
    def hide_consensus(self) -> None:
        """Put this rank's own parameters and buffers back."""
        if self._own is not None:
            for tensor, own in zip(self._all_tensors(), self._own, strict=True):
                tensor.copy_(own)
            self._own = None

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Show the consensus inside a `with` block, to evaluate or to save it in a loop of one's own."""
        self.show_consensus()
        try:
            yield
        finally:
            self.hide_consensus()

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the consensus in the model: the end of the training.

        Collective: as `show_consensus`.
        """
        self.show_consensus()
        for fragment in self._fragments:
            if fragment.flight is not None:
                self._drop(fragment, fragment.flight)
            fragment.moved.clear()
        self._own = None
        self.steps_since_average = 0

    def _drop(self, fragment: Fragment, flight: Flight) -> None:
        """Let go of an average that nobody waits for any more; what it has taken from residuals goes back there."""
        flight.mean.wait()
        changes = flight.changes.wait()
        if isinstance(fragment.payload, SparseChanges):
            for parameter, snapshot in zip(flight.parameters, flight.snapshots or [], strict=True):
                name = self._name(parameter)
                if name in changes:
                    residual = fragment.payload.residuals[name]
                    fragment.payload.residuals[name] = _recalled(
                        residual, changes[name], snapshot, self._start[parameter]
                    )
        fragment.flight = None

    def _all_tensors(self) -> list[Tensor]:
        return [*self._parameters(), *self._buffers.floating.values(), *self._buffers.counts]

    # State ------------------------------------------------------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Move this rank's own state."""
        for of_parameters in (self._start, self._velocity):
            of_parameters.update({parameter: tensor.to(device) for parameter, tensor in of_parameters.items()})
        self._buffers.start = {name: tensor.to(device) for name, tensor in self._buffers.start.items()}
        for fragment in self._fragments:
            fragment.payload.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: its weights, the optimizer's state, where it is in the interval.

        An average in flight is waited for; nothing is communicated.
        """
        own = {}
        if not self.parameters_agree:
            shown = self._all_tensors() if self._own is None else self._own
            own = {name: tensor.detach().cpu().clone() for name, tensor in zip(self._all_names(), shown, strict=True)}
        return {
            "step": self.step,
            "local_since": self._local_since,
            "steps_since_average": self.steps_since_average,
            "num_averages": self.num_averages,
            "num_samples": self.num_samples,
            "highest_lr": self._highest_lr,
            "period": None if self._period is None else asdict(self._period),
            "loss": None if self._loss is None else self._loss.cpu().clone(),
            "loss_weight": self._loss_weight,
            "own": own,
            "buffers": {name: start.cpu().clone() for name, start in self._buffers.start.items()},
            "start": {self._name(p): start.cpu().clone() for p, start in self._start.items()},
            "velocity": {self._name(p): u.cpu().clone() for p, u in self._velocity.items()},
            "delay": self._chosen_delay,
            "average_s": dict(self._average_s),
            "fragments": [
                {
                    "names": [self._name(p) for p in fragment.parameters],
                    "payload": fragment.payload.state_dict(),
                    "steps": fragment.steps,
                    "moved": [self._name(p) for p in fragment.moved],
                    "flight": None if fragment.flight is None else fragment.flight.state_dict(self._name),
                }
                for fragment in self._fragments
            ],
            "optimizer": _cpu(self.optimizer.state_dict()),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, or `LocalSGD.merge_states`.

        In place:
            The model's parameters and buffers, the optimizer's state.

        Raises:
            ConfigurationError: a tensor is missing in the model, or has another shape; or what the state holds does
                not go with the method.
        """
        device = self._device()
        if len(state["fragments"]) != len(self._fragments):
            raise ConfigurationError(
                f"The checkpoint has been written with num_fragments={len(state['fragments'])}, and this is "
                f"{len(self._fragments)}: go on with as many."
            )
        parameters = {self._name(p): p for p in self._parameters()}
        targets = dict(zip(self._all_names(), self._all_tensors(), strict=True))
        if self._needs_start and state["own"] and not state["start"]:
            raise ConfigurationError(
                "The checkpoint was written between two averages, and not with an outer optimizer, a value_dtype or a "
                "compression, which want to know the last consensus. Resume without these, or from a checkpoint "
                "written after an average."
            )
        for name, own in state["own"].items():
            if name not in targets or targets[name].shape != own.shape:
                raise ConfigurationError(
                    f"The checkpoint has {name!r} of shape {tuple(own.shape)}; this model has not. Resume with the "
                    "model it was written with."
                )
            targets[name].copy_(own)
        for name in ("step", "steps_since_average", "num_averages", "num_samples"):
            setattr(self, name, state[name])
        self._local_since, self._loss_weight = state["local_since"], state["loss_weight"]
        self._highest_lr = state["highest_lr"]
        self._period = None if state["period"] is None else Period(**state["period"])
        self._loss = None if state["loss"] is None else state["loss"].to(device)
        self._chosen_delay, self._average_s = state["delay"], dict(state["average_s"])
        self._buffers.start = {name: start.to(device) for name, start in state["buffers"].items()}
        self._start = {parameters[name]: start.to(device) for name, start in state["start"].items()}
        self._velocity = {parameters[name]: u.to(device) for name, u in state["velocity"].items()}
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.parameters = [parameters[name] for name in saved["names"]]
            self._load_payload(fragment, saved["payload"], parameters)
            fragment.steps = saved["steps"]
            fragment.moved = {parameters[name]: None for name in saved["moved"]}
            fragment.flight = None
            if saved["flight"] is not None:
                fragment.flight = Flight.from_state(saved["flight"], parameters, device)
        self._step_s, self._last_s = 0.0, time.perf_counter()
        self.optimizer.load_state_dict(state["optimizer"])

    def _load_payload(self, fragment: Fragment, state: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> None:
        fragment.payload = self._make_payload(fragment.parameters)
        for name, residual in state.get("residuals", {}).items():
            keeps = isinstance(fragment.payload, SparseChanges) and fragment.payload.takes(parameters[name])
            if not keeps and residual.any():
                compression = self.method.compression
                here = "without compression" if compression is None else f"with min_numel={compression.min_numel}"
                raise ConfigurationError(
                    f"The checkpoint keeps changes of {name!r} ({residual.numel()} elements) that have not been sent, "
                    f"and {here} they never would be. Resume with the compression of that run, or begin a new run with "
                    'the weights alone: model.load_state_dict(torch.load(path)["state_dict"]).'
                )
        fragment.payload.load_state_dict(state)

    # Small things -----------------------------------------------------------------------------------------------

    def _make_fragments(self) -> list[Fragment]:
        parameters, num_fragments = self._parameters(), self.method.num_fragments
        if len(parameters) < num_fragments:
            raise ConfigurationError(
                f"num_fragments={num_fragments}, and the optimizer has {len(parameters)} tensors: give at most as many."
            )
        chosen = balance(self._sent_bytes(parameters), [0] * num_fragments)
        members = [[p for p, of in zip(parameters, chosen, strict=True) if of == i] for i in range(num_fragments)]
        return [Fragment(each, self._make_payload(each), each is members[-1]) for each in members]

    def _make_payload(self, parameters: list[Parameter]) -> Payload:
        return self.method.make_payload({self._name(p): as_real(p).numel() for p in parameters}, self._exchange)

    def _sent_bytes(self, parameters: list[Parameter]) -> list[int]:
        """Return what an average sends of each parameter, in bytes, by the formulas of the flat collectives."""
        num_senders, compression = self._exchange.num_senders, self.method.compression
        takes = self._make_payload([]).takes
        return [
            all_gather_bytes(compression.nbytes([as_real(p).numel()]), num_senders)
            if compression is not None and takes(p)
            else all_reduce_bytes(as_real(p).numel() * wide_dtype(p).itemsize, num_senders)
            for p in parameters
        ]

    def _note_moved(self, trained: list[Parameter]) -> None:
        """Note that parameters have been trained; new ones join the fragment that sends least."""
        owner = {p: fragment for fragment in self._fragments for p in fragment.parameters}
        new = [p for p in self._parameters() if p not in owner]
        loads = [sum(self._sent_bytes(fragment.parameters)) for fragment in self._fragments] if new else []
        for parameter, number in zip(new, balance(self._sent_bytes(new), loads), strict=True):
            self._fragments[number].parameters.append(parameter)
            owner[parameter] = self._fragments[number]
        for parameter in trained:
            owner[parameter].moved[parameter] = None

    def _parameters(self) -> list[Parameter]:
        """Return all parameters of the optimizer, also frozen ones; once each, in order."""
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def _name(self, parameter: Parameter) -> str:
        if parameter not in self._names:  # not in the module: a loss's own parameter, say
            self._names[parameter] = f"optimizer.{next(i for i, p in enumerate(self._parameters()) if p is parameter)}"
        return self._names[parameter]

    def _all_names(self) -> list[str]:
        counts = [f"count.{index}" for index in range(len(self._buffers.counts))]
        return [*(self._name(p) for p in self._parameters()), *self._buffers.floating, *counts]

    def _device(self) -> torch.device:
        return self._parameters()[0].device

    def _lr(self) -> float:
        return max((float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group), default=1.0)


def _cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _cpu(item) for key, item in value.items()}
    return [_cpu(item) for item in value] if isinstance(value, list) else value
