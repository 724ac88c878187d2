"""Fragments of a model, their averages in progress, and the arithmetic that applies an average to the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError, NonFiniteGradientError
from lightning_lowbw.kernels.tensors import copy_all_
from lightning_lowbw.payloads.exchange import Pending
from lightning_lowbw.schedules.every_k import balance
from lightning_lowbw.sync.status import Fault, Faults, status_message

# Averages in progress ------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """The sums over ranks in the status of an average.

    Attributes:
        num_skipped: local steps that ranks have skipped since the last average.
        num_losses: ranks that have a loss.
        loss: the sum of their losses; inf if a loss is not positive.
        lr: the sum of the learning rates.
        num_resized: ranks on which a buffer has another shape than was agreed on.
    """

    num_skipped: float = 0.0
    num_losses: float = 0.0
    loss: float = 0.0
    lr: float = 0.0
    num_resized: float = 0.0


NUM_LOSSES, LOSS = map(Sums._fields.index, ("num_losses", "loss"))


def average_status(
    sums: Sums, loss: Tensor | None, fault: Tensor | float, mark: Tensor | int, peers: Peers, device: torch.device
) -> Tensor:
    """Return a rank's message, to be summed over the ranks.

    Args:
        sums: the values that the host knows.
        loss: the loss of this rank, on the device; None if it has none.
        fault: whether this rank has found a fault.
        mark: the mark of its step and its anchor.
        peers: the ranks.
        device: the device of the message.
    """
    message = status_message(sums, fault, mark, peers.rank, peers.num_ranks, device)
    if loss is not None:
        # A sum with inf is inf on all ranks, and the rules leave k as it is. NaN would be taken for damage.
        is_positive = torch.isfinite(loss) & (loss > 0)
        message[NUM_LOSSES], message[LOSS] = 1.0, torch.where(is_positive, loss, float("inf"))
    return message


@dataclass(eq=False)
class Average:
    """An average that has been begun.

    Attributes:
        step: optimizer steps completed when it was begun.
        parameters: the parameters that are averaged.
        takes_buffers: whether the buffers are averaged, too.
        whole: the message of the tensors that are averaged whole, with the status; None if `changes` has the status.
        changes: the message of the tensors that the payload sends; None if there are none.
        faults: the faults of the parameters, and late faults.
        snapshots: copies of the parameters when it was begun, if local steps go on meanwhile.
        buffer_snapshots: copies of the buffers, by name; as `snapshots`.
    """

    step: int
    parameters: list[Parameter]
    takes_buffers: bool = False
    whole: Pending | None = None
    changes: Pending | None = None
    faults: Faults = field(default_factory=Faults)
    snapshots: list[Tensor] | None = None
    buffer_snapshots: dict[str, Tensor] = field(default_factory=dict)

    def wait_for_whole(self) -> tuple[dict[str, Tensor], Tensor]:
        """Wait for the means of the tensors that are averaged whole, and for the status."""
        if self.whole is None:
            assert self.changes is not None
            return {}, self.changes.wait().status
        arrived = self.whole.wait()
        return arrived.mean.dense(), arrived.status

    def wait_for_changes(self) -> dict[str, Tensor]:
        """Wait for the mean changes of the tensors that the payload sends, by name."""
        return {} if self.changes is None else self.changes.wait().mean.dense()


def nonfinite_weight(peers: Peers, step: int, name: str) -> Fault:
    """Return the fault of a rank whose local steps have left an inf or NaN in a parameter."""
    shard = f", in the shard of rank {dist.get_rank()}" if peers.are_shards else ""
    return Fault(
        4,
        NonFiniteGradientError,
        f"The local steps of {'node' if shard else 'rank'} {peers.rank} up to step {step} left parameter {name!r} "
        f"infinite or NaN{shard}. Nothing was averaged. Lower the learning rate, or clip gradients.",
    )


# Arithmetic of an average -------------------------------------------------------------------------------------------


def changes_of(weights: Sequence[Tensor], starts: Sequence[Tensor]) -> list[Tensor]:
    """Return each weight's change since the last average, rounded to its own type; in float32.

    Args:
        weights: real, at most 32 bits wide.
        starts: the anchor of each; float32.
    """
    # Nearly always all weights are float32: one launch subtracts them.
    are_whole = [weight.dtype == torch.float32 for weight in weights]
    pairs = list(compress(weights, are_whole)), list(compress(starts, are_whole))
    moved = iter(torch._foreach_sub(*pairs) if any(are_whole) else ())
    # Weights of a half type come one by one: each takes a float32 copy.
    return [
        next(moved) if is_whole else _change_of(weight, start, weight.dtype)
        for is_whole, weight, start in zip(are_whole, weights, starts, strict=True)
    ]


def _change_of(now: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a change, rounded as the weights are: a weight that has not moved has a change of zero."""
    return now.float() - start.to(dtype).float()


