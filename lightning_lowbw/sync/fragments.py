"""Fragments of a model, and the averages of them that have been begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.every_k import balance
from lightning_lowbw.sync.exchange import Pending
from lightning_lowbw.sync.status import Faults

# The sums in the status of an average.
NUM_ENDED, NUM_LOSSES, LOSS, LR, NUM_STOP, NUM_SAVE, NUM_RESIZED = range(7)


# Averages in progress ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Average:
    """An average that has been begun.

    Attributes:
        step: optimizer steps completed when it was begun.
        parameters: it is of.
        whole: of the tensors that are averaged whole, with the status; None where `changes` has the status.
        changes: of the tensors that the payload sends: the mean changes by name, flat.
        faults: of the parameters, and late ones; None of one that was saved.
        snapshots: of the parameters when it was begun, where local steps go on meanwhile.
        buffer_snapshots: of the buffers, by name; as `snapshots`.
        unsent: the names of buffers of which this rank has sent nothing, because their shape had changed.
    """

    step: int
    parameters: list[Parameter]
    whole: Pending | None
    changes: Pending
    faults: Faults | None = None
    snapshots: list[Tensor] | None = None
    buffer_snapshots: dict[str, Tensor] = field(default_factory=dict)
    unsent: Sequence[str] = ()

    def wait_for_whole(self) -> tuple[dict[str, Tensor], Tensor]:
        """Wait for the means of the tensors that are averaged whole, and for the status."""
        mean, status = (self.whole or self.changes).wait()
        return mean.dense() if self.whole is not None else {}, status


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
