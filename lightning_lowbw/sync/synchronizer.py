"""The common part of the two drivers: one rank's side of a method for one optimizer, called for each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_lowbw.comm.collectives import WeakGroup, all_reduce_
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import part
from lightning_lowbw.payloads.corrections import ErrorFeedback
from lightning_lowbw.payloads.exchange import Exchange
from lightning_lowbw.payloads.params import Params
from lightning_lowbw.payloads.payload import Payload
from lightning_lowbw.payloads.whole import WholeExchange
from lightning_lowbw.schedules.schedule import Schedule
from lightning_lowbw.sync.status import (
    Faults,
    Requests,
    Status,
    agree_in_world,
    flags,
    overflow,
    raise_first,
    status_message,
    too_many_skipped,
)
from lightning_lowbw.sync.step_plan import StepPlan

MOST_SKIPPED = 10  # skipped steps in a row that are an error; a GradScaler's scale is 1/1024 by then


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
        method: the configuration, a `Method`; `use` replaces it.
        optimizer: the user's own.
        params: its tensors.
        peers: the participants and the ranks of the node.
        correction: how a gradient enters the residual, if gradients are compressed.
        compressed: the exchange of the tensors that the payload compresses; None if it sends whole tensors.
        step: optimizer steps completed (a step that a GradScaler skips counts, as in `trainer.global_step`).
        batch: the number of the batch in the run, counted by the caller; 0 in a plain loop. Ranks that exchange in
            different batches, because one rank has left out a step that the other ranks take, raise an error.
        requests: to stop or to save; sent in each status.
        loop: the state of a plain loop.
        is_prepared: whether the gradients of this step have been listed, and not yet exchanged.
        is_taken: whether this step is taken, as returned by `exchange`; None before.
        skip_norm: set by strategies: the norm of a gradient above which a step is skipped; infinity: only an inf or NaN
            makes ranks skip a step. None: such a gradient is an error, or the user's.
        skipped_steps: steps that have been skipped.
    """

    parameters_agree: bool = True  # whether the parameters are the same on all ranks; known without communication

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
        self.step = self.batch = 0
        self.correction: ErrorFeedback | None = None
        self.is_prepared = self._is_checked = self._has_exchanged = False
        self.is_taken: bool | None = None
        self._fault: Tensor | None = None  # after the check of the gradients: whether this rank has a fault; a scalar
        # If the model is sharded: the maximum of `status.flags` over the shards of the node, for the next status.
        self._node_flags: Tensor | None = None
        self.skip_norm: float | None = None
        self.skipped_steps = self._num_in_a_row = 0
        self.requests = Requests()
        self.loop = Loop()

    @property
    def plan(self) -> StepPlan:
        """The plan of the coming step."""
        raise NotImplementedError

    def use(self, method: Configuration) -> None:
        """Take a method for the coming steps, on all ranks alike.

        Raises:
            ConfigurationError: the method cannot replace the method of this worker.
        """
        method.what.check_replacement(self.method.what)
        method.when.check_replacement(self.method.when)
        self.method = method
        if self.compressed is not None:
            self.compressed.payload = method.what

    # A step, in the order of its calls ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check that the coming step fits the state; called when the training starts, and in each step.

        Collective: all ranks, if a first local step is coming; the buffers are compared.

        Raises:
            ConfigurationError: on all ranks; the method does not fit the state of this worker.
        """

    def prepare(
        self,
        *,
        reduced: Collection[Parameter] = (),
        node: WeakGroup | None = None,
        clip: Callable[[], None] | None = None,
    ) -> None:
        """List the gradients of this step, and check them for NaN and inf; `exchange` tells all ranks the result.

        Needed before clipping, which spreads a NaN, and before a step that may be skipped: a residual must not have
        taken its gradients. Without this call `exchange` checks them in the pass that accumulates them.

        In place:
            On two levels `.grad` of parameters not in `reduced` becomes the mean of the node.

        Collective: on two levels the ranks of a node, if there are such parameters. In the ranks of `node` an
            all-reduce of five numbers: requests, batches and faults, which the status passes to the peers.

        Args:
            reduced: parameters whose `.grad` is the mean already (by DDP): over all ranks, or over the node if
                `plan.reduce` is "node".
            node: the process group of the node, if the model is sharded inside it.
            clip: the user's own clipping, called before the check: it may drop an inf or NaN.
        """
        if not self.is_prepared:
            self._list_gradients(reduced)
        if clip is not None:
            clip()
        if self._is_checked:
            return
        self._is_checked = True
        self._check_gradients()
        if node is not None and self.peers.num_ranks > 1:
            self._node_flags = flags(self.requests.asked, self.params.device, self._fault, self.batch)
            all_reduce_(self._node_flags, node(), dist.ReduceOp.MAX)

    def _list_gradients(self, reduced: Collection[Parameter]) -> None:
        """List the tensors of this step; `prepare` describes the argument and the gradients that change."""
        raise NotImplementedError

    def _check_gradients(self) -> None:
        """Check the listed gradients, in a pass over memory."""

    def exchange(
        self, *, reduced: Collection[Parameter] = (), skip_nonfinite: bool = False, applies: bool = False
    ) -> bool:
        """Turn the gradients into the gradients that the optimizer steps with; return whether to take the step.

        Args:
            reduced: as for `prepare`, if that has not been called.
            skip_nonfinite: return False if a gradient has an inf or NaN, instead of raising: then nothing has changed.
            applies: step here, at the elements that were sent, if the optimizer would do nothing else.

        Raises:
            ConfigurationError: on all ranks; the step has exchanged another gradient, and the residuals have taken it.
        """
        if self._has_exchanged and self.plan.takes_one_gradient:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} has called its closure twice in step {self.step}, as SAM does: the "
                "first gradient would be sent, or kept to be sent later, although it is not what the optimizer steps "
                f"with. {self.method.what} needs an optimizer that calls it once; or use strategy='ddp'."
            )
        if skip_nonfinite:
            self.prepare(reduced=reduced)  # skipped gradients must not enter the residuals
        elif not self.is_prepared:
            self._list_gradients(reduced)
        self.is_prepared = False
        with part("exchange"):
            self.is_taken = self._has_exchanged = self._exchange(skip_nonfinite, applies)
        return self.is_taken

    def _exchange(self, skip_nonfinite: bool, applies: bool) -> bool:
        raise NotImplementedError

    def step_exchanged(self) -> None:
        """Step the parameters that `exchange` has left for this call, directly before the optimizer's step.

        In a plain loop the wrapped `step` calls it.

        In place:
            These parameters. Their `.grad` is None until the optimizer has stepped, so that it leaves them alone.
        """

    def _end_step(self) -> None:
        """Count the step; average the replicas if an average is due."""
        raise NotImplementedError

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose `exchange` and the optimizer's own step; afterwards count it, and average replicas if that is due.

        A step that raises ends the training: nothing is put back.
        """
        self.loop.is_stepping = True
        try:
            yield
        finally:
            self.loop.is_stepping = self.is_prepared = self._has_exchanged = False
            is_skipped, self.is_taken = self.is_taken is False, None
            self._fault = self._node_flags = None
        self._num_in_a_row = self._num_in_a_row + 1 if is_skipped else 0
        if is_skipped:
            self._count_skipped()
        self._end_step()
        self.loop.differs_after = None if self.parameters_agree else self.step

    def _count_skipped(self) -> None:
        """Count a skipped step; raise if too many steps in a row were skipped, which all ranks know."""
        self.skipped_steps += 1
        if self.skip_norm is not None and self._num_in_a_row >= MOST_SKIPPED:
            fault = too_many_skipped("all ranks", self.step, self._num_in_a_row)
            raise fault.error(fault.text)

    # Faults ---------------------------------------------------------------------------------------------------------
    # The sum of finite gradients may overflow. A fault that an exchange finds after its status has gone is in the next
    # status; or `check_late_faults` reports it, when weights are saved or the training ends.

    @property
    def _fault_group(self) -> Any:
        """The ranks that are told of a fault: all ranks. If a model is sharded, the peers are some of the ranks."""
        return None if self.peers.are_shards else self.peers.group

    @property
    def _here(self) -> str:
        """The rank or the node that the gradients or weights belong to, for an error on all ranks."""
        number, nodes, topology = self.peers.rank, self.peers.nodes, self.peers.topology
        if self.plan.reduce == "node" and not topology.is_flat:  # groups that come and go have no topology
            number, nodes = topology.node_of(number), topology.nodes
        return f"node {number} (ranks {list(nodes[number])})" if nodes else f"rank {number}"

    def _late_faults(self) -> Faults:
        """Return the faults that the last exchange has found after its status."""
        faults, exchange = Faults(), self.compressed
        if exchange is not None and exchange.fault is not None:
            signal = "changes of the weights" if self.method.when.averages_weights else "gradients"
            what = f"what was kept of earlier {signal} on {self._here}"
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
        peers, exchange, faults = self.peers, self.compressed, self._late_faults()
        if peers.num_ranks == 1 or peers.may_grow:  # an elastic group reports its faults before each round
            return
        # All ranks have flags of an average, or no rank has. After a step a rank has flags of its own gradients.
        averages_weights = self.method.when.averages_weights
        if peers.are_shards:
            agree_in_world(faults, 0, self.batch, self.step, self.params.device)
        elif exchange is not None and (exchange.fault is not None if averages_weights else exchange.residuals):
            device = self.params.device
            message = status_message((), faults.any(device), 0, peers.rank, peers.num_ranks, device)
            numbers = WholeExchange(peers).prepare({}).send(message).wait().status.tolist()
            if Status.read(numbers, peers.num_ranks).is_faulty:
                raise_first(faults, peers.group)
        self._forget_late_faults()

    def _forget_late_faults(self) -> None:
        """Forget the flags of the last exchange: all ranks have been told, or the residuals are replaced."""
        if self.compressed is not None:
            self.compressed.fault = None

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return metrics to log after a step; metrics that cost a pass over memory are included only if `is_due`."""
        return {} if self.skip_norm is None else {"skipped_steps": float(self.skipped_steps)}

    def finish(self) -> None:
        """End the training: average, or compare, the weights."""
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        """Move this rank's own state."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: tensors on the CPU and primitives."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` or `merge_states` returned, or its `state.equal_part`.

        The optimizer's own state must have been loaded before.

        Raises:
            ConfigurationError: it has tensors this optimizer does not have, or of another shape, or was made with
                another payload or correction.
        """
        if "local_rank" in state:
            self._load_own(state)
            self.loop.is_compared = False
            self._forget_late_faults()
        self.step, self.params.small_numel = state["step"], state["small_numel"]
        self.use(self.method)

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Load the values of a state that differ between ranks."""
        raise NotImplementedError


@dataclass
class Loop:
    """The state of a plain loop.

    Attributes:
        differs_after: the step after which the weights differ by rank and were neither averaged nor saved; None if they
            agree. A loop that ends then logs a warning: its worker is deleted, or Python exits. No rank can average
            then, because other ranks may have ended already.
        is_compared: whether the ranks have been compared since the loop began, or since it loaded a state.
        is_stepping: whether a step is being taken, inside of `stepping`.
    """

    differs_after: int | None = None
    is_compared: bool = False
    is_stepping: bool = False


def has_step_hooks(optimizer: Optimizer, but: Collection[Callable[..., Any]] = ()) -> bool:
    """Return whether anything is called before or after each step of an optimizer, or of all optimizers.

    Args:
        optimizer: the user's optimizer.
        but: this package's own hooks, which do not read gradients.
    """
    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    return any(hook not in but for hook in hooks)
