"""Sharded parameters for a `Synchronizer`: flat peers that hold equal parts, each part a plain tensor.

A parameter that `fully_shard` or tensor parallelism has made a `DTensor` has one shard on this rank. A `LocalView`
presents an optimizer of such parameters as an optimizer of the shards: same class, same options, same state, plain
tensors that share their memory. The user's own optimizer keeps its parameters and steps them itself, so that optimizers
whose arithmetic is not elementwise (Muon) can gather whole tensors. The peers do not receive the
faults (an inf or NaN) and requests of the other shards of the node, so the ranks of a node exchange these first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.comm.collectives import WeakGroup
from lightning_lowbw.sync.synchronizer import Synchronizer


class LocalTensors:
    """This rank's shards of parameters, each a `Parameter` that shares the shard's memory.

    A parameter that is not sharded stands for itself.
    """

    def __init__(self) -> None:
        self._locals: dict[Parameter, Parameter] = {}

    def of(self, parameter: Parameter) -> Parameter:
        """Return the shard of a parameter, always the same object; empty if this rank has no row of the parameter."""
        if not isinstance(parameter, DTensor):
            return parameter
        shard = _shard_of(parameter)
        local = self._locals.get(parameter)
        if local is None:
            local = self._locals[parameter] = Parameter(shard, requires_grad=parameter.requires_grad)
        elif local.data_ptr() != shard.data_ptr() or local.device != shard.device:  # loaded, or moved
            local.data = shard
        if local.requires_grad != parameter.requires_grad:
            local.requires_grad_(parameter.requires_grad)
        return local


def _shard_of(value: Any) -> Any:
    """Return this rank's shard of a value; a value that is not sharded is returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    shard: Tensor = value.to_local()
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
        local: the twin: an instance of the optimizer's class. Its `param_groups` have the options of the user's groups
            as of the last `pull`. Its `state` shares the memory of the user's state; `pull` and `push` copy new
            entries from one state to the other. The twin is not stepped.
    """

    def __init__(self, optimizer: Optimizer, tensors: LocalTensors) -> None:
        self.optimizer, self._tensors = optimizer, tensors
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []  # each group of the user's, and its twin
        self.local: Optimizer = object.__new__(type(optimizer))
        # The constructor is not called: its arguments are not known.
        vars(self.local).update(vars(optimizer))
        vars(self.local).pop("step", None)  # a wrapper, which belongs to the user's optimizer
        self.local.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        self.pull()

    @torch.no_grad()
    def pull(self) -> None:
        """Take in the user's state, param groups that were added, and shards that have moved."""
        known = {id(group): twin for group, twin in self._groups}  # the twin of a group is always the same object
        self._groups = [(group, known.get(id(group), {})) for group in self.optimizer.param_groups]
        for group, twin in self._groups:
            twin.update(group, params=[self._tensors.of(parameter) for parameter in group["params"]])
        self.local.param_groups = [twin for _, twin in self._groups]
        self._pull_state()

    @torch.no_grad()
    def _pull_state(self) -> None:
        # The twin has its entries by shard, the user's optimizer has them by parameter; other keys stay as they are.
        state, self.local.state, shards = dict[Any, Any](self.optimizer.state), defaultdict(dict), dict(self._pairs())
        for parameter, entry in state.items():
            self.local.state[shards.get(parameter, parameter)] = {k: _shard_of(value) for k, value in entry.items()}

    @torch.no_grad()
    def push(self) -> None:
        """Give the user's optimizer the new entries of the twin's state."""
        for parameter, local in self._pairs():
            if not (entry := self.local.state.get(local, {})):
                continue
            own = self.optimizer.state[parameter]
            for key, value in entry.items():
                if _shard_of(own.get(key)) is not value:
                    # A count or a scalar belongs to the whole parameter.
                    is_shard = isinstance(value, Tensor) and value.dim() > 0 and value.shape == local.shape
                    own[key] = like(value, parameter) if is_shard else value

    def _pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        """Yield the user's parameters with their shards."""
        for group, twin in self._groups:
            yield from zip(group["params"], twin["params"], strict=True)

    def drop_frozen_gradients(self) -> None:
        """Drop gradients of parameters that were frozen since the backward: torch would step them on each rank alone.

        In place:
            `.grad` of the user's parameters.
        """
        for parameter, _ in self._pairs():
            if not parameter.requires_grad:
                parameter.grad = None

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Set the gradients of the shards to this rank's parts of the parameters' gradients; shares the memory.

        In place:
            `.grad` of the shards.
        """
        for parameter, local in self._pairs():
            if local is not parameter:
                local.grad = _shard_of(parameter.grad)

    @torch.no_grad()
    def push_gradients(self) -> None:
        """Set the gradients of the user's parameters to the gradients of the shards."""
        for parameter, local in self._pairs():
            if local.grad is None:
                parameter.grad = None
            elif local is not parameter and _shard_of(parameter.grad) is not local.grad:
                parameter.grad = like(local.grad, parameter)

    def release(self) -> None:
        """End a step: the gradients belong to the user's parameters alone."""
        for parameter, local in self._pairs():
            if local is not parameter:
                local.grad = None
        self._pull_state()  # not pushed: the optimizer may have replaced values that the twin has

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        type(self.local).load_state_dict(self.local, state_dict)  # which makes new groups, and a new state
        for group, loaded in zip(self.optimizer.param_groups, self.local.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        self.push()
        self.pull()


# All optimizers of a model --------------------------------------------------------------------------------------------


class NodeShards:
    """This rank's shards of the gradients, for the workers; and the gradients after the exchange, for the optimizers.

    Args:
        node: returns the process group of the node.

    Attributes:
        tensors: the shards of the parameters.
        views: the views of the optimizers, by worker.
    """

    def __init__(self, node: WeakGroup | None) -> None:
        self._node, self.tensors = node, LocalTensors()
        self.views: dict[Synchronizer, LocalView] = {}

    def take(self, worker: Synchronizer) -> tuple[Parameter, ...]:
        """Give a worker the shards of the gradients, which FSDP has reduced inside the node, and check them."""
        view = self.views[worker]
        view.pull()
        if worker.plan.is_local:
            view.drop_frozen_gradients()
            return ()
        view.pull_gradients()
        worker.prepare(node=self._node)  # in each step, because an inf or NaN in one shard is a fault of all ranks
        return ()

    def give(self, worker: Synchronizer) -> None:
        """Give the user's optimizer the gradients and the state that a worker has made."""
        if not worker.plan.is_local:
            self.views[worker].push_gradients()
            self.views[worker].push()

    def has_mean(self, worker: Synchronizer) -> bool:
        """Return False: the gradients that FSDP has reduced are the mean of a node."""
        return False
