"""The common part of the two drivers: one rank's side of a method for one optimizer, called for each step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.payloads.corrections import ErrorFeedback
from lightning_lowbw.payloads.exchange import Exchange
from lightning_lowbw.payloads.params import Params
from lightning_lowbw.payloads.payload import Payload
from lightning_lowbw.payloads.whole import WholeExchange
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.checks import raise_at_other_batches
from lightning_lowbw.sync.status import (
    SAVE,
    STOP,
    Fault,
    Faults,
    Status,
    first_fault,
    flags,
    overflow,
    read_flags,
    status_message,
)
from lightning_lowbw.sync.step_plan import StepPlan


class Configuration(Protocol):
    """The part of a `Method` that a driver reads; `Method` itself is in a layer above, because it makes the drivers.

    Attributes:
        when: the schedule.
        what: the payload.
        where: which ranks communicate with each other.
        acts_alone: whether the method changes the training also if there is only one rank.
    """

    @property
    def when(self) -> Schedule: ...
    @property
    def what(self) -> Payload: ...
    @property
    def where(self) -> Where: ...
    @property
    def acts_alone(self) -> bool: ...


class Synchronizer:
    """One rank's side of a method for one optimizer; it has a counter of its own.

    In a plain loop `Method.attach` returns one, and `optimizer.step()`, or a GradScaler's `scaler.step(optimizer)`, is
    all there is to call: `step` is wrapped and does the rest, also where a closure is given. Two finer tools:

        worker.prepare()              # before clipping gradients by hand: norms at ``c * worker.plan.clip_factor``
        with worker.stepping():       # around a step that may be left out, on all ranks or on none
            if worker.exchange(skip_nonfinite=True):  # methods that average weights take every step
                optimizer.step()

    Attributes:
        method: the configuration, a `Method`; may be replaced between steps, on all ranks alike.
        optimizer: the user's own.
        params: its tensors.
        peers: the participants and the ranks of the node.
        correction: how a gradient enters the residual, if gradients are compressed.
        compressed: the exchange of the tensors that the payload compresses; None if it sends whole tensors.
        step: optimizer steps completed (a step that a GradScaler skips counts, as in `trainer.global_step`).
        batch: the number of the batch in the run, counted by the caller; 0 in a plain loop. Ranks that exchange in
            different batches, because one rank has left out a step that the other ranks take, raise an error.
        stop_requested: set it on any rank to stop all ranks.
        stop_agreed: whether the last status contains a request to stop; equal on all ranks.
        save_requested: set it on any rank to save on all ranks.
        save_agreed: as `stop_agreed`.
        ending: logs a warning if a plain loop ends with weights that differ by rank.
        is_stepping: whether a step is being taken, inside of `stepping`.
        is_prepared: whether `list_gradients` has been called for this step, and not yet `exchange`.
        is_exchanged: whether `exchange` has been called for this step.
        is_taken: whether the step is taken, as returned by the last `exchange`.
        node_flags: the maximum of `status.flags` over the shards of this node, for the next status; on the device.
            None if the model is not sharded.
        is_compared: whether a plain loop has compared the ranks since it began, or since it loaded a state.
        fault: after `check_gradients`, whether this rank has found a fault; a scalar. None if nothing was checked.
    """

    correction: ErrorFeedback | None = None
    parameters_agree: bool = True  # whether the parameters are the same on all ranks; known without communication
    fault: Tensor | None = None

    def __init__(
        self,
        method: Configuration,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates its closure several times per step, which needs whole gradients: use strategy='ddp'."
            )
        self.method, self.optimizer, self.peers = method, optimizer, peers
        self.params = Params(optimizer, named_parameters)
        method.what.check_names(self.params.names())
        self.compressed: Exchange | None = method.what.exchange(peers, method.when)
        if self.compressed is not None:
            peers.check_parts()
        self._made_for = method
        self.step = self.batch = 0
        self.is_prepared = self.is_exchanged = self.is_stepping = False
        self.is_taken, self.is_compared = True, False
        self.stop_requested = self.stop_agreed = False
        self.save_requested = self.save_agreed = False
        self.node_flags: Tensor | None = None
        self.ending = Ending()

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter, by which its state is kept."""
        return self.params.name_of(parameter)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(p for group in self.optimizer.param_groups for p in group["params"]).device

    def agree_on_buffers(self) -> None:
        """Check that the buffers that are averaged have the same shapes on all ranks."""

    @property
    def plan(self) -> StepPlan:
        """The plan of the coming step."""
        raise NotImplementedError

    # A step, in the order of its calls ------------------------------------------------------------------------------

    def prepare(self, *, reduced: Collection[Parameter] = ()) -> None:
        """List the gradients of this step and check them, before the caller clips them: both calls below."""
        self.list_gradients(reduced=reduced)
        self.check_gradients()

    def list_gradients(self, *, reduced: Collection[Parameter] = ()) -> None:
        """List the tensors of this step; `exchange` calls it if the caller has not.

        In place:
            On two levels `.grad` of parameters not in `reduced` becomes the mean of the node.

        Collective: on two levels the ranks of a node, where there are such parameters; else nothing is communicated.

        Args:
            reduced: parameters whose `.grad` is the mean already (by DDP): over all ranks, or over the node if
                `plan.reduce` is "node".
        """
        raise NotImplementedError

    def check_gradients(self) -> None:
        """Check the listed gradients for NaN and inf, in a pass over memory; `exchange` tells all ranks the result.

        Needed before clipping, which spreads a NaN, and before a step that may be skipped: a residual must not have
        taken its gradients. Without this call `exchange` checks them in the pass that accumulates them.
        """

    def exchange(self, *, skip_nonfinite: bool = False, applies: bool = False) -> bool:
        """Turn the gradients into the gradients that the optimizer steps with; return whether to take the step."""
        raise NotImplementedError

    def sending_early(self, *, begins: bool) -> AbstractContextManager[None]:
        """Return a context for the backward pass whose gradients are exchanged next, perhaps in several messages.

        If there are several, all but the last begin in the pass, and the context has called `list_gradients`.

        Collective: all ranks, or none.

        Args:
            begins: whether the messages of this rank begin in the pass; else they begin after it, because hooks may
                change gradients.
        """
        return nullcontext()

    def takes_reduced(self, reduced: Collection[Parameter]) -> bool:
        """Return whether DDP has reduced all gradients of a step that sends them whole: nothing is left to exchange.

        In place:
            `.grad` of frozen parameters is dropped.

        Args:
            reduced: as for `list_gradients`, which has not been called.
        """
        return False

    def step_exchanged(self) -> None:
        """Step the parameters that `exchange` has left for this call, directly before the optimizer's step.

        In a plain loop the wrapped `step` calls it.

        In place:
            These parameters. Their `.grad` is None until the optimizer has stepped, so that it leaves them alone.
        """

    def check_closure(self) -> None:
        """Check, before a closure makes a gradient, that it is the first one of this step.

        Raises:
            ConfigurationError: on all ranks.
        """
        if self.is_exchanged and self.plan.takes_one_gradient:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} has called its closure twice in step {self.step}, as SAM does: the "
                "first gradient would be sent, or kept to be sent later, although it is not what the optimizer steps "
                f"with. {self.method.what} needs an optimizer that calls it once; or use strategy='ddp'."
            )

    def after_step(self) -> None:
        """Count the step; average the replicas if an average is due."""
        raise NotImplementedError

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose `exchange` and the optimizer's own step; afterwards comes `after_step`.

        A step that raises ends the training: nothing is put back.
        """
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = self.is_prepared = self.is_exchanged = False
        self.after_step()
        self.ending.step = None if self.parameters_agree else self.step

    # Requests between ranks -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> int:
        """`stop_requested` and `save_requested` as one number, for a status."""
        return STOP * self.stop_requested | SAVE * self.save_requested

    @requests.setter
    def requests(self, requests: int) -> None:
        self.stop_requested, self.save_requested = bool(requests & STOP), bool(requests & SAVE)

    def agree_on(self, requests: int) -> None:
        """Read the requests of all ranks from a status."""
        self.stop_agreed, self.save_agreed = bool(requests & STOP), bool(requests & SAVE)
        if self.save_agreed:
            self.save_requested = False

    # Faults ---------------------------------------------------------------------------------------------------------
    # The sum of finite gradients may overflow. A fault that an exchange finds after its status has gone is in the next
    # status; or `check_late_faults` reports it, when weights are saved or the training ends.

    @property
    def fault_group(self) -> Any:
        """The ranks that are told of a fault: all ranks. If a model is sharded, the peers are some of the ranks."""
        return None if self.peers.are_shards else self.peers.group

    @property
    def here(self) -> str:
        """The rank or the node that the gradients or weights belong to, for an error on all ranks."""
        number, nodes, topology = self.peers.rank, self.peers.nodes, self.peers.topology
        if self.plan.reduce == "node" and not topology.is_flat:  # groups that come and go have no topology
            number, nodes = topology.node_of(number), topology.nodes
        return f"node {number} (ranks {list(nodes[number])})" if nodes else f"rank {number}"

    def late_faults(self) -> Faults:
        """Return the faults that the last exchange has found after its status."""
        faults, exchange = Faults(), self.compressed
        if exchange is not None and exchange.fault is not None:
            signal = "changes of the weights" if self.method.when.averages_weights else "gradients"
            what = f"what was kept of earlier {signal} on {self.here}"
            faults.add(exchange.fault, [""] * exchange.fault.numel(), lambda _: overflow(3, self.step, what))
        return faults

    @torch.no_grad()
    def check_late_faults(self) -> None:
        """Report the faults that the last exchange has found after its status.

        Collective: all ranks, blocking; an all-reduce of two numbers per rank, if there are residuals. If a model is
            sharded: as `agree_in_world`.

        Raises:
            NonFiniteGradientError: on all ranks; a residual of a rank has an inf or NaN.
        """
        peers, exchange, faults = self.peers, self.compressed, self.late_faults()
        if peers.num_ranks == 1 or peers.may_grow:  # an elastic group reports its faults before each round
            return
        # All ranks have flags of an average, or no rank has. After a step a rank has flags of its own gradients.
        averages_weights = self.method.when.averages_weights
        if peers.are_shards:
            self.agree_in_world(faults)
        elif exchange is not None and (exchange.fault is not None if averages_weights else exchange.residuals):
            message = status_message((), faults.any(self.device), 0, peers.rank, peers.num_ranks, self.device)
            numbers = WholeExchange(peers).prepare({}).send(message).wait().status.tolist()
            if Status.read(numbers, peers.num_ranks).is_faulty:
                raise_fault(first_fault(faults.first(), self.fault_group))
        self.forget_late_faults()

    def agree_in_world(self, faults: Faults, requests: int = 0) -> int:
        """Return the requests of all ranks, whichever shards of a model they hold, if no rank has a fault.

        All ranks, not the peers alone: if only the peers raised, the other shards of a node would go on.

        Collective: all ranks, blocking; five numbers.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
            DisagreementError: on all ranks; they are at different batches.
        """
        message = flags(requests, self.device, faults.any(self.device), self.batch)
        all_reduce_(message, op=dist.ReduceOp.MAX)
        is_faulty, requests, is_same_batch = read_flags(message)
        if not is_same_batch:
            raise_at_other_batches(self.batch, self.step, None)
        if is_faulty:
            raise_fault(first_fault(faults.first(), self.fault_group))
        return requests

    def forget_late_faults(self) -> None:
        """Forget the flags of the last exchange: all ranks have been told, or the residuals are replaced."""
        if self.compressed is not None:
            self.compressed.fault = None

    # Also called by the strategies ----------------------------------------------------------------------------------

    def check_method(self) -> None:
        """Take the method of the coming step; raise if it has been replaced by one that does not fit this worker."""
        if self.method is not self._made_for:
            self.method.what.check_replacement(self._made_for.what)
            self.method.when.check_replacement(self._made_for.when)
        self.check_schedule()
        if self.compressed is not None:
            self.compressed.payload = self.method.what

    def check_schedule(self) -> None:
        """Raise if the coming step does not fit the state; called when the training starts."""

    def observe_loss(self, loss: Tensor) -> None:
        """Take in the loss of the coming step; a scalar, any device. Only adaptive rules use it. Does not wait."""

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return metrics to log after a step; metrics that cost a pass over memory are included only if `is_due`."""
        raise NotImplementedError

    def whole_momentum(self) -> dict[Parameter, Tensor]:
        """Return the velocities that this node keeps in parts, whole; on the CPU, so that the device has one at a time.

        Collective: the ranks of a node, blocking.
        """
        return {}

    def finish(self) -> None:
        """End the training: average, or compare, the weights."""
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        """Move this rank's own state."""
        raise NotImplementedError

    def equal_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: numbers, for the checkpoint itself."""
        return {"step": self.step, "small_numel": self.params.small_numel}

    def load_equal_state(self, state: Mapping[str, Any]) -> None:
        """Load what `equal_state` returned, among other values."""
        self.step, self.params.small_numel = state["step"], state["small_numel"]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: tensors on the CPU and primitives."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        raise NotImplementedError


def raise_fault(fault: Fault) -> None:
    """Raise the error of a fault."""
    raise fault.error(fault.text)


@dataclass
class Ending:
    """Whether a warning is due when a plain loop ends: its worker is deleted, or Python exits.

    No rank can average then, because other ranks may have ended already.

    Attributes:
        step: the step after which the weights differ by rank and were neither averaged nor saved; None if they agree.
    """

    step: int | None = None
