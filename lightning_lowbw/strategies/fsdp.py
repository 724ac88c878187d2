"""`ShardedStrategy`: a model that is sharded over the ranks of each node, and a method that works between nodes.

After FSDP's reduce-scatter each rank has its shard of the node's mean gradient. Its peers are the ranks with the same
shard in the other nodes; a `LocalView` gives the method plain tensors. The peers do not receive what another shard of
the node has found (an inf or NaN, a signal), so the ranks of a node exchange that first.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import check_flag, code_of, names_arguments
from lightning_lowbw.comm.agreement import agree, failing_together
from lightning_lowbw.comm.collectives import broadcast_flat_
from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Topology, TopologyChoice, check_choice, resolve
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method, Where, as_method
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies import checks, shards
from lightning_lowbw.strategies.base import buffers_by_optimizer
from lightning_lowbw.strategies.callback_agreement import agree_on_weights_
from lightning_lowbw.strategies.checkpoint import CheckpointedStrategy, by_rank, states_of
from lightning_lowbw.strategies.keywords import as_timeout
from lightning_lowbw.strategies.sharding import (
    NodeMesh,
    check_reduced,
    check_sharded,
    equalise_,
    install_default,
    make_node_mesh,
    remove_default,
    reshard_,
)
from lightning_lowbw.strategies.shared_buffers import share_, statistics_of
from lightning_lowbw.strategies.step_hooks import clips_before_exchange, scaler_of
from lightning_lowbw.sync.checks import raise_at_other_batches
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.local_view import DTensor, LocalTensors, LocalView, Shard, local_parameters
from lightning_lowbw.sync.state import Chunk, merge_states, reshard
from lightning_lowbw.sync.status import any_of, first_fault, flags, read_flags
from lightning_lowbw.sync.synchronizer import Synchronizer, raise_fault


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
        offload_state: whether the state of a method that averages weights (the last consensus, the outer momentum,
            residuals) is in pinned memory of the host between averages, and on the device only during an average.
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

    Example:
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
        offload_state: bool = False,
        resume: shards.Needs = "exact",
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
        check_flag("offload_state", offload_state)
        if offload_state and not self.method.averages_weights:
            raise ConfigurationError(
                "offload_state=True: this method uses its state in every step, and moving that over the bus would take "
                "longer than the exchange. Leave it out, or average weights: LocalSGD(k_steps=...)."
            )
        self.ledger = TrafficLedger()
        self._options = {
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "offload_state": offload_state,
            "resume": resume,
        }
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
            rank_zero_info(f"{name}: nodes {shown}; each holds the model once, sharded over its ranks.")
        if fitting and topology.num_nodes == 1:
            rank_zero_warn(
                f"{name}, topology={self.topology!r}: all ranks are on one node, so there is no slow network between "
                "nodes: this trains as FSDP."
            )

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
        self._make_workers(trainer.lightning_module)
        checks.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
        self._begin_checkpoints()
        self._clipping.install(self.precision_plugin, self.worker_of, self._check_clipping)
        self._insert_first_callback(trainer)

    def _make_workers(self, module: pl.LightningModule) -> None:
        """Make a worker for each optimizer, which sees this rank's shards.

        Collective: all ranks.
        """
        peers = Peers(self.mesh.peers(), self.ledger, nodes=self._nodes)
        named = local_parameters(module.named_parameters(), self._tensors)
        numels = {self._tensors.of(parameter): parameter.numel() for parameter in module.parameters()}
        with failing_together():
            buffers = buffers_by_optimizer(module, self.optimizers) if self.method.averages_weights else {}
            for optimizer in self.optimizers:
                view = LocalView(optimizer, self._tensors)
                worker = self.method.make_synchronizer(view.local, named, peers, buffers.get(id(optimizer)))
                worker.params.whole_numels = numels
                vars(worker.params).pop("small_numel", None)  # computed from the sizes of shards, for the fragments
                if isinstance(worker, LocalSync):
                    worker.is_offloaded = self._options["offload_state"]
                    worker.meet = agree_in_world
                self._workers[id(optimizer)], self._views[worker] = worker, view

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        agree("data", {"number of batches per epoch": self.trainer.num_training_batches})
        self._guard.watch(self.optimizers)  # not before: what loads their state takes an empty step
        self.signals.defer(self.trainer)
        self._start_workers(self.mesh.topology.num_nodes)
        for worker in self.replicas:
            worker.begin_local()

    @override
    def teardown(self) -> None:
        for view in self._views.values():
            view.release()
        if self.lightning_module is not None:
            remove_default(self.lightning_module)
            reshard_(self.lightning_module)  # whoever looks at the weights finds all of them sharded
        super().teardown()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.note_batch()
        self._restore_random_numbers()
        self._hide_consensus()  # the last view may not have ended

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.mesh.topology.ranks_per_node > 1:
            check_reduced(self.trainer.lightning_module)

    @override
    @torch.no_grad()
    def _exchange_unscaled(self, worker: Synchronizer) -> None:
        self._exchange(worker)

    @override
    def _exchange(self, worker: Synchronizer, skip_nonfinite: bool = False) -> bool:
        view = self._views[worker]
        view.pull()
        if worker.is_local:
            return worker.exchange()
        view.take_gradients()
        worker.list_gradients()
        worker.check_gradients()  # in each step, because a shard accumulates only what is finite in all
        agree_in_node(worker, self.mesh.node())
        if clips_before_exchange(worker, self.trainer):
            self._clipping.clip(self.trainer, view.optimizer)  # by the norm of the node's gradient, all shards together
        is_taken = worker.exchange(applies=not self._guard.is_gradient_seen(self.trainer, view.optimizer))
        view.give_gradients()
        return is_taken

    @override
    def _end_step(self, worker: Synchronizer) -> None:
        self._views[worker].release()
        reshard_(self.trainer.lightning_module)  # what a forward pass without a backward pass has gathered is outdated
        self.signals.read_requests(worker, self.trainer)

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
        if not self.workers or module is None or module._trainer is None or self._is_fit_over or self.view.is_shown:
            return
        reshard_(module)
        if self.is_interrupted:
            return
        if not self.replicas:
            names = statistics_of(module)
            statistics = {name: buffer for name, buffer in module.named_buffers() if name in names}
            share_(statistics, self.ledger, self.root_device)
            return
        for worker in self.replicas:
            if not worker.is_consensus:
                agree_in_world(worker)
            elif worker.peers.num_ranks > 1 and worker.method.sends_changes:
                check_last_faults(worker)  # also ranks whose shards are empty, and which have no flag
        self.view.show(self.replicas, module, is_interrupted=False)
        if self.view.is_shown:
            for worker in self.replicas:
                every = (*worker.buffers.floating.values(), *worker.buffers.counts)
                broadcast_flat_(every, lambda flat: dist.broadcast(flat, group=self.mesh.node(), group_src=0))
            self.view.remember_shown(module)

    def _hide_consensus(self) -> None:
        if self.view.is_shown:
            reshard_(self.trainer.lightning_module)
            self.view.hide()

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
        """Average weights that differ between nodes after the last average: a callback may have put in its own."""
        self.lost_peers.come_to_end(self.trainer.global_step, self._timeout)
        self._check_last_faults()
        if not self.replicas:
            checks.agree_on_hyperparameters(self.trainer)
        for worker in self.replicas:
            own = [each.detach() for each in worker.parameters() if each.numel()]
            agree_on_weights_(own, worker.peers, worker.device)
        super().on_train_end()

    def _check_last_faults(self) -> None:
        for worker in () if self._is_fit_over or self.is_interrupted else self.workers:
            if isinstance(worker, GradientSync) and worker.peers.num_ranks > 1:
                check_last_faults(worker)

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if not self.trainer.sanity_checking:  # after which there may be nothing to train
            self._hide_consensus()
        reshard_(self.trainer.lightning_module)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_interrupted:  # the shards of others are not to be had; `save_checkpoint` says so
            return {}
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._check_last_faults()
            self.show_consensus()
        return self.view.copied(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.is_interrupted:
            return {}
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
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
        if not self.trainer.validating:
            self._hide_consensus()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with failing_together():
            if self.is_global_zero:
                shards.put_back(os.fspath(checkpoint_path), shards.folder_of(checkpoint_path))
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.trainer.state.fn == TrainerFn.FITTING and "global_step" in checkpoint:
            for view in self._views.values():
                view.pull()
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
    def _find(
        self, metadata: Mapping[str, Any], path: _PATH
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any] | None, str]:
        """Return, where the nodes are others, the mean over the nodes of what they had of this rank's rows."""
        nodes, mesh = metadata["nodes"], self.mesh
        size, own = len(nodes[0]), Chunk(mesh.coordinate, mesh.topology.ranks_per_node)
        if nodes == self._nodes:
            return super()._find(metadata, path)
        load = functools.partial(shards.load, self.checkpoint_io, path, metadata)
        torn: dict[int, str] = {}

        def mean_of(number: int, coordinate: int) -> Mapping[str, Any]:
            return merge_states(states_of(number, [node[coordinate] for node in nodes], load, torn))

        if size == own.size:
            found = [mean_of(number, own.number) for number in range(len(self.workers))]
        else:
            shapes = _shapes(self.trainer.lightning_module, path)
            found = []
            for number, worker in enumerate(self.workers):
                names = [worker.name_of(p) for group in worker.optimizer.param_groups for p in group["params"]]
                states = (mean_of(number, coordinate) for coordinate in range(size))
                found.append(reshard(states, names, shapes, size, own))
        return found, None, by_rank([torn[rank] for rank in sorted(torn)])


