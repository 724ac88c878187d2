"""The end of a plain loop: rank 0 says so where it leaves each rank with weights of its own.

No rank can average then, because others may have ended already. Known without communication: whether a step was taken
since the last average, and whether a state was saved after it, from which a resume continues.
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
    """Whether a warning is due when a worker is deleted, or when Python exits.

    Attributes:
        step: the step after which the weights differ by rank and were neither averaged nor saved; None if they agree.
    """

    step: int | None = None

    def watch(self, worker: Worker) -> None:
        """Warn on rank 0 when the worker is deleted, or at exit: the optimizer of a script often lives until then."""
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
