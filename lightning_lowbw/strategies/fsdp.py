"""`ShardedStrategy`: a model that is sharded over the ranks of each node, and a method that works between nodes.

After FSDP's reduce-scatter each rank has its shard of the node's mean gradient. Its peers are the ranks with the same
shard in the other nodes; `NodeShards` gives the method plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.comm.agreement import differ, failing_together
from lightning_lowbw.comm.collectives import all_reduce_, broadcast_, broadcast_flat_
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import (
    DIMENSIONS,
    NodeMesh,
    Topology,
    TopologyChoice,
    Where,
    check_choice,
    make_node_mesh,
    resolve,
)
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method, as_method
from lightning_lowbw.strategies import checkpoint as files
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.fit import unwrapped
from lightning_lowbw.strategies.keywords import Needs, as_timeout, written
from lightning_lowbw.strategies.shared_buffers import SharedBuffers, buffers_of
from lightning_lowbw.strategies.step_hooks import scaler_of
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.local_view import LocalTensors, LocalView, NodeShards
from lightning_lowbw.sync.synchronizer import Synchronizer

# The weights of a LightningModule that is sharded itself are gathered before each of its methods.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward pass
PARAMETERS = (nn.ParameterList, nn.ParameterDict)


class ShardedStrategy(BaseStrategy, ModelParallelStrategy):
    """FSDP2 inside each node, a method between nodes: for models that do not fit on one GPU.

    Each node holds the model once, sharded over its ranks: by the module's own `configure_model`, written as for
    Lightning's `ModelParallelStrategy` (``fully_shard(layer, mesh=self.device_mesh["data_parallel"])``). If it has
    none, each layer of every `nn.ModuleList` and `nn.Sequential` is sharded, and each other child. After FSDP's
    reduce-scatter each rank has its shard of the node's mean gradient. The method exchanges this shard, or the shard of
    the weights, with the ranks that have the same shard in other nodes. N, the number of participants, is the number of
    nodes.

    Args:
        method: the schedule and the payload between nodes; a `Method`, such as `DGC(...)` or `LocalSGD(...)` return, or
            a mapping. A density applies to each shard.
        topology: which ranks share a node: "auto" (by the launcher and the host names), a number of ranks per node,
            the ranks of each node, or a `Topology`. None: the method's own, or "auto". Nodes are of one size.
        save_distributed_checkpoint: as for `ModelParallelStrategy`: a folder in which each rank writes its shards, or
            one file, for which rank 0 gathers all weights in its memory.
        resume, skip_nonfinite, skip_norm: as for `Strategy`.
        process_group_backend: backend of torch.distributed; None: by the device.
        timeout: seconds that a collective may take, or a timedelta.

    Attributes:
        method: the configuration.
        ledger: the traffic of this rank between nodes since the start of the fit.

    Raises:
        ConfigurationError: a value is out of range, or the method cannot be used with shards, with the reason; at the
            start of the fit, on all ranks: the topology does not fit the world, or the model is not sharded inside
            nodes.

    Examples:
        >>> from lightning_lowbw import LocalSGD
        >>> ShardedStrategy(LocalSGD(k_steps=4), topology=8)
        ShardedStrategy(Method(when=EveryK(k_steps=4)), topology=8)
    """

    _all_ranks_save = True

    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        topology: TopologyChoice | None = None,
        save_distributed_checkpoint: bool = True,
        resume: Needs = "exact",
        skip_nonfinite: bool = False,
        skip_norm: float | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=None if timeout is None else as_timeout(timeout),
        )
        given = as_method(method, topology)
        of_method = given.where.topology
        self.topology = topology if topology is not None else of_method if of_method != "flat" else "auto"
        if check_choice(self.topology) is None and self.topology == "flat":
            raise ConfigurationError(
                "topology='flat': a model is sharded over the ranks of a node. Give 'auto', a number of ranks per "
                "node, the ranks of each node such as [[0, 1], [2, 3]], or a Topology."
            )
        checks.refuse(checks.refusals_of_shards(given))
        self._mesh: NodeMesh | None = None
        flat = Method(when=given.when, what=given.what, where=Where())  # each of the flat peers is a node
        options = {"resume": resume, "skip_nonfinite": skip_nonfinite, "skip_norm": skip_norm}
        self._hold(flat, {"save_distributed_checkpoint": save_distributed_checkpoint, **options})

    def __repr__(self) -> str:
        return written(self, {"topology": self.topology, **self._options})

    @property
    def mesh(self) -> NodeMesh:
        """The ranks of the node of this rank, and the ranks with the same shards; from the start of a fit on."""
        if self._mesh is None:
            raise RuntimeError("The nodes are known when a fit, a validation or the like has begun.")
        return self._mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        topology = self.mesh.topology
        number = topology.node_of(self.global_rank) * topology.ranks_per_node + self.mesh.coordinate
        return {"num_replicas": topology.world_size, "rank": number}

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        trainer, module = self.trainer, self.trainer.lightning_module
        if self._is_fitting:
            self._begin_fit({"topology": repr(check_choice(self.topology) or self.topology)})
            if averaging := checks.callbacks_of(trainer, *checks.AVERAGING):
                raise ConfigurationError(
                    f"{type(averaging[0]).__name__}: it averages copies of whole weights, and here each rank has "
                    "shards. Leave it out, or use a strategy that does not shard the model."
                )
        topology = self._find_topology()
        self._mesh = make_node_mesh(topology, self.global_rank, self.root_device.type, self._timeout)
        self._device_mesh = module._device_mesh = self._mesh.mesh
        install_default(module, self.root_device)
        reshard_(module)  # a forward pass since the last fit has gathered weights

    def _find_topology(self) -> Topology:
        topology = resolve(self.topology, self.world_size) or Topology.blocks(self.world_size, 1)
        if self._is_fitting:
            shown = ", ".join(str(list(node)) for node in topology.nodes)
            alone = " There is no slow network between nodes: this trains as FSDP." if topology.num_nodes == 1 else ""
            name = type(self).__name__
            rank_zero_info(f"{name}: nodes {shown}; each holds the model once, sharded over its ranks.{alone}")
        return topology

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not self._is_fitting:
            super().setup(trainer)
            return
        assert self.model is not None
        checks.check_model(self.model)
        with failing_together():
            check_sharded(self.model, self.mesh)
        super().setup(trainer)
        if scaler_of(self.precision_plugin) is not None:
            raise ConfigurationError(
                "A GradScaler with a sharded model: each rank would skip steps alone. Give precision='bf16-mixed'."
            )
        view = self._view = ShardedView(trainer.lightning_module, self.mesh)
        equalise_(trainer.lightning_module, view.tensors, self.mesh.peers())
        self.fit.buffers = SharedBuffers(trainer.lightning_module, None, in_forward=False)
        self.fit.ends.callback(view.release)
        self.fit.begin(trainer, view, self._make_worker)

    @override
    def _make_worker(self, optimizer: Optimizer, module: pl.LightningModule, buffers: Any) -> Any:
        """Return a worker that sees this rank's shards."""
        tensors = self._view.tensors
        view, shard_of = LocalView(optimizer, tensors), tensors.of
        named = [(name, shard_of(parameter)) for name, parameter in module.named_parameters()]
        worker: Any = self._make_sync(optimizer, view, named, buffers)
        worker.params.whole_numels = {shard_of(parameter): parameter.numel() for parameter in module.parameters()}
        vars(worker.params).pop("small_numel", None)  # computed from the sizes of shards, for the fragments
        self._view.views[worker] = view
        return worker

    def _make_sync(self, optimizer: Optimizer, view: LocalView, named: Any, buffers: Any) -> Any:
        """Return the worker of an optimizer, of whose parameters `named` are the shards."""
        peers = Peers(self.mesh.peers(), self.ledger, nodes=self.mesh.topology.nodes)
        return self.method.make_synchronizer(view.local, named, peers, buffers)

    @override
    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("configure_model", None)  # of `install_default`
            reshard_(self.lightning_module)  # code after the fit finds all weights sharded
        super().teardown()

    # The step, and checkpoints ----------------------------------------------------------------------------------

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.mesh.topology.ranks_per_node > 1:
            check_reduced(self.trainer.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        raw = unwrapped(optimizer)
        if self.is_interrupted or not any(group["params"] for group in raw.param_groups):  # torch expects a state
            return {}
        with self.fit.step_hooks.allowing(raw):  # torch takes an empty step if the optimizer has no state
            state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self._is_fitting and "global_step" in checkpoint:
            self._view.look()
            with torch.no_grad():
                files.load(self.fit, self._layout, checkpoint, checkpoint_path, needs=self._options["resume"])
            for view in self._view.views.values():
                view.push()
        return checkpoint

    @property
    @override
    def _layout(self) -> files.Layout:
        nodes, place = [list(node) for node in self.mesh.topology.nodes], self.mesh.coordinate
        return files.Layout(f"{self.method.kind} of shards", nodes, place)


class ShardedView(NodeShards):
    """The view of a fit whose model is sharded inside nodes.

    Args:
        module: the model.
        mesh: the ranks of the node.
    """

    def __init__(self, module: nn.Module, mesh: NodeMesh) -> None:
        super().__init__(mesh.node)
        self._module = module

    def use(self, method: Method) -> None: ...
    def begin_batch(self, workers: Collection[Synchronizer], *, is_timing: bool) -> None: ...

    def end_step(self, worker: Synchronizer, workers: Collection[Synchronizer]) -> None:
        """End a step: the user's optimizer has gradients that were hidden from it, and all gradients."""
        view = self.views[worker]
        if not worker.plan.is_local:
            view.push_gradients()
        view.release()
        reshard_(self._module)  # after a forward pass without a backward pass gathered weights are old

    def sum_in_node_(self, number: Tensor) -> None:
        all_reduce_(number, None if self._node is None else self._node())

    def end_batch(self) -> None:
        reshard_(self._module)

    def look(self) -> None:
        reshard_(self._module)
        for view in self.views.values():
            view.pull()

    def share_in_node(self, replicas: Collection[LocalSync]) -> None:
        for worker in replicas:
            buffers = worker.replica.buffers.now().values()
            broadcast_flat_(buffers, lambda flat: broadcast_(flat, None if self._node is None else self._node()))

    def release(self) -> None:
        """End the fit."""
        for view in self.views.values():
            view.release()


# Modules without `configure_model` --------------------------------------------------------------------------------


def install_default(module: Any, device: torch.device) -> None:
    """Give a module that has none a `configure_model` that shards it, until `teardown`.

    The whole model is on each rank until then. A model that does not fit needs one of its own, under
    ``with torch.device("meta")``.
    """
    if not is_overridden("configure_model", module):
        module.configure_model = lambda: _shard(module, device)


def _shard(module: Any, device: torch.device) -> None:
    """Shard the children, and the layers in lists; the module itself shards its own and shared parameters."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):  # in an earlier fit
        return
    # As in DDP rank 0 sends all tensors, before each rank keeps its shards.
    for tensor in [*module.parameters(), *buffers_of(module).values()]:
        whole = tensor.detach().to(device)
        broadcast_flat_([whole], broadcast_)
        with torch.no_grad():
            tensor.copy_(whole)
    lists = [layer for layer in module.modules() if isinstance(layer, (nn.ModuleList, nn.Sequential))]
    children, in_lists = set(_layers_in(module)), {layer for layers in lists for layer in _layers_in(layers)}
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
    # Layers outside of lists stay gathered until the backward pass, as a root does: a loss may use their weights.
    for layer in alone:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer in in_lists)
    if not all(isinstance(parameter, DTensor) for parameter in module.parameters()):
        fully_shard(module, mesh=mesh)
        for name in STEPS:
            register_fsdp_forward_method(module, name)


def _layers_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module; in place of a list or dictionary of layers the layers in it."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _layers_in(child)
        elif not isinstance(child, PARAMETERS):
            yield child


# Checks, and weights that are gathered ------------------------------------------------------------------------------


def check_sharded(module: nn.Module, mesh: NodeMesh) -> None:
    """Check that each trained parameter is sharded over exactly the ranks of this node.

    Raises:
        ConfigurationError: one is not; names it.
    """
    ranks = set(mesh.topology.nodes[mesh.topology.node_of(dist.get_rank())])
    for name, parameter in module.named_parameters():
        over = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
        if not over <= ranks or (parameter.requires_grad and len(ranks) > 1 and over != ranks):
            raise ConfigurationError(
                f"{name!r} is sharded over ranks {sorted(over)}, and this node has {sorted(ranks)}: it would be sent "
                "between nodes in every forward pass, or its gradient would be that of one rank alone. In "
                'configure_model give each fully_shard mesh=self.device_mesh["data_parallel"], and end with '
                "fully_shard(self, mesh=...), which shards the parameters of no block."
            )


def check_reduced(module: nn.Module) -> None:
    """Check after a backward pass that FSDP has reduced all gradients.

    In manual optimization it does not reduce the gradients of the module's own parameters, and of parameters that
    layers share: these are gathered for `training_step`, which has not ended.

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

    After a validation the next forward pass would use them, although the shards have other values by then.
    """
    for layer in module.modules():
        if isinstance(layer, FSDPModule):
            layer.reshard()


@torch.no_grad()
def equalise_(module: nn.Module, tensors: LocalTensors, group: dist.ProcessGroup | None) -> None:
    """Give all nodes the weights and buffers of the first node, if they differ.

    In place:
        Parameters and buffers.

    Collective: the ranks of the group, which have the same shards; two numbers, and the tensors if these differ.
    """
    shards: list[Tensor] = [tensors.of(parameter).detach() for parameter in module.parameters()]
    shards += buffers_of(module).values()
    if shards and dist.get_world_size(group) > 1 and any(differ([shards], group, shards[0].device)):
        for tensor in shards:  # one by one: all tensors together would be a second copy of the shard
            broadcast_flat_([tensor], lambda flat: broadcast_(flat, group))
