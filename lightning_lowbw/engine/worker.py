"""The common part of the two drivers: one rank's side of a method for one optimizer, called for each step."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_lowbw.arguments import names_of
from lightning_lowbw.engine.control import SAVE, STOP
from lightning_lowbw.engine.ending import Ending
from lightning_lowbw.engine.faults import Found
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.what.top_k import small_numel
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.method import Method
    from lightning_lowbw.engine.narrow_exchange import NarrowExchange
    from lightning_lowbw.engine.sparse_exchange import SparseExchange


class Worker:
    """One rank's side of a method for one optimizer; it has a counter of its own.

    In a plain loop `Method.attach` returns one, and `optimizer.step()`, or a GradScaler's `scaler.step(optimizer)`, is
    all there is to call: `step` is wrapped and does the rest, also where a closure is given. Two finer tools:

        worker.prepare()              # before clipping gradients by hand: norms at ``c * worker.clip_factor``
        with worker.stepping():       # around a step that may be left out, on all ranks or on none
            if worker.exchange(skip_nonfinite=True):  # methods that average weights take every step
                optimizer.step()

    Attributes:
        method: the configuration; may be replaced between steps, on all ranks alike.
        optimizer: the user's own.
        peers: the participants and the ranks of the node.
        step: optimizer steps completed (a step that a GradScaler skips counts, as in `trainer.global_step`).
        whole_numels: elements of the parameters of which this rank has shards.
        torn: what an exception has interrupted, in words; empty when the next step is complete.
        batch: the number of the batch in the run, counted by the caller; 0 in a plain loop. Ranks that exchange in
            different batches, because one has left out a step that the others take, raise an error.
        stop_requested: set it on any rank to stop all ranks.
        stop_agreed: whether the last control message contains a request to stop; equal on all ranks.
        save_requested: set it on any rank to save on all ranks.
        save_agreed: as `stop_agreed`.
        sparse: the exchange of the largest elements; None unless the payload is `TopK`.
        narrow: that of values in few bits; None unless the payload has some.
        found: what this rank has found in the gradients.
        ending: logs a warning if a plain loop ends with weights that differ by rank.
        is_stepping: whether a step is being taken, inside of `stepping`.
        is_prepared: whether `list_gradients` has been called for this step, and not yet `exchange`.
        is_exchanged: whether `exchange` has been called for this step.
        is_taken: whether the step is taken, as returned by the last `exchange`.
        is_compared: whether a plain loop has compared the ranks since it began, or since it loaded a state.
    """

    parameters_agree: bool = True  # whether they are the same on all ranks; known without communication

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        peers: Peers,
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS evaluates its closure several times per step, which needs whole gradients: use strategy='ddp'."
            )
        self.method, self.optimizer, self.peers = method, optimizer, peers
        self._made_for = method.what
        self.step = self.batch = 0
        self.torn = ""
        self.sparse: SparseExchange | None = None
        self.narrow: NarrowExchange | None = None
        self.found = Found()
        self._names = names_of(named_parameters)
        self.whole_numels: Mapping[Parameter, int] = {}
        self.is_prepared = self.is_exchanged = self.is_stepping = False
        self.is_taken, self.is_compared = True, False
        self.stop_requested = self.stop_agreed = False
        self.save_requested = self.save_agreed = False
        self.ending = Ending()

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter, by which its state is kept."""
        if parameter not in self._names:  # not in the module, for example a parameter of the loss
            number = next(number for number, each in enumerate(self.parameters()) if each is parameter)
            name = f"optimizer.{number}"
            while name in self._names.values():  # what another has kept, which was at this place before, is its own
                name += "'"
            self._names[parameter] = name
        return self._names[parameter]

    def parameters(self) -> list[Parameter]:
        """Return all parameters of the optimizer, also frozen ones; once each, in order."""
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def by_name(self) -> dict[str, Parameter]:
        """Return all parameters of the optimizer by name."""
        return {self.name_of(parameter): parameter for parameter in self.parameters()}

    @functools.cached_property
    def small_numel(self) -> int:
        """The number of elements below which a tensor is small; computed once, for the tensors trained then."""
        return small_numel(self.numel_of(parameter) for parameter in self.parameters() if parameter.requires_grad)

    def numel_of(self, parameter: Parameter) -> int:
        """Return the elements of a parameter; of a sharded one, of the whole."""
        return self.whole_numels.get(parameter, as_real(parameter).numel())

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters()[0].device

    # What the coming step communicates, read by the strategies ------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """Whether nothing is communicated before the optimizer has stepped."""
        raise NotImplementedError

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are all-reduced during backward, as DDP does."""
        raise NotImplementedError

    @property
    def reduces_in_node(self) -> bool:
        """Whether they are all-reduced inside each node instead, and what follows is the node's."""
        raise NotImplementedError

    @property
    def clips_before_exchange(self) -> bool:
        """Whether gradients are clipped before the exchange; else after it, as in DDP."""
        raise NotImplementedError

    @property
    def clip_factor(self) -> float:
        """What the threshold of a norm is multiplied with, where gradients are clipped before the exchange."""
        raise NotImplementedError

    # A step, in the order of its calls ------------------------------------------------------------------------------

    def prepare(self, *, reduced: Collection[Parameter] = ()) -> None:
        """List the gradients of this step and check them, before the caller clips them: both calls below."""
        self.list_gradients(reduced=reduced)
        self.check_gradients()

    def list_gradients(self, *, reduced: Collection[Parameter] = (), by_clipping: bool = False) -> None:
        """List the tensors of this step; `exchange` calls it if the caller has not.

        In place:
            On two levels `.grad` of parameters not in `reduced` becomes the mean of the node.

        Collective: on two levels the ranks of a node, where there are such parameters; else nothing is communicated.

        Args:
            reduced: parameters whose `.grad` is the mean already (by DDP): over all ranks, over the node where
                `reduces_in_node`.
            by_clipping: whether gradients are exchanged before the step, to be clipped by hand: on all ranks or none.
        """
        raise NotImplementedError

    def check_gradients(self) -> None:
        """Check the listed gradients for NaN and inf, in a pass over memory; `exchange` tells all ranks the result.

        Needed before clipping, which spreads a NaN, and before a step that may be skipped: a residual must not have
        taken its gradients. Where nothing is called, `exchange` checks them in the pass that accumulates them.
        """

    def exchange(self, *, skip_nonfinite: bool = False, applies: bool = False) -> bool:
        """Turn the gradients into those the optimizer steps with; return whether the step is to be taken."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Count the step; average the replicas, if it is time."""
        raise NotImplementedError

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose `exchange` and the optimizer's own step; afterwards comes `after_step`."""
        self.is_stepping = True
        try:
            yield
        except BaseException:
            self._tear()
            raise
        finally:
            self.is_stepping = self.is_prepared = self.is_exchanged = False
        self.after_step()
        self.ending.note(self)

    def give_back(self) -> None:
        """Restore the user's settings of the optimizer, after a step or an exception."""

    def _tear(self) -> None:
        """End a step that an exception has interrupted; some weights may have been stepped already."""
        if self.is_exchanged and self.is_taken:
            self.torn = f"the optimizer's step after step {self.step}"
        self.give_back()

    def recall(self) -> None:
        """Take back exchanges in progress, before a state is saved during the handling of an exception.

        Communicates nothing, and does not wait.
        """
        self._tear()  # of a step whose gradients were exchanged to be clipped

    # Requests between ranks -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> int:
        """`stop_requested` and `save_requested` as one number, for a control message."""
        return STOP * self.stop_requested | SAVE * self.save_requested

    @requests.setter
    def requests(self, requests: int) -> None:
        self.stop_requested, self.save_requested = bool(requests & STOP), bool(requests & SAVE)

    def agree_on(self, requests: int) -> None:
        """Read the requests of all ranks from a control message."""
        self.stop_agreed, self.save_agreed = bool(requests & STOP), bool(requests & SAVE)
        if self.save_agreed:
            self.save_requested = False

    # Also called by the strategies ----------------------------------------------------------------------------------

    def check_schedule(self) -> None:
        """Raise if the coming step does not fit the state; called when the training starts."""

    def metrics(self, is_due: bool) -> dict[str, float | Tensor]:
        """Return metrics to log after a step; those that cost a pass over memory only if `is_due`."""
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        """Move this rank's own state."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: tensors on the CPU and primitives."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        raise NotImplementedError
