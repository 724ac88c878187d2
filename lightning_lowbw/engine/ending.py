"""The end of a plain loop: rank 0 says so where it leaves each rank with weights of its own.

No rank can average then: others may have ended already. What is known without asking them is whether a step has been
taken since the last average, and whether a state has been saved after it, from which a resume goes on.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import finalize

from lightning_lowbw.namespaces import LOGGER

if TYPE_CHECKING:
    from lightning_lowbw.engine.worker import Worker

_logger = logging.getLogger(LOGGER)


@dataclass
class Ending:
    """What is to be said when a worker is gone, or Python ends.

    Attributes:
        step: after which the weights differ by rank, and nobody has taken care of it; None where there is none.
    """

    step: int | None = None

    def watch(self, worker: Worker) -> None:
        """Begin to; at exit as well, for the optimizer of a script is there until then."""
        if worker.peers.rank == 0:
            finalize(worker, _warn_if_apart, self)

    def note(self, worker: Worker) -> None:
        """Note how a step has left the weights."""
        self.step = None if worker.parameters_agree else worker.step


def _warn_if_apart(ending: Ending) -> None:
    if ending.step is None or getattr(sys, "last_type", None) is not None:  # an exception has ended the program
        return
    # No warning: as an error it would be lost in a finalizer.
    _logger.warning(
        f"The loop has ended after step {ending.step}, between two averages: each rank has weights of its own, and "
        "what was saved of the model outside of worker.consensus() is those of one rank. Call worker.finish() after "
        "the last step, on all ranks, before the model is saved."
    )