def _between_nodes(method: Method) -> Method:
    """Return a method for flat peers, of which each is a node.

    Raises:
        ConfigurationError: it cannot be used with shards, with the reason.
    """
    when, where = method.when, method.where
    rule, fragments = (getattr(when, name, None) for name in ("rule", "num_fragments"))
    refused = {
        "sparsity='auto'": isinstance(when, EveryStep)
        and when.is_auto
        and "it measures steps of DDP. Give the numbers, as in DGC(sparsity=[0.99], rampup_begin_step=100)",
        f"rule={rule!r}": rule in ("fleet", "adacomm")
        and "it follows the loss, which differs between the shards of a node. Take 'fixed' or 'qsr'",
        f"num_fragments={fragments!r}": fragments not in (None, 1)
        and "parts are balanced by bytes, which differ between shards. Leave it out",
        f"algorithm={where.algorithm!r}": where.algorithm not in (None, "sharded")
        and "each rank exchanges its shard with those of the other nodes. Leave it out",
        f"inter_dtype={where.inter_dtype!r}": where.inter_dtype != "float32"
        and f"there is no dense sum on two levels. Take QuantizedGradients({where.inter_dtype!r})",
    }
    for given, reason in refused.items():
        if reason:
            raise ConfigurationError(f"{given} with a sharded model: {reason}.")
    return Method(when=when, what=method.what, where=Where())


