"""How a gradient enters the residual: error feedback for any optimizer, momentum correction for SGD, Adam and AdamW.

A correction says how a gradient enters the residual (`kernels.reference.Constants`), which state of the
optimizer is the velocity, and the remaining work of the optimizer's step. `torch.optim.SGD`: momentum correction, arXiv
1712.01887. Adam and AdamW: Adam's step on a rank's own gradient. Other optimizers: error feedback;
the optimizer steps with the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.reference import Constants, OtherPart, SecondMoment
from lightning_lowbw.kernels.tensors import Rates, copy_in_order_, cut, flat_in_order, in_order
from lightning_lowbw.payloads.params import Row
from lightning_lowbw.payloads.payload import Payload

Group = dict[str, Any]
SQUARES = ("exp_avg_sq", "max_exp_avg_sq")  # of Adam; the latter with amsgrad, a group's own
Part = Callable[[int], slice]  # of a number of elements, that of this rank


class Sources(NamedTuple):
    """The values from which the segments of a step are made: if they are equal, the next step takes the segments again.

    Attributes:
        kinds: the group of each, and which fields it has.
        constants: by group; empty if the constants of segments change in each step.
        tensors: the parameters and the optimizer's state; None for a state that does not exist yet.
    """

    kinds: Sequence[Any] = ()
    constants: Mapping[int, Constants] = MappingProxyType({})
    tensors: Sequence[Tensor | None] = ()


class ErrorFeedback:
    """``v = v + G``. The optimizer applies its own momentum and decay to the mean.

    A velocity is the optimizer's own state; on two levels each rank keeps its part of the velocity here instead.

    Attributes:
        kind: saved in a checkpoint, because residuals and velocities depend on it.
        velocity_key: of the optimizer's state that is u; None without.
        has_second_moment: whether gradients are divided by it before they enter the residual.
        is_complete: whether nothing of the optimizer's arithmetic is left out.
        masks: whether velocities are cleared where they have been sent, unless the user says.
        clears: whether they are in this step.
        parts: u of this rank's part of each tensor, flat, where ranks keep parts.
    """

    kind = "error_feedback"
    velocity_key: str | None = None
    has_second_moment = is_complete = clears = False
    masks = True

    def __init__(self, optimizer: Optimizer, num_participants: int, *, keeps_parts: bool = False) -> None:
        self.optimizer, self.num_participants, self.keeps_parts = optimizer, num_participants, keeps_parts
        self.rate_of = Rates()
        self.parts: dict[Parameter, Tensor] = {}
        # State of the current step: rows by name, constants by group, this rank's part of a number of elements.
        self._rows: dict[str, Row] = {}
        self._constants: dict[int, Constants] = {}
        self._part: Part = slice

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

    # A step, in the order of its calls ------------------------------------------------------------------------------

    def begin_step(self, rows: Iterable[Row], part: Part, payload: Payload) -> None:
        """Read what the user has set for the step.

        Args:
            rows: all that are compressed in it, on all ranks, so that masking is equal on all.
            part: this rank's part of so many elements.
            payload: with the density of the step.
        """
        self._rows, self._part = {row.name: row for row in rows}, part
        groups = {id(row.group): row.group for row in self._rows.values()}
        self._constants = {key: self.constants(group) for key, group in groups.items()}
        # One decision for all tensors: a pass of the kernels masks all velocities or none.
        momenta = [constants.momentum for constants in self._constants.values()]
        self.clears = payload.masks(momenta, by_default=self.masks)

    def sources(self) -> Sources | None:
        """Return the values from which segments are made in this step; None if the next step makes new segments."""
        rows, state = list(self._rows.values()), self.optimizer.state
        velocities = [(state.get(row.parameter) or {}).get(self.velocity_key) for row in rows]
        parts = [self.parts.get(row.parameter) for row in rows] if self.keeps_parts else []
        kind_of = {
            key: (key, self.has_velocity(each), each.weight_decay != 0, each.nesterov)
            for key, each in self._constants.items()
        }
        kinds = [kind_of[id(row.group)] for row in rows]
        for row, (_, has_velocity, *_), velocity in zip(rows, kinds, parts or velocities, strict=True):
            if has_velocity and velocity is None and row.parameter.numel():
                return None  # `segment` makes a velocity, and a later step may again be without it
        return Sources(kinds, self._constants, [*(row.parameter for row in rows), *velocities, *parts])

    def refresh_(self, segments: Mapping[str, Constants]) -> None:
        """Write the constants of this step into the segments of an earlier one, by name."""
        for name, segment in segments.items():
            vars(segment).update(vars(self._constants[id(self._rows[name].group)]))

    def segment(self, name: str) -> dict[str, Any]:
        """Return what a segment (`kernels.reference.Segment`) holds beside gradient and residual.

        Called at most once per step.
        """
        row = self._rows[name]
        constants, own = self._constants[id(row.group)], self._part(row.parameter.numel())
        return {
            # u of the equations; None where m is 0, because u is the gradient then.
            "momentum_buffer": self._velocity_of(row, own) if self.has_velocity(constants) else None,
            "weight": row.cut(row.parameter, own) if constants.weight_decay != 0 else None,
            **vars(constants),
        }

    def step_(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Do the remaining part of the optimizer's step: ``w = w - lr mean``, with the mean in `.grad`."""
        self.decay_weights(parameters, group)
        # w = w - lr mean: the mean has been through the momentum, or through Adam.
        lr, gradients = self.rate_of(group), [p.grad for p in parameters if p.grad is not None]
        torch._foreach_add_(list(parameters), gradients, alpha=lr if group.get("maximize") else -lr)

    def decay_weights(self, parameters: Sequence[Parameter], group: Group) -> None:
        """Apply the weight decay of this step to sparse tensors, if it is not part of the means."""

    def end_step(self) -> None:
        """Count the step, where the optimizer does not."""
        self._rows, self._constants = {}, {}

    # The velocity: the optimizer's own, or this rank's part ----------------------------------------------------------

    def has_velocity(self, constants: Constants) -> bool:
        """Return whether tensors with these constants have a velocity."""
        return constants.momentum != 0

    def state_of(self, parameter: Parameter, key: str) -> Tensor:
        """Return a state of the optimizer; a state whose memory order is not that of the parameter gets this order."""
        state = self.optimizer.state[parameter]
        value: Tensor = state[key]
        if value.stride() != parameter.stride() and not in_order(value, parameter).is_contiguous():
            state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        return state[key]

    def velocity(self, parameter: Parameter) -> Tensor:
        """Return u of a parameter: the optimizer's own, in the parameter's shape; zeros if there is none yet."""
        assert self.velocity_key is not None
        state = self.optimizer.state[parameter]
        if state.get(self.velocity_key) is None:
            state[self.velocity_key] = torch.zeros_like(parameter, requires_grad=False)
        return self.state_of(parameter, self.velocity_key)

    def velocity_part(self, parameter: Parameter, own: slice) -> Tensor:
        """Return u of this rank's part, on two levels: flat, taken out of the optimizer's state."""
        if parameter not in self.parts:
            # A copy: a view would keep the memory of the whole.
            self.parts[parameter] = flat_in_order(self.velocity(parameter), parameter)[own].clone()
            del self.optimizer.state[parameter][self.velocity_key]
        return self.parts[parameter]

    def _velocity_of(self, row: Row, own: slice) -> Tensor:
        return (
            self.velocity_part(row.parameter, own) if self.keeps_parts else row.in_order(self.velocity(row.parameter))
        )

    def saved(self, parameter: Parameter) -> Tensor | None:
        """Return u of this rank's part as it is, without making one."""
        if parameter in self.parts:
            return self.parts[parameter]
        velocity = self.optimizer.state.get(parameter, {}).get(self.velocity_key)
        return None if velocity is None else flat_in_order(velocity.detach(), parameter)

    def load(self, parameter: Parameter, part: Tensor, own: slice) -> None:
        """Load u of this rank's part: flat, in the parameter's order."""
        if self.keeps_parts:
            self.velocity_part(parameter, own).copy_(part)
        else:
            copy_in_order_(self.velocity(parameter), parameter, part)


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
        # The optimizer's count of steps after the last step: the tensor, its version and its number.
        self._counted: dict[Parameter, tuple[Tensor, int, int]] = {}
        self._coming: dict[Parameter, int] = {}  # the number of the step in progress

    def note(self) -> str:
        largest = self.LARGEST_BETA1
        lowered = sorted({b for group in self.optimizer.param_groups if (b := float(group["betas"][0])) > largest})
        if not lowered:
            return ""
        return (
            f"{type(self.optimizer).__name__}: beta1={', '.join(map(str, lowered))} is lowered to {largest} for sparse "
            f"tensors in the sparse phase: an element that is sent late is a mean over steps already."
        )

    def local_keys(self, parameter: Parameter) -> tuple[str, ...]:
        state = self.optimizer.state.get(parameter, {})
        return tuple(key for key in SQUARES if key in state)

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

    def sources(self) -> Sources | None:
        sources = super().sources()
        if self.keeps_parts or sources is None:
            return None  # beside its own a rank has segments of other parts, with their gradients
        states = [self.optimizer.state.get(row.parameter, {}) for row in self._rows.values()]
        squares = [state.get(key) for state in states for key in SQUARES]
        return sources._replace(constants={}, tensors=[*sources.tensors, *squares])

    def refresh_(self, segments: Mapping[str, Any]) -> None:
        super().refresh_(segments)
        for name, segment in segments.items():
            vars(segment.second_moment).update(self._numbers_of(self._rows[name]))

    def segment(self, name: str) -> dict[str, Any]:
        row = self._rows[name]
        parameter, own = row.parameter, self._part(row.parameter.numel())
        state = self._state(parameter, row.group)
        squares = {key: self.state_of(parameter, key) for key in SQUARES if key in state}
        for key, square in squares.items():  # flat only if the parts are cut below
            squares[key] = flat_in_order(square, parameter) if self.keeps_parts else row.in_order(square)
        moment = SecondMoment(
            square=squares["exp_avg_sq"], largest=squares.get("max_exp_avg_sq"), **self._numbers_of(row)
        )
        # All ranks of a node keep the second moment of the whole tensor.
        # The parts before and after this rank's part.
        parts = [part for part in (slice(0, own.start), slice(own.stop, parameter.numel())) if part.start < part.stop]
        return {
            **super().segment(name),
            "second_moment": moment.map(lambda tensor: tensor[own]) if parts else moment,
            "other_parts": tuple(self._other_part(row, moment, part) for part in parts),
        }

    def _numbers_of(self, row: Row) -> dict[str, Any]:
        """Return the numbers of a tensor's second moment in the step in progress."""
        self._coming[row.parameter] = step = self._num_steps(row.parameter) + 1
        beta1, beta2 = self._constants[id(row.group)].momentum, float(row.group["betas"][1])
        # For the bias corrections, 1 - b1^t and 1 - b2^t.
        corrections = 1.0 - beta1**step, 1.0 - beta2**step
        share = 1.0 / self.num_participants
        return {"beta2": beta2, "share": share, "eps": float(row.group["eps"]), "corrections": corrections}

    def _other_part(self, row: Row, moment: SecondMoment, part: slice) -> OtherPart:
        constants = self._constants[id(row.group)]
        return OtherPart(
            second_moment=moment.map(lambda tensor: tensor[part]),
            gradient=cut(row.in_order(row.gradient), part),
            weight=cut(row.in_order(row.parameter), part) if constants.weight_decay != 0 else None,
            weight_decay=constants.weight_decay,
            sign=constants.sign,
        )

    def has_velocity(self, constants: Constants) -> bool:
        return True  # also without momentum, because the velocity is divided

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
            # Torch keeps the count of steps on the host, unless a kernel or a CUDA graph reads it.
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
        super().end_step()
        counts = {parameter: self.optimizer.state[parameter]["step"] for parameter in self._coming}
        # One launch for each device: counts are on the host, or on the GPU of a fused optimizer.
        for device in dict.fromkeys(count.device for count in counts.values()):
            torch._foreach_add_([count for count in counts.values() if count.device == device], 1)
        self._counted |= {p: (count, count._version, self._coming[p]) for p, count in counts.items()}
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
