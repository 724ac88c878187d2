"""Shards: which ranks have them, how a module without `configure_model` gets them, and what torch keeps gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from lightning_lowbw.comm.agreement import differ
from lightning_lowbw.comm.collectives import Collectives, Held, group_of
from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.comm.topology import Topology
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.sync.local_view import DTensor, LocalTensors

try:
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    HAS_FULLY_SHARD = True
except ImportError:  # before torch 2.6
    HAS_FULLY_SHARD = False

DIMENSIONS = ("data_parallel", "tensor_parallel")  # as in Lightning's ModelParallelStrategy
# Of a LightningModule that is sharded itself: its weights are gathered before each of these.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # which are not called
PARAMETERS = (nn.ParameterList, nn.ParameterDict)


# Nodes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeMesh:
    """The ranks of a node, and those with the same shards in the other nodes.

    Attributes:
        topology: which ranks share a node, each of which holds the whole model.
        mesh: of this rank's node; its second dimension, as in Lightning's ModelParallelStrategy, is of size 1.
        coordinate: which shards this rank holds; its local rank.
        node: returns the process group of the node.
        peers: returns that of the ranks with this coordinate in all nodes.
    """

    topology: Topology
    mesh: DeviceMesh
    coordinate: int
    node: Held
    peers: Held


def make_node_mesh(topology: Topology, rank: int, device_type: str, timeout: timedelta | None) -> NodeMesh:
    """Make the meshes of all nodes, and the process groups between them.

    Collective: all ranks, blocking. A mesh is made of groups that are there: those that `DeviceMesh` makes itself have
    torch's own timeout, whatever the user has said.

    Raises:
        ConfigurationError: on all ranks; the nodes are of different sizes.
    """
    if not topology.has_equal_nodes:
        sizes = ", ".join(f"node {index} has {len(node)}" for index, node in enumerate(topology.nodes))
        raise ConfigurationError(
            f"The nodes have different numbers of ranks ({sizes}), and each rank exchanges its shard with one of the "
            "same size in every other node. Start as many ranks on each."
        )
    node, coordinate = topology.node_of(rank), topology.local_rank_of(rank)
    nodes = [group_of(ranks, DIMENSIONS[0], timeout) for ranks in topology.nodes]
    alone = [group_of((each,), DIMENSIONS[1], timeout) for each in range(topology.world_size)]
    between = [group_of(topology.peers(each), "equal shards", timeout) for each in range(topology.ranks_per_node)]
    mesh = DeviceMesh.from_group(
        [group for group in (nodes[node], alone[rank]) if group is not None],
        device_type,
        torch.tensor(topology.nodes[node], dtype=torch.int).view(-1, 1),
        mesh_dim_names=DIMENSIONS,
    )
    return NodeMesh(topology, mesh, coordinate, Held(nodes[node]), Held(between[coordinate]))


# Modules without `configure_model` --------------------------------------------------------------------------------


def install_default(module: Any, device: torch.device) -> None:
    """Give a module that has none a `configure_model` that shards it, until `remove_default`.

    The whole model is on each rank until then. A model that does not fit needs one of its own, under
    ``with torch.device("meta")``.

    Raises:
        ConfigurationError: this torch cannot shard.
    """
    if not HAS_FULLY_SHARD:
        raise ConfigurationError(
            f"ShardedStrategy needs torch.distributed.fsdp.fully_shard, which torch {torch.__version__} does not have: "
            "install torch 2.6 or newer."
        )
    if not is_overridden("configure_model", module):
        module.configure_model = lambda: _shard(module, device)


def remove_default(module: nn.Module) -> None:
    """Take it away again."""
    vars(module).pop("configure_model", None)


def _shard(module: Any, device: torch.device) -> None:
    """Shard the children, and the layers in lists; the module itself takes what several of them share, and its own."""
    if any(isinstance(each, DTensor) for each in module.parameters()):  # in an earlier fit
        return
    for tensor in [*module.parameters(), *module.buffers()]:  # as DDP: rank 0's, before each keeps its shard of it
        whole = tensor.detach().to(device)
        dist.broadcast(whole, 0)
        with torch.no_grad():
            tensor.copy_(whole)
    lists = [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    children, in_lists = set(_layers_in(module)), {layer for each in lists for layer in _layers_in(each)}
    users: dict[Parameter, set[nn.Module]] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            users.setdefault(parameter, set()).add(layer)
    alone = [  # inner ones first; before torch replaces any parameter
        layer
        for layer in reversed(list(module.modules()))
        if layer in children | in_lists and any(True for _ in layer.parameters())
        if all(users[parameter] <= set(layer.modules()) for parameter in layer.parameters())
    ]
    mesh = module.device_mesh[DIMENSIONS[0]]
    for layer in alone:  # others stay gathered until the backward pass, as a root does: a loss may use their weights
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer in in_lists)
    if not all(isinstance(each, DTensor) for each in module.parameters()):
        fully_shard(module, mesh=mesh)
        for name in STEPS:
            register_fsdp_forward_method(module, name)


def _layers_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; in place of a list or dictionary of layers those that are in it."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _layers_in(child)
        elif not isinstance(child, PARAMETERS):
            yield child


# What is gathered, and what is not --------------------------------------------------------------------------------


def check_sharded(module: nn.Module, mesh: NodeMesh) -> None:
    """Check that each parameter that is trained is sharded over this node, and not over more or less.

    Raises:
        ConfigurationError: one is not; names it.
    """
    ranks = set(mesh.mesh.mesh.flatten().tolist())
    for name, parameter in module.named_parameters():
        others = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
        if not others <= ranks:
            raise ConfigurationError(
                f"{name!r} is sharded over ranks {sorted(others)}, and this node has {sorted(ranks)}: what is "
                "sharded over several nodes is sent between them in every forward pass. In configure_model give "
                'fully_shard the mesh of the node: mesh=self.device_mesh["data_parallel"].'
            )
        if parameter.requires_grad and len(ranks) > 1 and others != ranks:
            raise ConfigurationError(
                f"{name!r} is not sharded over the node: its gradient would be that of this rank alone. End "
                'configure_model with fully_shard(self, mesh=self.device_mesh["data_parallel"]), which takes what no '
                "block has."
            )


def check_reduced(module: nn.Module) -> None:
    """Check after a backward pass that FSDP has reduced all gradients.

    In manual optimization it does not reduce those of the module's own parameters, and of layers that share one: they
    are gathered for `training_step`, which has not ended.

    Raises:
        ConfigurationError: a parameter is gathered and has a gradient, which would be missing in this step.
    """
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            raise ConfigurationError(
                f"{name!r}: FSDP has not reduced its gradient. In manual optimization a parameter of the module "
                "itself, or one that several layers share, needs a configure_model: shard a layer around all its users."
            )


def reshard_(module: nn.Module) -> None:
    """Free the weights that a forward pass has gathered, and that it keeps for a backward pass that may not come.

    After a validation these would be used by the next forward pass, although the shards have other values by then.
    """
    for layer in module.modules():
        if HAS_FULLY_SHARD and isinstance(layer, FSDPModule):
            layer.reshard()


@torch.no_grad()
def equalise_(module: nn.Module, tensors: LocalTensors, group: dist.ProcessGroup | None) -> None:
    """Give all nodes the weights and buffers of the first, where they differ.

    In place:
        Parameters and buffers.

    Collective: the ranks of the group, which have the same shards; two numbers, and the tensors where these differ.
    """
    own: list[Tensor] = [tensors.of(parameter).detach() for parameter in module.parameters()]
    own += list(module.buffers())
    if own and dist.get_world_size(group) > 1 and any(differ([own], group, own[0].device)):
        peers = Collectives(group, TrafficLedger())
        for tensor in own:
            if tensor.numel():
                peers.broadcast_(tensor)
