"""Counts the backward passes of a fit, to detect gradients that would be exchanged twice."""

from __future__ import annotations

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
