"""The plan of one step of one optimizer: a driver makes it once per step, strategies and plain loops read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StepPlan:
    """The plan of the coming step: equal on all ranks, made from the method, the participants and the step.

    Attributes:
        is_local: whether the optimizer steps with this rank's gradients (on two levels with the node's mean), and
            weights are averaged afterwards. If not, gradients are exchanged before the optimizer's step.
        reduce: which ranks all-reduce the gradients during backward: "all" ranks as in DDP, the ranks of a "node", or
            "none".
        density: the fraction of elements that is sent of a compressed tensor; 1.0 in a dense step.
        clips_before_exchange: whether each rank clips its own gradient; if not, the mean is clipped, as in DDP. Delayed
            sums must not be clipped.
        clip_factor: the factor for the threshold of a norm, if gradients are clipped before the exchange. The mean of N
            independent gradients has 1/sqrt(N) of the norm of one gradient (arXiv 1712.01887, eq. 8): sqrt(N).
        k_steps: the period in use, in local steps; 1 if the step is synchronous.
        takes_one_gradient: whether the step must not be made of several gradients, each exchanged, as when a closure is
            called twice: elements that are not sent are kept.
    """

    is_local: bool = False
    reduce: Literal["all", "node", "none"] = "all"
    density: float = 1.0
    clips_before_exchange: bool = False
    clip_factor: float = 1.0
    k_steps: int = 1
    takes_one_gradient: bool = False

    @property
    def is_sparse(self) -> bool:
        """Whether the payload sends a part of the elements."""
        return self.density < 1.0
