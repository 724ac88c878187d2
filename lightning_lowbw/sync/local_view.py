"""Sharded parameters for the engine: flat peers that hold equal parts, each part a plain tensor.

A parameter that `fully_shard` or tensor parallelism has made a `DTensor` has one shard on this rank. A `LocalView`
presents an optimizer of such parameters as an optimizer of these shards: same class, same options, same state, plain
tensors that share their memory. Writes go into the shards. The user's own optimizer keeps its parameters and steps them
itself, so that optimizers whose arithmetic is not elementwise (Muon) can gather whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.errors import ConfigurationError

try:
    from torch.distributed.tensor import DTensor as DTensor
    from torch.distributed.tensor import Shard as Shard
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor as DTensor
    from torch.distributed._tensor import Shard as Shard


class LocalTensors:
    """This rank's shards of parameters, each a `Parameter` that shares the shard's memory; others as they are."""

    def __init__(self) -> None:
        self._locals: dict[Parameter, Parameter] = {}
        self._users: dict[Parameter, Parameter] = {}

    def of(self, parameter: Parameter) -> Parameter:
        """Return the shard of a parameter, always the same object; empty where this rank has no row of it."""
        if not isinstance(parameter, DTensor):
            return parameter
        shard = _shard_of(parameter)
        local = self._locals.get(parameter)
        if local is None:
            local = self._locals[parameter] = Parameter(shard, requires_grad=parameter.requires_grad)
            self._users[local] = parameter
        elif local.data_ptr() != shard.data_ptr() or local.device != shard.device:  # loaded, or moved
            local.data = shard
        if local.requires_grad != parameter.requires_grad:
            local.requires_grad_(parameter.requires_grad)
        return local

    def user_of(self, local: Parameter) -> Parameter:
        """Return the parameter of a shard."""
        return self._users.get(local, local)

    def take_gradient(self, parameter: Parameter) -> None:
        """Set the gradient of a shard to this rank's part of the parameter's gradient.

        In place:
            `.grad` of the shard; of the parameter where it is laid out otherwise than the parameter.
        """
        local, gradient = self.of(parameter), parameter.grad
        if local is parameter:
            return
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            if gradient.placements != parameter.placements:  # of tensor parallelism alone: a partial sum
                parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
            local.grad = _shard_of(gradient)
        else:
            local.grad = gradient

    def give_gradient(self, parameter: Parameter) -> None:
        """Set a parameter's gradient from that of its shard.

        In place:
            `.grad` of the parameter.
        """
        local = self.of(parameter)
        if local is parameter:
            return
        if local.grad is None:
            parameter.grad = None
        elif parameter.grad is None or _shard_of(parameter.grad) is not local.grad:
            parameter.grad = like(local.grad, parameter)


def _shard_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard.detach() if shard.requires_grad else shard


def like(local: Tensor, parameter: Parameter) -> Tensor:
    """Return a shard as a tensor that is laid out as a parameter; shares the shard's memory."""
    if not isinstance(parameter, DTensor):
        return local
    with torch.no_grad():
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


