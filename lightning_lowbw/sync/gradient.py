"""Every step: gradients are exchanged before the optimizer's step. With TopK this is deep gradient compression.

Source: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", arXiv 1712.01887.

One step of one rank, with G its own mean gradient as torch gives it (not divided by the number of participants N):

    clip      G to the norm  threshold * sqrt(N)                       (eq. 8, for undivided gradients)
    decay     g = G + c (w - lr v): decay of the weight after the residual has been applied
    correct   u = m u + g;  v = v + u                                  (eq. 7)
    select    the k largest |v| of each tensor
    mask      v = u = 0 there                                          (eq. 9)
    average   the gradient is 1/N times the sum of all sent elements
    step      w = w - lr average: plain SGD, because momentum and decay are done

Deviation: PaddlePaddle Fleet (eq. 12) adds c w to G. Then the same decay is added again in each step until the element
is sent, about 1/density steps later; that may diverge.

u is the optimizer's own `momentum_buffer`; v, the residual, is the only state that is added. On two levels N counts
nodes, G is the node's mean gradient, and each rank exchanges its part of u and v with the ranks that keep this part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.peers import Peers, average_gradients_
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError, DisagreementError, NonFiniteGradientError
from lightning_lowbw.kernels.reference import are_not_finite
from lightning_lowbw.kernels.tensors import norm_of, part
from lightning_lowbw.payloads.corrections import ErrorFeedback, correction_for
from lightning_lowbw.payloads.exchange import Arrived, DenseMean, Faulty, Pending, Prepared
from lightning_lowbw.payloads.params import Row, gradients_of
from lightning_lowbw.payloads.whole import WholeExchange
from lightning_lowbw.sync.checks import agree_on_end, compare_batches
from lightning_lowbw.sync.early import Sent, groups_of, watching
from lightning_lowbw.sync.status import (
    Fault,
    Faults,
    Status,
    changed_gradient,
    first_fault,
    flags_of_node,
    make_mark,
    nonfinite_gradient,
    overflow,
    sparse_gradient,
    status_message,
)
from lightning_lowbw.sync.step_plan import StepPlan
from lightning_lowbw.sync.synchronizer import Configuration, Synchronizer
from lightning_lowbw.sync.table import Table

CHECK_EVERY_STEPS = 100  # compare the replicas; a pass over the weights, no extra message


class GradientSync(Synchronizer):
    """One rank's exchange of gradients for one optimizer; see `Synchronizer` for a step.

    Attributes:
        last_density: the fraction of elements that the last step sent of a compressed tensor; 1.0 in the dense phase.
        plan: the plan of the coming step, made when the step before it ends.
        correction: how a gradient enters the residual, and the work that is left to the optimizer.
        table: the tensors as they lie in memory.
        compared: all parameters of the model. Every `CHECK_EVERY_STEPS` steps the ranks compare a checksum of the
            trained parameters, also of another optimizer or of none. () in a plain loop, which compares its own.
    """

    correction: ErrorFeedback
    plan = StepPlan()

    def __init__(
        self,
        method: Configuration,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
    ) -> None:
        super().__init__(method, optimizer, named_parameters, peers)
        what = method.what
        self.last_density = 1.0
        self.compared: Collection[Parameter] = ()
        self._last_residual_norm: float | None = None
        self._has_compressed = False  # whether a step since the last load was compressed; equal on all ranks
        # Gradients in several messages: the rows of each message, and the messages that have been sent. The last one
        # has the status.
        self._groups: list[list[Row]] = []
        self._sent: list[Sent] = []
        self._is_grouped_late = False  # after the hooks of the backward pass, which may change the rows
        self._faults, self._checked = Faults(), set[str]()  # names of tensors whose gradients have been checked
        self.correction = correction_for(
            optimizer, peers.num_participants, corrects=what.corrects, keeps_parts=peers.is_two_level
        )
        self.table = Table(self.params, self.correction, self.compressed, peers)
        if not method.when.is_auto:  # with "auto" nothing is corrected yet, and perhaps never
            self.correction.check()
        self.use(method)

    # Read by the strategies -----------------------------------------------------------------------------------------

    def use(self, method: Configuration) -> None:
        super().use(method)
        self.plan = self._make_plan()

    def _make_plan(self) -> StepPlan:
        num, when = self.peers.num_participants, self.method.when
        takes_one = self.compressed is not None and num > 1 and not when.is_auto
        density = when.density(self.step, otherwise=0.0)
        if self.compressed is None or num == 1 or density == 1.0:
            return StepPlan(takes_one_gradient=takes_one)
        density = density or self.method.what.density
        return StepPlan(
            reduce="node" if self.peers.is_two_level else "none",
            density=density,
            clips_before_exchange=density < 1.0,
            clip_factor=math.sqrt(num) if density < 1.0 else 1.0,
            takes_one_gradient=takes_one,
        )

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return the fraction of elements that the last step sent and, in sparse steps, the norm of the residual."""
        sparse, others = self.params.numels_by_kind(self.method.what)
        share = sum(sparse) / max(1, sum(sparse) + sum(others))
        shown = {**super().metrics(is_due), "density": 1.0 - share * (1.0 - self.last_density)}
        if self.compressed is not None and self.residuals and (is_due or self._last_residual_norm is None):
            self._last_residual_norm = self.compressed.residuals.norm()
        if self._last_residual_norm is not None:
            shown["residual_norm"] = self._last_residual_norm
        return shown

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """v of this rank's part of each tensor that has been compressed, by name; float32, flat."""
        return self.table.residuals

    def begin(self) -> None:
        """Check that the coming step is not dense after compressed ones, and the options of the optimizer.

        Raises:
            ConfigurationError: on all ranks.
        """
        if self.plan.takes_one_gradient:
            self.correction.check()
        if self.peers.num_participants == 1 and self.residuals:
            raise ConfigurationError(
                "The checkpoint keeps gradients that were not sent, and a single participant sends nothing. Resume on "
                f"at least two {'nodes' if self.peers.num_ranks > 1 else 'ranks'}, or {WITHOUT_RESIDUALS}."
            )
        if self.plan.reduce == "all" and self.residuals:
            raise ConfigurationError(
                f"Step {self.step} would be dense, but gradients that earlier sparse steps did not send are kept. Go "
                f"on with the schedule it was trained with; now it is {self.method.when}. (sparsity='auto' begins "
                "dense: give the numbers of that run, such as DGCStrategy(sparsity=[0.999]), once the default. A "
                "SparsityWarmup in epochs moves when the number of batches changes: give it in steps.) Or "
                f"{WITHOUT_RESIDUALS}."
            )

    # One step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _list_gradients(self, reduced: Collection[Parameter]) -> None:
        self.is_prepared, self._is_checked = True, False
        self._faults, self._checked = self._late_faults(), set()
        self.begin()
        if self.peers.num_ranks == 1:
            return
        what, reduced = self.method.what, frozenset(reduced)
        skipped = reduced if self.plan.reduce == "all" else frozenset()
        self.table.list_rows(None if self.plan.reduce == "all" else what, skipped, self.step)
        if self.plan.reduce == "node":
            others = [row.parameter for row in self.table.rows if row.parameter not in reduced]
            if others:
                average_gradients_(others, self.peers.node, others[0].device)
        if self.skip_norm is not None and self.table.rows:  # before clipping
            is_large = norm_of(self.params, self.params.device) > self.skip_norm
            self._faults.add(is_large, [""], lambda _: Fault(5, NonFiniteGradientError, "", is_skipped=True))

    @contextmanager
    def sending_early(self, *, begins: bool) -> Iterator[None]:
        what = self.method.what
        is_grouped = what.can_be_early and self.plan.reduce == "none"
        self._is_grouped_late = is_grouped and not begins
        if is_grouped and begins:
            self._list_gradients(())
            self._groups = self._in_groups() if self._is_compressed else []
        with watching(self._groups[:-1], self._send):
            yield

    def _in_groups(self) -> list[list[Row]]:
        """Return the rows that are compressed in the order in which their gradients are made, if in several groups."""
        place = {name: -number for number, name in enumerate(self.params.names())}
        rows = sorted(self.table.filled, key=lambda row: place[row.name])
        groups = groups_of([row.parameter.numel() for row in rows])
        return [rows[group] for group in groups] if len(groups) > 1 else []

    def _send(self, rows: Sequence[Row]) -> None:
        """Send a group, whose gradients are there."""
        assert self.compressed is not None
        with part("send early"):
            prepared = self.compressed.prepare(self.table.signal(rows))
            pending = prepared.send()
        self._note(prepared.faults)
        gradients = zip([row.name for row in rows], gradients_of(rows), strict=True)
        self._sent.append(Sent(pending, {name: (each, each._version) for name, each in gradients}))

    @torch.no_grad()
    def _check_gradients(self) -> None:
        if self.table.rows:
            self._refuse_sparse_layouts()
            self._check_values()

    def _check_values(self) -> None:
        gathered = self.table.gathered
        if gathered is not None and not self._checked.issuperset(gathered.names):
            self._note((gathered.names, gathered.flags))
        rows = [row for row in self.table.rows if row.name not in self._checked]
        unchecked = [(row.name, each) for row in rows if (each := row.parameter.grad) is not None]
        if unchecked:
            names, gradients = zip(*unchecked, strict=True)
            self._note((names, are_not_finite(gradients)))
        self._fault = self._faults.any(self.table.rows[0].parameter.device)

    def _refuse_sparse_layouts(self) -> None:
        for row in self.table.rows:
            if row.parameter.grad is not None and row.parameter.grad.layout != torch.strided:
                row.parameter.grad = None  # clipping would fail on this rank alone
                self._faults.add(torch.ones((), dtype=torch.bool), [row.name], partial(sparse_gradient, self._here))

    def _note(self, found: Faulty | None) -> None:
        """Note whether gradients of this step, or sums with their residuals, have an inf or NaN."""
        if found is not None:
            # Clipping spreads an inf to all tensors: whose it was is known already.
            are_known = self._checked.union(self.table.missing).issuperset(found[0])
            self._checked.update(found[0])
            self._faults.add(found[1], found[0], self._too_large if are_known else self._nonfinite)

    @torch.no_grad()
    def _exchange(self, skip_nonfinite: bool, applies: bool) -> bool:
        """Replace this rank's gradients by the gradients that the optimizer steps with; see `exchange`.

        In place:
            `.grad`, the optimizer's states, the residuals; with `applies` the weights, whose `.grad` is None then.

        Collective: all ranks, blocking. In the dense phase one all-reduce. Else the messages of the payload: the first
        one has the status and the tensors that are sent whole. With `skip_nonfinite` an all-reduce comes first.

        Raises:
            NonFiniteGradientError, DisagreementError, ConfigurationError: on all ranks.
        """
        table = self.table
        if not table.rows:
            may_skip = skip_nonfinite and self.peers.num_participants == 1
            return not may_skip or bool(norm_of(self.params, self.params.device).isfinite())
        # clip: the caller has, by `clip_factor`
        if self._fault is None:
            self._refuse_sparse_layouts()
        # begin: decay, correct, select, mask: in one pass, which finds inf and NaN, too, if nobody has looked for them.
        # A step that may be skipped agrees first: its gradients must not enter the residuals.
        is_compressed = self._is_compressed
        agrees_first = skip_nonfinite or not is_compressed
        prepared = self._prepare_nothing() if agrees_first else self._prepare(tells=self._node_flags is None)
        whole = table.whole(gathers=not agrees_first)
        if self._fault is None:
            self._check_values()
        pending = prepared.send(self._message(), whole)
        # end: 1/N of the sum over the participants; no weight changes before the status has been read
        mean, numbers, means = self._wait_for([*(sent.pending for sent in self._sent), pending])
        status = Status.read(numbers.tolist(), self.peers.num_ranks)
        self.requests.agree_on(status.requests)
        if not self._is_agreed(status, skip_nonfinite):
            return False
        if is_compressed and agrees_first:
            mean = self._prepare(tells=False).send().wait().mean
        # Parameters that no rank has used are not stepped, as in DDP; the other ones have zeros where this rank has no
        # gradient.
        unused = {row.name for row, number in zip(table.rows, status.sums, strict=True) if not round(number)}
        table.write_whole_(means, unused)
        if is_compressed:
            with part("apply"):
                table.apply_(mean, unused, applies=applies)
        return True

    def _prepare_nothing(self) -> Prepared:
        """Prepare a message of the status and the whole tensors."""
        dtype = None if self.plan.is_sparse else self.peers.inter_dtype
        return WholeExchange(self.peers, dtype=dtype).prepare({})

    def _wait_for(self, pendings: Sequence[Pending]) -> Arrived:
        """Wait for the messages of a step: earlier ones from the backward pass, and the last one with the status."""
        if len(pendings) == 1:
            return pendings[0].wait()
        exchange, means, faults = self.compressed, dict[str, Tensor](), list[Tensor]()
        assert exchange is not None
        for pending in pendings:
            pending.answer()
        for pending in pendings:
            exchange.fault = None
            means |= pending.wait().mean.dense()
            faults += [] if exchange.fault is None else [exchange.fault]
        exchange.fault = torch.stack(faults).any() if faults else None
        return pendings[-1].wait()._replace(mean=DenseMean(means))

    @property
    def _is_compressed(self) -> bool:
        """Whether the coming step compresses gradients: their message has the status and the whole tensors."""
        return self.plan.reduce != "all" and self.compressed is not None and bool(self.table.filled)

    def _is_agreed(self, status: Status, skip_nonfinite: bool) -> bool:
        """Return whether the step is to be taken: all ranks are at one batch with one set of weights, without a fault.

        Collective: all ranks, where there is a fault.
        """
        if status.is_faulty and self._node_flags is not None:  # the fault may be that the node's batches differ
            compare_batches(self.batch, self.step, self._fault_group)
        counts, checksums = status.differences() if len({*status.marks}) > 1 else ("", "")
        if counts:
            compare_batches(self.batch, self.step, self._fault_group)
        if checksums:
            raise DisagreementError(
                f"Step {self.step}: the weights differ between the ranks, or one has left out a step; checksums are "
                f"{checksums}. Begin with the same weights on all ranks, and take the same steps; change no weights "
                "by a rank's data or gradients, as SAM by hand and Embedding(max_norm=...) do; return an optimizer for "
                "each parameter that is trained, from configure_optimizers."
            )
        if status.is_faulty:
            fault = first_fault(self._faults.first([row.name for row in self.table.rows]), self._fault_group)
            if skip_nonfinite and fault.is_skipped:
                return False
            raise fault.error(fault.text)
        return True

    def _message(self) -> Tensor:
        """Return this rank's status."""
        assert self._fault is not None
        peers, fault, rows, missing = self.peers, self._fault, self.table.rows, self.table.missing
        parameters = [row.parameter for row in rows]
        peers.count_dense(sum([parameter.nbytes for parameter in parameters]))
        # A rank may have left out what DDP has reduced up to now.
        begins = self.plan.reduce != "all" and not self._has_compressed
        compares = begins or self.step % CHECK_EVERY_STEPS == 0
        weights = None
        if compares:
            weights = dict.fromkeys([*parameters, *(p for p in self.compared if p.requires_grad)])
        requests: Tensor | int = self.requests.asked
        if self._node_flags is not None:
            found, differ, requests = flags_of_node(self._node_flags)
            fault = found + differ
        mark = make_mark(self.batch, weights, requests)
        are_used = [p.grad is not None and row.name not in missing for row, p in zip(rows, parameters, strict=True)]
        return status_message(are_used, fault, mark, peers.rank, peers.num_ranks, fault.device)

    def _prepare(self, *, tells: bool) -> Prepared:
        """Prepare the gradients that are compressed; zeros where this rank has none, because another rank may have one.

        In place:
            Residuals and velocities; inf and NaN do not enter them, the faults say where there are any. `.grad`.

        Args:
            tells: whether the coming status tells these faults; else the status of the next step.
        """
        what, exchange, table, fields = self.method.what, self.compressed, self.table, None
        assert exchange is not None
        rows = table.filled
        table.fill_missing_()
        if self._is_grouped_late:
            self._groups = self._in_groups()
        self._is_grouped_late = False
        if self._groups:
            if changed := [name for sent in self._sent for name in sent.changed(rows)]:
                self._faults.add(
                    torch.ones(len(changed), dtype=torch.bool), changed, partial(changed_gradient, self._here)
                )
            for group in self._groups[len(self._sent) : -1]:
                self._send(group)
            rows = self._groups[-1]
        exchange.payload = what.at(self.plan.density)
        if what.corrects:
            fields = self.correction.fields(table.compressed, self.peers.part, exchange.payload)
        with part("prepare"):
            prepared = exchange.prepare(table.signal(rows), fields)
        # A copy: the next step writes its own faults into these flags before this one is read.
        exchange.fault = None if tells or prepared.faults is None else prepared.faults[1].any()
        if tells:
            self._note(prepared.faults)
            self._fault = None
        return prepared

    @torch.no_grad()
    def step_exchanged(self) -> None:
        self.table.step_exchanged()

    # Checks and faults ----------------------------------------------------------------------------------------------

    def _nonfinite(self, name: str) -> Fault:
        # In a sparse step the pass that adds gradients to the residuals has found it.
        is_added = self.plan.is_sparse and any(row.name == name for row in self.table.compressed)
        has_warm_up = self.method.when.begin_step > 0 or len(self.method.when.stairs) > 1
        return nonfinite_gradient(self._here, self.step, name, is_added=is_added, has_warm_up=has_warm_up)

    def _too_large(self, name: str) -> Fault:
        return overflow(5, self.step, f"the gradient of {name!r} on {self._here}, added to the residual,")

    # The end of a step, and of the training -------------------------------------------------------------------------

    def finish(self) -> None:
        """Check, after the last step, what the next one would: faults of the last exchange, steps and weights.

        Methods that average weights average them here.

        Collective: all ranks, blocking.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; as `check_late_faults`.
            DisagreementError: on all ranks; a rank has other weights, or has counted other steps. (A step that one rank
                takes meanwhile would meet these messages with its own: torch then ends the process.)
        """
        self.check_late_faults()
        agree_on_end(self.step, self.params.by_name(), self.peers.group)

    def _end_step(self) -> None:
        self.table.end_step()
        self._groups, self._sent = [], []
        self._fault, self._faults = None, Faults()  # these hold this object
        self._has_compressed |= self.plan.reduce != "all"
        self.last_density = self.plan.density
        self.step += 1
        self.plan = self._make_plan()
        self.peers.ledger.steps += 1

    # State ----------------------------------------------------------------------------------------------------------

    def to(self, device: torch.device) -> None:
        self.table.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: the values that differ between ranks, and the step."""
        values = {"step": self.step, "small_numel": self.params.small_numel}
        return {**values, **self.table.state_dict(self.method.what)}

    @torch.no_grad()
    def _load_own(self, state: Mapping[str, Any]) -> None:
        self.table.check_state(state, self.method.what)
        self.table.load_state_dict(state)
        self._has_compressed = False
