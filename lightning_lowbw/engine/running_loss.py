"""The running mean of the training loss since the last average, which the adaptive periods follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOSS_DECAY = 0.9  # of the weight of a step, with each step after it


class RunningLoss:
    """A mean of losses in which late steps weigh more. Waits for no device.

    Example:
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
        """Take the loss of the step into the mean, if one has been observed."""
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
        """Take over what `state_dict` returned."""
        total, self._weight = state["total"], state["weight"]
        self._total = None if total is None else total.to(device)
