"""Counts the backward passes of a fit, to detect gradients that would be exchanged twice."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from lightning_lowbw.engine.worker import Worker


class Backwards:
    """Counts backward passes.

    Attributes:
        num: of the fit, so far.
    """

    def __init__(self) -> None:
        self.num = 0
        self._num_exchanged: dict[int, int] = {}  # when the gradients of an optimizer were exchanged, by its id

    def begin_fit(self) -> None:
        """Begin to count."""
        self.num = 0
        self._num_exchanged.clear()

    def take_new(self, worker: Worker) -> bool:
        """Return whether there has been a backward pass since the last call for this optimizer; until the next, False.

        There has been none in the batch norm epoch of StochasticWeightAveraging: the gradients are those of the last
        exchange then, and sent again they would count twice.
        """
        last = self._num_exchanged.get(id(worker.optimizer), 0)
        self._num_exchanged[id(worker.optimizer)] = self.num
        return last != self.num


def reaches(graph: Any, parameters: Collection[Tensor]) -> bool:
    """Return whether a loss depends on some of the parameters; also after its backward pass.

    Args:
        graph: the loss's `grad_fn`.
    """
    waiting, seen = [graph], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) in parameters:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False
