"""The tensors of one optimizer whose gradients are exchanged, as they lie in memory.

A `Table` lists the rows of a step, and returns the input of the exchange: the gradients that are compressed (the
signal), and the gradients that are sent whole. It writes the means back: into `.grad`, or as a step of the weights.
Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.comm.peers import BUCKET_BYTES, Peers
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.kernels import dispatch, gpu
from lightning_lowbw.kernels.table import DTYPES, JoinedTable
from lightning_lowbw.kernels.tensors import Order, as_real, copy_all_, order_of, saved
from lightning_lowbw.payloads.corrections import ErrorFeedback
from lightning_lowbw.payloads.exchange import Exchange, Mean
from lightning_lowbw.payloads.params import (
    Params,
    Row,
    all_in_order,
    by_group,
    check_shapes,
    gradients_in_order,
    gradients_of,
)
from lightning_lowbw.payloads.payload import FLOAT_BYTES, Payload
from lightning_lowbw.sync.state import check_order, check_origin, origin, own_part

GATHERED = ""  # the name of all tensors that are sent whole, where kernels have gathered them
_KINDS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Gathered:
    """Tensors that are sent whole, as one: kernels of a GPU gather them, and write the mean, in one launch each.

    Args:
        whole: tensors with elements by name: contiguous, in `DTYPES`.
        table: kept from step to step.

    Attributes:
        names: the names of the tensors.
        joined: all tensors as one: float32, 1-d.
        flags: for each tensor, whether it has an inf or NaN: bool.
    """

    def __init__(self, whole: Mapping[str, Tensor], table: JoinedTable) -> None:
        self.names, tensors = [*whole], [*whole.values()]
        numels, device = [*map(Tensor.numel, tensors)], tensors[0].device
        kinds, addresses = [_KINDS[tensor.dtype] for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
        columns = addresses, repeat(0), accumulate(numels, initial=0), numels, kinds  # of `JoinedRow`
        self._table, numel = table.update(zip(*columns, strict=False), device), sum(numels)
        flags = torch.zeros(len(tensors) + 1, dtype=torch.bool, device=device)
        self.joined, self.flags = torch.empty(numel, dtype=torch.float32, device=device), flags[:-1]
        gpu.encode_(self._table, _message(self.joined), numel, torch.float32, flags)

    @staticmethod
    def takes(tensors: Sequence[Tensor]) -> bool:
        """Return whether kernels gather these tensors: they must fit into a bucket, because gathering copies them."""
        if not tensors or not dispatch.uses_triton(tensors[0].device):
            return False
        are_known = {tensor.dtype for tensor in tensors} <= _KINDS.keys() and all(map(Tensor.is_contiguous, tensors))
        return are_known and FLOAT_BYTES * sum(map(Tensor.numel, tensors)) <= BUCKET_BYTES

    def write_(self, mean: Tensor) -> None:
        """Write the mean of `joined` into the tensors, rounded to their dtypes."""
        gpu.decode_(self._table, _message(mean), mean.numel(), torch.float32, num_messages=1)


def _message(vector: Tensor) -> Tensor:
    return vector.view(torch.uint8).unsqueeze(0)


class Table:
    """The tensors of one optimizer.

    Attributes:
        params: the parameters of the optimizer.
        correction: how a gradient enters the residual; has the states of the optimizer that a step uses.
        exchange: has the residuals; None if gradients are sent whole.
        rows: the parameters that are trained in this step; the same on all ranks, whatever gradients they have.
        compressed: the rows that the payload compresses; also rows of empty shards.
        filled: the compressed rows that have elements. A shard that is empty here is empty on the peers, too.
        missing: names of rows without a gradient on this rank, whose gradients are zeros.
        gathered: the gradients that are sent whole, where kernels of a GPU have gathered them.
    """

    def __init__(self, params: Params, correction: ErrorFeedback, exchange: Exchange | None, peers: Peers) -> None:
        self.params, self.correction, self.exchange, self.peers = params, correction, exchange, peers
        self.rows, self.compressed, self.filled = list[Row](), list[Row](), list[Row]()
        self.missing = frozenset[str]()
        self._made_of: tuple[Any, ...] = ()  # the values from which the rows are made
        self._orders: dict[str, Order] = {}  # of the elements in memory, in which residuals are
        self._joined = JoinedTable()  # of the gradients that are sent whole
        self.gathered: Gathered | None = None
        # Rows whose mean is in `.grad` for `step_exchanged`; then these gradients, which the optimizer must not see.
        self._unstepped: list[Row] = []
        self._hidden: list[tuple[Parameter, Tensor]] = []
        self._showing: RemovableHandle | None = None  # a hook that gives these back before other hooks look

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """v of this rank's part of each tensor that has been compressed, by name; float32, flat."""
        return {} if self.exchange is None else self.exchange.residuals

    # The rows of a step ---------------------------------------------------------------------------------------------

    def list_rows(self, what: Payload | None, skipped: Collection[Parameter], step: int) -> None:
        """List the rows of a step; made anew only if parameters, groups, layouts or the payload have changed.

        In place:
            `.grad` of frozen parameters is dropped.

        Args:
            what: chooses the compressed parameters; None in a step that compresses none.
            skipped: parameters that are left out.
            step: the number of the step, for an error.

        Raises:
            ConfigurationError: unsent gradients are kept of a parameter that is now sent whole, or lies in memory in
                another order.
        """
        members = self.params.trained(skipped)
        layouts = [(id(p), id(group), p.size(), p.stride(), p.dtype) for p, group in members]
        made_of = what, self.params.small_numel, layouts
        if made_of == self._made_of:
            return
        rows = []
        for parameter, group in members:
            is_compressed = what is not None and self.params.is_compressed(what, parameter)
            rows.append(Row.of(self.params.name_of(parameter), parameter, group, is_compressed=is_compressed))
        for row in rows:
            if row.name in self.residuals:
                self._check_kept(row, step, is_sent_whole=what is not None and not row.is_compressed)
        self._orders |= {row.name: row.order for row in rows}
        self.rows, self._made_of = rows, made_of
        self.compressed = [row for row in rows if row.is_compressed]
        self.filled = [row for row in self.compressed if row.parameter.numel()]

    def _check_kept(self, row: Row, step: int, *, is_sent_whole: bool) -> None:
        """Check that a residual that is kept fits the row of a step."""
        if (order := self._orders.get(row.name)) != row.order:
            raise ConfigurationError(
                f"Step {step}: the memory format of {row.name!r} has changed (the order of its dimensions was "
                f"{order}, and is {row.order}), and gradients that have not been sent are kept in that order. Change "
                "the memory format before training: model.to(memory_format=...) in __init__ or configure_model. Or "
                f"{WITHOUT_RESIDUALS}."
            )
        if is_sent_whole:
            raise ConfigurationError(
                f"Step {step} would send {row.name!r} dense, but gradients that earlier sparse steps did not "
                "send are kept for it. Go on with the schedule, min_numel and exclude that it was trained with, or "
                f"{WITHOUT_RESIDUALS}."
            )

    # The input of the exchange --------------------------------------------------------------------------------------

    def fill_missing_(self) -> None:
        """Make zeros where this rank has no gradient, because another rank may have one."""
        missing = [row for row in self.rows if row.parameter.grad is None]
        for row in missing:
            row.parameter.grad = torch.zeros_like(row.parameter)
        self.missing = frozenset(row.name for row in missing)

    def signal(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the gradients of rows with elements, as they lie in memory."""
        return dict(zip([row.name for row in rows], gradients_in_order(rows), strict=True))

    def whole(self, *, gathers: bool) -> dict[str, Tensor]:
        """Return the gradients that are sent whole: in dense steps all that DDP has not reduced.

        Args:
            gathers: whether kernels of a GPU may gather these as one tensor, which is `gathered` then.
        """
        rows = [row for row in self.rows if not row.is_compressed]
        gradients = [torch.zeros_like(row.parameter) if (g := row.parameter.grad) is None else g for row in rows]
        whole = dict(zip([row.name for row in rows], all_in_order(rows, gradients), strict=True))
        filled = {name: tensor for name, tensor in whole.items() if tensor.numel()}
        self.gathered = Gathered(filled, self._joined) if gathers and Gathered.takes([*filled.values()]) else None
        return whole if self.gathered is None else {GATHERED: self.gathered.joined}

    # The result of the exchange -------------------------------------------------------------------------------------

    def write_whole_(self, means: Mapping[str, Tensor], unused: Collection[str]) -> None:
        """Write the means of the tensors that were sent whole into the gradients.

        In place:
            `.grad`: also zeros for tensors that another rank has used.
        """
        for row in self.rows:
            if row.parameter.grad is None and row.name not in unused:
                row.parameter.grad = torch.zeros_like(row.parameter)
        if self.gathered is not None:
            self.gathered.write_(means[GATHERED])  # also into the zeros of unused parameters
            self.gathered = None
        else:
            rows = [row for row in self.rows if row.name in means and row.name not in unused]
            copy_all_(gradients_in_order(rows), [means[row.name] for row in rows])

    def apply_(self, mean: Mean, unused: Collection[str], *, applies: bool) -> None:
        """Apply the mean of compressed tensors; a parameter that no rank has used is not stepped, as in DDP.

        In place:
            step: ``w = w - lr mean``, where something was sent; else `.grad`, for `step_exchanged` or the optimizer.

        Args:
            mean: the mean.
            unused: names of the parameters that no rank has used.
            applies: whether to step the weights, where the mean has been through all of the optimizer's arithmetic.
        """
        rows = [row for row in self.filled if row.name not in unused]
        correction, others = self.correction, rows
        if applies and correction.is_complete:
            others = self._step_(mean, rows)
        if others:
            self._write_(mean, others)
        for group, of_group in by_group(others) if others else ():
            if correction.constants(group).sign < 0:  # torch's sign, for an optimizer with maximize=True
                torch._foreach_neg_(gradients_of(of_group))
        if correction.is_complete:
            self._unstepped = others
        if unused:
            self._keep_(mean, unused)

    def _step_(self, mean: Mean, rows: Sequence[Row]) -> list[Row]:
        """Step weights, in float32, with the memory of their gradients as workspace; return the other rows."""
        rooms, weights = gradients_in_order(rows), all_in_order(rows, [row.parameter for row in rows])
        steps, others = dict[Row, tuple[Tensor, Tensor]](), []
        for row, room, weight in zip(rows, rooms, weights, strict=True):
            is_float32 = room.dtype == weight.dtype == torch.float32
            if is_float32 and room.is_contiguous() and weight.is_contiguous():
                steps[row] = room, weight
            else:
                others.append(row)
        rates = dict[int, float]()
        for group, of_group in by_group(steps):
            rates[id(group)] = self.correction.decay_weights([row.parameter for row in of_group], group)
        mean.step_({row.name: (*tensors, rates[id(row.group)]) for row, tensors in steps.items()})
        for row in steps:
            row.parameter.grad = None
        return others

    def _write_(self, mean: Mean, rows: Sequence[Row]) -> None:
        """Write the mean into gradients."""
        if rows:
            mean.step_({name: (room, None, 0.0) for name, room in self.signal(rows).items()})

    def _keep_(self, mean: Mean, unused: Collection[str]) -> None:
        """Keep the elements that were sent of tensors that no rank has used: each rank keeps the mean.

        In place:
            The residuals, whose sum over the ranks stays the same; `.grad`, which is None afterwards.
        """
        rows = [row for row in self.filled if row.name in unused]
        self._write_(mean, rows)
        assert self.exchange is not None
        for name, gradient in self.signal(rows).items():
            if name in self.residuals:
                sent = gradient.reshape(-1)
                own = self.peers.part(sent.numel()) if self.exchange.payload.keeps_parts else slice(None)
                self.residuals[name].add_(sent[own])
        for row in self.rows:
            if row.name in unused:
                row.parameter.grad = None

    # The optimizer's own step ---------------------------------------------------------------------------------------

    def step_exchanged(self) -> None:
        """Step the rows whose mean is in `.grad`, and hide these gradients from the optimizer."""
        rows = [row for row in self._unstepped if row.parameter.grad is not None]
        self._unstepped = []
        if not rows:
            return
        for group, of_group in by_group(rows):
            self.correction.step_([row.parameter for row in of_group], group)
        self._hidden = list(zip([row.parameter for row in rows], gradients_of(rows), strict=True))
        for row in rows:
            row.parameter.grad = None
        optimizer = self.params.optimizer
        hooks: Any = optimizer._optimizer_step_post_hooks
        if hooks or torch_optimizer._global_optimizer_post_hooks:  # they may read gradients
            self._showing = optimizer.register_step_post_hook(lambda *_: self._give_back())
            hooks.move_to_end(self._showing.id, last=False)

    def _give_back(self) -> None:
        """Put the gradients back that the optimizer has not seen, for hooks that read them after its step."""
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = []

    def end_step(self) -> None:
        """End the step, after the optimizer's own."""
        self.correction.end_step()
        self._give_back()
        if self._showing is not None:  # not in the hook itself, while torch goes through all hooks
            self._showing.remove()
            self._showing = None
        self._unstepped, self.missing = [], frozenset()

    # State ----------------------------------------------------------------------------------------------------------

    def to(self, device: torch.device) -> None:
        """Move this rank's own tensors."""
        parts = self.correction.parts
        parts.update((parameter, part.to(device)) for parameter, part in parts.items())
        if self.exchange is not None:
            self.exchange.to(device)

    def state_dict(self, payload: Payload) -> dict[str, Any]:
        """Return the tensors that differ between ranks, on the CPU and by name."""
        parameters, correction = self.params.by_name(), self.correction
        kept = {name: parameters[name] for name in self.residuals if name in parameters}  # one may have been taken out
        velocities = {name: correction.saved(parameter) for name, parameter in kept.items()}
        return {
            **origin(self.peers),
            "num_participants": self.peers.num_participants,
            "correction": correction.kind,
            "payload": type(payload).__name__,
            "shapes": {name: tuple(as_real(each).shape) for name, each in kept.items()},
            "orders": {name: order_of(as_real(each)) for name, each in kept.items()},
            "residuals": saved({name: self.residuals[name] for name in kept}),
            "velocities": saved({name: velocity for name, velocity in velocities.items() if velocity is not None}),
            "local": {name: saved(correction.saved_moments(parameter)) for name, parameter in kept.items()},
            "exchange": None if self.exchange is None else self.exchange.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any], payload: Payload) -> None:
        """Check that the training can go on from a state.

        Raises:
            ConfigurationError: it cannot.
        """
        check_origin(state, self.peers)
        name, kind = type(payload).__name__, self.correction.kind
        if state["residuals"] and state["payload"] != name:
            raise ConfigurationError(
                f"The checkpoint keeps gradients that {state['payload']} has not sent, and with {name} they never "
                f"would be. Resume with the payload of that run, or {WITHOUT_RESIDUALS}."
            )
        if state["residuals"] and state["correction"] != kind:
            raise ConfigurationError(
                f"The checkpoint keeps what {state['correction']!r} had not sent, and to {name} with "
                f"{type(self.params.optimizer).__name__}, which is {kind!r}, that means something else. Resume with "
                "the method and the optimizer that it was trained with ('momentum' is SGD, 'own_variance' Adam and "
                f"AdamW), or {WITHOUT_RESIDUALS}."
            )
        check_shapes(state["shapes"], {name: as_real(each) for name, each in self.params.by_name().items()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that has been checked.

        In place:
            The residuals, the velocities and the second moments.
        """
        parameters, exchange, peers = self.params.by_name(), self.exchange, self.peers
        keeps_parts = exchange is not None and exchange.payload.keeps_parts
        of = (peers.local_rank, peers.num_local_ranks) if keeps_parts else (0, 1)

        def own(name: str, kept: Tensor) -> Tensor:
            check_order(parameters[name], name, state["orders"][name])
            return own_part(kept, as_real(parameters[name]).numel(), of)

        residuals = {name: own(name, kept) for name, kept in state["residuals"].items()}
        self._made_of, self._orders = (), {name: order_of(as_real(parameters[name])) for name in residuals}
        self.correction.parts.clear()
        if exchange is not None:
            exchange.residuals.load(residuals, next(iter(parameters.values())).device)
            if state["exchange"] is not None:
                exchange.load_state_dict(state["exchange"])
        for name, kept in state["velocities"].items():
            self.correction.load(parameters[name], own(name, kept), peers.part(parameters[name].numel()))
        for name, tensors in state["local"].items():
            of_parameter = self.params.optimizer.state.get(parameters[name], {})
            for key, value in tensors.items():
                if key in of_parameter:  # of G^2 / N, where N may be another now
                    factor = state["num_participants"] / peers.num_participants
                    of_parameter[key].copy_(value.to(of_parameter[key].device) * factor)
