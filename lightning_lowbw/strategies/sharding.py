"""The models that `ShardedStrategy` trains: which are sharded by their own `configure_model`, and the others here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_lowbw.engine.local_view import DTensor, LocalTensors
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.where.agreement import differ, failing_together
from lightning_lowbw.where.collectives import Collectives
from lightning_lowbw.where.node_mesh import NodeMesh

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule

# Of a LightningModule that has parameters of its own: they are gathered before each of these.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
PARAMETERS = (nn.ParameterList, nn.ParameterDict)


def fully_shard_of_torch() -> tuple[Callable[..., Any], Callable[[Any, str], None]]:
    """Return torch's `fully_shard` and `register_fsdp_forward_method`.

    Raises:
        ConfigurationError: this torch has none that is public.
    """
    try:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    except ImportError as error:
        raise ConfigurationError(
            f"ShardedStrategy needs torch.distributed.fsdp.fully_shard, which torch {torch.__version__} does not have: "
            "install torch 2.6 or newer."
        ) from error
    return fully_shard, register_fsdp_forward_method


class DefaultSharding:
    """Shards a module that has no `configure_model`, where Lightning would call that.

    The whole model is on each rank until then. A model that does not fit needs a `configure_model` of its own, under
    ``with torch.device("meta")``.

    Args:
        blocks: class names of layers that are gathered one at a time; empty: the layers in each `nn.ModuleList` and
            `nn.Sequential`. What is in none of them is gathered with the root.
    """

    def __init__(self, blocks: Sequence[str] = ()) -> None:
        is_list = isinstance(blocks, Sequence) and not isinstance(blocks, str)
        if not is_list or not all(isinstance(each, str) and each for each in blocks):
            raise ConfigurationError(
                f"blocks={blocks!r}: give the class names of the layers that are gathered one at a time, as in "
                "blocks=['Block']; none: the layers in each nn.ModuleList and nn.Sequential."
            )
        self._blocks = tuple(blocks)
        self._module: Any = None
        self._root: Any = None

    def install(self, module: Any, device: torch.device) -> None:
        """Give a module that has none a `configure_model`, until `restore`.

        Raises:
            ConfigurationError: it has one, and `blocks` were given.
        """
        fully_shard_of_torch()
        if is_overridden("configure_model", module):
            if self._blocks:
                raise ConfigurationError(
                    f"blocks={list(self._blocks)}: {type(module).__name__} shards itself in configure_model. Leave out "
                    "one of them."
                )
            return
        self._module = module

        def configure_model() -> None:
            if not any(isinstance(each, DTensor) for each in module.parameters()):
                self._shard(module, device)

        module.configure_model = configure_model

    def restore(self) -> None:
        """Take it away again."""
        if self._module is not None:
            del self._module.configure_model
            self._module = self._root = None

    def _shard(self, module: Any, device: torch.device) -> None:
        fully_shard, register_fsdp_forward_method = fully_shard_of_torch()
        with failing_together():
            blocks = self._blocks_of(module)
        for tensor in [*module.parameters(), *module.buffers()]:  # as DDP: rank 0's, before each keeps its shard of it
            whole = tensor.detach().to(device)
            dist.broadcast(whole, 0)
            with torch.no_grad():
                tensor.copy_(whole)
        mesh = module.device_mesh["data_parallel"]
        # `training_step` calls the children, and need not call the module itself.
        children = _children(module)
        own = [module] if _has_own_parameters(module) else []
        layers = [*blocks, *(layer for each in children for layer in _called(each))]
        groups = [group for group in _groups([*layers, *own]) if group != own]
        for group in groups:
            # A child stays gathered until the backward pass, as a root does: a loss may use its weights.
            is_child = any(layer in children for layer in group)
            fully_shard(group if len(group) > 1 else group[0], mesh=mesh, reshard_after_forward=not is_child)
        if own or any(len(group) > 1 for group in groups):  # torch wants a root around several
            fully_shard(module, mesh=mesh)
            for name in STEPS:
                register_fsdp_forward_method(module, name)
            self._root = module

    def begin(self) -> None:
        """Let torch know the root, before a callback may call one of the layers."""
        if self._root is not None:
            self._root._get_fsdp_state()._lazy_init()

    def _blocks_of(self, module: nn.Module) -> list[nn.Module]:
        if self._blocks:
            found = [each for each in module.modules() if type(each).__name__ in self._blocks]
            missing = set(self._blocks) - {type(each).__name__ for each in found}
            if missing:
                names = sorted({type(each).__name__ for each in module.modules()})
                raise ConfigurationError(
                    f"blocks={list(self._blocks)}: the model has no layer of class {', '.join(sorted(missing))}; its "
                    f"classes are {', '.join(names)}."
                )
        else:
            lists = [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
            found = [layer for each in lists for layer in each]
        return [each for each in found if _is_sharded_alone(each)]


def _groups(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the layers in the order in which they are sharded, inner ones first, because each gathers what none inside
    does; those that share a parameter in one group, in which it stays one parameter.

    A layer that shares one with a layer around it is left to that.
    """
    parts = {layer: set(layer.modules()) for layer in layers}
    while True:
        users = _users(parts)
        left = {each for own in users for each in own if any(each in parts[other] - {other} for other in own)}
        if not left:
            break
        parts = {layer: within for layer, within in parts.items() if layer not in left}
    groups: list[set[nn.Module]] = [{layer} for layer in parts]
    for own in users:
        together = [group for group in groups if not own.isdisjoint(group)]
        groups = [group for group in groups if group not in together] + [set().union(*together)]
    order = {layer: number for number, layer in enumerate(parts)}  # the same on all ranks
    waiting = sorted((sorted(group, key=order.__getitem__) for group in groups), key=lambda group: order[group[0]])
    ordered: list[list[nn.Module]] = []
    while waiting:
        others = {layer for group in waiting for layer in group}
        inner = [group for group in waiting if not _inside(group, parts) & others]
        ordered += inner or waiting  # torch refuses groups that are inside of each other
        waiting = [group for group in waiting if group not in ordered]
    return ordered


