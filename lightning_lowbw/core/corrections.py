"""What an optimizer's own arithmetic makes of a gradient that arrives late and in pieces, and how it is done locally.

A correction says how a gradient enters the residual (the constants of `ops.reference.Segment`), which state of the
optimizer is the velocity, and what is left to the optimizer's step. `torch.optim.SGD`: momentum correction, arXiv
1712.01887. `torch.optim.Adam` and `AdamW`: the same for what Adam makes of this rank's gradient. All others: error
feedback, and the optimizer does the rest with what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw.errors import ConfigurationError

CORRECTIONS = ("auto", "frozen_variance", "error_feedback")
Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """How a gradient enters the residual of a param group's tensors, as in `ops.reference.Segment`."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    sign: float = 1.0


class Correction:
    """Error feedback: ``v = v + G``. The optimizer applies its own momentum and decay to what arrives.

    Attributes:
        kind: by which a checkpoint tells what its residuals and velocities mean.
        velocity_key: of the optimizer's state that is u; None without.
        is_complete: whether nothing of the optimizer's arithmetic is left out.
        masks: whether velocities are cleared where they have been sent, unless the user says.
        local_keys: of other states of the optimizer that differ between ranks.
    """

    kind = "error_feedback"
    velocity_key: str | None = None
    is_complete = False
    masks = True

    def __init__(self, optimizer: Optimizer, num_senders: int) -> None:
        self.optimizer, self.num_senders = optimizer, num_senders

    @property
    def local_keys(self) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        """Raise ConfigurationError where a param group asks for what cannot be corrected."""

    def check_dense_phase(self) -> None:
        """Raise ConfigurationError where sparse steps want something that dense ones before them have to leave."""

    def is_ready(self, parameter: Parameter, num_dense_steps: int) -> bool:
        """Return whether a parameter has what it needs to be sparse, after a dense phase of so many steps."""
        return True

    def constants(self, group: Group) -> Constants:
        """Return the constants of a param group, as the user has them."""
        return Constants()

    def velocity(self, parameter: Parameter) -> Tensor:
        """Return u of a parameter: the optimizer's own, in the parameter's shape; zeros where there is none yet."""
        assert self.velocity_key is not None
        state = self.optimizer.state[parameter]
        if state.get(self.velocity_key) is None:
            state[self.velocity_key] = torch.zeros_like(parameter, requires_grad=False)
        velocity: Tensor = state[self.velocity_key]
        return velocity

    def scale(self, parameter: Parameter, group: Group) -> Tensor | None:
        """Return what the velocity is multiplied with, elementwise, on its way into the residual; None for 1.

        Called once per sparse step that is taken, before the velocity is brought up to date.
        """
        return None

    def forget(self) -> None:
        """Drop what can be computed again: the optimizer's state has been replaced, or moved."""

    def hand_over(self, parameter: Parameter, group: Group) -> None:
        """Prepare the velocity of a parameter whose first sparse step this is."""

    def hand_back(self, parameter: Parameter, group: Group) -> None:
        """Prepare the velocity of a parameter whose last sparse step this is."""

    def take_over(self, sparse: Sequence[Parameter]) -> None:
        """Leave to the optimizer's coming step only what the exchange has not done; until `give_back`."""

    def give_back(self) -> None:
        """Let the optimizer step as it did."""

    def correct_dense(self, parameter: Parameter, group: Group) -> None:
        """Make of an averaged gradient, in place, what the optimizer is to step with after `take_over`."""


class MomentumCorrection(Correction):
    """``g = G + c w; u = m u + g; v = v + u`` (Nesterov: ``v + g + m u``); what arrives is a plain SGD step.

    `take_over` sets momentum and weight decay of the param groups to 0.
    """

    kind = "momentum"
    velocity_key = "momentum_buffer"
    is_complete = True

    def __init__(self, optimizer: Optimizer, num_senders: int) -> None:
        super().__init__(optimizer, num_senders)
        self._user_values: list[tuple[Group, Group]] = []

    def check(self) -> None:
        for group in self.optimizer.param_groups:
            if group["momentum"] != 0 and group["dampening"] != 0:
                raise ConfigurationError(
                    f"SGD with dampening={group['dampening']} has no momentum correction. Set dampening=0 and lower "
                    "the learning rate instead."
                )

    def constants(self, group: Group) -> Constants:
        values = {**group, **next((values for changed, values in self._user_values if changed is group), {})}
        return Constants(
            momentum=float(values["momentum"]),
            nesterov=bool(values["nesterov"]),
            weight_decay=float(values["weight_decay"]),
            sign=-1.0 if group.get("maximize") else 1.0,
        )

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

    def correct_dense(self, parameter: Parameter, group: Group) -> None:
        """Apply momentum to an averaged gradient. Its buffer stays the same on all ranks, so it needs no residual."""
        constants, gradient = self.constants(group), parameter.grad
        assert gradient is not None
        if constants.sign < 0:  # as torch's SGD does, before the decay
            gradient.neg_()
        if constants.weight_decay != 0:
            gradient.add_(parameter.detach(), alpha=constants.weight_decay)
        if constants.momentum != 0:
            velocity = self.velocity(parameter)
            velocity.mul_(constants.momentum).add_(gradient)
            gradient = gradient.add(velocity, alpha=constants.momentum) if constants.nesterov else velocity
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
        if constants.sign < 0:
            parameter.grad.neg_()


