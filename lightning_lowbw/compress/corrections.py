"""How a gradient enters the residual: error feedback for any optimizer, momentum correction for SGD, Adam and AdamW.

A correction says how a gradient enters the residual (`kernels.reference.Constants`), which state of the
optimizer is the velocity, and what is left to the optimizer's step. `torch.optim.SGD`: momentum correction, arXiv
1712.01887. Adam and AdamW: Adam's step on a rank's own gradient. All others: error feedback; the optimizer steps with
the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import Constants, OtherPart, SecondMoment
from lightning_lowbw.kernels.tensors import Rates, copy_in_order_, flat_in_order, in_order

Group = dict[str, Any]


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
        self.rate_of = Rates()

    def local_keys(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the names of a parameter's other states in the optimizer that differ between ranks."""
        return ()

    def note(self) -> str:
        """Return the message to log when steps become sparse; empty for none."""
        return ""

    def check(self) -> None:
        """Raise ConfigurationError if a param group has an option that cannot be corrected."""
        if self.is_complete and any(group.get("differentiable") for group in self.optimizer.param_groups):
            raise ConfigurationError(
                f"{type(self.optimizer).__name__}(differentiable=True) is not supported in sparse steps. Leave "
                "differentiable out."
            )

    def constants(self, group: Group) -> Constants:
        """Return the constants of the tensors of a group, as the user has them."""
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

    def other_parts(self, parameter: Parameter, group: Group, own: slice) -> tuple[OtherPart, ...]:
        """Return the parts of a parameter that other ranks of the node accumulate, if their second moment is kept here.

        Called once per sparse step, after `second_moment`.
        """
        return ()

    def write_second_moment(self, parameter: Parameter, own: slice, moment: SecondMoment) -> None:
        """Write back what `second_moment` has returned, where it was a copy."""

    def step_(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Do what is left of the optimizer's step: ``w = w - lr mean``, with the mean in `.grad`."""
        self.decay_weights(parameters, group)
        lr, gradients = self.rate_of(group), [p.grad for p in parameters if p.grad is not None]
        torch._foreach_add_(list(parameters), gradients, alpha=lr if group.get("maximize") else -lr)

    def decay_weights(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Apply the weight decay of this step to sparse tensors, if it is not part of the means."""

    def end_step(self) -> None:
        """Count the step, where the optimizer does not."""


class MomentumCorrection(ErrorFeedback):
    """``g = G + c (w - lr v); u = m u + g; v = v + u`` (Nesterov: ``v + g + m u``); ``w = w - lr mean``.

    The decay is that of the weight after this rank's residual has been applied, see `kernels.reference.correct_`: that
    of w alone would be applied only when it is sent, too late, and may diverge. Small tensors are left to torch's SGD.
    """

    kind = "momentum"
    velocity_key = "momentum_buffer"
    is_complete = True

    def check(self) -> None:
        super().check()
        for group in self.optimizer.param_groups:
            if group["momentum"] != 0 and group["dampening"] != 0:
                raise ConfigurationError(
                    f"SGD with dampening={group['dampening']} has no momentum correction. Set dampening=0 and lower "
                    "the learning rate instead."
                )

    def constants(self, group: Group) -> Constants:
        decay = float(group["weight_decay"])
        return Constants(
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            weight_decay=decay,
            ahead=decay and decay * self.rate_of(group),
            sign=-1.0 if group.get("maximize") else 1.0,
        )


class AdamCorrection(ErrorFeedback):
    """Adam's step on this rank's own gradient, into the residual; for Adam and AdamW. N ranks, t steps taken:

        m = b1 m + (1 - b1) G;  v = b2 v + (1 - b2) G^2 / N
        r = r + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    What arrives is taken by ``w = w - lr (result + c w)``, decay only where it is decoupled. Adam's own is that of the
    weight after this rank's residual has been applied: ``G + c (w - lr r)`` in m, ``G + c w`` in v. With ``c w`` in m
    the decay would not abate until it is sent, some 1 / density steps later, and might diverge:
    `benchmarks/weight_decay.py`.

    The steps of small tensors are Adam's own. `exp_avg` and `exp_avg_sq` are those of this rank.

    b1 is at most `LARGEST_BETA1` here, at any density: a delayed element is already a mean over steps, as momentum is.

    G^2 / N: without compression Adam squares the mean of N gradients. If the noise is larger than the mean, as for all
    but a few elements and steps, that is the mean square of one divided by N.

    Source: momentum correction of arXiv 1712.01887, of Adam's preconditioned gradient; chosen by `benchmarks/adam.py`.
    """

    kind = "own_variance"
    velocity_key = "exp_avg"
    is_complete = True
    masks = False
    LARGEST_BETA1 = 0.7

    def __init__(self, optimizer: Optimizer, num_participants: int) -> None:
        super().__init__(optimizer, num_participants)
        # The optimizer's count of steps as it was left, its version, and what it says.
        self._counted: dict[Parameter, tuple[Tensor, int, int]] = {}
        self._coming: dict[Parameter, int] = {}  # the number of the step in progress

    def note(self) -> str:
        largest = self.LARGEST_BETA1
        lowered = sorted({b for group in self.optimizer.param_groups if (b := float(group["betas"][0])) > largest})
        if not lowered:
            return ""
        return (
            f"{type(self.optimizer).__name__}: beta1={', '.join(map(str, lowered))} is lowered to {largest} for sparse "
            f"tensors in the sparse phase: what is sent late is a mean over steps already."
        )

    def local_keys(self, parameter: Parameter) -> tuple[str, ...]:
        state = self.optimizer.state.get(parameter, {})
        return tuple(key for key in ("exp_avg_sq", "max_exp_avg_sq") if key in state)  # amsgrad is a group's own

    def constants(self, group: Group) -> Constants:
        beta1 = min(float(group["betas"][0]), self.LARGEST_BETA1)
        decay = 0.0 if self._is_decoupled(group) else float(group["weight_decay"])
        return Constants(
            momentum=beta1,
            dampening=beta1,
            weight_decay=decay,
            ahead=decay and decay * self.rate_of(group),
            sign=-1.0 if group.get("maximize") else 1.0,
        )

    def _is_decoupled(self, group: Group) -> bool:
        return bool(group.get("decoupled_weight_decay", isinstance(self.optimizer, AdamW)))

    def second_moment(self, parameter: Parameter, group: Group, own: slice) -> SecondMoment:
        self._state(parameter, group)
        self._coming[parameter] = self._num_steps(parameter) + 1
        return self._moment(parameter, group).map(lambda tensor: tensor[own])

    def other_parts(self, parameter: Parameter, group: Group, own: slice) -> tuple[OtherPart, ...]:
        assert parameter.grad is not None
        moment, gradient = self._moment(parameter, group), flat_in_order(parameter.grad, parameter)
        constants = self.constants(group)
        weight = flat_in_order(parameter.detach(), parameter) if constants.weight_decay != 0 else None
        parts = [slice(0, own.start), slice(own.stop, parameter.numel())]
        others = tuple(
            OtherPart(
                second_moment=moment.map(lambda tensor, part=part: tensor[part]),  # type: ignore[misc]
                gradient=gradient[part],
                weight=None if weight is None else weight[part],
                weight_decay=constants.weight_decay,
                sign=constants.sign,
            )
            for part in parts
            if part.start < part.stop
        )
        states, keys = self.optimizer.state[parameter], self.local_keys(parameter)
        if not others or all(in_order(states[key], parameter).is_contiguous() for key in keys):
            return others
        for other in others:  # copies, to be written back now
            other.update_()
        self._write(parameter, dict(zip(keys, moment.tensors, strict=True)))
        return ()

    def _moment(self, parameter: Parameter, group: Group) -> SecondMoment:
        """Return the second moment of a whole parameter; copies of what is laid out otherwise."""
        state, beta2 = self.optimizer.state[parameter], float(group["betas"][1])
        step, beta1 = self._coming[parameter], self.constants(group).momentum
        flat = {key: flat_in_order(state[key], parameter) for key in self.local_keys(parameter)}
        return SecondMoment(
            square=flat["exp_avg_sq"],
            largest=flat.get("max_exp_avg_sq"),
            beta2=beta2,
            share=1.0 / self.num_participants,
            eps=float(group["eps"]),
            corrections=(1.0 - beta1**step, 1.0 - beta2**step),
        )

    def write_second_moment(self, parameter: Parameter, own: slice, moment: SecondMoment) -> None:
        state = self.optimizer.state[parameter]
        flat = {key: flat_in_order(state[key], parameter) for key in self.local_keys(parameter)}
        for whole, part in zip(flat.values(), moment.tensors, strict=True):
            if whole[own].data_ptr() != part.data_ptr():
                whole[own] = part
        self._write(parameter, flat)

    def _write(self, parameter: Parameter, flat: Mapping[str, Tensor]) -> None:
        """Write states back that are laid out otherwise, so that their flat form is a copy."""
        for key, copy in flat.items():
            whole = self.optimizer.state[parameter][key]
            if not in_order(whole, parameter).is_contiguous():
                copy_in_order_(whole, parameter, copy)

    def _num_steps(self, parameter: Parameter) -> int:
        """Return the steps taken. On the device, where a fused optimizer counts, they are read once."""
        counted = self.optimizer.state[parameter]["step"]
        known = self._counted.get(parameter)
        if known is not None and known[0] is counted and known[1] == counted._version:
            return known[2]
        return int(counted)  # the first time, or somebody else has counted, or loaded another state

    def _state(self, parameter: Parameter, group: Group) -> dict[str, Any]:
        """Return Adam's state of a parameter, made as Adam makes it at the first step."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            is_on_device = group.get("fused") or group.get("capturable")
            device = parameter.device if is_on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            squares = ["exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg_sq"]
            for key in (self.velocity_key, *squares):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def decay_weights(self, parameters: Sequence[Parameter], group: Group) -> None:
        if self._is_decoupled(group):
            torch._foreach_mul_(list(parameters), 1.0 - self.rate_of(group) * float(group["weight_decay"]))

    def end_step(self) -> None:
        counts = {parameter: self.optimizer.state[parameter]["step"] for parameter in self._coming}
        for device in dict.fromkeys(count.device for count in counts.values()):
            torch._foreach_add_([count for count in counts.values() if count.device == device], 1)
        self._counted |= {p: (count, count._version, self._coming[p]) for p, count in counts.items()}
        self._coming.clear()


def correction_for(optimizer: Optimizer, num_participants: int, *, corrects: bool = True) -> ErrorFeedback:
    """Return the correction of an optimizer: its own, if there is one; else, or without `corrects`, error feedback.

    A subclass of torch's optimizers has a step of its own, which need not be the one corrected here.
    """
    kind = type(optimizer)
    if corrects and kind is SGD:
        return MomentumCorrection(optimizer, num_participants)
    if corrects and kind in (Adam, AdamW):
        return AdamCorrection(optimizer, num_participants)
    return ErrorFeedback(optimizer, num_participants)
