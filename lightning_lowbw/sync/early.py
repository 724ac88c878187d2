"""Gradients in several messages: all but the last begin while the backward pass makes the gradients of the last one.

The content of the messages does not depend on the time: if the gradients of a group are not complete, because a rank
has not used a parameter, the group begins after the backward pass, before the groups that follow it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_lowbw.payloads.exchange import Pending
from lightning_lowbw.payloads.params import Row

NUM_GROUPS = 8  # the last group is not hidden; each group costs the host some launches
LEAST_NUMEL = 1 << 18  # elements of a group, below which a message is mostly latency


def groups_of(numels: Sequence[int]) -> list[slice]:
    """Cut tensors of these sizes into groups of consecutive tensors.

    Examples:
        >>> groups_of([LEAST_NUMEL, 2, 3])
        [slice(0, 1, None), slice(1, 3, None)]
    """
    least, ends, numel = max(LEAST_NUMEL, sum(numels) // NUM_GROUPS), [0], 0
    for number, each in enumerate(numels, 1):
        numel += each
        if numel >= least or number == len(numels):
            ends.append(number)
            numel = 0
    return [slice(*each) for each in pairwise(ends)]


def share_begun_early(numels: Sequence[int]) -> float:
    """Return the share of the elements that is not in the last group; sizes are in the order of the model."""
    *early, _ = groups_of(numels[::-1])
    return sum(sum(numels[::-1][group]) for group in early) / sum(numels)


@dataclass(frozen=True)
class Sent:
    """A group that has been sent.

    Attributes:
        gradients: the gradients at that time, by name, each with its version.
    """

    pending: Pending
    gradients: Mapping[str, tuple[Tensor, int]]

    def changed(self, rows: Iterable[Row]) -> Iterator[str]:
        """Yield the names of tensors whose gradients have changed since then."""
        for row in rows:
            gradient, version = self.gradients.get(row.name, (None, 0))
            if gradient is not None and (row.parameter.grad is not gradient or gradient._version != version):
                yield row.name


@contextmanager
def watching(groups: Sequence[Sequence[Row]], begin: Callable[[Sequence[Row]], None]) -> Iterator[None]:
    """Begin groups, in their order, as soon as a backward pass has made all of their gradients.

    Args:
        groups: the groups of rows, in order.
        begin: is called with each group.
    """
    number_of = {row.parameter: number for number, rows in enumerate(groups) for row in rows}
    missing, waiting = [{row.parameter for row in rows} for rows in groups], list(reversed(groups))
    lock = threading.Lock()  # a backward pass has a thread for each device

    @torch.no_grad()
    def note(parameter: Tensor) -> None:
        with lock:
            missing[number_of[parameter]].discard(parameter)  # type: ignore[index]
            while waiting and not missing[len(groups) - len(waiting)]:
                begin(waiting.pop())

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in number_of]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
