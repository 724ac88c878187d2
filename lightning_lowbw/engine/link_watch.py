"""Detects whether the link has changed since the density was chosen."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_lowbw.where.peers import Peers

WATCHED_STEPS = 200
CHANGE = 2.0  # a smaller factor than this does not count as a change


class LinkWatch:
    """Compares the measured waits for the exchange with the predicted ones, over windows of steps.

    Args:
        predicted_s: seconds per step.
        least_s: seconds per step below which no wait is too long.
    """

    def __init__(self, predicted_s: float, least_s: float) -> None:
        self.predicted_s, self._least_s = predicted_s, least_s
        self._num_steps, self._exposed_before_s = 0, 0.0

    def restart(self) -> None:
        """Begin a new window."""
        self._num_steps = 0

    def observe(self, peers: Peers, device: torch.device) -> float | None:
        """Count a step; at the end of a window return the seconds of the exchange per step, if they differ from the
        prediction.

        Collective: all ranks; at the end of a window, a number.

        Args:
            peers: the participants, with the ledger of the waits.
            device: of the message.
        """
        peers.ledger.settle()
        exposed_s = peers.ledger.exposed_s
        if self._num_steps == 0:
            self._exposed_before_s = exposed_s
        self._num_steps += 1
        if self._num_steps <= WATCHED_STEPS:
            return None
        slowest = torch.tensor([(exposed_s - self._exposed_before_s) / WATCHED_STEPS], device=device)
        peers.all_reduce_(slowest, dist.ReduceOp.MAX)
        self.restart()
        seconds = float(slowest)
        is_longer = seconds > CHANGE * max(self.predicted_s, self._least_s)
        is_shorter = CHANGE * seconds < self.predicted_s
        return seconds if is_longer or is_shorter else None