def unsent_of(mean_change: Tensor, snapshot: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to the residual if an average is not applied: the weights keep this rank's change.

    Adding it restores the mean of the residuals over the participants, not the residual of each participant.

    Args:
        mean_change: the mean change that has arrived.
        snapshot: the weight when the average was begun.
        start: the anchor.
        dtype: the dtype of the weight.
    """
    return mean_change.reshape(-1) - _change_of(snapshot, start, dtype).reshape(-1)


def apply_means_(
    now: list[Tensor], before: list[Tensor], means: list[Tensor], have_moved: Sequence[bool], mixing: float | None
) -> None:
    """Set weights to their means; weights that have moved since the average was begun keep these steps.

    ``x = x + (mean - x at the begin)``, or with mixing ``x = mixing x + (1 - mixing) mean``.

    In place:
        `now`; `means`, which are used up.

    Args:
        now: the weights; real.
        before: the weights when the average was begun; float32 (or wider).
        means: float32 (or wider).
        have_moved: for each weight, whether it has moved since then.
        mixing: see `EveryK`.
    """
    are_still = [not has_moved for has_moved in have_moved]
    copy_all_(list(compress(now, are_still)), list(compress(means, are_still)))
    now, before, means = (list(compress(tensors, have_moved)) for tensors in (now, before, means))
    if now and mixing is None:
        torch._foreach_sub_(means, before)
        torch._foreach_add_(now, means)
    elif mixing is not None:  # one by one: weights of half types are copied
        for mean, weight in zip(means, now, strict=True):
            mean.lerp_(weight.to(mean.dtype), mixing)
        copy_all_(now, means)


# Fragments ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Fragment:
    """Parameters that are averaged together.

    Attributes:
        parameters: in order.
        takes_buffers: whether the buffers are averaged with them; True for one fragment of a model only.
        steps: local steps since its last average was begun. Before its first average it counts as if there had been
            one. None before the first local step.
        moved: the parameters that were trained since then, in order.
        work: its average, if one has been begun and not applied.
    """

    parameters: list[Parameter]
    takes_buffers: bool
    steps: int | None = None
    moved: dict[Parameter, None] = field(default_factory=dict)
    work: Average | None = None


def make_fragments(
    parameters: Sequence[Parameter], num_fragments: int, sent_bytes: Callable[[Parameter], int]
) -> list[Fragment]:
    """Divide parameters into fragments that send nearly equal numbers of bytes; the last one contains the buffers.

    Args:
        parameters: the parameters of the optimizer.
        num_fragments: at most as many as there are parameters.
        sent_bytes: returns the bytes that an average sends for a parameter.

    Raises:
        ConfigurationError: there are fewer parameters.
    """
    if len(parameters) < num_fragments:
        raise ConfigurationError(
            f"num_fragments={num_fragments}, and the optimizer has {len(parameters)} tensors: give at most as many."
        )
    # By bytes, because what a payload sends of a tensor need not grow with its size.
    chosen = balance(list(map(sent_bytes, parameters)), [0] * num_fragments)
    members = [[p for p, of in zip(parameters, chosen, strict=True) if of == i] for i in range(num_fragments)]
    return [Fragment(of_one, of_one is members[-1]) for of_one in members]


def differing(fragments: Iterable[Fragment]) -> list[Parameter]:
    """Return the parameters that may differ between ranks: those trained since their last average."""
    unequal: dict[Parameter, None] = {}
    for fragment in fragments:  # an average in progress has not made its parameters equal yet
        unequal.update(dict.fromkeys([] if fragment.work is None else fragment.work.parameters))
        unequal.update(fragment.moved)
    return list(unequal)


def due(fragments: Sequence[Fragment], k_steps: int, delay_steps: int) -> list[Fragment]:
    """Return the fragments whose next average is to begin now."""
    return [fragment for fragment in fragments if (fragment.steps or 0) >= max(k_steps, delay_steps + 1)]