def _shapes(module: torch.nn.Module, path: _PATH) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole parameters by name.

    Raises:
        ConfigurationError: alike on all ranks; one is not sharded by rows.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and Shard(0) not in parameter.placements:
            raise ConfigurationError(
                f"{path} was written by nodes of another number of ranks, and {name!r} is not sharded by rows, which "
                "alone are dealt out anew. Resume with nodes of that size (any number of them), or "
                f"{shards.GO_ON}."
            )
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


# Messages between shards --------------------------------------------------------------------------------------------


def agree_in_node(worker: Synchronizer, node: dist.ProcessGroup | None) -> None:
    """Exchange requests, and faults of the gradients, with the other shards of the node.

    Collective: the ranks of the node, blocking; five numbers.
    """
    fault = worker.fault if isinstance(worker, GradientSync) else None
    is_faulty, worker.requests = _any_in(node, worker, fault, worker.requests)
    if isinstance(worker, GradientSync) and fault is not None:
        worker.fault = is_faulty
    if worker.peers.num_ranks == 1:
        worker.agree_on(worker.requests)


def agree_in_world(worker: LocalSync) -> None:
    """Exchange requests, and faults of the weights, between all ranks before an average.

    Collective: all ranks, blocking; five numbers.

    Raises:
        NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
    """
    nonfinite = worker.nonfinite_weights([each for each in worker.parameters() if each.requires_grad])
    fault = any_of([*worker.late_flags(), *nonfinite.values()], worker.device)
    is_faulty, worker.requests = _any_in(None, worker, fault, worker.requests)
    if is_faulty:
        own = worker.describe_late_fault() or worker.describe_weights(nonfinite, worker.step)
        raise_fault(first_fault(own, worker.fault_group))


def check_last_faults(worker: Synchronizer) -> None:
    """Report what the last step has found after its status, to all ranks: also those with other shards than the peers.

    Collective: all ranks, blocking; five numbers.

    Raises:
        NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
    """
    if _any_in(None, worker, any_of(worker.late_flags(), worker.device))[0]:
        raise_fault(first_fault(worker.describe_late_fault(), worker.fault_group))
    worker.forget_late_faults()


def _any_in(
    group: dist.ProcessGroup | None, worker: Synchronizer, fault: Tensor | None, requests: int = 0
) -> tuple[Tensor, int]:
    """Return whether any rank of a group has a fault, on the device, and what any of them requests.

    Raises:
        DisagreementError: on all ranks of the group; they are at different batches.
    """
    message = flags(requests, worker.device, fault, worker.batch)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    _, requests, is_same_batch = read_flags(message)
    if not is_same_batch:
        raise_at_other_batches(worker.batch, worker.step, group)
    return message[0], requests
