"""Deep gradient compression: every step, the k largest elements of each tensor, between all ranks.

Source: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", arXiv 1712.01887; weight-decay correction after PaddlePaddle Fleet.

One step of one rank, with G its own mean gradient as torch gives it (not divided by the number of ranks N):

    clip      G to the norm  threshold * sqrt(N)                       (eq. 8, for undivided gradients)
    decay     g = G + c w                                              (eq. 12)
    correct   u = m u + g;  v = v + u                                  (eq. 7)
    select    the k largest |v| of each tensor
    mask      v = u = 0 there                                          (eq. 9)
    average   the gradient is 1/N times the sum of what all ranks sent
    step      plain SGD, for momentum and decay are done

u is the optimizer's own `momentum_buffer`; v, the residual, is the only state that is added.

On two levels a node is what a rank is here: N counts nodes, and G is the mean gradient of the node, which its ranks
agree on in the backward pass. u and v are kept, corrected and searched in parts, one per rank of the node; they tell
each other what each has found, so that the node sends the k largest of the whole tensor.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad
from torch.optim import LBFGS, Optimizer

from lightning_lowbw.arguments import names_of
from lightning_lowbw.errors import ConfigurationError, DisagreementError, NonFiniteGradientError
from lightning_lowbw.ops import gpu
from lightning_lowbw.ops.reference import Segment, as_real, flat, remove_sent_, scatter_mean_
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.corrections import FrozenVariance, as_correction, correction_for
from lightning_lowbw.what.positions import MAX_NUMEL
from lightning_lowbw.what.selection import SELECTIONS, Selector, make_selector, num_selected
from lightning_lowbw.what.sparse_sum import Sparse
from lightning_lowbw.what.values import FLOAT_NAMES, VALUE_NAMES
from lightning_lowbw.when.every_step import SparsitySchedule
from lightning_lowbw.where.agreement import checksum
from lightning_lowbw.where.collectives import Exchange, Gathering
from lightning_lowbw.where.link import EXCHANGES, Link, choose
from lightning_lowbw.where.mean import MeanInFlight, average_gradients_, narrow_mean, wide_dtype
from lightning_lowbw.where.probe import measure_link
from lightning_lowbw.where.reduce_scatter import SparseReduceScatter
from lightning_lowbw.where.volume import all_reduce_bytes

CHECK_EVERY_STEPS = 100  # compare the replicas; a pass over the weights, no extra message
MARK_MODULUS = 1 << 10

_logger = logging.getLogger("lightning.pytorch.lightning_lowbw")  # is shown where Lightning's are


@dataclass(frozen=True, kw_only=True)
class DGC:
    """Deep gradient compression, as a value.

    Args:
        rampup_begin_step: optimizer steps before the first sparse one; until then the exchange is that of DDP.
        rampup_step: optimizer steps over which the stairs of `sparsity` are spread.
        sparsity: the fraction of elements kept back, one value per stair, each in [0, 1).
        momentum_masking: whether the velocity of sent elements is cleared (momentum factor masking). None: for SGD, as
            in the paper, for Adam only with a frozen variance (docs/methods/dgc.md has what it costs and saves).
        min_numel: tensors with fewer elements are sent dense, all of them fused into one all-reduce.
        exclude: names of parameters that are always sent dense; shell patterns such as ``"*.bias"``.
        selection: "sampled" (a threshold finds the candidates) or "exact" (sorts); both send the k largest.
        value_dtype: "float32", "bfloat16", "float16", "int8", "int4" or "int2", for the values on the wire; what is
            rounded away is sent later.
        exchange: how the selected elements are summed. "all_gather": every rank gets those of all, (N-1) k elements.
            "reduce_scatter": below 6 k elements whatever N is; where the ranks' selections differ much, some of the
            sums wait at the rank that owns them. "dense": an all-reduce of whole tensors, for low sparsities. "auto"
            takes the cheapest by the volume formulas and, where these do not tell, by a short measurement of the link;
            rank 0 says which. On two levels it is the all-gather.
        dense_dtype: "float32", or "bfloat16" or "float16": what the small tensors are sent in, in the sparse phase;
            what is rounded away is sent later. Half the bytes, in two collectives of their own.
        overlap: whether sparse tensors are selected and sent during backward, as their gradients are there, instead
            of after it; where the exchange is the all-gather. Not with clipping, nor on two levels.
        correction: "auto" takes what `what.corrections` has for the optimizer: momentum correction for SGD, the same on
            what Adam makes of a rank's gradient for Adam and AdamW, and error feedback for others. "frozen_variance",
            for Adam and AdamW, divides by the second moment that a dense phase has left; a `FrozenVariance`, or a
            mapping of its arguments, says when that ends and whether it is refreshed. "error_feedback" is for any.

    Raises:
        ConfigurationError: a value is out of range.

    Example:
        >>> DGC(sparsity=[0.75, 0.999], rampup_step=100).schedule.density(50)
        0.0010000000000000009
    """

    rampup_begin_step: int = 0
    rampup_step: int = 1
    sparsity: Sequence[float] = (0.999,)
    momentum_masking: bool | None = None
    min_numel: int = 16384
    exclude: Sequence[str] = ()
    selection: str = "sampled"
    value_dtype: str = "bfloat16"
    exchange: str = "auto"
    dense_dtype: str = "float32"
    overlap: bool = False
    correction: str | FrozenVariance = "auto"
    schedule: SparsitySchedule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        schedule = SparsitySchedule(self.rampup_begin_step, self.rampup_step, self.sparsity)  # type: ignore[arg-type]
        object.__setattr__(self, "schedule", schedule)
        object.__setattr__(self, "sparsity", schedule.sparsity)
        is_list = isinstance(self.exclude, Sequence) and not isinstance(self.exclude, str)
        if not is_list or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigurationError(f"exclude={self.exclude!r}: give a list of parameter name patterns.")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        object.__setattr__(self, "correction", as_correction(self.correction))
        allowed_exchanges = ("auto", *EXCHANGES)
        for name, allowed in (
            ("selection", SELECTIONS),
            ("value_dtype", VALUE_NAMES),
            ("exchange", allowed_exchanges),
            ("dense_dtype", FLOAT_NAMES),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int) or self.min_numel < 1:
            raise ConfigurationError(f"min_numel={self.min_numel!r}: give a number of elements, an integer >= 1.")
        for name, allowed_flags in (("momentum_masking", (True, False, None)), ("overlap", (True, False))):
            if not any(getattr(self, name) is each for each in allowed_flags):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}: give {', '.join(map(repr, allowed_flags[:-1]))} or "
                    f"{allowed_flags[-1]!r}."
                )

    @property
    def codec(self) -> SparseCodec:
        """The wire format."""
        return SparseCodec(self.value_dtype)

    def describe(self) -> dict[str, object]:
        """Return the configuration as plain values."""
        values = asdict(self)
        del values["schedule"]
        return {"method": "dgc", **values}

    def attach(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        exchange: Exchange | None = None,
    ) -> DGCWorker:
        """Return this rank's worker for an optimizer.

        Args:
            optimizer: any torch optimizer but LBFGS; `torch.optim.SGD`, `Adam` and `AdamW` get corrections of their
                own, others error feedback.
            named_parameters: of the whole model; names key the state and select the excluded ones.
            exchange: the process group; by default the world.

        Raises:
            ConfigurationError: the optimizer cannot be corrected (SGD with dampening, LBFGS), or a pattern of
                `exclude` matches no parameter.
        """
        return DGCWorker(self, optimizer, named_parameters, exchange or Exchange())

    def merge_states(self, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the mean of the ranks' states: with it any number of ranks holds the same unsent gradient.

        The update is 1/N sum v_k: mean over the old ranks (nodes, on two levels), given to each of the new ones, leaves
        it as it was. Reads one state at a time.
        """
        merged: dict[str, Any] = {}
        dtypes: dict[tuple[str, str], torch.dtype] = {}
        num_states, num_places = 0, 1
        for state in states:
            num_states += 1
            place, num_places = state.get("place", (0, 1))
            if not merged:
                merged = {"step": state["step"], "tensors": {name: {} for name in state["tensors"]}}
                merged |= {"rounded": {}, "local": {}, "num_senders": state.get("num_senders", 1)}
                merged.update({key: state[key] for key in ("correction",) if key in state})
            for name, entry in state["tensors"].items():
                shape = entry.get("shape", entry["residual"].shape)
                part = _part(math.prod(shape), place, num_places)
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        dtypes[name, key] = value.dtype
                        wide = torch.promote_types(value.dtype, torch.float32)
                        total = merged["tensors"][name].setdefault(key, torch.zeros(shape, dtype=wide))
                        total.view(-1)[part] += flat(value).to(wide)
            for name, rounded in state.get("rounded", {}).items():
                merged["rounded"][name] = merged["rounded"].get(name, 0.0) + rounded
            for name, tensors in state.get("local", {}).items():
                for key, value in tensors.items():
                    of_tensor = merged["local"].setdefault(name, {})
                    of_tensor[key] = of_tensor.get(key, 0.0) + value
        for tensors in merged["local"].values():
            tensors.update({key: total / num_states for key, total in tensors.items()})
        for name, total in merged["rounded"].items():
            merged["rounded"][name] = total * (num_places / num_states)
        for (name, key), dtype in dtypes.items():
            merged["tensors"][name][key] = merged["tensors"][name][key].mul_(num_places / num_states).to(dtype)
        return merged


