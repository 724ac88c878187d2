"""`ShardedStrategy`: a model that is sharded over the ranks of each node, and a method that works between nodes.

After FSDP's reduce-scatter each rank has its shard of the node's mean gradient. Its peers are the ranks with the same
shard in the other nodes; a `LocalView` gives the method plain tensors. The peers do not receive what another shard of
the node has found (an inf or NaN, a signal), so the ranks of a node exchange that first.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import code_of, names_arguments
from lightning_lowbw.comm.agreement import agree, differ, failing_together
from lightning_lowbw.comm.collectives import TrafficLedger, WeakGroup, broadcast_flat_, group_of
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Topology, TopologyChoice, check_choice, resolve
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method, Where, as_method
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.base import buffers_by_optimizer
from lightning_lowbw.strategies.checkpoint import GO_ON, CheckpointedStrategy, LoadShard
from lightning_lowbw.strategies.keywords import Needs, as_timeout
from lightning_lowbw.strategies.shared_buffers import share_, statistics_of
from lightning_lowbw.strategies.step_hooks import clips_before_exchange, scaler_of
from lightning_lowbw.sync.buffers import alike
from lightning_lowbw.sync.checks import raise_at_other_batches
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.local_view import DTensor, LocalTensors, LocalView
from lightning_lowbw.sync.status import first_fault, flags, read_flags
from lightning_lowbw.sync.synchronizer import Synchronizer, raise_fault

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


@names_arguments
class ShardedStrategy(CheckpointedStrategy, ModelParallelStrategy):
    """FSDP2 inside each node, a method between nodes: for models that do not fit on one GPU.

    Each node holds the model once, sharded over its ranks: by the module's own `configure_model`, written as for
    Lightning's `ModelParallelStrategy` (``fully_shard(layer, mesh=self.device_mesh["data_parallel"])``); where it has
    none, each layer of every `nn.ModuleList` and `nn.Sequential` is sharded, and each other child. After FSDP's
    reduce-scatter each rank has its shard of the node's mean gradient; the method exchanges this, or the shard of the
    weights, with the ranks that have the same shard in other nodes. N, the number of participants, is that of nodes.

    Args:
        method: when the nodes communicate, and what they send; a `Method`, such as `DGC(...)` or `LocalSGD(...)`
            return, or a mapping. k is that of each shard.
        topology: which ranks share a node: "auto" (by the launcher and the host names), a number of ranks per node,
            the ranks of each node, or a `Topology`. None: the method's own, or "auto". Nodes are of one size.
        save_distributed_checkpoint: as of `ModelParallelStrategy`: a folder in which each rank writes its shards, or
            one file, for which rank 0 gathers all weights in its memory.
        resume: as of `Strategy`.
        process_group_backend: of torch.distributed; None: by the device.
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

    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        topology: TopologyChoice | None = None,
        save_distributed_checkpoint: bool = True,
        resume: Needs = "exact",
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=None if timeout is None else as_timeout(timeout),
        )
        given = as_method(method, topology)
        own = given.where.topology
        self.topology = topology if topology is not None else own if own != "flat" else "auto"
        if check_choice(self.topology) is None and self.topology == "flat":
            raise ConfigurationError(
                "topology='flat': a model is sharded over the ranks of a node. Give 'auto', a number of ranks per "
                "node, the ranks of each node such as [[0, 1], [2, 3]], or a Topology."
            )
        self.method = _between_nodes(given)
        self.ledger = TrafficLedger()
        self._options = {"save_distributed_checkpoint": save_distributed_checkpoint, "resume": resume}
        self._workers = {}
        self._mesh: NodeMesh | None = None
        self._make_parts()
        self._begin_state()

    @override
    def _begin_state(self) -> None:
        super()._begin_state()
        self._workers.clear()
        self._views: dict[Synchronizer, LocalView] = {}
        self._tensors = LocalTensors()

    def __repr__(self) -> str:
        defaults = inspect.signature(ShardedStrategy).parameters
        chosen = {name: value for name, value in self._options.items() if value != defaults[name].default}
        shown = ", ".join(f"{name}={value!r}" for name, value in {"topology": self.topology, **chosen}.items())
        return f"{type(self).__name__}({code_of(self.method)}, {shown})"

    @property
    def mesh(self) -> NodeMesh:
        """The ranks of this rank's node, and those with the same shards; from the start of a fit on."""
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
        trainer, module, name = self.trainer, self.lightning_module, type(self).__name__
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._agree_on_fit({"topology": repr(check_choice(self.topology) or self.topology)})
        if fitting and (averaging := checks.callbacks_of(trainer, *checks.AVERAGING)):
            raise ConfigurationError(
                f"{type(averaging[0]).__name__}: it averages copies of whole weights, and here each rank has shards. "
                "Leave it out, or use a strategy that does not shard the model."
            )
        topology = resolve(self.topology, self.world_size) or Topology.blocks(self.world_size, 1)
        self._mesh = make_node_mesh(topology, self.global_rank, self.root_device.type, self._timeout)
        self._device_mesh = module._device_mesh = self._mesh.mesh
        install_default(module, self.root_device)
        reshard_(module)  # a forward pass since the last fit has gathered weights
        if fitting:
            shown = ", ".join(str(list(node)) for node in topology.nodes)
            alone = " There is no slow network between nodes: this trains as FSDP." if topology.num_nodes == 1 else ""
            rank_zero_info(f"{name}: nodes {shown}; each holds the model once, sharded over its ranks.{alone}")

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.ledger = TrafficLedger()
            self.signals.begin_fit()
            self._begin_state()
            assert self.model is not None
            checks.check_model(self.model)
            with failing_together():
                check_sharded(self.model, self.mesh)
        super().setup(trainer)
        if not fitting:
            return
        if scaler_of(self.precision_plugin) is not None:
            raise ConfigurationError(
                "A GradScaler with a sharded model: each rank would skip steps alone. Give precision='bf16-mixed'."
            )
        equalise_(trainer.lightning_module, self._tensors, self.mesh.peers())
        self._make_workers()
        checks.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
        self._begin_checkpoints()
        self._clipping.install(self.precision_plugin, self.worker_of, self._check_clipping, self._end_hooks)
        self._insert_first_callback(trainer)

    @property
    @override
    def _equals(self) -> Peers:
        return Peers(self.mesh.peers(), self.ledger, nodes=self._nodes)

    @override
    def _optimizer_of(self, worker: Synchronizer) -> Optimizer:
        return self._views[worker].optimizer

    @override
    def _own_part(self, parameter: Tensor) -> Tensor:
        return self._tensors.of(parameter)  # type: ignore[arg-type]

    @override
    def _make_workers(self, kept: Mapping[int, Synchronizer] = MappingProxyType({})) -> None:
        """Make workers that see this rank's shards."""
        module, optimizers, peers = self.lightning_module, self._trained_optimizers, self._equals
        assert module is not None
        self._views = {worker: view for worker, view in self._views.items() if worker in kept.values()}
        named = [(name, self._tensors.of(parameter)) for name, parameter in module.named_parameters()]
        numels = {self._tensors.of(parameter): parameter.numel() for parameter in module.parameters()}
        with failing_together():
            buffers = buffers_by_optimizer(module, optimizers) if self.method.averages_weights else {}
            for optimizer in optimizers:
                if id(optimizer) in kept:
                    self._workers[id(optimizer)] = kept[id(optimizer)]
                    continue
                view = LocalView(optimizer, self._tensors)
                worker = self.method.make_synchronizer(view.local, named, peers, buffers.get(id(optimizer)))
                worker.params.whole_numels = numels
                vars(worker.params).pop("small_numel", None)  # computed from the sizes of shards, for the fragments
                if isinstance(worker, LocalSync):
                    worker.meet = agree_in_world
                self._workers[id(optimizer)], self._views[worker] = worker, view

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        agree("data", {"number of batches per epoch": self.trainer.num_training_batches})
        self._guard.watch(self.trainer.lightning_module)  # not before: what loads optimizers' state takes an empty step
        self.signals.defer(self.trainer)
        self._pull()
        self._agree_on_states(self.workers)
        self._start_workers(self.mesh.topology.num_nodes)
        for worker in self.replicas:
            worker.begin_local()

    @override
    def _begin_renewed(self) -> None:
        self._prepare_workers(self.mesh.topology.num_nodes)
        for worker in self.replicas:
            worker.begin_local()

    @override
    def teardown(self) -> None:
        for view in self._views.values():
            view.release()
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("configure_model", None)  # of `install_default`
            reshard_(self.lightning_module)  # whoever looks at the weights finds all of them sharded
        super().teardown()

    def _pull(self) -> None:
        """Look at the shards and the options of the parameters anew: others may have changed them since a step."""
        for view in self._views.values():
            view.pull()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.mesh.topology.ranks_per_node > 1:
            check_reduced(self.trainer.lightning_module)

    @override
    @torch.no_grad()
    def _exchange_unscaled(self, worker: Synchronizer, *, is_after_hooks: bool = False) -> None:
        self._exchange(worker)

    @override
    def _exchange(self, worker: Synchronizer, skip_nonfinite: bool = False) -> bool:
        view = self._views[worker]
        view.pull()
        if worker.is_local:
            view.drop_frozen_gradients()
            return worker.exchange()
        view.pull_gradients()
        worker.list_gradients()
        worker.check_gradients()  # in each step, because a shard accumulates only what is finite in all
        if worker.peers.num_ranks > 1:
            agree_in_node(worker, self.mesh.node())
        if clips_before_exchange(worker, self.trainer):
            self._clipping.clip(self.trainer, view.optimizer)  # by the norm of the node's gradient, all shards together
        is_taken = worker.exchange(applies=not self._guard.is_gradient_seen(self.trainer, view.optimizer))
        worker.step_exchanged()
        view.push_gradients()
        view.push()
        return is_taken

    @override
    def _end_step(self, worker: Synchronizer) -> None:
        view = self._views[worker]
        if not worker.is_local:
            view.push_gradients()  # those that the optimizer was not to see
        view.release()
        reshard_(self.trainer.lightning_module)  # what a forward pass without a backward pass has gathered is outdated
        if worker.peers.num_ranks > 1:
            self.signals.read_requests(worker, self.trainer)
        else:  # no peer is told anything
            self.signals.end_step(worker, self.trainer)

    # What the first callback calls ------------------------------------------------------------------------------

    @override
    def end_batch(self) -> None:
        reshard_(self.trainer.lightning_module)  # callbacks may change weights, or unfreeze layers
        self.signals.save_if_due(self.trainer)

    @override
    def show_consensus(self) -> None:
        """Put the mean of the nodes into the model, until the next batch, the end of validation or of a save.

        The next forward pass gathers the shards anew. The ranks of a node have buffers of their own, too: whoever looks
        finds those of its first rank, or the running statistics of rank 0 where gradients are exchanged.
        """
        module = self.lightning_module
        if module is None or module._trainer is None or self._is_fit_over or self.is_consensus_shown:
            return
        if not self.workers and self.trainer.state.fn != TrainerFn.FITTING:
            return
        reshard_(module)
        if self.is_interrupted:
            return
        self._pull()
        if not self.replicas:
            names = statistics_of(module)
            statistics = {name: buffer for name, buffer in module.named_buffers() if name in names}
            share_(statistics, self.ledger, self.root_device)
            return
        for worker in self.replicas:
            if not worker.is_consensus:
                agree_in_world(worker)
            elif worker.peers.num_ranks > 1 and worker.compressed is not None:
                check_last_faults(worker)  # also ranks whose shards are empty, and which have no flag
        self._show_mean()
        for worker in self.replicas:
            if worker.own is not None:
                buffers = alike(worker.averaged_buffers(), self.mesh.node()).values()
                broadcast_flat_(buffers, lambda flat: dist.broadcast(flat, group=self.mesh.node(), group_src=0))
                worker.note_shown()

    @override
    def _hide_mean(self, *, adopts: bool = False) -> None:
        if any(worker.is_shown for worker in self.replicas):
            reshard_(self.trainer.lightning_module)
            self._pull()
            super()._hide_mean(adopts=adopts)

    @override
    def _agree_on_weights(self, *, with_buffers: bool = False) -> None:
        if not self._is_fit_over:  # then whole tensors
            reshard_(self.trainer.lightning_module)
            self._pull()
            super()._agree_on_weights(with_buffers=with_buffers)

    @override
    def _peers_of(self, worker: LocalSync) -> Peers:
        return worker.peers

    @override
    def agree_on_metrics(self) -> None:
        reshard_(self.trainer.lightning_module)  # callbacks may put weights in after a validation, or take them out
        super().agree_on_metrics()

    @override
    def end_epoch(self) -> None:
        if self.replicas:
            self.agree_on_metrics()
        elif math.isfinite(self.trainer.num_training_batches):  # else the others may be in a step
            self.agree_on_metrics()
            self.show_consensus()

    # The end, validation and checkpoints ------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self.signals.settle()
        self._check_late_faults()
        if not self.replicas:
            checks.agree_on_hyperparameters(self.trainer)
            self._check_unowned()
        super().on_train_end()

    @override
    def _check_late_faults(self) -> None:
        for worker in () if self._is_fit_over or self.is_interrupted else self.workers:
            if isinstance(worker, GradientSync) and worker.peers.num_ranks > 1:
                check_last_faults(worker)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if is_overridden("on_validation_model_eval", self.trainer.lightning_module):
            self._hide_mean()  # its counterpart takes out what was put in before the consensus was shown
        reshard_(self.trainer.lightning_module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_interrupted:  # the shards of others are not to be had; `save_checkpoint` says so
            return {}
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._renew_before_save()
            self._check_late_faults()
            self.show_consensus()
            self._agree_on_weights()
        return self._copied(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.is_interrupted:
            return {}
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if raw not in self._trained_optimizers:  # torch expects a state
            return {}
        with self._guard.allowing(raw):  # of an optimizer without a state, torch takes an empty step
            state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self.is_interrupted:
            rank_zero_warn(
                f"{filepath} is not written: an exception has ended the training of this rank, and the shards of the "
                "others cannot be gathered. Go on from the checkpoint before."
            )
            return
        self._save(checkpoint, filepath, functools.partial(super().save_checkpoint, storage_options=storage_options))
        if not self._is_evaluated:
            self._hide_mean()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.trainer.state.fn == TrainerFn.FITTING and "global_step" in checkpoint:
            self._pull()
            with torch.no_grad():
                self._load_shards(checkpoint, checkpoint_path)
            for view in self._views.values():
                view.push()
        return checkpoint

    @property
    @override
    def _kind(self) -> str:
        return f"{super()._kind} of shards"

    @property
    @override
    def _nodes(self) -> list[list[int]] | None:
        return [list(node) for node in self.mesh.topology.nodes]

    @override
    def _is_renamed(self, filepath: _PATH) -> bool:
        is_folder = self._save_distributed_checkpoint  # which no plugin writes
        return (is_folder and "://" not in str(filepath)) or super()._is_renamed(filepath)

    @override
    def _merged_states(self, metadata: Mapping[str, Any], path: _PATH, load: LoadShard) -> list[Mapping[str, Any]]:
        """Return the mean over the nodes of what they had of this rank's shards."""
        nodes, size = metadata["nodes"], self.mesh.topology.ranks_per_node
        if len(nodes[0]) != size:
            raise ConfigurationError(
                f"{path} was written by nodes of {len(nodes[0])} ranks, and these have {size}. Resume "
                f"with any number of nodes of {len(nodes[0])} ranks, or {GO_ON}."
            )
        ranks = [node[self.mesh.coordinate] for node in nodes]
        return [self._mean_of(number, ranks, load) for number in range(len(self.workers))]


def _between_nodes(method: Method) -> Method:
    """Return a method for flat peers, of which each is a node.

    Raises:
        ConfigurationError: it cannot be used with shards, with the reason.
    """
    when, where = method.when, method.where
    rule, fragments = (getattr(when, name, None) for name in ("rule", "num_fragments"))
    refused = ""
    if isinstance(when, EveryStep) and when.is_auto:
        refused = "sparsity='auto' measures steps of DDP. Give the numbers: DGC(sparsity=[0.99], rampup_begin_step=100)"
    elif rule in ("fleet", "adacomm"):
        refused = f"rule={rule!r} follows the loss, which differs between the shards of a node. Take 'fixed' or 'qsr'"
    elif fragments not in (None, 1):
        refused = f"num_fragments={fragments!r}: parts are balanced by bytes, which differ between shards. Leave it out"
    elif where.algorithm not in (None, "sharded") or where.inter_dtype != "float32":
        refused = f"{where}: each rank exchanges its shard. Leave algorithm out; for fewer bits take QuantizedGradients"
    if refused:
        raise ConfigurationError(f"With a sharded model, {refused}.")
    return Method(when=when, what=method.what, where=Where())


# Messages between shards --------------------------------------------------------------------------------------------


def agree_in_node(worker: Synchronizer, node: dist.ProcessGroup | None) -> None:
    """Exchange requests, batches, and faults of the gradients, with the other shards of the node.

    Collective: the ranks of the node; five numbers, which the worker's status tells the peers without a wait.
    """
    fault = worker.fault if isinstance(worker, GradientSync) else None
    worker.node_flags = flags(worker.requests, worker.device, fault, worker.batch)
    dist.all_reduce(worker.node_flags, op=dist.ReduceOp.MAX, group=node)


def agree_in_world(worker: LocalSync) -> None:
    """Exchange requests, and faults of the weights, between all ranks before an average.

    Collective: all ranks, blocking; five numbers.

    Raises:
        NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
    """
    faults = worker.faults_of([each for each in worker.parameters() if each.requires_grad])
    is_faulty, worker.requests = _any_in_world(worker, faults.any(worker.device), worker.requests)
    if is_faulty:
        raise_fault(first_fault(faults.first(), worker.fault_group))


def check_last_faults(worker: Synchronizer) -> None:
    """Report what the last step has found after its status, to all ranks: also those with other shards than the peers.

    Collective: all ranks, blocking; five numbers.

    Raises:
        NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
    """
    faults = worker.late_faults()
    if _any_in_world(worker, faults.any(worker.device))[0]:
        raise_fault(first_fault(faults.first(), worker.fault_group))
    worker.forget_late_faults()


def _any_in_world(worker: Synchronizer, fault: Tensor, requests: int = 0) -> tuple[bool, int]:
    """Return whether any rank has a fault, and what any of them requests; waits for the device.

    Raises:
        DisagreementError: on all ranks; they are at different batches.
    """
    message = flags(requests, worker.device, fault, worker.batch)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    is_faulty, requests, is_same_batch = read_flags(message)
    if not is_same_batch:
        raise_at_other_batches(worker.batch, worker.step, None)
    return is_faulty, requests


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
    node: WeakGroup
    peers: WeakGroup


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
    return NodeMesh(topology, mesh, coordinate, WeakGroup(nodes[node]), WeakGroup(between[coordinate]))


# Modules without `configure_model` --------------------------------------------------------------------------------


def install_default(module: Any, device: torch.device) -> None:
    """Give a module that has none a `configure_model` that shards it, until `teardown`.

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


def _shard(module: Any, device: torch.device) -> None:
    """Shard the children, and the layers in lists; the module itself takes what several of them share, and its own."""
    if any(isinstance(each, DTensor) for each in module.parameters()):  # in an earlier fit
        return
    for tensor in [*module.parameters(), *module.buffers()]:  # as DDP: rank 0's, before each keeps its shard of it
        whole = tensor.detach().to(device)
        broadcast_flat_([whole], lambda flat: dist.broadcast(flat, 0))
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
    ranks = set(mesh.topology.nodes[mesh.topology.node_of(dist.get_rank())])
    for name, parameter in module.named_parameters():
        others = set(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else set()
        if not others <= ranks or (parameter.requires_grad and len(ranks) > 1 and others != ranks):
            raise ConfigurationError(
                f"{name!r} is sharded over ranks {sorted(others)}, and this node has {sorted(ranks)}: it would be sent "
                "between nodes in every forward pass, or its gradient would be that of one rank alone. In "
                'configure_model give each fully_shard mesh=self.device_mesh["data_parallel"], and end with '
                "fully_shard(self, mesh=...), which takes what no block has."
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

    Collective: the ranks of the group, which have the same shards; the shapes of buffers, two numbers, and the tensors
    where these differ.
    """
    own: list[Tensor] = [tensors.of(parameter).detach() for parameter in module.parameters()]
    own += alike(dict(module.named_buffers()), group).values()
    if own and dist.get_world_size(group) > 1 and any(differ([own], group, own[0].device)):
        for tensor in own:  # one by one: all of them together would be a second copy of the shard
            broadcast_flat_([tensor], lambda flat: dist.broadcast(flat, group=group, group_src=0))
