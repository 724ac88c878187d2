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
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.engine import state
from lightning_lowbw.engine.checks import check_replaced, check_two_levels
from lightning_lowbw.engine.faults import gradient_fault
from lightning_lowbw.engine.late_faults import check_late_faults
from lightning_lowbw.engine.narrow_exchange import NarrowExchange
from lightning_lowbw.engine.same_training import agree_on_end
from lightning_lowbw.engine.slots import (
    Slot,
    by_group,
    list_slots,
    numels_by_kind,
    sparse_of,
)
from lightning_lowbw.engine.sparse_exchange import SparseExchange
from lightning_lowbw.engine.sparse_gradients import SparseGradients
from lightning_lowbw.engine.unsent import apply_unsent
from lightning_lowbw.engine.velocities import Velocities
from lightning_lowbw.engine.whole_gradients import agree_on_step
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.ops.layout import Order
from lightning_lowbw.ops.reference import are_not_finite
from lightning_lowbw.what.adam import correction_for
from lightning_lowbw.what.payloads import Narrow, Whole
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.mean import average_gradients_
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.method import Method


class GradientWorker(Worker):
    """One rank's exchange of gradients for one optimizer; see `Worker` for a step.

    Attributes:
        by_clipping: whether the gradients of this step are exchanged before it, to be clipped by hand.
        last_density: the fraction of elements that the last step sent of a sparse tensor; 1.0 in the dense phase.
        sparse_gradients: the sparse tensors of the step in progress; None unless the payload is `TopK`.
        orders: the order of a parameter's elements in its residual, by name.
        fault: after `check_gradients`, the number of this rank's first fault, 0 if there is none, as returned by
            `gradient_fault`; a scalar. May be overwritten before `exchange` with the fault of another shard. None if
            nothing was checked.
    """

    is_local = False

    def __init__(
        self, method: Method, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]], peers: Peers
    ) -> None:
        super().__init__(method, optimizer, named_parameters, peers)
        assert isinstance(method.when, EveryStep)
        what = method.what
        self.last_density, self.by_clipping = 1.0, False
        self._last_residual_norm: float | None = None
        self._slots: list[Slot] = []  # of the step in progress
        self.fault: Tensor | None = None
        self.orders: dict[str, Order] = {}
        self.correction = correction_for(
            optimizer, what.correction if isinstance(what, TopK) else "error_feedback", peers.num_participants
        )
        if not method.when.is_auto:  # with "auto" nothing is corrected yet, and perhaps never
            self.correction.check()
        if not isinstance(what, Whole):
            peers.check_parts()
        self.velocities = Velocities(self.correction, peers)
        self.sparse_gradients: SparseGradients | None = None
        if isinstance(what, Narrow):
            self.narrow = NarrowExchange(what.value_dtype, peers)
        if isinstance(what, TopK):
            if peers.is_two_level:
                check_two_levels(what)
            what.check_names(self._names.values())
            self.sparse = SparseExchange(what, peers)
            self.narrow = None if what.dense_dtype == "float32" else NarrowExchange(what.dense_dtype, peers)
            self.sparse_gradients = SparseGradients(self.sparse, self.correction, self.velocities, peers, self.found)

    # Read by the strategies -----------------------------------------------------------------------------------------

    @property
    def when(self) -> EveryStep:
        """The schedule."""
        assert isinstance(self.method.when, EveryStep)
        return self.method.when

    @property
    def density(self) -> float:
        """The fraction of elements that the coming step sends of a sparse tensor; 1.0 in the dense phase."""
        if self.sparse is None or self.peers.num_participants == 1:
            return 1.0
        assert isinstance(self.method.what, TopK)
        return self.when.density(self.step, self.method.what.density)

    @property
    def is_sparse(self) -> bool:
        """Whether the coming step is a sparse one."""
        return self.density < 1.0

    @property
    def reduces_in_backward(self) -> bool:
        """Whether the coming step is a dense one, whose gradients are all-reduced during backward, as DDP does."""
        if isinstance(self.method.what, Narrow) and self.peers.num_participants > 1:
            return self.step < self.when.rampup_begin_step
        return not self.is_sparse

    @property
    def reduces_in_node(self) -> bool:
        """Whether the coming step's gradients are all-reduced inside each node: on two levels, in sparse steps."""
        return self.peers.is_two_level and not self.reduces_in_backward

    @property
    def clips_before_exchange(self) -> bool:
        """Whether each rank clips its own gradient: in sparse steps, because delayed sums must not be clipped."""
        return self.is_sparse

    @property
    def clip_factor(self) -> float:
        """sqrt(N) while sparse: the norm of a mean of N independent gradients is 1/sqrt(N) of theirs (eq. 8)."""
        return math.sqrt(self.peers.num_participants) if self.is_sparse else 1.0

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return the fraction of elements that the last step sent and, in sparse steps, the norm of the residual."""
        sparse, others = numels_by_kind(self, self.method.what) if isinstance(self.method.what, TopK) else ([], [])
        share = sum(sparse) / max(1, sum(sparse) + sum(others))
        shown: dict[str, float | Tensor] = {"density": 1.0 - share * (1.0 - self.last_density)}
        if self.has_residuals and (is_due or self._last_residual_norm is None):
            self._last_residual_norm = self.residual_norm()
        if self._last_residual_norm is not None:
            shown["residual_norm"] = self._last_residual_norm
        return shown

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """v of this rank's part of each tensor that has been sparse, by name; float32, flat."""
        return {} if self.sparse is None else self.sparse.residuals

    @property
    def has_residuals(self) -> bool:
        """Whether anything has been kept back."""
        return bool(self.residuals) or bool(self.narrow is not None and self.narrow.residuals)

    def keeps(self, name: str) -> bool:
        """Whether anything of a parameter has been kept back."""
        return name in self.residuals or (self.narrow is not None and name in self.narrow.residuals)

    def residual_norm(self) -> float:
        """Return the 2-norm of what this rank has not sent yet; reads all residuals."""
        exchange = self.sparse or self.narrow
        return 0.0 if exchange is None else exchange.residuals.norm()

    def check_schedule(self) -> None:
        """Check that the coming step is not dense after sparse ones, which leave velocities that differ by rank.

        Raises:
            ConfigurationError: on all ranks.
        """
        if self.has_residuals and self.peers.num_participants > 1 and self.reduces_in_backward:
            raise ConfigurationError(
                f"Step {self.step} would be dense, but gradients that earlier sparse steps did not send are kept. Go "
                f"on with the schedule it was trained with; now it is {self.method.when}. (sparsity='auto' begins "
                "dense: give the numbers of that run, such as DGCStrategy(sparsity=[0.999]), once the default. A "
                "SparsityWarmup in epochs moves when the number of batches changes: give it in steps.) Or "
                f"{WITHOUT_RESIDUALS}."
            )

    # One step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def list_gradients(self, *, reduced: Collection[Parameter] = (), by_clipping: bool = False) -> None:
        self.is_prepared, self.by_clipping = True, by_clipping
        self._slots, self.fault = [], None
        self._take_back()  # an exchange that failed
        if self.peers.num_ranks == 1:
            return
        reduced = frozenset(reduced)
        self._list_slots(reduced if self.reduces_in_backward else frozenset())
        if self.reduces_in_node:
            others = [slot.parameter for slot in self._slots if slot.parameter not in reduced]
            if others:
                average_gradients_(others, [], self.peers.node, others[0].device)

    @torch.no_grad()
    def check_gradients(self) -> None:
        if not self._slots:
            return
        self.fault = gradient_fault(self, self._slots)
        for slot in self._slots:
            if slot.is_missing:  # a sparse tensor, which is refused
                slot.parameter.grad = None

    @torch.no_grad()
    def exchange(self, *, skip_nonfinite: bool = False, applies: bool = False) -> bool:
        """Replace this rank's gradients by those the optimizer is to step with.

        In the dense phase: the mean over ranks, for parameters not in `list_gradients`' `reduced`. Then: the method.

        In place:
            `.grad` of the optimizer's parameters, the momentum buffers, the residuals. In the sparse phase momentum
            and weight decay of SGD's param groups are 0, and Adam leaves sparse tensors alone, until `after_step`.
            With `applies` sparse parameters are stepped, including AdamW's decay.

        Collective: all ranks; one all-reduce, in the sparse phase one all-gather after it (an all-to-all and an
        all-gather, or another all-reduce, where the payload's `exchange` says so); blocking. On two levels the ranks of
        a node gather the messages after that. Values in few bits add an all-to-all and an all-gather.

        Wire:
            Dense: the tensors with fewer than `min_numel` elements, one number per parameter and two per rank.
            Sparse: `TopK.nbytes` of each rank's parts.

        Args:
            skip_nonfinite: return False if a gradient has an inf or NaN, instead of raising.
            applies: step sparse tensors here, at the elements that were sent, if the optimizer would do nothing else
                with them: then no dense gradient is made, and `.grad` is None afterwards.

        Returns:
            Whether the step is to be taken; equal on all ranks. If False, nothing has changed.

        Raises:
            NonFiniteGradientError: on all ranks; names the rank and the parameter.
            DisagreementError: on all ranks; they are at different steps, or their weights differ.
            ConfigurationError: on all ranks; sparse gradients, or a schedule that goes back to dense.
        """
        if not self.is_prepared:
            self.list_gradients()
        if skip_nonfinite and self.fault is None:
            self.check_gradients()
        self.is_prepared = False  # also where this one fails
        self.is_taken = self._exchange_slots(skip_nonfinite, applies)
        self.is_exchanged = True
        return self.is_taken

    def _exchange_slots(self, skip_nonfinite: bool, applies: bool) -> bool:
        if self.fault is None:
            if self.sparse_gradients is not None:
                self.sparse_gradients.compress_unchecked(self._slots, self.density)
            self.check_gradients()  # the others; these have been checked
        if self._slots:
            whole = [slot for slot in self._slots if not slot.is_sparse and not self._is_narrow]
            stepped = agree_on_step(self, self._slots, whole, skip_nonfinite=skip_nonfinite)
            if stepped is None:
                return False
            self._slots = stepped
            if self.is_sparse:
                self.correction.take_over([slot.parameter for slot in sparse_of(stepped)])
        if self.peers.num_participants == 1:
            if self.has_residuals:
                return apply_unsent(self, skip_nonfinite=skip_nonfinite)
            if skip_nonfinite and self.peers.num_ranks == 1:  # else `agree_on_step` has looked
                gradients = [p.grad for p in self.parameters() if p.grad is not None]
                return not any(are_not_finite([g._values() if g.is_sparse else g for g in gradients]))
            return True
        if self.narrow is not None and self._is_narrow:
            self.narrow.average_gradients_([slot for slot in self._slots if not slot.is_sparse])
        if self.sparse_gradients is not None and self.is_sparse:
            for group, parameters in by_group(slot for slot in self._slots if not slot.is_sparse):
                self.correction.correct_dense(parameters, group)
            self.sparse_gradients.average(self._slots, self.density, self.step, applies=applies)
        return True

    def finish(self) -> None:
        """Check, after the last step, what the next one would: faults of the last exchange, steps and weights.

        Methods that average weights average them here.

        Collective: all ranks, blocking.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; as `engine.late_faults.check_late_faults`.
            DisagreementError: on all ranks; a rank has other weights, or has counted other steps. (A step that one rank
                takes meanwhile would meet these messages with its own: torch then ends the process.)
        """
        check_late_faults(self)
        agree_on_end(self)

    def after_step(self) -> None:
        self.give_back()
        self.torn, self.last_density = "", self.density
        self.step += 1
        self.peers.ledger.steps += 1

    def give_back(self) -> None:
        self.correction.give_back()
        self._slots, self.fault = [], None
        if self._take_back():
            self.torn = f"the exchange of gradients after step {self.step}"

    def _take_back(self) -> bool:
        """End a step; return whether gradients were accumulated in it that have not been averaged."""
        self.found.now.clear()
        return self.sparse_gradients is not None and self.sparse_gradients.take_back()

    # The tensors of a step ------------------------------------------------------------------------------------------

    @property
    def _is_narrow(self) -> bool:
        """Whether tensors of the coming step that are not sparse are sent in few bits."""
        return self.narrow is not None and not self.reduces_in_backward

    def _list_slots(self, skipped: Collection[Parameter]) -> None:
        """List the parameters of this step; the same on all ranks, whatever gradients they happen to have."""
        what, is_sparse = self.method.what, self.is_sparse
        if not self.when.is_auto:
            self.correction.check()
        check_replaced(what, self._made_for)
        self.check_schedule()
        if self.sparse is not None:
            assert isinstance(what, TopK)
            self.sparse.payload = what
        if isinstance(what, Narrow):
            assert self.narrow is not None
            self.narrow.value_dtype = what.value_dtype
        self._slots = list_slots(self, what if is_sparse and isinstance(what, TopK) else None, skipped)

    # State ----------------------------------------------------------------------------------------------------------

    def whole_momentum(self) -> dict[Parameter, Tensor]:
        """Return the whole velocities that this node keeps in parts; empty on one level.

        Collective: the ranks of a node, blocking.
        """
        return self.velocities.whole()

    def to(self, device: torch.device) -> None:
        for own in (self.sparse, self.narrow, self.velocities):
            if own is not None:
                own.to(device)

    def state_dict(self) -> dict[str, Any]:
        return state.of_gradients(self)

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over a `state_dict`; the optimizer's own state must have been loaded before.

        Raises:
            ConfigurationError: it has tensors this optimizer does not have, or of another shape, or was made with
                another correction.
        """
        state.load_gradients(self, values)
