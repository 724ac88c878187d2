"""How a gradient enters the residual: error feedback for any optimizer, momentum correction for SGD, Adam and AdamW.

A correction says how a gradient enters the residual (`kernels.reference.Constants`), which state of the
optimizer is the velocity, and the remaining work of the optimizer's step. `torch.optim.SGD`: momentum correction, arXiv
1712.01887. Adam and AdamW: Adam's step on a rank's own gradient. Other optimizers: error feedback;
the optimizer steps with the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import Constants, OtherPart, SecondMoment
from lightning_lowbw.kernels.tensors import copy_in_order_, cut, flat_in_order, in_order
from lightning_lowbw.payloads.params import Row, all_in_order, gradients_of
from lightning_lowbw.payloads.payload import Payload

Group = dict[str, Any]
SQUARES = ("exp_avg_sq", "max_exp_avg_sq")  # of Adam; the latter with amsgrad, a group's own
Part = Callable[[int], slice]  # of a number of elements, that of this rank


class Fields(NamedTuple):
    """What a correction adds to the segments of a step.

    Attributes:
        of_tensors: by name, the fields of a segment (`kernels.reference.Segment`) beside gradient and residual.
        masks: whether velocities are cleared where they have been sent.
    """

    of_tensors: dict[str, dict[str, Any]]
    masks: bool


class Rates:
    """The learning rates of param groups as floats. On a device a rate is read once, and again when it has changed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, float]] = {}  # by id of the group

    def __call__(self, group: Mapping[str, Any]) -> float:
        """Return the rate of a group."""
        rate = group["lr"]
        if not isinstance(rate, Tensor) or rate.device.type == "cpu" or rate.is_inference():
            return float(rate)
        known = self._known.get(id(group))
        if known is None or known[0] is not rate or known[1] != rate._version:
            known = self._known[id(group)] = (rate, rate._version, float(rate))
        return known[2]