@dataclass(frozen=True)
class Slot:
    """A parameter in this step: its name, its param group, and k (None where it is sent dense)."""

    name: str
    parameter: Parameter
    group: dict[str, Any]
    k: int | None

    @property
    def num_selected(self) -> int:
        """K, of a parameter that is sent sparse."""
        assert self.k is not None
        return self.k


class DGCWorker:
    """One rank's side of deep gradient compression for one optimizer.

    A step has four phases; the first and third are this rank's own, between them stand the two collectives. They are
    `prepare_dense` - all-reduce (sum) - `finish_dense` - `prepare_sparse` - all-gather - `finish_sparse`, in that
    order because the first also carries the ranks' word that their gradients are finite: nothing enters a residual
    before. `exchange` connects them to a process group; a simulator may connect them to lists.

    Attributes:
        method: the configuration; may be replaced between steps, on all ranks alike.
        step: optimizer steps completed (a step that a GradScaler skips counts, as in `trainer.global_step`).
        residuals: v of each parameter that has been sparse; float32, the parameter's shape. On two levels this rank's
            part of it, flat.
        last_density: the fraction of elements that the last step sent of a sparse tensor; 1.0 in the dense phase.
    """

    def __init__(
        self,
        method: DGC,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        exchange: Exchange,
    ) -> None:
        self.method = method
        self.optimizer = optimizer
        self.step = 0
        self.last_density = 1.0
        self._last_residual_norm: float | None = None
        self.residuals: dict[Parameter, Tensor] = {}
        self._velocities: dict[Parameter, Tensor] = {}  # u, where this rank keeps a part of it
        self._place = (0, 1)  # of this rank among those of its node that share the work
        if exchange.levels is not None:
            if exchange.levels.peers is None:
                _ = exchange.levels.topology.ranks_per_node  # raises where they differ
                raise ConfigurationError("DGC on two levels wants Hierarchy(algorithm='sharded').")
            self._place = exchange.levels.place, exchange.levels.node.num_ranks
            given = {"exchange": method.exchange, "overlap": method.overlap}
            for name, allowed in (("exchange", ("auto", "all_gather")), ("overlap", (False,))):
                if given[name] not in allowed:
                    raise ConfigurationError(
                        f"{name}={given[name]!r} on two levels: allowed there is {' or '.join(map(repr, allowed))}."
                    )
        self._exchange = exchange
        self._names = names_of(named_parameters)
        self._selectors: dict[tuple[Parameter, str], Selector] = {}
        self._workspaces: dict[tuple[str, ...], gpu.Workspace] = {}  # by the tensors that are compressed together
        self._link: Link | None = None
        self._reducer = SparseReduceScatter(exchange, method.codec)
        self._last_exchange = ""
        self._rounded: dict[Parameter, Tensor] = {}  # what a narrow dense_dtype has kept back
        self._slots: list[Slot] = []  # of the step in progress
        self._begun: list[tuple[list[Slot], Gathering]] = []  # during backward: what waits for the messages
        self._looked_at: dict[Parameter, Tensor] = {}  # then, and whether its gradient is finite
        self._correction = correction_for(optimizer, method.correction, exchange.num_senders)
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates its closure several times per step, which needs whole gradients: use strategy='ddp'."
            )
        self._correction.check()
        for pattern in method.exclude:
            if not any(fnmatchcase(name, pattern) for name in self._names.values()):
                raise ConfigurationError(
                    f"exclude={list(method.exclude)}: {pattern!r} matches no parameter of the model; they are named "
                    f"{', '.join(list(self._names.values())[:8])}, ..."
                )
        is_asked_for = method.correction == "error_feedback"
        if not (self._correction.is_complete or is_asked_for) and exchange.num_senders > 1 and exchange.rank == 0:
            warnings.warn(
                f"{type(optimizer).__name__}: gradients are compressed with error feedback only. What is kept back "
                "reaches this optimizer late and in bursts, which costs some accuracy for Adam-type optimizers; a "
                "dense phase (rampup_begin_step > 0) helps. torch.optim.SGD, Adam and AdamW have corrections.",
                stacklevel=3,
            )

    # What the strategies ask ------------------------------------------------------------------------------------

    @property
    def velocity_key(self) -> str | None:
        """The name of u in the optimizer's state; None under error feedback."""
        return self._correction.velocity_key

    @property
    def is_sparse(self) -> bool:
        """Whether the coming step is a sparse one."""
        return self.density < 1.0

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are all-reduced during backward in the coming step, as DDP does."""
        return not self.is_sparse

    @property
    def reduces_in_node(self) -> bool:
        """Whether the coming step's gradients are all-reduced inside each node: in sparse steps on two levels."""
        return self.is_sparse and self._exchange.levels is not None

    @property
    def is_local(self) -> bool:
        """Whether the coming step communicates nothing before the optimizer has stepped: never."""
        return False

    @property
    def clip_factor(self) -> float:
        """sqrt(N) while sparse: the norm of a mean of N independent gradients is 1/sqrt(N) of theirs (eq. 8)."""
        return math.sqrt(self._exchange.num_senders) if self.is_sparse else 1.0

    @property
    def density(self) -> float:
        """The fraction of elements that the coming step sends of a sparse tensor; 1.0 in the dense phase."""
        if self._exchange.num_senders == 1:
            return 1.0
        return self.method.schedule.density(self.step, self._correction.begin_step)

    @property
    def earliest_step(self) -> float:
        """The first step that may be sparse, as far as it is known."""
        return max(self.method.schedule.rampup_begin_step, self._correction.earliest_step)

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return the density of the last step and, from the first sparse step on, the norm of the residual."""
        shown: dict[str, float | Tensor] = {"density": self.last_density}
        if self.residuals and (is_due or self._last_residual_norm is None):
            self._last_residual_norm = self.residual_norm()
        if self._last_residual_norm is not None:
            shown["residual_norm"] = self._last_residual_norm
        return shown

    def residual_norm(self) -> float:
        """Return the 2-norm of what this rank has not sent yet; reads all residuals."""
        return math.sqrt(sum(float(residual.norm()) ** 2 for residual in self.residuals.values()))

    def check_schedule(self) -> None:
        """Check that the coming step is not dense after sparse ones, which leave velocities that differ by rank.

        Raises:
            ConfigurationError: on all ranks; also where the step is sparse and wants a dense one before it.
        """
        if self.is_sparse and self.method.rampup_begin_step == 0:  # else a tensor that is not ready is sent dense
            self._correction.check_dense_phase()
        if self.residuals and self._exchange.num_senders > 1 and not self.is_sparse:
            raise ConfigurationError(
                f"Step {self.step} would be dense, but gradients that earlier sparse steps did not send are kept. Go "
                f"on with the schedule and the correction it was trained with; now it is {self.method.schedule}, "
                f"correction={self.method.correction!r}. (A SparsityWarmup in epochs moves when the number of batches "
                "changes: give it in steps.)"
            )

    # One step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(
        self,
        *,
        clip: Callable[[], None] | None = None,
        reduced: Collection[Parameter] = (),
        skip_nonfinite: bool = False,
        num_backwards: int = 0,
    ) -> bool:
        """Replace this rank's gradients by those the optimizer is to step with.

        In the dense phase: the mean over ranks, for parameters not in `reduced`. In the sparse phase: the method.

        In place:
            `.grad` of the optimizer's parameters, the momentum buffers, the residuals. In the sparse phase momentum
            and weight decay of SGD's param groups are 0, and Adam leaves sparse tensors alone, until `stepping` ends.

        Collective: all ranks; one all-reduce, in the sparse phase one all-gather after it (an all-to-all and an
        all-gather, or another all-reduce, where `exchange` says so); blocking. On two levels the ranks of a node gather
        what each has found between the two. A narrow `dense_dtype` adds an all-to-all and an all-gather, a refresh of
        a frozen variance an all-reduce.

        Wire:
            Dense: the tensors with fewer than `min_numel` elements, one number per parameter and two per rank; where a
            frozen variance is refreshed the sparse tensors, too.
            Sparse: `SparseCodec.nbytes`; on two levels from each node; with `overlap` of each call of `begin`.

        Args:
            clip: clips `.grad` in place; called before anything is sent between ranks, on two levels between nodes.
            reduced: parameters whose `.grad` is the mean already (by DDP): over all ranks in the dense phase, over the
                node in the sparse phase on two levels; else not regarded.
            skip_nonfinite: return False where a gradient is not finite, instead of raising; not with `overlap`.
            num_backwards: counted by the caller; ranks that call this after different numbers of backward passes, for
                one has skipped a step that the others take, are found out.

        Returns:
            Whether the step is to be taken; False on all ranks or on none. Nothing was committed then.

        Raises:
            NonFiniteGradientError: on all ranks; names the rank and the parameter.
            DisagreementError: on all ranks; they are at different steps, or their weights differ.
            ConfigurationError: on all ranks; sparse gradients, or a schedule that goes back to dense.
        """
        if self._begun and (clip is not None or skip_nonfinite):
            raise ConfigurationError(
                "overlap=True: the gradients have been sent during backward, which clipping would have to precede, and "
                "which a step that is skipped (skip_nonfinite) cannot take back. Leave out one of them."
            )
        if self._exchange.num_ranks > 1:
            self._begin(reduced)
            if self._slots and not self._exchange_slots(clip, reduced, skip_nonfinite, num_backwards):
                return False
        return self._exchange.num_senders > 1 or not self.residuals or self._apply_residuals(skip_nonfinite)

    @torch.no_grad()
    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Begin the exchange of gradients that the backward pass has completed; nothing where `overlap` is off.

        Nothing in a step that refreshes a frozen variance, too, for then the mean gradient comes first.

        In place:
            The residuals and velocities of the sparse tensors among them. A gradient that is not finite enters none;
            `exchange` tells the other ranks, and raises.

        Collective: all ranks, with the same parameters in the same order of calls; waits for none of them.

        Raises:
            ConfigurationError: a second backward pass before the step; the first one's elements are sent already.
        """
        if not self.method.overlap or not self.is_sparse or self._correction.is_refresh(self.step):
            return
        if not self._begun:
            self._begin(())
        if self._choose_exchange() != "all_gather":
            return
        given = set(parameters)
        slots = [slot for slot in self._sparse_slots() if slot.parameter in given]
        if self._begun_parameters() & given:
            raise ConfigurationError(
                f"overlap=True: a second backward pass before step {self.step}, whose gradients have been sent during "
                "the first. Let Trainer(accumulate_grad_batches=...) accumulate, or set overlap=False."
            )
        for slot in slots:
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
        if slots:
            self._begun.append((slots, self._exchange.begin_all_gather(self.prepare_sparse(slots))))

    def _begun_parameters(self) -> set[Parameter]:
        return {slot.parameter for slots, _ in self._begun for slot in slots}

    def _exchange_slots(
        self,
        clip: Callable[[], None] | None,
        reduced: Collection[Parameter],
        skip_nonfinite: bool,
        num_backwards: int,
    ) -> bool:
        exchange = self._exchange
        dense_bytes = sum(slot.parameter.nbytes for slot in self._slots)
        exchange.ledger.dense_bytes += all_reduce_bytes(dense_bytes, exchange.num_ranks)
        if self.reduces_in_node:
            assert exchange.node is not None
            others = [slot.parameter for slot in self._slots if slot.parameter not in reduced]
            if others:
                average_gradients_(others, [], exchange.node, others[0].device)
        message = self.prepare_dense(clip, num_backwards)
        exchange.all_reduce_(message)
        if not self.finish_dense(message, skip_nonfinite=skip_nonfinite):
            return False
        if self._is_narrow:
            self._average_narrow()
        self._correct_dense_slots()
        begun = self._begun_parameters()
        slots = [slot for slot in self._sparse_slots() if slot.parameter not in begun]
        if slots:
            if self._correction.is_refresh(self.step):
                self._refresh(slots)
            kind = self._choose_exchange()
            if kind == "all_gather":
                self.finish_sparse(list(exchange.gather_from_senders(self.prepare_sparse(slots))), slots)
            elif kind == "reduce_scatter":
                self._reduce_scatter(slots)
            else:
                self._all_reduce_selected(slots)
        with exchange.ledger.waiting(self._slots[0].parameter.device):
            messages = [list(gathering.wait()) for _, gathering in self._begun]
        for (slots, _), of_slots in zip(self._begun, messages, strict=True):
            self.finish_sparse(of_slots, slots)
        return True

    def _refresh(self, slots: Sequence[Slot]) -> None:
        """Give the correction the mean gradients of sparse tensors, whose own gradients stay.

        Collective: all ranks, with the same slots; an all-reduce of whole tensors.
        """
        gradients = [slot.parameter.grad for slot in slots if slot.parameter.grad is not None]
        tail = torch.zeros(1, device=gradients[0].device)
        means, _ = MeanInFlight(gradients, tail, 1.0 / self._exchange.num_ranks, self._exchange).wait()
        for slot, mean in zip(slots, means, strict=True):
            factor = self._correction.refresh(slot.parameter, slot.group, mean)
            self._velocity(slot.parameter).mul_(factor)
        self._correction.end_refresh(self.step)

    def _choose_exchange(self) -> str:
        """Return one of `EXCHANGES`, the same on all ranks; say which where it has changed.

        Collective: all ranks, where the link has to be measured.
        """
        kind = "all_gather" if self._exchange.levels is not None else self.method.exchange
        if kind == "auto":
            counts, numels = _sizes(self._sparse_slots())
            bits = 8 * self.method.codec.nbytes(counts, numels) / sum(counts)
            num_ranks = self._exchange.num_ranks
            choice = choose(numels, self.density, num_ranks, bits, self._link or Link(0.0, 1.0))
            if self._link is None and choice.name != "all_gather":  # which has the fewest rounds; else latency counts
                self._link = measure_link(self._exchange.group, self._slots[0].parameter.device)
                choice = choose(numels, self.density, num_ranks, bits, self._link)
            kind = choice.name
            if kind != self._last_exchange and self._link is not None and self._exchange.rank == 0:
                _logger.info("Step %d, density %.4g: %s.", self.step, self.density, choice)
        self._last_exchange = kind
        return kind

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose `exchange` and the optimizer's own step: counts it, and gives the user's values back after it.

        Collective: all ranks, at the end of some dense steps, where the correction waits for a stable variance: an
        all-reduce of one number.
        """
        try:
            yield
        finally:
            self._correction.give_back()
            self._slots, self._begun = [], []
            self._looked_at.clear()
        self.last_density = self.density
        self.step += 1
        self._exchange.ledger.steps += 1
        self._look_at_stability()

    def _look_at_stability(self) -> None:
        """End a dense phase that has been waiting for the correction, on all ranks or on none."""
        if self._exchange.num_senders == 1:
            return
        candidates = (
            (parameter, group)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if self._may_compress(parameter)
        )
        stability = self._correction.stability(self.step, candidates)
        if stability is None:
            return
        device = next(p.device for group in self.optimizer.param_groups for p in group["params"])
        least = torch.tensor(stability, device=device)
        self._exchange.all_reduce_(least, dist.ReduceOp.MIN)
        is_over = self._correction.is_stable(float(least)) and self.step >= self.method.rampup_begin_step
        if is_over:
            self._correction.begin_step = self.step
        if self._exchange.rank == 0:
            goes_on = "the sparse phase begins" if is_over else "the dense phase goes on"
            _logger.info("Step %d, stability of the variance %.3f: %s.", self.step, float(least), goes_on)

    @torch.no_grad()
    def prepare_dense(self, clip: Callable[[], None] | None = None, num_backwards: int = 0) -> Tensor:
        """Return what is summed over the ranks: 1/N times [dense gradients | used by parameter | fault, mark by rank].

        The dense gradients are not in it where `dense_dtype` sends them by themselves. "used" counts the ranks on
        which a parameter has a gradient: one that nobody used is left alone, as in DDP. "fault" is 1 + the number of
        the first parameter whose gradient is not finite, negative for one that is not dense, else 0. "mark" is the
        same on all ranks that are at the same step and, looked at now and then, have the same weights.

        Returns:
            float32 (or wider, if a dense tensor is); shape (dense elements + parameters + 2 ranks,).
        """
        # Before clipping: a NaN in one tensor makes the total norm NaN, and then every tensor.
        fault = self._first_fault(self._slots)
        if clip is not None and not any(_is_sparse_layout(slot.parameter.grad) for slot in self._slots):
            clip()
        dtype, parts = torch.float32, []
        for slot in self._slots if not self._is_narrow else ():
            if slot.k is None:
                gradient = slot.parameter.grad
                if gradient is None or _is_sparse_layout(gradient):
                    gradient = torch.zeros_like(slot.parameter)
                parts.append(flat(as_real(gradient)))
                dtype = torch.promote_types(dtype, parts[-1].dtype)
        used = [float(slot.parameter.grad is not None) for slot in self._slots]
        num_ranks, own = self._exchange.num_ranks, len(used) + self._exchange.rank
        tail = torch.tensor(used + [0.0] * (2 * num_ranks), dtype=dtype, device=fault.device)
        tail[own], tail[own + num_ranks] = fault, self._mark(num_backwards)
        return torch.cat([*(part.to(dtype) for part in parts), tail]).mul_(1.0 / num_ranks)

    @torch.no_grad()
    def finish_dense(self, mean: Tensor, *, skip_nonfinite: bool = False) -> bool:
        """Take in the sum of all ranks' `prepare_dense`; see `exchange` for what is returned and raised."""
        num_ranks, num_slots = self._exchange.num_ranks, len(self._slots)
        tail = (mean[-(num_slots + 2 * num_ranks) :] * num_ranks).round().tolist()  # the step's one wait for a GPU
        used, faults, marks = tail[:num_slots], tail[num_slots:-num_ranks], tail[-num_ranks:]
        if len(set(marks)) > 1:
            raise DisagreementError(
                f"Step {self.step}: the ranks have come here after different numbers of backward passes, or their "
                f"weights differ (marks {[int(mark) for mark in marks]}). In the sparse phase .grad is a rank's own "
                "until the exchange: decide nothing by it, such as skipping a step, that the other ranks may decide "
                "otherwise; and change weights on all ranks alike."
            )
        for rank, fault in enumerate(faults):
            if fault:
                self._refuse(int(fault), rank, skip_nonfinite)
                return False
        offset, kept, begun = 0, [], self._begun_parameters()
        for slot, num_users in zip(self._slots, used, strict=True):
            numel = as_real(slot.parameter).numel() if slot.k is None and not self._is_narrow else 0
            if num_users or slot.parameter in begun:
                if slot.parameter.grad is None:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
                if numel:
                    target = as_real(slot.parameter.grad)
                    target.copy_(mean[offset : offset + numel].view(target.shape))
                kept.append(slot)
            offset += numel
        self._slots = kept
        if self.is_sparse:
            self._correction.take_over([slot.parameter for slot in kept if slot.k is not None])
        return True

    @property
    def _is_narrow(self) -> bool:
        """Whether the small tensors of this step are sent in a half type."""
        return self.is_sparse and self.method.dense_dtype != "float32"

    def _average_narrow(self) -> None:
        """Average the dense gradients in a half type; what is rounded away is added to the next ones."""
        slots = [slot for slot in self._slots if slot.k is None and slot.parameter.numel() > 0]
        if not slots:
            return
        parts = []
        for slot in slots:
            assert slot.parameter.grad is not None
            parts.append(flat(as_real(slot.parameter.grad)).to(wide_dtype(slot.parameter)))
            if slot.parameter in self._rounded:
                parts[-1] = parts[-1] + self._rounded[slot.parameter]
        dtype: torch.dtype = getattr(torch, self.method.dense_dtype)
        mean, unsent = narrow_mean(torch.cat(parts), dtype, self._exchange)
        sizes = [part.numel() for part in parts]
        for slot, own_mean, rounded in zip(slots, mean.split(sizes), unsent.split(sizes), strict=True):
            self._rounded[slot.parameter] = rounded.clone()
            assert slot.parameter.grad is not None
            target = as_real(slot.parameter.grad)
            target.copy_(own_mean.view(target.shape))

    def _correct_dense_slots(self) -> None:
        if self.is_sparse:
            for slot in self._slots:
                if slot.k is None:
                    self._correction.correct_dense(slot.parameter, slot.group)

    @torch.no_grad()
    def prepare_sparse(self, slots: Sequence[Slot] | None = None) -> Tensor:
        """Correct, select and mask sparse tensors (all of them by default); what is rounded away is kept.

        Collective: on two levels, the ranks of a node.

        Returns:
            This rank's message, on two levels that of the node: uint8, the same size on all ranks.
        """
        slots, codec = self._sparse_slots() if slots is None else slots, self.method.codec
        parts = self._take(slots)
        counts, numels = _sizes(slots)
        message = codec.encode(parts, numels)
        if codec.value_dtype != "float32":
            sent = codec.decode_values(message, counts, numels)
            for slot, (indices, values), rounded in zip(slots, parts, sent, strict=True):
                mine, local = self._mine(slot, indices)
                self.residuals[slot.parameter].view(-1).index_add_(0, local, (values - rounded)[mine])
        return message

    def _take(self, slots: Sequence[Slot]) -> list[Sparse]:
        """Correct, select and mask; return what was selected of each tensor, with exact values."""
        if self._exchange.levels is not None:
            return self.choose(list(self._exchange.levels.node.all_gather(self.prepare_candidates(slots))), slots)
        if self.method.overlap and self._first_fault(slots):  # nobody has told that all are finite: send nothing
            return [_nothing(slot) for slot in slots]
        segments = [self._segment(slot) for slot in slots]
        if self._has_kernels(segments):
            masking, counts = self._masks, [segment.k for segment in segments]
            workspace = self._workspaces.setdefault(tuple(slot.name for slot in slots), gpu.Workspace())
            positions, values = gpu.compress_many_(
                segments, value_dtype=torch.float32, masking=masking, workspace=workspace
            )
            for slot, segment in zip(slots, segments, strict=True):
                self._keep_velocity(slot, segment)
            return list(zip(positions.split(counts), values.split(counts), strict=True))
        parts = []
        for slot, segment in zip(slots, segments, strict=True):
            indices = self._select(slot, segment)
            parts.append((indices, segment.residual[indices]))
            self._remove(slot, *parts[-1])
        return parts

    def _remove(self, slot: Slot, indices: Tensor, values: Tensor) -> None:
        """Mask elements of this rank's part, which have these values, in u and v."""
        has_momentum = self._correction.constants(slot.parameter, slot.group).momentum != 0
        velocity = self._velocity(slot.parameter) if has_momentum else None
        remove_sent_(self.residuals[slot.parameter], velocity, indices, values, masking=self._masks)

    @property
    def _masks(self) -> bool:
        """Whether velocities are cleared where they have been sent."""
        wanted = self.method.momentum_masking
        return self._correction.masks if wanted is None else wanted

    def _has_kernels(self, segments: Sequence[Segment]) -> bool:
        return (
            self.method.selection == "sampled"
            and all(segment.scale is None for segment in segments)  # which they do not know of
            and gpu.is_available(segments[0].residual.device)
            and all(tensor.dtype in gpu.DTYPES for segment in segments for tensor in segment.tensors)
        )

    def _reduce_scatter(self, slots: Sequence[Slot]) -> None:
        """Sum at the owners; what does not fit or is rounded away goes back into the residuals."""
        counts, numels = _sizes(slots)
        self._reducer.codec = self.method.codec
        averaged = self._reducer.average(self._take(slots), numels, counts)
        for slot, (indices, values) in zip(slots, averaged.unsent, strict=True):
            self.residuals[slot.parameter].view(-1).index_add_(0, indices, values)
        self._write_gradients([[mean] for mean in averaged.means], slots)

    def _all_reduce_selected(self, slots: Sequence[Slot]) -> None:
        """Sum the same elements in dense tensors."""
        _, numels = _sizes(slots)
        message = torch.zeros(sum(numels), device=slots[0].parameter.device)
        for mean, (indices, values) in zip(message.split(numels), self._take(slots), strict=True):
            mean[indices] = values * (1.0 / self._exchange.num_ranks)
        self._exchange.all_reduce_(message)
        for slot, mean in zip(slots, message.split(numels), strict=True):
            self._set_gradient(slot, mean)

    def _sparse_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.k is not None]

    def _mine(self, slot: Slot, indices: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Return which positions are in this rank's part, and where in it."""
        if self._place[1] == 1:
            return slice(None), indices
        own = self._own_part(slot.parameter)
        mine = (indices >= own.start) & (indices < own.stop)
        return mine, indices[mine] - own.start

    @torch.no_grad()
    def prepare_candidates(self, slots: Sequence[Slot]) -> Tensor:
        """Correct this rank's part of sparse tensors; return the elements of it that the node may have to send.

        These are the k largest of the part, for all of the tensor's k largest may be in it.

        Returns:
            A message for the ranks of the node: uint8, the same size on all of them.
        """
        indices, values = [], []
        for slot in slots:
            segment = self._segment(slot)
            found = self._select(slot, segment)
            padding = (0, self._num_candidates(slot, 0) - found.numel())
            indices.append(pad(found.to(torch.int32), padding))
            values.append(pad(segment.residual[found], padding))
        return torch.cat([*indices, *(each.view(torch.int32) for each in values)]).view(torch.uint8)

    @torch.no_grad()
    def choose(self, messages: Sequence[Tensor], slots: Sequence[Slot]) -> list[Sparse]:
        """Choose the k largest of each tensor among the candidates of the node's ranks; mask them in this rank's part.

        Returns:
            What the node sends of each tensor, with exact values: the same bits on all of its ranks.
        """
        longest = [self._num_candidates(slot, 0) for slot in slots]
        halves = [message.view(torch.int32).split(sum(longest)) for message in messages]
        by_place = [
            (indices.to(torch.int64).split(longest), values.view(torch.float32).split(longest))
            for indices, values in halves
        ]
        parts = []
        for number, slot in enumerate(slots):
            indices, values = [], []
            for place, (all_indices, all_values) in enumerate(by_place):
                count = self._num_candidates(slot, place)
                indices.append(all_indices[number][:count] + _part(slot.parameter.numel(), place, len(messages)).start)
                values.append(all_values[number][:count])
            magnitudes = torch.cat(values).abs()
            # Stable: all ranks choose the same of equal ones.
            largest = magnitudes.sort(descending=True, stable=True).indices[: slot.num_selected].sort().values
            parts.append((torch.cat(indices)[largest], torch.cat(values)[largest]))
            mine, local = self._mine(slot, parts[-1][0])
            self._remove(slot, local, parts[-1][1][mine])
        return parts

    def _num_candidates(self, slot: Slot, place: int) -> int:
        """Return how many elements a part may have to send; of the first part, the longest."""
        part = _part(slot.parameter.numel(), place, self._place[1])
        return min(slot.num_selected, part.stop - part.start)

    @torch.no_grad()
    def finish_sparse(self, messages: Sequence[Tensor], slots: Sequence[Slot] | None = None) -> None:
        """Average the messages of all ranks, in rank order, into the gradients of sparse tensors (all by default)."""
        slots = self._sparse_slots() if slots is None else slots
        counts, numels = _sizes(slots)
        decoded = [self.method.codec.decode(message, counts, numels) for message in messages]
        self._write_gradients(list(zip(*decoded, strict=True)), slots)

    def _write_gradients(self, parts: Sequence[Sequence[Sparse]], slots: Sequence[Slot]) -> None:
        """Write the mean of sparse vectors, one per sender, of each tensor."""
        outs = []
        for slot in slots:
            gradient = slot.parameter.grad
            assert gradient is not None
            writes_directly = gradient.dtype == torch.float32 and gradient.is_contiguous()
            outs.append(gradient.view(-1) if writes_directly else torch.empty(gradient.numel(), device=gradient.device))
        if gpu.is_available(outs[0].device):
            counts = [indices.numel() for (indices, _), *_ in parts]
            by_sender = [
                (torch.cat(i), torch.cat(v)) for i, v in (zip(*each, strict=True) for each in zip(*parts, strict=True))
            ]
            gpu.scatter_mean_many_(outs, counts, by_sender)
        else:
            for out, of_tensor in zip(outs, parts, strict=True):
                scatter_mean_(out, of_tensor)
        for slot, out in zip(slots, outs, strict=True):
            self._set_gradient(slot, out)

    def _set_gradient(self, slot: Slot, mean: Tensor) -> None:
        """Take a mean as the gradient; where the optimizer climbs it has torch's sign again."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.data_ptr() != mean.data_ptr():
            gradient.copy_(mean.view(gradient.shape))
        if self._correction.constants(slot.parameter, slot.group).sign < 0:
            gradient.neg_()

    def to(self, device: torch.device) -> None:
        """Move the residuals, as Lightning moves model and optimizer state at the end of a fit."""
        for tensors in (self.residuals, self._velocities, self._rounded):
            tensors.update({parameter: tensor.to(device) for parameter, tensor in tensors.items()})
        self._correction.forget()

    @torch.no_grad()
    def whole_momentum(self) -> dict[Parameter, Tensor]:
        """Return the velocities that this node keeps in parts, as `velocity_key` has them; empty on one level.

        Collective: the ranks of a node, blocking.
        """
        levels = self._exchange.levels
        whole = {}
        for parameter, velocity in self._velocities.items():
            assert levels is not None
            longest = _part(parameter.numel(), 0, self._place[1]).stop
            padded = pad(velocity, (0, longest - velocity.numel()))
            gathered = levels.node.all_gather(padded.view(torch.uint8)).view(-1).view(velocity.dtype)
            whole[parameter] = torch.empty_like(parameter, requires_grad=False)
            whole[parameter].copy_(gathered[: parameter.numel()].view(parameter.shape))
        return whole

    # State ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what differs from rank to rank, keyed by parameter name, and the step; copies on the CPU."""
        tensors: dict[str, dict[str, Any]] = {}
        for parameter, residual in self.residuals.items():
            entry: dict[str, Any] = {
                "residual": residual.cpu().clone(),
                "threshold": self._selector(parameter).threshold,
                "shape": tuple(parameter.shape),
            }
            velocity = self._velocities.get(parameter)
            if velocity is None and self.velocity_key is not None:
                velocity = self.optimizer.state.get(parameter, {}).get(self.velocity_key)
            if velocity is not None:
                entry["momentum_buffer"] = velocity.detach().cpu().clone()
            tensors[self._name(parameter)] = entry
        link = None if self._link is None else (self._link.latency_s, self._link.bandwidth_bytes_per_s)
        exchange = {"link": link, "reducer": self._reducer.state_dict()}  # the same on all ranks
        rounded = {self._name(parameter): each.cpu().clone() for parameter, each in self._rounded.items()}
        local = {
            self._name(parameter): {
                key: self.optimizer.state[parameter][key].cpu().clone() for key in self._correction.local_keys
            }
            for parameter in self.residuals
        }
        return {
            "step": self.step,
            "tensors": tensors,
            "place": self._place,
            "rounded": rounded,
            "local": local,
            "num_senders": self._exchange.num_senders,
            "correction": self._correction.state_dict(),
            "exchange": exchange,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`; the optimizer's own state must have been loaded before.

        Raises:
            ConfigurationError: it has tensors this optimizer does not have, or of another shape, or was made with
                another correction.
        """
        parameters = {self._name(p): p for group in self.optimizer.param_groups for p in group["params"]}
        of_correction = state.get("correction", self._correction.state_dict())
        kind = of_correction["kind"]
        if state["tensors"] and kind != self._correction.kind:
            raise ConfigurationError(
                f"The checkpoint's residuals are those of {kind!r}; correction={self.method.correction!r} with "
                f"{type(self.optimizer).__name__} is {self._correction.kind!r}, to which they mean something else "
                "(correction='auto' is 'momentum' for SGD, 'own_variance' for Adam and AdamW). Resume with the "
                "optimizer and the correction that it was trained with, or begin anew from its weights."
            )
        self.step = state["step"]
        for own in (self.residuals, self._velocities, self._selectors, self._rounded):
            own.clear()
        self._correction.forget()
        if kind == self._correction.kind:
            self._correction.load_state_dict(of_correction)
        for name, rounded in state.get("rounded", {}).items():
            if name in parameters and as_real(parameters[name]).numel() == rounded.numel():
                self._rounded[parameters[name]] = rounded.to(parameters[name].device)
        if "exchange" in state:  # of the same ranks
            link = state["exchange"]["link"]
            self._link = None if link is None else Link(*link)
            self._reducer.load_state_dict(state["exchange"]["reducer"])
        for name, tensors in state.get("local", {}).items():
            for key, value in tensors.items():
                if name in parameters and key in self.optimizer.state.get(parameters[name], {}):
                    # Of G^2 / N: other ranks go on with their own N.
                    factor = state["num_senders"] / self._exchange.num_senders
                    self.optimizer.state[parameters[name]][key].copy_(value.to(parameters[name].device) * factor)
        is_own_part = tuple(state.get("place", (0, 1))) == self._place
        for name, entry in state["tensors"].items():
            parameter = parameters.get(name)
            shape = tuple(entry.get("shape", entry["residual"].shape))
            if parameter is None or tuple(parameter.shape) != shape:
                has = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise ConfigurationError(
                    f"The checkpoint keeps a residual of shape {shape} for {name!r}; the "
                    f"optimizer has {has}. Resume with the model that was saved, or load its weights alone."
                )
            self._selector(parameter).threshold = entry.get("threshold", 0.0)
            targets = {"residual": self._residual(parameter)}
            if "momentum_buffer" in entry:
                targets["momentum_buffer"] = self._velocity(parameter)
            for key, target in targets.items():
                value = entry[key].to(target.device)
                target.copy_(value if is_own_part else self._own(parameter, value))

    # Details ----------------------------------------------------------------------------------------------------

    def _begin(self, reduced: Collection[Parameter]) -> None:
        """List the parameters of this step; the same on all ranks, whatever gradients they happen to have."""
        self._correction.check()
        self.check_schedule()
        is_sparse, density = self.is_sparse, self.density
        skipped = frozenset() if is_sparse else frozenset(reduced)
        self._slots = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in skipped:
                    continue
                if not parameter.requires_grad:
                    parameter.grad = None  # frozen since the backward: torch would step it, each rank on its own
                    continue
                compresses = is_sparse and self._compresses(parameter)
                if parameter in self.residuals and not compresses and self._exchange.num_senders > 1:
                    raise ConfigurationError(
                        f"Step {self.step} would send {self._name(parameter)!r} dense, but gradients that earlier "
                        "sparse steps did not send are kept for it. Go on with the schedule, min_numel and exclude "
                        "that it was trained with."
                    )
                k = num_selected(parameter.numel(), density) if compresses else None
                self._slots.append(Slot(self._name(parameter), parameter, group, k))

    def _may_compress(self, parameter: Parameter) -> bool:
        """Whether a parameter is sparse in sparse steps, once the correction has what it needs for it."""
        if not parameter.is_floating_point() or parameter.numel() < self.method.min_numel:
            return False
        name = self._name(parameter)
        return not any(fnmatchcase(name, pattern) for pattern in self.method.exclude)

    def _compresses(self, parameter: Parameter) -> bool:
        if not self._may_compress(parameter):
            return False
        # Once sparse, always ready. To ask may wait for a GPU, which has the step of a fused Adam.
        num_dense_steps = max(self.method.rampup_begin_step, self._correction.begin_step)
        if parameter not in self.residuals and not self._correction.is_ready(parameter, num_dense_steps):
            return False
        if parameter.numel() > MAX_NUMEL:
            name = self._name(parameter)
            raise ConfigurationError(
                f"{name!r} has {parameter.numel()} elements, positions go up to {MAX_NUMEL}: exclude=[{name!r}]."
            )
        return True

    def _mark(self, num_backwards: int) -> Tensor | int:
        """Return a number below 2^20, which float32 carries exactly: the count, and every so often a checksum."""
        mark = num_backwards % MARK_MODULUS
        if self.step % CHECK_EVERY_STEPS:
            return mark
        return mark + MARK_MODULUS * (checksum(slot.parameter for slot in self._slots) % MARK_MODULUS)

    def _first_fault(self, slots: Sequence[Slot]) -> Tensor:
        """Return 1 + the number of the first slot whose gradient is not finite, else 0; a scalar.

        Negative for a gradient that is not dense: that is known on the host, and only on the rank that has it.
        """
        is_finite = []
        for number, slot in enumerate(slots):
            gradient, device = slot.parameter.grad, slot.parameter.device
            if gradient is None or gradient.numel() == 0:
                is_finite.append(torch.ones((), dtype=torch.bool, device=device))
            elif _is_sparse_layout(gradient):
                return torch.tensor(-1.0 - number, device=device)
            elif slot.parameter in self._looked_at:
                is_finite.append(self._looked_at[slot.parameter])
            else:  # the extremes: unlike a norm they do not overflow, and a NaN is both
                least, largest = torch.aminmax(as_real(gradient))
                is_finite.append(least.isfinite() & largest.isfinite())
                if self.method.overlap:
                    self._looked_at[slot.parameter] = is_finite[-1]
        is_bad = ~torch.stack(is_finite)
        return torch.where(is_bad.any(), is_bad.float().argmax() + 1, 0).float()

    def _refuse(self, fault: int, rank: int, skip_nonfinite: bool) -> None:
        """Raise for a fault; return where it is one that only skips the step."""
        name = self._slots[abs(fault) - 1].name
        if fault < 0:
            raise ConfigurationError(
                f"The gradient of {name!r} on rank {rank} is sparse; only dense ones are exchanged. Build the layer "
                "with sparse=False."
            )
        if not skip_nonfinite:
            where = f"on rank {rank}"
            if self.reduces_in_node:
                assert self._exchange.levels is not None
                topology = self._exchange.levels.topology
                where = f"of node {topology.node_of(rank)} (ranks {list(topology.nodes[topology.node_of(rank)])})"
            lost = "What was sent during backward is lost: go on from a checkpoint."  # its residual was cleared
            raise NonFiniteGradientError(
                f"Step {self.step}: the gradient of {name!r} {where} is not finite. "
                f"{lost if self._begun else 'Nothing was exchanged.'} "
                "Lower the learning rate, clip the gradient, or look at the data there; with precision='16-mixed' "
                "such steps are skipped."
            )

    def _segment(self, slot: Slot) -> Segment:
        """Return what this rank corrects and searches of a tensor: all of it, on two levels its part; flat."""
        parameter = slot.parameter
        assert parameter.grad is not None
        own, scale = self._own_part(parameter), self._correction.scale(parameter, slot.group)
        constants = self._correction.constants(parameter, slot.group)
        return Segment(
            residual=self._residual(parameter).view(-1),
            # Adam without momentum has one all the same, for it is what is scaled.
            momentum_buffer=flat(self._velocity(parameter)) if constants.momentum != 0 or scale is not None else None,
            gradient=flat(parameter.grad)[own],
            weight=flat(parameter.detach())[own] if constants.weight_decay != 0 else None,
            scale=None if scale is None else flat(scale)[own],
            k=min(slot.k or 1, own.stop - own.start),
            **vars(constants),
        )

    def _select(self, slot: Slot, segment: Segment) -> Tensor:
        """Correct a segment; return the positions of its k largest."""
        positions = self._selector(slot.parameter).accumulate_(segment)
        self._keep_velocity(slot, segment)
        return positions

    def _keep_velocity(self, slot: Slot, segment: Segment) -> None:
        """Write back a velocity that is laid out otherwise than row by row, of which the segment has a copy."""
        if segment.momentum_buffer is not None:
            velocity = self._velocity(slot.parameter)
            if not velocity.is_contiguous():
                velocity.copy_(segment.momentum_buffer.view(velocity.shape))

    def _apply_residuals(self, skip_nonfinite: bool) -> bool:
        """Step with all that is unsent: a run of several ranks goes on with one, which has nobody to send it to."""
        self._slots = [
            Slot(self._name(parameter), parameter, group, None)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not self._slots:
            return True
        fault = int(self._first_fault(self._slots))
        if fault:
            self._refuse(fault, self._exchange.rank, skip_nonfinite)
            return False
        self._correction.take_over([slot.parameter for slot in self._slots if slot.parameter in self.residuals])
        for slot in self._slots:
            if slot.parameter in self.residuals:
                segment = self._segment(slot)
                self._select(slot, segment)
                assert slot.parameter.grad is not None
                slot.parameter.grad.copy_((segment.residual * segment.sign).view(slot.parameter.shape))
                del self.residuals[slot.parameter]
                continue
            if slot.parameter in self._rounded:
                assert slot.parameter.grad is not None
                gradient = as_real(slot.parameter.grad)
                gradient.add_(self._rounded.pop(slot.parameter).view(gradient.shape))
            self._correction.correct_dense(slot.parameter, slot.group)
        return True

    def _residual(self, parameter: Parameter) -> Tensor:
        if parameter not in self.residuals:
            shape = self._own(parameter, parameter.detach()).shape
            self.residuals[parameter] = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return self.residuals[parameter]

    def _own_part(self, parameter: Parameter) -> slice:
        return _part(parameter.numel(), *self._place)

    def _own(self, parameter: Parameter, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the parameter's shape, flat; on one level all of it, as it is."""
        return tensor if self._place[1] == 1 else flat(tensor)[self._own_part(parameter)]

    def _velocity(self, parameter: Parameter) -> Tensor:
        """Return u of a sparse parameter: the optimizer's own, of which on two levels this rank's part is kept."""
        if self._place[1] == 1:
            return self._correction.velocity(parameter)
        if parameter not in self._velocities:
            self._velocities[parameter] = self._own(parameter, self._correction.velocity(parameter)).clone()
            del self.optimizer.state[parameter][self.velocity_key]
        return self._velocities[parameter]

    def _selector(self, parameter: Parameter) -> Selector:
        key = (parameter, self.method.selection)
        if key not in self._selectors:
            self._selectors[key] = make_selector(self.method.selection)
        return self._selectors[key]

    def _name(self, parameter: Parameter) -> str:
        if parameter not in self._names:  # not in the module: a loss's own parameter, say
            everything = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._names[parameter] = f"optimizer.{next(i for i, p in enumerate(everything) if p is parameter)}"
        return self._names[parameter]


def _part(numel: int, place: int, num_places: int) -> slice:
    """Return the part of a flat tensor that the rank at a place of its node keeps; the last may be shorter."""
    size = -(-numel // num_places)
    return slice(min(place * size, numel), min((place + 1) * size, numel))


def _sizes(slots: Iterable[Slot]) -> tuple[list[int], list[int]]:
    """Return how many elements are sent of each sparse tensor, and how many it has."""
    return [slot.num_selected for slot in slots], [slot.parameter.numel() for slot in slots]


def _nothing(slot: Slot) -> Sparse:
    """Return elements that change nothing, as many as all ranks expect."""
    device = slot.parameter.device
    return torch.arange(slot.num_selected, device=device), torch.zeros(slot.num_selected, device=device)


def _is_sparse_layout(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout != torch.strided