def _inside(group: Sequence[nn.Module], parts: Mapping[nn.Module, set[nn.Module]]) -> set[nn.Module]:
    return {part for layer in group for part in parts[layer]}.difference(group)


def _users(parts: Mapping[nn.Module, set[nn.Module]]) -> list[set[nn.Module]]:
    """Return, for each parameter, the layers that would gather it: the innermost that have it."""
    users: dict[Parameter, set[nn.Module]] = {}
    for layer, within in parts.items():
        inside = {part for other in within.intersection(parts) - {layer} for part in parts[other]}
        for part in within - inside:
            for parameter in part.parameters(recurse=False):
                users.setdefault(parameter, set()).add(layer)
    return list(users.values())


def _children(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a module that have parameters, except lists of parameters."""
    return [child for child in module.children() if _has_any(child) and not isinstance(child, PARAMETERS)]


def _called(layer: nn.Module) -> list[nn.Module]:
    """Return a layer; in place of a list or dictionary of layers, which is not called, its layers."""
    if not isinstance(layer, CONTAINERS):
        return [layer]
    return [each for child in _children(layer) for each in _called(child)]


def _is_sharded_alone(layer: nn.Module) -> bool:
    """Whether a layer has parameters, and is called: what only holds layers or parameters is not."""
    return _has_any(layer) and not isinstance(layer, (*CONTAINERS, *PARAMETERS))


def _has_any(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def _has_own_parameters(module: nn.Module) -> bool:
    lists = [child for child in module.children() if isinstance(child, PARAMETERS)]
    return any(True for each in (module, *lists) for _ in each.parameters(recurse=False))


def check_reduced(module: nn.Module) -> None:
    """Check after a backward pass that FSDP has reduced all gradients.

    In manual optimization it does not where a loss uses a part of what is gathered together, and the rest not at all.

    Raises:
        ConfigurationError: a parameter is gathered and has a gradient, which would be missing in this step.
    """
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"{name!r}: FSDP has not reduced its gradient, because the loss uses only some of the layers that are "
                "gathered with it (they share a parameter, or it is the module's own). Compute the loss from the whole "
                "model, or write a configure_model."
            )


def check_sharded(module: nn.Module, mesh: NodeMesh) -> None:
    """Check that each parameter that is trained is sharded over this node, and not over more or less.

    Raises:
        ConfigurationError: one is not; names it.
    """
    ranks = set(mesh.mesh.mesh.flatten().tolist())
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            others = set(parameter.device_mesh.mesh.flatten().tolist())
            if not others <= ranks:
                raise ConfigurationError(
                    f"{name!r} is sharded over ranks {sorted(others)}, and this node has {sorted(ranks)}: what is "
                    "sharded over several nodes is sent between them in every forward pass. In configure_model give "
                    'fully_shard the mesh of the node: mesh=self.device_mesh["data_parallel"].'
                )
            missing = len(ranks) // max(1, len(others))
            if parameter.requires_grad and missing > 1 and mesh.sizes[0] > 1 and not _is_over_data(parameter):
                raise ConfigurationError(
                    f"{name!r} is sharded by tensor parallelism alone, and there are {mesh.sizes[0]} data-parallel "
                    "ranks, whose gradients nobody would average. Call fully_shard(..., "
                    'mesh=self.device_mesh["data_parallel"]) on the module as well.'
                )
        elif parameter.requires_grad and len(ranks) > 1:
            raise ConfigurationError(
                f"{name!r} is not sharded: its gradient would be that of this rank alone. End configure_model with "
                'fully_shard(self, mesh=self.device_mesh["data_parallel"]), which takes what no block has.'
            )


def _is_over_data(parameter: DTensor) -> bool:
    return "data_parallel" in (parameter.device_mesh.mesh_dim_names or ())


def reshard_(module: nn.Module) -> None:
    """Free the weights that a forward pass has gathered, and that it keeps for a backward pass that may not come.

    After a validation these would be used by the next forward pass, although the shards have other values by then.
    """
    for layer in module.modules():
        if isinstance(layer, FSDPModule):
            layer.reshard()


def check_resharded(module: nn.Module) -> None:
    """Check after `reshard_`, after a step, that the next forward pass will gather all weights that have been stepped.

    Raises:
        ConfigurationError: a trained parameter is still gathered.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"{name!r} is still gathered after the step, and the next forward pass would use its former values: it "
                "is gathered with other layers, because they share a parameter, and one of them was called without the "
                "others before the step. Call the whole model there, or write a configure_model."
            )


def equalise_(module: nn.Module, tensors: LocalTensors, peers: Collectives) -> None:
    """Give all nodes the weights and buffers of the first, where they differ.

    In place:
        Parameters and buffers.

    Collective: the peers, blocking: two numbers, and the tensors where these differ.
    """
    shards: list[Tensor] = [tensors.of(parameter).detach() for parameter in module.parameters()]
    shards += list(module.buffers())
    if peers.num_ranks == 1 or not shards:
        return
    if any(differ([shards], peers.group, shards[0].device)):
        for shard in shards:
            if shard.numel():
                peers.broadcast_(shard)