class AdamCorrection(Correction):
    """Adam's step on this rank's own gradient, into the residual; for Adam and AdamW. N ranks, t steps taken:

        m = b1 m + (1 - b1) G;  v = b2 v + (1 - b2) G^2 / N
        r = r + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    What arrives is taken by ``w = w - lr (result + c w)``, decay only where it is decoupled; Adam's own goes into G.
    The steps of small tensors are Adam's own. `exp_avg` and `exp_avg_sq` are those of this rank.

    b1 is at most `LARGEST_BETA1` here: what is sent late is a mean over steps already, as momentum is.

    G^2 / N: Adam on all ranks together sees the square of the mean of N gradients. Where noise outweighs the mean,
    which is so for all but a few elements and steps, that is the mean square of one divided by N.

    Source: momentum correction of arXiv 1712.01887, on what Adam preconditions; chosen by `benchmarks/adam.py`.
    """

    kind = "own_variance"
    velocity_key = "exp_avg"
    is_complete = True
    masks = False
    LARGEST_BETA1 = 0.7

    @property
    def local_keys(self) -> tuple[str, ...]:
        has_largest = any(group["amsgrad"] for group in self.optimizer.param_groups)
        return ("exp_avg_sq", "max_exp_avg_sq") if has_largest else ("exp_avg_sq",)

    def check(self) -> None:
        for group in self.optimizer.param_groups:
            for name in ("capturable", "differentiable"):
                if group.get(name):
                    raise ConfigurationError(
                        f"{type(self.optimizer).__name__}({name}=True): the sparse steps of {name} Adam are not "
                        f'corrected. Leave {name} out, or set correction="error_feedback".'
                    )

    def constants(self, group: Group) -> Constants:
        beta1 = min(float(group["betas"][0]), self.LARGEST_BETA1)
        return Constants(
            momentum=beta1,
            dampening=beta1,
            weight_decay=0.0 if self._is_decoupled(group) else float(group["weight_decay"]),
            sign=-1.0 if group.get("maximize") else 1.0,
        )

    def _is_decoupled(self, group: Group) -> bool:
        return bool(group.get("decoupled_weight_decay", isinstance(self.optimizer, AdamW)))

    def scale(self, parameter: Parameter, group: Group) -> Tensor:
        state, constants, gradient = self._state(parameter, group), self.constants(group), parameter.grad
        assert gradient is not None
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if constants.weight_decay != 0:
            wide = (wide * constants.sign).add_(parameter.detach(), alpha=constants.weight_decay)
        state["step"] += 1
        beta1, beta2 = constants.momentum, float(group["betas"][1])
        second_moment = state["exp_avg_sq"].to(wide.dtype).mul(beta2)
        second_moment.addcmul_(wide, wide, value=(1.0 - beta2) / self.num_senders)
        state["exp_avg_sq"].copy_(second_moment)
        if group["amsgrad"]:
            state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], state["exp_avg_sq"]))
            second_moment.copy_(state["max_exp_avg_sq"])
        step = float(state["step"])
        denominator = second_moment.div_(1.0 - beta2**step).sqrt_().add_(group["eps"])
        return denominator.mul_(1.0 - beta1**step).reciprocal_().to(torch.float32)

    def _state(self, parameter: Parameter, group: Group) -> dict[str, Any]:
        """Return Adam's state of a parameter, made as Adam makes it at the first step."""
        state: dict[str, Any] = self.optimizer.state[parameter]
        if not state:
            device = parameter.device if group.get("fused") else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for key in (self.velocity_key, *self.local_keys):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def take_over(self, sparse: Sequence[Parameter]) -> None:
        """Step the sparse parameters where the optimizer gathers those of a group: after all hooks of the closure."""
        optimizer, ours = self.optimizer, set(sparse)
        gather: Callable[..., Any] = type(optimizer)._init_group  # type: ignore[attr-defined]

        def step_ours_and_gather_the_others(group: Group, *lists: list[Any]) -> Any:
            mine = [p for p in group["params"] if p in ours and p.grad is not None]
            for parameter in mine if self._unscale([p.grad for p in mine]) else ():
                self._step(parameter, group)
            return gather(optimizer, {**group, "params": [p for p in group["params"] if p not in ours]}, *lists)

        optimizer._init_group = step_ours_and_gather_the_others  # type: ignore[attr-defined]

    def _unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Do for a fused optimizer what a GradScaler leaves to its kernel; return whether the step is to be taken."""
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if scale is not None:
            for gradient in gradients:
                gradient.div_(scale)
        return found_inf is None or not found_inf

    def _step(self, parameter: Parameter, group: Group) -> None:
        lr = float(group["lr"])
        assert parameter.grad is not None
        with torch.no_grad():
            if self._is_decoupled(group):
                parameter.mul_(1.0 - lr * float(group["weight_decay"]))
            parameter.add_(parameter.grad, alpha=lr if group.get("maximize") else -lr)

    def give_back(self) -> None:
        vars(self.optimizer).pop("_init_group", None)


class FrozenAdamCorrection(AdamCorrection):
    """``m = b1 m + (1 - b1) G; r = r + m / D``, D = sqrt(v_hat) + eps as the dense phase has left it; for Adam, AdamW.

    D is bounded below by `FLOOR` times its mean over the tensor. `exp_avg` is m of this rank, without bias from the
    first sparse step on; `exp_avg_sq` and `step` stay as they are while a tensor is sparse.

    Source: the frozen variance of 1-bit Adam, arXiv 2102.02888, with momentum correction; the floor is this package's.
    """

    kind = "frozen_variance"
    FLOOR = 0.1
    LARGEST_BETA1 = 1.0

    def __init__(self, optimizer: Optimizer, num_senders: int) -> None:
        super().__init__(optimizer, num_senders)
        self._scales: dict[Parameter, Tensor] = {}

    @property
    def local_keys(self) -> tuple[str, ...]:
        return ()

    def check_dense_phase(self) -> None:
        if not self.optimizer.state:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} with rampup_begin_step=0: a frozen variance is that of dense steps. "
                'Begin later, with rampup_begin_step or SparsityWarmup(begin_epoch=...), or set correction="auto".'
            )

    def forget(self) -> None:
        self._scales.clear()

    def is_ready(self, parameter: Parameter, num_dense_steps: int) -> bool:
        step = self.optimizer.state.get(parameter, {}).get("step", 0)
        return int(step) >= max(1, num_dense_steps)

    def scale(self, parameter: Parameter, group: Group) -> Tensor:
        if parameter not in self._scales:
            state = self.optimizer.state[parameter]
            second_moment = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].float()
            unbiased = second_moment / (1.0 - float(group["betas"][1]) ** float(state["step"]))
            denominator = unbiased.sqrt_().add_(group["eps"])
            self._scales[parameter] = denominator.clamp_(min=self.FLOOR * denominator.mean()).reciprocal_()
        return self._scales[parameter]

    def hand_over(self, parameter: Parameter, group: Group) -> None:
        self.optimizer.state[parameter]["exp_avg"].div_(self._bias(parameter, group))

    def hand_back(self, parameter: Parameter, group: Group) -> None:
        self.optimizer.state[parameter]["exp_avg"].mul_(self._bias(parameter, group))  # Adam's own steps take it out

    def _bias(self, parameter: Parameter, group: Group) -> float:
        return 1.0 - float(group["betas"][0]) ** float(self.optimizer.state[parameter]["step"])


def correction_for(optimizer: Optimizer, name: str, num_senders: int) -> Correction:
    """Return the correction of an optimizer, by one of `CORRECTIONS`, among so many senders.

    A subclass of torch's optimizers has a step of its own, which need not be the one corrected here.

    Raises:
        ConfigurationError: the optimizer has no variance to freeze.
    """
    kind = type(optimizer)
    if name == "frozen_variance":
        if kind not in (Adam, AdamW):
            raise ConfigurationError(
                f'correction="frozen_variance" with {kind.__name__}: it is for torch.optim.Adam and AdamW. Set "auto".'
            )
        return FrozenAdamCorrection(optimizer, num_senders)
    if name == "auto" and kind is SGD:
        return MomentumCorrection(optimizer, num_senders)
    if name == "auto" and kind in (Adam, AdamW):
        return AdamCorrection(optimizer, num_senders)
    return Correction(optimizer, num_senders)