class LocalView:
    """An optimizer's twin over this rank's shards.

    Args:
        optimizer: the user's.
        tensors: the shards, shared by all optimizers of a model.

    Attributes:
        local: the twin: an instance of the optimizer's class whose `param_groups` and `state` read and write those of
            the user's. It is not stepped.
    """

    def __init__(self, optimizer: Optimizer, tensors: LocalTensors) -> None:
        self.optimizer, self._tensors = optimizer, tensors
        self._groups: dict[int, _LocalGroup] = {}
        self.local: Optimizer = object.__new__(type(optimizer))
        vars(self.local).update(vars(optimizer))
        for name in ("_init_group", "step"):  # wrappers, which belong to the user's own
            vars(self.local).pop(name, None)
        self.local.state = _LocalStates(optimizer, tensors)  # type: ignore[assignment]
        self.local.state_dict = self._state_dict  # type: ignore[method-assign]
        self.local.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        self.refresh()

    def refresh(self) -> None:
        """Take in param groups that were added, and shards that have moved."""
        self.local.param_groups = [self.group_of(group) for group in self.optimizer.param_groups]  # type: ignore[misc]
        for parameter in self.parameters():
            self._tensors.of(parameter)

    def group_of(self, group: dict[str, Any]) -> _LocalGroup:
        """Return the twin of a param group, always the same object."""
        known = self._groups.get(id(group))
        if known is None or known.group is not group:
            known = self._groups[id(group)] = _LocalGroup(group, self._tensors)
        return known

    def parameters(self) -> Iterator[Parameter]:
        """Yield the user's parameters."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def take_gradients(self) -> None:
        """Set the gradients of all shards; shares the memory."""
        for parameter in self.parameters():
            self._tensors.take_gradient(parameter)

    def give_gradients(self) -> None:
        """Set the gradients that the user's optimizer steps with from those of the shards."""
        for parameter in self.parameters():
            self._tensors.give_gradient(parameter)
        if "_init_group" in vars(self.local):
            vars(self.optimizer)["_init_group"] = self._gather

    def release(self) -> None:
        """End a step: the gradients belong to the user's parameters alone."""
        vars(self.optimizer).pop("_init_group", None)
        for parameter in self.parameters():
            local = self._tensors.of(parameter)
            if local is not parameter:
                local.grad = None

    def _gather(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Stand in for the gathering of a param group that an optimizer's step begins with.

        The twin's has been replaced by a correction (Adam's), which steps some of the parameters itself. It gives
        the step the shards of the others: their arithmetic is elementwise.
        """
        for name in ("grad_scale", "found_inf"):  # of a GradScaler, set for the duration of a step
            vars(self.local).pop(name, None)
            if hasattr(self.optimizer, name):
                setattr(self.local, name, getattr(self.optimizer, name))
        self.take_gradients()  # a hook may have put others in their place
        return self.local._init_group(self.group_of(group), *lists)  # type: ignore[attr-defined]

    def _state_dict(self) -> dict[str, Any]:
        numbers = {parameter: number for number, parameter in enumerate(self._ordered())}
        state = self.local.state
        return {
            "state": {numbers[p]: dict(state[p].items()) for p in numbers if p in state},
            "param_groups": [
                {**_options(group), "params": [numbers[local] for local in group["params"]]}
                for group in self.local.param_groups
            ],
        }

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups, saved = self.local.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ConfigurationError(
                f"The state has param groups of {[len(group['params']) for group in saved]} parameters, the "
                f"{type(self.local).__name__} of {[len(group['params']) for group in groups]}. Resume with the "
                "optimizer it was written with."
            )
        for group, other in zip(groups, saved, strict=True):
            group.update(_options(other))
        for number, local in enumerate(self._ordered()):
            entry = self.local.state[local]
            for key in list(entry):
                del entry[key]
            for key, value in state_dict["state"].get(number, {}).items():
                is_counter = key == "step" and not (groups[0].get("capturable") or groups[0].get("fused"))
                entry[key] = value.to(local.device) if isinstance(value, Tensor) and not is_counter else value

    def _ordered(self) -> list[Parameter]:
        return list(dict.fromkeys(local for group in self.local.param_groups for local in group["params"]))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


class _LocalGroup(MutableMapping[str, Any]):
    """A param group whose "params" are shards; all else is read from the user's group, and written into it."""

    def __init__(self, group: dict[str, Any], tensors: LocalTensors) -> None:
        self.group, self._tensors = group, tensors

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return [self._tensors.of(parameter) for parameter in self.group["params"]]
        return self.group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        assert key != "params"
        self.group[key] = value

    def __delitem__(self, key: str) -> None:
        del self.group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.group)

    def __len__(self) -> int:
        return len(self.group)


class _LocalStates(MutableMapping[Parameter, "_LocalState"]):
    """An optimizer's state by shard; a missing entry is made on access, as in torch."""

    def __init__(self, optimizer: Optimizer, tensors: LocalTensors) -> None:
        self._optimizer, self._tensors = optimizer, tensors

    def __getitem__(self, local: Parameter) -> _LocalState:
        parameter = self._tensors.user_of(local)
        return _LocalState(self._optimizer.state[parameter], parameter, local)

    def get(self, local: Any, default: Any = None) -> Any:
        return self[local] if local in self else default  # noqa: SIM401 - `self[...]` would make one

    def __contains__(self, local: object) -> bool:
        return isinstance(local, Parameter) and self._tensors.user_of(local) in self._optimizer.state

    def __setitem__(self, local: Parameter, entry: Mapping[str, Any]) -> None:
        own = self[local]
        own.clear()
        own.update(entry)

    def __delitem__(self, local: Parameter) -> None:
        del self._optimizer.state[self._tensors.user_of(local)]

    def __iter__(self) -> Iterator[Parameter]:
        return (self._tensors.of(parameter) for parameter in self._optimizer.state if isinstance(parameter, Parameter))

    def __len__(self) -> int:
        return len(self._optimizer.state)


class _LocalState(MutableMapping[str, Any]):
    """The state of one parameter: tensors with its layout are read and written as shards."""

    def __init__(self, entry: dict[str, Any], parameter: Parameter, local: Parameter) -> None:
        self._entry, self._parameter, self._local = entry, parameter, local

    def __getitem__(self, key: str) -> Any:
        value = self._entry[key]
        return _shard_of(value) if isinstance(value, DTensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        is_shard = isinstance(value, Tensor) and value.dim() > 0 and value.shape == self._local.shape
        self._entry[key] = like(value, self._parameter) if is_shard else value

    def __delitem__(self, key: str) -> None:
        del self._entry[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry)

    def __len__(self) -> int:
        return len(self._entry)


def local_parameters(
    named_parameters: Iterable[tuple[str, Parameter]], tensors: LocalTensors
) -> list[tuple[str, Parameter]]:
    """Return the shards of a model's parameters, with the names of these."""
    return [(name, tensors.of(parameter)) for name, parameter in named_parameters]
