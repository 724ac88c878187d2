"""The common part of the two drivers: one rank's side of a method for one optimizer, called for each step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_lowbw.arguments import names_of
from lightning_lowbw.engine.checks import check_not_in_ddp
from lightning_lowbw.engine.control import SAVE, STOP
from lightning_lowbw.engine.ending import Ending
from lightning_lowbw.engine.hooks import has_step_hooks
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import as_real, is_finite
from lightning_lowbw.what.top_k import small_numel
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.method import Method
    from lightning_lowbw.engine.narrow_exchange import NarrowExchange
    from lightning_lowbw.engine.sparse_exchange import SparseExchange


_wrapped: WeakSet[Optimizer] = WeakSet()


class Worker:
    """One rank's side of a method for one optimizer; it has a counter of its own.

    In a plain loop `Method.attach` returns one, and `optimizer.step()`, or a GradScaler's `scaler.step(optimizer)`, is
    all there is to call: `step` is wrapped and does the rest, also where a closure is given. Two finer tools:

        worker.prepare()              # before clipping gradients by hand: norms at ``c * worker.clip_factor``
        with worker.stepping():       # around a step that may be left out, on all ranks or on none
            if worker.exchange(skip_nonfinite=True):
                optimizer.step()

    Attributes:
        method: the configuration; may be replaced between steps, on all ranks alike.
        optimizer: the user's own.
        peers: the participants and the ranks of the node.
        step: optimizer steps completed (a step that a GradScaler skips counts, as in `trainer.global_step`).
        whole_numels: elements of the parameters of which this rank has shards.
        torn: what an exception has interrupted, in words; empty when the next step is complete.
        stop_requested: set it on any rank to stop all ranks.
        stop_agreed: whether the last control message contains a request to stop; equal on all ranks.
        save_requested: set it on any rank to save on all ranks.
        save_agreed: as `stop_agreed`.
        sparse: the exchange of the largest elements; None unless the payload is `TopK`.
        narrow: that of values in few bits; None unless the payload has some.
        late_faults: whether a residual has become inf or NaN in the last step, after its control message, by parameter:
            bool, scalars.
        ending: logs a warning if a plain loop ends with weights that differ by rank.
    """

    # What a step communicates, read by the strategies. reduces_in_backward: gradients are all-reduced during backward,
    # as DDP does. reduces_in_node: they are all-reduced inside each node instead, and what follows is the node's.
    # is_local: nothing is communicated before the optimizer has stepped. clips_before_exchange: gradients are clipped
    # before it, norms at `clip_factor` times the threshold; else after it, as in DDP.
    reduces_in_backward: bool
    reduces_in_node: bool
    is_local: bool
    clips_before_exchange: bool
    clip_factor: float
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
        self.step = 0
        self.torn = ""
        self.sparse: SparseExchange | None = None
        self.narrow: NarrowExchange | None = None
        self.late_faults: dict[Parameter, Tensor] = {}
        self._names = names_of(named_parameters)
        self.whole_numels: Mapping[Parameter, int] = {}
        self._is_first = True  # whether no step has been wrapped yet
        self._is_prepared = self._is_exchanged = self._is_stepping = False
        self._is_taken = True  # whether the step is taken, as returned by the last exchange
        self.stop_requested = self.stop_agreed = False
        self.save_requested = self.save_agreed = False
        self.ending = Ending()

    def name_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter, by which its state is kept."""
        if parameter not in self._names:  # not in the module, for example a parameter of the loss
            number = next(number for number, each in enumerate(self.parameters()) if each is parameter)
            self._names[parameter] = f"optimizer.{number}"
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

    # A step, in the order of its calls ------------------------------------------------------------------------------

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Begin the exchange of gradients that backward has completed, where the method can; returns at once."""

    def prepare(self, *, reduced: Collection[Parameter] = (), num_backwards: int = 0) -> None:
        """List the gradients of this step and check them, before the caller clips them: both calls below."""
        self.list_gradients(reduced=reduced, num_backwards=num_backwards)
        self.check_gradients()

    def list_gradients(self, *, reduced: Collection[Parameter] = (), num_backwards: int = 0) -> None:
        """List the tensors of this step; `exchange` calls it if the caller has not.

        In place:
            On two levels `.grad` of parameters not in `reduced` becomes the mean of the node.

        Collective: on two levels the ranks of a node, where there are such parameters; else nothing is communicated.

        Args:
            reduced: parameters whose `.grad` is the mean already (by DDP): over all ranks, over the node where
                `reduces_in_node`.
            num_backwards: counted by the caller. If ranks call this after different numbers of backward passes, because
                one has skipped a step that the others take, all ranks raise an error.
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
        self._is_stepping = True
        try:
            yield
        except BaseException:
            self._tear()
            raise
        finally:
            self._is_stepping = self._is_prepared = self._is_exchanged = False
        self.after_step()
        self.ending.note(self)

    def give_back(self) -> None:
        """Restore the user's settings of the optimizer, after a step or an exception."""

    def _tear(self) -> None:
        """End a step that an exception has interrupted; some weights may have been stepped already."""
        if self._is_exchanged and self._is_taken:
            self.torn = f"the optimizer's step after step {self.step}"
        self.give_back()

    def recall(self) -> None:
        """Take back exchanges in progress, before a state is saved during the handling of an exception.

        Communicates nothing, and does not wait.
        """
        self.give_back()

    def wrap_step(self) -> None:
        """Wrap `optimizer.step()`, to exchange and count; on the optimizer itself, as torch's schedulers do.

        Raises:
            ConfigurationError: another worker does so already.
        """
        optimizer, step = self.optimizer, self.optimizer.step
        if optimizer in _wrapped:
            raise ConfigurationError(
                f"A method is attached to this {type(optimizer).__name__} already, and each step would exchange "
                "twice. Attach once, or make a new optimizer."
            )
        _wrapped.add(optimizer)
        self.ending.watch(self)

        @functools.wraps(getattr(step, "__func__", step))
        def exchanging_step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._take_step(step, args, kwargs)

        optimizer.step = MethodType(exchanging_step, optimizer)  # type: ignore[method-assign]
        if "grad_scaler" not in inspect.signature(step).parameters:
            # Otherwise a GradScaler that finds an inf on one rank skips that rank's `step`, and the others wait for it.
            # With this it always calls `step`, which does scaling and skipping, as with torch's fused optimizers.
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def _take_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what `step` does, with the gradients that the method returns."""
        if self._is_first:  # the model may have been wrapped since the optimizer was
            self._is_first = False
            check_not_in_ddp(self.parameters(), self.peers.group)
        scaling = self._unscale()
        is_taken = True
        try:
            if args and callable(args[0]):
                args = (self._exchanging(args[0]), *args[1:])
            elif kwargs.get("closure") is not None:
                kwargs = {**kwargs, "closure": self._exchanging(kwargs["closure"])}
            else:
                is_taken = self._exchange_once(skip_nonfinite=scaling is not None)
                is_taken = is_taken and (scaling is None or _are_finite(self._gradients()))
            result = step(*args, **kwargs) if is_taken else None
        except BaseException:
            self._tear()
            self._is_prepared = self._is_exchanged = False
            raise
        if scaling is not None:
            vars(self.optimizer).update(scaling)  # the scaler deletes them
        if not self._is_stepping:
            self._is_prepared = self._is_exchanged = False
            self.after_step()
            self.ending.note(self)
        return result

    @torch.no_grad()
    def _unscale(self) -> dict[str, Any] | None:
        """Unscale and find the inf for a GradScaler that calls `step`; None if none is calling.

        In place:
            `.grad`. If the scaler has found an inf, the first gradient is filled with inf, so that the exchange reports
            it: clipping by value may have removed it.
        """
        optimizer = self.optimizer
        if not (hasattr(optimizer, "grad_scale") and hasattr(optimizer, "found_inf")):
            return None
        scaling = {name: vars(optimizer).pop(name) for name in ("grad_scale", "found_inf")}
        gradients = self._gradients()
        if scaling["grad_scale"] is not None:
            for gradient in gradients:
                gradient.div_(scaling["grad_scale"])
        if gradients and bool(scaling["found_inf"]) and (self.is_local or not self._is_exchanged):
            gradients[0].fill_(torch.inf)
        return scaling

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of the optimizer's parameters, of sparse ones the values."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that exchanges the gradients it computes, each time it is called."""

        def exchanging_closure() -> Any:
            self._is_prepared = self._is_exchanged = False  # those were other gradients
            result = closure()
            self._exchange_once()
            return result

        return exchanging_closure

    def _exchange_once(self, *, skip_nonfinite: bool = False) -> bool:
        if self._is_exchanged:  # by hand
            return self._is_taken
        applies = not (skip_nonfinite or has_step_hooks(self.optimizer))  # which may read the gradients
        return self.exchange(skip_nonfinite=skip_nonfinite, applies=applies)

    # Requests between ranks -----------------------------------------------------------------------------------------

    @property
    def requests(self) -> int:
        """The requests of this rank, for a control message."""
        return STOP * self.stop_requested | SAVE * self.save_requested

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


def _are_finite(gradients: Iterable[Tensor]) -> bool:
    are_finite = [is_finite(gradient) for gradient in gradients]
    return not are_finite or bool(torch.stack(are_finite).all())
