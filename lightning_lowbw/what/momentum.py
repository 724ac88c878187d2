"""How a gradient enters the residual: error feedback for any optimizer, momentum correction for SGD.

A correction says how a gradient enters the residual (the constants of `ops.reference.Segment`), which state of the
optimizer is the velocity, and what is left to the optimizer's step. `torch.optim.SGD`: momentum correction, arXiv
1712.01887. Adam and AdamW: `what.adam`. All others: error feedback; the optimizer steps with the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import Elsewhere, SecondMoment
from lightning_lowbw.ops.tensors import copy_all_, in_order

Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """How a gradient enters the residual of a param group's tensors, as in `ops.reference.Segment`."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    ahead: float = 0.0
    sign: float = 1.0


class ErrorFeedback:
    """``v = v + G``. The optimizer applies its own momentum and decay to the mean.

    Attributes:
        kind: saved in a checkpoint, because residuals and velocities depend on it.
        velocity_key: of the optimizer's state that is u; None without.
        is_complete: whether nothing of the optimizer's arithmetic is left out.
        masks: whether velocities are cleared where they have been sent, unless the user says.
    """

    kind = "error_feedback"
    velocity_key: str | None = None
    is_complete = False
    masks = True

    def __init__(self, optimizer: Optimizer, num_participants: int) -> None:
        self.optimizer, self.num_participants = optimizer, num_participants
        self._rates: dict[int, tuple[Tensor, int, float]] = {}  # by id of the group, see `rate_of`

    def rate_of(self, group: Group) -> float:
        """Return the learning rate of a group. On a device it is read once, and again when somebody has changed it."""
        rate = group["lr"]
        if not isinstance(rate, Tensor) or rate.device.type == "cpu" or rate.is_inference():
            return float(rate)
        known = self._rates.get(id(group))
        if known is None or known[0] is not rate or known[1] != rate._version:
            known = self._rates[id(group)] = (rate, rate._version, float(rate))
        return known[2]

    def local_keys(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the names of a parameter's other states in the optimizer that differ between ranks."""
        return ()

    def note(self) -> str:
        """Return the message to log when steps become sparse; empty for none."""
        return ""

    def check(self) -> None:
        """Raise ConfigurationError if a param group has an option that cannot be corrected."""

    def constants(self, parameter: Parameter, group: Group) -> Constants:
        """Return the constants of a parameter of a group, as the user has them."""
        return Constants()

    def velocity(self, parameter: Parameter) -> Tensor:
        """Return u of a parameter: the optimizer's own, in the parameter's shape; zeros where there is none yet."""
        assert self.velocity_key is not None
        state = self.optimizer.state[parameter]
        if state.get(self.velocity_key) is None:
            state[self.velocity_key] = torch.zeros_like(parameter, requires_grad=False)
        velocity: Tensor = state[self.velocity_key]
        return velocity

    def second_moment(self, parameter: Parameter, group: Group, own: slice) -> SecondMoment | None:
        """Return what divides the velocity of this rank's part on its way into the residual; None for 1.

        Called once per sparse step, before that part is brought up to date.
        """
        return None

    def elsewhere(self, parameter: Parameter, group: Group, own: slice) -> tuple[Elsewhere, ...]:
        """Return the parts of a parameter that other ranks of the node accumulate, if their second moment is kept here.

        Called once per sparse step, after `second_moment`.
        """
        return ()

    def keep_second_moment(self, parameter: Parameter, own: slice, moment: SecondMoment) -> None:
        """Write back what `second_moment` has returned, where it was a copy."""

    def can_step(self, parameter: Parameter, group: Group) -> bool:
        """Whether the optimizer would only subtract ``lr mean``."""
        gradient = parameter.grad
        assert gradient is not None
        return (
            self.is_complete
            and not group.get("differentiable")
            and all(
                each.dtype == torch.float32 and in_order(each, parameter).is_contiguous()
                for each in (parameter, gradient)
            )
        )

    def decay_weights(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Apply the weight decay of this step to sparse tensors, if it is not part of the means."""

    def take_over(self, sparse: Sequence[Parameter]) -> None:
        """Remove from the optimizer's next step the parts that the exchange has done; until `give_back`."""

    def give_back(self) -> None:
        """Restore the optimizer."""

    def correct_dense(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Correct averaged gradients, in place, for the optimizer's step after `take_over`."""


class MomentumCorrection(ErrorFeedback):
    """``g = G + c (w - lr v); u = m u + g; v = v + u`` (Nesterov: ``v + g + m u``); ``w = w - lr mean``.

    The decay is that of the weight after this rank's residual has been applied, see `ops.reference.correct_`: that of w
    alone would be applied only when it is sent, too late, and may diverge. Small tensors have ``g = G + c w`` and
    torch's own velocity. `take_over` sets momentum and weight decay of the param groups to 0.
    """

    kind = "momentum"
    velocity_key = "momentum_buffer"
    is_complete = True

    def __init__(self, optimizer: Optimizer, num_participants: int) -> None:
        super().__init__(optimizer, num_participants)
        self._user_values: list[tuple[Group, Group]] = []

    def check(self) -> None:
        for group in self.optimizer.param_groups:
            if group["momentum"] != 0 and group["dampening"] != 0:
                raise ConfigurationError(
                    f"SGD with dampening={group['dampening']} has no momentum correction. Set dampening=0 and lower "
                    "the learning rate instead."
                )

    def constants(self, parameter: Parameter, group: Group) -> Constants:
        values = self._as_given(group)
        decay = float(values["weight_decay"])
        return Constants(
            momentum=float(values["momentum"]),
            nesterov=bool(group["nesterov"]),
            weight_decay=decay,
            ahead=decay and decay * self.rate_of(group),
            sign=-1.0 if group.get("maximize") else 1.0,
        )

    def _as_given(self, group: Group) -> Group:
        """Return a param group as the user has it."""
        return {**group, **next((values for changed, values in self._user_values if changed is group), {})}

    def take_over(self, sparse: Sequence[Parameter]) -> None:
        if self._user_values:  # a closure that ran twice
            return
        for group in self.optimizer.param_groups:
            self._user_values.append((group, {key: group[key] for key in ("momentum", "weight_decay")}))
            group.update(momentum=0.0, weight_decay=0.0)

    def give_back(self) -> None:
        for group, values in self._user_values:
            group.update(values)
        self._user_values.clear()

    def correct_dense(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Apply momentum to averaged gradients. Its buffers stay the same on all ranks, so they need no residual."""
        constants = self.constants(parameters[0], group)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if constants.sign < 0:  # as torch's SGD does, before the decay
            torch._foreach_neg_(gradients)
        if constants.weight_decay != 0:
            torch._foreach_add_(gradients, [each.detach() for each in parameters], alpha=constants.weight_decay)
        if constants.momentum != 0:
            velocities = [self.velocity(parameter) for parameter in parameters]
            torch._foreach_mul_(velocities, constants.momentum)
            torch._foreach_add_(velocities, gradients)
            if constants.nesterov:
                torch._foreach_add_(gradients, velocities, alpha=constants.momentum)
            else:
                copy_all_(gradients, velocities)
        if constants.sign < 0:
            torch._foreach_neg_(gradients)