class ErrorFeedback:
    """``v = v + G``. The optimizer applies its own momentum and decay to the mean.

    A velocity is the optimizer's own state; on two levels each rank keeps its part of the velocity here instead.

    Attributes:
        kind: saved in a checkpoint, because residuals and velocities depend on it.
        velocity_key: of the optimizer's state that is u; "" without.
        has_second_moment: whether gradients are divided by it before they enter the residual.
        is_complete: whether nothing of the optimizer's arithmetic is left out.
        masks: whether velocities are cleared where they have been sent, unless the user says.
        parts: u of this rank's part of each tensor, flat, where ranks keep parts.
    """

    kind = "error_feedback"
    velocity_key = ""
    has_second_moment = is_complete = False
    masks = True

    def __init__(self, optimizer: Optimizer, num_participants: int, *, keeps_parts: bool = False) -> None:
        self.optimizer, self.num_participants, self.keeps_parts = optimizer, num_participants, keeps_parts
        self.rate_of = Rates()
        self.parts: dict[Parameter, Tensor] = {}

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

    # A step, in the order of its calls ------------------------------------------------------------------------------

    def fields(self, rows: Sequence[Row], part: Part, payload: Payload) -> Fields:
        """Return what the segments of this step hold beside gradient and residual; called once per step.

        Args:
            rows: all that are compressed in this step, also empty shards: masking is then equal on all ranks.
            part: this rank's part of so many elements.
            payload: with the density of the step.
        """
        groups = {id(row.group): row.group for row in rows}
        constants = {key: self.constants(group) for key, group in groups.items()}
        # One decision for all tensors: a pass of the kernels masks all velocities or none.
        masks = payload.masks([each.momentum for each in constants.values()], by_default=self.masks)
        filled = [row for row in rows if row.parameter.numel()]
        of_rows = [constants[id(row.group)] for row in filled]
        fields = {row.name: dict(vars(own)) for row, own in zip(filled, of_rows, strict=True)}
        # u of the equations; None where m is 0, because u is the gradient then. Adam's velocity is divided.
        moving = [row for row, own in zip(filled, of_rows, strict=True) if own.momentum or self.has_second_moment]
        if self.keeps_parts:
            velocities = [self.velocity_part(row.parameter, part(row.parameter.numel())) for row in moving]
        else:
            velocities = self.states(moving, self.velocity_key)
        for row, velocity in zip(moving, velocities, strict=True):
            fields[row.name]["momentum_buffer"] = velocity
        decaying = [row for row, own in zip(filled, of_rows, strict=True) if own.weight_decay]
        weights: Sequence[Tensor] = all_in_order(decaying, [row.parameter for row in decaying])
        if self.keeps_parts:
            weights = [cut(weight, part(weight.numel())) for weight in weights]
        for row, weight in zip(decaying, weights, strict=True):
            fields[row.name]["weight"] = weight
        return Fields(fields, masks)

    def step_(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Do the remaining part of the optimizer's step: ``w = w - lr mean``, with the mean in `.grad`."""
        lr, gradients = self.decay_weights(parameters, group), [p.grad for p in parameters if p.grad is not None]
        # w = w - lr mean: the mean has been through the momentum, or through Adam.
        torch._foreach_add_(list(parameters), gradients, alpha=lr if group.get("maximize") else -lr)

    def decay_weights(self, parameters: Sequence[Parameter], group: Group) -> float:
        """Apply the weight decay of this step that is not part of the means, if there is one; return the rate."""
        return self.rate_of(group)

    def end_step(self) -> None:
        """Count the step, where the optimizer does not."""

    # States of the optimizer; of the velocity this rank's part -------------------------------------------------------

    def states(self, rows: Sequence[Row], key: str) -> list[Tensor]:
        """Return a state of each parameter in the order of its elements: u, or a second moment; zeros if it is new."""
        state, found = self.optimizer.state, list[Tensor]()
        for row in rows:
            value = state[row.parameter].get(key)
            if value is None or value.stride() != row.parameter.stride():
                value = self.state_of(row.parameter, key)
            found.append(value)
        return all_in_order(rows, found)

    def state_of(self, parameter: Parameter, key: str) -> Tensor:
        """Return a state of the optimizer in the parameter's shape and memory order; zeros if there is none yet."""
        state = self.optimizer.state[parameter]
        value = state.get(key)
        if value is None:
            state[key] = torch.zeros_like(parameter, requires_grad=False)
        elif value.stride() != parameter.stride() and not in_order(value, parameter).is_contiguous():
            state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        found: Tensor = state[key]
        return found

    def velocity_part(self, parameter: Parameter, own: slice) -> Tensor:
        """Return u of this rank's part, on two levels: flat, taken out of the optimizer's state."""
        if parameter not in self.parts:
            # A copy: a view would keep the memory of the whole.
            whole = self.state_of(parameter, self.velocity_key)
            self.parts[parameter] = flat_in_order(whole, parameter)[own].clone()
            del self.optimizer.state[parameter][self.velocity_key]
        return self.parts[parameter]

    def saved(self, parameter: Parameter) -> Tensor | None:
        """Return u of this rank's part as it is, without making one."""
        if parameter in self.parts:
            return self.parts[parameter]
        velocity = self.optimizer.state.get(parameter, {}).get(self.velocity_key)
        return None if velocity is None else flat_in_order(velocity.detach(), parameter)

    def saved_moments(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the parameter's other states in the optimizer that differ between ranks, by key."""
        return {}

    def load(self, parameter: Parameter, part: Tensor, own: slice) -> None:
        """Load u of this rank's part: flat, in the parameter's order."""
        if self.keeps_parts:
            self.velocity_part(parameter, own).copy_(part)
        else:
            copy_in_order_(self.state_of(parameter, self.velocity_key), parameter, part)


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

    The steps of small tensors are Adam's own. `exp_avg` and `exp_avg_sq` belong to this rank.

    b1 is at most `LARGEST_BETA1` here, at any density: a delayed element is already a mean over steps, as momentum is.

    G^2 / N: without compression Adam squares the mean of N gradients. If the noise is larger than the mean, as for all
    but a few elements and steps, that is the mean square of one divided by N.

    Source: momentum correction of arXiv 1712.01887, of Adam's preconditioned gradient; chosen by `benchmarks/adam.py`.
    """

    kind = "own_variance"
    velocity_key = "exp_avg"
    has_second_moment = is_complete = True
    masks = False
    LARGEST_BETA1 = 0.7

    def __init__(self, optimizer: Optimizer, num_participants: int, *, keeps_parts: bool = False) -> None:
        super().__init__(optimizer, num_participants, keeps_parts=keeps_parts)
        # By name: the optimizer's count of steps after the last step, its version and its number; in this step the same
        # count and the number of this step.
        self._counted: dict[str, tuple[Tensor, int, int]] = {}
        self._coming: dict[str, tuple[Tensor, int]] = {}

    def note(self) -> str:
        largest = self.LARGEST_BETA1
        lowered = sorted({b for group in self.optimizer.param_groups if (b := float(group["betas"][0])) > largest})
        if not lowered:
            return ""
        return (
            f"{type(self.optimizer).__name__}: beta1={', '.join(map(str, lowered))} is lowered to {largest} for sparse "
            f"tensors in the sparse phase: an element that is sent late is a mean over steps already."
        )

    def constants(self, group: Group) -> Constants:
        # With b1 as dampening, too: m = b1 m + (1 - b1) G.
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

    def fields(self, rows: Sequence[Row], part: Part, payload: Payload) -> Fields:
        filled = [row for row in rows if row.parameter.numel()]
        for row in filled:
            if not self.optimizer.state[row.parameter]:
                self._make_state(row.parameter, row.group)
        fields, masks = super().fields(rows, part, payload)
        squares, largest = self.states(filled, SQUARES[0]), [row for row in filled if row.group["amsgrad"]]
        largest_of = dict(zip(largest, self.states(largest, SQUARES[1]), strict=True))
        for row, square in zip(filled, squares, strict=True):
            of_tensor, group, counted = fields[row.name], row.group, self.optimizer.state[row.parameter]["step"]
            step = self._num_steps(row.name, counted) + 1
            self._coming[row.name] = counted, step
            beta1, beta2 = of_tensor["momentum"], float(group["betas"][1])
            of_tensor["second_moment"] = moment = SecondMoment(
                square=square,
                largest=largest_of.get(row),
                beta2=beta2,
                share=1.0 / self.num_participants,
                eps=float(group["eps"]),
                corrections=(1.0 - beta1**step, 1.0 - beta2**step),
            )
            if self.keeps_parts:
                of_tensor |= self._cut(row, moment, part(square.numel()), of_tensor)
        return Fields(fields, masks)

    def saved_moments(self, parameter: Parameter) -> dict[str, Tensor]:
        state = self.optimizer.state.get(parameter, {})
        return {key: state[key] for key in SQUARES if key in state}

    def _cut(self, row: Row, moment: SecondMoment, own: slice, of_tensor: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a second moment, and the parts before and after it.

        All ranks of a node keep the second moment of the whole tensor.
        """
        gradient, weight = all_in_order([row, row], [*gradients_of([row]), row.parameter])
        parts = [each for each in (slice(0, own.start), slice(own.stop, weight.numel())) if each.start < each.stop]
        others = tuple(
            OtherPart(
                second_moment=moment.map(lambda tensor: cut(tensor, part)),  # noqa: B023 - called at once
                gradient=cut(gradient, part),
                weight=cut(weight, part) if of_tensor["weight_decay"] else None,
                weight_decay=of_tensor["weight_decay"],
                sign=of_tensor["sign"],
            )
            for part in parts
        )
        return {"second_moment": moment.map(lambda tensor: cut(tensor, own)), "other_parts": others}

    def _num_steps(self, name: str, counted: Tensor) -> int:
        """Return the steps taken. On the device, where a fused optimizer counts, they are read once."""
        known = self._counted.get(name)
        if known is not None and known[0] is counted and known[1] == counted._version:
            return known[2]
        return int(counted)  # the first time, or somebody else has counted, or loaded another state

    def _make_state(self, parameter: Parameter, group: Group) -> None:
        """Make Adam's state of a parameter as Adam makes it at the first step."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        # Torch keeps the count of steps on the host, unless a kernel or a CUDA graph reads it.
        is_on_device = group.get("fused") or group.get("capturable")
        device = parameter.device if is_on_device else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        squares = SQUARES if group["amsgrad"] else SQUARES[:1]
        for key in (self.velocity_key, *squares):
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def decay_weights(self, parameters: Sequence[Parameter], group: Group) -> float:
        rate = self.rate_of(group)
        if self._is_decoupled(group):
            torch._foreach_mul_(list(parameters), 1.0 - rate * float(group["weight_decay"]))
        return rate

    def end_step(self) -> None:
        counts = [counted for counted, _ in self._coming.values()]
        # One launch for each device: counts are on the host, or on the GPU of a fused optimizer.
        for device in dict.fromkeys([each.device for each in counts]):
            torch._foreach_add_([each for each in counts if each.device == device], 1)
        coming = self._coming.items()
        self._counted |= {name: (counted, counted._version, step) for name, (counted, step) in coming}
        self._coming.clear()


def correction_for(
    optimizer: Optimizer, num_participants: int, *, corrects: bool = True, keeps_parts: bool = False
) -> ErrorFeedback:
    """Return the correction of an optimizer: its own, if there is one; else, or without `corrects`, error feedback.

    A subclass of torch's optimizers has a step of its own, which need not be the one corrected here.
    """
    kinds = {SGD: MomentumCorrection, Adam: AdamCorrection, AdamW: AdamCorrection}
    kind = kinds.get(type(optimizer), ErrorFeedback) if corrects else ErrorFeedback
    return kind(optimizer, num_participants, keeps_parts=keeps_parts)
