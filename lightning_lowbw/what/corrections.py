"""What an optimizer's own arithmetic makes of a gradient that arrives late and in pieces, and how it is done locally.

A correction says how a gradient enters the residual (the constants of `ops.reference.Segment`), which state of the
optimizer is the velocity, and what is left to the optimizer's step. `torch.optim.SGD`: momentum correction, arXiv
1712.01887. `torch.optim.Adam` and `AdamW`: the same for what Adam makes of this rank's gradient. All others: error
feedback, and the optimizer does the rest with what arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw.arguments import from_mapping, is_number
from lightning_lowbw.errors import ConfigurationError

CORRECTIONS = ("auto", "frozen_variance", "error_feedback")
Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FrozenVariance:
    """How Adam's second moment v is kept as the dense phase has left it, as a value.

    Args:
        floor: the denominator is at least this fraction of its mean over the tensor, in [0, 1].
        stable: None, or until when the dense phase goes on after `rampup_begin_step`, which may be 0 then. Every
            1 / (1 - beta2) steps the sum of v over the tensors to be compressed is compared with what it was; sparse
            steps begin where the smaller is at least this fraction of the larger, in (0, 1). 0.96 in 1-bit Adam. Not
            before 2 / (1 - beta2) steps, 2000 with torch's defaults.
        refresh: whether v takes single steps of Adam's in the sparse phase, with the mean of the gradients, which is
            sent whole beside the sparse exchange: at the first sparse step and after 1, 1, ... steps, twice as many
            after every 16 of them; in 100 000 sparse steps that is 201 times.

    Raises:
        ConfigurationError: a value is out of range.

    Source: `stable` 1-bit Adam, arXiv 2102.02888; `refresh` 0/1 Adam, arXiv 2202.06009, with its kappa of 16.
    Deviation: what is compared for `stable` is v without its bias, and a rise counts as a fall does.

    Example:
        >>> FrozenVariance(stable=0.96)
        FrozenVariance(floor=0.1, stable=0.96, refresh=False)
    """

    floor: float = 0.1
    stable: float | None = None
    refresh: bool = False

    def __post_init__(self) -> None:
        if not is_number(self.floor) or not 0 <= self.floor <= 1:
            raise ConfigurationError(f"floor={self.floor!r}: give a number in [0, 1].")
        if self.stable is not None and (not is_number(self.stable) or not 0 < self.stable < 1):
            raise ConfigurationError(
                f"stable={self.stable!r}: give a number between 0 and 1, for instance 0.96, or None to begin at "
                "rampup_begin_step."
            )
        if not isinstance(self.refresh, bool):
            raise ConfigurationError(f"refresh={self.refresh!r}: give True or False.")


def as_correction(choice: str | FrozenVariance | Mapping[str, Any]) -> str | FrozenVariance:
    """Return a choice of the user's as a value; "frozen_variance" and a mapping of its arguments as a `FrozenVariance`.

    Raises:
        ConfigurationError: it is something else, or an argument is unknown or out of range.
    """
    if isinstance(choice, FrozenVariance):
        return choice
    if isinstance(choice, Mapping):
        return from_mapping(FrozenVariance, choice, "correction: a frozen variance")
    if choice not in CORRECTIONS:
        raise ConfigurationError(
            f"correction={choice!r}: choose one of {', '.join(CORRECTIONS)}, or give a FrozenVariance."
        )
    return FrozenVariance() if choice == "frozen_variance" else choice


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
        begin_step: optimizer steps before the first sparse one, if more than are scheduled; inf while not known.
    """

    kind = "error_feedback"
    velocity_key: str | None = None
    is_complete = False
    masks = True

    def __init__(self, optimizer: Optimizer, num_senders: int) -> None:
        self.optimizer, self.num_senders = optimizer, num_senders
        self.begin_step: float = 0

    @property
    def local_keys(self) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        """Raise ConfigurationError where a param group asks for what cannot be corrected."""

    def check_dense_phase(self) -> None:
        """Raise ConfigurationError where sparse steps want something that dense ones before them have to leave."""

    def is_ready(self, parameter: Parameter, num_dense_steps: float) -> bool:
        """Return whether a parameter has what it needs to be sparse, after a dense phase of so many steps."""
        return True

    @property
    def earliest_step(self) -> float:
        """The first step that may be sparse, as far as it is known."""
        return self.begin_step

    def stability(self, step: int, candidates: Iterable[tuple[Parameter, Group]]) -> float | None:
        """Return how stable the state of some parameters is, where the dense phase waits for that, in [0, 1].

        None where it does not, or where this is no step to look at it.
        """
        return None

    def is_stable(self, stability: float) -> bool:
        """Return whether the dense phase may end."""
        return True

    def is_refresh(self, step: int) -> bool:
        """Return whether a sparse step wants the mean gradients, too, for `refresh`."""
        return False

    def refresh(self, parameter: Parameter, group: Group, mean: Tensor) -> float:
        """Take in the mean gradient of a sparse parameter; return what its velocity is to be multiplied with."""
        raise NotImplementedError

    def end_refresh(self, step: int) -> None:
        """Count a refresh."""

    def state_dict(self) -> dict[str, Any]:
        """Return the kind, and what is neither the optimizer's nor a residual: primitives, the same on all ranks."""
        return {"kind": self.kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict` of the same kind."""

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

    def scale(self, parameter: Parameter, group: Group) -> Tensor | None:
        """Return what the velocity is multiplied with, elementwise, on its way into the residual; None for 1.

        Called once per sparse step that is taken, before the velocity is brought up to date.
        """
        return None

    def forget(self) -> None:
        """Drop what can be computed again: the optimizer's state has been replaced, or moved."""

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

    def constants(self, parameter: Parameter, group: Group) -> Constants:
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
        constants, gradient = self.constants(parameter, group), parameter.grad
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

    def constants(self, parameter: Parameter, group: Group) -> Constants:
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
        assert parameter.grad is not None
        second_moment = self._take_square(parameter, group, parameter.grad, 1.0 / self.num_senders)
        beta1, beta2 = self.constants(parameter, group).momentum, float(group["betas"][1])
        step = float(self.optimizer.state[parameter]["step"])
        denominator = second_moment.div_(1.0 - beta2**step).sqrt_().add_(group["eps"])
        return denominator.mul_(1.0 - beta1**step).reciprocal_().to(torch.float32)

    def _take_square(self, parameter: Parameter, group: Group, gradient: Tensor, share: float) -> Tensor:
        """Step v with a share of the square of a gradient; return it (for amsgrad the largest), float32 or wider."""
        state, beta2 = self._state(parameter, group), float(group["betas"][1])
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if group["weight_decay"] != 0 and not self._is_decoupled(group):
            wide = (wide.neg() if group.get("maximize") else wide).add(parameter, alpha=group["weight_decay"])
        state["step"] += 1
        second_moment: Tensor = state["exp_avg_sq"].to(wide.dtype).mul(beta2)
        second_moment.addcmul_(wide, wide, value=(1.0 - beta2) * share)
        state["exp_avg_sq"].copy_(second_moment)
        if group["amsgrad"]:
            state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], state["exp_avg_sq"]))
            second_moment.copy_(state["max_exp_avg_sq"])
        return second_moment

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

    D is bounded below by a fraction of its mean over the tensor. m has no bias; `exp_avg` is Adam's, with the bias that
    Adam takes out: ``m = exp_avg / (1 - b1^step)``. `exp_avg_sq` and `step` stay as they are while a tensor is sparse,
    but for refreshes, in which v takes a step with the square of the mean gradient.

    Source: the frozen variance of 1-bit Adam, arXiv 2102.02888, with momentum correction; the floor is this package's.
    """

    kind = "frozen_variance"
    masks = True
    LARGEST_BETA1 = 1.0
    REFRESHES_PER_GAP = 16  # kappa

    def __init__(self, optimizer: Optimizer, num_senders: int, choice: FrozenVariance) -> None:
        super().__init__(optimizer, num_senders)
        self._choice = choice
        self._steps: dict[Parameter, float] = {}  # of sparse parameters; to ask a fused Adam is to wait for a GPU
        self._scales: dict[Parameter, tuple[Tensor, float]] = {}  # with the bias of m that is in it
        self._sum: float | None = None  # of v, when it was looked at last
        self._num_refreshes = self._refresh_step = 0
        if choice.stable is not None:
            self.begin_step = math.inf

    @property
    def local_keys(self) -> tuple[str, ...]:
        return ()

    def check_dense_phase(self) -> None:
        if not self.optimizer.state:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} with rampup_begin_step=0: a frozen variance is that of dense steps. "
                "Begin later, with rampup_begin_step or SparsityWarmup(begin_epoch=...), or when it has become stable, "
                'with correction=FrozenVariance(stable=0.96); or set correction="auto".'
            )

    def forget(self) -> None:
        self._scales.clear()
        self._steps.clear()

    def is_ready(self, parameter: Parameter, num_dense_steps: float) -> bool:
        step = self.optimizer.state.get(parameter, {}).get("step", 0)
        return int(step) >= max(1, num_dense_steps)

    @property
    def _look_every(self) -> int:
        return round(1.0 / (1.0 - max(float(group["betas"][1]) for group in self.optimizer.param_groups)))

    @property
    def earliest_step(self) -> float:
        return min(self.begin_step, 2 * self._look_every)

    def stability(self, step: int, candidates: Iterable[tuple[Parameter, Group]]) -> float | None:
        if self.begin_step < math.inf or step % self._look_every:
            return None
        last, self._sum = self._sum, 0.0
        for parameter, group in candidates:
            if self.optimizer.state.get(parameter):
                self._sum += float(self._second_moment(parameter, group).sum(dtype=torch.float64))
        return min(last, self._sum) / max(last, self._sum) if last and self._sum else 0.0

    def is_stable(self, stability: float) -> bool:
        return self._choice.stable is None or stability >= self._choice.stable

    def constants(self, parameter: Parameter, group: Group) -> Constants:
        constants = super().constants(parameter, group)
        return replace(constants, dampening=1.0 - (1.0 - constants.momentum) * self._bias(parameter, group))

    def scale(self, parameter: Parameter, group: Group) -> Tensor:
        bias = self._bias(parameter, group)
        if parameter not in self._scales or self._scales[parameter][1] != bias:
            denominator = self._second_moment(parameter, group).sqrt_().add_(group["eps"])
            denominator.clamp_(min=self._choice.floor * denominator.mean())
            self._scales[parameter] = denominator.mul_(bias).reciprocal_(), bias
        return self._scales[parameter][0]

    def _second_moment(self, parameter: Parameter, group: Group) -> Tensor:
        """Return v without its bias (for amsgrad of the largest): float32, new."""
        state = self.optimizer.state[parameter]
        second_moment: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].float()
        return second_moment / (1.0 - float(group["betas"][1]) ** float(state["step"]))

    def _bias(self, parameter: Parameter, group: Group) -> float:
        if parameter not in self._steps:
            self._steps[parameter] = float(self.optimizer.state[parameter]["step"])
        bias: float = 1.0 - float(group["betas"][0]) ** self._steps[parameter]
        return bias

    def is_refresh(self, step: int) -> bool:
        return self._choice.refresh and step >= self._refresh_step

    def refresh(self, parameter: Parameter, group: Group, mean: Tensor) -> float:
        bias = self._bias(parameter, group)
        self._take_square(parameter, group, mean, 1.0)
        del self._steps[parameter]
        self._scales.pop(parameter, None)
        return self._bias(parameter, group) / bias

    def end_refresh(self, step: int) -> None:
        self._refresh_step = step + 2 ** (self._num_refreshes // self.REFRESHES_PER_GAP)
        self._num_refreshes += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "begin_step": self.begin_step,
            "sum": self._sum,
            "num_refreshes": self._num_refreshes,
            "refresh_step": self._refresh_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        waits = math.inf if self._choice.stable is not None else 0
        self.begin_step = state["begin_step"] if 0 < state["begin_step"] < math.inf else waits  # found, or not
        self._sum = state["sum"]
        self._num_refreshes, self._refresh_step = state["num_refreshes"], state["refresh_step"]


def correction_for(optimizer: Optimizer, choice: str | FrozenVariance, num_senders: int) -> Correction:
    """Return the correction of an optimizer, by what `as_correction` returns, among so many senders.

    A subclass of torch's optimizers has a step of its own, which need not be the one corrected here.

    Raises:
        ConfigurationError: the optimizer has no variance to freeze.
    """
    kind = type(optimizer)
    if isinstance(choice, FrozenVariance):
        if kind not in (Adam, AdamW):
            raise ConfigurationError(
                f'correction="frozen_variance" with {kind.__name__}: it is for torch.optim.Adam and AdamW. Set "auto".'
            )
        return FrozenAdamCorrection(optimizer, num_senders, choice)
    if choice == "auto" and kind is SGD:
        return MomentumCorrection(optimizer, num_senders)
    if choice == "auto" and kind in (Adam, AdamW):
        return AdamCorrection(optimizer, num_senders)
    return Correction(optimizer, num_senders)
