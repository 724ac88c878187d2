"""What a replica keeps between averages: its place in the schedule, fragments, averages in progress, buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.collectives import broadcast_flat_
from lightning_lowbw.comm.peers import Peers, wide_dtype
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import as_real, copy_all_, differences
from lightning_lowbw.schedules.every_k import RELATIVE_CHANGE, EveryK, Period, balance
from lightning_lowbw.sync.exchange import Deferred, DenseMean, Pending

# The sums in the status of an average.
NUM_ENDED, NUM_LOSSES, LOSS, LR, NUM_STOP, NUM_SAVE = range(6)
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
    """

    step: int
    parameters: list[Parameter]
    whole: Pending | None
    changes: Pending
    nonfinite: dict[str, Tensor] = field(default_factory=dict)
    snapshots: list[Tensor] | None = None
    buffer_snapshots: dict[str, Tensor] = field(default_factory=dict)

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


# Buffers: the mean of their changes; running variances include that between ranks ------------------------------------


class ReplicaBuffers:
    """The buffers of one replica.

    Args:
        named_buffers: a batch norm's ``X.running_var`` belongs to its ``X.running_mean``.

    Attributes:
        floating: those that are averaged, by name.
        counts: those of which the largest is taken, such as the number of batches a batch norm has seen, by name.
        start: of those that are averaged at the last average; empty before `begin`.
    """

    def __init__(self, named_buffers: Mapping[str, Tensor]) -> None:
        self.floating = {name: b for name, b in named_buffers.items() if b.is_floating_point() or b.is_complex()}
        self.counts = {name: b for name, b in named_buffers.items() if name not in self.floating}
        self.start: dict[str, Tensor] = {}
        means = {name: name.removesuffix("running_var") + "running_mean" for name in self.floating}
        # The running mean that belongs to a running variance, by its name.
        self._means = {
            name: mean for name, mean in means.items() if name.endswith("running_var") and mean in self.floating
        }

    def begin(self, peers: Peers) -> None:
        """Make the buffers from which the next changes are measured equal on all ranks.

        Collective: all ranks, the first time; a broadcast.
        """
        if self.floating and not self.start:
            self.start = self.snapshot()
            broadcast_flat_(self.start.values(), peers.broadcast_)

    def restart(self, names: Collection[str]) -> None:
        """Measure changes from 0 where a buffer was not finite and now is: a best loss that has been inf."""
        for name, start in self.start.items():
            if name in names:
                now = as_real(self.floating[name])
                start.masked_fill_(now.isfinite() & ~start.isfinite(), 0.0)

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of those that are averaged."""
        return dict(zip(self.floating, wide_copies(list(self.floating.values())), strict=True))

    def changes(self) -> list[Tensor]:
        """Return the change of each floating buffer since the last average.

        For a running variance ``var + (mean - start of mean)^2``, so that the mean over ranks includes the variance
        between them. A buffer that has not changed adds exactly 0, even if it is infinite.
        """
        now = self.snapshot()
        changes = dict(zip(now, differences(list(now.values()), [self.start[name] for name in now]), strict=True))
        variances, squares = self._squares_of_means(changes)
        if variances:
            torch._foreach_add_(variances, squares)
        return list(changes.values())

    def apply(self, mean_changes: Sequence[Tensor], snapshots: Mapping[str, Tensor]) -> None:
        """Take over the mean over ranks of `changes`.

        In place:
            The buffers and their starts; `mean_changes`, which are used up.

        Args:
            snapshots: of the buffers when the average was begun, where they have changed since; else empty.
        """
        if not self.floating:
            return
        changes = dict(zip(self.floating, mean_changes, strict=True))
        variances, squares = self._squares_of_means(changes)
        if variances:
            torch._foreach_sub_(variances, squares)
        starts = [self.start[name] for name in changes]
        targets = here = list(torch._foreach_add(starts, list(changes.values())))
        buffers = [as_real(buffer) for buffer in self.floating.values()]
        if snapshots:
            here = wide_copies(buffers)
            torch._foreach_add_(here, differences(targets, [snapshots[name] for name in changes]))
            if self._means:
                by_name = dict(zip(changes, here, strict=True))
                torch._foreach_clamp_min_([by_name[name] for name in self._means], 0.0)
        copy_all_(buffers, here)
        copy_all_(starts, targets)

    def _squares_of_means(self, changes: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the changes of running variances, and the squares of those of their running means."""
        moves = [changes[mean] for mean in self._means.values()]
        return [changes[name] for name in self._means], list(torch._foreach_mul(moves, moves)) if moves else []

    def agree_counts(self, peers: Peers) -> None:
        """Take the largest of integer buffers.

        Collective: all ranks; one all-reduce, blocking, if there are any.
        """
        if not self.counts:
            return
        counts = list(self.counts.values())
        flat = torch.cat([count.reshape(-1).to(torch.int64) for count in counts])
        peers.all_reduce_(flat, dist.ReduceOp.MAX)
        parts = flat.split([count.numel() for count in counts])
        copy_all_(counts, [part.view(count.shape) for count, part in zip(counts, parts, strict=True)])


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
    is_same = partial(torch.allclose, rtol=0.0, atol=0.0, equal_nan=True)
    return {name: each for name, each in own.items() if name not in shown or is_same(tensors[name], shown[name])}


def wide_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each real view, in the dtype in which it is summed."""
    reals = [as_real(tensor.detach()) for tensor in tensors]
    copies = [torch.empty_like(real, dtype=wide_dtype(real)) for real in reals]
    copy_all_(copies, reals)
    return copies
