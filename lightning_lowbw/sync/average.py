"""What a replica keeps between averages: its place in the schedule, fragments, averages in progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.every_k import RELATIVE_CHANGE, EveryK, Period, balance
from lightning_lowbw.sync.exchange import Deferred, DenseMean, Pending

# The sums in the status of an average.
NUM_ENDED, NUM_LOSSES, LOSS, LR, NUM_STOP, NUM_SAVE, NUM_RESIZED = range(7)
LOSS_DECAY = 0.9  # of the weight of a step, with each step after it


# Averages in progress ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Average:
    """An average that has been begun.

    Attributes:
        step: optimizer steps completed when it was begun.
        parameters: it is of.
        whole: of the tensors that are averaged whole, with the status; None where `changes` has the status.
        changes: of the tensors that the payload sends: the mean changes by name, flat.
        nonfinite: whether a parameter has an inf or NaN, by name: bool, scalars on the device.
        snapshots: of the parameters when it was begun, where local steps go on meanwhile.
        buffer_snapshots: of the buffers, by name; as `snapshots`.
        unsent: the names of buffers of which this rank has sent nothing, because their shape had changed.
    """

    step: int
    parameters: list[Parameter]
    whole: Pending | None
    changes: Pending
    nonfinite: dict[str, Tensor] = field(default_factory=dict)
    snapshots: list[Tensor] | None = None
    buffer_snapshots: dict[str, Tensor] = field(default_factory=dict)
    unsent: Sequence[str] = ()

    def wait_for_whole(self) -> tuple[dict[str, Tensor], Tensor]:
        """Wait for the means of the tensors that are averaged whole, and for the status."""
        mean, status = (self.whole or self.changes).wait()
        assert status is not None
        return mean.dense() if self.whole is not None else {}, status

    def state_dict(self, name_of: Callable[[Parameter], str]) -> dict[str, Any]:
        """Wait for it, and return it on the CPU; it may be waited for again."""
        means, status = self.wait_for_whole()
        changes = self.changes.wait()[0].dense()
        self.whole = Deferred(lambda: DenseMean(means), status)
        self.changes = Deferred(lambda: DenseMean(changes))
        return {
            "step": self.step,
            "parameters": [name_of(parameter) for parameter in self.parameters],
            "means": {name: mean.cpu().clone() for name, mean in means.items()},
            "changes": {name: change.cpu().clone() for name, change in changes.items()},
            "status": status.cpu().clone(),
            "snapshots": [snapshot.cpu().clone() for snapshot in self.snapshots or []],
            "buffer_snapshots": {name: buffer.cpu().clone() for name, buffer in self.buffer_snapshots.items()},
            "unsent": list(self.unsent),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], parameters: Mapping[str, Parameter], device: torch.device) -> Average:
        """Return the average that `state_dict` has described, without requests to processes that have ended."""
        status = state["status"].to(device, copy=True)
        status[[NUM_STOP, NUM_SAVE]] = 0.0
        means = {name: mean.to(device, copy=True) for name, mean in state["means"].items()}
        changes = {name: change.to(device, copy=True) for name, change in state["changes"].items()}
        return cls(
            state["step"],
            [parameters[name] for name in state["parameters"]],
            Deferred(lambda: DenseMean(means), status),
            Deferred(lambda: DenseMean(changes)),
            snapshots=[snapshot.to(device) for snapshot in state["snapshots"]],
            buffer_snapshots={name: buffer.to(device) for name, buffer in state["buffer_snapshots"].items()},
            unsent=state.get("unsent", ()),
        )


def change_of(now: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a change since the last consensus, rounded as the weights are: one that has not moved has none; float32.

    Args:
        now: a weight, or a wide copy of it.
        start: the consensus; float32 (or wider).
        dtype: of the weight.
    """
    return now.float() - start.to(dtype).float()


@dataclass(eq=False)
class Fragment:
    """Parameters that are averaged together.

    Attributes:
        parameters: in order.
        takes_buffers: whether the buffers are averaged with them; of one fragment of a model only.
        steps: local steps since its last average was begun; before the first, as if one had been. None before the
            first local step.
        moved: those of the parameters that were trained since then, in order.
        work: its average, if one has been begun and not applied.
    """

    parameters: list[Parameter]
    takes_buffers: bool
    steps: int | None = None
    moved: dict[Parameter, None] = field(default_factory=dict)
    work: Average | None = None

    def abandon(self) -> None:
        """Forget the average that has been begun: its parameters still differ between ranks."""
        if self.work is not None:
            moved = {*self.work.parameters, *self.moved}
            self.moved = {parameter: None for parameter in self.parameters if parameter in moved}
            self.work = None


def make_fragments(
    parameters: Sequence[Parameter], num_fragments: int, sent_bytes: Callable[[Sequence[Parameter]], list[int]]
) -> list[Fragment]:
    """Divide parameters into fragments that send nearly equal numbers of bytes; the last one contains the buffers.

    Args:
        parameters: of the optimizer.
        num_fragments: at most as many as there are parameters.
        sent_bytes: of parameters.

    Raises:
        ConfigurationError: there are fewer parameters.
    """
    if len(parameters) < num_fragments:
        raise ConfigurationError(
            f"num_fragments={num_fragments}, and the optimizer has {len(parameters)} tensors: give at most as many."
        )
    chosen = balance(sent_bytes(parameters), [0] * num_fragments)
    members = [[p for p, of in zip(parameters, chosen, strict=True) if of == i] for i in range(num_fragments)]
    return [Fragment(each, each is members[-1]) for each in members]


def due(fragments: Sequence[Fragment], k_steps: int, delay_steps: int) -> list[Fragment]:
    """Return the fragments of which an average is to be begun."""
    return [fragment for fragment in fragments if (fragment.steps or 0) >= max(k_steps, delay_steps + 1)]


def note_steps(
    fragments: Sequence[Fragment],
    parameters: Sequence[Parameter],
    sent_bytes: Callable[[Sequence[Parameter]], list[int]],
) -> None:
    """Note that a local step has trained parameters; new ones join the fragment that sends the fewest bytes.

    In place:
        The fragments.

    Args:
        parameters: of the optimizer, also frozen ones.
        sent_bytes: of parameters.
    """
    for fragment in fragments:
        assert fragment.steps is not None
        fragment.steps += 1
    owner = {p: fragment for fragment in fragments for p in fragment.parameters}
    new = [p for p in parameters if p not in owner]
    loads = [sum(sent_bytes(fragment.parameters)) for fragment in fragments] if new else []
    for parameter, number in zip(new, balance(sent_bytes(new), loads), strict=True):
        fragments[number].parameters.append(parameter)
        owner[parameter] = fragments[number]
    for parameter in parameters:
        if parameter.requires_grad:
            owner[parameter].moved[parameter] = None


# The place in the schedule -------------------------------------------------------------------------------------------


class Phase:
    """Whether steps are local, and the period; equal on all ranks, known without communication."""

    def __init__(self) -> None:
        self._local_since: int | None = None  # the step from which on steps are local, once that has come
        self._period: Period | None = None
        self._highest_lr = 0.0

    def _begin(self, when: EveryK) -> int | None:
        """Return the first local step; None while that is not known."""
        if self._local_since is None and isinstance(when.begin_step, int):
            return when.begin_step
        return self._local_since

    def is_local(self, when: EveryK, step: int) -> bool:
        """Return whether the coming step is after the synchronous ones."""
        begin = self._begin(when)
        return not when.is_always_synchronous and begin is not None and step >= begin

    def k_steps(self, when: EveryK) -> int:
        """Return the period of local steps."""
        return when.k_steps if when.rule == "fixed" else (self._period or Period(when.k_steps)).k

    def begin_local(self, when: EveryK) -> None:
        """Keep the step from which on steps are local, whatever becomes of the schedule."""
        self._local_since = self._begin(when)

    def has_decayed(self, lr: float) -> bool:
        """Note a learning rate; return whether it is lower than it has been; on this rank."""
        has_decayed = 0.0 < lr < self._highest_lr * (1 - RELATIVE_CHANGE)
        self._highest_lr = max(lr, self._highest_lr)
        return has_decayed

    def begin_at(self, step: int) -> bool:
        """Begin the local steps at a step, if it is not known yet; return whether it was not."""
        is_new = self._local_since is None
        self._local_since = step if is_new else self._local_since
        return is_new

    def adapt(self, when: EveryK, lr: float, loss: float, *, has_losses: bool) -> None:
        """Choose the period after an average, by the rule.

        Args:
            lr: mean over ranks.
            loss: mean since the last average, over the ranks that have one.
            has_losses: whether all ranks have one that should.

        Raises:
            ConfigurationError: on all ranks; the rule needs a loss.
        """
        if when.rule == "fixed":
            return
        if when.rule != "qsr" and not has_losses:
            raise ConfigurationError(
                f"rule={when.rule!r} chooses k by the training loss, and there was none: return it from "
                "training_step, or call worker.observe_loss(loss) in a loop of your own; or use rule='qsr'."
            )
        self._period = when.next_period(self._period or Period(when.k_steps), lr, loss)

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        period = None if self._period is None else asdict(self._period)
        return {"local_since": self._local_since, "highest_lr": self._highest_lr, "period": period}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, among other values."""
        self._local_since, self._highest_lr = state["local_since"], state["highest_lr"]
        self._period = None if state["period"] is None else Period(**state["period"])


class RunningLoss:
    """A mean of losses since the last average, in which late steps weigh more. Waits for no device.

    Examples:
        >>> loss = RunningLoss()
        >>> for value in (1.0, 3.0):
        ...     loss.observe(torch.tensor(value))
        ...     loss.end_step()
        >>> loss.mean()  # (0.9 + 3) / (0.9 + 1)
        tensor(2.0526)
    """

    def __init__(self) -> None:
        self._of_step: Tensor | None = None
        self._total: Tensor | None = None
        self._weight = 0.0

    def observe(self, loss: Tensor) -> None:
        """Add to the loss of the step in progress; a scalar, any device."""
        loss = loss.detach().float()
        self._of_step = loss if self._of_step is None else self._of_step + loss

    def end_step(self) -> None:
        """Add the loss of the step to the mean, if one has been observed."""
        if self._of_step is not None:
            self._total = self._of_step if self._total is None else LOSS_DECAY * self._total + self._of_step
            self._weight = LOSS_DECAY * self._weight + 1.0
            self._of_step = None

    def mean(self) -> Tensor | None:
        """Return the mean; None where none has been observed."""
        return None if self._total is None else self._total / self._weight

    def clear(self) -> None:
        """Begin anew, with the next step."""
        self._total, self._weight = None, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return it on the CPU."""
        return {"total": None if self._total is None else self._total.cpu().clone(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Load what `state_dict` returned."""
        total, self._weight = state["total"], state["weight"]
        self._total = None if total is None else total.to(device)


# What others are shown ------------------------------------------------------------------------------------------------


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each tensor, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def unchanged(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], shown: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what tensors had before others were shown, of those that the user's code has not changed meanwhile.

    Args:
        tensors: by name.
        own: what they had.
        shown: copies of what was put into them; of those that the user's code may change.
    """
    return {
        name: each
        for name, each in own.items()
        if name not in shown or (name in tensors and _is_same(tensors[name], shown[name]))
    }


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
